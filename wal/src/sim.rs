//! Another world for tests: staging memory that outlives a simulated process.

use std::sync::Arc;

use crate::memory::Mapping;

/// Staging memory that outlives the directory it was given to.
#[derive(Clone, Debug)]
pub struct SimRing(Arc<Mapping>);

impl SimRing {
    pub(crate) fn mapping(&self) -> Arc<Mapping> {
        Arc::clone(&self.0)
    }
}
