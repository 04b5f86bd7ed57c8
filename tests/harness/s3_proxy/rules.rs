//! Which requests a fault befalls, and what it does. Pure.

use std::time::Duration;

/// Names a rule that was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleId(pub(super) u64);

/// Which keys a rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Key {
    /// Every key, and requests on the bucket itself.
    Any,
    /// Keys that contain this text.
    Contains(String),
    /// Keys that end in this text.
    EndsWith(String),
}

impl Key {
    /// Keys that contain `text`.
    #[must_use]
    pub fn contains(text: &str) -> Self {
        Self::Contains(text.to_owned())
    }

    /// The heads of disks.
    #[must_use]
    pub fn heads() -> Self {
        Self::EndsWith("/head".to_owned())
    }

    /// The data blobs of disks.
    #[must_use]
    pub fn blobs() -> Self {
        Self::Contains("/b/".to_owned())
    }

    /// The map objects of disks.
    #[must_use]
    pub fn maps() -> Self {
        Self::Contains("/m/".to_owned())
    }

    fn matches(&self, key: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Contains(text) => key.contains(text.as_str()),
            Self::EndsWith(text) => key.ends_with(text.as_str()),
        }
    }
}

/// What happens to a chosen request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// It never reaches the store; the client gets this status and XML error code.
    Answer(u16, &'static str),
    /// It waits, then goes on.
    DelayBefore(Duration),
    /// It is applied; the answer waits.
    DelayAfter(Duration),
    /// It never reaches the store; the connection is closed.
    Drop,
    /// It is applied; the connection is closed without an answer.
    ApplyThenDrop,
    /// It never reaches the store and gets no answer, until the client gives up.
    NeverAnswer,
    /// It is applied and gets no answer, until the client gives up.
    ApplyThenNeverAnswer,
    /// It is kept for [`release_held`](super::Proxy::release_held); the connection is closed.
    Hold,
    /// It is applied; the reply's body ends after so many bytes of those it announced.
    CutBody(usize),
    /// It is applied; one bit of this byte of the reply's body is flipped.
    FlipByte(usize),
    /// It is applied; the reply's body has this text in place of that one.
    Replace(&'static str, &'static str),
    /// It never reaches the store; the client gets status 200 with an XML error in its body.
    OkWithError(&'static str),
    /// It never reaches the store; the client gets status 200 without a body or an `ETag`.
    OkEmpty,
    /// It is applied; where a condition failed the client is told of success, as by a store that
    /// ignores conditions. (To leave them out would break the signature.)
    IgnoreConditions,
}

/// A fault and the requests it befalls.
#[derive(Debug, Clone)]
pub struct Rule {
    pub(super) method: Option<String>,
    pub(super) key: Key,
    pub(super) skip: usize,
    pub(super) times: usize,
    pub(super) one_in: usize,
    pub(super) fault: Fault,
}

impl Rule {
    /// Every request with this method on these keys; the method `ANY` stands for all.
    #[must_use]
    pub fn new(method: &str, key: Key, fault: Fault) -> Self {
        let method = (method != "ANY").then(|| method.to_owned());
        Self { method, key, skip: 0, times: usize::MAX, one_in: 1, fault }
    }

    /// Lets the first `count` matching requests pass.
    #[must_use]
    pub fn skip(mut self, count: usize) -> Self {
        self.skip = count;
        self
    }

    /// Applies to `count` requests, then no more.
    #[must_use]
    pub fn times(mut self, count: usize) -> Self {
        self.times = count;
        self
    }

    /// Applies to every `count`-th of the matching requests.
    #[must_use]
    pub fn one_in(mut self, count: usize) -> Self {
        self.one_in = count;
        self
    }
}

/// A rule with its counts.
#[derive(Debug)]
pub(super) struct Active {
    pub(super) id: RuleId,
    rule: Rule,
    seen: usize,
    hits: usize,
}

impl Active {
    pub(super) fn new(id: RuleId, rule: Rule) -> Self {
        Self { id, rule, seen: 0, hits: 0 }
    }

    pub(super) fn hits(&self) -> usize {
        self.hits
    }

    /// The fault for this request, if the rule is about it; counts it.
    pub(super) fn take(&mut self, method: &str, key: &str) -> Option<Fault> {
        let rule = &self.rule;
        let is_chosen = rule.method.as_deref().is_none_or(|wanted| wanted == method);
        if !is_chosen || !rule.key.matches(key) {
            return None;
        }
        self.seen += 1;
        let turn = self.seen.checked_sub(rule.skip + 1)?;
        if self.hits >= rule.times || !turn.is_multiple_of(rule.one_in) {
            return None;
        }
        self.hits += 1;
        Some(rule.fault.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_counts_only_the_requests_it_is_about() {
        let rule = Rule::new("PUT", Key::heads(), Fault::Drop).skip(1).times(2);
        let mut active = Active::new(RuleId(1), rule);
        let chosen: Vec<_> = ["/head", "/b/1", "/head", "/head", "/head"]
            .iter()
            .map(|key| active.take("PUT", key).is_some())
            .collect();
        assert_eq!(chosen, [false, false, true, true, false]);
        assert!(active.take("GET", "/head").is_none());
        assert_eq!(active.hits(), 2);
    }
}
