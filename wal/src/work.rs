//! Which logs need a thread, now or at a time: the queue that the writer threads share.
//!
//! A log is in the queue at most once and gets one round per turn, so one that floods the directory
//! waits in line like the others. One sleeping thread at a time watches the clock. A log that is
//! idle and marked has no entry here and wakes nobody.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::log::OwnerLog;
use crate::storage::Clock;

/// Why somebody looks at a log later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tick {
    /// Its open frame should not wait much longer.
    Fill,
    /// It may have fallen idle.
    Idle,
}

#[derive(Debug)]
pub(crate) struct Work {
    clock: Arc<dyn Clock>,
    state: Mutex<WorkState>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct WorkState {
    ready: VecDeque<Arc<OwnerLog>>,
    /// By time; the number keeps two at the same time apart.
    ticks: BTreeMap<(Duration, u64), (Tick, Weak<OwnerLog>)>,
    next_tick: u64,
    sleepers: usize,
    /// Threads that look at a log: they come back at once, so what they find wakes nobody.
    looking: usize,
    /// Until when a sleeper watches the clock.
    watched: Option<Duration>,
    stop: bool,
}

/// One thing to do.
enum Job {
    Lead(Arc<OwnerLog>),
    Look(Tick, Arc<OwnerLog>, Duration),
}

impl Work {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { clock, state: Mutex::default(), wake: Condvar::new() }
    }

    /// Adds a log that has something to write or sync.
    pub(crate) fn push(&self, log: &Arc<OwnerLog>) {
        let mut state = self.lock();
        state.ready.push_back(Arc::clone(log));
        if state.sleepers > 0 && state.looking == 0 {
            self.wake.notify_one();
        }
    }

    /// Arranges a look at a log.
    pub(crate) fn push_tick(&self, tick: Tick, when: Duration, log: &Arc<OwnerLog>) {
        let mut state = self.lock();
        state.next_tick += 1;
        let key = (when, state.next_tick);
        state.ticks.insert(key, (tick, Arc::downgrade(log)));
        let sooner = state.watched.is_none_or(|watched| when < watched);
        if state.sleepers > 0 && state.looking == 0 && sooner {
            self.wake.notify_one();
        }
    }

    /// Does one thing that is due; `false` when nothing is.
    pub(crate) fn step(&self) -> bool {
        let job = self.lock().next_job(&*self.clock);
        let found = job.is_some();
        if let Some(job) = job {
            job.run();
        }
        found
    }

    /// Works until [`Work::stop`].
    pub(crate) fn run(&self) {
        let mut state = self.lock();
        while !state.stop {
            let Some(job) = state.next_job(&*self.clock) else {
                state = self.sleep(state);
                continue;
            };
            let look = matches!(job, Job::Look(..));
            if look {
                state.looking += 1;
            } else if state.leaves_something() {
                self.wake.notify_one();
            }
            drop(state);
            job.run();
            state = self.lock();
            if look {
                state.looking -= 1;
            }
        }
    }

    pub(crate) fn stop(&self) {
        let mut state = self.lock();
        state.stop = true;
        state.ready.clear();
        state.ticks.clear();
        self.wake.notify_all();
    }

    fn sleep<'a>(&self, mut state: MutexGuard<'a, WorkState>) -> MutexGuard<'a, WorkState> {
        state.sleepers += 1;
        let first = state.ticks.first_key_value().map(|((when, _), _)| *when);
        let to_watch = first.filter(|when| state.watched.is_none_or(|watched| *when < watched));
        state = match to_watch {
            Some(when) => {
                state.watched = Some(when);
                let wait = when.saturating_sub(self.clock.now());
                let result = self.wake.wait_timeout(state, wait);
                let (mut state, _) = result.unwrap_or_else(PoisonError::into_inner);
                if state.watched == Some(when) {
                    state.watched = None;
                }
                state
            }
            None => self.wake.wait(state).unwrap_or_else(PoisonError::into_inner),
        };
        state.sleepers -= 1;
        state
    }

    fn lock(&self) -> MutexGuard<'_, WorkState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WorkState {
    /// Whether a thread that goes away to write leaves work, or the clock, to one that sleeps.
    fn leaves_something(&self) -> bool {
        let unwatched = !self.ticks.is_empty() && self.watched.is_none();
        self.sleepers > 0 && (unwatched || !self.ready.is_empty())
    }

    /// What is due by the clock comes first: a flood of other work must not hold it up.
    fn next_job(&mut self, clock: &dyn Clock) -> Option<Job> {
        while let Some(first) = self.ticks.first_entry() {
            let now = clock.now();
            if first.key().0 > now {
                break;
            }
            let (tick, log) = first.remove();
            if let Some(log) = log.upgrade() {
                return Some(Job::Look(tick, log, now));
            }
        }
        self.ready.pop_front().map(Job::Lead)
    }
}

impl Job {
    fn run(self) {
        match self {
            Self::Lead(log) => log.lead(),
            Self::Look(Tick::Fill, log, now) => log.look_at_frame(now),
            Self::Look(Tick::Idle, log, now) => log.look_at_idle(now),
        }
    }
}
