//! Whether a frame is stored compressed: only where it saves an eighth.
//!
//! The compressor is given room for no more than that and stops where it runs out. Data that cannot
//! be compressed costs next to nothing to try: zstd skips ahead where it finds no matches.

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
        self.output.resize(data.len() / 8 * 7, 0);
        let len = zstd.compress_to_buffer(data, &mut self.output[..]).ok()?;
        Some(&self.output[..len])
    }
}
