//! Pods with shared blocks: real sidecars over loopback, every served byte compared.

#[path = "../../mesh/tests/rig/authority.rs"]
mod authority;
mod client;
#[path = "mesh/routers.rs"]
mod routers;
#[path = "mesh/score.rs"]
mod score;
#[path = "mesh/starts.rs"]
mod starts;

use std::ffi::OsStr;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use authority::Authority;
use client::engine::{Engine, SAVED, keys_after};
use client::sidecar::{Sidecar, free_port};
use client::{corrupt, hex, in_time, now, pillion, watch};
use serde_json::json;
use shm_protocol::key::BlockHash;
use shm_protocol::layout::QUERY_WAIT_MS_MAX;
use shm_protocol::message::{Outcome, Status};
use shm_protocol::request::SchedulerRequest;

const DRAM: &str = "16MiB";
const NAME: &str = "pillion.mesh";
/// Count of a pod's kills.
const ROUNDS: u64 = 5;
/// A longer operation may have met the end of a query's wait or of a fetch, after 2 s.
const SOON: Duration = Duration::from_millis(1500);
/// The least life of a registration in etcd after its pod's end, and the time until the next look.
const REGISTERED: Duration = Duration::from_secs(4);

/// A pod: its sidecar may live several times.
struct Pod {
    folder: tempfile::TempDir,
    name: &'static str,
    port: u16,
}

/// The authority of a pod's connections.
#[derive(Copy, Clone)]
enum Trust<'a> {
    Nobody,
    By(&'a Authority),
}

static AUTHORITY: LazyLock<Authority> = LazyLock::new(Authority::new);

impl Pod {
    fn new(name: &'static str) -> Self {
        Self { folder: tempfile::tempdir().unwrap(), name, port: free_port() }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// Its sidecar, with these peers.
    fn start(&self, others: &[&Self]) -> Sidecar {
        self.start_with(others, Trust::Nobody, &[])
    }

    fn start_with(&self, others: &[&Self], trust: Trust<'_>, more: &[&dyn AsRef<OsStr>]) -> Sidecar {
        let members: Vec<String> = others.iter().map(|other| format!("--peer={}", other.address())).collect();
        self.start_by(&members, trust, more)
    }

    fn start_by(&self, members: &[String], trust: Trust<'_>, more: &[&dyn AsRef<OsStr>]) -> Sidecar {
        let mut arguments: Vec<String> =
            ["--dram", DRAM, "--node-id", self.name, "--mesh-listen"].map(String::from).into();
        arguments.push(self.address());
        arguments.extend_from_slice(members);
        match trust {
            Trust::Nobody => arguments.push("--mesh-plaintext".into()),
            Trust::By(authority) => arguments.extend(self.credentials(authority)),
        }
        let mut all: Vec<&dyn AsRef<OsStr>> = arguments.iter().map(|it| it as &dyn AsRef<OsStr>).collect();
        all.extend(more);
        let sidecar = Sidecar::start(self.folder.path(), &all);
        sidecar.wait_started();
        sidecar
    }

    fn credentials(&self, authority: &Authority) -> Vec<String> {
        let (certificate, key) = authority.issue(NAME, 2100);
        let file = |name: &str, text: &str| {
            let path = self.folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let files = [
            ("--mesh-cert", file("tls.crt", &certificate)),
            ("--mesh-key", file("tls.key", &key)),
            ("--mesh-ca", file("ca.crt", &authority.pem)),
            ("--mesh-cert-name", NAME.into()),
        ];
        files.into_iter().flat_map(|(option, value)| [option.into(), value]).collect()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }
}

/// Waits until a pod knows this many blocks of its peer.
fn wait_known(sidecar: &Sidecar, keys: usize) {
    sidecar.wait_metric("pillion_mesh_peers", |peers| peers == 1);
    sidecar.wait_metric("pillion_mesh_peer_keys", |known| known == keys as u64);
}

/// Waits until all of these keys are served, each with its own bytes alone: a query waits for the wire no
/// longer than its limit.
fn wait_served(engine: &mut Engine, keys: &[BlockHash], pod: &Pod) {
    watch("every block", || {
        let (served, wrong) = engine.served(keys);
        assert_eq!(wrong, 0, "{}", pod.log());
        (served == keys).then_some(())
    });
}

/// Waits until `first` has joined with `second`, which keeps no blocks yet, and `second` knows the blocks of
/// `first`.
fn wait_acquainted(first: &Sidecar, second: &Sidecar, keys: usize) {
    wait_known(first, 0);
    wait_known(second, keys);
}

fn fault(sidecar: &Sidecar, kind: &str) -> u64 {
    let page = sidecar.page("/metrics").unwrap();
    let name = format!("pillion_mesh_faults_total{{kind=\"{kind}\"}} ");
    let line = page.lines().find_map(|line| line.strip_prefix(&name));
    line.expect("every kind is there from the start").parse().unwrap()
}

/// The error of a sidecar that must not start.
fn refused(arguments: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("p.sock");
    let serve = ["serve", "--gpu", "off", "--dram", DRAM, "--http", "127.0.0.1:0", "--socket"];
    let output = pillion(&[&serve[..], &[socket.to_str().unwrap()], arguments].concat());
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn what_one_pod_computed_is_served_in_another() {
    for trust in [Trust::Nobody, Trust::By(&AUTHORITY)] {
        let (a, b) = (Pod::new("a"), Pod::new("b"));
        let first = a.start_with(&[&b], trust, &[]);
        let mut engine = Engine::connect(&first);
        let early = engine.save(&mut 0);
        let second = b.start_with(&[&a], trust, &[]);
        wait_acquainted(&first, &second, early.len());
        let late = engine.save(&mut 1000);
        wait_known(&second, early.len() + late.len());
        let known = watch("the peer's namespace", || {
            let known = second.ask("GET", "/namespaces", &json!(null)).unwrap();
            (known["not_told"] == json!([])).then_some(known)
        });
        let blocks = (early.len() + late.len()) as u64;
        // No engine has connected here: the namespace of the blocks and its facts come from the peer.
        let own = first.ask("GET", "/namespaces", &json!(null)).unwrap()["namespaces"][0].take();
        let entry = json!({
            "namespace": engine.namespace(), "facts": own["facts"], "engines": 0, "block_bytes": own["block_bytes"],
            "memory_blocks": 0, "peers": [{"peer": "a", "memory_blocks": blocks, "disk_blocks": 0}],
        });
        let peers = json!([{"peer": "a", "blocks": blocks}]);
        assert_eq!(known, json!({"namespaces": [entry], "peers": peers, "not_told": []}));
        assert_eq!((&own["engines"], &own["memory_blocks"]), (&json!(1), &json!(blocks)), "{own}");
        let lookup = json!({"namespace": engine.namespace(), "keys": [hex(&early[0]), "0".repeat(64)]});
        let found = second.ask("POST", "/lookup", &lookup).unwrap();
        let peers: Vec<_> = found["keys"].as_array().unwrap().iter().map(|key| &key["peers"]).collect();
        assert_eq!(peers, [&json!(["a"]), &json!([])], "{found}");
        let mut other = Engine::connect(&second);
        for keys in [&early, &late] {
            wait_served(&mut other, keys, &b);
        }
        second.wait_metric("pillion_mesh_fetched_blocks_total", |fetched| fetched == blocks);
        // Blocks that arrive after the end of a fetch are asked for again.
        first.wait_metric("pillion_mesh_served_blocks_total", |served| served >= blocks);
        assert!(second.metric("pillion_query_waits_total") > 0);
        assert_eq!(fault(&second, "corrupt"), 0);
        // Fetched blocks are kept, and announced in turn.
        wait_known(&first, blocks as usize);
        assert_eq!(other.served(&early), (early.clone(), 0));
        assert_eq!(second.metric("pillion_mesh_fetched_blocks_total"), blocks);
        first.terminate();
        second.wait_metric("pillion_mesh_fetching_blocks", |fetching| fetching == 0);
        assert_eq!(other.served(&late), (late.clone(), 0), "it is here");
        second.terminate();
    }
}

/// Two NICs on a wire with losses and delays, in a guest of `make test-rdma`.
#[test]
fn what_one_pod_computed_is_served_in_another_by_rdma() {
    if !["rxe0", "rxe1"].iter().all(|name| Path::new("/sys/class/infiniband").join(name).exists()) {
        assert!(std::env::var_os("PILLION_TEST_RDMA").is_none(), "no devices rxe0 and rxe1");
        // Not captured, unlike the output of eprintln.
        let text = "SKIPPED, no RDMA devices rxe0 and rxe1 here: `make test-rdma` runs this test\n";
        std::io::stderr().write_all(text.as_bytes()).unwrap();
        return;
    }
    for end in ["h0", "h1"] {
        let netem = ["qdisc", "replace", "dev", end, "root", "netem", "delay", "1ms", "loss", "1%"];
        assert!(Command::new("tc").args(netem).status().unwrap().success());
    }
    let (a, b, c) = (Pod::new("a"), Pod::new("b"), Pod::new("c"));
    let first = a.start_with(&[&b, &c], Trust::By(&AUTHORITY), &[&"--nics", &"rxe0"]);
    let second = b.start_with(&[&a], Trust::By(&AUTHORITY), &[&"--nics", &"rxe1"]);
    let keys = Engine::connect(&first).save(&mut 0);
    wait_acquainted(&first, &second, keys.len());
    let mut other = Engine::connect(&second);
    // The NICs register the pools behind the start: until then blocks would come over TCP.
    watch("two pools to be registered", || {
        let regions = Command::new("rdma").args(["resource", "show", "mr"]).output().unwrap().stdout;
        (String::from_utf8(regions).unwrap().matches("mrlen").count() == 2).then_some(())
    });
    // A query waits for the wire no longer than its limit.
    watch("every block by RDMA", || (other.served(&keys) == (keys.clone(), 0)).then_some(()));
    second.wait_metric("pillion_mesh_fetched_blocks_total", |fetched| fetched == keys.len() as u64);
    assert!(!b.log().contains("over TCP"), "{}", b.log());
    assert_eq!(fault(&second, "corrupt"), 0);
    second.terminate();
    // A pod without a NIC still gets all blocks.
    let third = c.start_with(&[&a], Trust::By(&AUTHORITY), &[]);
    wait_known(&third, keys.len());
    let mut other = Engine::connect(&third);
    watch("every block over TCP", || (other.served(&keys) == (keys.clone(), 0)).then_some(()));
    assert!(
        c.log().contains("travel over TCP") && b.log().contains("travel by RDMA"),
        "{}{}",
        b.log(),
        c.log()
    );
    first.terminate();
    third.terminate();
}

#[test]
fn a_nic_that_is_not_there_stops_the_start() {
    let a = Pod::new("a");
    let said = refused(&[
        "--peer",
        "127.0.0.1:1",
        "--mesh-plaintext",
        "--mesh-listen",
        &a.address(),
        "--nics",
        "nic9",
    ]);
    assert!(said.contains("the NIC 'nic9'"), "{said}");
}

#[test]
fn a_pod_that_is_killed_while_it_gives_blocks_costs_misses_alone() {
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let second = b.start(&[&a]);
    let mut other = Engine::connect(&second);
    let mut stamp = 0;
    for round in 0..ROUNDS {
        let before = second.metric("pillion_mesh_fetched_blocks_total");
        let first = a.start(&[&b]);
        let mut engine = Engine::connect(&first);
        let keys: Vec<BlockHash> = (0..2 + round).flat_map(|_| engine.save(&mut stamp)).collect();
        // The number of blocks differs from the life before, whose peer may not be given up yet.
        first.wait_metric("pillion_mesh_peers", |peers| peers == 1);
        second.wait_metric("pillion_mesh_peers", |peers| peers == 1);
        // It has blocks of its peer, too, fetched at its start.
        watch("all of its blocks", || {
            let (known, kept) = (second.metric("pillion_mesh_peer_keys"), first.metric("pillion_blocks"));
            (known == kept).then_some(())
        });
        other.post_query(&keys);
        if round == ROUNDS - 1 {
            // In the last round the kill comes after the fetch.
            second.wait_metric("pillion_mesh_fetched_blocks_total", |fetched| fetched > before);
            second.wait_metric("pillion_mesh_fetching_blocks", |fetching| fetching == 0);
        } else {
            std::thread::sleep(Duration::from_millis(round * 5));
        }
        first.kill();
        other.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
        let (served, wrong) = other.served(&keys);
        assert_eq!(wrong, 0, "round {round}");
        assert!(round < ROUNDS - 1 || !served.is_empty(), "{} served: {}", served.len(), b.log());
        second.wait_metric("pillion_mesh_fetching_blocks", |fetching| fetching == 0);
        // The engine goes on.
        let own = other.save(&mut (1_000_000 * (1 + round)));
        assert_eq!(other.served(&own), (own.clone(), 0));
    }
    second.terminate();
}

/// An etcd of one member, ended with the test.
struct Etcd {
    process: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Etcd {
    fn start() -> Self {
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let (url, peers) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", port + 1));
        let mut command = Command::new("etcd");
        command.arg("--data-dir").arg(folder.path().join("data"));
        command.args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
        command.args(["--listen-peer-urls", &peers, "--initial-advertise-peer-urls", &peers]);
        command.args(["--initial-cluster", &format!("default={peers}"), "--log-level", "error"]);
        let quiet = command.stdout(Stdio::null()).stderr(Stdio::null());
        let process = quiet.spawn().expect("etcd is installed by scripts/setup tests");
        Self { process, url, _folder: folder }
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn members_find_each_other_in_etcd_and_pass_blocks_on() {
    let etcd = Etcd::start();
    let members = [format!("--etcd={}", etcd.url)];
    let start = |pod: &Pod| pod.start_by(&members, Trust::Nobody, &[]);
    let (a, b, c) = (Pod::new("a"), Pod::new("b"), Pod::new("c"));
    let (first, second) = (start(&a), start(&b));
    wait_acquainted(&first, &second, 0);
    let keys = Engine::connect(&first).save(&mut 0);
    wait_known(&second, keys.len());
    wait_served(&mut Engine::connect(&second), &keys, &b);
    let killed = now();
    first.kill();
    let third = start(&c);
    third.wait_metric("pillion_mesh_peers", |peers| peers > 0);
    third.wait_metric("pillion_mesh_peer_keys", |known| known == keys.len() as u64);
    // The dead pod is a member until its registration ends, and its blocks are unknown.
    watch("two that have joined", || (b.log().matches("a peer joined").count() == 2).then_some(()));
    let least = if killed.elapsed() < REGISTERED { 2 } else { 1 };
    second.wait_metric("pillion_mesh_peers", |peers| peers >= least);
    wait_served(&mut Engine::connect(&third), &keys, &c);
    second.wait_metric("pillion_mesh_peers", |peers| peers == 1);
    // A mesh of known members goes on without etcd.
    drop(etcd);
    wait_served(&mut Engine::connect(&second), &keys, &b);
}

/// No query waits for a pod with a shortened pool; its sidecar lives on, as engines may be copying from it.
#[test]
fn a_pod_whose_pool_was_cut_leaves_the_mesh_and_lives_on() {
    let etcd = Etcd::start();
    let members = [format!("--etcd={}", etcd.url)];
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let pool = PathBuf::from(format!("/dev/shm/pillion-test-{}-cut", std::process::id()));
    let first = a.start_by(&members, Trust::Nobody, &[&"--pool-path", &pool]);
    let keys = Engine::connect(&first).save(&mut 0);
    let second = b.start_by(&members, Trust::Nobody, &[]);
    wait_acquainted(&first, &second, keys.len());
    std::fs::File::options().write(true).open(&pool).unwrap().set_len(0).unwrap();
    first.wait_metric("pillion_pool_lost", |lost| lost == 1);
    second.wait_metric("pillion_mesh_peers", |peers| peers == 0);
    assert_eq!(Engine::connect(&second).served(&keys), (Vec::new(), 0));
    assert_eq!(first.metric("pillion_pool_lost"), 1, "{}", a.log());
    first.terminate();
    let _ = std::fs::remove_file(pool);
}

#[test]
fn a_pod_that_is_killed_takes_its_own_place_in_etcd_with_its_pool() {
    let etcd = Etcd::start();
    let members = [format!("--etcd={}", etcd.url)];
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let pool = PathBuf::from(format!("/dev/shm/pillion-test-{}-former", std::process::id()));
    let start = || a.start_by(&members, Trust::Nobody, &[&"--pool-path", &pool]);
    let (first, second) = (start(), b.start_by(&members, Trust::Nobody, &[]));
    let keys = Engine::connect(&first).save(&mut 0);
    wait_known(&second, keys.len());
    // A block without a checksum is not adopted by the next life.
    first.wait_metric("pillion_pool_unsummed_blocks", |blocks| blocks == 0);
    first.kill();
    let first = start();
    wait_known(&first, 0);
    watch("its next life", || (b.log().matches("a peer joined").count() == 2).then_some(()));
    wait_known(&second, keys.len());
    assert!(!a.log().contains("an earlier registration"), "it did not wait for a lease to end: {}", a.log());
    // It announces each block after its verification.
    let mut engine = Engine::connect(&second);
    watch("all of its blocks", || {
        let (served, wrong) = engine.served(&keys);
        assert_eq!(wrong, 0, "{}", b.log());
        (served == keys).then_some(())
    });
    first.terminate();
    std::fs::remove_file(pool).unwrap();
}

#[test]
fn a_frozen_pod_is_not_waited_for_longer_than_it_may_take() {
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let (first, second) = (a.start(&[&b]), b.start(&[&a]));
    let mut engine = Engine::connect(&first);
    wait_acquainted(&first, &second, 0);
    let keys = engine.save(&mut 0);
    wait_known(&second, keys.len());
    first.freeze(true);
    let mut other = Engine::connect(&second);
    // One query alone: an answer with a part would be followed by others.
    other.post_query(&keys);
    second.wait_metric("pillion_queries_total", |queries| queries == 1);
    assert_eq!(second.metric("pillion_query_hit_blocks_total"), 0);
    second.wait_metric("pillion_mesh_fetching_blocks", |fetching| fetching == 0);
    let own = other.save(&mut 1_000_000);
    other.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
    assert_eq!(other.served(&own), (own.clone(), 0), "the engine goes on");
    first.freeze(false);
    // The pod is asked again after its pause, or after it has joined again.
    watch("the blocks of a pod that has thawed", || {
        let (served, wrong) = other.served(&keys);
        assert_eq!(wrong, 0);
        (served == keys).then_some(())
    });
}

#[test]
fn what_the_owner_gave_up_is_a_miss() {
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let (first, second) = (a.start(&[&b]), b.start(&[&a]));
    let mut engine = Engine::connect(&first);
    let mut stamp = 0;
    let old = engine.save(&mut stamp);
    wait_known(&second, old.len());
    for _ in 0..20 {
        engine.save(&mut stamp);
    }
    first.wait_metric("pillion_evicted_blocks_total", |evicted| evicted >= old.len() as u64);
    watch("all kept blocks to be known", || {
        (first.metric("pillion_blocks") == second.metric("pillion_mesh_peer_keys")).then_some(())
    });
    let (served, wrong) = Engine::connect(&second).served(&old);
    assert!(served.is_empty() && wrong == 0, "{} served", served.len());
}

#[test]
fn bytes_that_changed_at_the_owner_never_reach_an_engine() {
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let pool = PathBuf::from(format!("/dev/shm/pillion-test-{}-mesh", std::process::id()));
    let first = a.start_with(&[&b], Trust::Nobody, &[&"--pool-path", &pool]);
    let keys = Engine::connect(&first).save(&mut 0);
    let second = b.start(&[&a]);
    wait_acquainted(&first, &second, keys.len());
    // A checksum computed later would be of the changed bytes.
    first.wait_metric("pillion_pool_unsummed_blocks", |blocks| blocks == 0);
    wait_served(&mut Engine::connect(&second), &keys, &b);
    // The second sidecar's blocks are known, so it is a member.
    wait_known(&first, keys.len());
    second.kill();
    corrupt(&pool);
    let second = b.start(&[&a]);
    wait_acquainted(&first, &second, keys.len());
    let (served, wrong) = Engine::connect(&second).served(&keys);
    assert_eq!((served.len(), wrong), (0, 0));
    second.wait_metric("pillion_mesh_faults_total", |faults| faults > 0);
    assert!(fault(&second, "corrupt") > 0);
    std::fs::remove_file(pool).unwrap();
}

#[test]
fn who_is_no_member_gets_nothing() {
    let (a, b, c) = (Pod::new("a"), Pod::new("b"), Pod::new("c"));
    let first = a.start(&[&c]);
    let keys = Engine::connect(&first).save(&mut 0);
    let second = b.start(&[&a]);
    // A query asks for known blocks alone, and nothing asks again.
    wait_known(&second, keys.len());
    let (served, wrong) = Engine::connect(&second).served(&keys);
    assert_eq!((served.len(), wrong), (0, 0));
    assert_eq!(first.metric("pillion_mesh_served_blocks_total"), 0);
    for sidecar in [&first, &second] {
        let refused = |page: String| {
            let line = page
                .lines()
                .find_map(|line| line.strip_prefix("pillion_mesh_refusals_total{reason=\"not_member\"} "));
            line.filter(|count| *count != "0").map(drop)
        };
        watch("a refusal that is counted", || sidecar.page("/metrics").and_then(refused));
    }
}

#[test]
fn a_mesh_without_trust_must_be_asked_for() {
    let mesh = ["--mesh-listen", "127.0.0.1:9441", "--peer", "127.0.0.1:1"];
    let text = refused(&mesh);
    assert!(text.contains("--mesh-cert") && text.contains("--mesh-plaintext"), "{text}");
    let text = refused(&["--mesh-listen", "0.0.0.0:9441", "--peer", "127.0.0.1:1", "--mesh-plaintext"]);
    assert!(text.contains("the pod's IP"), "{text}");
    let text = refused(&["--peer", "127.0.0.1:1"]);
    assert!(text.contains("--mesh-listen"), "{text}");
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let text = refused(&["--mesh-listen", &address, "--peer", "127.0.0.1:1", "--mesh-plaintext"]);
    assert!(text.contains("a free address of this machine"), "{text}");
}

#[test]
fn a_request_waits_for_the_pod_that_computes_its_prompt() {
    let (a, b) = (Pod::new("a"), Pod::new("b"));
    let (first, second) = (a.start(&[&b]), b.start(&[&a]));
    let mut producer = Engine::connect(&first);
    let mut engine = Engine::waiting(&second, Some(QUERY_WAIT_MS_MAX));
    let (waits, exhausted) = ("pillion_mesh_miss_waits_total", "pillion_mesh_miss_waits_exhausted_total");
    let breaker = "pillion_mesh_miss_wait_breakers_open";
    second.wait_metric("pillion_mesh_peers", |peers| peers == 1);
    let nobodys = |request: u64| keys_after(1_000_000 * request)[..1].to_vec();

    // The first window is open while the producer has no blocks yet.
    assert!(engine.served(&nobodys(1)).0.is_empty(), "the rank is known by now");
    second.wait_metric(exhausted, |exhausted| exhausted == 1);
    let mut stamp = 0;
    let (prompt, in_vain) = in_time("a producer's save", || {
        let (prompt, before) = (keys_after(stamp), [waits, exhausted].map(|name| second.metric(name)));
        let began = now();
        let op = engine.post_query(&prompt);
        second.wait_metric(waits, |waits| waits == before[0] + 1);
        producer.save(&mut stamp);
        let known = |outcome: &Outcome| outcome.status != Status::Pending;
        let outcome = watch("an answer", || Some(engine.scheduler.outcome(op)).filter(known));
        engine.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
        if outcome.value < SAVED.len() as u32 && began.elapsed() > SOON {
            // Found blocks end the row of waits without effect.
            wait_known(&second, stamp as usize);
            wait_served(&mut engine, &prompt, &b);
            return None;
        }
        assert_eq!((outcome.status, outcome.value), (Status::Ok, SAVED.len() as u32), "{}", b.log());
        Some((prompt, before[1]))
    });
    wait_served(&mut engine, &prompt, &b);
    assert_eq!(second.metric(exhausted), in_vain);

    // After three waits without effect no query waits; after a block of the producer the next one does.
    for request in 2..5 {
        assert_eq!(second.metric(breaker), 0);
        assert!(engine.served(&nobodys(request)).0.is_empty());
    }
    second.wait_metric(breaker, |open| open == 1);
    assert!(b.log().contains("after 3 such waits in a row"), "{}", b.log());
    assert!(engine.served(&nobodys(5)).0.is_empty());
    let more = producer.save(&mut 10_000);
    wait_known(&second, stamp as usize + more.len());
    wait_served(&mut engine, &more, &b);
    second.wait_metric(breaker, |open| open == 0);
    assert!(engine.served(&nobodys(6)).0.is_empty());
    second.wait_metric(exhausted, |exhausted| exhausted == in_vain + 4);
}

#[test]
fn without_a_mesh_nobody_waits_and_the_engine_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &DRAM]);
    sidecar.wait_started();
    let mut engine = Engine::waiting(&sidecar, Some(QUERY_WAIT_MS_MAX));
    let note = engine.scheduler.welcome.note.clone().expect("a note");
    assert!(note.contains("pillion.miss_wait_ms") && note.contains("--mesh-listen"), "{note}");
    assert!(engine.served(&keys_after(0)).0.is_empty());
    assert_eq!(sidecar.metric("pillion_query_waits_total"), 0);
    let log = std::fs::read_to_string(folder.path().join("log")).unwrap();
    assert_eq!(log.matches("pillion.miss_wait_ms").count(), 1, "{log}");
}

#[test]
fn what_has_come_from_one_pod_is_loaded_while_another_still_has_the_rest() {
    for dies in [false, true] {
        in_time("a load beside a frozen pod", || loaded_in_two_parts(dies));
    }
}

/// `None` if the fetch from the frozen pod has ended before the look at it, or before the pod thaws.
fn loaded_in_two_parts(dies: bool) -> Option<()> {
    let (a, b, c) = (Pod::new("a"), Pod::new("b"), Pod::new("c"));
    let (first, third) = (a.start(&[&b]), c.start(&[&b]));
    let prompt = [Engine::connect(&first).save(&mut 0), Engine::connect(&third).save(&mut 1000)];
    let prompt = prompt.concat();
    let second = b.start(&[&a, &c]);
    for owner in [&first, &third] {
        owner.wait_metric("pillion_mesh_peers", |peers| peers == 1);
    }
    second.wait_metric("pillion_mesh_peer_keys", |known| known == prompt.len() as u64);
    let mut engine = Engine::connect(&second);
    third.freeze(true);
    let began = now();
    let (lease, answer) = engine.ask_early(&prompt);
    let in_time = || (began.elapsed() < SOON).then_some(());
    in_time()?;
    assert_eq!((answer.status, answer.value as usize), (Status::Arriving, prompt.len()), "{}", b.log());
    let here = engine.post_load(lease, 0, SAVED);
    let frozen = engine.post_load(lease, SAVED.len() as u32, 101..121);
    engine.scheduler.post(SchedulerRequest::Release { log: 0 });
    let ends = (watch("the first part", || engine.load_ended(here)), engine.load_ended(frozen));
    in_time()?;
    assert_eq!(ends, (Status::Ok, None), "the other blocks have not left their owner");
    assert!(engine.loaded(SAVED, &prompt));
    if dies {
        third.kill();
    } else {
        third.freeze(false);
    }
    let ended = watch("the second part", || engine.load_ended(frozen));
    if !dies && ended != Status::Ok {
        in_time()?;
    }
    assert_eq!(ended, if dies { Status::Absent } else { Status::Ok }, "{}", b.log());
    assert!(dies || engine.loaded(101..121, &prompt[SAVED.len()..]));
    assert_eq!(second.metric("pillion_query_early_answers_total"), 1);
    second.wait_metric("pillion_mesh_fetching_blocks", |fetching| fetching == 0);
    engine.scheduler.post(SchedulerRequest::Close { log: 0, way: 0 });
    let kept = if dies { SAVED.len() } else { prompt.len() };
    assert_eq!(engine.served(&prompt[..kept]), (prompt[..kept].to_vec(), 0), "the engine goes on");
    second.terminate();
    Some(())
}
