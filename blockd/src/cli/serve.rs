//! `blockd serve` and `blockd config check`: the settings, and the daemon in the foreground.

use std::io::IsTerminal;
use std::os::fd::AsFd;

use serde::Serialize;
use tracing_subscriber::EnvFilter;

use super::args::{Common, Serve};
use super::output::Output;
use crate::config::{Environment, Resolved, settings};
use crate::error::{Error, Kind, Result};

/// Resolves the settings of `serve`. `--control` is an option of every command, so it is added here.
///
/// # Errors
/// The first setting that is wrong.
pub fn resolve(common: &Common, serve: &Serve, environment: Environment<'_>) -> Result<Resolved> {
    let mut flags = serve.settings.0.clone();
    if let Some(control) = &common.control {
        let control = control.to_str().ok_or_else(|| {
            Error::new(Kind::InvalidArgument, "--control: the path is not utf-8")
                .with_fix("name a path in utf-8")
        })?;
        flags.insert("control", control.to_owned());
    }
    Resolved::load(serve.config.as_deref(), &flags, environment)
}

/// Runs the daemon until a signal ends it.
///
/// # Errors
/// When a setting is wrong, or the daemon cannot start or go on.
pub fn run(common: &Common, serve: &Serve, environment: Environment<'_>) -> Result<()> {
    let config = resolve(common, serve, environment)?.config;
    log_to_stderr(&config.log_level)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(|error| Error::new(Kind::Failed, "start the runtime").with_source(error))?;
    runtime.block_on(crate::daemon::serve(config))
}

/// Messages go to stderr: with colours on a terminal only, and without times where the journal has
/// its own.
fn log_to_stderr(level: &str) -> Result<()> {
    // What a library says of a request that failed, the store says better, once, with its place.
    let filter = EnvFilter::try_new(format!("{level},aws_smithy_runtime=off,aws_runtime=off"))
        .map_err(|error| Error::new(Kind::InvalidArgument, "log-level").with_source(error))?;
    let stderr = std::io::stderr();
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(stderr.is_terminal())
        .with_target(false);
    let set = match is_journal(std::env::var("JOURNAL_STREAM").ok().as_deref(), &stderr) {
        true => builder.without_time().try_init(),
        false => builder.try_init(),
    };
    set.map_err(|error| Error::new(Kind::Failed, "set up messages").with_source(error))
}

/// Whether `stream` is the one that systemd connected to the journal: a shell below a unit inherits
/// the variable with other streams.
fn is_journal(variable: Option<&str>, stream: &impl AsFd) -> bool {
    let Ok(stat) = rustix::fs::fstat(stream) else {
        return false;
    };
    variable == Some(format!("{}:{}", stat.st_dev, stat.st_ino).as_str())
}

#[derive(Serialize)]
struct Listing {
    settings: Vec<Line>,
    warnings: Vec<String>,
}

#[derive(Serialize)]
struct Line {
    name: &'static str,
    value: String,
    from: String,
}

/// `blockd config check`.
///
/// # Errors
/// The first setting that is wrong.
pub fn check_config(
    common: &Common,
    serve: &Serve,
    environment: Environment<'_>,
    variables: &[String],
    output: &mut Output<'_>,
) -> Result<()> {
    let resolved = resolve(common, serve, environment)?;
    let line = |setting: &settings::Setting| {
        let value = resolved.values.get(setting.name).expect("every setting has a value");
        Line { name: setting.name, value: value.text.clone(), from: value.origin.to_string() }
    };
    let unknown = variables.iter().filter(|name| is_unknown_variable(name));
    let mut warnings: Vec<_> = unknown.map(|name| format!("{name} is not a setting")).collect();
    if resolved.config.store_is_inside_state_dir() {
        warnings.push("the store is inside the state directory: for a first try only".to_owned());
    }
    let listing = Listing { settings: settings::all().map(line).collect(), warnings };
    for warning in &listing.warnings {
        output.note(warning);
    }
    output.answer(&listing, |listing| {
        let rows = listing.settings.iter().map(|line| [line.name, &line.value, &line.from]);
        super::show::table_of(&["SETTING", "VALUE", "FROM"], rows)
    })
}

fn is_unknown_variable(name: &str) -> bool {
    name.starts_with("BLOCKD_")
        && name != "BLOCKD_CONFIG"
        && settings::all().all(|setting| setting.variable() != name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_stream_that_the_journal_named_is_the_journal() {
        let file = tempfile::tempfile().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let name = format!("{}:{}", stat.st_dev, stat.st_ino);
        assert!(is_journal(Some(&name), &file));
        assert!(!is_journal(Some(&format!("{}:{}", stat.st_dev, stat.st_ino + 1)), &file));
        assert!(!is_journal(None, &file));
    }

    #[test]
    fn a_variable_that_looks_like_a_setting_and_is_none_is_noticed() {
        assert!(is_unknown_variable("BLOCKD_CAHCE_DIR"));
        for known in ["BLOCKD_CACHE_DIR", "BLOCKD_CONFIG", "BLOCKD_CONTROL", "PATH"] {
            assert!(!is_unknown_variable(known), "{known}");
        }
    }
}
