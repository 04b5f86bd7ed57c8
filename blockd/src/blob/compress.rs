//! Whether a frame is stored compressed: only where it saves an eighth.
//!
//! Most data that cannot be compressed is recognised by a sample of its byte frequencies, which costs
//! a hundredth of trying; for the rest, the compressor gives up where its output passes 7/8.

/// How blobs are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Everything is stored as it is.
    Off,
    /// zstd of this level, frame by frame, where it pays. Level 1 is the default.
    Zstd(i32),
}

impl Default for Compression {
    fn default() -> Self {
        Self::Zstd(1)
    }
}

/// A compressor with its buffers, for the frames of one blob.
pub(super) struct Compressor {
    zstd: Option<zstd::bulk::Compressor<'static>>,
    output: Vec<u8>,
}

impl std::fmt::Debug for Compressor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Compressor").field("on", &self.zstd.is_some()).finish_non_exhaustive()
    }
}

impl Compressor {
    pub(super) fn new(compression: Compression) -> Self {
        let zstd = match compression {
            Compression::Off => None,
            Compression::Zstd(level) => Some(
                zstd::bulk::Compressor::new(level).expect("zstd takes any level, and clamps it"),
            ),
        };
        Self { zstd, output: Vec::new() }
    }

    /// `data` compressed, unless that does not pay.
    pub(super) fn compress(&mut self, data: &[u8]) -> Option<&[u8]> {
        let zstd = self.zstd.as_mut()?;
        if looks_random(data) {
            return None;
        }
        let worth = data.len() / 8 * 7;
        self.output.resize(worth, 0);
        let len = zstd.compress_to_buffer(data, &mut self.output[..]).ok()?;
        Some(&self.output[..len])
    }
}

/// Bytes looked at to tell whether data is random.
const SAMPLE_LEN: usize = 4096;

/// Whether the byte frequencies of a sample are those of noise: for uniformly random bytes the sum of
/// squared counts is near `n + n²/256`, and every kind of structure that zstd's entropy coder could
/// use to save an eighth raises it by far more than half.
fn looks_random(data: &[u8]) -> bool {
    let stride = (data.len() / SAMPLE_LEN).max(1);
    // Sixteen bytes in a row at each of many places: repeats that only a longer view shows are left
    // to the compressor, by sampling every part of the frame.
    let mut counts = [0u32; 256];
    let mut sampled = 0u32;
    for run in data.chunks(16 * stride) {
        for &byte in run.iter().take(16) {
            counts[usize::from(byte)] += 1;
            sampled += 1;
        }
    }
    let squares: u64 = counts.iter().map(|&count| u64::from(count) * u64::from(count)).sum();
    let sampled = u64::from(sampled);
    squares < (sampled + sampled * sampled / 256) * 9 / 8
}
