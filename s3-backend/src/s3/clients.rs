//! The SDK, set up for us: two pools of connections, no retries and no checksums of its own, and
//! credentials that are looked up again when the store refuses them.

use std::sync::{Arc, RwLock};
use std::time::Duration;

use aws_config::environment::region::EnvironmentVariableRegionProvider;
use aws_config::meta::region::RegionProviderChain;
use aws_config::profile::ProfileFileRegionProvider;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_credential_types::Credentials;
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{
    RequestChecksumCalculation, ResponseChecksumValidation, StalledStreamProtectionConfig,
};
use tokio::time::Instant;

use super::http::{Http, Limits};
use crate::error::{Error, Kind};
use crate::url::S3Url;

/// What a test sets otherwise.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    /// Given by hand, else found where the SDK finds them.
    pub(super) credentials: Option<Credentials>,
    /// Credentials are looked up again at most this often.
    pub(super) reload_interval: Duration,
    pub(super) limits: Limits,
}

impl Default for Setup {
    fn default() -> Self {
        let reload_interval = Duration::from_secs(10);
        Self { credentials: None, reload_interval, limits: Limits::default() }
    }
}

/// The clients of one bucket. Reads have a pool of their own, so that a read never waits behind the
/// blobs that are going up.
#[derive(Debug)]
pub(super) struct Clients {
    url: S3Url,
    setup: Setup,
    read_pool: Http,
    write_pool: Http,
    pair: RwLock<Arc<Pair>>,
}

#[derive(Debug)]
struct Pair {
    reads: Client,
    writes: Client,
    loaded_at: Instant,
}

impl Clients {
    pub(super) async fn new(url: &S3Url, setup: Setup) -> Result<Self, Error> {
        let https = url.endpoint.as_deref().is_none_or(|endpoint| endpoint.starts_with("https:"));
        let pool = || {
            Http::new(https, setup.limits).map_err(|error| {
                Error::new(Kind::Invalid, format!("open {url}: load root certificates"))
                    .with_source(error)
            })
        };
        let (read_pool, write_pool) = (pool()?, pool()?);
        let pair = load(url, &setup, &read_pool, &write_pool).await;
        let pair = RwLock::new(Arc::new(pair));
        Ok(Self { url: url.clone(), setup, read_pool, write_pool, pair })
    }

    /// The client for what brings bytes down.
    pub(super) fn reads(&self) -> Client {
        self.pair().reads.clone()
    }

    /// The client for what sends bytes up, and for deletions.
    pub(super) fn writes(&self) -> Client {
        self.pair().writes.clone()
    }

    /// After a denial: reads profiles and environment anew and asks the instance again, for the SDK
    /// keeps what it has once found. The connections stay.
    pub(super) async fn reload_credentials(&self) {
        if self.pair().loaded_at.elapsed() < self.setup.reload_interval {
            return;
        }
        let pair = load(&self.url, &self.setup, &self.read_pool, &self.write_pool).await;
        *self.pair.write().expect("no code panics while it holds the clients") = Arc::new(pair);
    }

    fn pair(&self) -> Arc<Pair> {
        Arc::clone(&self.pair.read().expect("no code panics while it holds the clients"))
    }
}

async fn load(url: &S3Url, setup: &Setup, read_pool: &Http, write_pool: &Http) -> Pair {
    let given = RegionProviderChain::first_try(url.region.clone().map(Region::new))
        .or_else(EnvironmentVariableRegionProvider::new())
        .or_else(ProfileFileRegionProvider::new());
    let region = match &url.endpoint {
        // Other stores ignore the region, but it is part of the signature.
        Some(_) => given.or_else("us-east-1"),
        None => given.or_default_provider(),
    };
    let mut loader = aws_config::defaults(BehaviorVersion::latest())
        .region(region)
        .http_client(read_pool.clone());
    if let Some(credentials) = &setup.credentials {
        loader = loader.credentials_provider(credentials.clone());
    }
    let config = loader.load().await;
    Pair {
        reads: client(url, &config, read_pool),
        writes: client(url, &config, write_pool),
        loaded_at: Instant::now(),
    }
}

fn client(url: &S3Url, config: &SdkConfig, pool: &Http) -> Client {
    let mut builder = aws_sdk_s3::config::Builder::from(config)
        .http_client(pool.clone())
        .force_path_style(url.path_style)
        // Retries are `retry.rs`, deadlines are `http.rs`: both see more than the SDK does.
        .retry_config(RetryConfig::disabled())
        .timeout_config(TimeoutConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
        // Trailing checksums are refused by many stores; our own CRC32 goes along as a header.
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    if let Some(endpoint) = &url.endpoint {
        builder = builder.endpoint_url(endpoint);
    }
    Client::from_conf(builder.build())
}
