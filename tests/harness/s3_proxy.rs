//! `S3X`: an HTTP proxy between daemon and store that misbehaves on request.
//!
//! It leaves the `Host` header, the target and every byte of the body as they are, so signatures
//! stay valid. [`Rule`]s, set while it runs, choose requests by method, key and count, and do a
//! [`Fault`] to them; [`Proxy::set_weather`] makes the whole store slow or unreachable. Every
//! request is in the [log](Proxy::log), so that a test can state what must never be sent, such as a
//! head without `If-Match`.
//!
//! Request bodies are held whole before they go on: a blob is small enough for that, and a held one
//! can be applied later.

mod rules;
mod serve;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::runtime::Runtime;

use rules::{Active, RuleId};
pub use rules::{Fault, Key, Rule};
pub use serve::HeldRequest;

use crate::wait;

/// How the store as a whole is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Weather {
    /// Everything passes.
    #[default]
    Fair,
    /// Connections are closed at once, as by a host without a server.
    Refusing,
    /// Connections are taken and never answered, as behind a dead link.
    BlackHole,
    /// Bodies pass at so many bytes a second, each way.
    Slow(u64),
}

/// One request that went through.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The method.
    pub method: String,
    /// The object's key, without bucket; the query for a request on the bucket itself.
    pub key: String,
    /// The query.
    pub query: String,
    /// The `If-Match` condition.
    pub if_match: Option<String>,
    /// The `If-None-Match` condition.
    pub if_none_match: Option<String>,
    /// The `Range` asked for.
    pub range: Option<String>,
    /// What the client got; none when its connection was dropped or nothing came.
    pub status: Option<u16>,
    /// What the store answered; none when the request never reached it.
    pub store_status: Option<u16>,
    /// Bytes of the request's body.
    pub sent_bytes: u64,
    /// Bytes of the reply's body.
    pub received_bytes: u64,
}

/// What the serving side and the test share.
#[derive(Debug)]
struct Shared {
    store: SocketAddr,
    state: Mutex<State>,
    weather: tokio::sync::watch::Sender<Weather>,
}

#[derive(Debug, Default)]
struct State {
    rules: Vec<Active>,
    next_rule: u64,
    log: Vec<Entry>,
    held: Vec<HeldRequest>,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running proxy.
#[derive(Debug)]
pub struct Proxy {
    shared: Arc<Shared>,
    address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Proxy {
    /// Starts a proxy in front of `store`.
    #[must_use]
    pub fn start(store: SocketAddr) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("build a runtime");
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .expect("listen on a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let (weather, _) = tokio::sync::watch::channel(Weather::Fair);
        let shared = Arc::new(Shared { store, state: Mutex::default(), weather });
        runtime.spawn(serve::accept(listener, Arc::clone(&shared)));
        Self { shared, address, runtime: Some(runtime) }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The URL of a store in the bucket below `prefix`, through this proxy.
    #[must_use]
    pub fn url(&self, prefix: &str) -> String {
        crate::s3::url(self.address, prefix)
    }

    /// Sets a rule; rules are tried in the order in which they were set.
    pub fn rule(&self, rule: Rule) -> RuleId {
        let mut state = self.shared.state();
        state.next_rule += 1;
        let id = RuleId(state.next_rule);
        state.rules.push(Active::new(id, rule));
        id
    }

    /// Removes a rule. Requests that it holds without an answer are dropped.
    pub fn remove(&self, id: RuleId) {
        self.shared.state().rules.retain(|active| active.id != id);
    }

    /// Removes all rules and clears the weather.
    pub fn heal(&self) {
        self.shared.state().rules.clear();
        self.set_weather(Weather::Fair);
    }

    /// How often a rule was applied; zero once it is removed.
    #[must_use]
    pub fn hits(&self, id: RuleId) -> usize {
        let state = self.shared.state();
        state.rules.iter().find(|active| active.id == id).map_or(0, Active::hits)
    }

    /// Waits until a rule was applied `count` times.
    #[track_caller]
    pub fn await_hits(&self, id: RuleId, count: usize, limit: Duration) {
        wait::until_true(&format!("{count} hits of a rule"), limit, || self.hits(id) >= count);
    }

    /// Changes how the store as a whole is. Requests under way feel it too.
    pub fn set_weather(&self, weather: Weather) {
        self.shared.weather.send_replace(weather);
    }

    /// Every request so far, in the order in which they ended.
    #[must_use]
    pub fn log(&self) -> Vec<Entry> {
        self.shared.state().log.clone()
    }

    /// Forgets the log.
    pub fn clear_log(&self) {
        self.shared.state().log.clear();
    }

    /// How many requests are held back to be applied later.
    #[must_use]
    pub fn held(&self) -> usize {
        self.shared.state().held.len()
    }

    /// Applies the requests held so far, in order, and returns what the store said to each.
    #[must_use]
    pub fn release_held(&self) -> Vec<u16> {
        let held = std::mem::take(&mut self.shared.state().held);
        let runtime = self.runtime.as_ref().expect("the runtime lives as long as the proxy");
        held.into_iter()
            .map(|request| runtime.block_on(serve::apply(&self.shared, request)))
            .collect()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

#[cfg(test)]
mod tests;
