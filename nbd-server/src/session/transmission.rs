//! The transmission phase: requests in, replies out, in any order.
//!
//! ```text
//! stream ─► Input ─► Request::parse ─► admit ─► the export's future ─┬─ ready at once ─┐
//!                                       │                            └─ in_flight ─────┤
//!                                       └ no room: stop reading                        ▼
//! stream ◄──────────────────────────────────────────────────────────────────────── Replies
//! ```
//!
//! - A request's future is polled once where it stands. Only if it has to wait does it join the
//!   others in flight; no task is started for it.
//! - Replies are sent when no further complete request is at hand, all in one write.
//! - Nothing waits for a single request, and reading does not wait for writing. What a connection
//!   holds (payloads, reads in flight, replies that the peer does not take) is limited; at the
//!   limit it stops reading until something has left.
//! - A connection that has to end takes no more requests, finishes what is in flight, sends the
//!   replies, and is dropped if that takes longer than the closing timeout.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Sleep;

use super::input::Input;
use super::output::Output;
use super::reply::Replies;
use super::{Agreed, End};
use crate::error::{ExportError, ExportErrorKind};
use crate::export::{EXTENTS_MAX, Export, Extent, ReadPart};
use crate::limits::Budget;
use crate::registry::Stop;
use crate::request::{Request, Terms};
use crate::server::ServerConfig;
use crate::wire::{Errno, RequestHeader};

/// Unsent replies above this start no more requests: whatever a client has asked for, one that
/// does not take the answers gets no more of them made.
const UNSENT_BYTES_MAX: usize = 4 << 20;

/// A connection that has agreed on an export.
pub(super) struct Transmission<'a, S, E> {
    stream: &'a mut S,
    export: Arc<E>,
    terms: Terms,
    config: &'a ServerConfig,
    input: Input,
    stage: Stage,
    in_flight: FuturesUnordered<Running>,
    /// Payload bytes of the requests in flight, in either direction.
    in_flight_bytes: usize,
    budget: Budget,
    replies: Replies,
    closing: Option<Closing>,
    /// Whether an error of the export was logged; the first one is worth a line.
    warned: bool,
}

type Running = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// What the next bytes of the input are.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Header,
    Payload { cookie: u64, request: Request },
    Skip { cookie: u64, errno: Errno, left: usize },
}

struct Closing {
    reason: End,
    deadline: Pin<Box<Sleep>>,
    /// Nobody is left to send replies to.
    deaf: bool,
}

/// A request and what came of it.
struct Outcome {
    cookie: u64,
    request: Request,
    result: Result<Answer, ExportError>,
}

enum Answer {
    Done,
    Data(Vec<ReadPart>),
    Extents(Vec<Extent>),
}

impl<'a, S, E> Transmission<'a, S, E>
where
    S: AsyncRead + AsyncWrite + Unpin,
    E: Export,
{
    pub(super) fn new(stream: &'a mut S, agreed: Agreed<E>, config: &'a ServerConfig) -> Self {
        Self {
            stream,
            export: agreed.export,
            terms: agreed.terms,
            config,
            input: Input::new(agreed.input),
            stage: Stage::Header,
            in_flight: FuturesUnordered::new(),
            in_flight_bytes: 0,
            budget: Budget::new(Arc::clone(&config.limits)),
            replies: Replies { output: Output::default(), structured: agreed.terms.structured },
            closing: None,
            warned: false,
        }
    }

    /// Serves the client until the connection ends.
    pub(super) async fn run(mut self, mut stop: Stop) -> End {
        poll_fn(|cx| {
            if self.closing.is_none() && Pin::new(&mut stop).poll(cx).is_ready() {
                self.close(End::Stopped);
            }
            self.poll(cx)
        })
        .await
    }

    /// Moves everything that can move, until nothing does.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        loop {
            let mut moved = self.poll_in_flight(cx);
            let blocked = self.closing.is_some() || self.start_requests(cx);
            moved |= self.poll_send(cx);
            if !blocked {
                moved |= self.poll_receive(cx);
            }
            if self.closing.is_some()
                && let Poll::Ready(end) = self.poll_closed(cx)
            {
                return Poll::Ready(end);
            }
            if !moved {
                return Poll::Pending;
            }
        }
    }

    /// Collects the outcomes of requests in flight.
    fn poll_in_flight(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        while !self.in_flight.is_empty()
            && let Poll::Ready(Some(outcome)) = self.in_flight.poll_next_unpin(cx)
        {
            self.finish(outcome);
            moved = true;
        }
        moved
    }

    /// Starts the requests that are here. `true` if reading on would not help: there is no room
    /// for the next one, or the connection is to end.
    fn start_requests(&mut self, cx: &mut Context<'_>) -> bool {
        loop {
            match self.stage {
                Stage::Header => {
                    let Some(bytes) = self.input.header() else { return false };
                    let header = match RequestHeader::decode(bytes) {
                        Ok(header) => header,
                        Err(wrong) => {
                            self.close(wrong.into());
                            return true;
                        }
                    };
                    if !self.take_header(&header, cx) {
                        return true;
                    }
                }
                Stage::Payload { cookie, request } => {
                    let Some(payload) = self.input.take_payload() else { return false };
                    self.stage = Stage::Header;
                    self.start(cookie, request, payload, cx);
                }
                Stage::Skip { cookie, errno, left } => {
                    let left = self.input.skip(left);
                    if left > 0 {
                        self.stage = Stage::Skip { cookie, errno, left };
                        return false;
                    }
                    self.stage = Stage::Header;
                    self.replies.put_error(cookie, errno, "");
                }
            }
        }
    }

    /// Judges a request; `false` if it has to stay in the input for now.
    fn take_header(&mut self, header: &RequestHeader, cx: &mut Context<'_>) -> bool {
        let cookie = header.cookie;
        let verdict = Request::parse(header, &self.terms, self.export.size());
        if self.poll_admit(verdict.map_or(0, |request| cost(&request)), cx).is_pending() {
            return false;
        }
        self.input.consume_header();
        match verdict {
            Err(errno) => {
                tracing::debug!(?header, %errno, "request refused");
                // Whatever is wrong with a write, its payload is on the way.
                let left = to_usize(header.payload_len());
                self.stage = Stage::Skip { cookie, errno, left };
            }
            Ok(Request::Disconnect) => {
                self.close(End::Disconnected);
                return false;
            }
            Ok(Request::Nothing) => self.replies.put_nothing(cookie),
            Ok(request @ Request::Write { len, .. }) => {
                self.in_flight_bytes += cost(&request);
                self.input.expect_payload(to_usize(len));
                self.stage = Stage::Payload { cookie, request };
            }
            Ok(request) => {
                self.in_flight_bytes += cost(&request);
                self.start(cookie, request, Bytes::new(), cx);
            }
        }
        true
    }

    /// Ready if one more request of so many bytes fits. A connection that holds nothing may hold
    /// anything: a limit below the size of a request slows it down, but does not lock it up.
    fn poll_admit(&mut self, bytes: usize, cx: &mut Context<'_>) -> Poll<()> {
        let held = self.held_bytes();
        let idle = held == 0 && self.in_flight.is_empty();
        let fits = held + bytes <= self.config.in_flight_bytes_max
            && self.replies.output.len() <= UNSENT_BYTES_MAX
            && self.in_flight.len() < self.config.in_flight_requests_max;
        if idle || fits { self.budget.poll_hold(held + bytes, cx) } else { Poll::Pending }
    }

    fn held_bytes(&self) -> usize {
        self.in_flight_bytes + self.replies.output.len()
    }

    /// Asks the export, and keeps the question if the answer takes time.
    fn start(&mut self, cookie: u64, request: Request, payload: Bytes, cx: &mut Context<'_>) {
        let mut running: Running =
            Box::pin(execute(Arc::clone(&self.export), cookie, request, payload));
        match running.as_mut().poll(cx) {
            Poll::Ready(outcome) => self.finish(outcome),
            Poll::Pending => self.in_flight.push(running),
        }
    }

    /// Writes the reply to a request.
    fn finish(&mut self, outcome: Outcome) {
        let Outcome { cookie, request, result } = outcome;
        self.in_flight_bytes -= cost(&request);
        let error = match (result, request) {
            (Ok(Answer::Data(parts)), Request::Read { offset, len, pieces }) => {
                let put = self.replies.put_read(cookie, offset, len, pieces, parts);
                put.err().map(|covered| {
                    let context = format!("the export answered {covered} of {len} bytes");
                    ExportError::new(ExportErrorKind::Io, context)
                })
            }
            (Ok(Answer::Extents(extents)), Request::BlockStatus { len, pieces, .. }) => {
                let put = self.replies.put_extents(cookie, len, pieces, &extents);
                let context = "the export answered without any extent";
                (!put).then(|| ExportError::new(ExportErrorKind::Io, context))
            }
            (Ok(_), _) => {
                self.replies.put_done(cookie);
                None
            }
            (Err(error), _) => Some(error),
        };
        if let Some(error) = error {
            self.fail(cookie, &request, &error);
        }
    }

    /// Answers with an error. The export knows best whether it matters; here the first one of a
    /// connection is worth a warning, and a storm is not worth more.
    fn fail(&mut self, cookie: u64, request: &Request, error: &ExportError) {
        let reason = error.chain();
        if self.warned {
            tracing::debug!(?request, error = reason, "request failed");
        } else {
            tracing::warn!(?request, error = reason, "request failed, the first on its connection");
            self.warned = true;
        }
        self.replies.put_error(cookie, error.kind().errno(), &reason);
    }

    /// Sends what is ready.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> bool {
        let mut moved = false;
        while !self.replies.output.is_empty() {
            if self.closing.as_ref().is_some_and(|closing| closing.deaf) {
                self.replies.output.clear();
                break;
            }
            match self.replies.output.poll_send(self.stream, cx) {
                Poll::Ready(Ok(_)) => moved = true,
                Poll::Ready(Err(error)) => self.close_deaf(error.into()),
                Poll::Pending => break,
            }
        }
        self.budget.shrink(self.held_bytes());
        moved
    }

    fn poll_receive(&mut self, cx: &mut Context<'_>) -> bool {
        match self.input.poll_receive(self.stream, cx) {
            Poll::Ready(Ok(0)) if self.is_mid_message() => self.close(End::ClosedMidMessage),
            Poll::Ready(Ok(0)) => self.close(End::Closed),
            Poll::Ready(Ok(_)) => {}
            Poll::Ready(Err(error)) => self.close_deaf(error.into()),
            Poll::Pending => return false,
        }
        true
    }

    fn is_mid_message(&self) -> bool {
        !matches!(self.stage, Stage::Header) || self.input.is_mid_message()
    }

    /// Takes no more requests. The first reason counts.
    fn close(&mut self, reason: End) {
        let timeout = self.config.closing_timeout;
        self.closing.get_or_insert_with(|| {
            let deadline = Box::pin(tokio::time::sleep(timeout));
            Closing { reason, deadline, deaf: false }
        });
    }

    /// The same when the peer is gone. The export may still finish what it has begun.
    fn close_deaf(&mut self, reason: End) {
        self.close(reason);
        if let Some(closing) = &mut self.closing {
            closing.deaf = true;
        }
    }

    /// Ready once the closing connection has nothing left to do, or no time left to do it.
    fn poll_closed(&mut self, cx: &mut Context<'_>) -> Poll<End> {
        let Some(closing) = &mut self.closing else { return Poll::Pending };
        let done = self.in_flight.is_empty() && self.replies.output.is_empty();
        if done || closing.deadline.as_mut().poll(cx).is_ready() {
            let reason = std::mem::replace(&mut closing.reason, End::Closed);
            return Poll::Ready(reason);
        }
        Poll::Pending
    }
}

/// One request, asked of the export.
async fn execute<E: Export>(
    export: Arc<E>,
    cookie: u64,
    request: Request,
    payload: Bytes,
) -> Outcome {
    let done = |result: Result<(), ExportError>| result.map(|()| Answer::Done);
    let result = match request {
        Request::Read { offset, len, .. } => export.read(offset, len).await.map(Answer::Data),
        Request::Write { offset, durability, .. } => {
            done(export.write(offset, payload, durability).await)
        }
        Request::Flush => done(export.flush().await),
        Request::Trim { offset, len, durability } => {
            done(export.trim(offset, len.into(), durability).await)
        }
        Request::WriteZeroes { offset, len, hole, durability } => {
            done(export.write_zeroes(offset, len.into(), hole, durability).await)
        }
        Request::Cache { offset, len } => done(export.cache(offset, len.into()).await),
        Request::BlockStatus { offset, len, .. } => {
            export.extents(offset, len.into()).await.map(Answer::Extents)
        }
        Request::Nothing | Request::Disconnect => Ok(Answer::Done),
    };
    Outcome { cookie, request, result }
}

/// Bytes that a request holds until its reply is written.
fn cost(request: &Request) -> usize {
    match request {
        Request::Read { len, .. } | Request::Write { len, .. } => to_usize(*len),
        Request::BlockStatus { .. } => EXTENTS_MAX * 8,
        _ => 0,
    }
}

/// Lengths on the wire have 32 bits, and so has the smallest machine this runs on.
fn to_usize(len: u32) -> usize {
    usize::try_from(len).expect("a usize has at least 32 bits")
}
