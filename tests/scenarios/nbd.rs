//! What a guest asks for over NBD is what it gets: exact bytes, exact ranges, honest errors.

use std::collections::HashMap;
use std::time::Duration;

use blockd_tests::model::{self, Content};
use blockd_tests::nbd_client::{
    Client, Command, EINVAL, ENOMEM, ENOSPC, ENOTSUP, EPERM, FAST_ZERO, FUA, NO_HOLE,
};
use blockd_tests::nbd_handshake::FLAG_READ_ONLY;
use blockd_tests::process::{Daemon, Export};
use blockd_tests::random::Random;
use blockd_tests::store::Store;
use blockd_tests::{report, tools, wait};

const LIMIT: Duration = Duration::from_secs(60);

fn serve(size: &str) -> (Store, Daemon, Export) {
    let store = Store::directory();
    let daemon = Daemon::start(store.settings());
    let export = daemon.create_attached("disk", size);
    (store, daemon, export)
}

/// A disk and a copy of what it must hold.
struct Shadow {
    client: Client,
    bytes: Vec<u8>,
}

impl Shadow {
    fn write(&mut self, offset: usize, data: &[u8], flags: u16) {
        let length = u32::try_from(data.len()).unwrap();
        self.client.request(Command::Write, flags, offset as u64, length, data).unwrap();
        self.bytes[offset..offset + data.len()].copy_from_slice(data);
    }

    fn zero(&mut self, offset: usize, length: usize, flags: u16) {
        let count = u32::try_from(length).unwrap();
        self.client.request(Command::Zeroes, flags, offset as u64, count, &[]).unwrap();
        self.bytes[offset..offset + length].fill(0);
    }

    /// A trim is a wish: each byte is zero afterwards, or what it was, and stays so.
    fn trim(&mut self, offset: usize, length: usize, flags: u16) {
        let count = u32::try_from(length).unwrap();
        self.client.request(Command::Trim, flags, offset as u64, count, &[]).unwrap();
        let found = self.client.read(offset as u64, count).unwrap();
        for (own, found) in self.bytes[offset..offset + length].iter_mut().zip(found) {
            assert!(found == 0 || found == *own, "a trimmed byte became {found:#x}");
            *own = found;
        }
    }

    #[track_caller]
    fn assert_same(&mut self, when: &str) {
        let length = u32::try_from(self.bytes.len()).unwrap();
        let found = self.client.read(0, length).unwrap();
        let differs = self.bytes.iter().zip(&found).position(|(own, other)| own != other);
        assert_eq!(differs, None, "first differing byte {when}");
    }
}

/// Fails if an unaligned request changes a neighbour, at once or after a restart. (P08)
#[test]
fn unaligned_requests_change_exactly_their_bytes() {
    let (_store, mut daemon, export) = serve("64M");
    let mut random = Random::for_test();
    let length = 2 << 20;
    let mut shadow = Shadow { client: export.connect(), bytes: vec![0; length] };
    let counter: Vec<u8> = (0..65536u32).map(|at| at.to_le_bytes()[0]).collect();
    shadow.write(0, &counter, 0);
    for (offset, count) in [(4095, 1), (8190, 3), (512, 512), (1536, 512), (3584, 4608), (4095, 2)]
    {
        let data = random.bytes(count);
        shadow.write(offset, &data, 0);
    }
    shadow.assert_same("after the named cases");
    for _request in 0..500 {
        let offset = usize::try_from(random.below(length as u64 - 20_000)).unwrap();
        let count = usize::try_from(1 + random.below(20_000)).unwrap();
        let flags = if random.one_in(10) { FUA } else { 0 };
        match random.below(4) {
            0 => shadow.zero(offset, count, flags),
            1 => shadow.trim(offset, count, flags),
            _ => {
                let data = random.bytes(count);
                shadow.write(offset, &data, flags);
            }
        }
    }
    shadow.assert_same("after random requests");
    daemon.kill9();
    daemon.launch();
    shadow.client = export.connect_when_served();
    shadow.assert_same("after a kill");
    daemon.drain("disk");
    daemon.restart();
    shadow.client = export.connect_when_served();
    shadow.assert_same("from the store");
    daemon.finish();
}

/// Fails if a range near 4 GiB is computed in 32 bits. (P10)
#[test]
fn trims_and_zeroes_of_gigabytes_hit_exactly_their_range() {
    let (_store, daemon, export) = serve("12G");
    let mut client = export.connect();
    let step = 512 << 20;
    let markers = || (0..24u64).map(|index| index * step);
    for offset in markers() {
        client.write(offset, &[0xAA; 4096]).unwrap();
    }
    let (trim_from, trim_length) = (3u64 << 30, 0xFFFF_F000u32);
    let (zero_from, zero_length) = (1u64 << 30, 0x8000_0000u32);
    client.trim(trim_from, trim_length).unwrap();
    client.zeroes(zero_from, zero_length).unwrap();
    let inside =
        |offset: u64, from: u64, length: u32| (from..from + u64::from(length)).contains(&offset);
    for when in ["at once", "from the store"] {
        for offset in markers() {
            let gone =
                inside(offset, trim_from, trim_length) || inside(offset, zero_from, zero_length);
            let expected = if gone { [0; 4096] } else { [0xAA; 4096] };
            assert_eq!(client.read(offset, 4096).unwrap(), expected, "{offset:#x} {when}");
        }
        daemon.drain("disk");
    }
    daemon.finish();
}

/// Fails if a never-written disk cannot be trimmed, zeroed and flushed, as mkfs begins. (P11)
#[test]
fn a_trim_may_come_first() {
    let (_store, daemon, export) = serve("1G");
    let mut client = export.connect();
    client.trim(0, 1 << 30).unwrap();
    client.zeroes(0, 1 << 30).unwrap();
    client.flush().unwrap();
    daemon.drain("disk");
    assert_eq!(client.read(1 << 29, 65536).unwrap(), [0; 65536]);
    let _snapshot = daemon.cli(&["snapshot", "disk", "--name", "empty", "--wait"]).ok();
    let _fork = daemon.cli(&["fork", "disk@empty", "other"]).ok();
    daemon.finish();
}

/// Fails if a trim of a huge disk takes time or room in proportion to it. (P12)
#[test]
fn a_trim_of_a_whole_huge_disk_is_one_small_request_each() {
    let (_store, daemon, export) = serve("2T");
    let mut client = export.connect();
    for index in 0..500u64 {
        client.write(index * (4 << 30), &[1; 4096]).unwrap();
    }
    daemon.drain("disk");
    let mut longest = Duration::ZERO;
    for index in 0..500u64 {
        let watch = wait::Stopwatch::start();
        client.trim(index * (4 << 30), 0xFFFF_F000).unwrap();
        longest = longest.max(watch.elapsed());
    }
    daemon.drain("disk");
    assert_eq!(client.read(4 << 30, 4096).unwrap(), [0; 4096]);
    report::say(&format!("500 trims of 4 GiB, the longest {longest:?}"));
    daemon.finish();
}

/// Fails if a request beyond the end gets another errno than the table says, or ends the
/// connection. (P13)
#[test]
fn requests_beyond_the_end_are_refused_and_the_connection_is_kept() {
    let (_store, daemon, export) = serve("12292K");
    let mut client = export.connect();
    let size = client.info.size;
    assert_eq!(size, 12292 << 10, "not a multiple of a chunk");
    let places = [
        (size - 512, 1024),
        (size, 512),
        (size + (1 << 40), 4096),
        (u64::MAX - 511, 512),
        (u64::MAX - 511, 4096),
        (0, u32::MAX),
    ];
    for (offset, length) in places {
        for (command, expected) in [
            (Command::Read, &[EINVAL, ENOMEM][..]),
            (Command::Trim, &[EINVAL]),
            (Command::Zeroes, &[ENOSPC]),
        ] {
            let errno = client.request(command, 0, offset, length, &[]).unwrap_err().errno();
            assert!(expected.contains(&errno), "{command:?} {offset:#x}+{length:#x}: {errno}");
        }
        if length <= 4096 {
            let data = vec![1; length as usize];
            assert_eq!(client.write(offset, &data).unwrap_err().errno(), ENOSPC, "{offset:#x}");
        }
    }
    client.write(size - 512, &[2; 512]).unwrap();
    assert_eq!(client.read(size - 512, 512).unwrap(), [2; 512]);
    // A length of zero is unspecified: any answer is right that is one.
    for command in [Command::Read, Command::Write, Command::Trim, Command::Zeroes] {
        let _any = client.request(command, 0, 0, 0, &[]);
    }
    for (command, flags) in [(77, 0), (0, 1 << 9), (1, 1 << 14)] {
        let payload = if command == 1 { &[0; 512][..] } else { &[] };
        client.send_raw(command, flags, 0, 512, payload).unwrap();
        assert_eq!(client.receive().unwrap().errno, EINVAL, "command {command} flags {flags:#x}");
    }
    client.flush().unwrap();
    daemon.finish();
}

/// Fails if a large request is dropped with its connection. (Reference table)
#[test]
fn a_write_of_32_mib_is_taken_and_one_too_large_is_refused_or_ends_the_connection() {
    let (_store, daemon, export) = serve("256M");
    let mut client = export.connect();
    let data = Random::from_seed(1).bytes(32 << 20);
    client.write(4096, &data).unwrap();
    assert!(client.read(4096, 32 << 20).unwrap() == data, "32 MiB come back");
    let mut other = export.connect();
    match other.write(0, &vec![1; 65 << 20]) {
        Ok(()) => panic!("65 MiB in one request are beyond any announced maximum"),
        Err(blockd_tests::nbd_client::Failure::Refused(_)) => other.flush().unwrap(),
        Err(blockd_tests::nbd_client::Failure::Lost(_)) => {}
    }
    client.flush().unwrap();
    daemon.finish();
}

/// Fails if a snapshot takes a write, or says that it did. (P14)
#[test]
fn a_read_only_export_refuses_every_change() {
    let (_store, daemon, export) = serve("64M");
    export.connect().write(0, &[4; 65536]).unwrap();
    let _taken = daemon.cli(&["snapshot", "disk", "--name", "snap", "--wait"]).ok();
    let answer = daemon.cli(&["attach", "disk@snap", "--access", "read"]).ok();
    let mut client = Export::from_uri(answer.line()).connect();
    assert_ne!(client.info.flags & FLAG_READ_ONLY, 0);
    for flags in [0, FUA] {
        let write = client.request(Command::Write, flags, 0, 4096, &[9; 4096]);
        assert_eq!(write.unwrap_err().errno(), EPERM);
        for command in [Command::Trim, Command::Zeroes] {
            let errno = client.request(command, flags, 0, 4096, &[]).unwrap_err().errno();
            assert_eq!(errno, EPERM, "{command:?}");
        }
    }
    assert_eq!(client.read(0, 65536).unwrap(), [4; 65536]);
    export.connect().write(0, &[5; 4096]).unwrap();
    assert_eq!(client.read(0, 65536).unwrap(), [4; 65536], "the disk moved on, the snapshot not");
    daemon.finish();
}

/// Fails if zeroes of any accepted kind read back as anything else, now or after a kill. (P16)
#[test]
fn zeroes_with_every_flag_are_zeros() {
    let (_store, mut daemon, export) = serve("64M");
    let mut client = export.connect();
    client.write(0, &vec![8; 1 << 20]).unwrap();
    let kinds = [0, NO_HOLE, FUA, NO_HOLE | FUA, FAST_ZERO, FAST_ZERO | NO_HOLE];
    let mut expected = vec![8; 1 << 20];
    for (index, flags) in kinds.into_iter().enumerate() {
        let at = index * 65536;
        match client.request(Command::Zeroes, flags, at as u64, 32768, &[]) {
            Ok(_) => expected[at..at + 32768].fill(0),
            Err(failure) => {
                assert_ne!(flags & FAST_ZERO, 0, "flags {flags:#x}: {failure}");
                assert!([EINVAL, ENOTSUP].contains(&failure.errno()), "{failure}");
            }
        }
    }
    client.request(Command::Trim, FUA, 1 << 19, 4096, &[]).unwrap();
    expected[1 << 19..(1 << 19) + 4096].fill(0);
    assert!(client.read(0, 1 << 20).unwrap() == expected, "before the kill");
    daemon.kill9();
    daemon.launch();
    let mut client = export.connect_when_served();
    assert!(client.read(0, 1 << 20).unwrap() == expected, "after the kill");
    daemon.finish();
}

/// Fails if half a payload reaches the disk, or a cut request keeps anything waiting. (P19)
#[test]
fn a_write_whose_payload_breaks_off_changes_nothing() {
    let (_store, daemon, export) = serve("64M");
    export.connect().write(0, &vec![6; 1 << 20]).unwrap();
    let before = daemon.open_files();
    for sent in [0, 1, 4096, 300 << 10, (1 << 20) - 1] {
        let mut client = export.connect();
        client.send_raw(1, 0, 0, 1 << 20, &vec![7; sent]).unwrap();
        drop(client);
    }
    {
        use std::io::Write as _;
        let mut client = export.connect();
        client.stream().write_all(&[0x25, 0x60, 0x95, 0x13, 0, 0, 0, 1, 0, 0]).unwrap();
    }
    wait::until_true("connections are closed", LIMIT, || daemon.open_files() <= before + 1);
    assert!(export.connect().read(0, 1 << 20).unwrap() == vec![6; 1 << 20], "the old bytes stay");
    daemon.finish();
}

/// Fails if a flush or FUA on one connection does not cover what another has acknowledged. (P20)
#[test]
fn a_flush_covers_what_every_connection_has_acknowledged() {
    let (_store, mut daemon, export) = serve("64M");
    let (mut first, mut second) = (export.connect(), export.connect());
    for block in 0..64u64 {
        first.write(block * 4096, &model::encode(1, block, 1)).unwrap();
    }
    second.flush().unwrap();
    second.write_fua(64 * 4096, &model::encode(1, 64, 1)).unwrap();
    daemon.kill9();
    daemon.launch();
    let mut client = export.connect_when_served();
    for block in 0..65u64 {
        let bytes = client.read(block * 4096, 4096).unwrap();
        assert_eq!(model::decode(1, block, &bytes), Content::Version(1), "block {block}");
    }
    daemon.finish();
}

/// Fails if a client that never reads its replies makes the daemon grow, or slows another disk
/// down for good. (P21)
#[test]
fn a_client_that_stops_reading_hurts_only_itself() {
    let (_store, daemon, export) = serve("64M");
    let other = daemon.create_attached("other", "64M");
    export.connect().write(0, &Random::from_seed(3).bytes(1 << 20)).unwrap();
    let mut stalled = export.connect();
    stalled.set_patience(Duration::from_secs(2));
    let before = daemon.resident_bytes();
    let mut sent = 0;
    while sent < 5000 && stalled.send(Command::Read, 0, 0, 128 << 10, &[]).is_ok() {
        sent += 1;
    }
    let mut neighbour = other.connect();
    for round in 0..100u64 {
        neighbour.write(round * 4096, &[1; 4096]).unwrap();
        assert_eq!(neighbour.read(round * 4096, 4096).unwrap(), [1; 4096]);
    }
    let grown = daemon.resident_bytes().saturating_sub(before);
    report::say(&format!("{sent} reads without a reader, {grown} bytes more"));
    assert!(grown < 200 << 20, "{grown} bytes for a client that does not read");
    drop(stalled);
    export.connect().flush().unwrap();
    daemon.finish();
}

/// Fails if clients that come and go leave files open or lose acknowledged writes. (P22)
#[test]
fn clients_that_come_and_go_leave_nothing_behind() {
    let (_store, daemon, export) = serve("64M");
    export.connect().flush().unwrap();
    let before = daemon.open_files();
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let export = &export;
            scope.spawn(move || {
                for round in 0..100u64 {
                    let mut client = export.connect();
                    let block = thread * 100 + round;
                    client.write(block * 4096, &model::encode(5, block, 1)).unwrap();
                    if round % 2 == 0 {
                        client.disconnect();
                    } else {
                        for index in 0..8 {
                            client.send(Command::Read, 0, index * 4096, 4096, &[]).unwrap();
                        }
                    }
                }
            });
        }
    });
    let mut client = export.connect();
    for block in 0..400u64 {
        let bytes = client.read(block * 4096, 4096).unwrap();
        assert_eq!(model::decode(5, block, &bytes), Content::Version(1), "block {block}");
    }
    wait::until_true("files are closed", LIMIT, || daemon.open_files() <= before + 2);
    daemon.finish();
}

/// Fails if a read returns an older version than one acknowledged before it was sent, or one that
/// was not yet sent when its reply came. (P24)
#[test]
fn reads_of_a_block_never_go_back_in_time() {
    let _turn = tools::heavy();
    let (_store, daemon, export) = serve("64M");
    let mut client = export.connect();
    let mut random = Random::for_test();
    let mut sent = [0u64; 8];
    let mut acked = [0u64; 8];
    // By cookie: the block, and for a write its version, for a read the least version it may see.
    let mut pending: HashMap<u64, (usize, Command, u64)> = HashMap::new();
    for step in 0..30_000 {
        while pending.len() >= 32 || (step % 64 == 0 && !pending.is_empty()) {
            settle(&mut client, &mut pending, &sent, &mut acked);
        }
        let block = usize::try_from(random.below(8)).unwrap();
        let offset = block as u64 * 4096;
        let writing = pending
            .values()
            .any(|(other, command, _)| *other == block && *command == Command::Write);
        if random.one_in(2) && !writing {
            sent[block] += 1;
            let bytes = model::encode(9, block as u64, sent[block]);
            let cookie = client.send_write(offset, &bytes, 0).unwrap();
            pending.insert(cookie, (block, Command::Write, sent[block]));
        } else if random.one_in(10) {
            let cookie = client.send(Command::Flush, 0, 0, 0, &[]).unwrap();
            pending.insert(cookie, (block, Command::Flush, 0));
        } else {
            let cookie = client.send(Command::Read, 0, offset, 4096, &[]).unwrap();
            pending.insert(cookie, (block, Command::Read, acked[block]));
        }
    }
    while !pending.is_empty() {
        settle(&mut client, &mut pending, &sent, &mut acked);
    }
    report::say(&format!("versions written of each block: {sent:?}"));
    daemon.finish();
}

/// Takes one reply and judges it.
fn settle(
    client: &mut Client,
    pending: &mut HashMap<u64, (usize, Command, u64)>,
    sent: &[u64; 8],
    acked: &mut [u64; 8],
) {
    let reply = client.receive().unwrap();
    assert_eq!(reply.errno, 0);
    let (block, command, version) = pending.remove(&reply.cookie).unwrap();
    match command {
        Command::Write => acked[block] = acked[block].max(version),
        Command::Read => {
            let found = match model::decode(9, block as u64, &reply.data) {
                Content::Zero => 0,
                Content::Version(found) => found,
                Content::Garbage(what) => panic!("block {block}: {what}"),
            };
            assert!(version <= found && found <= sent[block], "block {block}: {found}");
            // What one read has seen, a later one must see too.
            acked[block] = acked[block].max(found);
        }
        _ => {}
    }
}
