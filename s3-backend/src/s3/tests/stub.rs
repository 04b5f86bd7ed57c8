//! A small S3 in memory, honest until it is told otherwise.
//!
//! It serves what the store uses: conditional puts, gets, ranges, lists, deletions. *Faults* wait in
//! a queue, each for a request of its method, and act before the request (which then has no effect)
//! or on the reply (after the effect): that order is the point of most tests.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard};

use bytes::Bytes;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufStream};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A request as it came.
#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) method: String,
    /// Key in the bucket, or empty.
    pub(super) key: String,
    pub(super) query: HashMap<String, String>,
    pub(super) headers: HashMap<String, String>,
    pub(super) body: Bytes,
}

impl Request {
    pub(super) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// `PUT`, `GET`, `DELETE`, or what the query makes of it: `LIST`, `POST` for a bulk deletion.
    fn verb(&self) -> &str {
        if self.query.contains_key("list-type") { "LIST" } else { &self.method }
    }
}

/// A reply as it is to be sent.
#[derive(Clone, Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) headers: Vec<(String, String)>,
    pub(super) body: Vec<u8>,
    /// Send only so much of the body, and close.
    pub(super) cut: Option<usize>,
    /// Send the body in chunks rather than with its length.
    pub(super) chunked: bool,
    /// Send nothing at all, and close.
    pub(super) lost: bool,
    /// Send nothing, and do not close.
    pub(super) hung: bool,
}

impl Reply {
    pub(super) fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        let body = body.into();
        let (headers, cut, chunked) = (Vec::new(), None, false);
        Self { status, headers, body, cut, chunked, lost: false, hung: false }
    }

    pub(super) fn error(status: u16, code: &str) -> Self {
        Self::new(status, format!("<Error><Code>{code}</Code><Message>a test</Message></Error>"))
    }

    pub(super) fn lost() -> Self {
        Self { lost: true, ..Self::new(200, "") }
    }

    pub(super) fn hung() -> Self {
        Self { hung: true, ..Self::new(200, "") }
    }

    fn with(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }
}

/// One thing that goes wrong, once.
pub(super) enum Fault {
    /// Instead of the request.
    Before(Reply),
    /// After the request had its effect, its reply is changed.
    After(Box<dyn FnOnce(Reply) -> Reply + Send>),
    /// The connection is closed now; the request has its effect when the next one comes.
    Late,
}

/// How the stub differs from an honest store, all the time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Habits {
    pub(super) ignores_if_none_match: bool,
    pub(super) ignores_if_match: bool,
    /// Only for keys that several write at once.
    pub(super) loses_races: bool,
    pub(super) takes_only_unquoted: bool,
    pub(super) refuses_checksums: bool,
    pub(super) refuses_bulk_delete: bool,
    pub(super) refuses_everything: bool,
    pub(super) denies_deletion: bool,
    pub(super) page_max: Option<usize>,
    /// Requests signed for another key are denied.
    pub(super) access_key: Option<&'static str>,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, (Bytes, String)>,
    version: u32,
    faults: VecDeque<(&'static str, Fault)>,
    late: Option<Request>,
    habits: Habits,
    log: Vec<Request>,
}

/// The server; it ends when this is dropped.
pub(super) struct Stub {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    task: JoinHandle<()>,
}

impl Drop for Stub {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Stub {
    pub(super) async fn start() -> Self {
        Self::start_with(Habits::default()).await
    }

    pub(super) async fn start_with(habits: Habits) -> Self {
        Self::serve(TcpListener::bind("127.0.0.1:0").await.unwrap(), habits)
    }

    pub(super) fn serve(listener: TcpListener, habits: Habits) -> Self {
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(State { habits, ..State::default() }));
        let shared = Arc::clone(&state);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let state = Arc::clone(&shared);
                connections.spawn(async move {
                    // A client that goes away is no concern of the server.
                    let _ = converse(stream, &state).await;
                });
            }
        });
        Self { address, state, task }
    }

    pub(super) fn url(&self) -> String {
        format!("s3://bucket/prefix?endpoint=http://{}&region=us-east-1", self.address)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Habits)) {
        change(&mut self.lock().habits);
    }

    /// The next request of this verb goes wrong.
    pub(super) fn fail(&self, verb: &'static str, fault: Fault) {
        self.lock().faults.push_back((verb, fault));
    }

    pub(super) fn before(&self, verb: &'static str, reply: Reply) {
        self.fail(verb, Fault::Before(reply));
    }

    pub(super) fn after(
        &self,
        verb: &'static str,
        change: impl FnOnce(Reply) -> Reply + Send + 'static,
    ) {
        self.fail(verb, Fault::After(Box::new(change)));
    }

    /// Whether every fault has happened.
    #[track_caller]
    pub(super) fn all_failed(&self) {
        let waiting: Vec<&str> = self.lock().faults.iter().map(|(verb, _)| *verb).collect();
        assert!(waiting.is_empty(), "these faults never happened: {waiting:?}");
    }

    pub(super) fn body(&self, key: &str) -> Option<Bytes> {
        self.lock().objects.get(&format!("prefix/{key}")).map(|(body, _)| body.clone())
    }

    /// Puts an object in, as another client would.
    pub(super) fn plant(&self, key: &str, body: &str) {
        self.lock().put(&format!("prefix/{key}"), Bytes::from(body.to_owned()));
    }

    pub(super) fn forget(&self, key: &str) {
        self.lock().objects.remove(&format!("prefix/{key}"));
    }

    /// All requests so far, those that went wrong included.
    pub(super) fn log(&self) -> Vec<Request> {
        self.lock().log.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

async fn converse(stream: TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut stream = BufStream::new(stream);
    while let Some(request) = read_request(&mut stream).await? {
        let reply = answer(&mut state.lock().unwrap(), request);
        if reply.hung {
            std::future::pending::<()>().await;
        }
        if reply.lost {
            return Ok(());
        }
        write_reply(&mut stream, &reply).await?;
        if reply.cut.is_some() {
            return Ok(());
        }
    }
    Ok(())
}

fn answer(state: &mut State, request: Request) -> Reply {
    if let Some(late) = state.late.take() {
        state.apply(&late);
    }
    state.log.push(request.clone());
    let next = state.faults.iter().position(|(verb, _)| *verb == request.verb());
    match next.and_then(|index| state.faults.remove(index)) {
        None => state.apply(&request),
        Some((_, Fault::Before(reply))) => reply,
        Some((_, Fault::After(change))) => change(state.apply(&request)),
        Some((_, Fault::Late)) => {
            state.late = Some(request);
            Reply::lost()
        }
    }
}

impl State {
    fn apply(&mut self, request: &Request) -> Reply {
        let sent_checksum = request
            .headers
            .keys()
            .any(|name| name.starts_with("x-amz-checksum-") || name == "x-amz-trailer");
        let signed_by = |key: &str| {
            request.header("authorization").is_some_and(|text| text.contains(&format!("={key}/")))
        };
        if self.habits.refuses_everything {
            return Reply::error(501, "NotImplemented");
        }
        if self.habits.access_key.is_some_and(|key| !signed_by(key)) {
            return Reply::error(403, "InvalidAccessKeyId");
        }
        if sent_checksum && self.habits.refuses_checksums {
            return Reply::error(400, "InvalidRequest");
        }
        match request.verb() {
            "PUT" => self.apply_put(request),
            "GET" => self.apply_get(request),
            "LIST" => self.apply_list(request),
            "POST" if self.habits.refuses_bulk_delete => Reply::error(501, "NotImplemented"),
            "POST" | "DELETE" if self.habits.denies_deletion => Reply::error(403, "AccessDenied"),
            "POST" => self.apply_bulk_delete(request),
            "DELETE" => {
                self.objects.remove(&request.key);
                Reply::new(204, "")
            }
            other => panic!("the stub does not know {other}"),
        }
    }

    fn put(&mut self, key: &str, body: Bytes) -> String {
        self.version += 1;
        let etag = format!("{:08x}{:08x}", crc32fast::hash(&body), self.version);
        self.objects.insert(key.to_owned(), (body, etag.clone()));
        etag
    }

    fn apply_put(&mut self, request: &Request) -> Reply {
        let present = self.objects.get(&request.key).map(|(_, etag)| etag.clone());
        let lenient = self.habits.loses_races && request.key.ends_with("-race");
        if request.header("if-none-match").is_some()
            && present.is_some()
            && !self.habits.ignores_if_none_match
            && !lenient
        {
            return Reply::error(412, "PreconditionFailed");
        }
        if let Some(expected) = request.header("if-match")
            && !self.habits.ignores_if_match
            && !lenient
        {
            let Some(present) = present else { return Reply::error(404, "NoSuchKey") };
            let understood = match self.habits.takes_only_unquoted {
                true => expected,
                false => expected.trim_matches('"'),
            };
            if understood != present {
                return Reply::error(412, "PreconditionFailed");
            }
        }
        let etag = self.put(&request.key, request.body.clone());
        Reply::new(200, "").with("ETag", format!("\"{etag}\""))
    }

    fn apply_get(&self, request: &Request) -> Reply {
        let Some((body, etag)) = self.objects.get(&request.key) else {
            return Reply::error(404, "NoSuchKey");
        };
        let etag = format!("\"{etag}\"");
        let Some(range) = request.header("range") else {
            return Reply::new(200, body.to_vec()).with("ETag", etag);
        };
        let (first, last) = range.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
        let (first, last): (usize, usize) = (first.parse().unwrap(), last.parse().unwrap());
        if first >= body.len() {
            return Reply::error(416, "InvalidRange");
        }
        let last = last.min(body.len() - 1);
        Reply::new(206, body[first..=last].to_vec())
            .with("ETag", etag)
            .with("Content-Range", format!("bytes {first}-{last}/{}", body.len()))
    }

    fn apply_list(&self, request: &Request) -> Reply {
        let prefix = &request.query["prefix"];
        let after = request.query.get("continuation-token").map_or("", String::as_str);
        let limit: usize = request.query["max-keys"].parse().unwrap();
        let limit = self.habits.page_max.unwrap_or(limit).min(limit);
        let mut left =
            self.objects.iter().filter(|(key, _)| key.starts_with(prefix) && key.as_str() > after);
        let page: Vec<_> = left.by_ref().take(limit).collect();
        let mut xml = format!("<ListBucketResult><KeyCount>{}</KeyCount>", page.len());
        if let (Some((last, _)), true) = (page.last(), left.next().is_some()) {
            xml += "<IsTruncated>true</IsTruncated>";
            xml += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
        } else {
            xml += "<IsTruncated>false</IsTruncated>";
        }
        for (key, (body, _)) in page {
            xml += &format!("<Contents><Key>{key}</Key><Size>{}</Size></Contents>", body.len());
        }
        Reply::new(200, xml + "</ListBucketResult>")
    }

    fn apply_bulk_delete(&mut self, request: &Request) -> Reply {
        let text = String::from_utf8_lossy(&request.body).into_owned();
        let mut xml = "<DeleteResult>".to_owned();
        for part in text.split("<Key>").skip(1) {
            let key = part.split("</Key>").next().unwrap();
            self.objects.remove(key);
            xml += &format!("<Deleted><Key>{key}</Key></Deleted>");
        }
        Reply::new(200, xml + "</DeleteResult>")
    }
}

async fn read_request(stream: &mut BufStream<TcpStream>) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if stream.read_line(&mut line).await? == 0 {
        return Ok(None);
    }
    let mut words = line.split(' ');
    let (method, target) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).await?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    let length = headers.get("content-length").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let pairs = query.split('&').filter_map(|pair| pair.split_once('=').or(Some((pair, ""))));
    let query = pairs.map(|(name, value)| (name.to_owned(), value.replace("%2F", "/"))).collect();
    let key = path.trim_start_matches("/bucket").trim_start_matches('/').to_owned();
    Ok(Some(Request { method, key, query, headers, body: body.into() }))
}

async fn write_reply(stream: &mut BufStream<TcpStream>, reply: &Reply) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {} Status\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    let body = &reply.body[..reply.cut.unwrap_or(reply.body.len())];
    if reply.chunked {
        head += &format!("Transfer-Encoding: chunked\r\n\r\n{:x}\r\n", body.len());
    } else if reply.status == 204 {
        head += "\r\n";
    } else {
        head += &format!("Content-Length: {}\r\n\r\n", reply.body.len());
    }
    stream.write_all(head.as_bytes()).await?;
    stream.write_all(body).await?;
    if reply.chunked && reply.cut.is_none() {
        stream.write_all(b"\r\n0\r\n\r\n").await?;
    }
    stream.flush().await
}
