//! One connection, from the greeting to its end. It runs as a single future on any runtime and
//! starts no tasks.

use std::io;
use std::sync::Arc;

use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use self::transmission::Transmission;
use crate::error::OpenError;
use crate::export::{Export, ExportDirectory, ExportInfo};
use crate::handshake::{Close, Handshake, Negotiated, Step};
use crate::registry::{Registration, Stop};
use crate::request::Terms;
use crate::server::ServerConfig;
use crate::wire::WrongMagic;

mod input;
mod output;
mod reply;
mod transmission;

/// Why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum End {
    #[error("the client disconnected")]
    Disconnected,
    #[error("the client closed the connection")]
    Closed,
    #[error("the client closed the connection in the middle of a message")]
    ClosedMidMessage,
    #[error("the server ended the connection")]
    Stopped,
    #[error("the negotiation took longer than {0:?}")]
    HandshakeTimeout(std::time::Duration),
    #[error(transparent)]
    Negotiation(#[from] Close),
    #[error(transparent)]
    Magic(#[from] WrongMagic),
    #[error("connection lost: {0}")]
    Io(#[from] io::Error),
}

/// Serves one client. Who had an export is worth a line to everyone; others come from health
/// checks and scanners.
pub(crate) async fn serve<S, D>(
    mut stream: S,
    directory: &D,
    config: &ServerConfig,
    registration: &Registration,
    mut stop: Stop,
) where
    S: AsyncRead + AsyncWrite + Unpin,
    D: ExportDirectory,
{
    let (connection, peer) = (registration.id(), registration.peer());
    let negotiation = negotiate(&mut stream, directory, config, registration);
    let agreed = match unless_stopped(&mut stop, negotiation, config).await {
        Ok(agreed) => agreed,
        Err(end) => {
            tracing::debug!(connection, peer, reason = %end, "no export chosen");
            return;
        }
    };
    tracing::info!(connection, peer, export = agreed.name, "client connected");
    let end = Transmission::new(&mut stream, agreed, config).run(stop).await;
    tracing::info!(connection, reason = %end, "client left");
    // The replies were sent; a peer that is gone does not mind how we leave.
    let _ = stream.shutdown().await;
}

/// A negotiation within its time, dropped at once when the connection has to end.
async fn unless_stopped<T>(
    stop: &mut Stop,
    negotiation: impl Future<Output = Result<T, End>>,
    config: &ServerConfig,
) -> Result<T, End> {
    let limit = config.handshake_timeout;
    tokio::select! {
        biased;
        _ = stop => Err(End::Stopped),
        result = tokio::time::timeout(limit, negotiation) => {
            result.unwrap_or(Err(End::HandshakeTimeout(limit)))
        }
    }
}

/// What a negotiation comes to.
struct Agreed<E> {
    export: Arc<E>,
    name: String,
    terms: Terms,
    /// Bytes that were received beyond the last option.
    input: BytesMut,
}

/// Runs the state machine until an export is chosen.
async fn negotiate<S, D>(
    stream: &mut S,
    directory: &D,
    config: &ServerConfig,
    registration: &Registration,
) -> Result<Agreed<D::Export>, End>
where
    S: AsyncRead + AsyncWrite + Unpin,
    D: ExportDirectory,
{
    let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
    let mut machine = Handshake::start(config.payload_bytes_max, &mut output);
    let mut opened = None;
    loop {
        let step = machine.step(&mut input, &mut output);
        // Before anything else, so that what waits is never more than one answer.
        stream.write_all_buf(&mut output).await?;
        match step {
            Step::Receive => {
                if stream.read_buf(&mut input).await? == 0 {
                    return Err(if input.is_empty() { End::Closed } else { End::ClosedMidMessage });
                }
            }
            Step::Open { name, enters } => {
                if enters {
                    registration.opening(&name);
                }
                let found = open(directory, &name).await;
                match &found {
                    Ok((_, info)) if enters => registration.serving(&info.name),
                    _ => registration.negotiating(),
                }
                machine.opened(found.as_ref().map(|(_, info)| info), &mut output);
                opened = found.ok();
            }
            Step::List => machine.listed(&directory.list().await, &mut output),
            Step::Enter(negotiated) => {
                let (export, info) = opened.expect("transmission begins with an open export");
                let terms = settle(&info, negotiated, config);
                return Ok(Agreed { export, name: info.name, terms, input });
            }
            Step::Close(reason) => return Err(reason.into()),
        }
    }
}

/// An export and what it says of itself.
async fn open<D: ExportDirectory>(
    directory: &D,
    name: &str,
) -> Result<(Arc<D::Export>, ExportInfo), OpenError> {
    let found = directory.open(name).await;
    if let Err(error) = &found {
        // Names come from the network: `?` escapes them.
        tracing::debug!(?name, %error, "open refused");
    }
    found.map(|export| {
        let info = export.info();
        (export, info)
    })
}

fn settle(info: &ExportInfo, negotiated: Negotiated, config: &ServerConfig) -> Terms {
    Terms {
        read_only: info.read_only,
        fast_zeroes: info.fast_zeroes,
        structured: negotiated.structured,
        block_status: negotiated.block_status,
        block_bytes_min: info.block_sizes.min,
        payload_bytes_max: config.payload_bytes_max,
    }
}
