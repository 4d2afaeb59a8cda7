//! The handshake: hostile records, descriptors and callers are refused, each with a reason.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use shm_protocol::handshake::{self, Copier, Hello, Reply, Role};
use shm_protocol::message::{Kind, Message, Status};
use shm_protocol::request::{LoadEnd, WorkerRequest};
use shm_protocol::versions::RELEASE;
use shm_protocol::{PROTOCOL_OLDEST, PROTOCOL_VERSION, transport};

use crate::client::{BLOCKS, Kv, Session, WATCHDOG, greet, hello, save, watch};
use crate::scene::{Pillion, Scene, key, run_id, villain, worker};

/// Sends a record with these descriptors. Returns the sidecar's answer before its hang-up; `None` without an
/// answer.
fn say(socket: &Path, record: &[u8], descriptors: &[BorrowedFd<'_>]) -> Option<Reply> {
    let connection = transport::connect_socket(socket, WATCHDOG).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors)));
    rustix::net::sendmsg(&connection, &[IoSlice::new(record)], &mut control, SendFlags::NOSIGNAL).unwrap();
    let (answer, sent) = transport::receive_record(&connection).unwrap();
    if answer.is_empty() {
        return None;
    }
    let reply = handshake::decode_reply(&answer).expect("a reply of this version");
    if matches!(reply, Reply::Refused { .. }) {
        assert!(sent.is_empty(), "a refusal brings nothing along");
        assert!(transport::receive_record(&connection).unwrap().0.is_empty(), "and is a hang-up");
    }
    Some(reply)
}

fn reason(reply: Option<Reply>, what: &str) -> String {
    match reply {
        Some(Reply::Refused { version, reason }) => {
            assert_eq!(version, PROTOCOL_VERSION);
            reason
        }
        other => panic!("{what}: {other:?}"),
    }
}

fn scheduler(number: u64) -> Hello {
    hello("caller", 1, Role::Scheduler { run: run_id(number) })
}

#[test]
fn records_that_are_no_hello_are_refused() {
    let mut scene = Scene::start();
    let good = handshake::encode_record(&scheduler(1));
    let mut records: Vec<(String, Vec<u8>, &str)> = vec![
        ("another protocol".into(), b"GET / HTTP/1.1\r\n\r\n".to_vec(), "not a pillion handshake"),
        ("one byte".into(), vec![0], "not a pillion handshake"),
        ("zeros".into(), vec![0; 65_536], "not a pillion handshake"),
        (
            "a map of 2^64 - 1 entries".into(),
            b"\xbb\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(),
            "not a pillion",
        ),
        (
            "a text of 2^63 bytes".into(),
            b"\xa1\x7b\x7f\xff\xff\xff\xff\xff\xff\xff".to_vec(),
            "not a pillion",
        ),
        ("an array of 2^32 entries".into(), b"\x9b\0\0\0\x01\0\0\0\0".to_vec(), "not a pillion"),
        ("arrays in arrays".into(), vec![0x81; 60_000], "not a pillion"),
        ("tags on tags".into(), vec![0xc1; 60_000], "not a pillion"),
        ("maps without end".into(), vec![0xbf; 60_000], "not a pillion"),
        ("a record too long".into(), vec![0xa0; 65_537], "could not be read"),
        ("a role of 60,000 letters".into(), long_role(), "not a pillion"),
    ];
    records
        .extend((1..good.len()).map(|end| (format!("cut at {end}"), good[..end].to_vec(), "not a pillion")));
    for (name, record, expected) in records {
        let text = reason(say(&scene.pillion.socket, &record, &[]), &name);
        assert!(text.contains(expected), "{name}: {text}");
    }
    assert_eq!(say(&scene.pillion.socket, b"", &[]), None, "an empty record is a hang-up");
    // With any byte changed, the answer is a welcome or a refusal.
    for at in 0..good.len() {
        let mut record = good.clone();
        record[at] ^= 0xff;
        assert!(say(&scene.pillion.socket, &record, &[]).is_some(), "byte {at}");
    }
    scene.assert_unharmed("records that are no hello");
}

/// A well-formed record with a role's name longer than any reply may be.
fn long_role() -> Vec<u8> {
    let mut record = b"\xa4\x67version\x02\x66engine\x61e\x6aworld_size\x01\x64role\xa1\x79\xea\x60".to_vec();
    record.extend(std::iter::repeat_n(b'r', 60_000));
    record.push(0);
    record
}

#[test]
fn versions_from_the_past_and_the_future_are_told_both_numbers() {
    let mut scene = Scene::start();
    let own = format!("versions {PROTOCOL_OLDEST} to {PROTOCOL_VERSION} (release {RELEASE})");
    for version in [0, 1, PROTOCOL_VERSION + 1, 99, u32::MAX] {
        let hello = Hello { version, oldest: None, release: "9.1".into(), ..scheduler(1) };
        let text = reason(say(&scene.pillion.socket, &handshake::encode_record(&hello), &[]), "a version");
        assert!(text.contains(&format!("version {version} (release 9.1)")) && text.contains(&own), "{text}");
    }
    // A later release with this version among its own.
    let later = Hello { version: 99, oldest: Some(PROTOCOL_VERSION), ..scheduler(1) };
    match say(&scene.pillion.socket, &handshake::encode_record(&later), &[]) {
        Some(Reply::Welcome(welcome)) => {
            assert_eq!((welcome.version, welcome.release.as_str()), (PROTOCOL_VERSION, RELEASE));
        }
        other => panic!("a later release: {other:?}"),
    }
    // A record with a known version alone.
    let future = b"\xa2\x67version\x19\x03\xe8\x65shape\xa1\x61x\xf6";
    let text = reason(say(&scene.pillion.socket, future, &[]), "a record of the future");
    assert!(text.contains("version 1000"), "{text}");
    scene.assert_unharmed("other versions");
}

/// The change of a hello's field, and the word in its refusal.
type Lie = (fn(&mut Hello, &mut handshake::WorkerHello), &'static str);

#[test]
fn every_field_of_a_hello_is_checked() {
    let mut scene = Scene::start();
    let lies: [Lie; 23] = [
        (|hello, _| hello.engine.clear(), "engine"),
        (|hello, _| hello.engine = "e".repeat(257), "engine"),
        (|hello, _| hello.world_size = 0, "world_size"),
        (|hello, _| hello.world_size = 65, "world_size"),
        (|_, worker| worker.rank = 1, "rank"),
        (|_, worker| worker.rank = u32::MAX, "rank"),
        (|_, worker| worker.shards = 0, "shards"),
        (|_, worker| worker.shards = 2, "shards"),
        (|_, worker| worker.shard = 1, "shard"),
        (|_, worker| worker.blocks = 0, "blocks"),
        (|_, worker| worker.blocks = u32::MAX, "smaller than its regions"),
        (|_, worker| worker.blocks = BLOCKS + 2, "smaller than its regions"),
        (|_, worker| worker.regions.clear(), "regions"),
        (|_, worker| worker.regions = vec![worker.regions[0]; 1025], "regions"),
        (|_, worker| worker.regions[0].fd = 2, "region.fd"),
        (|_, worker| worker.regions[0].bytes = 0, "region.bytes"),
        (|_, worker| worker.regions[0].stride = 1, "region.stride"),
        (|_, worker| worker.regions[0].offset = u64::MAX, "region.offset"),
        (|_, worker| worker.expects = Some(String::new()), "expects"),
        (|_, worker| worker.expects = Some("x".repeat(32)), "expects"),
        (|_, worker| worker.expects = Some("0".repeat(32)), "has not seen"),
        (
            |_, worker| {
                worker.facts.insert("weights_live".into(), "0".repeat(32));
                worker.live_weights = Some(handshake::HelloDigest([0; 16]));
            },
            "weights_live",
        ),
        (|_, worker| worker.facts = (0..257).map(|n| (n.to_string(), String::new())).collect(), "facts"),
    ];
    let kv = Kv::new();
    let fds: Vec<_> = kv.fds.iter().map(AsFd::as_fd).collect();
    for (lie, field) in lies {
        let mut hello = worker(&kv, "caller");
        let Role::Worker(mut facts) = hello.role.clone() else { unreachable!("made as a worker") };
        lie(&mut hello, &mut facts);
        hello.role = Role::Worker(facts);
        let text = reason(say(&scene.pillion.socket, &handshake::encode_record(&hello), &fds), field);
        assert!(text.contains(field), "{field}: {text}");
    }
    scene.assert_unharmed("fields out of range");
}

#[test]
fn descriptors_that_are_not_what_was_said_are_refused() {
    let mut scene = Scene::start();
    let kv = Kv::new();
    let [first, second] = [kv.fds[0].as_fd(), kv.fds[1].as_fd()];
    let hello = handshake::encode_record(&worker(&kv, "caller"));
    let open = |path: &str, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty()).unwrap();
    let reopened = |fd: BorrowedFd<'_>, flags| {
        open(&format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd)), flags)
    };
    let (pipe, _writer) = rustix::pipe::pipe().unwrap();
    let (folder, null, zero) =
        (open("/dev/shm", OFlags::RDONLY), open("/dev/null", OFlags::RDWR), open("/dev/zero", OFlags::RDWR));
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(1 << 24).unwrap();
    let socket = transport::connect_socket(&scene.pillion.socket, WATCHDOG).unwrap();
    let (read, write) = (reopened(first, OFlags::RDONLY), reopened(first, OFlags::WRONLY));
    let path = reopened(first, OFlags::PATH);
    let small = rustix::fs::memfd_create("small", MemfdFlags::CLOEXEC).unwrap();
    let wrong: [(&str, Vec<BorrowedFd<'_>>, &str); 14] = [
        ("none", vec![], "region.fd"),
        ("one of two", vec![first], "region.fd"),
        ("swapped", vec![second, first], "smaller"),
        ("empty memory", vec![small.as_fd(), second], "smaller"),
        ("a pipe", vec![pipe.as_fd(), second], "shared memory"),
        ("a directory", vec![folder.as_fd(), second], "shared memory"),
        ("/dev/null", vec![null.as_fd(), second], "shared memory"),
        ("/dev/zero", vec![zero.as_fd(), second], "shared memory"),
        ("a file on a disk", vec![file.as_fd(), second], "shared memory"),
        ("a socket", vec![socket.as_fd(), second], "shared memory"),
        ("read only, to be written", vec![read.as_fd(), second], "permit"),
        ("write only, to be read", vec![write.as_fd(), second], "permit"),
        ("a mere path", vec![path.as_fd(), second], ""),
        ("too many", vec![first; 65], "could not be read"),
    ];
    for (name, fds, expected) in &wrong {
        let text = reason(say(&scene.pillion.socket, &hello, fds), name);
        assert!(text.contains(expected), "{name}: {text}");
    }
    let record = handshake::encode_record(&scheduler(2));
    let text = reason(say(&scene.pillion.socket, &record, &[first]), "a scheduler with memory");
    assert!(text.contains("a scheduler sends none"), "{text}");
    drop(socket);
    scene.assert_unharmed("wrong descriptors");
}

/// Memory that shrinks, or forbids writing, after the handshake: only its copies fail.
#[test]
fn memory_that_changes_after_the_handshake_fails_its_own_copies() {
    let mut scene = Scene::start();
    for seal in [false, true] {
        let mut kv = Kv::new();
        kv.fds = kv.fds.each_ref().map(|fd| {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let sealable = rustix::fs::memfd_create("kv", flags).unwrap();
            rustix::fs::ftruncate(&sealable, rustix::fs::fstat(fd).unwrap().st_size as u64).unwrap();
            sealable
        });
        kv.fill(1, 5);
        let (mut scheduler, rank) = villain(&scene.pillion.socket, &kv, "villain");
        scheduler.open_log(0, &[key(9_700_000 + u64::from(seal)), key(9_700_010)]);
        scheduler.query_ready(0, 1, 1);
        scheduler.with_blocks(save(2, 0, 0), &[1]);
        rank.ring();
        assert_eq!(scheduler.saved().committed, 1);
        assert_eq!(scheduler.query(0, 3, 1).value, 1);
        if seal {
            rustix::fs::fcntl_add_seals(&kv.fds[0], SealFlags::WRITE).unwrap();
        } else {
            kv.fds.iter().for_each(|fd| rustix::fs::ftruncate(fd, 0).unwrap());
            scheduler.with_blocks(save(4, 1, 0), &[1]);
            rank.ring();
            assert_eq!(scheduler.saved().dropped, 1);
        }
        let load = Message { op: 5, lease: 3, step: 1, ..Message::new(Kind::Load) };
        scheduler.with_blocks(load, &[2]);
        rank.fences(1, 0);
        rank.ring();
        let expected = if seal { Status::Failed } else { Status::Ok };
        // A shortened file grows again under the copy's writes: the engine's own loss.
        assert_eq!(rank.outcome(5).status, expected, "sealed: {seal}");
        rank_loaded(rank);
        drop(scheduler);
        scene.assert_unharmed("memory that changed");
    }
}

/// The rank ends a load failed in the sidecar.
fn rank_loaded(mut rank: Session) {
    rank.post(WorkerRequest::Loaded { op: 5, end: LoadEnd::Failed });
}

#[test]
fn a_record_after_the_handshake_ends_its_session() {
    let mut scene = Scene::start();
    let junk = vec![0xff; 65_536];
    let records: [&[u8]; 3] = [b"x", &junk, &handshake::encode_record(&scheduler(3))];
    for record in records {
        let (scheduler, rank) = scene.villain();
        let kv = Kv::new();
        let fds = [kv.fds[0].as_fd(), kv.fds[1].as_fd()];
        for session in [&scheduler, &rank] {
            transport::send_record(session.socket(), record, &fds).unwrap();
            session.closed_after("a record");
            scene.assert_said(session.welcome.session, "a record after the handshake");
        }
        drop((scheduler, rank));
        scene.assert_unharmed("records after the handshake");
    }
}

/// Callers without a read of their answer, and callers gone before it.
#[test]
fn callers_that_do_not_read_or_do_not_wait_leave_nothing() {
    let mut scene = Scene::start();
    for _ in 0..40 {
        let deaf = transport::connect_socket(&scene.pillion.socket, WATCHDOG).unwrap();
        transport::send_record(&deaf, &handshake::encode_record(&scheduler(4)), &[]).unwrap();
        drop(deaf);
        let gone = transport::connect_socket(&scene.pillion.socket, WATCHDOG).unwrap();
        drop(gone);
    }
    let deaf: Vec<OwnedFd> = (0..100)
        .map(|_| {
            let deaf = transport::connect_socket(&scene.pillion.socket, WATCHDOG).unwrap();
            transport::send_record(&deaf, &handshake::encode_record(&scheduler(5)), &[]).unwrap();
            deaf
        })
        .collect();
    watch("sessions of the deaf", || (scene.pillion.metrics()["sessions"] > 2).then_some(()));
    drop(deaf);
    scene.assert_unharmed("callers that do not read");
}

/// Without free descriptors, callers are refused or wait, connected engines are served, and later callers are
/// served too.
#[test]
fn without_descriptors_nobody_who_is_connected_notices() {
    let mut scene = Scene::start();
    let held = scene.pillion.descriptors() as u64 + 8;
    set_limit(&scene.pillion, held);
    let kv = Kv::new();
    let fds: Vec<_> = kv.fds.iter().map(AsFd::as_fd).cycle().take(64).collect();
    let record = handshake::encode_record(&worker(&kv, "caller"));
    let callers: Vec<OwnedFd> = (0..24)
        .map(|_| {
            let caller = transport::connect_socket(&scene.pillion.socket, WATCHDOG).unwrap();
            transport::send_record(&caller, &record, &fds).unwrap();
            caller
        })
        .collect();
    for _ in 0..3 {
        scene.assert_served();
    }
    let text = reason(callers.first().map(answer), "a caller beyond the limit");
    assert!(!text.is_empty());
    drop(callers);
    set_limit(&scene.pillion, 20_000);
    drop(scene.villain());
    scene.assert_unharmed("no descriptors left");
}

fn answer(socket: &OwnedFd) -> Reply {
    let (record, _) = transport::receive_record(socket).unwrap();
    handshake::decode_reply(&record).unwrap()
}

fn set_limit(pillion: &Pillion, files: u64) {
    let pid = rustix::process::Pid::from_raw(pillion.pid().as_raw());
    let limit = rustix::process::Rlimit { current: Some(files), maximum: Some(20_000) };
    rustix::process::prlimit(pid, rustix::process::Resource::Nofile, limit).unwrap();
}

// === users ===

const STRANGER: u32 = 54_321;
const GROUP: u32 = 54_322;
const TEST: &str = "admission::callers_are_told_apart_by_their_credentials";

/// The part of the test that runs as another user: prints the answer.
fn call_as_ordered() -> bool {
    let Some(socket) = std::env::var_os("PILLION_TEST_CALL") else { return false };
    let outcome = match transport::connect_socket(Path::new(&socket), WATCHDOG) {
        Err(error) => format!("no connection: {error}"),
        Ok(_) => format!("{:?}", greet(Path::new(&socket), &scheduler(6), &[]).1),
    };
    eprintln!("answer: {outcome}");
    true
}

/// Runs this test's binary, readable by all, as another user.
fn call(socket: &Path, options: &[&str]) -> String {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let binary = folder.path().join("caller");
    std::fs::copy(std::env::current_exe().unwrap(), &binary).unwrap();
    for path in [folder.path(), &binary] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let output = Command::new("setpriv")
        .args(options)
        .arg(&binary)
        .args(["--exact", TEST, "--nocapture"])
        .env("PILLION_TEST_CALL", socket)
        .output()
        .expect("setpriv of util-linux");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    text.lines().find_map(|line| line.strip_prefix("answer: ")).unwrap_or_else(|| panic!("{text}")).to_owned()
}

#[test]
fn callers_are_told_apart_by_their_credentials() {
    if call_as_ordered() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: another user can be had by root alone; run this test as root");
        return;
    }
    let group = GROUP.to_string();
    let mut scene = Scene::start_with(&["--socket-group", &group]);
    let socket = scene.pillion.socket.clone();
    let (uid, gid) = (format!("--reuid={STRANGER}"), format!("--regid={STRANGER}"));
    let member = format!("--regid={GROUP}");
    let found = std::fs::metadata(&socket).unwrap();
    assert_eq!((found.permissions().mode() & 0o7777, found.gid()), (0o660, GROUP));
    std::fs::set_permissions(socket.parent().unwrap(), std::fs::Permissions::from_mode(0o755)).unwrap();

    let kept_out = call(&socket, &[&uid, &gid, "--clear-groups"]);
    assert!(kept_out.contains("no connection") && kept_out.contains("Permission denied"), "{kept_out}");
    let served = call(&socket, &[&uid, &member, "--clear-groups"]);
    assert!(served.starts_with("Welcome"), "by its process's group: {served}");
    // The mode permits this user; but a socket's credentials have no supplementary groups, and no group lists
    // this user.
    let supplementary = call(&socket, &[&uid, &gid, &format!("--groups={GROUP}")]);
    assert!(supplementary.starts_with("Refused"), "by a supplementary group: {supplementary}");

    // A user permitted by the mode must still pass the check of its credentials.
    std::fs::set_permissions(&socket, std::fs::Permissions::from_mode(0o666)).unwrap();
    let refused = call(&socket, &[&uid, &gid, "--clear-groups"]);
    assert!(refused.starts_with("Refused") && refused.contains("--socket-group"), "{refused}");
    assert!(refused.contains(&STRANGER.to_string()), "{refused}");
    // Each call connects twice, and a caller may hang up before it is refused.
    assert!(scene.pillion.refused("user") >= 2);
    scene.assert_unharmed("strangers");

    let alone = Pillion::start(&[]);
    assert_eq!(std::fs::metadata(&alone.socket).unwrap().permissions().mode() & 0o7777, 0o660);
    std::fs::set_permissions(alone.socket.parent().unwrap(), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(&alone.socket, std::fs::Permissions::from_mode(0o666)).unwrap();
    let refused = call(&alone.socket, &[&uid, &member, "--clear-groups"]);
    assert!(refused.starts_with("Refused"), "no group was named: {refused}");
}

/// An engine that copies for itself may send descriptors without write access.
#[test]
fn an_engine_that_copies_for_itself_may_show_read_only_memory() {
    let mut scene = Scene::start();
    let kv = Kv::new();
    let fds = kv.fds.each_ref().map(|fd| {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(fd));
        rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).unwrap()
    });
    let hello = hello("reader", 1, kv.worker_of("reader", 0, 1, Copier::Engine));
    drop(Session::open(&scene.pillion.socket, &hello, &fds.each_ref()));
    scene.assert_unharmed("a reader");
}
