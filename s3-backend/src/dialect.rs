//! How one store wants to be spoken to: settings that a URL fixes, or that are found out by asking.

use std::sync::{Mutex, MutexGuard};

/// The form in which an ETag is put into `If-Match`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfMatch {
    /// `If-Match: "abc"`, as HTTP has it.
    Quoted,
    /// `If-Match: abc`, the only form that Ceph's gateway took up to version 16.
    Unquoted,
}

impl IfMatch {
    /// The name in URLs.
    pub fn name(self) -> &'static str {
        match self {
            IfMatch::Quoted => "quoted",
            IfMatch::Unquoted => "unquoted",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [IfMatch::Quoted, IfMatch::Unquoted].into_iter().find(|form| form.name() == name)
    }

    pub(crate) fn other(self) -> Self {
        match self {
            IfMatch::Quoted => IfMatch::Unquoted,
            IfMatch::Unquoted => IfMatch::Quoted,
        }
    }
}

/// Whether puts carry `x-amz-checksum-crc32`, so that the store checks what it received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksums {
    /// They do.
    On,
    /// They do not: the store refuses the header. Our own checksums inside the bodies remain.
    Off,
}

impl Checksums {
    /// The name in URLs.
    pub fn name(self) -> &'static str {
        match self {
            Checksums::On => "on",
            Checksums::Off => "off",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Checksums::On, Checksums::Off].into_iter().find(|checksums| checksums.name() == name)
    }
}

/// What is known of a store's ways.
///
/// `If-Match` changes only at the word of the probe, which also sees that the new form is not ignored.
/// Checksums and bulk deletion are given up when the store refuses the first use of them; once they
/// worked, a refusal is a fault and not a habit.
#[derive(Debug)]
pub struct Dialect {
    state: Mutex<State>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    if_match: Setting<IfMatch>,
    checksums: Setting<Checksums>,
    bulk_delete: Setting<bool>,
}

#[derive(Clone, Copy, Debug)]
struct Setting<T> {
    value: T,
    settled: bool,
}

impl<T> Setting<T> {
    fn new(fixed: Option<T>, first_try: T) -> Self {
        let settled = fixed.is_some();
        Setting { value: fixed.unwrap_or(first_try), settled }
    }

    /// Gives the value up for another, unless it is settled. Says whether it did.
    fn refuse(&mut self, instead: T) -> bool {
        if self.settled {
            return false;
        }
        *self = Setting { value: instead, settled: true };
        true
    }
}

impl Dialect {
    /// `None` is found out.
    pub(crate) fn new(if_match: Option<IfMatch>, checksums: Option<Checksums>) -> Self {
        let state = State {
            if_match: Setting::new(if_match, IfMatch::Quoted),
            checksums: Setting::new(checksums, Checksums::On),
            bulk_delete: Setting::new(None, true),
        };
        Self { state: Mutex::new(state) }
    }

    /// The form of ETags in `If-Match`.
    pub fn if_match(&self) -> IfMatch {
        self.lock().if_match.value
    }

    /// Whether puts carry a checksum.
    pub fn checksums(&self) -> Checksums {
        self.lock().checksums.value
    }

    /// Whether many keys are deleted by one request.
    pub fn bulk_delete(&self) -> bool {
        self.lock().bulk_delete.value
    }

    /// Tries another form of `If-Match`, where the URL does not fix one.
    pub(crate) fn try_if_match(&self, form: IfMatch) -> bool {
        let mut state = self.lock();
        if !state.if_match.settled {
            state.if_match.value = form;
        }
        state.if_match.value == form
    }

    /// Whether the form is fixed, or a swap in it was seen to be honest.
    pub(crate) fn if_match_is_settled(&self) -> bool {
        self.lock().if_match.settled
    }

    pub(crate) fn if_match_worked(&self) {
        self.lock().if_match.settled = true;
    }

    pub(crate) fn checksums_worked(&self) {
        self.lock().checksums.settled = true;
    }

    /// The store refused a put that carried a checksum. Says whether to try without from now on.
    pub(crate) fn checksums_refused(&self) -> bool {
        self.lock().checksums.refuse(Checksums::Off)
    }

    pub(crate) fn bulk_delete_worked(&self) {
        self.lock().bulk_delete.settled = true;
    }

    /// The store refused a bulk deletion. Says whether to delete one by one from now on.
    pub(crate) fn bulk_delete_refused(&self) -> bool {
        self.lock().bulk_delete.refuse(false)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no code panics while it holds the dialect")
    }
}
