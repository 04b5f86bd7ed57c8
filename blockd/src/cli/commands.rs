//! The commands that are one call to the daemon each, and what they print.

use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use super::args::{self, AccessArg};
use super::output::Output;
use super::session::Session;
use super::show;
use crate::config::SOCKET_PATH_LEN_MAX;
use crate::config::units::{show_duration, show_size};
use crate::control::api;
use crate::control::view::Access;
use crate::error::{Error, Kind, Result};
use crate::ids::Target;

/// `blockd create`.
///
/// # Errors
/// As every function here: what the daemon says, or how the command is used wrongly.
pub async fn create(args: args::Create, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let max_lag_ms = args.max_lag.map(|lag| u64::try_from(lag.as_millis()).unwrap_or(u64::MAX));
    let request = api::Create {
        name: args.name,
        size_bytes: args.size,
        if_missing: args.if_missing,
        durability: args.durability.into(),
        max_lag_ms,
    };
    let reply = session.call(&request).await?;
    output.answer(&reply, |reply| reply.disk.name.to_string())
}

/// `blockd list`.
///
/// # Errors
/// See [`create`].
pub async fn list(session: &Session, output: &mut Output<'_>) -> Result<()> {
    let reply = session.call(&api::List {}).await?;
    output.answer(&reply, show::list)
}

/// `blockd show`.
///
/// # Errors
/// See [`create`].
pub async fn show(args: args::OneDisk, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let reply = session.call(&api::Show { name: args.name }).await?;
    output.answer(&reply, show::disk)
}

/// `blockd usage`.
///
/// # Errors
/// See [`create`].
pub async fn usage(args: args::Usage, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let reply = session.call(&api::Usage { name: args.name }).await?;
    output.answer(&reply, show::usage)
}

/// `blockd status`.
///
/// # Errors
/// See [`create`].
pub async fn status(session: &Session, output: &mut Output<'_>) -> Result<()> {
    let reply = session.call(&api::Status {}).await?;
    output.answer(&reply, show::status)
}

/// `blockd attach`.
///
/// # Errors
/// See [`create`].
pub async fn attach(args: args::Attach, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let request = attach_request(args)?;
    let reply = session.call(&request).await?;
    note_attach(&reply, output);
    output.answer(&reply, |reply| match &reply.device {
        Some(device) => device.display().to_string(),
        None => reply.uri.clone(),
    })
}

fn attach_request(args: args::Attach) -> Result<api::Attach> {
    let default = if args.target.snapshot.is_some() { AccessArg::Read } else { AccessArg::Write };
    let access = args.access.unwrap_or(default);
    let wrong = |what: &str, fix: &str| Err(Error::new(Kind::InvalidArgument, what).with_fix(fix));
    if args.discard && access != AccessArg::Branch {
        return wrong("--discard is for the fork of a branch", "add --access branch");
    }
    if args.accept_loss && access != AccessArg::Write {
        return wrong("--accept-loss is for taking a disk over", "use it with --access write");
    }
    if access == AccessArg::Write && args.target.snapshot.is_some() {
        let what = format!("{} is a snapshot, which is never written", args.target);
        return wrong(&what, "use --access branch, or blockd fork");
    }
    let wait_seconds = args.wait.map_or(0, |wait| {
        // Rounded up: to wait for half a second is not to wait for none.
        wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0))
    });
    Ok(api::Attach {
        target: args.target,
        access: access.into(),
        wait_seconds,
        accept_loss: args.accept_loss,
        socket: args.socket.as_deref().map(absolute_socket).transpose()?,
        tcp: args.tcp,
        device: args.device,
        discard: args.discard,
    })
}

/// The daemon has another working directory than its clients.
fn absolute_socket(path: &Path) -> Result<PathBuf> {
    let absolute = std::path::absolute(path).map_err(|error| {
        Error::new(Kind::InvalidArgument, format!("--socket {}", path.display()))
            .with_source(error)
            .with_fix("name an absolute path")
    })?;
    let len = absolute.as_os_str().len();
    if len > SOCKET_PATH_LEN_MAX {
        let what = format!("--socket {} has {len} bytes", absolute.display());
        let fix = format!("a socket's path has at most {SOCKET_PATH_LEN_MAX}");
        return Err(Error::new(Kind::InvalidArgument, what).with_fix(fix));
    }
    Ok(absolute)
}

/// What a person should know of an attachment besides its address.
pub(super) fn note_attach(reply: &api::AttachReply, output: &mut Output<'_>) {
    let target = &reply.target;
    if let Some(from) = &reply.took_over {
        let drained = match from.last_drained_unix_ms {
            Some(ms) => format!("last drained {}", show::date(ms)),
            None => "never drained".to_owned(),
        };
        output.note(&format!(
            "{target} was taken from {}, {drained} (lsn {}); that state is kept as {}@{}, and what {} \
             had not drained is only in its log",
            show::host(&from.holder),
            from.drained_lsn,
            target.disk,
            from.snapshot,
            show::host(&from.holder),
        ));
    }
    if let Some(age) = reply.state_age_seconds {
        let age = std::time::Duration::try_from_secs_f64(age).unwrap_or_default();
        output.note(&format!("{target} is as it was {} ago", show_duration(age)));
    }
    if reply.access == Access::Branch {
        output.note(&format!("the branch is {target}"));
    }
}

/// `blockd detach`.
///
/// # Errors
/// See [`create`].
pub async fn detach(args: args::Detach, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let request = api::Detach { target: args.target, disconnect: args.disconnect };
    let reply = session.call(&request).await?;
    output.answer(&reply, |_| String::new())
}

/// `blockd flush`.
///
/// # Errors
/// See [`create`].
pub async fn flush(
    args: args::OneTarget,
    session: &Session,
    output: &mut Output<'_>,
) -> Result<()> {
    let reply = session.call(&api::Flush { target: args.target }).await?;
    output.answer(&reply, |_| String::new())
}

/// `blockd drain`.
///
/// # Errors
/// See [`create`].
pub async fn drain(
    args: args::OneTarget,
    session: &Session,
    output: &mut Output<'_>,
) -> Result<()> {
    let reply = session.call(&api::Drain { target: args.target }).await?;
    output.answer(&reply, |_| String::new())
}

/// `blockd snapshot`.
///
/// # Errors
/// See [`create`].
pub async fn snapshot(
    args: args::Snapshot,
    session: &Session,
    output: &mut Output<'_>,
) -> Result<()> {
    let request = api::Snapshot {
        name: args.disk,
        snapshot: args.name,
        message: args.message,
        wait: args.wait,
    };
    let reply = session.call(&request).await?;
    output.answer(&reply, |reply| reply.target.to_string())
}

/// `blockd snapshots`.
///
/// # Errors
/// See [`create`].
pub async fn snapshots(
    args: args::OneDisk,
    session: &Session,
    output: &mut Output<'_>,
) -> Result<()> {
    let reply = session.call(&api::Snapshots { name: args.name }).await?;
    output.answer(&reply, show::snapshots)
}

/// `blockd fork`.
///
/// # Errors
/// See [`create`].
pub async fn fork(args: args::Fork, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let reply = session.call(&api::Fork { target: args.target, new: args.new }).await?;
    if let Some(age) = reply.state_age_seconds {
        let age = show_duration(std::time::Duration::try_from_secs_f64(age).unwrap_or_default());
        output.note(&format!("{} is {} as it was {age} ago", reply.name, reply.parent));
    }
    output.answer(&reply, |reply| reply.name.to_string())
}

/// `blockd delete`.
///
/// # Errors
/// See [`create`].
pub async fn delete(args: args::Delete, session: &Session, output: &mut Output<'_>) -> Result<()> {
    if !args.yes {
        let asks =
            !output.is_json() && std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        if !asks {
            let what = format!("delete {} needs a yes, and there is nobody to ask", args.target);
            return Err(Error::new(Kind::InvalidArgument, what).with_fix("add --yes"));
        }
        output.ask(&delete_question(&args.target, session).await?);
        confirm(&args.target, &mut std::io::stdin().lock())?;
    }
    let reply = session.call(&api::Delete { target: args.target }).await?;
    output.answer(&reply, |_| String::new())
}

async fn delete_question(target: &Target, session: &Session) -> Result<String> {
    if target.snapshot.is_some() {
        return Ok(format!("delete the snapshot {target} for good? [y/N] "));
    }
    let disk = session.call(&api::Show { name: target.disk.clone() }).await?;
    let snapshots = match disk.snapshots {
        0 => String::new(),
        1 => " and its snapshot".to_owned(),
        count => format!(" and its {count} snapshots"),
    };
    let size = show_size(disk.size_bytes);
    Ok(format!("delete the disk {target} ({size}){snapshots} for good? [y/N] "))
}

fn confirm(target: &Target, stdin: &mut impl BufRead) -> Result<()> {
    let mut answer = String::new();
    let read = stdin.read_line(&mut answer);
    match answer.trim() {
        "y" | "Y" | "yes" if read.is_ok() => Ok(()),
        _ => Err(Error::new(Kind::Failed, format!("{target} is not deleted"))
            .with_fix("answer y to delete it")),
    }
}

/// `blockd resize`.
///
/// # Errors
/// See [`create`].
pub async fn resize(args: args::Resize, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let reply = session.call(&api::Resize { name: args.name, size_bytes: args.size }).await?;
    output.answer(&reply, |_| String::new())
}

/// `blockd check`.
///
/// # Errors
/// See [`create`]; and that the disk has problems, after they were printed.
pub async fn check(args: args::Check, session: &Session, output: &mut Output<'_>) -> Result<()> {
    let reply = session.call(&api::Check { name: args.name, deep: args.deep }).await?;
    let problems = reply.problems.len();
    if problems == 0 {
        return output.answer(&reply, show::check);
    }
    let what = format!("{} has {problems} problems", reply.name);
    let error = Error::new(Kind::Corrupt, what)
        .with_fix("fork a snapshot from before the damage, or restore the objects named");
    if output.is_json() {
        // One document on stdout: the problems are in the details of the error.
        let report = serde_json::to_value(&reply).expect("replies are plain data");
        return Err(error.with_detail("report", report));
    }
    output.answer(&reply, show::check)?;
    Err(error)
}

/// `blockd recover`.
///
/// # Errors
/// See [`create`].
pub async fn recover(
    args: args::Recover,
    session: &Session,
    output: &mut Output<'_>,
) -> Result<()> {
    let reply = session.call(&api::Recover { name: args.name, new: args.new }).await?;
    output.note(&format!(
        "{} is {} with {} in {} writes from the log",
        reply.name,
        reply.base,
        show_size(reply.recovered_bytes),
        reply.records,
    ));
    output.answer(&reply, |reply| reply.name.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_yes_deletes() {
        let target: Target = "d1".parse().unwrap();
        for (answer, deletes) in [
            ("y\n", true),
            ("Y\n", true),
            (" yes \n", true),
            ("", false),
            ("\n", false),
            ("n\n", false),
            ("yess\n", false),
            ("d1\n", false),
        ] {
            let result = confirm(&target, &mut answer.as_bytes());
            assert_eq!(result.is_ok(), deletes, "{answer:?}");
        }
    }
}
