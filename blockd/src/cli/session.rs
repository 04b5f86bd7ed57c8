//! Calls of one command to the daemon: what it shows while it waits, and how it ends on Ctrl-C.

use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::args::Common;
use crate::config::units::show_size;
use crate::control::api::{Progress, Request};
use crate::control::client::{Client, SOCKET_DEFAULT};
use crate::error::{Error, Kind, Result};

/// What takes longer than this shows its progress.
const QUIET: Duration = Duration::from_secs(2);

const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);

/// A client and the terminal that it may use.
#[derive(Debug)]
pub struct Session {
    client: Client,
    shows_progress: bool,
}

impl Session {
    /// The session that the common options ask for.
    #[must_use]
    pub fn new(common: &Common, variable: impl FnOnce(&str) -> Option<String>) -> Self {
        let named = common.control.clone();
        let named =
            named.or_else(|| variable("BLOCKD_CONTROL").filter(|v| !v.is_empty()).map(Into::into));
        let socket = named.unwrap_or_else(|| SOCKET_DEFAULT.into());
        Self {
            client: Client::new(socket, common.timeout.unwrap_or(TIMEOUT_DEFAULT)),
            shows_progress: !common.json && std::io::stderr().is_terminal(),
        }
    }

    /// The daemon's socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        self.client.socket()
    }

    /// Calls the daemon.
    ///
    /// # Errors
    /// What the daemon says, that there is none, or that the user has had enough.
    pub async fn call<R: Request>(&self, request: &R) -> Result<R::Reply> {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let mut hear = |progress| show(&bar, progress);
        let mut call = std::pin::pin!(self.client.call(request, &mut hear));
        let mut interrupted = std::pin::pin!(tokio::signal::ctrl_c());
        let mut quiet = std::pin::pin!(tokio::time::sleep(QUIET));
        let mut is_shown = !self.shows_progress;
        let result = loop {
            tokio::select! {
                biased;
                result = &mut call => break result,
                Ok(()) = &mut interrupted => break Err(interruption(R::COMMAND)),
                () = &mut quiet, if !is_shown => {
                    is_shown = true;
                    reveal(&bar, R::COMMAND);
                }
            }
        };
        bar.finish_and_clear();
        result
    }
}

/// The daemon is told by the end of the connection; what it had begun it brings to an end.
fn interruption(command: &str) -> Error {
    Error::new(Kind::Failed, format!("{command} was interrupted"))
        .with_fix("see what was done with blockd list and blockd status")
}

fn reveal(bar: &ProgressBar, command: &str) {
    if bar.message().is_empty() {
        bar.set_message(command.to_owned());
    }
    bar.set_draw_target(ProgressDrawTarget::stderr());
    bar.enable_steady_tick(Duration::from_millis(250));
}

fn show(bar: &ProgressBar, progress: Progress) {
    let template = match progress.total_bytes {
        Some(_) => "{spinner} {msg} {bar:30} {prefix} {eta}",
        None => "{spinner} {msg} {prefix}",
    };
    let mut amount = match progress.done_bytes {
        0 => String::new(),
        done => show_size(done),
    };
    if let Some(total) = progress.total_bytes {
        bar.set_length(total);
        amount = format!("{} of {}", show_size(progress.done_bytes), show_size(total));
    }
    bar.set_style(ProgressStyle::with_template(template).expect("the templates are valid"));
    bar.set_position(progress.done_bytes);
    bar.set_prefix(amount);
    bar.set_message(progress.doing);
}
