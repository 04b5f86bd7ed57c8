//! The store that a scenario puts its disks in: a directory, or a real S3 server.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::process::{Settings, short_temp_dir};
use crate::s3::{self, SeaweedFs};

/// A store of the test's own.
#[derive(Debug)]
pub enum Store {
    /// A directory.
    Directory(TempDir),
    /// An S3 server.
    S3(SeaweedFs),
}

impl Store {
    /// A directory store.
    #[must_use]
    pub fn directory() -> Self {
        Self::Directory(short_temp_dir())
    }

    /// An S3 store; none, after saying why, where there is no server to run.
    #[track_caller]
    #[must_use]
    pub fn s3() -> Option<Self> {
        SeaweedFs::start().map(Self::S3)
    }

    /// The URL that a daemon is given.
    #[must_use]
    pub fn url(&self) -> String {
        match self {
            Self::Directory(folder) => format!("file://{}", folder.path().display()),
            Self::S3(server) => server.url("blockd"),
        }
    }

    /// The settings of a daemon on this store.
    #[must_use]
    pub fn settings(&self) -> Settings {
        let settings = Settings::new(self.url());
        match self {
            Self::Directory(_) => settings,
            Self::S3(_) => settings.envs(&s3::CREDENTIALS),
        }
    }

    /// The file that holds an object of a directory store.
    #[track_caller]
    #[must_use]
    pub fn object_file(&self, key: &str) -> PathBuf {
        self.folder().join(format!("{key}@"))
    }

    /// The folder of a directory store.
    #[track_caller]
    #[must_use]
    pub fn folder(&self) -> &Path {
        match self {
            Self::Directory(folder) => folder.path(),
            Self::S3(_) => panic!("an S3 store has no folder"),
        }
    }
}
