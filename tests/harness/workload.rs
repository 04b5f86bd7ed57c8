//! A guest that writes numbered blocks, and remembers what it sent and what was acknowledged.
//!
//! Each connection owns an equal share of the blocks and never has two writes of one block under
//! way: so the order of a block's versions is known. It ends when told to, or when the connection
//! is lost; a refused request is kept and shown.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::model::{self, BLOCK_BYTES, Model, Op, Tick};
use crate::nbd_client::{Client, Command, FUA, Reply};
use crate::nbd_handshake::Address;
use crate::random::Random;
use crate::wait::{self, Stopwatch};

/// What a workload does.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The server.
    pub address: Address,
    /// The export.
    pub export: String,
    /// The seed of choices and contents; one for the whole life of a disk.
    pub seed: u64,
    /// How many blocks of the disk are written.
    pub block_count: u64,
    /// How many connections write.
    pub connections: u64,
    /// How many requests each keeps under way.
    pub depth: usize,
    /// The longest write, in blocks.
    pub run_blocks_max: u64,
    /// One in so many writes zeroes instead; zero for never.
    pub zero_one_in: u64,
    /// One in so many requests is a flush; zero for never.
    pub flush_one_in: u64,
    /// One in so many writes carries FUA; zero for never.
    pub fua_one_in: u64,
    /// A pause of each connection after each write, to bound the rate.
    pub pace: Duration,
    /// How long a reply may take.
    pub patience: Duration,
}

impl Plan {
    /// A mixed workload on the first `block_count` blocks.
    #[must_use]
    pub fn new(address: Address, export: &str, seed: u64, block_count: u64) -> Self {
        Self {
            address,
            export: export.to_owned(),
            seed,
            block_count,
            connections: 2,
            depth: 8,
            run_blocks_max: 8,
            zero_one_in: 20,
            flush_one_in: 50,
            fua_one_in: 50,
            pace: Duration::ZERO,
            patience: Duration::from_secs(60),
        }
    }
}

/// The clock and counters that a disk's runs share, so that sequences grow over all of them.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    ticks: Arc<AtomicU64>,
    sequences: Arc<AtomicU64>,
}

impl Clock {
    /// A moment of its own, between those of sends and acknowledgements.
    #[must_use]
    pub fn tick(&self) -> Tick {
        self.ticks.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn sequence(&self) -> u64 {
        self.sequences.fetch_add(1, Ordering::SeqCst) + 1
    }
}

/// What a run did.
#[derive(Debug, Default)]
pub struct History {
    /// The writes of each connection, in the order in which they were sent.
    pub ops: Vec<Op>,
    /// For every acknowledged flush, when it was sent.
    pub flushes: Vec<Tick>,
    /// Requests that the server refused, described.
    pub refusals: Vec<String>,
    /// The longest time between two acknowledgements of one connection.
    pub longest_gap: Duration,
    /// Connections that were lost before the run was told to end.
    pub lost_connections: usize,
}

impl History {
    /// How many writes were acknowledged.
    #[must_use]
    pub fn acked(&self) -> usize {
        self.ops.iter().filter(|op| op.acked.is_some()).count()
    }

    /// Asserts that no request was refused.
    #[track_caller]
    pub fn assert_no_errors(&self) {
        assert!(self.refusals.is_empty(), "requests were refused: {:?}", self.refusals);
    }

    /// Tells the model what was written.
    pub fn teach(&self, model: &mut Model) {
        model.absorb(&self.ops, &self.flushes);
    }

    fn merge(&mut self, other: Self) {
        self.ops.extend(other.ops);
        self.flushes.extend(other.flushes);
        self.refusals.extend(other.refusals);
        self.longest_gap = self.longest_gap.max(other.longest_gap);
        self.lost_connections += other.lost_connections;
    }
}

/// A workload that runs.
#[derive(Debug)]
pub struct Running {
    threads: Vec<JoinHandle<History>>,
    stop: Arc<AtomicBool>,
    acked: Arc<AtomicU64>,
}

/// Connects and starts writing; panics when the server does not take the connections.
#[track_caller]
#[must_use]
pub fn start(plan: &Plan, clock: &Clock) -> Running {
    let stop = Arc::new(AtomicBool::new(false));
    let acked = Arc::new(AtomicU64::new(0));
    let watch = Stopwatch::start();
    let threads = (0..plan.connections)
        .map(|index| {
            let mut client = Client::connect(&plan.address, &plan.export).expect("connect a guest");
            client.set_patience(plan.patience);
            let guest = Guest {
                client,
                plan: plan.clone(),
                index,
                clock: clock.clone(),
                random: Random::from_seed(plan.seed ^ clock.tick().rotate_left(17) ^ index),
                watch,
                pending: HashMap::new(),
                history: History::default(),
                last_ack: Duration::ZERO,
                acked: Arc::clone(&acked),
            };
            let stop = Arc::clone(&stop);
            std::thread::spawn(move || guest.run(&stop))
        })
        .collect();
    Running { threads, stop, acked }
}

impl Running {
    /// How many writes were acknowledged so far.
    #[must_use]
    pub fn acked(&self) -> u64 {
        self.acked.load(Ordering::SeqCst)
    }

    /// Waits until `count` more writes are acknowledged than now.
    #[track_caller]
    pub fn await_acks(&self, count: u64, limit: Duration) {
        let goal = self.acked() + count;
        wait::until_true(&format!("{count} more acknowledged writes"), limit, || {
            self.acked() >= goal
        });
    }

    /// Whether every connection has ended by itself.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.threads.iter().all(JoinHandle::is_finished)
    }

    /// Lets requests under way finish, ends, and tells what was done.
    #[must_use]
    pub fn stop(self) -> History {
        self.stop.store(true, Ordering::SeqCst);
        self.join()
    }

    /// Waits until every connection is lost, and tells what was done.
    #[must_use]
    pub fn join(self) -> History {
        let mut history = History::default();
        for thread in self.threads {
            history.merge(thread.join().expect("a guest thread does not panic"));
        }
        history
    }
}

/// A request under way: a write by its place in the history, or a flush by its tick.
enum Pending {
    Write(usize),
    Flush(Tick),
}

/// One connection of a workload.
struct Guest {
    client: Client,
    plan: Plan,
    index: u64,
    clock: Clock,
    random: Random,
    watch: Stopwatch,
    pending: HashMap<u64, Pending>,
    history: History,
    last_ack: Duration,
    acked: Arc<AtomicU64>,
}

impl Guest {
    fn run(mut self, stop: &AtomicBool) -> History {
        self.last_ack = self.watch.elapsed();
        let outcome = self.work(stop);
        if outcome.is_err() {
            self.history.lost_connections = 1;
        } else {
            self.client.disconnect();
        }
        self.history
    }

    fn work(&mut self, stop: &AtomicBool) -> std::io::Result<()> {
        while !stop.load(Ordering::SeqCst) {
            while self.pending.len() < self.plan.depth {
                self.send_one()?;
            }
            let reply = self.client.receive()?;
            self.note(&reply);
            if !self.plan.pace.is_zero() {
                wait::pause(self.plan.pace);
            }
        }
        while !self.pending.is_empty() {
            let reply = self.client.receive()?;
            self.note(&reply);
        }
        Ok(())
    }

    fn send_one(&mut self) -> std::io::Result<()> {
        if chance(&mut self.random, self.plan.flush_one_in) {
            let sent = self.clock.tick();
            let cookie = self.client.send(Command::Flush, 0, 0, 0, &[])?;
            self.pending.insert(cookie, Pending::Flush(sent));
            return Ok(());
        }
        let op = self.choose();
        let flags = if op.fua { FUA } else { 0 };
        let offset = op.block * BLOCK_BYTES;
        let length = u32::try_from(op.block_count * BLOCK_BYTES).expect("writes are short");
        let payload: Vec<u8> = (op.block..op.block + op.block_count)
            .filter(|_| !op.zero)
            .flat_map(|block| model::encode(self.plan.seed, block, op.sequence))
            .collect();
        let command = if op.zero { Command::Zeroes } else { Command::Write };
        let place = self.history.ops.len();
        self.history.ops.push(op);
        let cookie = self.client.send(command, flags, offset, length, &payload)?;
        self.pending.insert(cookie, Pending::Write(place));
        Ok(())
    }

    /// Chooses a run of own blocks none of which has a write under way.
    fn choose(&mut self) -> Op {
        let region = self.plan.block_count / self.plan.connections;
        let first = self.index * region;
        loop {
            let block = first + self.random.below(region);
            let longest = self.plan.run_blocks_max.min(first + region - block);
            let block_count = 1 + self.random.below(longest);
            if self.is_free(block, block_count) {
                return Op {
                    block,
                    block_count,
                    zero: chance(&mut self.random, self.plan.zero_one_in),
                    fua: chance(&mut self.random, self.plan.fua_one_in),
                    sequence: self.clock.sequence(),
                    sent: self.clock.tick(),
                    acked: None,
                    acked_at: None,
                };
            }
        }
    }

    fn is_free(&self, block: u64, block_count: u64) -> bool {
        !self.pending.values().any(|pending| match pending {
            Pending::Flush(_) => false,
            Pending::Write(place) => {
                let op = &self.history.ops[*place];
                op.block < block + block_count && block < op.block + op.block_count
            }
        })
    }

    fn note(&mut self, reply: &Reply) {
        let now = self.watch.elapsed();
        self.history.longest_gap = self.history.longest_gap.max(now.saturating_sub(self.last_ack));
        self.last_ack = now;
        let pending = self.pending.remove(&reply.cookie).expect("a reply answers a request");
        if reply.errno != 0 {
            let at = match pending {
                Pending::Write(place) => format!("{:?}", self.history.ops[place]),
                Pending::Flush(_) => "a flush".to_owned(),
            };
            self.history.refusals.push(format!("errno {} for {at}", reply.errno));
            return;
        }
        match pending {
            Pending::Flush(sent) => self.history.flushes.push(sent),
            Pending::Write(place) => {
                let op = &mut self.history.ops[place];
                op.acked = Some(self.clock.tick());
                op.acked_at = Some(now);
                self.acked.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
}

fn chance(random: &mut Random, one_in: u64) -> bool {
    one_in != 0 && random.one_in(one_in)
}

#[cfg(test)]
mod tests;
