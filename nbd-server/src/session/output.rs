//! Replies on their way out. Heads are gathered in one buffer, data is sent from where it lies,
//! and everything that is ready goes out in one vectored write.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncWrite;

/// Slices per write; the kernel's limit is 1024, and 128 hold the replies to 64 reads.
const SLICES_MAX: usize = 128;
/// Data up to this size is cheaper to copy than to send as a slice of its own.
const COPY_BYTES_MAX: usize = 512;
/// What zeroes are sent from, where they have to be sent.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// The sending end of a connection.
#[derive(Debug, Default)]
pub(super) struct Output {
    sealed: VecDeque<Bytes>,
    sealed_bytes: usize,
    open: BytesMut,
}

impl Output {
    /// Bytes that wait.
    pub(super) fn len(&self) -> usize {
        self.sealed_bytes + self.open.len()
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where heads and other small things are written to.
    pub(super) fn head(&mut self) -> &mut BytesMut {
        &mut self.open
    }

    /// Adds data.
    pub(super) fn put_data(&mut self, data: Bytes) {
        if data.len() <= COPY_BYTES_MAX {
            self.open.extend_from_slice(&data);
        } else {
            self.seal();
            self.push(data);
        }
    }

    /// Adds zeroes.
    pub(super) fn put_zeroes(&mut self, mut len: usize) {
        while len > 0 {
            let piece = len.min(ZEROES.len());
            self.put_data(Bytes::from_static(&ZEROES[..piece]));
            len -= piece;
        }
    }

    /// Drops everything that waits.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Writes once; the result is the number of bytes that left.
    pub(super) fn poll_send(
        &mut self,
        stream: &mut (impl AsyncWrite + Unpin),
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let mut count = 0;
        let open = (!self.open.is_empty()).then_some(&self.open[..]);
        let waiting = self.sealed.iter().map(|bytes| &bytes[..]).chain(open);
        for (slice, bytes) in slices.iter_mut().zip(waiting) {
            *slice = IoSlice::new(bytes);
            count += 1;
        }
        let sent = ready!(Pin::new(stream).poll_write_vectored(cx, &slices[..count]))?;
        if sent == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        self.advance(sent);
        Poll::Ready(Ok(sent))
    }

    fn seal(&mut self) {
        if !self.open.is_empty() {
            let head = self.open.split().freeze();
            self.push(head);
        }
    }

    fn push(&mut self, data: Bytes) {
        self.sealed_bytes += data.len();
        self.sealed.push_back(data);
    }

    fn advance(&mut self, mut sent: usize) {
        while let Some(front) = self.sealed.front_mut() {
            let here = sent.min(front.len());
            front.advance(here);
            self.sealed_bytes -= here;
            sent -= here;
            if !front.is_empty() {
                return;
            }
            self.sealed.pop_front();
        }
        self.open.advance(sent);
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::io::AsyncReadExt;

    use super::*;

    /// Fails if bytes are lost, doubled or reordered when the peer takes them in small pieces.
    #[tokio::test]
    async fn everything_arrives_in_order() {
        let mut output = Output::default();
        let mut expected = Vec::new();
        for turn in 0..300_usize {
            let byte = u8::try_from(turn % 251).unwrap();
            output.head().extend_from_slice(&[byte; 16]);
            output.put_data(vec![byte; turn * 7].into());
            output.put_zeroes(if turn % 50 == 0 { 100_000 } else { turn });
            expected.extend(vec![byte; 16 + turn * 7]);
            expected.extend(vec![0; if turn % 50 == 0 { 100_000 } else { turn }]);
        }
        assert_eq!(output.len(), expected.len());

        let (mut near, mut far) = tokio::io::duplex(1000);
        let sender = async {
            while !output.is_empty() {
                poll_fn(|cx| output.poll_send(&mut near, cx)).await.unwrap();
            }
            drop(near);
        };
        let mut received = Vec::new();
        let (_, result) = tokio::join!(sender, far.read_to_end(&mut received));
        result.unwrap();
        assert!(received == expected);
    }
}
