//! Received bytes. Reads are large and serve many requests; the payload of a write is a slice of
//! what was read, not a copy, and a large payload is read straight into a buffer of its own size.
//!
//! Exports may hold such slices for a while, so buffers are used in turn, and again as soon as
//! nothing holds a slice of them. No buffer is ever zeroed, or sized by more than a request that
//! was accepted.

use std::io;
use std::pin::pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::wire::RequestHeader;

/// The first buffer of a connection: an idle one stays small.
const CHUNK_BYTES_MIN: usize = 16 << 10;
/// The buffer of a busy connection; it grows to here when reads fill it.
const CHUNK_BYTES_MAX: usize = 256 << 10;
/// A payload above this gets its own buffer, unless all of it is here already.
const LARGE_PAYLOAD_BYTES: usize = 64 << 10;
/// So many buffers wait for their slices to be dropped.
const SPARES_MAX: usize = 4;

/// The receiving end of a connection.
#[derive(Debug)]
pub(super) struct Input {
    buffer: BytesMut,
    chunk_bytes: usize,
    spares: Vec<BytesMut>,
    /// Bytes that the message under way needs in `buffer`.
    wanted: usize,
    /// A large payload under way, and its full length.
    large: Option<(BytesMut, usize)>,
}

impl Input {
    /// Starts with what was received already.
    pub(super) fn new(buffer: BytesMut) -> Self {
        Self {
            buffer,
            chunk_bytes: CHUNK_BYTES_MIN,
            spares: Vec::new(),
            wanted: RequestHeader::BYTES,
            large: None,
        }
    }

    /// The next header, if it is here; [`Self::consume_header`] goes past it.
    pub(super) fn header(&self) -> Option<&[u8; RequestHeader::BYTES]> {
        self.buffer.first_chunk()
    }

    /// Goes past a header.
    pub(super) fn consume_header(&mut self) {
        self.buffer.advance(RequestHeader::BYTES);
    }

    /// Prepares for a payload; [`Self::take_payload`] yields it.
    pub(super) fn expect_payload(&mut self, len: usize) {
        if len > LARGE_PAYLOAD_BYTES && len > self.buffer.len() {
            let mut payload = BytesMut::with_capacity(len);
            payload.extend_from_slice(&self.buffer.split());
            self.large = Some((payload, len));
        } else {
            self.wanted = len;
        }
    }

    /// The payload, once all of it is here.
    pub(super) fn take_payload(&mut self) -> Option<Bytes> {
        if let Some((payload, _)) = self.large.take_if(|(payload, len)| payload.len() == *len) {
            return Some(payload.freeze());
        }
        if self.large.is_some() || self.buffer.len() < self.wanted {
            return None;
        }
        let payload = self.buffer.split_to(self.wanted).freeze();
        self.wanted = RequestHeader::BYTES;
        Some(payload)
    }

    /// Throws away up to `left` bytes and returns how many are left to throw away.
    pub(super) fn skip(&mut self, left: usize) -> usize {
        let here = left.min(self.buffer.len());
        self.buffer.advance(here);
        left - here
    }

    /// Whether a message has begun.
    pub(super) fn is_mid_message(&self) -> bool {
        !self.buffer.is_empty() || self.large.is_some() || self.wanted != RequestHeader::BYTES
    }

    /// Reads as much as there is and fits; zero is the end of the stream.
    pub(super) fn poll_receive(
        &mut self,
        stream: &mut (impl AsyncRead + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if let Some((payload, len)) = &mut self.large {
            let missing = *len - payload.len();
            return poll_read(stream, &mut payload.limit(missing), cx);
        }
        self.make_room();
        let received = ready!(poll_read(stream, &mut self.buffer, cx))?;
        if received >= self.chunk_bytes / 2 && self.chunk_bytes < CHUNK_BYTES_MAX {
            self.chunk_bytes *= 2;
            self.spares.clear();
        }
        Poll::Ready(Ok(received))
    }

    /// Makes sure that the message under way fits, and that a read is worth its system call.
    fn make_room(&mut self) {
        let len = self.buffer.len();
        let missing = self.wanted.saturating_sub(len).max(self.chunk_bytes / 2);
        if self.buffer.capacity() - len >= missing {
            return;
        }
        let size = self.chunk_bytes.max(len + missing);
        if self.buffer.try_reclaim(size - len) {
            return;
        }
        let mut fresh = self.take_spare(size);
        fresh.extend_from_slice(&self.buffer);
        let mut old = std::mem::replace(&mut self.buffer, fresh);
        old.clear();
        if self.spares.len() < SPARES_MAX {
            self.spares.push(old);
        }
    }

    /// An empty buffer: one whose slices are gone, or a new one.
    fn take_spare(&mut self, size: usize) -> BytesMut {
        match self.spares.iter_mut().position(|spare| spare.try_reclaim(size)) {
            Some(index) => self.spares.swap_remove(index),
            None => BytesMut::with_capacity(size),
        }
    }
}

fn poll_read(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut impl BufMut,
    cx: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    // `read_buf` keeps nothing between polls, so a future per poll costs nothing.
    pin!(stream.read_buf(buffer)).poll(cx)
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;

    async fn receive(input: &mut Input, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            poll_fn(|cx| input.poll_receive(&mut bytes, cx)).await.unwrap();
        }
    }

    /// Fails if a payload is cut or shifted, whatever its size and however much was here before.
    #[tokio::test]
    async fn payloads_come_out_as_they_went_in() {
        let source: Vec<u8> = (0..=250).cycle().take(3 << 20).collect();
        let mut input = Input::new(BytesMut::new());
        for len in [1, 4096, 16 << 10, LARGE_PAYLOAD_BYTES, LARGE_PAYLOAD_BYTES + 1, 1 << 20] {
            for before in [0, 28, 100, len] {
                let (first, rest) = source[..len].split_at(before.min(len));
                receive(&mut input, first).await;
                input.expect_payload(len);
                if !rest.is_empty() {
                    assert_eq!(input.take_payload(), None);
                    receive(&mut input, rest).await;
                }
                assert_eq!(input.take_payload().unwrap(), &source[..len]);
                assert!(!input.is_mid_message());
            }
        }
    }

    /// Fails if every turn takes new memory while no slice is held.
    #[tokio::test]
    async fn a_buffer_without_slices_is_used_again() {
        let mut input = Input::new(BytesMut::new());
        let mut addresses = std::collections::HashSet::new();
        for _ in 0..100 {
            receive(&mut input, &[7; 4096]).await;
            input.expect_payload(4096);
            addresses.insert(input.take_payload().unwrap().as_ptr());
        }
        assert!(addresses.len() <= 8, "{} addresses", addresses.len());
    }

    /// Fails if a buffer is used again while a slice of it is held.
    #[tokio::test]
    async fn held_slices_keep_their_bytes() {
        let mut input = Input::new(BytesMut::new());
        let mut held = Vec::new();
        for turn in 0..200u8 {
            receive(&mut input, &[turn; 5000]).await;
            input.expect_payload(5000);
            held.push(input.take_payload().unwrap());
            if turn % 3 == 0 {
                held.remove(0);
            }
            for payload in &held {
                assert!(payload.iter().all(|byte| *byte == payload[0]));
            }
        }
    }

    /// Fails if a skipped payload takes a byte too many or too few.
    #[tokio::test]
    async fn skipping_ends_exactly() {
        let mut input = Input::new(BytesMut::new());
        receive(&mut input, &[0; 100]).await;
        assert_eq!(input.skip(150), 50);
        receive(&mut input, &[1; 60]).await;
        assert_eq!(input.skip(50), 0);
        input.expect_payload(10);
        assert_eq!(input.take_payload().unwrap(), &[1; 10][..]);
    }
}
