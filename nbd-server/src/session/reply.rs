//! From the outcome of a request to the bytes of its reply. Everything is known before the first
//! byte of a reply is written, so a reply never has to be broken off.

use bytes::BufMut;

use super::output::Output;
use crate::export::{EXTENTS_MAX, Extent, ExtentKind, ReadPart};
use crate::handshake::ALLOCATION_CONTEXT_ID;
use crate::request::Pieces;
use crate::wire::{
    CHUNK_DONE, ChunkHeader, ChunkType, Errno, STRING_BYTES_MAX, SimpleReply, extent_flags,
};

/// Bytes of the offset before the data or the length of a hole.
const OFFSET_BYTES: u32 = 8;

/// Writes the replies of one connection.
#[derive(Debug)]
pub(super) struct Replies {
    pub(super) output: Output,
    pub(super) structured: bool,
}

impl Replies {
    /// Success without data. With structured replies too this may be a simple one, unless the
    /// request was a read.
    pub(super) fn put_done(&mut self, cookie: u64) {
        SimpleReply { error: None, cookie }.encode(self.output.head());
    }

    /// Success of a request for nothing, which may have been a read.
    pub(super) fn put_nothing(&mut self, cookie: u64) {
        if self.structured {
            self.put_chunk(ChunkType::NONE, CHUNK_DONE, cookie, 0);
        } else {
            self.put_done(cookie);
        }
    }

    /// Failure, with a reason for those who can receive one.
    pub(super) fn put_error(&mut self, cookie: u64, errno: Errno, reason: &str) {
        if !self.structured {
            SimpleReply { error: Some(errno), cookie }.encode(self.output.head());
            return;
        }
        let reason = &reason[..reason.floor_char_boundary(STRING_BYTES_MAX)];
        let len = u16::try_from(reason.len()).expect("strings are at most 4096 bytes");
        self.put_chunk(ChunkType::ERROR, CHUNK_DONE, cookie, 6 + u32::from(len));
        let head = self.output.head();
        head.put_u32(errno.0);
        head.put_u16(len);
        head.put_slice(reason.as_bytes());
    }

    /// The data of a read. The parts have to cover `len` bytes, or the client would take what
    /// comes next for data; an export that errs gets the number of bytes it did cover back.
    pub(super) fn put_read(
        &mut self,
        cookie: u64,
        offset: u64,
        len: u32,
        pieces: Pieces,
        mut parts: Vec<ReadPart>,
    ) -> Result<(), usize> {
        let covered = run_len(&parts);
        if usize::try_from(len) != Ok(covered) {
            return Err(covered);
        }
        parts.retain(|part| !part.is_empty());
        if !self.structured {
            self.put_done(cookie);
            parts.iter().for_each(|part| self.put_part(part));
        } else if pieces == Pieces::One {
            self.put_run(cookie, offset, len, CHUNK_DONE, &parts);
        } else {
            self.put_runs(cookie, offset, len, &parts);
        }
        Ok(())
    }

    /// One chunk for each run of data and each run of zeroes.
    fn put_runs(&mut self, cookie: u64, mut offset: u64, mut left: u32, parts: &[ReadPart]) {
        for run in parts.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
            let len = u32::try_from(run_len(run)).expect("a part of a 32-bit length");
            left -= len;
            let flags = if left == 0 { CHUNK_DONE } else { 0 };
            self.put_run(cookie, offset, len, flags, run);
            offset += u64::from(len);
        }
    }

    /// One chunk: a hole if all parts are zeroes, else data.
    fn put_run(&mut self, cookie: u64, offset: u64, len: u32, flags: u16, run: &[ReadPart]) {
        if run.iter().all(is_zero) {
            self.put_chunk(ChunkType::OFFSET_HOLE, flags, cookie, OFFSET_BYTES + 4);
            self.output.head().put_u64(offset);
            self.output.head().put_u32(len);
        } else {
            self.put_chunk(ChunkType::OFFSET_DATA, flags, cookie, OFFSET_BYTES + len);
            self.output.head().put_u64(offset);
            run.iter().for_each(|part| self.put_part(part));
        }
    }

    fn put_part(&mut self, part: &ReadPart) {
        match part {
            ReadPart::Data(data) => self.output.put_data(data.clone()),
            ReadPart::Zero(_) => self.output.put_zeroes(part.len()),
        }
    }

    /// The extents of a range, cut to it. `false` if there is none, which is not an answer.
    pub(super) fn put_extents(
        &mut self,
        cookie: u64,
        len: u32,
        pieces: Pieces,
        extents: &[Extent],
    ) -> bool {
        let count_max = if pieces == Pieces::One { 1 } else { EXTENTS_MAX };
        let descriptors = merge_extents(len, count_max, extents);
        if descriptors.is_empty() {
            return false;
        }
        let count = u32::try_from(descriptors.len()).expect("at most 8192 extents");
        self.put_chunk(ChunkType::BLOCK_STATUS, CHUNK_DONE, cookie, 4 + 8 * count);
        let head = self.output.head();
        head.put_u32(ALLOCATION_CONTEXT_ID);
        for (len, flags) in descriptors {
            head.put_u32(len);
            head.put_u32(flags);
        }
        true
    }

    fn put_chunk(&mut self, kind: ChunkType, flags: u16, cookie: u64, len: u32) {
        ChunkHeader { flags, kind, cookie, len }.encode(self.output.head());
    }
}

fn is_zero(part: &ReadPart) -> bool {
    matches!(part, ReadPart::Zero(_))
}

/// Bytes that some parts cover together.
fn run_len(run: &[ReadPart]) -> usize {
    run.iter().map(ReadPart::len).fold(0, usize::saturating_add)
}

/// Lengths and flags of the first extents, neighbours of one kind as one, within `len` bytes.
fn merge_extents(len: u32, count_max: usize, extents: &[Extent]) -> Vec<(u32, u32)> {
    let mut merged: Vec<(u32, u32)> = Vec::new();
    let mut left = len;
    for extent in extents {
        let here = u32::try_from(extent.len).unwrap_or(u32::MAX).min(left);
        if here == 0 {
            continue;
        }
        let flags = match extent.kind {
            ExtentKind::Data => 0,
            ExtentKind::Hole => extent_flags::HOLE | extent_flags::ZERO,
            ExtentKind::Zero => extent_flags::ZERO,
        };
        if let Some((len, _)) = merged.last_mut().filter(|(_, last)| *last == flags) {
            *len += here;
        } else if merged.len() < count_max {
            merged.push((here, flags));
        } else {
            break;
        }
        left -= here;
    }
    merged
}

#[cfg(test)]
mod tests {
    use bytes::{Buf, Bytes};

    use super::*;

    fn replies(structured: bool) -> Replies {
        Replies { output: Output::default(), structured }
    }

    /// What was written, as one piece.
    async fn sent(replies: &mut Replies) -> Bytes {
        let mut bytes = std::io::Cursor::new(Vec::new());
        while !replies.output.is_empty() {
            std::future::poll_fn(|cx| replies.output.poll_send(&mut bytes, cx)).await.unwrap();
        }
        bytes.into_inner().into()
    }

    /// Splits a structured reply into (flags, type, payload).
    fn chunks(mut bytes: Bytes) -> Vec<(u16, ChunkType, Bytes)> {
        let mut chunks = Vec::new();
        while !bytes.is_empty() {
            let head = ChunkHeader::decode(bytes.first_chunk().unwrap()).unwrap();
            bytes.advance(ChunkHeader::BYTES);
            assert_eq!(head.cookie, 9);
            chunks.push((head.flags, head.kind, bytes.split_to(head.len.try_into().unwrap())));
        }
        chunks
    }

    fn mixed() -> Vec<ReadPart> {
        let data = |bytes: &'static [u8]| ReadPart::Data(Bytes::from_static(bytes));
        vec![
            data(b"ab"),
            data(b"c"),
            ReadPart::Zero(0),
            ReadPart::Zero(2),
            ReadPart::Zero(1),
            data(b"d"),
        ]
    }

    /// Fails if a hole is sent as data, a run is split, or the last chunk is not marked.
    #[tokio::test]
    async fn runs_of_zeroes_are_sent_as_holes() {
        let mut replies = replies(true);
        replies.put_read(9, 100, 7, Pieces::Many, mixed()).unwrap();
        let chunks = chunks(sent(&mut replies).await);
        assert_eq!(chunks.len(), 3);
        assert_eq!(
            chunks[0],
            (0, ChunkType::OFFSET_DATA, Bytes::from_static(b"\0\0\0\0\0\0\0\x64abc"))
        );
        let hole = b"\0\0\0\0\0\0\0\x67\0\0\0\x03";
        assert_eq!(chunks[1], (0, ChunkType::OFFSET_HOLE, Bytes::from_static(hole)));
        assert_eq!(
            chunks[2],
            (1, ChunkType::OFFSET_DATA, Bytes::from_static(b"\0\0\0\0\0\0\0\x6ad"))
        );
    }

    /// Fails if a reply that must not be fragmented is, or loses its zeroes.
    #[tokio::test]
    async fn an_unfragmented_read_is_one_chunk() {
        let mut replies = replies(true);
        replies.put_read(9, 100, 7, Pieces::One, mixed()).unwrap();
        let data = Bytes::from_static(b"\0\0\0\0\0\0\0\x64abc\0\0\0d");
        assert_eq!(chunks(sent(&mut replies).await), [(1, ChunkType::OFFSET_DATA, data)]);
        replies.put_read(9, 0, 8, Pieces::One, vec![ReadPart::Zero(8)]).unwrap();
        assert_eq!(chunks(sent(&mut replies).await)[0].1, ChunkType::OFFSET_HOLE);
    }

    /// Fails if a simple reply is anything but a head and the data.
    #[tokio::test]
    async fn a_simple_read_is_a_head_and_the_data() {
        let mut replies = replies(false);
        replies.put_read(9, 100, 7, Pieces::Many, mixed()).unwrap();
        let expected = b"\x67\x44\x66\x98\0\0\0\0\0\0\0\0\0\0\0\x09abc\0\0\0d";
        assert_eq!(sent(&mut replies).await, &expected[..]);
    }

    /// Fails if an export that answers too little or too much gets the connection out of step.
    #[tokio::test]
    async fn a_read_of_the_wrong_length_writes_nothing() {
        for structured in [false, true] {
            let mut replies = replies(structured);
            for len in [6, 8] {
                assert_eq!(replies.put_read(9, 0, len, Pieces::Many, mixed()), Err(7));
                assert!(replies.output.is_empty());
            }
        }
    }

    /// Fails if extents leave the range, are not merged, or exceed their number.
    #[test]
    fn extents_are_merged_and_cut_to_the_range() {
        let extent = |len, kind| Extent { len, kind };
        let extents = [
            extent(512, ExtentKind::Data),
            extent(512, ExtentKind::Data),
            extent(0, ExtentKind::Zero),
            extent(4096, ExtentKind::Zero),
            extent(1 << 40, ExtentKind::Hole),
        ];
        assert_eq!(
            merge_extents(u32::MAX, 9, &extents),
            [(1024, 0), (4096, 2), (u32::MAX - 5120, 3)]
        );
        assert_eq!(merge_extents(2048, 9, &extents), [(1024, 0), (1024, 2)]);
        assert_eq!(merge_extents(u32::MAX, 1, &extents), [(1024, 0)]);
        assert_eq!(merge_extents(100, 9, &[]), []);
    }

    /// Fails if a reason is lost, or sent to a client that cannot take it.
    #[tokio::test]
    async fn errors_carry_their_reason_in_structured_replies() {
        let mut replies = replies(true);
        replies.put_error(9, Errno::EIO, "why");
        let error = Bytes::from_static(b"\0\0\0\x05\0\x03why");
        assert_eq!(chunks(sent(&mut replies).await), [(1, ChunkType::ERROR, error)]);
        replies.structured = false;
        replies.put_error(9, Errno::EIO, "why");
        assert_eq!(sent(&mut replies).await, &b"\x67\x44\x66\x98\0\0\0\x05\0\0\0\0\0\0\0\x09"[..]);
    }
}
