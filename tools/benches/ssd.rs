//! The SSD tier on one device: blocks written and read at a depth, and blocks found again at start.
//!
//! `ssd PATH BYTES COMMAND...`, with commands `write:BLOCK_BYTES:COUNT:DEPTH:FIRST` for blocks FIRST and
//! following, `read:...` for the same in random order, written in this life of the log or an earlier one, and
//! `ask` for probes of keys. Every read is verified by the tier. The last line is JSON. benches/ssd.py and
//! benches/recover.py run it.

#![expect(clippy::print_stdout, reason = "a bench reports")]
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock and the environment")]

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::fs::MemfdFlags;
use rustix::time::ClockId;
use shm_protocol::key::BlockHash;
use shm_protocol::pool::SEGMENT_ALIGN;
use shm_protocol::random::Random;
use shm_protocol::region::{Access, Region};
use tiers::ssd::{Backend, Missing, OpenedDevice, SegmentLog};
use tools::bench::tier::{BenchTier, TierLoad, Times, make_key};

const POOL_BYTES: u64 = 256 << 20;
const GIB: f64 = (1u64 << 30) as f64;

/// The backend named in PILLION_SSD_IO, or the one allowed by the kernel.
fn wanted() -> Option<Backend> {
    let named = std::env::var("PILLION_SSD_IO").ok()?;
    Backend::ALL.into_iter().find(|backend| backend.name() == named)
}

fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn start(path: &Path, bytes: u64) -> (BenchTier, Arc<Region>) {
    let fd = rustix::fs::memfd_create("bench", MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&fd, SEGMENT_ALIGN + POOL_BYTES).expect("memory");
    let len = (SEGMENT_ALIGN + POOL_BYTES) as usize;
    let pool = Arc::new(Region::map(fd.as_fd(), len, Access::ReadWrite).expect("map"));
    let opened = OpenedDevice::open(path, bytes, Missing::Create).unwrap_or_else(|error| panic!("{error}"));
    let tier = BenchTier::start_device(opened, &pool, wanted()).unwrap_or_else(|error| panic!("{error}"));
    (tier, pool)
}

fn fill(pool: &Region) {
    let mut random = Random(1);
    for word in pool.words64(SEGMENT_ALIGN as usize, (POOL_BYTES / 8) as usize) {
        word.store(random.next(), Ordering::Relaxed);
    }
}

/// The figures of a load, as JSON members.
fn figures(name: &str, load: TierLoad, times: &mut Times, cpu: f64) -> String {
    let gib = (load.block_bytes * load.count) as f64 / GIB;
    let (p50, p99) = (times.part_us(0.5), times.part_us(0.99));
    format!(
        "\"{name}_gib_s\":{:.4},\"{name}_p50_us\":{p50:.0},\"{name}_p99_us\":{p99:.0},\"{name}_cpu_s_per_gib\":{:.4}",
        gib / times.seconds,
        cpu / gib
    )
}

fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: u64 = statm.split_whitespace().nth(1).expect("resident").parse().expect("a number");
    pages * 4096
}

/// Microseconds of a probe over 1,024 kept keys, numbered by `key` from 0 on, and over as many absent ones;
/// medians.
fn ask(log: &mut SegmentLog, blocks: u64) -> String {
    let mut random = Random(3);
    let mut probe = |base: u64, range: u64, hits: usize| {
        let mut times: Vec<f64> = (0..200)
            .map(|_| {
                let hashes: Vec<BlockHash> =
                    (0..1024).map(|_| make_key(base + random.next() % range.max(1)).hash).collect();
                let start = Instant::now();
                assert_eq!(log.probe(0, 0, &hashes), hits);
                start.elapsed().as_nanos() as f64 / 1000.0
            })
            .collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let (there, absent) = (probe(0, blocks, 1024), probe(1 << 60, 1 << 60, 0));
    format!("\"probe_1024_us\":{there:.1},\"probe_1024_absent_us\":{absent:.1}")
}

fn parse(text: &str) -> (&str, TierLoad, u64) {
    let (command, numbers) = text.split_once(':').expect("COMMAND:BLOCK_BYTES:COUNT:DEPTH:FIRST");
    let numbers: Vec<u64> = numbers.split(':').map(|number| number.parse().expect("a number")).collect();
    let [block_bytes, count, depth, first] = numbers[..] else { panic!("{text}: four numbers") };
    assert!(block_bytes * depth <= POOL_BYTES, "the pool has {POOL_BYTES} bytes");
    (command, TierLoad { block_bytes, count, depth }, first)
}

fn main() {
    let began = Instant::now();
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let [path, bytes, commands @ ..] = &words[..] else {
        println!("{{}}");
        return eprintln!("run by benches/ssd.py and benches/recover.py");
    };
    let before = rss_bytes();
    let (mut tier, pool) = start(Path::new(path), bytes.parse().expect("bytes"));
    let (recover_s, blocks) = (began.elapsed().as_secs_f64(), tier.log.log_stats().blocks);
    let bytes_per_key = (rss_bytes() - before) as f64 / blocks.max(1) as f64;
    let mut found = vec![format!(
        "\"recover_s\":{recover_s:.4},\"blocks\":{blocks},\"bytes_per_key\":{bytes_per_key:.1}"
    )];
    if commands.iter().any(|command| command.starts_with("write") || command.starts_with("read")) {
        fill(&pool);
    }
    for command in commands {
        if command == "ask" {
            found.push(ask(&mut tier.log, blocks));
            continue;
        }
        let (command, load, first) = parse(command);
        let cpu = cpu_s();
        let times = match command {
            "write" => tier.write_blocks(load, first),
            "read" => tier.read_blocks(load, first),
            _ => panic!("{command}: write or read"),
        };
        let mut times = times.unwrap_or_else(|error| panic!("{error}"));
        found.push(figures(command, load, &mut times, cpu_s() - cpu));
    }
    println!("{{{}}}", found.join(","));
}
