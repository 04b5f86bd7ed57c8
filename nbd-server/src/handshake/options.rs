//! The data of an option, checked and turned into what the client wants.

use crate::wire::{Fields, InfoType, OptionCode, OptionReply, STRING_BYTES_MAX};

/// What a client wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ClientOption {
    /// End the negotiation.
    Abort,
    /// Name the exports.
    List,
    /// Use structured replies.
    StructuredReplies,
    /// Something about one export.
    Export(Inquiry),
}

/// What a client wants of one export; answered once the export was looked up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Inquiry {
    pub(super) code: OptionCode,
    pub(super) name: String,
    pub(super) wish: Wish,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wish {
    /// Enter transmission by the old road, which cannot report errors.
    EnterSilently,
    /// Describe the export.
    Describe(Vec<InfoType>),
    /// Describe the export and enter transmission.
    Enter(Vec<InfoType>),
    /// Name the metadata contexts.
    ListContexts { allocation: bool },
    /// Choose the metadata contexts.
    SetContexts { allocation: bool },
}

impl Wish {
    /// Whether a successful answer ends the negotiation.
    pub(super) fn enters(&self) -> bool {
        matches!(self, Self::EnterSilently | Self::Enter(_))
    }
}

/// An option that is answered with an error, after which the haggling goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) reply: OptionReply,
    pub(super) reason: &'static str,
}

const fn invalid(reason: &'static str) -> Refusal {
    Refusal { reply: OptionReply::ERR_INVALID, reason }
}

const CUT_SHORT: Refusal = invalid("the option's data is shorter than it says");

impl ClientOption {
    pub(super) fn parse(code: OptionCode, data: &[u8], structured: bool) -> Result<Self, Refusal> {
        match code {
            OptionCode::EXPORT_NAME => {
                let name = parse_name(data)?;
                Ok(Self::Export(Inquiry { code, name, wish: Wish::EnterSilently }))
            }
            // Data is against the rules here, but a client that wants to leave may leave.
            OptionCode::ABORT => Ok(Self::Abort),
            OptionCode::LIST => parse_empty(data).map(|()| Self::List),
            OptionCode::STRUCTURED_REPLY => parse_empty(data).map(|()| Self::StructuredReplies),
            OptionCode::INFO | OptionCode::GO => parse_description(code, data).map(Self::Export),
            OptionCode::LIST_META_CONTEXT | OptionCode::SET_META_CONTEXT => {
                if !structured {
                    return Err(invalid("negotiate structured replies first"));
                }
                parse_contexts(code, data).map(Self::Export)
            }
            _ => Err(Refusal {
                reply: OptionReply::ERR_UNSUP,
                reason: "this server does not know the option",
            }),
        }
    }
}

fn parse_empty(data: &[u8]) -> Result<(), Refusal> {
    if data.is_empty() { Ok(()) } else { Err(invalid("the option takes no data")) }
}

fn parse_name(bytes: &[u8]) -> Result<String, Refusal> {
    if bytes.len() > STRING_BYTES_MAX {
        return Err(invalid("the export name is longer than 4096 bytes"));
    }
    match str::from_utf8(bytes) {
        Ok(name) if !name.contains('\0') => Ok(name.to_owned()),
        _ => Err(invalid("the export name is not text")),
    }
}

/// `INFO` and `GO`: a name, a count, and so many kinds of fact.
fn parse_description(code: OptionCode, data: &[u8]) -> Result<Inquiry, Refusal> {
    let mut fields = Fields::new(data);
    let name = parse_name(fields.counted().ok_or(CUT_SHORT)?)?;
    let count = fields.u16().ok_or(CUT_SHORT)?;
    let mut wanted = Vec::new();
    for _ in 0..count {
        wanted.push(InfoType(fields.u16().ok_or(CUT_SHORT)?));
    }
    parse_end(&fields)?;
    let wish = if code == OptionCode::GO { Wish::Enter(wanted) } else { Wish::Describe(wanted) };
    Ok(Inquiry { code, name, wish })
}

/// `LIST_META_CONTEXT` and `SET_META_CONTEXT`: a name, a count, and so many queries.
///
/// There is one context to be had, so the queries boil down to whether any asks for it. When
/// listing, no query at all asks for everything, and `base:` for all of its namespace.
fn parse_contexts(code: OptionCode, data: &[u8]) -> Result<Inquiry, Refusal> {
    let mut fields = Fields::new(data);
    let name = parse_name(fields.counted().ok_or(CUT_SHORT)?)?;
    let count = fields.u32().ok_or(CUT_SHORT)?;
    let listing = code == OptionCode::LIST_META_CONTEXT;
    let mut allocation = listing && count == 0;
    for _ in 0..count {
        let query = fields.counted().ok_or(CUT_SHORT)?;
        if !query.contains(&b':') {
            return Err(invalid("a metadata context needs a namespace and a colon"));
        }
        allocation |= query == super::ALLOCATION_CONTEXT.as_bytes();
        allocation |= listing && query == b"base:";
    }
    parse_end(&fields)?;
    let wish =
        if listing { Wish::ListContexts { allocation } } else { Wish::SetContexts { allocation } };
    Ok(Inquiry { code, name, wish })
}

fn parse_end(fields: &Fields<'_>) -> Result<(), Refusal> {
    if fields.is_empty() {
        Ok(())
    } else {
        Err(invalid("the option's data is longer than it says"))
    }
}
