//! A daemon for tests that does what each test says, behind a real socket.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::api::{self, Request};
use super::client::Client;
use super::{Call, Control, server, view};
use crate::error::Result;

type Behaviour =
    Box<dyn Fn(Call, &'static str, Value) -> BoxFuture<'static, Result<Value>> + Send + Sync>;

/// A daemon whose every command does the same.
struct Fake(Behaviour);

macro_rules! fake {
    ($($method:ident: $request:ty => $reply:ty),* $(,)?) => {
        #[async_trait]
        impl Control for Fake {
            $(
                async fn $method(&self, call: &Call, request: $request) -> Result<$reply> {
                    let request = serde_json::to_value(request).unwrap();
                    let reply = (self.0)(call.clone(), stringify!($method), request).await?;
                    Ok(serde_json::from_value(reply).unwrap())
                }
            )*
        }
    };
}

fake! {
    create: api::Create => api::CreateReply,
    list: api::List => api::ListReply,
    show: api::Show => view::DiskView,
    usage: api::Usage => api::UsageReply,
    status: api::Status => view::StatusReply,
    attach: api::Attach => api::AttachReply,
    detach: api::Detach => api::DetachReply,
    flush: api::Flush => api::FlushReply,
    drain: api::Drain => api::DrainReply,
    snapshot: api::Snapshot => api::SnapshotReply,
    snapshots: api::Snapshots => api::SnapshotsReply,
    fork: api::Fork => api::ForkReply,
    delete: api::Delete => api::DeleteReply,
    resize: api::Resize => api::ResizeReply,
    check: api::Check => api::CheckReply,
    recover: api::Recover => api::RecoverReply,
}

/// A served [`Fake`].
pub(crate) struct World {
    folder: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    serving: JoinHandle<Result<()>>,
}

impl World {
    pub(crate) async fn new<F>(
        behaviour: impl Fn(Call, &'static str, Value) -> F + Send + Sync + 'static,
    ) -> Self
    where
        F: Future<Output = Result<Value>> + Send + 'static,
    {
        let folder = tempfile::tempdir().unwrap();
        let listener = server::bind(&folder.path().join("c.sock")).await.unwrap();
        let behaviour: Behaviour =
            Box::new(move |call, command, request| behaviour(call, command, request).boxed());
        let (stop, stopped) = oneshot::channel();
        let stopped = async {
            let _ = stopped.await;
        };
        let timeout = Duration::from_secs(60);
        let serving =
            tokio::spawn(server::serve(listener, Arc::new(Fake(behaviour)), timeout, stopped));
        Self { folder, stop: Some(stop), serving }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("c.sock")
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.socket(), Duration::from_secs(60))
    }

    pub(crate) async fn call<R: Request>(&self, request: R) -> Result<R::Reply> {
        self.client().call(&request, &mut |_| ()).await
    }

    pub(crate) async fn stop(mut self) {
        self.stop.take().unwrap().send(()).unwrap();
        self.serving.await.unwrap().unwrap();
    }
}
