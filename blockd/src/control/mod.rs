//! The control socket: HTTP/1.1 and JSON over a unix socket.
//!
//! A command is `POST /v1/<command>` with its request from [`api`] as the body; the answer is its reply,
//! or `{"error": {"code", "message", "fix", "details"}}` with the status of the code. The daemon's side
//! is the trait [`Control`]; its `server` bounds every call, and its `client` is what the command line uses.
//!
//! - **Giving up.** A call whose store does not answer ends with `store_unavailable` once nothing has moved
//!   for its time limit (`X-Blockd-Timeout-Ms`, else the daemon's `control-timeout`). [`Call::progress`]
//!   is what says that something moved, so a long drain that goes on is never cut.
//! - **Going away.** A caller that closes its connection does not cancel the call in the middle: it goes
//!   on, and [`Call::abandoned`] tells it. Only giving up drops the call's future.
//! - **Progress.** With `Accept: application/x-ndjson` the answer is lines: `{"progress": …}` any number
//!   of times, then one `{"reply": …}` or `{"error": …}`.

pub mod api;
pub mod client;
pub mod server;
pub mod view;
pub mod wire;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::error::Result;
use api::Progress;

/// What a command may know of its call besides the request, and what it tells while it runs.
#[derive(Debug, Clone)]
pub struct Call {
    progress: watch::Sender<Progress>,
    gone: watch::Sender<bool>,
}

impl Call {
    /// A call that nobody waits for, such as the daemon's own at its start.
    #[must_use]
    pub fn unattended() -> Self {
        Self { progress: watch::Sender::default(), gone: watch::Sender::default() }
    }

    /// Says how far the command is, and that the store answers: the time limit starts again.
    pub fn progress(&self, progress: Progress) {
        self.progress.send_replace(progress);
    }

    /// Whether the caller is gone: nobody will read the reply.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        *self.gone.borrow()
    }

    /// Waits until the caller is gone. A command that only waits (for a release, say) ends on it; one
    /// that has begun to change something goes on to a state that it can name.
    pub async fn abandoned(&self) {
        let mut gone = self.gone.subscribe();
        gone.wait_for(|gone| *gone).await.expect("self holds the sender");
    }
}

/// The daemon as the control socket sees it: one method a command, in the order of the contract.
///
/// The future of a method is dropped only when its call gives up, at any of its awaits: a step that
/// must not stop half-way (a swap and what follows it) runs in a task of the daemon.
#[async_trait]
pub trait Control: Send + Sync + 'static {
    /// `blockd create`: a new disk, or with `if_missing` the one there if its settings are equal.
    async fn create(&self, call: &Call, request: api::Create) -> Result<api::CreateReply>;
    /// `blockd list`: every disk of the store.
    async fn list(&self, call: &Call, request: api::List) -> Result<api::ListReply>;
    /// `blockd show`: one disk.
    async fn show(&self, call: &Call, request: api::Show) -> Result<view::DiskView>;
    /// `blockd usage`: what is stored, by disk.
    async fn usage(&self, call: &Call, request: api::Usage) -> Result<api::UsageReply>;
    /// `blockd status`: the daemon itself. Must not wait for the store.
    async fn status(&self, call: &Call, request: api::Status) -> Result<view::StatusReply>;
    /// `blockd attach`: returns when the listener accepts.
    async fn attach(&self, call: &Call, request: api::Attach) -> Result<api::AttachReply>;
    /// `blockd detach`: drains, then releases; given up, the disk is still attached.
    async fn detach(&self, call: &Call, request: api::Detach) -> Result<api::DetachReply>;
    /// `blockd flush`: everything acknowledged is on stable media.
    async fn flush(&self, call: &Call, request: api::Flush) -> Result<api::FlushReply>;
    /// `blockd drain`: everything acknowledged is in the store.
    async fn drain(&self, call: &Call, request: api::Drain) -> Result<api::DrainReply>;
    /// `blockd snapshot`: the disk at one position of its write order.
    async fn snapshot(&self, call: &Call, request: api::Snapshot) -> Result<api::SnapshotReply>;
    /// `blockd snapshots`: the snapshots of one disk.
    async fn snapshots(&self, call: &Call, request: api::Snapshots) -> Result<api::SnapshotsReply>;
    /// `blockd fork`: a new writable disk.
    async fn fork(&self, call: &Call, request: api::Fork) -> Result<api::ForkReply>;
    /// `blockd delete`: of a disk, or of a snapshot.
    async fn delete(&self, call: &Call, request: api::Delete) -> Result<api::DeleteReply>;
    /// `blockd resize`: grows a disk.
    async fn resize(&self, call: &Call, request: api::Resize) -> Result<api::ResizeReply>;
    /// `blockd check`: problems found are part of the reply, not an error.
    async fn check(&self, call: &Call, request: api::Check) -> Result<api::CheckReply>;
    /// `blockd recover`: a quarantined log as a fork.
    async fn recover(&self, call: &Call, request: api::Recover) -> Result<api::RecoverReply>;
}
