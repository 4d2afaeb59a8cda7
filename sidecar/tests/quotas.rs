//! Quotas, as a user of `pillion serve --quota` meets them.

mod client;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use client::{Kv, LAYER_BYTES, LAYERS, Session, hello, watch};
use shm_protocol::handshake::{Copier, Role};
use shm_protocol::key::BlockHash;
use shm_protocol::message::Saved;
use shm_protocol::request::{Keys, Save, SchedulerRequest, WorkerRequest};
use shm_protocol::transport;
use sidecar::ctl::{self, Target};

const BLOCK_BYTES: u64 = LAYERS * LAYER_BYTES;

struct Served {
    process: Child,
    port: u16,
}

/// One rank and its scheduler, in a namespace of their own.
struct Engine {
    _kv: Kv,
    rank: Session,
    scheduler: Session,
    op: u64,
}

impl Served {
    fn start(socket: &Path, quotas: &[String]) -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let process = Command::new(env!("CARGO_BIN_EXE_pillion"))
            .args(["serve", "--gpu", "off", "--dram", "16MiB", "--http", &format!("127.0.0.1:{port}")])
            .args(quotas.iter().flat_map(|quota| ["--quota", quota]))
            .arg("--socket")
            .arg(socket)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        watch("a socket", || transport::connect(socket, client::WATCHDOG).ok());
        Self { process, port }
    }

    fn page(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text.split_once("\r\n\r\n").unwrap().1.to_owned()
    }

    fn wait_metric(&self, line: &str) {
        watch(line, || self.page("/metrics").lines().find(|found| *found == line).map(drop));
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Engine {
    fn connect(socket: &Path, model: &str) -> Self {
        let (kv, run) = (Kv::new(), [model.len() as u8; 16]);
        let worker = kv.worker_of(model, 0, 1, Copier::Sidecar);
        let mut rank = Session::open(socket, &hello(model, 1, worker), &kv.fds.each_ref());
        rank.post(WorkerRequest::Join { run, step: 0 });
        rank.fences(1, 1);
        let scheduler = Session::open(socket, &hello(model, 1, Role::Scheduler { run }), &[]);
        Self { _kv: kv, rank, scheduler, op: 0 }
    }

    /// Saves this many blocks, under keys that `first` begins.
    fn save(&mut self, first: u64, count: u64) -> Saved {
        self.op += 1;
        let keys: Vec<_> = (first..first + count).map(|key| BlockHash::from_words([key, 1, 2, 3])).collect();
        self.scheduler.open_log(self.op as u32, &keys);
        let save = SchedulerRequest::Save(Save {
            op: self.op,
            keys: Keys::new(self.op as u32, 0..0),
            position: 0,
            step: 1,
            checked: false,
        });
        self.scheduler.with_blocks(save, &(1..=count as u32).collect::<Vec<_>>());
        self.scheduler.saved()
    }

    fn kept(&mut self) -> u32 {
        self.op += 1;
        self.scheduler.query(1, self.op, 40).value
    }
}

#[test]
fn a_namespace_is_kept_within_its_quota_and_the_pages_say_so() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p.sock");
    let facts = std::collections::BTreeMap::from([("model".to_owned(), "tiny".to_owned())]);
    let digest = shm_protocol::namespace::digest(&facts).to_string();
    let bytes = 10 * BLOCK_BYTES;
    let quotas = [format!("{}={bytes}B", &digest[..8]), "others=1GiB".to_owned()];
    let served = Served::start(&socket, &quotas);
    let (mut limited, mut other) = (Engine::connect(&socket, "tiny"), Engine::connect(&socket, "other"));
    assert_eq!(limited.rank.welcome.namespace, digest);
    assert_eq!(other.save(0, 40).committed, 40);
    for round in 1..=4 {
        let saved = limited.save(round * 100, 8);
        assert_eq!((saved.committed, saved.dropped), (8, 0), "round {round}");
    }
    served.wait_metric(&format!("pillion_quota_used_bytes{{namespace=\"{}\"}} {bytes}", &digest[..8]));
    served.wait_metric(&format!("pillion_quota_bytes{{namespace=\"{}\"}} {bytes}", &digest[..8]));
    served.wait_metric(&format!("pillion_quota_used_bytes{{namespace=\"others\"}} {}", 40 * BLOCK_BYTES));
    served.wait_metric("pillion_evicted_blocks_total 22");
    assert_eq!(other.kept(), 40, "what another may keep is its own");
    let target = Target::Unix(socket.with_extension("control.sock"));
    let page = ctl::request(&target, "GET", "/namespaces", "").unwrap();
    let shown: serde_json::Value = serde_json::from_str(&page).unwrap();
    let of = |model: &str| {
        let entries = shown["namespaces"].as_array().unwrap().iter();
        entries.clone().find(|entry| entry["facts"]["model"] == model).unwrap()["quota"].clone()
    };
    assert_eq!(of("tiny"), serde_json::json!({"name": &digest[..8], "bytes": bytes, "used_bytes": bytes}));
    assert_eq!(of("other")["name"], "others");
}
