//! The proxy against a plain HTTP server: what passes passes unchanged, and every fault is done.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};

use super::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// A server that keeps what is PUT and gives it back; one connection for each request.
struct Plain {
    address: SocketAddr,
    objects: Arc<Mutex<HashMap<String, Vec<u8>>>>,
    hosts: Arc<Mutex<Vec<String>>>,
}

impl Plain {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let objects = Arc::new(Mutex::new(HashMap::new()));
        let hosts = Arc::new(Mutex::new(Vec::new()));
        let (kept, seen) = (Arc::clone(&objects), Arc::clone(&hosts));
        // Ends with the test's process: there is nothing to clean up.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                answer_plainly(stream, &kept, &seen);
            }
        });
        Self { address, objects, hosts }
    }

    fn object(&self, path: &str) -> Option<Vec<u8>> {
        self.objects.lock().unwrap().get(path).cloned()
    }
}

fn answer_plainly(
    stream: TcpStream,
    objects: &Mutex<HashMap<String, Vec<u8>>>,
    hosts: &Mutex<Vec<String>>,
) {
    let mut reader = BufReader::new(stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        if line == "\r\n" {
            break;
        }
        lines.push(line.trim_end().to_owned());
    }
    let header = |name: &str| {
        let found = lines.iter().find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then(|| value.to_owned())
        });
        found.unwrap_or_default()
    };
    hosts.lock().unwrap().push(header("host"));
    let mut body = vec![0; header("content-length").parse().unwrap_or(0)];
    reader.read_exact(&mut body).unwrap();
    let mut words = lines[0].split(' ');
    let (method, path) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
    let reply = if method == "PUT" {
        objects.lock().unwrap().insert(path, body);
        Vec::new()
    } else {
        objects.lock().unwrap().get(&path).cloned().unwrap_or_default()
    };
    let head = format!("HTTP/1.1 200 OK\r\nETag: \"x\"\r\nContent-Length: {}\r\n\r\n", reply.len());
    reader.get_mut().write_all(head.as_bytes()).unwrap();
    reader.get_mut().write_all(&reply).unwrap();
}

/// One request through the proxy: the status and the body, as far as they came.
fn ask(proxy: &Proxy, method: &str, path: &str, body: &[u8]) -> (Option<u16>, Vec<u8>) {
    let mut stream = TcpStream::connect(proxy.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE * 2)).unwrap();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: bucket.example\r\nIf-Match: \"e\"\r\n\
         Connection: close\r\nContent-Length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    let mut reply = Vec::new();
    // A dropped connection is a reply too: an empty one.
    let _end = stream.read_to_end(&mut reply);
    let Some(end) = reply.windows(4).position(|window| window == b"\r\n\r\n") else {
        return (None, Vec::new());
    };
    let text = String::from_utf8_lossy(&reply[..end]).into_owned();
    (text.split(' ').nth(1).and_then(|word| word.parse().ok()), reply.split_off(end + 4))
}

fn pair() -> (Plain, Proxy) {
    let plain = Plain::start();
    let proxy = Proxy::start(plain.address);
    (plain, proxy)
}

#[test]
fn what_no_rule_is_about_passes_unchanged_and_is_logged() {
    let (plain, proxy) = pair();
    assert_eq!(ask(&proxy, "PUT", "/disks/d/1/head?x=1", b"bytes"), (Some(200), Vec::new()));
    assert_eq!(plain.object("/disks/d/1/head?x=1").unwrap(), b"bytes");
    assert_eq!(*plain.hosts.lock().unwrap(), ["bucket.example"]);
    let log = proxy.log();
    assert_eq!(log.len(), 1);
    assert_eq!((log[0].method.as_str(), log[0].key.as_str()), ("PUT", "d/1/head"));
    assert_eq!(log[0].if_match.as_deref(), Some("\"e\""));
    assert_eq!((log[0].status, log[0].store_status, log[0].sent_bytes), (Some(200), Some(200), 5));
}

#[test]
fn faults_before_the_store_leave_it_untouched() {
    let (plain, proxy) = pair();
    for fault in [Fault::Answer(503, "SlowDown"), Fault::OkWithError("InternalError"), Fault::Drop]
    {
        let status = match fault {
            Fault::Answer(status, _) => Some(status),
            Fault::Drop => None,
            _ => Some(200),
        };
        let rule = proxy.rule(Rule::new("PUT", Key::Any, fault));
        assert_eq!(ask(&proxy, "PUT", "/disks/k", b"bytes").0, status);
        assert_eq!(proxy.hits(rule), 1);
        proxy.remove(rule);
    }
    assert_eq!(plain.object("/disks/k"), None);
    assert!(proxy.log().iter().all(|entry| entry.store_status.is_none()));
}

#[test]
fn a_request_can_be_applied_and_its_answer_lost() {
    let (plain, proxy) = pair();
    proxy.rule(Rule::new("PUT", Key::Any, Fault::ApplyThenDrop).times(1));
    assert_eq!(ask(&proxy, "PUT", "/disks/k", b"bytes").0, None);
    assert_eq!(plain.object("/disks/k").unwrap(), b"bytes");
    assert_eq!(proxy.log()[0].store_status, Some(200));
    assert_eq!(ask(&proxy, "PUT", "/disks/k", b"more").0, Some(200), "once only");
}

#[test]
fn a_held_request_is_applied_when_released() {
    let (plain, proxy) = pair();
    proxy.rule(Rule::new("PUT", Key::Any, Fault::Hold).times(1));
    assert_eq!(ask(&proxy, "PUT", "/disks/k", b"old").0, None);
    assert_eq!((plain.object("/disks/k"), proxy.held()), (None, 1));
    assert_eq!(ask(&proxy, "PUT", "/disks/k", b"new").0, Some(200));
    assert_eq!(proxy.release_held(), [200]);
    assert_eq!(plain.object("/disks/k").unwrap(), b"old", "it landed late");
}

#[test]
fn bodies_are_cut_and_flipped_where_told() {
    let (_plain, proxy) = pair();
    let _stored = ask(&proxy, "PUT", "/disks/k", b"0123456789");
    proxy.rule(Rule::new("GET", Key::Any, Fault::CutBody(4)).times(1));
    assert_eq!(ask(&proxy, "GET", "/disks/k", b"").1, b"0123");
    proxy.rule(Rule::new("GET", Key::Any, Fault::FlipByte(2)).times(1));
    assert_eq!(ask(&proxy, "GET", "/disks/k", b"").1, b"0133456789");
    assert_eq!(ask(&proxy, "GET", "/disks/k", b"").1, b"0123456789");
}

#[test]
fn the_weather_holds_for_every_request_until_it_clears() {
    let (plain, proxy) = pair();
    proxy.set_weather(Weather::Refusing);
    assert_eq!(ask(&proxy, "PUT", "/disks/k", b"bytes").0, None);
    proxy.set_weather(Weather::BlackHole);
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| ask(&proxy, "PUT", "/disks/k", b"bytes").0);
        wait::until_true("the request is swallowed", PATIENCE, || proxy.log().len() == 1);
        proxy.heal();
        assert_eq!(asked.join().unwrap(), None, "what was swallowed stays lost");
    });
    assert_eq!(plain.object("/disks/k"), None);
    assert_eq!(ask(&proxy, "PUT", "/disks/k", b"bytes").0, Some(200));
}
