//! The SSD tier under a real engine: a real sidecar over real files, every served byte compared.

use std::path::{Path, PathBuf};

use crate::client::engine::Engine;
use crate::client::sidecar::Sidecar;
use crate::client::{BLOCK_BYTES, corrupt, watch};
use shm_protocol::key::BlockHash;

const DRAM: &str = "16MiB";
/// Saves of 100 blocks each: twice the size of DRAM.
const SAVES: usize = 22;
const LOG_BYTES: &str = "128MiB";
/// Twice the size of DRAM, by the sizes of the blocks.
const _: () = assert!(SAVES as u64 * 100 * BLOCK_BYTES > 31 << 20);

/// A folder for the socket and one for each disk.
struct Place {
    folder: tempfile::TempDir,
    io: &'static str,
}

impl Place {
    fn new() -> Self {
        // Not in /tmp, maybe a tmpfs without direct I/O. The folder may be on the root disk, so its disks are
        // given with :create.
        Self { folder: tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap(), io: "auto" }
    }

    fn disk(&self, name: &str) -> PathBuf {
        let folder = self.folder.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn start(&self, disks: &[&str]) -> Sidecar {
        let sidecar = self.start_with(disks, &[]);
        sidecar.wait_started();
        sidecar
    }

    fn start_with(&self, disks: &[&str], more: &[&dyn AsRef<std::ffi::OsStr>]) -> Sidecar {
        let disks: Vec<String> = disks
            .iter()
            .map(|name| format!("--ssd={}:{LOG_BYTES}:create", self.disk(name).display()))
            .collect();
        let mut arguments: Vec<&dyn AsRef<std::ffi::OsStr>> = vec![&"--dram", &DRAM, &"--ssd-io", &self.io];
        arguments.extend(disks.iter().map(|disk| disk as &dyn AsRef<std::ffi::OsStr>));
        arguments.extend(more);
        Sidecar::start(self.folder.path(), &arguments)
    }

    fn log_file(&self, name: &str) -> PathBuf {
        self.disk(name).join("pillion.log")
    }

    fn log_text(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap()
    }
}

/// Saves more than DRAM has room for, each save after the one before is on the disks. Returns the keys.
fn fill(sidecar: &Sidecar, engine: &mut Engine) -> Vec<BlockHash> {
    let (mut keys, mut stamp) = (Vec::new(), 0);
    for _ in 0..SAVES {
        keys.extend(engine.save(&mut stamp));
        sidecar.wait_metric("pillion_ssd_written_blocks_total", |written| written >= keys.len() as u64);
    }
    assert!(sidecar.metric("pillion_blocks") < keys.len() as u64 * 2 / 3, "DRAM holds but a part");
    keys
}

#[test]
fn what_dram_gave_up_is_served_from_disks_and_found_again_after_a_kill() {
    for io in ["io_uring", "threads"] {
        serve_from_disks(&Place { io, ..Place::new() });
    }
}

fn serve_from_disks(place: &Place) {
    let sidecar = place.start(&["a", "b"]);
    assert!(sidecar.shows(&format!("pillion_ssd_backend{{backend=\"{}\"}} 2", place.io)));
    let mut engine = Engine::connect(&sidecar);
    let keys = fill(&sidecar, &mut engine);
    assert_eq!(engine.served(&keys), (keys.clone(), 0));
    assert!(sidecar.metric("pillion_ssd_promoted_blocks_total") > keys.len() as u64 / 3);
    assert_eq!(sidecar.metric("pillion_ssd_faults_total"), 0);
    assert!(sidecar.page("/metrics").unwrap().contains("pillion_ssd_blocks{device="));
    sidecar.kill();

    // Another life: nothing is in DRAM, nothing is computed.
    let sidecar = place.start(&["a", "b"]);
    assert_eq!(sidecar.metric("pillion_blocks"), 0);
    assert_eq!(
        sidecar.metric("pillion_ssd_recovered_blocks_total"),
        keys.len() as u64,
        "{}",
        place.log_text()
    );
    let mut engine = Engine::connect(&sidecar);
    assert_eq!(engine.served(&keys), (keys.clone(), 0));
    let more = engine.save(&mut 1_000_000);
    sidecar.terminate();

    // A third life, after an orderly end with all waiting writes done.
    let sidecar = place.start(&["a", "b"]);
    let keys = [keys, more].concat();
    assert_eq!(Engine::connect(&sidecar).served(&keys), (keys, 0));
}

#[test]
fn what_was_changed_on_the_disk_is_a_miss_and_counted() {
    let place = Place::new();
    let sidecar = place.start(&["a"]);
    let mut engine = Engine::connect(&sidecar);
    let keys = fill(&sidecar, &mut engine);
    corrupt(&place.log_file("a"));
    let in_dram = sidecar.metric("pillion_blocks");
    let (served, wrong) = engine.served(&keys);
    assert_eq!(wrong, 0, "never other bytes");
    assert!(served.len() as u64 <= in_dram, "{} served, {in_dram} in DRAM", served.len());
    let faults = sidecar.page("/metrics").unwrap();
    assert!(faults.contains("kind=\"corrupt\"} ") && !faults.contains("kind=\"corrupt\"} 0"), "{faults}");
    // The engine goes on.
    let more = engine.save(&mut 1_000_000);
    assert_eq!(engine.served(&more), (more.clone(), 0));
    sidecar.terminate();
}

#[test]
fn a_disk_that_fails_is_left_alone_and_the_engine_goes_on() {
    for io in ["io_uring", "threads"] {
        fail_a_disk(&Place { io, ..Place::new() });
    }
}

fn fail_a_disk(place: &Place) {
    let sidecar = place.start(&["a"]);
    let mut engine = Engine::connect(&sidecar);
    let keys = fill(&sidecar, &mut engine);
    // From here on every read ends early.
    std::fs::File::options().write(true).open(place.log_file("a")).unwrap().set_len(0).unwrap();
    let (served, wrong) = engine.served(&keys);
    assert_eq!(wrong, 0);
    assert!(served.len() < keys.len());
    assert!(sidecar.metric("pillion_ssd_faults_total") > 0);
    sidecar.wait_metric("pillion_ssd_trips_total", |trips| trips > 0);
    watch("a word in the log", || place.log_text().contains("a disk fails or hangs").then_some(()));
    let more = engine.save(&mut 1_000_000);
    assert_eq!(engine.served(&more), (more.clone(), 0));
    sidecar.terminate();
}

/// With a pool file the next life adopts the blocks in DRAM too, and no slot of an unfinished read.
#[test]
fn killed_at_any_moment_of_writes_and_reads_nothing_wrong_is_served() {
    let place = Place::new();
    let pool = PathBuf::from(format!("/dev/shm/pillion-test-{}-ssd", std::process::id()));
    let mut stamp = 0;
    let (mut posted, mut reported, mut found) = (Vec::new(), Vec::new(), 0);
    for life in 0..6 {
        let sidecar = place.start_with(&["a"], &[&"--pool-path", &pool]);
        sidecar.wait_started();
        let mut engine = Engine::connect(&sidecar);
        let (served, wrong) = engine.served(&posted);
        assert_eq!(wrong, 0, "life {life}");
        found += served.len();
        for _ in 0..3 {
            reported = engine.post_save(&mut stamp);
            posted.extend_from_slice(&reported);
            engine.scheduler.saved();
        }
        // Reads of the oldest are under way, and so are the last writes.
        engine.post_query(&posted);
        std::thread::sleep(std::time::Duration::from_millis(life));
        sidecar.kill();
    }
    assert!(found > reported.len());
    std::fs::remove_file(pool).unwrap();
}

/// The error of a sidecar that must have all its disks, and does not start.
fn refusal(place: &Place, disks: &[&str]) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pillion"));
    command.args(["serve", "--gpu", "off", "--dram", DRAM, "--http", "127.0.0.1:0", "--ssd-required"]);
    command.args(disks.iter().map(|disk| format!("--ssd={disk}")));
    let output = command.arg("--socket").arg(place.folder.path().join("p.sock")).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_required_disk_that_cannot_be_used_stops_the_start_with_the_remedy() {
    let place = Place::new();
    let text = refusal(&place, &[&format!("{}:1MiB", place.disk("a").display())]);
    assert!(text.contains("the least is"), "{text}");
    let foreign = place.disk("b").join("letters");
    std::fs::write(&foreign, "somebody's".repeat(1000)).unwrap();
    let text = refusal(&place, &[&format!("{}:64MiB", foreign.display())]);
    assert!(text.contains("not a log of Pillion"), "{text}");
    assert_eq!(std::fs::read_to_string(&foreign).unwrap().len(), 10_000, "nothing of others is written over");
    let _holder = place.start(&["c"]);
    let text = refusal(&place, &[&format!("{}:64MiB", place.disk("c").display())]);
    assert!(text.contains("another sidecar"), "{text}");
}

#[test]
fn a_missing_mount_or_memory_is_refused_before_anything_is_written() {
    let place = Place::new();
    let good = format!("{}:64MiB:create", place.disk("a").display());
    let missing = place.folder.path().join("nvme");
    let text = refusal(&place, &[&good, &format!("{}:64MiB", missing.display())]);
    assert!(text.contains("mount the disk") && text.contains("nvme:SIZE:create"), "{text}");
    let text = refusal(&place, &[&good, &format!("{}:64MiB:create", missing.join("pillion").display())]);
    assert!(text.contains("nvme is not a folder"), "{text}");
    let text = refusal(&place, &[&good, "/dev/shm:64MiB"]);
    assert!(text.contains("lies in memory") && text.contains("raise --dram"), "{text}");
    assert!(
        !missing.exists() && !place.log_file("a").exists() && !Path::new("/dev/shm/pillion.log").exists()
    );
    // With :create the file is made; commas part several disks, as in PILLION_SSD.
    let disks = format!("--ssd={}:64MiB:create,{good}", missing.display());
    let sidecar = Sidecar::start(place.folder.path(), &[&"--dram", &DRAM, &"--ssd-required", &disks]);
    sidecar.wait_started();
    assert!(missing.is_file() && place.log_file("a").is_file());
}

#[test]
fn without_a_disk_that_cannot_be_used_the_others_and_memory_serve() {
    let place = Place::new();
    let missing = place.folder.path().join("nvme");
    let disk = format!("--ssd={}:64MiB", missing.display());
    for others in [&[][..], &["a"]] {
        let sidecar = place.start_with(others, &[&disk]);
        sidecar.wait_started();
        let log = place.log_text();
        assert!(
            log.contains("ERROR") && log.contains("mount the disk") && log.contains("--ssd-required"),
            "{log}"
        );
        let page = sidecar.page("/metrics").unwrap();
        assert!(
            sidecar.shows(&format!("pillion_ssd_left_out{{device=\"{}\"}} 1", missing.display())),
            "{page}"
        );
        assert_eq!(page.matches("pillion_ssd_left_out{").count(), 1 + others.len());
        let mut engine = Engine::connect(&sidecar);
        let keys = engine.save(&mut 0);
        assert_eq!(engine.served(&keys), (keys.clone(), 0));
        if !others.is_empty() {
            sidecar.wait_metric("pillion_ssd_written_blocks_total", |written| written >= keys.len() as u64);
        }
        sidecar.terminate();
        assert!(!missing.exists());
    }
}

/// Reads of a killed sidecar's disk still under way may write into the slots of its pool file.
#[test]
fn a_pool_file_is_not_used_while_a_disk_is_another_sidecar_s() {
    let place = Place::new();
    let _holder = place.start(&["a"]);
    let pool = PathBuf::from(format!("/dev/shm/pillion-test-{}-held", std::process::id()));
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_pillion"));
    command
        .args(["serve", "--gpu", "off", "--dram", DRAM, "--http", "127.0.0.1:0", "--pool-path"])
        .arg(&pool);
    command.arg(format!("--ssd={}:{LOG_BYTES}", place.disk("a").display()));
    let output = command.arg("--socket").arg(place.folder.path().join("other.sock")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("is used by another sidecar"), "{text}");
    std::fs::remove_file(pool).unwrap();
}

#[test]
fn without_io_uring_threads_serve_the_disks_and_the_log_says_so_once() {
    let place = Place::new();
    let disks = ["a", "b"].map(|name| format!("--ssd={}:{LOG_BYTES}:create", place.disk(name).display()));
    let sidecar =
        Sidecar::start_without_io_uring(place.folder.path(), &[&"--dram", &DRAM, &disks[0], &disks[1]]);
    sidecar.wait_started();
    assert!(sidecar.shows("pillion_ssd_backend{backend=\"threads\"} 2"));
    let log = place.log_text();
    assert!(log.contains("Operation not permitted") && log.contains("kernel.io_uring_disabled=0"), "{log}");
    assert_eq!(log.matches("the kernel refuses io_uring").count(), 1, "{log}");
    let mut engine = Engine::connect(&sidecar);
    let keys = fill(&sidecar, &mut engine);
    assert_eq!(engine.served(&keys), (keys.clone(), 0));
    sidecar.terminate();
    // A sidecar with `--ssd-io io_uring` does not start.
    let mut command = std::process::Command::new("python3");
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/client/without_io_uring.py"));
    command.args([
        env!("CARGO_BIN_EXE_pillion"),
        "serve",
        "--gpu",
        "off",
        "--dram",
        DRAM,
        "--http",
        "127.0.0.1:0",
    ]);
    command.args(["--ssd-io", "io_uring", &disks[0], "--socket"]).arg(place.folder.path().join("p.sock"));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains("--ssd-io threads"), "{text}");
}
