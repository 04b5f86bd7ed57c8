//! A quarantined log as a fork.

use std::sync::Arc;

use super::Daemon;
use crate::control::api::{Recover, RecoverReply};
use crate::error::{Error, Kind, Result};

impl Daemon {
    pub(super) async fn recover_log(self: Arc<Self>, request: Recover) -> Result<RecoverReply> {
        Err(Error::new(
            Kind::InvalidArgument,
            format!("recovering quarantined logs is not built in yet: that of {} is kept", request.name),
        )
        .with_fix("use a version that has it"))
    }
}
