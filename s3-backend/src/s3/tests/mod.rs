//! The S3 store against a real server, and against a server that does what no server should.

use std::net::SocketAddr;
use std::sync::Arc;

use aws_credential_types::Credentials;

use super::S3Store;
use crate::handle::Store;
use crate::key::ObjectKey;
use crate::url::StoreUrl;

mod faults;
mod liars;
mod real;
mod stub;

const ACCESS_KEY: &str = "AKBLOCKDTEST";
const SECRET_KEY: &str = "blockd-test-secret-0123456789";

async fn open(url: &str) -> Store {
    let StoreUrl::S3(url) = url.parse().unwrap() else { panic!("{url} is no s3 url") };
    let credentials = Credentials::new(ACCESS_KEY, SECRET_KEY, None, None, "test");
    Store::new(Arc::new(S3Store::open_as(&url, Some(credentials)).await.unwrap()), 64)
}

async fn open_at(address: SocketAddr) -> Store {
    open(&format!("s3://bucket/prefix?endpoint=http://{address}&region=us-east-1")).await
}

fn key(text: &str) -> ObjectKey {
    ObjectKey::parse(text).unwrap()
}
