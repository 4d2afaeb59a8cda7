//! The rules of the handshake hold on both sides, in the same words: the engine's session refuses a hello
//! before it connects, and the sidecar refuses the same hello as a raw record.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Duration;

use crate::client::sidecar::Sidecar;
use crate::client::{BLOCKS, Kv, greet, hello};
use connector_shim::scheduler::{self, LoadWait, SchedulerClient, SessionConfig};
use connector_shim::worker::{self, RegionMemory};
use shm_protocol::handshake::{
    self, BlockRegion, Copier, CudaAllocation, CudaMemory, Hello, HelloDigest, Reply, Role, WorkerHello,
};

const RUN: [u8; 16] = [7; 16];
/// Bytes of a block of [`gpu_worker`].
const GPU_BLOCK_BYTES: u64 = 4096;

/// The means of sending a wrong hello.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Through {
    /// A session, by its options.
    Session,
    /// A session on a GPU with these cuts.
    Cuts,
    /// The record alone: a session fills these fields in itself.
    Record,
}

/// A hello that breaks one rule, and the text of its refusal.
struct Breach {
    rule: &'static str,
    hello: Hello,
    descriptors: usize,
    through: Through,
}

fn worker_hello(world_size: u32, worker: WorkerHello) -> Hello {
    hello("engine", world_size, Role::Worker(worker))
}

fn host_worker(kv: &Kv) -> WorkerHello {
    kv.stated("tiny", 0, 1, Copier::Engine)
}

fn gpu_worker(kv: &Kv) -> WorkerHello {
    let region = BlockRegion { fd: 0, offset: 0, stride: GPU_BLOCK_BYTES, bytes: GPU_BLOCK_BYTES };
    let bytes = GPU_BLOCK_BYTES * u64::from(BLOCKS);
    let allocations = vec![CudaAllocation { handle: [1; 64], bytes }];
    let cuda = CudaMemory { uuid: [2; 16], pid: 1, allocations, cuts: vec![GPU_BLOCK_BYTES] };
    WorkerHello { regions: vec![region], copy: Copier::Sidecar, cuda: Some(cuda), ..host_worker(kv) }
}

fn staged_worker(kv: &Kv) -> WorkerHello {
    let region = BlockRegion { fd: 0, offset: 4096, stride: 512, bytes: 512 };
    WorkerHello { regions: vec![region], staging: Some(4), ..host_worker(kv) }
}

/// Wrong statements of any role about its engine.
fn of_engines(kv: &Kv) -> Vec<Breach> {
    let scheduler = hello("engine", 1, Role::Scheduler { run: RUN });
    let breach = |rule, hello| Breach { rule, hello, descriptors: 0, through: Through::Session };
    let named = |engine: String| Hello { engine, ..worker_hello(1, host_worker(kv)) };
    let with_memory = |breach| Breach { descriptors: 2, ..breach };
    vec![
        breach("engine (its length) is 0", Hello { engine: String::new(), ..scheduler.clone() }),
        with_memory(breach("engine (its length) is 257; it must be 1 to 256", named("e".repeat(257)))),
        breach("world_size is 0", Hello { world_size: 0, ..scheduler.clone() }),
        with_memory(breach("world_size is 65; it must be 1 to 64", worker_hello(65, host_worker(kv)))),
        breach("set a smaller pillion.miss_wait_ms", Hello { miss_wait_ms: Some(2001), ..scheduler.clone() }),
        Breach {
            rule: "descriptors is 1; it must be 0: a scheduler sends none",
            hello: scheduler,
            descriptors: 1,
            through: Through::Record,
        },
    ]
}

/// Wrong statements of a worker about its rank and its namespace.
fn of_ranks(kv: &Kv) -> Vec<Breach> {
    let good = host_worker(kv);
    let breach = |rule, world_size, change: &dyn Fn(&mut WorkerHello)| {
        let mut worker = good.clone();
        change(&mut worker);
        Breach { rule, hello: worker_hello(world_size, worker), descriptors: 2, through: Through::Session }
    };
    vec![
        breach("rank is 1; it must be below world_size", 1, &|worker| worker.rank = 1),
        breach("shards is 0; it must be 1 to world_size", 1, &|worker| worker.shards = 0),
        breach("shards is 3; it must be a divisor of world_size", 4, &|worker| worker.shards = 3),
        breach("shard is 0; it must be rank / (world_size / shards)", 4, &|worker| {
            (worker.rank, worker.shards) = (2, 2);
        }),
        breach("blocks is 0", 1, &|worker| worker.blocks = 0),
        breach("facts (their number) is 257", 1, &|worker| {
            worker.facts = (0..257).map(|number| (number.to_string(), String::new())).collect();
        }),
        breach("expects (its hex digits) is 31", 1, &|worker| worker.expects = Some("a".repeat(31))),
        breach("32 in lower case, and nothing else", 1, &|worker| worker.expects = Some("A".repeat(32))),
        breach("fact weights_live is 00", 1, &|worker| {
            worker.facts.insert("weights_live".into(), "00".into());
            worker.live_weights = Some(HelloDigest([0; 16]));
        }),
    ]
}

/// Wrong statements of a worker about its memory.
fn of_memory(kv: &Kv) -> Vec<Breach> {
    let good = host_worker(kv);
    let breach = |rule, change: &dyn Fn(&mut WorkerHello)| {
        let mut worker = good.clone();
        change(&mut worker);
        Breach { rule, hello: worker_hello(1, worker), descriptors: 2, through: Through::Session }
    };
    vec![
        breach("regions (their number) is 0", &|worker| worker.regions.clear()),
        breach("regions (their number) is 1025", &|worker| worker.regions = vec![worker.regions[0]; 1025]),
        breach("region.fd is 2 (region 1)", &|worker| worker.regions[1].fd = 2),
        breach("region.bytes is 0 (region 0)", &|worker| worker.regions[0].bytes = 0),
        breach("region.stride is 1 (region 2)", &|worker| worker.regions[2].stride = 1),
        breach("region.offset is 18446744073709551615", &|worker| worker.regions[0].offset = u64::MAX),
        breach("bytes of a block is 1099511627776; it must be below 1 TiB", &|worker| {
            let region = BlockRegion { fd: 0, offset: 0, stride: 1 << 40, bytes: 1 << 40 };
            (worker.blocks, worker.regions) = (1, vec![region]);
        }),
    ]
}

/// Wrong statements about a staging segment, made by the session itself in real engines.
fn of_staging(kv: &Kv) -> Vec<Breach> {
    let good = staged_worker(kv);
    let breach = |rule, descriptors, change: &dyn Fn(&mut WorkerHello)| {
        let mut worker = good.clone();
        change(&mut worker);
        Breach { rule, hello: worker_hello(1, worker), descriptors, through: Through::Record }
    };
    vec![
        breach("staging is 0; it must be 1 to 512", 1, &|worker| worker.staging = Some(0)),
        breach("staging is 513; it must be 1 to 512", 1, &|worker| worker.staging = Some(513)),
        breach("absent beside GPU memory", 0, &|worker| {
            *worker = WorkerHello { staging: Some(4), ..gpu_worker(kv) };
        }),
        breach("descriptors is 2; it must be 1, of the staging segment", 2, &|_| ()),
        breach("regions (their number) is 2; it must be 1, of", 1, &|worker| {
            worker.regions = vec![worker.regions[0]; 2];
        }),
        breach("behind the words of the slots", 1, &|worker| worker.regions[0].offset = 4095),
        breach("copy is 'sidecar'; it must be 'engine'", 1, &|worker| worker.copy = Copier::Sidecar),
    ]
}

/// Wrong statements about a GPU's memory: a session takes cuts, and makes the rest itself.
fn of_gpus(kv: &Kv) -> Vec<Breach> {
    let breach = |rule, through, change: &dyn Fn(&mut CudaMemory)| {
        let mut worker = gpu_worker(kv);
        change(worker.cuda.as_mut().expect("GPU memory"));
        Breach { rule, hello: worker_hello(1, worker), descriptors: 0, through }
    };
    let (record, cuts) = (Through::Record, Through::Cuts);
    let by_engine = WorkerHello { copy: Copier::Engine, ..gpu_worker(kv) };
    vec![
        Breach { descriptors: 1, ..breach("descriptors is 1; it must be 0 beside GPU", record, &|_| ()) },
        breach("allocations (their number) is 65", record, &|cuda| {
            cuda.allocations = vec![cuda.allocations[0].clone(); 65];
        }),
        breach("allocation.bytes", record, &|cuda| cuda.allocations[0].bytes -= 1),
        breach("cuts (their number) is 0", cuts, &|cuda| cuda.cuts.clear()),
        breach("cuts (their number) is 256", cuts, &|cuda| cuda.cuts = (1..=256).collect()),
        breach("cuts (the first) is 0; it must be above 0", cuts, &|cuda| cuda.cuts.insert(0, 0)),
        breach("every other one above the one before it", cuts, &|cuda| cuda.cuts.insert(0, GPU_BLOCK_BYTES)),
        breach("cuts (the last) is 4095", cuts, &|cuda| cuda.cuts[0] -= 1),
        Breach {
            rule: "copy is 'engine'; it must be 'sidecar'",
            hello: worker_hello(1, by_engine),
            descriptors: 0,
            through: record,
        },
    ]
}

/// The refusal by an engine's session of this hello, connecting to `socket`.
fn session_says(socket: &Path, kv: &Kv, breach: &Breach) -> String {
    let Hello { engine, world_size, miss_wait_ms, role, .. } = breach.hello.clone();
    let refused = match role {
        Role::Scheduler { run } => {
            let options = scheduler::SchedulerSetup {
                socket: socket.into(),
                engine,
                world_size,
                run,
                config: SessionConfig {
                    budget: Duration::from_millis(2),
                    by_engine: false,
                    early: false,
                    part_blocks: 0,
                    whole_blocks: 0,
                    last: false,
                    streams: false,
                    load_wait: LoadWait::default(),
                },
                miss_wait_ms,
                handover_wait_ms: None,
                promise_wait_ms: None,
                groups: None,
            };
            SchedulerClient::new(options).err()
        }
        Role::Worker(mut worker) => {
            let memory = match worker.cuda.take() {
                Some(cuda) => RegionMemory::Gpu { pointers: vec![1 << 20], cuts: cuda.cuts, stream: 0 },
                None => RegionMemory::Host(kv.fds.iter().map(|fd| fd.try_clone().unwrap()).collect()),
            };
            let socket = socket.into();
            let options = worker::WorkerSetup {
                socket,
                engine,
                world_size,
                worker,
                memory,
                staged: false,
                groups: None,
            };
            worker::RankClient::new(options).err()
        }
    };
    refused.unwrap_or_else(|| panic!("a session was made in spite of: {}", breach.rule)).to_string()
}

#[test]
fn every_rule_refuses_on_both_sides_with_the_same_text() {
    let (folder, kv) = (tempfile::tempdir().unwrap(), Kv::new());
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"16MiB"]);
    let tables = [of_engines(&kv), of_ranks(&kv), of_memory(&kv), of_staging(&kv), of_gpus(&kv)];
    for breach in tables.into_iter().flatten() {
        let fds: Vec<&OwnedFd> = kv.fds.iter().take(breach.descriptors).collect();
        let (_, reply, _) = greet(&sidecar.socket, &breach.hello, &fds);
        let Reply::Refused { reason, .. } = reply else { panic!("{}: {reply:?}", breach.rule) };
        assert!(reason.contains(breach.rule), "{}: {reason}", breach.rule);
        let record = handshake::encode_hello(&breach.hello, breach.descriptors).unwrap_err();
        assert_eq!(record.to_string(), reason);
        if breach.through != Through::Record {
            assert_eq!(session_says(&sidecar.socket, &kv, &breach), reason, "{:?}", breach.through);
        }
    }
}

#[test]
fn a_wrong_number_of_shards_is_refused_with_and_without_a_sidecar() {
    let (folder, kv) = (tempfile::tempdir().unwrap(), Kv::new());
    let hello = worker_hello(4, WorkerHello { shards: 3, ..host_worker(&kv) });
    let breach = Breach { rule: "3 of 4", hello, descriptors: 2, through: Through::Session };
    let alone = session_says(&folder.path().join("p.sock"), &kv, &breach);
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"16MiB"]);
    assert_eq!(session_says(&sidecar.socket, &kv, &breach), alone);
    assert_eq!(alone, "shards is 3; it must be a divisor of world_size");
}

#[test]
fn blocks_larger_than_a_segment_are_refused_with_the_least_pool() {
    let (folder, kv) = (tempfile::tempdir().unwrap(), Kv::new());
    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"16MiB"]);
    let fds: Vec<&OwnedFd> = kv.fds.iter().take(1).collect();
    for (mib, said) in
        [(3, ""), (6, "give the sidecar at least --dram 256MiB"), (300, "set a smaller --block-size")]
    {
        let regions = vec![BlockRegion { fd: 0, offset: 0, stride: mib << 20, bytes: mib << 20 }];
        let (_, reply, _) =
            greet(&sidecar.socket, &worker_hello(1, WorkerHello { regions, ..host_worker(&kv) }), &fds);
        let reason = if let Reply::Refused { reason, .. } = reply { reason } else { String::new() };
        assert_eq!(reason.contains("so no block fits"), mib > 4, "{reason}");
        assert!(reason.contains(said), "{reason}");
    }
}

#[test]
fn more_descriptors_than_a_packet_holds_are_refused_before_they_are_sent() {
    let kv = Kv::new();
    let text = handshake::encode_hello(&worker_hello(1, host_worker(&kv)), 65).unwrap_err().to_string();
    assert_eq!(text, "descriptors is 65; it must be at most 64");
}
