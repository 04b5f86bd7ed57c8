//! The negotiation, fed with bytes: what every client of the old and the new road gets, and what
//! those get who do not keep to the rules.

use proptest::prelude::*;

use super::*;

/// A negotiation with two exports, `d1` and `locked`, and everything it sent so far.
struct Peer {
    machine: Handshake,
    input: BytesMut,
    output: BytesMut,
}

impl Peer {
    /// After the client's flags.
    fn new(client_flags: u32) -> Self {
        let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
        let machine = Handshake::start(32 << 20, &mut output);
        assert_eq!(output.split().len(), 18);
        input.put_u32(client_flags);
        Self { machine, input, output }
    }

    /// Sends an option; `len` may lie.
    fn send(&mut self, code: OptionCode, len: usize, data: &[u8]) {
        OptionHeader { code, len: u32::try_from(len).unwrap() }.encode(&mut self.input);
        self.input.put_slice(data);
    }

    /// Runs until bytes are missing or the negotiation is over.
    fn run(&mut self) -> Step {
        let info =
            ExportInfo { description: Some("first".into()), ..ExportInfo::new("d1", 1 << 30) };
        loop {
            match self.machine.step(&mut self.input, &mut self.output) {
                Step::Open { name, .. } => {
                    let answer = match name.as_str() {
                        "" | "d1" => Ok(&info),
                        "locked" => Err(&OpenError::Policy("held by host b".into())),
                        _ => Err(&OpenError::Unknown),
                    };
                    self.machine.opened(answer, &mut self.output);
                }
                Step::List => {
                    self.machine.listed(&["d1".into(), "locked".into()], &mut self.output);
                }
                step => return step,
            }
        }
    }

    /// Sends an option and returns its replies, which have to be all there is.
    #[track_caller]
    fn ask(&mut self, code: OptionCode, data: &[u8]) -> Vec<(OptionReply, Vec<u8>)> {
        self.send(code, data.len(), data);
        self.run();
        self.replies(code)
    }

    #[track_caller]
    fn replies(&mut self, code: OptionCode) -> Vec<(OptionReply, Vec<u8>)> {
        let mut replies = Vec::new();
        while !self.output.is_empty() {
            assert_eq!(self.output.get_u64(), OPTION_REPLY_MAGIC);
            assert_eq!(OptionCode(self.output.get_u32()), code);
            let kind = OptionReply(self.output.get_u32());
            let len = self.output.get_u32();
            replies.push((kind, self.output.split_to(usize::try_from(len).unwrap()).to_vec()));
        }
        replies
    }

    /// Fails unless the negotiation still works.
    #[track_caller]
    fn assert_going_on(&mut self) {
        assert_eq!(kinds(&self.ask(OptionCode::INFO, &named("d1", &[]))), [R::INFO, R::ACK]);
    }
}

use crate::wire::OPTION_REPLY_MAGIC;
use OptionReply as R;

fn kinds(replies: &[(OptionReply, Vec<u8>)]) -> Vec<OptionReply> {
    replies.iter().map(|(kind, _)| *kind).collect()
}

/// The data of `INFO` and `GO`.
fn named(name: impl AsRef<[u8]>, wanted: &[InfoType]) -> Vec<u8> {
    let name = name.as_ref();
    let mut data = Vec::new();
    data.put_u32(u32::try_from(name.len()).unwrap());
    data.put_slice(name);
    data.put_u16(u16::try_from(wanted.len()).unwrap());
    wanted.iter().for_each(|kind| data.put_u16(kind.0));
    data
}

/// The data of the options about metadata contexts.
fn queries(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    data.put_u32(u32::try_from(name.len()).unwrap());
    data.put_slice(name.as_bytes());
    data.put_u32(u32::try_from(queries.len()).unwrap());
    for query in queries {
        data.put_u32(u32::try_from(query.len()).unwrap());
        data.put_slice(query.as_bytes());
    }
    data
}

const BOTH: u32 = 3;
const PLAIN: Negotiated = Negotiated { structured: false, block_status: false };
/// All a writable export with fast zeroes has, without `DF`.
const FLAGS: u16 = 0b1101_0110_1101;

/// Fails if the old road sends padding where none is wanted, or none where it is.
#[test]
fn export_name_answers_with_and_without_padding() {
    for (client_flags, padding) in [(0, 124), (1, 124), (2, 0), (3, 0)] {
        let mut peer = Peer::new(client_flags);
        peer.send(OptionCode::EXPORT_NAME, 2, b"d1");
        assert_eq!(peer.run(), Step::Enter(PLAIN));
        assert_eq!(peer.output.get_u64(), 1 << 30);
        assert_eq!(peer.output.get_u16(), FLAGS);
        assert_eq!(&peer.output[..], vec![0; padding]);
    }
}

/// Fails if the old road is answered with anything but a close when there is no such export.
#[test]
fn export_name_closes_when_there_is_no_export() {
    let names: [&[u8]; 5] = [b"d2", b"locked", b"\xff", b"d\0", &[b'a'; 4097]];
    for name in names {
        let mut peer = Peer::new(BOTH);
        peer.send(OptionCode::EXPORT_NAME, name.len(), name);
        assert_eq!(peer.run(), Step::Close(Close::NoExport));
        assert!(peer.output.is_empty());
    }
}

/// Fails if `GO` leaves a fact out, or tells one that nobody asked for.
#[test]
fn go_describes_the_export_and_enters() {
    let mut peer = Peer::new(BOTH);
    let wanted = [InfoType::BLOCK_SIZE, InfoType::NAME, InfoType::DESCRIPTION, InfoType(77)];
    peer.send(OptionCode::GO, named("", &wanted).len(), &named("", &wanted));
    assert_eq!(peer.run(), Step::Enter(PLAIN));
    let replies = peer.replies(OptionCode::GO);
    assert_eq!(kinds(&replies), [R::INFO, R::INFO, R::INFO, R::INFO, R::ACK]);
    assert_eq!(replies[0].1, *b"\0\0\0\0\0\0\x40\0\0\0\x0d\x6d");
    assert_eq!(replies[1].1, *b"\0\x01d1");
    assert_eq!(replies[2].1, *b"\0\x02first");
    assert_eq!(replies[3].1, *b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");

    let mut peer = Peer::new(BOTH);
    peer.assert_going_on();
    assert_eq!(kinds(&peer.ask(OptionCode::GO, &named("d1", &[]))), [R::INFO, R::ACK]);
}

/// Fails if any wrong name is fatal, or answered with the wrong error.
#[test]
fn names_that_lead_nowhere_are_answered_and_the_haggling_goes_on() {
    let mut peer = Peer::new(BOTH);
    for code in [OptionCode::INFO, OptionCode::GO] {
        for len in [1, 255, 256, 257, 3000, 4096] {
            let replies = peer.ask(code, &named(vec![b'a'; len], &[]));
            assert_eq!(kinds(&replies), [R::ERR_UNKNOWN], "{code} with a name of {len}");
            peer.assert_going_on();
        }
        for (name, error) in [
            (vec![b'a'; 4097], R::ERR_INVALID),
            (vec![b'a'; 70_000], R::ERR_TOO_BIG),
            (b"\xffd1".to_vec(), R::ERR_INVALID),
            (b"d1\0".to_vec(), R::ERR_INVALID),
            (b"locked".to_vec(), R::ERR_POLICY),
        ] {
            let replies = peer.ask(code, &named(&name, &[]));
            assert_eq!(kinds(&replies), [error], "{code} with a name of {}", name.len());
            assert!(!replies[0].1.is_empty(), "an error without a reason");
            peer.assert_going_on();
        }
    }
}

/// Fails if a length inside an option is believed.
#[test]
fn inner_lengths_that_lie_are_invalid() {
    let mut peer = Peer::new(BOTH);
    peer.ask(OptionCode::STRUCTURED_REPLY, &[]);
    let mut long_name = named("", &[]);
    long_name[..4].copy_from_slice(&[0xff, 0xff, 0xff, 0xf0]);
    let mut many_facts = named("d1", &[]);
    many_facts[6..].copy_from_slice(&[0xff, 0xff]);
    let mut trailing = named("d1", &[]);
    trailing.push(0);
    let mut many_queries = queries("d1", &[]);
    many_queries[6..].copy_from_slice(&[0xff; 4]);
    for (code, data) in [
        (OptionCode::GO, long_name.clone()),
        (OptionCode::GO, many_facts),
        (OptionCode::GO, trailing),
        (OptionCode::INFO, vec![]),
        (OptionCode::SET_META_CONTEXT, many_queries),
        (OptionCode::SET_META_CONTEXT, queries("d1", &["no colon"])),
        (OptionCode::LIST_META_CONTEXT, long_name),
        (OptionCode::LIST, vec![0]),
        (OptionCode::STRUCTURED_REPLY, vec![0]),
    ] {
        assert_eq!(kinds(&peer.ask(code, &data)), [R::ERR_INVALID], "{code} with {data:?}");
        peer.assert_going_on();
    }
}

/// Fails if an outer length is believed: the machine must not wait for 4 GiB, let alone take them.
#[test]
fn outer_lengths_that_lie_close_at_once() {
    for (code, len) in [
        (OptionCode::GO, 0xffff_ffff),
        (OptionCode(77), OPTION_SKIP_MAX + 1),
        (OptionCode::EXPORT_NAME, OPTION_BYTES_MAX + 1),
    ] {
        let mut peer = Peer::new(BOTH);
        peer.send(code, usize::try_from(len).unwrap(), &[]);
        assert_eq!(peer.run(), Step::Close(Close::OptionLength { code, len }));
    }
}

/// Fails if an option that we do not have ends the connection.
#[test]
fn unknown_options_are_unsupported_and_the_haggling_goes_on() {
    let mut peer = Peer::new(BOTH);
    for code in
        [OptionCode::STARTTLS, OptionCode::EXTENDED_HEADERS, OptionCode(4), OptionCode(4660)]
    {
        assert_eq!(kinds(&peer.ask(code, &[])), [R::ERR_UNSUP]);
        assert_eq!(kinds(&peer.ask(code, &[1, 2, 3])), [R::ERR_UNSUP]);
        peer.assert_going_on();
    }
}

/// Fails if a name is missing, or its length.
#[test]
fn list_names_every_export() {
    let mut peer = Peer::new(BOTH);
    let replies = peer.ask(OptionCode::LIST, &[]);
    assert_eq!(kinds(&replies), [R::SERVER, R::SERVER, R::ACK]);
    assert_eq!(replies[0].1, *b"\0\0\0\x02d1");
    assert_eq!(replies[1].1, *b"\0\0\0\x06locked");
}

/// Fails if a goodbye is not acknowledged.
#[test]
fn abort_is_acknowledged() {
    let mut peer = Peer::new(BOTH);
    peer.send(OptionCode::ABORT, 3, b"bye");
    assert_eq!(peer.run(), Step::Close(Close::Aborted));
    assert_eq!(kinds(&peer.replies(OptionCode::ABORT)), [R::ACK]);
}

/// Fails if block status is on without all of: structured replies, the context, the same export.
#[test]
fn block_status_needs_a_context_of_the_same_export() {
    let go = named("d1", &[]);
    let enter = |options: &[(OptionCode, Vec<u8>)]| {
        let mut peer = Peer::new(BOTH);
        for (code, data) in options {
            peer.ask(*code, data);
        }
        peer.send(OptionCode::GO, go.len(), &go);
        match peer.run() {
            Step::Enter(negotiated) => negotiated.block_status,
            step => panic!("{step:?}"),
        }
    };
    let structured = (OptionCode::STRUCTURED_REPLY, vec![]);
    let set = |name, query: &[&str]| (OptionCode::SET_META_CONTEXT, queries(name, query));
    assert!(enter(&[structured.clone(), set("d1", &["x:y", ALLOCATION_CONTEXT])]));
    assert!(!enter(&[set("d1", &[ALLOCATION_CONTEXT])]));
    assert!(!enter(&[structured.clone(), set("", &[ALLOCATION_CONTEXT])]));
    assert!(!enter(&[structured.clone(), set("d1", &["base:"])]));
    assert!(!enter(&[structured.clone(), set("d1", &["base:other"])]));
    let good = set("d1", &[ALLOCATION_CONTEXT]);
    assert!(!enter(&[structured.clone(), good.clone(), set("d1", &[])]));
    assert!(!enter(&[structured, good, set("d1", &["no colon"])]));
}

/// Fails if listing contexts misses the one there is, or finds another.
#[test]
fn contexts_are_listed_by_query() {
    let mut peer = Peer::new(BOTH);
    let list = OptionCode::LIST_META_CONTEXT;
    assert_eq!(kinds(&peer.ask(list, &queries("d1", &[]))), [R::ERR_INVALID]);
    peer.ask(OptionCode::STRUCTURED_REPLY, &[]);
    for query in [&[][..], &["base:"], &[ALLOCATION_CONTEXT], &["qemu:", "base:"]] {
        let replies = peer.ask(list, &queries("d1", query));
        assert_eq!(kinds(&replies), [R::META_CONTEXT, R::ACK], "{query:?}");
        assert_eq!(replies[0].1, *b"\0\0\0\0base:allocation");
    }
    assert_eq!(kinds(&peer.ask(list, &queries("d1", &["qemu:"]))), [R::ACK]);
    assert_eq!(kinds(&peer.ask(list, &queries("d2", &[]))), [R::ERR_UNKNOWN]);
}

/// Fails if flags that were not offered are taken, or bytes that are no option.
#[test]
fn nonsense_closes() {
    assert_eq!(Peer::new(4).run(), Step::Close(Close::ClientFlags(4)));
    let mut peer = Peer::new(BOTH);
    peer.input.put_bytes(b'G', OptionHeader::BYTES);
    assert!(matches!(peer.run(), Step::Close(Close::Magic(_))));
}

/// Fails if a client can haggle for ever.
#[test]
fn the_number_of_options_is_limited() {
    let mut peer = Peer::new(BOTH);
    for _ in 0..OPTIONS_MAX {
        peer.send(OptionCode(77), 0, &[]);
    }
    assert_eq!(peer.run(), Step::Receive);
    peer.send(OptionCode(77), 0, &[]);
    assert_eq!(peer.run(), Step::Close(Close::OptionCount));
}

/// Fails if a fact about the export is not in its flags.
#[test]
fn transmission_flags_follow_the_export() {
    use crate::wire::transmission_flags as flag;
    let writable = ExportInfo::new("d1", 0);
    assert_eq!(transmission_flags(&writable, false), FLAGS);
    assert_eq!(transmission_flags(&writable, true), FLAGS | flag::SEND_DF);
    let read_only = ExportInfo { read_only: true, ..writable.clone() };
    assert_eq!(transmission_flags(&read_only, false), 0b101_0000_1111);
    let slow = ExportInfo { fast_zeroes: false, ..writable };
    assert_eq!(transmission_flags(&slow, false), FLAGS & !flag::SEND_FAST_ZERO);
}

proptest! {
    /// Fails if any bytes panic the machine, or if how they are cut changes what comes of them.
    #[test]
    fn arbitrary_bytes_never_panic_and_cuts_do_not_matter(
        bytes in prop::collection::vec(
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..64),
                (0u32..14, prop::collection::vec(any::<u8>(), 0..64)).prop_map(|(code, data)| {
                    let mut bytes = Vec::new();
                    let len = u32::try_from(data.len()).unwrap();
                    OptionHeader { code: OptionCode(code), len }.encode(&mut bytes);
                    bytes.extend(data);
                    bytes
                }),
                Just(named("d1", &[InfoType::NAME])),
            ],
            0..8,
        ),
        cut in 1usize..40,
    ) {
        let bytes = bytes.concat();
        let mut whole = Peer::new(BOTH);
        whole.input.put_slice(&bytes);
        let step = whole.run();

        let mut pieces = Peer::new(BOTH);
        let mut last = pieces.run();
        for piece in bytes.chunks(cut) {
            pieces.input.put_slice(piece);
            last = pieces.run();
        }
        prop_assert_eq!(step, last);
        prop_assert_eq!(whole.output, pieces.output);
    }
}
