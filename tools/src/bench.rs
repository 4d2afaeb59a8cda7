//! `pillion bench`: the limits of this machine, and how near Pillion comes to them.
//!
//! A limit and Pillion's own figure are measured in turns, with the same sizes and concurrency.

pub mod copy;
pub mod disk;
pub mod node;
pub mod peer;
pub mod ring;
pub mod tier;

use std::fmt::Write as _;
use std::sync::Arc;

use clap::{Args, Subcommand};
use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use serde_json::{Map, Value, json};
use shm_protocol::random::Random;
use shm_protocol::region::{Access, Region};
use thiserror::Error;

/// Count of measurements of each figure; the median counts.
const ROUNDS: usize = 3;
const GIB: f64 = (1u64 << 30) as f64;

/// Options of `pillion bench`.
#[derive(Args, Clone, Debug)]
pub struct BenchOptions {
    /// Print one line of JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub what: What,
}

/// The subject of a benchmark, with its own options.
#[derive(Clone, Debug, Subcommand)]
pub enum What {
    /// Measure a disk: direct I/O alone, and blocks through the SSD tier. Nothing stays on the disk.
    Disk(disk::DiskOptions),
    /// Measure copies in memory: memcpy, and blocks between an engine's memory and the pool.
    Copy(copy::CopyOptions),
    /// Measure the round trip of a query to a running sidecar.
    Ring(ring::RingOptions),
    /// Measure blocks from a peer over TCP: plain sockets, and the mesh.
    Peer(peer::PeerOptions),
}

/// A benchmark that did not end well.
#[derive(Debug, Error)]
pub enum BenchError {
    #[error(transparent)]
    Tier(#[from] tiers::TierError),
    #[error("--{option} {value}: {problem}")]
    Option { option: &'static str, value: String, problem: String },
    #[error("cannot allocate {bytes} bytes of memory: {source}: lower --size")]
    Memory { bytes: u64, source: Errno },
    #[error("{what}: {problem}")]
    Failed { what: &'static str, problem: String },
}

/// Figures by name, in the order of the output.
#[derive(Debug)]
pub struct BenchFigures(Vec<(String, Value)>);

// === impl BenchError ===

impl BenchError {
    fn option(option: &'static str, value: impl ToString, problem: &str) -> Self {
        Self::Option { option, value: value.to_string(), problem: problem.into() }
    }

    fn failed(what: &'static str, problem: impl Into<String>) -> Self {
        Self::Failed { what, problem: problem.into() }
    }
}

// === impl BenchFigures ===

impl BenchFigures {
    fn new(bench: &str) -> Self {
        Self(vec![("bench".into(), bench.into())])
    }

    fn add_figure(&mut self, name: impl Into<String>, value: impl Into<Value>) {
        self.0.push((name.into(), value.into()));
    }

    /// Adds the medians of a limit and of Pillion's own figure, in GiB/s, and the ratio of the second to the
    /// first.
    fn compare(&mut self, name: &str, limit: (&str, &mut [f64]), own: (&str, &mut [f64])) {
        let (most, reached) = (median(limit.1), median(own.1));
        self.add_figure(format!("{}_{name}_gib_s", limit.0), rounded(most));
        self.add_figure(format!("{}_{name}_gib_s", own.0), rounded(reached));
        self.add_figure(format!("{name}_ratio"), rounded(reached / most));
    }

    fn line(self) -> String {
        format!("{}\n", Value::Object(self.0.into_iter().collect::<Map<_, _>>()))
    }

    fn table(self) -> String {
        let width = self.0.iter().map(|(name, _)| name.len()).max().unwrap_or_default();
        self.0.iter().fold(String::new(), |mut text, (name, value)| {
            let shown = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            let _ = writeln!(text, "{name:width$}  {shown}");
            text
        })
    }
}

fn rounded(value: f64) -> Value {
    json!((value * 1e3).round() / 1e3)
}

/// The quantile `part` of the values.
fn part(values: &mut [f64], part: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let last = values.len().saturating_sub(1) as f64;
    values.get((last * part) as usize).copied().unwrap_or_default()
}

fn median(values: &mut [f64]) -> f64 {
    part(values, 0.5)
}

/// Memory like the pool's, with other bytes in each word.
fn memory(bytes: u64) -> Result<(std::os::fd::OwnedFd, Arc<Region>), BenchError> {
    let mapped = || {
        let fd = rustix::fs::memfd_create("pillion-bench", MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&fd, bytes)?;
        let region = Region::map(std::os::fd::AsFd::as_fd(&fd), bytes as usize, Access::ReadWrite)?;
        Ok((fd, Arc::new(region)))
    };
    let (fd, region) = mapped().map_err(|source| BenchError::Memory { bytes, source })?;
    let mut random = Random(1);
    for word in region.words64(0, (bytes / 8) as usize) {
        word.store(random.next(), std::sync::atomic::Ordering::Relaxed);
    }
    Ok((fd, region))
}

/// Runs a benchmark, and returns the text for its end. `say` prints text before that.
pub fn run_bench(options: &BenchOptions, say: impl Fn(&str)) -> Result<String, BenchError> {
    let figures = match &options.what {
        What::Disk(options) => disk::measure_disk(options)?,
        What::Copy(options) => copy::measure_copy(options)?,
        What::Ring(options) => ring::measure_ring(options)?,
        What::Peer(options) => peer::measure_peer(options, say)?,
    };
    Ok(if options.json { figures.line() } else { figures.table() })
}

/// The numbers of a range, each once, in the same random order every time.
pub fn shuffle_numbers(numbers: std::ops::Range<u64>) -> Vec<u64> {
    let (mut random, mut order): (_, Vec<u64>) = (Random(2), numbers.collect());
    for at in (1..order.len()).rev() {
        order.swap(at, (random.next() % (at as u64 + 1)) as usize);
    }
    order
}
