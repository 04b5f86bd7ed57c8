//! The command line: a client of the control socket, and the start of the daemon.
//!
//! Answers go to stdout and nothing else does; notes and errors go to stderr. An error is one line that
//! says what, where, and what to do; under `--json` it is `{"error": …}` on stdout. Exit codes: 0; 1
//! failed, or no daemon; 2 wrong use; 3 not found; 4 busy, conflict or refused; 5 store unavailable.

pub mod args;
pub mod commands;
pub mod flags;
pub mod mount;
pub mod output;
pub mod serve;
pub mod session;
pub mod show;

#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Parser};

use crate::error::{Error, Kind, Result};
use args::{Command, CommandLine, Config};
use output::Output;
use session::Session;

/// Runs the command of this process.
#[must_use]
pub fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    ExitCode::from(run(arguments, &mut std::io::stdout(), &mut std::io::stderr()))
}

/// Runs one command over the given streams; its exit code.
pub fn run(arguments: Vec<OsString>, stdout: &mut dyn Write, stderr: &mut dyn Write) -> u8 {
    let line = match CommandLine::try_parse_from(&arguments) {
        Ok(line) => line,
        Err(error) => return not_a_command(&error, &arguments, stdout, stderr),
    };
    let mut output = Output::new(line.common.json, stdout, stderr);
    match dispatch(line, &mut output) {
        Ok(()) => 0,
        Err(error) => {
            output.error(&error);
            error.kind().exit_code()
        }
    }
}

fn dispatch(line: CommandLine, output: &mut Output<'_>) -> Result<()> {
    let environment = |name: &str| std::env::var(name);
    let common = line.common;
    match line.command {
        Command::Serve(args) => serve::run(&common, &args, &environment),
        Command::Config(Config::Check(args)) => {
            let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
            let names: Vec<_> = names.collect();
            serve::check_config(&common, &args, &environment, &names, output)
        }
        command => {
            let session = Session::new(&common, |name| std::env::var(name).ok());
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(
                    |error| Error::new(Kind::Failed, "start the runtime").with_source(error),
                )?;
            runtime.block_on(call(command, &session, output))
        }
    }
}

async fn call(command: Command, session: &Session, output: &mut Output<'_>) -> Result<()> {
    match command {
        Command::Create(args) => commands::create(args, session, output).await,
        Command::List => commands::list(session, output).await,
        Command::Show(args) => commands::show(args, session, output).await,
        Command::Usage(args) => commands::usage(args, session, output).await,
        Command::Status => commands::status(session, output).await,
        Command::Attach(args) => commands::attach(args, session, output).await,
        Command::Detach(args) => commands::detach(args, session, output).await,
        Command::Mount(args) => mount::mount(args, session, output).await,
        Command::Umount(args) => mount::umount(args, session, output).await,
        Command::Flush(args) => commands::flush(args, session, output).await,
        Command::Drain(args) => commands::drain(args, session, output).await,
        Command::Snapshot(args) => commands::snapshot(args, session, output).await,
        Command::Snapshots(args) => commands::snapshots(args, session, output).await,
        Command::Fork(args) => commands::fork(args, session, output).await,
        Command::Delete(args) => commands::delete(args, session, output).await,
        Command::Resize(args) => commands::resize(args, session, output).await,
        Command::Check(args) => commands::check(args, session, output).await,
        Command::Recover(args) => commands::recover(args, session, output).await,
        Command::Serve(_) | Command::Config(_) => unreachable!("they call no daemon"),
    }
}

/// Help, the version, or a wrong command line.
fn not_a_command(
    error: &clap::Error,
    arguments: &[OsString],
    stdout: &mut dyn Write,
    stderr: &mut dyn Write,
) -> u8 {
    let json = arguments.iter().any(|argument| argument == "--json");
    // A reader that is gone is no failure.
    match error.kind() {
        _ if !error.use_stderr() => {
            let _ = write!(stdout, "{error}");
            0
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand if !json => {
            let _ = write!(stderr, "{error}");
            2
        }
        _ => {
            Output::new(json, stdout, stderr).error(&misuse(error, arguments));
            2
        }
    }
}

/// A wrong command line as an error of ours: one line, with its code.
fn misuse(error: &clap::Error, arguments: &[OsString]) -> Error {
    let source = std::error::Error::source(error);
    if let Some(ours) = source.and_then(|source| source.downcast_ref::<Error>()) {
        return Error::new(ours.kind(), ours.report()).with_fix(ours.fix().unwrap_or_default());
    }
    let argument = match error.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(argument)) => argument.as_str(),
        _ => "argument",
    };
    let message = match (error.kind(), source) {
        (ErrorKind::ValueValidation, Some(reason)) => format!("{argument}: {reason}"),
        (ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand, _) => {
            "no command is given".to_owned()
        }
        _ => first_paragraph(&error.to_string()),
    };
    match message.split_once("; ") {
        Some((what, fix)) => Error::new(Kind::InvalidArgument, what).with_fix(fix),
        None => Error::new(Kind::InvalidArgument, message).with_fix(hint(error, arguments)),
    }
}

/// What was probably meant, or where to read on.
fn hint(error: &clap::Error, arguments: &[OsString]) -> String {
    let suggested = match error.get(ContextKind::SuggestedArg) {
        Some(ContextValue::String(suggested)) => Some(suggested.as_str()),
        _ => match error.get(ContextKind::SuggestedSubcommand) {
            Some(ContextValue::Strings(suggested)) => suggested.first().map(String::as_str),
            _ => None,
        },
    };
    let commands = CommandLine::command();
    let command = arguments.iter().skip(1).find_map(|argument| commands.find_subcommand(argument));
    let help = match command {
        Some(command) => format!("see blockd {} --help", command.get_name()),
        None => "see blockd --help".to_owned(),
    };
    match suggested {
        Some(suggested) => format!("perhaps {suggested} is meant; {help}"),
        None => help,
    }
}

/// clap's message without its prefix, on one line.
fn first_paragraph(text: &str) -> String {
    let text = text.strip_prefix("error: ").unwrap_or(text);
    let lines = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim);
    lines.collect::<Vec<_>>().join(" ")
}
