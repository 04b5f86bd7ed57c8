//! Where the text of a setting comes from: a flag, else the environment, else the file, else its default.
//!
//! Nothing here knows what a value means. The types, bounds and relations are `Config`'s.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

use super::settings::{self, Setting};
use crate::error::{Error, Kind, Result};

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag(&'static str),
    /// An environment variable.
    Variable(String),
    /// A line of the file.
    File {
        /// The file.
        path: PathBuf,
        /// Counted from one.
        line: usize,
    },
    /// Nobody set it.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag(name) => write!(f, "--{name}"),
            Self::Variable(name) => f.write_str(name),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// The text of a setting and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// As it was written.
    pub text: String,
    /// By whom.
    pub origin: Origin,
}

/// Flags given on the command line: name of the setting to its text.
pub type Flags = BTreeMap<&'static str, String>;

/// One variable of the environment, or why it cannot be read.
pub type Environment<'a> = &'a dyn Fn(&str) -> Result<String, std::env::VarError>;

/// Every setting's text: the first layer that has it.
pub(super) fn merge(
    flags: &Flags,
    environment: Environment<'_>,
    file: &BTreeMap<&'static str, Value>,
) -> Result<BTreeMap<&'static str, Value>> {
    let mut merged = BTreeMap::new();
    for setting in settings::all() {
        let value = if let Some(text) = flags.get(setting.name) {
            Value { text: text.clone(), origin: Origin::Flag(setting.name) }
        } else if let Some(value) = variable(setting, environment)? {
            value
        } else if let Some(value) = file.get(setting.name) {
            value.clone()
        } else {
            Value { text: default_text(setting, &merged), origin: Origin::Default }
        };
        merged.insert(setting.name, value);
    }
    Ok(merged)
}

fn variable(setting: &Setting, environment: Environment<'_>) -> Result<Option<Value>> {
    let name = setting.variable();
    let text = read_variable(&name, environment)?;
    Ok(text.map(|text| Value { text, origin: Origin::Variable(name) }))
}

/// An empty variable counts as unset, as is usual for units and shells.
pub(super) fn read_variable(name: &str, environment: Environment<'_>) -> Result<Option<String>> {
    match environment(name) {
        Ok(text) => Ok(Some(text).filter(|text| !text.is_empty())),
        Err(std::env::VarError::NotPresent) => Ok(None),
        Err(std::env::VarError::NotUnicode(_)) => {
            Err(Error::new(Kind::InvalidArgument, format!("{name} is not utf-8"))
                .with_fix("write it in utf-8, or unset it"))
        }
    }
}

fn default_text(setting: &Setting, merged: &BTreeMap<&'static str, Value>) -> String {
    let mut text = setting.default.to_owned();
    for name in ["state-dir", "runtime-dir"] {
        if let Some(value) = merged.get(name) {
            text = text.replace(&format!("{{{name}}}"), value.text.trim_end_matches('/'));
        }
    }
    text
}

/// Reads a file of settings. Only the default file may be missing.
pub(super) fn read_file(
    path: &Path,
    may_be_missing: bool,
) -> Result<BTreeMap<&'static str, Value>> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if may_be_missing && error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(BTreeMap::new());
        }
        Err(error) => {
            let message = format!("cannot read {}", path.display());
            return Err(Error::new(Kind::InvalidArgument, message)
                .with_source(error)
                .with_fix("name a readable file with --config"));
        }
    };
    parse_file(path, &text)
}

/// The settings of a file; the first wrong line is the error.
pub(super) fn parse_file(path: &Path, text: &str) -> Result<BTreeMap<&'static str, Value>> {
    let place = |offset: usize| Origin::File { path: path.to_owned(), line: line_at(text, offset) };
    let table = DeTable::parse(text).map_err(|error| {
        let at = place(error.span().map_or(0, |span| span.start));
        let reason = error.message().replace('\n', ", ");
        wrong(&at, &reason).with_fix("write lines such as cache-bytes-max = \"10G\"")
    })?;
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let mut values = BTreeMap::new();
    for (key, value) in entries {
        let origin = place(key.span().start);
        let name = key.get_ref().as_ref();
        let Some(setting) = settings::all().find(|setting| setting.name == name) else {
            return Err(
                wrong(&origin, &format!("there is no setting {name:?}")).with_fix(suggestion(name))
            );
        };
        let Some(text) = scalar(value.get_ref()) else {
            let kind = value.get_ref().type_str();
            return Err(wrong(&origin, &format!("{name} has a value of type {kind}"))
                .with_fix(format!("write it as {name} = \"{}\"", setting.default)));
        };
        values.insert(setting.name, Value { text, origin });
    }
    Ok(values)
}

fn scalar(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.to_string()),
        DeValue::Integer(number) => {
            i128::from_str_radix(number.as_str(), number.radix()).ok().map(|n| n.to_string())
        }
        DeValue::Boolean(truth) => Some(truth.to_string()),
        _ => None,
    }
}

/// The line of an offset, counted from one.
fn line_at(text: &str, offset: usize) -> usize {
    let before = &text.as_bytes()[..offset.min(text.len())];
    1 + before.iter().filter(|byte| **byte == b'\n').count()
}

/// An error at a place; the reason follows it.
pub(super) fn wrong(origin: &Origin, reason: &str) -> Error {
    Error::new(Kind::InvalidArgument, format!("{origin}: {reason}"))
}

/// The setting that was probably meant: the one that shares the most of its start.
fn suggestion(name: &str) -> String {
    let name = name.replace('_', "-");
    let shared = |other: &str| name.bytes().zip(other.bytes()).take_while(|(a, b)| a == b).count();
    let nearest = settings::all().max_by_key(|setting| shared(setting.name));
    match nearest.filter(|setting| shared(setting.name) >= 3) {
        Some(setting) => format!("perhaps {} is meant", setting.name),
        None => "blockd config check lists the settings".to_owned(),
    }
}
