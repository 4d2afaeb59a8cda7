//! Quotas, under a user's `pillion serve --quota`.

use std::ffi::OsStr;

use crate::client::sidecar::Sidecar;
use crate::client::{BLOCK_BYTES, Kv, Session, hello, save_log};
use serde_json::{Value, json};
use shm_protocol::handshake::Copier;
use shm_protocol::key::BlockHash;
use shm_protocol::message::Saved;

/// One rank and its scheduler, in a namespace of their own.
struct Engine {
    _kv: Kv,
    rank: Session,
    scheduler: Session,
    op: u64,
}

impl Engine {
    fn connect(sidecar: &Sidecar, model: &str) -> Self {
        let (socket, kv, run) = (&sidecar.socket, Kv::new(), [model.len() as u8; 16]);
        let worker = kv.worker_of(model, 0, 1, Copier::Sidecar);
        let rank = Session::rank(socket, &hello(model, 1, worker), &kv, run);
        rank.fences(1, 1);
        let scheduler = Session::scheduler(socket, model, 1, run);
        Self { _kv: kv, rank, scheduler, op: 0 }
    }

    /// Saves this many blocks, under keys that begin with `first`.
    fn save(&mut self, first: u64, count: u64) -> Saved {
        self.op += 1;
        let keys: Vec<_> = (first..first + count).map(|key| BlockHash::from_words([key, 1, 2, 3])).collect();
        self.scheduler.open_log(self.op as u32, &keys);
        let save = save_log(self.op, self.op as u32, 1);
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
    let facts = std::collections::BTreeMap::from([("model".to_owned(), "tiny".to_owned())]);
    let digest = shm_protocol::namespace::digest_facts(&facts).to_string();
    let bytes = 10 * BLOCK_BYTES;
    let quota = format!("{}={bytes}B", &digest[..8]);
    let quotas: &[&dyn AsRef<OsStr>] = &[&"--dram", &"16MiB", &"--quota", &quota, &"--quota", &"others=1GiB"];
    let sidecar = Sidecar::start(folder.path(), quotas);
    let (mut limited, mut other) = (Engine::connect(&sidecar, "tiny"), Engine::connect(&sidecar, "other"));
    assert_eq!(limited.rank.welcome.namespace, digest);
    assert_eq!(other.save(0, 40).committed, 40);
    for round in 1..=4 {
        let saved = limited.save(round * 100, 8);
        assert_eq!((saved.committed, saved.dropped), (8, 0), "round {round}");
    }
    sidecar.wait_line(&format!("pillion_quota_used_bytes{{namespace=\"{}\"}} {bytes}", &digest[..8]));
    sidecar.wait_line(&format!("pillion_quota_bytes{{namespace=\"{}\"}} {bytes}", &digest[..8]));
    sidecar.wait_line(&format!("pillion_quota_used_bytes{{namespace=\"others\"}} {}", 40 * BLOCK_BYTES));
    sidecar.wait_line("pillion_evicted_blocks_total 22");
    assert_eq!(other.kept(), 40, "each namespace has its own quota");
    let shown = sidecar.ask("GET", "/namespaces", &Value::Null).unwrap();
    let of = |model: &str| {
        let entries = shown["namespaces"].as_array().unwrap().iter();
        entries.clone().find(|entry| entry["facts"]["model"] == model).unwrap()["quota"].clone()
    };
    assert_eq!(of("tiny"), json!({"name": &digest[..8], "bytes": bytes, "used_bytes": bytes}));
    assert_eq!(of("other")["name"], "others");
}
