//! Newstyle negotiation as a state machine without I/O: bytes go in, bytes and a [`Step`] come
//! out. The caller moves the bytes and looks exports up.
//!
//! ```text
//! ClientFlags ─► Option ─► Data ─┬─► Option              answered at once
//!                  │  ▲          ├─► Opening ─► Option   the export was described, or refused
//!                  │  └── Skip   │           └► Over     transmission begins
//!                  │             └─► Listing ─► Option
//!                  └─► Over      the client broke the rules, or said goodbye
//! ```
//!
//! Nothing is allocated by a length that the peer claims: an option's data is wholly received
//! before it is looked at, data above [`OPTION_BYTES_MAX`] is skipped and refused, and a claim
//! above [`OPTION_SKIP_MAX`] ends the connection. TLS is not offered, and extended headers are an
//! unknown option.

use bytes::{Buf, BufMut, BytesMut};

use self::options::{ClientOption, Inquiry, Refusal, Wish};
use crate::error::OpenError;
use crate::export::ExportInfo;
use crate::wire::{
    self, InfoType, OptionCode, OptionHeader, OptionReply, STRING_BYTES_MAX, WrongMagic,
    handshake_flags as flag, transmission_flags,
};

mod options;
#[cfg(test)]
mod tests;

/// The longest data of an option that is looked at: a name and some queries fit many times.
pub const OPTION_BYTES_MAX: u32 = 64 << 10;
/// The longest data of an option that is skipped; who claims more is not a client.
pub const OPTION_SKIP_MAX: u32 = 1 << 20;
/// So many options per connection; asking about each of thousands of exports still fits.
pub const OPTIONS_MAX: u32 = 1 << 16;
/// The only metadata context there is.
pub const ALLOCATION_CONTEXT: &str = "base:allocation";
/// Its number in the replies to `BLOCK_STATUS`.
pub const ALLOCATION_CONTEXT_ID: u32 = 1;

/// What the machine needs next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// More bytes from the peer.
    Receive,
    /// This export, by [`Handshake::opened`].
    Open {
        /// As the client wrote it.
        name: String,
        /// Whether transmission begins when the export is there.
        enters: bool,
    },
    /// The names of all exports, by [`Handshake::listed`].
    List,
    /// Nothing: transmission begins, with the export that was opened last.
    Enter(Negotiated),
    /// Nothing: the connection ends, once the output is sent.
    Close(Close),
}

/// What was settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Negotiated {
    /// Reads are answered with structured replies.
    pub structured: bool,
    /// `BLOCK_STATUS` is answered, for `base:allocation`.
    pub block_status: bool,
}

/// Why a negotiation ended without an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Close {
    /// The client said goodbye.
    #[error("the client ended the negotiation")]
    Aborted,
    /// The client set flags that were not offered.
    #[error("unknown client flags {0:#x}")]
    ClientFlags(u32),
    /// The client does not speak the protocol.
    #[error(transparent)]
    Magic(#[from] WrongMagic),
    /// The client claims an impossible amount of data.
    #[error("option {code} with {len} bytes of data")]
    OptionLength {
        /// Which option.
        code: OptionCode,
        /// The claim.
        len: u32,
    },
    /// The client never comes to a decision.
    #[error("more than {OPTIONS_MAX} options")]
    OptionCount,
    /// `EXPORT_NAME` for an export that cannot be had; there is no other way to say so.
    #[error("the export cannot be opened, and EXPORT_NAME has no error reply")]
    NoExport,
}

/// One negotiation, from the client's flags to transmission or goodbye.
#[derive(Debug)]
pub struct Handshake {
    state: State,
    payload_bytes_max: u32,
    options_left: u32,
    no_zeroes: bool,
    structured: bool,
    contexts: Option<Contexts>,
}

#[derive(Debug)]
enum State {
    ClientFlags,
    Option,
    Data(OptionHeader),
    Skip { code: OptionCode, left: usize },
    Opening(Inquiry),
    Listing,
    Over(Step),
}

/// The latest choice of metadata contexts; it holds for one export only.
#[derive(Debug)]
struct Contexts {
    export: String,
    allocation: bool,
}

impl Handshake {
    /// Begins by writing the greeting. Clients are told `payload_bytes_max`, or less when their
    /// export wants less.
    pub fn start(payload_bytes_max: u32, output: &mut BytesMut) -> Self {
        wire::encode_greeting(flag::FIXED_NEWSTYLE | flag::NO_ZEROES, output);
        Self {
            state: State::ClientFlags,
            payload_bytes_max,
            options_left: OPTIONS_MAX,
            no_zeroes: false,
            structured: false,
            contexts: None,
        }
    }

    /// Takes what it can from the input and says what it needs next. When that is an export or
    /// the list, it has to be given before the next call.
    pub fn step(&mut self, input: &mut BytesMut, output: &mut BytesMut) -> Step {
        loop {
            let moved = match &mut self.state {
                State::ClientFlags => self.take_client_flags(input),
                State::Option => self.take_option_header(input),
                State::Data(header) => {
                    let header = *header;
                    self.take_option_data(header, input, output)
                }
                State::Skip { code, left } => {
                    let skipped = input.len().min(*left);
                    input.advance(skipped);
                    *left -= skipped;
                    let (code, done) = (*code, *left == 0);
                    if done {
                        let reason = "the option's data is too long";
                        refuse(code, Refusal { reply: OptionReply::ERR_TOO_BIG, reason }, output);
                        self.state = State::Option;
                    }
                    done
                }
                State::Opening(inquiry) => {
                    return Step::Open {
                        name: inquiry.name.clone(),
                        enters: inquiry.wish.enters(),
                    };
                }
                State::Listing => return Step::List,
                State::Over(step) => return step.clone(),
            };
            if !moved {
                return Step::Receive;
            }
        }
    }

    /// Answers the option that [`Step::Open`] came from.
    ///
    /// # Panics
    /// When no export was asked for.
    pub fn opened(&mut self, answer: Result<&ExportInfo, &OpenError>, output: &mut BytesMut) {
        let State::Opening(inquiry) = std::mem::replace(&mut self.state, State::Option) else {
            panic!("an export was given that was not asked for");
        };
        match answer {
            Ok(info) => self.grant(inquiry, info, output),
            Err(error) => self.decline(&inquiry, error, output),
        }
    }

    /// Answers `LIST`.
    ///
    /// # Panics
    /// When the list was not asked for.
    pub fn listed(&mut self, names: &[String], output: &mut BytesMut) {
        assert!(matches!(self.state, State::Listing), "a list was given that was not asked for");
        let mut data = Vec::new();
        // A name beyond the limit could be sent, but no client could ask for it.
        for name in names.iter().filter(|name| name.len() <= STRING_BYTES_MAX) {
            data.clear();
            data.put_u32(u32::try_from(name.len()).expect("names are at most 4096 bytes"));
            data.put_slice(name.as_bytes());
            reply(OptionCode::LIST, OptionReply::SERVER, &data, output);
        }
        reply(OptionCode::LIST, OptionReply::ACK, &[], output);
        self.state = State::Option;
    }

    fn close(&mut self, reason: Close) -> bool {
        self.state = State::Over(Step::Close(reason));
        true
    }

    fn take_client_flags(&mut self, input: &mut BytesMut) -> bool {
        let Ok(flags) = input.try_get_u32() else { return false };
        let known = u32::from(flag::FIXED_NEWSTYLE | flag::NO_ZEROES);
        if flags & !known != 0 {
            return self.close(Close::ClientFlags(flags));
        }
        // A client that does not claim to be of the fixed style is served all the same: if it
        // sends an option, it wants the answer.
        self.no_zeroes = flags & u32::from(flag::NO_ZEROES) != 0;
        self.state = State::Option;
        true
    }

    fn take_option_header(&mut self, input: &mut BytesMut) -> bool {
        let Some(bytes) = input.first_chunk() else { return false };
        let header = match OptionHeader::decode(bytes) {
            Ok(header) => header,
            Err(wrong) => return self.close(Close::Magic(wrong)),
        };
        input.advance(OptionHeader::BYTES);
        let Some(left) = self.options_left.checked_sub(1) else {
            return self.close(Close::OptionCount);
        };
        self.options_left = left;

        let OptionHeader { code, len } = header;
        let refusable = code != OptionCode::EXPORT_NAME;
        self.state = match len {
            ..=OPTION_BYTES_MAX => State::Data(header),
            ..=OPTION_SKIP_MAX if refusable => {
                let left = usize::try_from(len).expect("at most 1 MiB");
                State::Skip { code, left }
            }
            _ => return self.close(Close::OptionLength { code, len }),
        };
        true
    }

    fn take_option_data(
        &mut self,
        header: OptionHeader,
        input: &mut BytesMut,
        output: &mut BytesMut,
    ) -> bool {
        let OptionHeader { code, len } = header;
        let len = usize::try_from(len).expect("at most 64 KiB");
        if input.len() < len {
            return false;
        }
        let data = input.split_to(len);
        self.state = State::Option;
        if code == OptionCode::SET_META_CONTEXT {
            // It replaces the earlier choice even when it fails.
            self.contexts = None;
        }
        match ClientOption::parse(code, &data, self.structured) {
            Ok(ClientOption::Abort) => {
                reply(code, OptionReply::ACK, &[], output);
                return self.close(Close::Aborted);
            }
            Ok(ClientOption::List) => self.state = State::Listing,
            Ok(ClientOption::StructuredReplies) => {
                self.structured = true;
                reply(code, OptionReply::ACK, &[], output);
            }
            Ok(ClientOption::Export(inquiry)) => self.state = State::Opening(inquiry),
            Err(_) if code == OptionCode::EXPORT_NAME => return self.close(Close::NoExport),
            Err(refusal) => refuse(code, refusal, output),
        }
        true
    }

    fn grant(&mut self, inquiry: Inquiry, info: &ExportInfo, output: &mut BytesMut) {
        let Inquiry { code, name, wish } = inquiry;
        match wish {
            Wish::EnterSilently => {
                output.put_u64(info.size);
                output.put_u16(transmission_flags(info, self.structured));
                if !self.no_zeroes {
                    output.put_bytes(0, wire::EXPORT_NAME_PADDING);
                }
                self.enter(&name);
            }
            Wish::Describe(wanted) => self.describe(code, &wanted, info, output),
            Wish::Enter(wanted) => {
                self.describe(code, &wanted, info, output);
                self.enter(&name);
            }
            Wish::ListContexts { allocation } => answer_contexts(code, allocation, 0, output),
            Wish::SetContexts { allocation } => {
                answer_contexts(code, allocation, ALLOCATION_CONTEXT_ID, output);
                self.contexts = Some(Contexts { export: name, allocation });
            }
        }
    }

    fn decline(&mut self, inquiry: &Inquiry, error: &OpenError, output: &mut BytesMut) {
        if inquiry.wish == Wish::EnterSilently {
            self.close(Close::NoExport);
            return;
        }
        let kind = match error {
            OpenError::Unknown => OptionReply::ERR_UNKNOWN,
            OpenError::Policy(_) => OptionReply::ERR_POLICY,
            OpenError::ShuttingDown => OptionReply::ERR_SHUTDOWN,
        };
        reply(inquiry.code, kind, text(&error.to_string()), output);
    }

    fn enter(&mut self, name: &str) {
        let block_status = self.structured
            && self
                .contexts
                .as_ref()
                .is_some_and(|chosen| chosen.allocation && chosen.export == name);
        let negotiated = Negotiated { structured: self.structured, block_status };
        self.state = State::Over(Step::Enter(negotiated));
    }

    /// Size and flags always; the rest to those who ask, as others may not understand it.
    fn describe(
        &self,
        code: OptionCode,
        wanted: &[InfoType],
        info: &ExportInfo,
        output: &mut BytesMut,
    ) {
        let mut fact = |kind: InfoType, encode: &dyn Fn(&mut Vec<u8>)| {
            let mut data = Vec::new();
            data.put_u16(kind.0);
            encode(&mut data);
            reply(code, OptionReply::INFO, &data, output);
        };
        fact(InfoType::EXPORT, &|data| {
            data.put_u64(info.size);
            data.put_u16(transmission_flags(info, self.structured));
        });
        if wanted.contains(&InfoType::NAME) {
            fact(InfoType::NAME, &|data| data.put_slice(text(&info.name)));
        }
        if let Some(description) = &info.description
            && wanted.contains(&InfoType::DESCRIPTION)
        {
            fact(InfoType::DESCRIPTION, &|data| data.put_slice(text(description)));
        }
        if wanted.contains(&InfoType::BLOCK_SIZE) {
            fact(InfoType::BLOCK_SIZE, &|data| {
                data.put_u32(info.block_sizes.min);
                data.put_u32(info.block_sizes.preferred);
                data.put_u32(info.block_sizes.max.min(self.payload_bytes_max));
            });
        }
        reply(code, OptionReply::ACK, &[], output);
    }
}

/// What a client may do with an export. `FLUSH` and `FUA` are always there, so that a client
/// never concludes that there is nothing to flush.
pub fn transmission_flags(info: &ExportInfo, structured: bool) -> u16 {
    use transmission_flags as flag;
    let mut flags = flag::HAS_FLAGS
        | flag::SEND_FLUSH
        | flag::SEND_FUA
        | flag::SEND_CACHE
        | flag::CAN_MULTI_CONN;
    if info.read_only {
        flags |= flag::READ_ONLY;
    } else {
        flags |= flag::SEND_TRIM | flag::SEND_WRITE_ZEROES;
        if info.fast_zeroes {
            flags |= flag::SEND_FAST_ZERO;
        }
    }
    if structured {
        flags |= flag::SEND_DF;
    }
    flags
}

fn answer_contexts(code: OptionCode, allocation: bool, id: u32, output: &mut BytesMut) {
    if allocation {
        let mut data = Vec::new();
        data.put_u32(id);
        data.put_slice(ALLOCATION_CONTEXT.as_bytes());
        reply(code, OptionReply::META_CONTEXT, &data, output);
    }
    reply(code, OptionReply::ACK, &[], output);
}

fn refuse(code: OptionCode, refusal: Refusal, output: &mut BytesMut) {
    reply(code, refusal.reply, refusal.reason.as_bytes(), output);
}

fn reply(code: OptionCode, kind: OptionReply, data: &[u8], output: &mut BytesMut) {
    wire::encode_option_reply(code, kind, data, output);
}

/// As much of a string as the protocol allows, cut between characters.
fn text(string: &str) -> &[u8] {
    &string.as_bytes()[..string.floor_char_boundary(STRING_BYTES_MAX)]
}
