//! The judge of a disk image: which numbered writes may, must and must not be in it.
//!
//! Every block that a [workload](crate::workload) writes says which block, sequence and seed it is,
//! in each of its sectors; so an image read back says which version of every block it holds. Sends
//! and acknowledgements carry ticks of one logical clock, and a block never has two writes under
//! way; so the versions of a block are in order, and version `v` may be in an image that equals the
//! disk at tick `t` exactly when `sent(v) <= t <= acked(v + 1)`. Three questions are asked:
//!
//! - after `kill -9`: does every block hold its last acknowledged version, or the one under way?
//! - after a power cut: does every block hold at least its last *flushed* version?
//! - after the loss of a host: is there one tick that every block agrees on, and how far back is it?

use std::ops::RangeInclusive;
use std::time::Duration;

use crate::nbd_client::{Client, Failure};
use crate::random::Random;

/// Bytes of a block.
pub const BLOCK: usize = 4096;
/// Bytes of a block, as offsets count.
pub const BLOCK_BYTES: u64 = 4096;
const SECTOR: usize = 512;
/// Bytes of one request when an image is read back.
const READ_BYTES: u32 = 1 << 20;

/// A moment of a run's logical clock.
pub type Tick = u64;

/// The bytes of version `sequence` of `block`.
#[must_use]
pub fn encode(seed: u64, block: u64, sequence: u64) -> Vec<u8> {
    let mut fill = Random::from_seed(seed ^ block.rotate_left(32) ^ sequence);
    let mut bytes = Vec::with_capacity(BLOCK);
    for sector in 0u64.. {
        if bytes.len() == BLOCK {
            break;
        }
        let start = bytes.len();
        for word in [seed, block, sequence, sector] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes.extend_from_slice(&fill.bytes(SECTOR - 32 - 4));
        let crc = crc32fast::hash(&bytes[start..]);
        bytes.extend_from_slice(&crc.to_le_bytes());
    }
    bytes
}

/// What one block of an image holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// Nothing but zeros.
    Zero,
    /// The whole of the version with this sequence.
    Version(u64),
    /// Anything else, described.
    Garbage(String),
}

/// Recognizes the bytes of `block`.
#[must_use]
pub fn decode(seed: u64, block: u64, bytes: &[u8]) -> Content {
    assert_eq!(bytes.len(), BLOCK, "a block is {BLOCK} bytes");
    if bytes.iter().all(|byte| *byte == 0) {
        return Content::Zero;
    }
    let mut found = None;
    for (index, sector) in (0u64..).zip(bytes.chunks_exact(SECTOR)) {
        let (body, crc) = sector.split_at(SECTOR - 4);
        if crc != crc32fast::hash(body).to_le_bytes() {
            return Content::Garbage(format!("sector {index} fails its crc"));
        }
        let word = |at: usize| u64::from_le_bytes(body[at..at + 8].try_into().expect("8 bytes"));
        if [word(0), word(8), word(24)] != [seed, block, index] {
            return Content::Garbage(format!(
                "sector {index} is of seed {}, block {}, sector {}",
                word(0),
                word(8),
                word(24)
            ));
        }
        let sequence = word(16);
        if found.is_some_and(|first| first != sequence) {
            return Content::Garbage(format!("torn between versions {found:?} and {sequence}"));
        }
        found = Some(sequence);
    }
    Content::Version(found.expect("a block has sectors"))
}

/// What every block of a disk holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image(Vec<Content>);

impl Image {
    /// Reads the first `block_count` blocks over `client`.
    pub fn read(client: &mut Client, seed: u64, block_count: u64) -> Result<Self, Failure> {
        let end = block_count * BLOCK_BYTES;
        let mut contents = Vec::new();
        let mut offset = 0;
        while offset < end {
            let length = u32::try_from((end - offset).min(READ_BYTES.into())).expect("1 MiB fits");
            let bytes = client.read(offset, length)?;
            for (block, bytes) in (offset / BLOCK_BYTES..).zip(bytes.chunks_exact(BLOCK)) {
                contents.push(decode(seed, block, bytes));
            }
            offset += u64::from(length);
        }
        Ok(Self(contents))
    }

    /// An image of known contents.
    #[must_use]
    pub fn of(contents: Vec<Content>) -> Self {
        Self(contents)
    }
}

/// One write of a workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Op {
    /// The first block.
    pub block: u64,
    /// How many blocks.
    pub block_count: u64,
    /// Its number; versions of a block are numbered in order.
    pub sequence: u64,
    /// Whether it zeroes instead of writing the numbered contents.
    pub zero: bool,
    /// Whether its acknowledgement says that it is durable.
    pub fua: bool,
    /// When it was sent.
    pub sent: Tick,
    /// When its acknowledgement arrived.
    pub acked: Option<Tick>,
    /// The same on the wall, since the start of the run.
    pub acked_at: Option<Duration>,
}

/// One version of a block.
#[derive(Debug, Clone)]
struct Version {
    sequence: u64,
    zero: bool,
    fua: bool,
    sent: Tick,
    acked: Option<Tick>,
    acked_at: Option<Duration>,
}

impl Version {
    fn matches(&self, content: &Content) -> bool {
        match content {
            Content::Zero => self.zero,
            Content::Version(sequence) => !self.zero && *sequence == self.sequence,
            Content::Garbage(_) => false,
        }
    }
}

/// How an image relates to what was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Acknowledged block writes that the image lacks.
    pub lost_writes: u64,
    /// How long before the last acknowledgement the first of them was acknowledged.
    pub lost_span: Duration,
    /// Blocks that hold anything written.
    pub written_blocks: u64,
}

/// What is known of a disk: the versions of every block, and the flushes.
#[derive(Debug, Clone)]
pub struct Model {
    blocks: Vec<Vec<Version>>,
    /// For every acknowledged flush, when it was sent.
    flushes: Vec<Tick>,
}

impl Model {
    /// A disk of `block_count` blocks that was never written.
    #[must_use]
    pub fn new(block_count: u64) -> Self {
        let never =
            Version { sequence: 0, zero: true, fua: true, sent: 0, acked: Some(0), acked_at: None };
        let count = usize::try_from(block_count).expect("a test disk fits memory");
        Self { blocks: vec![vec![never]; count], flushes: Vec::new() }
    }

    /// Adds what a run wrote and flushed (`flushes` are the ticks at which acknowledged ones were
    /// sent).
    pub fn absorb(&mut self, ops: &[Op], flushes: &[Tick]) {
        for op in ops {
            for block in op.block..op.block + op.block_count {
                let versions = self.versions_mut(block);
                let last = versions.last().expect("a block has at least its first version");
                assert!(last.sequence < op.sequence, "versions of block {block} out of order");
                versions.push(Version {
                    sequence: op.sequence,
                    zero: op.zero,
                    fua: op.fua,
                    sent: op.sent,
                    acked: op.acked,
                    acked_at: op.acked_at,
                });
            }
        }
        self.flushes.extend_from_slice(flushes);
    }

    /// Takes `image` for the truth: what was under way has either happened or never will.
    pub fn settle(&mut self, image: &Image) {
        for (block, (versions, content)) in (0u64..).zip(self.blocks.iter_mut().zip(&image.0)) {
            let at = versions
                .iter()
                .rposition(|version| version.matches(content))
                .unwrap_or_else(|| panic!("block {block} holds {content:?}, never written"));
            let sequence = versions.last().expect("never empty").sequence;
            let mut kept = versions.swap_remove(at);
            kept.acked = Some(kept.sent);
            if kept.zero {
                // Later versions stay later, though the one that this zero came from is unknown.
                kept.sequence = sequence;
            }
            *versions = vec![kept];
        }
        self.flushes.clear();
    }

    /// Asserts that nothing acknowledged is missing.
    #[track_caller]
    pub fn assert_nothing_acknowledged_is_lost(&self, image: &Image) -> Verdict {
        self.assert_at_least(image, |version| version.acked.is_some(), "acknowledged")
    }

    /// Asserts that nothing is missing that was acknowledged with FUA, or before an acknowledged
    /// flush was sent.
    #[track_caller]
    pub fn assert_nothing_flushed_is_lost(&self, image: &Image) -> Verdict {
        let last_flush = self.flushes.iter().max().copied().unwrap_or(0);
        let flushed =
            |version: &Version| version.acked.is_some_and(|tick| version.fua || tick <= last_flush);
        self.assert_at_least(image, flushed, "flushed")
    }

    #[track_caller]
    fn assert_at_least(
        &self,
        image: &Image,
        is_bound: impl Fn(&Version) -> bool,
        word: &str,
    ) -> Verdict {
        self.assert_whole(image);
        for (block, (versions, content)) in (0u64..).zip(self.blocks.iter().zip(&image.0)) {
            let bound = versions.iter().rposition(&is_bound).unwrap_or(0);
            let fits = versions[bound..].iter().any(|version| version.matches(content));
            assert!(
                fits,
                "block {block} holds {content:?}, but version {:?} was {word}",
                versions[bound]
            );
        }
        self.verdict(image, Tick::MAX)
    }

    /// Asserts that the image equals the disk at one moment of its write order, and says how far
    /// back the latest such moment lies.
    #[track_caller]
    pub fn assert_one_moment(&self, image: &Image) -> Verdict {
        self.assert_one_moment_within(image, 0..=Tick::MAX)
    }

    /// Asserts that the image equals the disk at one moment of these: it holds all that was
    /// acknowledged before the first, and nothing that was sent after the last.
    #[track_caller]
    pub fn assert_one_moment_within(&self, image: &Image, when: RangeInclusive<Tick>) -> Verdict {
        self.assert_whole(image);
        // The allowed moments count as one more block, which agrees with nothing else.
        let window = u64::try_from(self.blocks.len()).expect("a count of blocks fits 64 bits");
        let mut steps = vec![(*when.start(), 0, window), (*when.end(), 1, window)];
        for (block, (versions, content)) in (0u64..).zip(self.blocks.iter().zip(&image.0)) {
            let spans = spans_of(versions, content);
            assert!(!spans.is_empty(), "block {block} holds {content:?}, never written");
            for (from, to) in spans {
                steps.push((from, 0, block));
                steps.push((to, 1, block));
            }
        }
        let moment = common_moment(steps, self.blocks.len() + 1).unwrap_or_else(|best| {
            panic!("no moment fits every block: {}", self.describe(image, best))
        });
        self.verdict(image, moment)
    }

    #[track_caller]
    fn assert_whole(&self, image: &Image) {
        assert_eq!(image.0.len(), self.blocks.len(), "the image has another size");
        for (block, content) in image.0.iter().enumerate() {
            assert!(!matches!(content, Content::Garbage(_)), "block {block} holds {content:?}");
        }
    }

    /// Counts what the image lacks, given that it equals the disk at `moment`.
    fn verdict(&self, image: &Image, moment: Tick) -> Verdict {
        let last_ack = self.blocks.iter().flatten().filter_map(|version| version.acked_at).max();
        let mut verdict = Verdict::default();
        let mut first_lost = last_ack;
        for (versions, content) in self.blocks.iter().zip(&image.0) {
            let held = versions
                .iter()
                .rposition(|version| version.matches(content) && version.sent <= moment)
                .unwrap_or(0);
            verdict.written_blocks += u64::from(!versions[held].zero);
            let lost = versions[held + 1..].iter().filter(|version| version.acked.is_some());
            for version in lost {
                verdict.lost_writes += 1;
                first_lost = first_lost.min(version.acked_at);
            }
        }
        if let (Some(last), Some(first)) = (last_ack, first_lost) {
            verdict.lost_span = last.saturating_sub(first);
        }
        verdict
    }

    /// The blocks that do not fit the moment that fits most.
    fn describe(&self, image: &Image, moment: Tick) -> String {
        let misfits =
            (0u64..).zip(self.blocks.iter().zip(&image.0)).filter(|(_, (versions, content))| {
                !spans_of(versions, content)
                    .iter()
                    .any(|(from, to)| (*from..=*to).contains(&moment))
            });
        let shown: Vec<_> = misfits
            .take(5)
            .map(|(block, (versions, content))| {
                format!("block {block} holds {content:?}, valid {:?}", spans_of(versions, content))
            })
            .collect();
        format!("at tick {moment}, {}", shown.join("; "))
    }

    fn versions_mut(&mut self, block: u64) -> &mut Vec<Version> {
        let index = usize::try_from(block).expect("a test disk fits memory");
        &mut self.blocks[index]
    }
}

/// The ticks at which a block may hold `content`.
fn spans_of(versions: &[Version], content: &Content) -> Vec<(Tick, Tick)> {
    let end_of = |index: usize| {
        versions[index + 1..].iter().find_map(|next| next.acked).unwrap_or(Tick::MAX)
    };
    versions
        .iter()
        .enumerate()
        .filter(|(_, version)| version.matches(content))
        .map(|(index, version)| (version.sent, end_of(index)))
        .collect()
}

/// The latest tick inside a span of every block, or the one inside the spans of most.
fn common_moment(mut steps: Vec<(Tick, u8, u64)>, block_count: usize) -> Result<Tick, Tick> {
    steps.sort_unstable();
    // Spans of one block may overlap where writes of zeros follow each other: count blocks, not spans.
    let mut open = vec![0u32; block_count];
    let (mut blocks_open, mut best) = (0, (0, 0));
    for (tick, is_end, block) in steps {
        let depth = &mut open[usize::try_from(block).expect("a test disk fits memory")];
        if is_end == 0 {
            *depth += 1;
            blocks_open += usize::from(*depth == 1);
        } else {
            if blocks_open >= best.0 {
                best = (blocks_open, tick);
            }
            *depth -= 1;
            blocks_open -= usize::from(*depth == 0);
        }
    }
    if best.0 == block_count { Ok(best.1) } else { Err(best.1) }
}

#[cfg(test)]
mod tests;
