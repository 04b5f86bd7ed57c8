//! Who is connected. A connection is listed from the moment it is accepted until its last future
//! is dropped, and can be told to end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::{Notify, oneshot};

/// A connection, for people and for control calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionInfo {
    /// Counts the connections of one server.
    pub id: u64,
    /// Address of a TCP client; process and user of a local one.
    pub peer: String,
    /// Canonical name of the export it uses; none while it negotiates.
    pub export: Option<String>,
    /// When it was accepted.
    pub since: Instant,
}

/// Resolves when the connection has to end.
pub(crate) type Stop = oneshot::Receiver<()>;

/// The connections of one server, oldest first.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    entries: Mutex<Entries>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Entries {
    next_id: u64,
    by_id: BTreeMap<u64, Entry>,
}

#[derive(Debug)]
struct Entry {
    peer: String,
    since: Instant,
    phase: Phase,
    stop: Option<oneshot::Sender<()>>,
}

/// What a connection has to do with an export.
#[derive(Debug)]
enum Phase {
    /// Nothing.
    Negotiating,
    /// It is about to get hold of the one that the client calls by this name.
    Opening(String),
    /// It uses the one of this canonical name.
    Serving(String),
}

impl Entry {
    /// Whether the connection uses an export, or may be about to: the empty name can stand for
    /// any.
    fn concerns(&self, export: &str) -> bool {
        match &self.phase {
            Phase::Negotiating => false,
            Phase::Opening(name) => name.is_empty() || name == export,
            Phase::Serving(name) => name == export,
        }
    }

    fn end(&mut self) {
        // Whoever does not listen any more has ended.
        let _ = self.stop.take().map(|stop| stop.send(()));
    }
}

impl Registry {
    /// Lists a new connection for as long as the registration lives.
    pub(crate) fn register(self: &Arc<Self>, peer: String) -> (Registration, Stop) {
        let (stop, stopped) = oneshot::channel();
        let since = tokio::time::Instant::now().into_std();
        let entry =
            Entry { peer: peer.clone(), since, phase: Phase::Negotiating, stop: Some(stop) };
        let mut entries = self.lock();
        let id = entries.next_id;
        entries.next_id += 1;
        entries.by_id.insert(id, entry);
        (Registration { registry: Arc::clone(self), id, peer }, stopped)
    }

    pub(crate) fn connections(&self) -> Vec<ConnectionInfo> {
        let entries = self.lock();
        let describe = |(id, entry): (&u64, &Entry)| ConnectionInfo {
            id: *id,
            peer: entry.peer.clone(),
            export: match &entry.phase {
                Phase::Serving(name) => Some(name.clone()),
                Phase::Negotiating | Phase::Opening(_) => None,
            },
            since: entry.since,
        };
        entries.by_id.iter().map(describe).collect()
    }

    /// Ends every connection that uses an export, and waits until there is none.
    pub(crate) async fn disconnect(&self, export: &str) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let mut concerned = false;
            for entry in self.lock().by_id.values_mut().filter(|entry| entry.concerns(export)) {
                entry.end();
                concerned = true;
            }
            if !concerned {
                return;
            }
            changed.await;
        }
    }

    /// Ends every connection, without waiting.
    pub(crate) fn end_all(&self) {
        self.lock().by_id.values_mut().for_each(Entry::end);
    }

    /// Ends the connection that has negotiated the longest; `false` if none negotiates.
    pub(crate) fn end_oldest_negotiation(&self) -> bool {
        let mut entries = self.lock();
        let oldest = entries
            .by_id
            .values_mut()
            .find(|entry| entry.stop.is_some() && matches!(entry.phase, Phase::Negotiating));
        oldest.map(Entry::end).is_some()
    }

    /// A panic elsewhere leaves the entries whole: every change is a single step.
    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a connection listed.
#[derive(Debug)]
pub(crate) struct Registration {
    registry: Arc<Registry>,
    id: u64,
    peer: String,
}

impl Registration {
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    pub(crate) fn peer(&self) -> &str {
        &self.peer
    }

    /// Call before an export is opened: from here on [`Registry::disconnect`] finds the
    /// connection, so that none slips through between finding the export and using it.
    pub(crate) fn opening(&self, name: &str) {
        self.set(Phase::Opening(name.to_owned()));
    }

    pub(crate) fn negotiating(&self) {
        self.set(Phase::Negotiating);
    }

    pub(crate) fn serving(&self, name: &str) {
        self.set(Phase::Serving(name.to_owned()));
    }

    fn set(&self, phase: Phase) {
        if let Some(entry) = self.registry.lock().by_id.get_mut(&self.id) {
            entry.phase = phase;
        }
        self.registry.changed.notify_waiters();
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.lock().by_id.remove(&self.id);
        self.registry.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails if a connection between finding an export and using it is overlooked, or if one that
    /// uses another export is ended.
    #[tokio::test]
    async fn disconnect_ends_who_uses_the_export_or_is_about_to() {
        let registry = Arc::new(Registry::default());
        let (serving, serving_stop) = registry.register("a".into());
        let (opening, opening_stop) = registry.register("b".into());
        let (default, default_stop) = registry.register("c".into());
        let (other, mut other_stop) = registry.register("d".into());
        serving.serving("d1");
        opening.opening("d1");
        default.opening("");
        other.serving("d2");

        let end = |registration, stop: Stop| async move {
            stop.await.unwrap();
            drop(registration);
        };
        tokio::join!(
            registry.disconnect("d1"),
            end(serving, serving_stop),
            end(opening, opening_stop),
            end(default, default_stop),
        );
        assert!(other_stop.try_recv().is_err());
        let left = registry.connections();
        assert_eq!(left.len(), 1);
        assert_eq!((left[0].id, left[0].export.as_deref()), (other.id(), Some("d2")));
    }

    /// Fails if making room ends a client that works, or the same connection twice.
    #[test]
    fn room_is_made_by_the_oldest_negotiation() {
        let registry = Arc::new(Registry::default());
        let (serving, _serving_stop) = registry.register("a".into());
        serving.serving("d1");
        let (_old, mut old_stop) = registry.register("b".into());
        let (_new, mut new_stop) = registry.register("c".into());
        assert!(registry.end_oldest_negotiation());
        assert!(old_stop.try_recv().is_ok());
        assert!(new_stop.try_recv().is_err());
        assert!(registry.end_oldest_negotiation());
        assert!(!registry.end_oldest_negotiation());
    }
}
