//! The SSD tier on one device: blocks written and read at a depth, and what is found again at start.
//!
//! `ssd PATH BYTES COMMAND...`, with commands `write:BLOCK_BYTES:COUNT:DEPTH:FIRST` for blocks FIRST and following, `read:...`
//! for the same in random order, written in this life of the log or an earlier one, and `ask`, which probes for
//! keys. Every read is verified by the tier. The last line is JSON. benches/ssd.py and benches/recover.py run it.

#![expect(clippy::print_stdout, reason = "a bench reports")]
#![expect(clippy::disallowed_methods, reason = "a bench reads the clock")]

mod random;

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::time::ClockId;
use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::{SEGMENT_ALIGN, SlotRef};
use shm_protocol::region::{Access, Region};
use tiers::ssd::{Backend, Config, Device, Ended, Log, Missing, Opened, Refused, Up};

use crate::random::Random;

const NAMESPACE: NamespaceDigest = NamespaceDigest([7; 16]);
const POOL_BYTES: u64 = 256 << 20;
const GIB: f64 = (1u64 << 30) as f64;

/// What is written or read, and how many at a time.
#[derive(Copy, Clone)]
struct Load {
    block_bytes: u64,
    count: u64,
    depth: u64,
}

/// The tier, and a clock.
struct Tier {
    log: Log,
    device: Device,
    pool: Arc<Region>,
    ups: Receiver<Up>,
    free: Vec<SlotRef>,
    began: Instant,
    /// When each slot's job began.
    since: HashMap<u64, Instant>,
    micros: Vec<f64>,
}

fn key(number: u64) -> BlockKey {
    let mut random = Random(number);
    let words = [number, random.next(), random.next(), random.next()];
    BlockKey { namespace: 0, group: 0, hash: BlockHash::from_words(words) }
}

/// What PILLION_SSD_IO names, else what the kernel allows.
fn wanted() -> Option<Backend> {
    let named = std::env::var("PILLION_SSD_IO").ok()?;
    Backend::ALL.into_iter().find(|backend| backend.name() == named)
}

fn cpu_s() -> f64 {
    let time = rustix::time::clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn part(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part) as usize]
}

// === impl Tier ===

impl Tier {
    fn start(path: &Path, bytes: u64) -> Self {
        let began = Instant::now();
        let fd = rustix::fs::memfd_create("bench", MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&fd, SEGMENT_ALIGN + POOL_BYTES).expect("memory");
        let len = (SEGMENT_ALIGN + POOL_BYTES) as usize;
        let pool = Arc::new(Region::map(fd.as_fd(), len, Access::ReadWrite).expect("map"));
        let opened = Opened::open(path, bytes, Missing::Create).unwrap_or_else(|error| panic!("{error}"));
        let devices = vec![opened.geometry()];
        let log = Log::new(Config { devices, write_bytes_max: 256 << 20, late_ms: 60_000 });
        let (sender, ups) = channel();
        let device = Device::start(opened, 0, Arc::clone(&pool), wanted(), move |up| drop(sender.send(up)));
        let device = device.unwrap_or_else(|error| panic!("{error}"));
        let mut tier = Self {
            log,
            device,
            pool,
            ups,
            free: Vec::new(),
            began,
            since: HashMap::new(),
            micros: Vec::new(),
        };
        while tier.log.stats().devices[0].recovering {
            tier.pump();
        }
        tier
    }

    fn fill_pool(&self) {
        let mut random = Random(1);
        for word in self.pool.words64(SEGMENT_ALIGN as usize, (POOL_BYTES / 8) as usize) {
            word.store(random.next(), Ordering::Relaxed);
        }
    }

    fn now_ms(&self) -> u64 {
        self.began.elapsed().as_millis() as u64
    }

    fn post(&mut self) {
        self.device.post(self.log.drain_jobs());
    }

    fn pump(&mut self) {
        let Ok(up) = self.ups.recv_timeout(Duration::from_millis(50)) else {
            self.log.tick(self.now_ms(), &mut Vec::new());
            return self.post();
        };
        self.take(up);
        while let Ok(up) = self.ups.try_recv() {
            self.take(up);
        }
        self.post();
    }

    fn take(&mut self, up: Up) {
        match up {
            Up::Note(note) => eprintln!("{note}"),
            Up::Recovered(found) => self.log.recovered(&found, |_, _| Some(0)),
            Up::Done(done) => match self.log.done(self.now_ms(), done) {
                Some(Ended::Written { slot, ok } | Ended::Read { slot, ok, .. }) => {
                    assert!(ok, "{:?}: {:?}", done.result, self.log.stats());
                    let since = self.since.remove(&slot.offset).expect("begun");
                    self.micros.push(since.elapsed().as_nanos() as f64 / 1000.0);
                    self.free.push(slot);
                }
                None => {}
            },
        }
    }

    /// Runs a load to its end; its figures as JSON members.
    fn run(
        &mut self,
        name: &str,
        load: Load,
        mut begin: impl FnMut(&mut Log, u64, SlotRef) -> bool,
    ) -> String {
        let slot = |at| SlotRef { offset: SEGMENT_ALIGN + at * load.block_bytes, generation: 0 };
        self.free = (0..load.depth).map(slot).collect();
        self.micros.clear();
        let (start, cpu) = (Instant::now(), cpu_s());
        let mut next = 0;
        while self.micros.len() < load.count as usize {
            while next < load.count
                && let Some(slot) = self.free.pop()
            {
                if !begin(&mut self.log, next, slot) {
                    self.free.push(slot);
                    break;
                }
                self.since.insert(slot.offset, Instant::now());
                next += 1;
            }
            self.post();
            self.pump();
        }
        let (elapsed, cpu) = (start.elapsed().as_secs_f64(), cpu_s() - cpu);
        let gib = (load.block_bytes * load.count) as f64 / GIB;
        self.micros.sort_by(f64::total_cmp);
        let (p50, p99) = (part(&self.micros, 0.5), part(&self.micros, 0.99));
        format!(
            "\"{name}_gib_s\":{:.4},\"{name}_p50_us\":{p50:.0},\"{name}_p99_us\":{p99:.0},\"{name}_cpu_s_per_gib\":{:.4}",
            gib / elapsed,
            cpu / gib
        )
    }

    fn write(&mut self, load: Load, first: u64) -> String {
        self.run("write", load, |log, number, slot| {
            match log.write(key(first + number), NAMESPACE, load.block_bytes, slot) {
                Ok(_) => true,
                Err(Refused::Busy) => false,
                Err(refused) => panic!("{refused}"),
            }
        })
    }

    fn read(&mut self, load: Load, first: u64) -> String {
        let mut order: Vec<u64> = (first..first + load.count).collect();
        let mut random = Random(2);
        for at in (1..order.len()).rev() {
            order.swap(at, (random.next() % (at as u64 + 1)) as usize);
        }
        self.run("read", load, |log, number, slot| {
            assert!(log.read(&key(order[number as usize]), slot).is_some(), "written, and not reclaimed");
            true
        })
    }
}

fn rss_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("statm");
    let pages: u64 = statm.split_whitespace().nth(1).expect("resident").parse().expect("a number");
    pages * 4096
}

/// Microseconds of a probe over 1,024 keys that are there, of those that `key` numbers from 0 on, and that are not; medians.
fn ask(log: &mut Log, blocks: u64) -> String {
    let mut random = Random(3);
    let mut probe = |base: u64, range: u64, hits: usize| {
        let mut times: Vec<f64> = (0..200)
            .map(|_| {
                let hashes: Vec<BlockHash> =
                    (0..1024).map(|_| key(base + random.next() % range.max(1)).hash).collect();
                let start = Instant::now();
                assert_eq!(log.probe(0, 0, &hashes), hits);
                start.elapsed().as_nanos() as f64 / 1000.0
            })
            .collect();
        times.sort_by(f64::total_cmp);
        part(&times, 0.5)
    };
    let (there, absent) = (probe(0, blocks, 1024), probe(1 << 60, 1 << 60, 0));
    format!("\"probe_1024_us\":{there:.1},\"probe_1024_absent_us\":{absent:.1}")
}

fn parse(text: &str) -> (&str, Load, u64) {
    let (command, numbers) = text.split_once(':').expect("COMMAND:BLOCK_BYTES:COUNT:DEPTH:FIRST");
    let numbers: Vec<u64> = numbers.split(':').map(|number| number.parse().expect("a number")).collect();
    let [block_bytes, count, depth, first] = numbers[..] else { panic!("{text}: four numbers") };
    assert!(block_bytes * depth <= POOL_BYTES, "the pool has {POOL_BYTES} bytes");
    (command, Load { block_bytes, count, depth }, first)
}

fn main() {
    let began = Instant::now();
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    let [path, bytes, commands @ ..] = &words[..] else {
        println!("{{}}");
        return eprintln!("run by benches/ssd.py and benches/recover.py");
    };
    let before = rss_bytes();
    let mut tier = Tier::start(Path::new(path), bytes.parse().expect("bytes"));
    let (recover_s, blocks) = (began.elapsed().as_secs_f64(), tier.log.stats().blocks);
    let bytes_per_key = (rss_bytes() - before) as f64 / blocks.max(1) as f64;
    let mut figures = vec![format!(
        "\"recover_s\":{recover_s:.4},\"blocks\":{blocks},\"bytes_per_key\":{bytes_per_key:.1}"
    )];
    if commands.iter().any(|command| command.starts_with("write") || command.starts_with("read")) {
        tier.fill_pool();
    }
    for command in commands {
        if command == "ask" {
            figures.push(ask(&mut tier.log, blocks));
            continue;
        }
        let (command, load, first) = parse(command);
        figures.push(match command {
            "write" => tier.write(load, first),
            "read" => tier.read(load, first),
            _ => panic!("{command}: write or read"),
        });
    }
    println!("{{{}}}", figures.join(","));
}
