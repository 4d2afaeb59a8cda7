//! Devices that fail as real ones do: cut, overwritten, full, gone. Never wrong bytes, always a miss and a
//! count.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::FallocateFlags;
use rustix::process::{Resource, Rlimit};
use rustix::thread::CapabilitySet;
use tiers::ssd::{Backend, FaultKind};

use crate::rig::{Folder, LOG_BYTES, Plan, Rig};
use shm_protocol::random::Random;

/// Blocks that fill two of the four segments of the smallest log, and their bytes.
const BLOCKS: u64 = 170;
const BLOCK_BYTES: u64 = 40_000;

/// A log of so many blocks.
fn filled(plan: &Plan) -> Rig {
    let mut rig = Rig::new(plan);
    rig.recover();
    assert!((0..BLOCKS).all(|number| rig.write(number, BLOCK_BYTES)));
    rig.settle();
    rig
}

fn served(rig: &mut Rig) -> Vec<u64> {
    (0..BLOCKS).filter(|number| rig.read(*number)).collect()
}

#[test]
fn flipped_bytes_are_misses() {
    let folder = Folder::new("flipped");
    let plan = Plan::new(&folder.file(), LOG_BYTES);
    let mut random = Random(11);
    let file = || File::options().read(true).write(true).open(folder.file()).unwrap();
    let flip = |file: &File, at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1 << (at % 8)], at).unwrap();
    };
    let mut rig = filled(&plan);
    for _ in 0..40 {
        flip(&file(), (1 << 20) + random.next() % (8 << 20));
    }
    let kept = served(&mut rig).len() as u64;
    let corrupt = rig.faults(FaultKind::Corrupt);
    assert_eq!(kept + corrupt, BLOCKS);
    assert!(corrupt > 10, "{corrupt}");
    assert!(!rig.stats().devices[0].down, "a damaged block says nothing of the device");
    drop(rig);
    // Now headers, footers and blocks at rest.
    for _ in 0..5 {
        for _ in 0..40 {
            flip(&file(), (1 << 20) + random.next() % (16 << 20));
        }
        let mut rig = Rig::new(&plan);
        rig.recover();
        let found = rig.stats().blocks;
        let kept = served(&mut rig).len() as u64;
        assert_eq!(kept + rig.faults(FaultKind::Corrupt), found);
    }
}

#[test]
fn a_log_that_is_cut_while_it_serves_ends_transfers_early() {
    let folder = Folder::new("cut-live");
    let plan = Plan::new(&folder.file(), LOG_BYTES);
    let mut rig = filled(&plan);
    File::options().write(true).open(folder.file()).unwrap().set_len((1 << 20) + (2 << 20) + 100).unwrap();
    let mut kept = 0;
    for number in 0..BLOCKS {
        kept += u64::from(rig.read(number));
        if rig.stats().devices[0].down {
            break;
        }
    }
    assert!(rig.faults(FaultKind::Short) >= 4, "{:?}", rig.stats());
    assert!((40..55).contains(&kept), "what lies before the cut: {kept}");
    assert!(!rig.keeps(0), "the breaker is open");
}

#[test]
fn a_log_that_was_cut_at_any_byte_serves_what_lies_before() {
    let folder = Folder::new("cut");
    let plan = Plan::new(&folder.file(), LOG_BYTES);
    drop(filled(&plan));
    let whole = fs::read(folder.file()).unwrap();
    let mut random = Random(5);
    let cuts = [0, 1, 7, 8, 100, 4095, 4096, 4097, 1 << 20, (5 << 20) - 1, 5 << 20, LOG_BYTES - 1];
    let cuts = cuts.into_iter().chain((0..12).map(|_| random.next() % LOG_BYTES));
    for cut in cuts {
        fs::write(folder.file(), &whole[..cut as usize]).unwrap();
        let mut rig = Rig::new(&plan);
        rig.recover();
        let before = (cut.saturating_sub(1 << 20) * BLOCKS / (8 << 20)).min(BLOCKS);
        let kept = served(&mut rig).len() as u64;
        assert!(kept * 10 >= before * 8 && (cut >= 4096 || kept == 0), "cut at {cut}: {kept} of {before}");
        assert!(rig.write(1000, BLOCK_BYTES) && rig.read(1000));
    }
}

#[test]
fn without_room_to_lock_memory_transfers_go_without_registered_buffers() {
    let folder = Folder::new("memlock");
    let plan = Plan { backend: Backend::IoUring, ..Plan::new(&folder.file(), LOG_BYTES) };
    // Capabilities of this thread alone, and of threads it starts; the limit of the process is lowered for
    // all, and none needs it.
    let mut capabilities = rustix::thread::capabilities(None).unwrap();
    capabilities.effective.remove(CapabilitySet::IPC_LOCK);
    rustix::thread::set_capabilities(None, capabilities).unwrap();
    let limit = rustix::process::getrlimit(Resource::Memlock);
    rustix::process::setrlimit(Resource::Memlock, Rlimit { current: Some(1 << 20), ..limit }).unwrap();
    let mut rig = filled(&plan);
    assert_eq!(served(&mut rig).len() as u64, BLOCKS);
    let notes: Vec<_> = rig.notes.iter().filter(|note| note.contains("registered buffers")).collect();
    assert!(notes.len() == 1 && notes[0].contains("ulimit -l"), "{:?}", rig.notes);
}

// === a limit on file sizes: EFBIG ===

/// The name of this module in tests' names.
fn module() -> &'static str {
    module_path!().split_once("::").expect("a module of the tests' crate").1
}

#[test]
fn a_file_that_may_not_grow_drops_writes() {
    let folder = Folder::new("limit");
    drop(filled(&Plan::new(&folder.file(), LOG_BYTES)));
    // This process may not lift the signal sent with the errno, or lower the limit for its neighbours.
    let status = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 18432; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", &format!("{}::child_under_a_limit", module()), "--ignored"])
        .env("PILLION_TEST_LOG", folder.file())
        .output()
        .unwrap();
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    assert!(String::from_utf8_lossy(&status.stdout).contains("1 passed"));
}

#[test]
#[ignore = "run by a_file_that_may_not_grow_drops_writes"]
fn child_under_a_limit() {
    let log = PathBuf::from(std::env::var_os("PILLION_TEST_LOG").expect("given"));
    let mut rig = Rig::new(&Plan::new(&log, LOG_BYTES));
    rig.recover();
    // The free segments lie beyond the limit of 9 MiB; blocks already there are read as before.
    for number in 1000..1020 {
        assert!(rig.begin_write(number, BLOCK_BYTES).is_err());
        rig.settle();
    }
    assert!(rig.faults(FaultKind::NoSpace) >= 1, "{:?}", rig.stats());
    rig.ahead_ms += 5_000;
    rig.wait("the check", |rig| !rig.stats().devices[0].down);
    assert_eq!(served(&mut rig).len() as u64, BLOCKS);
}

// === what needs to mount and to make block devices ===

/// A resource set up by root, undone at the end.
struct Undo(Vec<String>);

impl Drop for Undo {
    fn drop(&mut self) {
        let _ = Command::new(&self.0[0]).args(&self.0[1..]).status();
    }
}

fn sh(words: &[&str]) -> Option<String> {
    let output = Command::new(words[0]).args(&words[1..]).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Prints why a test is skipped here.
fn skipped(why: &str) {
    eprintln!("skipped: {why}; run it as root");
}

fn mount(at: &Path, bytes: u64) -> Option<Undo> {
    fs::create_dir(at).unwrap();
    let image = at.with_extension("image");
    File::create(&image).unwrap().set_len(bytes).unwrap();
    let (image, at) = (image.to_str().unwrap(), at.to_str().unwrap());
    sh(&["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", image])?;
    sh(&["mount", "-o", "loop", image, at])?;
    Some(Undo(["umount", "-l", at].map(str::to_owned).to_vec()))
}

fn loop_device(file: &Path) -> Option<(String, Undo)> {
    let device = sh(&["losetup", "--find", "--show", "--direct-io=on", file.to_str().unwrap()])
        .or_else(|| sh(&["losetup", "--find", "--show", file.to_str().unwrap()]))?;
    let undo = Undo(["losetup", "--detach", &device].map(str::to_owned).to_vec());
    Some((device, undo))
}

#[test]
fn a_full_file_system_drops_writes_and_reads_on() {
    let folder = Folder::new("full");
    let Some(_mounted) = mount(&folder.0.join("m"), LOG_BYTES + (12 << 20)) else {
        return skipped("cannot mount an ext4");
    };
    let log = folder.0.join("m/log");
    let mut rig = filled(&Plan::new(&log, LOG_BYTES));
    // The last segments lose their room to another file: there was enough when the log was opened.
    let file = File::options().write(true).open(&log).unwrap();
    let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&file, hole, 10 << 20, LOG_BYTES - (10 << 20)).unwrap();
    let other = File::create(folder.0.join("m/other")).unwrap();
    let mut at = 0;
    while other.write_at(&[1; 65536], at).is_ok_and(|written| written > 0) {
        at += 65536;
    }
    let mut dropped = 0;
    for number in 1000..1100 {
        if rig.begin_write(number, BLOCK_BYTES).is_ok() {
            rig.settle();
        }
        dropped += u64::from(!rig.keeps(number));
    }
    assert!(dropped > 0 && rig.faults(FaultKind::NoSpace) >= 4, "{:?}", rig.stats());
    assert!(rig.stats().devices[0].trips_total >= 1);
    drop(other);
    fs::remove_file(folder.0.join("m/other")).unwrap();
    rig.ahead_ms += 60_000;
    rig.wait("the device's return", |rig| !rig.stats().devices[0].down);
    assert!(!served(&mut rig).is_empty());
    assert!((2000..2050).all(|number| rig.write(number, BLOCK_BYTES) && rig.read(number)));
}

#[test]
fn a_block_device_is_a_log_and_its_failure_a_miss() {
    let folder = Folder::new("block");
    let backing = folder.0.join("disk");
    File::create(&backing).unwrap().set_len(LOG_BYTES).unwrap();
    let Some((device, _attached)) = loop_device(&backing) else {
        return skipped("cannot make a loop device");
    };
    let text = tiers::ssd::Opened::open(Path::new(&device), LOG_BYTES + 4096, tiers::ssd::Missing::Refuse)
        .unwrap_err()
        .to_string();
    assert!(text.contains(&format!("has only {LOG_BYTES} bytes")), "{text}");
    let plan = Plan::new(Path::new(&device), LOG_BYTES);
    drop(filled(&plan));
    let mut rig = Rig::new(&plan);
    rig.recover();
    assert_eq!(served(&mut rig).len() as u64, BLOCKS);
    // The disk below loses all its blocks, so each read fails: EIO.
    File::options().write(true).open(&backing).unwrap().set_len(0).unwrap();
    for number in 0..BLOCKS {
        assert!(!rig.read(number));
    }
    assert!(rig.faults(FaultKind::Io) >= 4 && rig.stats().devices[0].down, "{:?}", rig.stats());
    assert_eq!(rig.begin_write(1000, BLOCK_BYTES), Err(tiers::ssd::Refused::Down));
}
