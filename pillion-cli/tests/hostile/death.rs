//! An engine's death by SIGKILL with all operations in flight: its resources are freed, and no half-written
//! block stays.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use shm_protocol::handshake::Copier;
use shm_protocol::message::{Kind, LOAD_BY_ENGINE, Message};
use shm_protocol::pool::{self, Geometry};
use shm_protocol::region::Region;

use crate::client::{BLOCK_BYTES, Kv, Session, hello, save, watch};
use crate::scene::{Holdings, OWN_SESSIONS, Scene, key, run_id};

const TEST: &str = "death::a_killed_engine_leaves_nothing_behind";
/// Count of deaths, for the figures.
const DEATHS: u64 = 5;
/// Kept blocks, each of them leased; as many more are under save.
const KEPT: u32 = 60;

/// The engine to kill: its two sessions and its memory, in a process of its own.
fn engine_to_die() -> bool {
    let Some(socket) = std::env::var_os("PILLION_TEST_DIE") else { return false };
    let number: u64 = std::env::var_os("PILLION_TEST_NUMBER").unwrap().to_str().unwrap().parse().unwrap();
    let (socket, kv, run) = (Path::new(&socket), Kv::new(), run_id(500 + number));
    (1..120).for_each(|block| kv.fill(block, block.into()));
    let role = kv.worker_of("mortal", 0, 1, Copier::Sidecar);
    let rank = Session::rank(socket, &hello("mortal", 1, role), &kv, run);
    let mut scheduler = Session::scheduler(socket, "mortal", 1, run);
    let first = 20_000_000 + 1000 * number;
    for log in 0..3 {
        let keys: Vec<_> = (0..u64::from(2 * KEPT)).map(|n| key(first + n)).collect();
        scheduler.open_log(log, &keys);
    }
    scheduler.query_ready(0, 1, 1);
    let blocks: Vec<u32> = (1..=KEPT).collect();
    scheduler.with_blocks(save(2, 0, 0), &blocks);
    rank.ring();
    assert_eq!(scheduler.saved().committed, KEPT);
    // A lease, a load copied by its ranks, a load without its step yet, and a save without it.
    for (log, op) in [(0, 3), (1, 4), (2, 5)] {
        assert_eq!(scheduler.query(log, op, KEPT).value, KEPT);
    }
    let load = Message::new(Kind::Load);
    let own = Message { op: 6, log: 1, lease: 4, step: 99, flags: LOAD_BY_ENGINE, ..load };
    scheduler.with_blocks(own, &blocks);
    scheduler.with_blocks(Message { op: 7, log: 2, lease: 5, step: 99, ..load }, &blocks);
    scheduler.with_blocks(save(8, KEPT, 99), &blocks);
    assert_eq!(scheduler.query(0, 9, KEPT).value, KEPT, "all of it was read");
    // The last save's copies race with the death.
    rank.fences(0, 99);
    rank.ring();
    if std::env::var_os("PILLION_TEST_HEIR").is_some() {
        for session in [&scheduler, &rank] {
            rustix::io::fcntl_setfd(session.socket(), rustix::io::FdFlags::empty()).unwrap();
        }
        let heir = Command::new("sleep")
            .arg("600")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        eprintln!("heir {}", heir.unwrap().id());
    }
    eprintln!("ready to die");
    loop {
        std::thread::park();
    }
}

/// Starts the engine. With `heir` it forks a child with its sockets open; returns the child's number.
fn start(scene: &Scene, number: u64, heir: bool) -> (Child, Option<Pid>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    if heir {
        command.env("PILLION_TEST_HEIR", "1");
    }
    let mut child = command
        .args(["--exact", TEST, "--nocapture"])
        .env("PILLION_TEST_DIE", &scene.pillion.socket)
        .env("PILLION_TEST_NUMBER", number.to_string())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut heir = None;
    let ready = lines.any(|line| {
        heir = heir.or(line.strip_prefix("heir ").map(|number| Pid::from_raw(number.parse().unwrap())));
        line.contains("ready to die")
    });
    assert!(ready, "the engine ended by itself");
    (child, heir)
}

/// Count of the pool's slots under a save, by the headers, readable by every engine.
fn filling(pool: &Region) -> usize {
    let load = |at: u64| pool.load64(at as usize);
    let geometry = Geometry::new(load(pool::header::SEGMENT_BYTES), BLOCK_BYTES).unwrap();
    let segments = 0..load(pool::header::SEGMENTS);
    let assigned = segments.filter(|number| {
        let at = pool::segment_offset(geometry.segment_bytes, *number).unwrap();
        load(at + pool::segment::MAGIC) == pool::SEGMENT_MAGIC
    });
    let slots = assigned.flat_map(|number| {
        (0..geometry.slot_count).map(move |index| geometry.offset(number, index).expect("a slot"))
    });
    slots
        .filter(|slot| load(geometry.place_of(*slot).unwrap().header + pool::slot::STATE) == pool::FILLING)
        .count()
}

#[test]
fn a_killed_engine_leaves_nothing_behind() {
    if engine_to_die() {
        return;
    }
    let mut scene = Scene::start();
    // A session only for reading the pool.
    let observer = Session::scheduler(&scene.pillion.socket, "observer", 1, run_id(999));
    let parked = scene.park();
    // The page may lag behind the observer's welcome.
    let known = |held: &Holdings| held.sessions == OWN_SESSIONS + 1;
    let before = watch("the observer's session", || Some(scene.pillion.holdings()).filter(known));
    drop(parked);
    let mut slowest = Duration::ZERO;
    for number in 0..DEATHS {
        let (mut engine, _) = start(&scene, number, false);
        assert!(scene.pillion.mappings("pillion-session") > before.mappings);
        let parked = scene.park();
        let held: Holdings = scene.pillion.holdings();
        assert!(held.leases >= 2 && held.descriptors > before.descriptors, "{held:?}");
        #[expect(clippy::disallowed_methods, reason = "the figure that is printed")]
        let began = Instant::now();
        engine.kill().unwrap();
        watch("end of everything that the dead engine held", || {
            (scene.pillion.holdings().within(&before) && filling(&observer.pool) == 0).then_some(())
        });
        slowest = slowest.max(began.elapsed());
        drop(parked);
        engine.wait().unwrap();
        scene.assert_served();
    }
    eprintln!("everything was given back within {slowest:?} of a death, the slowest of {DEATHS}");
    drop(observer);
    scene.assert_unharmed("deaths");
}

/// The engine's forked child has the same files open.
#[test]
fn a_killed_engine_leaves_nothing_behind_although_a_child_keeps_its_sockets() {
    let mut scene = Scene::start();
    let parked = scene.park();
    let before = scene.pillion.holdings();
    drop(parked);
    let (mut engine, heir) = start(&scene, DEATHS, true);
    let heir = heir.expect("a child");
    assert!(scene.pillion.holdings().sessions > before.sessions);
    engine.kill().unwrap();
    engine.wait().unwrap();
    watch("end of everything that the dead engine held", || {
        scene.pillion.holdings().within(&before).then_some(())
    });
    kill(heir, None).expect("the child lives, with the sockets open");
    scene.assert_unharmed("an engine's death before its child's");
    kill(heir, Signal::SIGKILL).unwrap();
}
