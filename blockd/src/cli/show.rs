//! Replies as text for people: tables, and lists of facts.

use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};

use crate::config::units::{show_duration, show_size};
use crate::control::api::{CheckReply, ListReply, SnapshotsReply, UsageReply};
use crate::control::view::{DiskState, DiskView, HolderView, StatusReply, UsageView};

fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header);
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    for index in right {
        if let Some(column) = table.column_mut(*index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The lines of a table without blanks at their ends.
fn lines(table: &Table) -> String {
    let text = table.to_string();
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// A table of texts.
pub fn table_of<'a>(header: &[&str], rows: impl Iterator<Item = [&'a str; 3]>) -> String {
    let mut table = table(header, &[]);
    table.add_rows(rows);
    lines(&table)
}

/// `name: value` lines, aligned.
fn facts(facts: &[(&str, String)]) -> String {
    let width = facts.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 1;
    facts.iter().map(|(name, value)| format!("{:width$} {value}\n", format!("{name}:"))).collect()
}

fn optional<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

/// Seconds as the API counts them.
fn seconds(seconds: f64) -> String {
    show_duration(Duration::try_from_secs_f64(seconds).unwrap_or_default())
}

/// `2025-11-30 19:55:26Z (3 m 2 s ago)`.
fn moment(unix_ms: u64) -> String {
    let ago = crate::clock::unix_ms().saturating_sub(unix_ms);
    format!("{} ({} ago)", date(unix_ms), show_duration(Duration::from_millis(ago)))
}

/// `2025-11-30 19:55:26Z`.
pub fn date(unix_ms: u64) -> String {
    let (days, second) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    // Years that begin in March, so that the leap day is the last; 719,468 days from 0000-03-01 to 1970.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next_year) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next_year;
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}Z")
}

fn state(disk: &DiskView) -> &'static str {
    match disk.state {
        DiskState::Detached => "detached",
        DiskState::Attached => "attached",
        DiskState::Recovering => "recovering",
        DiskState::Detaching => "detaching",
        DiskState::HeldElsewhere => "held elsewhere",
        DiskState::Stopped => "stopped",
        DiskState::Deleting => "deleting",
    }
}

/// A host for people: its name, or its identity when it has none.
pub fn host(holder: &HolderView) -> String {
    match holder.hostname.as_str() {
        "" => holder.host.to_string(),
        name => name.to_owned(),
    }
}

/// `blockd list`.
pub fn list(reply: &ListReply) -> String {
    disks(&reply.disks)
}

fn disks(disks: &[DiskView]) -> String {
    let header = ["NAME", "SIZE", "STATE", "HOLDER", "UNDRAINED", "STORED", "SNAPSHOTS"];
    let mut table = table(&header, &[1, 4, 5, 6]);
    for disk in disks {
        table.add_row([
            disk.name.to_string(),
            show_size(disk.size_bytes),
            state(disk).to_owned(),
            optional(disk.holder.as_ref(), host),
            optional(disk.undrained_bytes, show_size),
            optional(disk.stored_bytes, show_size),
            disk.snapshots.to_string(),
        ]);
    }
    lines(&table)
}

/// `blockd show`.
pub fn disk(disk: &DiskView) -> String {
    let state = match &disk.state_reason {
        Some(reason) => format!("{}: {reason}", state(disk)),
        None => state(disk).to_owned(),
    };
    let mut list = vec![
        ("name", disk.name.to_string()),
        ("id", disk.id.to_string()),
        ("state", state),
        ("size", show_size(disk.size_bytes)),
        ("durability", format!("{:?}", disk.durability).to_lowercase()),
    ];
    let mut add = |name, value: Option<String>| {
        if let Some(value) = value {
            list.push((name, value));
        }
    };
    add("max lag", disk.max_lag_ms.map(|ms| show_duration(Duration::from_millis(ms))));
    add("created", disk.created_unix_ms.map(moment));
    add(
        "parent",
        disk.parent.as_ref().map(|parent| {
            let disk =
                parent.name.as_ref().map_or_else(|| parent.disk.to_string(), ToString::to_string);
            let snapshot = parent
                .snapshot_name
                .as_ref()
                .map_or_else(|| parent.snapshot.to_string(), ToString::to_string);
            format!("{disk}@{snapshot}")
        }),
    );
    add(
        "holder",
        disk.holder.as_ref().map(|holder| {
            let since = holder.since_unix_ms.map(|ms| format!(", since {}", moment(ms)));
            let silent = holder.silent_seconds.map(|s| format!(", silent for {}", seconds(s)));
            let (since, silent) = (since.unwrap_or_default(), silent.unwrap_or_default());
            format!("{} (host {}{since}{silent})", host(holder), holder.host)
        }),
    );
    add(
        "undrained",
        disk.undrained_bytes.map(|bytes| match disk.undrained_seconds {
            Some(age) if bytes > 0 => format!("{}, oldest {}", show_size(bytes), seconds(age)),
            _ => show_size(bytes),
        }),
    );
    add("last drained", disk.last_drained_unix_ms.map(moment));
    add("drained lsn", Some(disk.drained_lsn.to_string()));
    add("epoch", Some(disk.epoch.to_string()));
    add("generation", Some(disk.generation.to_string()));
    add("log", disk.log_bytes.map(show_size));
    add("stored", disk.stored_bytes.map(show_size));
    add(
        "blobs",
        disk.blobs.map(|blobs| format!("{blobs}, {} since the checkpoint", disk.tail_blobs)),
    );
    add("map objects", disk.map_objects.map(|objects| objects.to_string()));
    add("snapshots", Some(disk.snapshots.to_string()));
    for attachment in &disk.attachments {
        let access = format!("{:?}", attachment.access).to_lowercase();
        add("attached", Some(format!("{} ({access}) at {}", attachment.target, attachment.uri)));
        add("device", attachment.device.as_ref().map(|device| device.display().to_string()));
        for client in &attachment.clients {
            let since = moment(client.since_unix_ms);
            add("client", Some(format!("{} since {since}", client.peer)));
        }
    }
    facts(&list)
}

/// `blockd usage`.
pub fn usage(reply: &UsageReply) -> String {
    let header = ["NAME", "SIZE", "STORED", "LIVE", "DEAD", "PINNED", "MAP", "SHARED", "OBJECTS"];
    let mut table = table(&header, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let columns: [fn(&UsageView) -> u64; 7] = [
        |disk| disk.size_bytes,
        |disk| disk.stored_bytes,
        |disk| disk.live_bytes,
        |disk| disk.dead_bytes,
        |disk| disk.pinned_bytes,
        |disk| disk.map_bytes,
        |disk| disk.shared_bytes,
    ];
    let mut row = |name: String, disks: &[UsageView]| {
        let sum =
            |column: &fn(&UsageView) -> u64| disks.iter().map(column).fold(0, u64::saturating_add);
        let sizes = columns.iter().map(|column| show_size(sum(column)));
        let objects: fn(&UsageView) -> u64 = |disk| disk.objects;
        table.add_row([name].into_iter().chain(sizes).chain([sum(&objects).to_string()]));
    };
    for disk in &reply.disks {
        row(disk.name.to_string(), std::slice::from_ref(disk));
    }
    if reply.disks.len() > 1 {
        row("total".to_owned(), &reply.disks);
    }
    lines(&table)
}

/// `blockd status`.
pub fn status(reply: &StatusReply) -> String {
    let store = &reply.store;
    let available = match (store.available, store.unavailable_since_unix_ms) {
        (true, _) => "available".to_owned(),
        (false, None) => "not reached yet".to_owned(),
        (false, Some(since)) => format!("unavailable since {}", moment(since)),
    };
    let requests = store
        .requests
        .iter()
        .filter(|(_, count)| **count > 0)
        .map(|(operation, count)| format!("{operation} {count}"));
    let log = &reply.log;
    let acknowledged = if log.ring { "the staging ring" } else { "the log" };
    let bounded = |used, max| format!("{} of {}", show_size(used), show_size(max));
    let lookups = reply.cache.hits.saturating_add(reply.cache.misses);
    let hits = match lookups {
        0 => String::new(),
        lookups => format!(", {} % hits", u128::from(reply.cache.hits) * 100 / u128::from(lookups)),
    };
    let resident =
        reply.memory.resident_bytes.map(|bytes| format!(", {} resident", show_size(bytes)));
    let mut list = vec![
        ("version", reply.version.clone()),
        ("up", format!("{} (process {})", seconds(reply.uptime_seconds), reply.pid)),
        ("host", format!("{} ({})", reply.hostname, reply.host)),
        ("boot nonce", reply.boot_nonce.to_string()),
        ("state", reply.state_dir.display().to_string()),
        ("store", format!("{} ({available})", store.url)),
        ("store id", optional(store.id, |id| id.to_string())),
        ("requests", requests.collect::<Vec<_>>().join(", ")),
        (
            "moved",
            format!("{} put, {} got", show_size(store.put_bytes), show_size(store.get_bytes)),
        ),
        (
            "log",
            format!(
                "{}, {}, {}; writes are acknowledged from {acknowledged}",
                bounded(log.used_bytes, log.max_bytes),
                format!("{:?}", log.mode).to_lowercase(),
                format!("{:?}", log.sync).to_lowercase(),
            ),
        ),
        ("cache", bounded(reply.cache.used_bytes, reply.cache.max_bytes) + &hits),
        (
            "memory",
            bounded(reply.memory.used_bytes, reply.memory.max_bytes)
                + &resident.unwrap_or_default(),
        ),
    ];
    if let Some(error) = &store.last_error {
        list.push(("last error", error.clone()));
    }
    list.extend(reply.warnings.iter().map(|warning| ("warning", warning.clone())));
    let mut text = facts(&list);
    if !reply.disks.is_empty() {
        text.push('\n');
        text.push_str(&disks(&reply.disks));
    }
    text
}

/// `blockd snapshots`.
pub fn snapshots(reply: &SnapshotsReply) -> String {
    let header = ["SNAPSHOT", "STATE", "CREATED", "SIZE", "FORKS", "MESSAGE"];
    let mut table = table(&header, &[3]);
    for snapshot in &reply.snapshots {
        table.add_row([
            format!("{}@{}", reply.name, snapshot.name),
            format!("{:?}", snapshot.state).to_lowercase(),
            date(snapshot.created_unix_ms),
            show_size(snapshot.size_bytes),
            optional(snapshot.forks.as_ref().filter(|forks| !forks.is_empty()), |f| f.join(" ")),
            // A message may hold anything; a table holds lines.
            snapshot.message.as_deref().unwrap_or_default().escape_debug().to_string(),
        ]);
    }
    lines(&table)
}

/// `blockd check`.
pub fn check(reply: &CheckReply) -> String {
    let mut text: String = reply
        .problems
        .iter()
        .map(|problem| format!("{}: {}\n", problem.object, problem.message))
        .collect();
    let found = match reply.problems.len() {
        0 => "sound".to_owned(),
        1 => "1 problem".to_owned(),
        count => format!("{count} problems"),
    };
    let counted = format!("{} objects, {} blocks checked", reply.objects, reply.blocks);
    text.push_str(&format!("{}: {found}; {counted}\n", reply.name));
    text
}
