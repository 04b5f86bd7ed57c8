//! What a replay takes and where it ends: a pure decision, made record by record.
//!
//! The replay goes up from the record after the floor. What is known of each record, and what
//! follows from it ([`decide`]):
//!
//! ```text
//! is it …             in the log   in the ring    verdict
//! at or below floor   any          any            drop: the store has it
//! ── while the replay follows the log ──
//! synced              sound        any            take from the log
//! synced              not          any            damage: a promise was broken
//! beyond              sound        any            take from the log
//! beyond              not          sound          take from the ring, and follow the ring
//! beyond              not          broken         damage: it was acknowledged
//! beyond              not          only later     damage: it was written before those
//! beyond              not          nothing        the end
//! ── once it follows the ring (always beyond) ──
//! beyond              any          sound          take from the ring
//! beyond              any          broken, later  damage: it was acknowledged
//! beyond              any          nothing        the end: what the log has was never acknowledged
//! ```
//!
//! *Synced* is everything up to the highest LSN that any frame, segment header or the ring states
//! as synced. *Not* in the log is a torn or corrupt frame, a gap, or a missing segment. Once the
//! replay has left the log for the ring it does not come back: one transfer is in flight per owner,
//! so what stands in the log behind a hole belongs to the transfer that made the hole, and that is
//! in the ring as a whole.

use std::collections::VecDeque;

use crate::error::{Error, ErrorKind};
use crate::lsn::Lsn;
use crate::scan::{Misfit, Recovered};

/// Where a record lies against what is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Known {
    Drained,
    Synced,
    Beyond,
}

/// What the log has at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InLog {
    Sound,
    /// Torn, corrupt, or not there.
    Not,
}

/// What the staging ring has at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InRing {
    Sound,
    Broken,
    /// Not this record, but later ones.
    Later,
    Nothing,
}

/// Where the replay took its last record from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Follows {
    Log,
    Ring,
}

/// What happens to a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Drop,
    TakeLog,
    TakeRing,
    End,
    Damage,
}

/// The table above.
pub(crate) fn decide(known: Known, follows: Follows, log: InLog, ring: InRing) -> Verdict {
    match (known, follows, log, ring) {
        (Known::Drained, ..) => Verdict::Drop,
        (_, Follows::Log, InLog::Sound, _) => Verdict::TakeLog,
        (Known::Synced, ..) => Verdict::Damage,
        (Known::Beyond, _, _, InRing::Sound) => Verdict::TakeRing,
        (Known::Beyond, _, _, InRing::Broken | InRing::Later) => Verdict::Damage,
        (Known::Beyond, _, _, InRing::Nothing) => Verdict::End,
    }
}

/// A record that an earlier process left in the ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Staged {
    pub(crate) lsn: Lsn,
    pub(crate) sound: bool,
}

/// What a replay takes.
#[derive(Debug)]
pub(crate) struct Plan {
    /// From the log, in LSN order.
    pub(crate) records: VecDeque<Recovered>,
    /// The last record that the log has: the floor, if it has none above.
    pub(crate) log_end: Lsn,
    /// The last record of all; those after `log_end` are in the ring.
    pub(crate) end: Lsn,
    /// Sound records beyond the end, which are given up.
    pub(crate) dropped: VecDeque<Recovered>,
    /// Why the replay ends before what was promised, if it does.
    pub(crate) damage: Option<Error>,
}

/// Decides about everything above `floor`. `log` and `ring` are in LSN order.
pub(crate) fn plan(
    floor: Lsn,
    synced: Lsn,
    mut log: VecDeque<Recovered>,
    ring: &[Staged],
    flaws: &[Misfit],
) -> Plan {
    let mut ring = ring.iter().copied().skip_while(|staged| staged.lsn <= floor).peekable();
    let mut records = VecDeque::new();
    let mut follows = Follows::Log;
    let mut log_end = floor;
    let mut at = floor.next();
    while log.front().is_some_and(|record| record.lsn <= floor) {
        log.pop_front();
    }
    loop {
        while ring.next_if(|staged| staged.lsn < at).is_some() {}
        let known = match at {
            at if at <= floor => Known::Drained,
            at if at <= synced => Known::Synced,
            _ => Known::Beyond,
        };
        let in_log = match log.front() {
            Some(record) if record.lsn == at => InLog::Sound,
            _ => InLog::Not,
        };
        let in_ring = match ring.peek() {
            Some(staged) if staged.lsn > at => InRing::Later,
            Some(staged) if staged.sound => InRing::Sound,
            Some(_) => InRing::Broken,
            None => InRing::Nothing,
        };
        match decide(known, follows, in_log, in_ring) {
            Verdict::TakeLog => {
                records.extend(log.pop_front());
                log_end = at;
            }
            Verdict::TakeRing => follows = Follows::Ring,
            verdict @ (Verdict::End | Verdict::Damage) => {
                let damage = (verdict == Verdict::Damage)
                    .then(|| damage(at, synced, log.front(), in_ring, flaws));
                return Plan { records, log_end, end: at.previous(), dropped: log, damage };
            }
            Verdict::Drop => unreachable!("the replay begins above the floor"),
        }
        at = at.next();
    }
}

/// Says what is wrong at a position, and where.
fn damage(
    at: Lsn,
    synced: Lsn,
    next: Option<&Recovered>,
    in_ring: InRing,
    flaws: &[Misfit],
) -> Error {
    // Of two, the later one: the first is the unused rest of the segment before.
    let found = match (flaws.iter().rfind(|flaw| flaw.expected == at), next, in_ring) {
        (_, _, InRing::Broken) if at > synced => {
            "its copy in the staging ring does not verify".to_owned()
        }
        (Some(flaw), ..) => flaw.reason.clone(),
        (None, Some(next), _) => {
            format!("records {at} to {} are in no segment", next.lsn.previous())
        }
        (None, None, _) => "it is in no segment".to_owned(),
    };
    let promise = if at <= synced {
        format!("synced up to {synced}")
    } else {
        "and it was acknowledged".to_owned()
    };
    Error::new(ErrorKind::Damaged, format!("record {at} is damaged ({promise}): {found}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KNOWN: [Known; 3] = [Known::Drained, Known::Synced, Known::Beyond];
    const FOLLOWS: [Follows; 2] = [Follows::Log, Follows::Ring];
    const IN_LOG: [InLog; 2] = [InLog::Sound, InLog::Not];
    const IN_RING: [InRing; 4] = [InRing::Sound, InRing::Broken, InRing::Later, InRing::Nothing];

    // Fails when any of the 48 inputs gets another verdict than the rules, said the other way
    // round: for each verdict, exactly when it is right.
    #[test]
    fn every_input_has_exactly_the_verdict_that_the_promises_ask_for() {
        let mut seen = 0;
        for (known, follows) in KNOWN.iter().flat_map(|k| FOLLOWS.iter().map(move |f| (*k, *f))) {
            for (log, ring) in IN_LOG.iter().flat_map(|l| IN_RING.iter().map(move |r| (*l, *r))) {
                let verdict = decide(known, follows, log, ring);
                let drained = known == Known::Drained;
                let from_log = !drained && follows == Follows::Log && log == InLog::Sound;
                let beyond = known == Known::Beyond && !from_log;
                let lost_sync = known == Known::Synced && !from_log;
                let lost_acknowledged = beyond && matches!(ring, InRing::Broken | InRing::Later);
                let input = format!("{known:?} {follows:?} {log:?} {ring:?}");
                assert_eq!(verdict == Verdict::Drop, drained, "{input}");
                assert_eq!(verdict == Verdict::TakeLog, from_log, "{input}");
                assert_eq!(
                    verdict == Verdict::TakeRing,
                    beyond && ring == InRing::Sound,
                    "{input}"
                );
                assert_eq!(verdict == Verdict::End, beyond && ring == InRing::Nothing, "{input}");
                assert_eq!(verdict == Verdict::Damage, lost_sync || lost_acknowledged, "{input}");
                seen += 1;
            }
        }
        assert_eq!(seen, 48);
    }
}
