//! A disk: direct I/O by the means of the SSD tier, and the tier itself, in turns, each on a file of its own.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use shm_protocol::pool::SEGMENT_ALIGN;
use shm_protocol::region::Region;
use tiers::ssd::raw::{IoDirection, Raw};
use tiers::ssd::{Missing, OpenedDevice};

use super::tier::{BenchTier, TierLoad};
use super::{BenchError, BenchFigures, GIB, ROUNDS, memory, shuffle_numbers};
use sidecar::config::{Size, SsdIo};
use sidecar::system::clock::Clock;

/// Blocks at the device at a time: the tier's most for blocks of 2 MiB. Twice as many are posted to the tier,
/// so some wait.
const DEPTH: u64 = 16;
const POSTED: u64 = 2;
const BLOCK_BYTES: std::ops::RangeInclusive<u64> = 4096..=64 << 20;

/// Options of `pillion bench disk`.
#[derive(Args, Clone, Debug)]
pub struct DiskOptions {
    /// Folder on the disk; nine times --size must be free there for some seconds
    #[arg(long, value_name = "DIR")]
    pub path: PathBuf,
    /// Bytes written and read in each measurement
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    pub size: Size,
    /// Bytes of a block
    #[arg(long, value_name = "SIZE", default_value = "2MiB")]
    pub block_size: Size,
    /// How bytes move, as --ssd-io of pillion serve
    #[arg(long, value_name = "auto|io_uring|threads", default_value = "auto")]
    pub ssd_io: SsdIo,
}

/// An open file without a name: no file stays behind, however this process ends.
fn nameless(folder: &Path, name: &str, bytes: u64) -> Result<OpenedDevice, BenchError> {
    let file = folder.join(format!("pillion-bench-{name}-{}", std::process::id()));
    let opened = OpenedDevice::open(&file, bytes, Missing::Create);
    let removed = std::fs::remove_file(&file);
    let opened = opened?;
    removed.map_err(|error| {
        BenchError::failed("a file was not removed", format!("{error}: remove {}", file.display()))
    })?;
    Ok(opened)
}

fn raw_run(
    raw: &mut Raw,
    direction: IoDirection,
    block: u32,
    blocks: &[u64],
    clock: Clock,
) -> Result<f64, BenchError> {
    let began = clock.now();
    raw.move_blocks(direction, block, (SEGMENT_ALIGN, DEPTH), blocks).map_err(|error| {
        let problem = format!("{error}: look at the kernel's log (dmesg), or name another disk");
        BenchError::failed("direct I/O failed", problem)
    })?;
    Ok((clock.now() - began).as_secs_f64())
}

/// The bytes of a block, checked against the limits of disks and of the mesh.
pub(super) fn block_bytes(size: Size) -> Result<u32, BenchError> {
    let block = size.as_bytes();
    if !BLOCK_BYTES.contains(&block) || !block.is_multiple_of(4096) {
        let problem = "it must be 4KiB to 64MiB, in whole pages of 4 KiB";
        return Err(BenchError::option("block-size", size, problem));
    }
    Ok(u32::try_from(block).expect("within its limits"))
}

/// Measures a disk. Fails before any write if the options do not fit.
pub(super) fn measure_disk(options: &DiskOptions) -> Result<BenchFigures, BenchError> {
    let block = u64::from(block_bytes(options.block_size)?);
    let count = options.size.as_bytes() / block;
    if count == 0 {
        return Err(BenchError::option("size", options.size, "it must be at least that of --block-size"));
    }
    if !options.path.is_dir() {
        let problem = "the folder does not exist: name one on the disk";
        return Err(BenchError::option("path", options.path.display(), problem));
    }
    let (_fd, pool) = memory(SEGMENT_ALIGN + block * DEPTH * POSTED)?;
    measure_on(options, TierLoad { block_bytes: block, count, depth: DEPTH * POSTED }, &pool)
}

fn measure_on(options: &DiskOptions, load: TierLoad, pool: &Arc<Region>) -> Result<BenchFigures, BenchError> {
    // Room for `times` rounds of writes, beside the free part of a log: enough for a whole run, so the log
    // moves no blocks.
    let room = |times: u64| {
        times.saturating_mul(load.block_bytes * load.count).max(32 << 20).saturating_add(32 << 20)
    };
    let (wanted, clock) = (options.ssd_io.wanted_backend(), Clock::start_now());
    let opened = nameless(&options.path, "raw", room(1))?;
    let mut raw = Raw::new(opened, pool, wanted)
        .map_err(|error| BenchError::failed("no direct I/O", format!("{error}: pass --ssd-io threads")))?;
    let block = u32::try_from(load.block_bytes).expect("within its limits");
    let (written, read) = ((0..load.count).collect::<Vec<_>>(), shuffle_numbers(0..load.count));
    let mut tier = BenchTier::start_device(nameless(&options.path, "log", room(8))?, pool, wanted)?;
    // The first write to a part of a file is slower.
    let fills = 2;
    tier.write_blocks(TierLoad { count: fills * load.count, ..load }, 0)?;
    raw_run(&mut raw, IoDirection::Write, block, &written, clock)?;
    let gib_s = |seconds: f64| (load.block_bytes * load.count) as f64 / GIB / seconds;
    let (mut limits, mut own, mut times) = ([vec![], vec![]], [vec![], vec![]], vec![]);
    for round in 0..ROUNDS as u64 {
        let first = (fills + round) * load.count;
        limits[0].push(gib_s(raw_run(&mut raw, IoDirection::Write, block, &written, clock)?));
        own[0].push(gib_s(tier.write_blocks(load, first)?.seconds));
        limits[1].push(gib_s(raw_run(&mut raw, IoDirection::Read, block, &read, clock)?));
        let reads = tier.read_blocks(load, first)?;
        own[1].push(gib_s(reads.seconds));
        times.push(reads);
    }
    let mut figures = BenchFigures::new("disk");
    figures.add_figure("io", raw.backend().name());
    for (name, (limit, own)) in ["write", "read"].into_iter().zip(limits.iter_mut().zip(&mut own)) {
        figures.compare(name, ("raw", limit), ("tier", own));
    }
    for (name, part) in [("p50", 0.5), ("p99", 0.99)] {
        let mut found: Vec<f64> = times.iter_mut().map(|times| times.part_us(part)).collect();
        figures.add_figure(format!("tier_read_{name}_us"), super::rounded(super::median(&mut found)));
    }
    Ok(figures)
}
