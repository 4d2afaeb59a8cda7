//! The SSD tier on one device, without a sidecar: blocks written and read at a given depth.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use shm_protocol::key::{BlockHash, BlockKey, NamespaceDigest};
use shm_protocol::pool::{SEGMENT_ALIGN, SlotRef};
use shm_protocol::random::Random;
use shm_protocol::region::Region;
use tiers::dram::Leaving;
use tiers::ssd::{
    Backend, DeviceEvent, EndedJob, LogConfig, LogRefusal, OpenedDevice, SegmentLog, SsdDevice,
};

use super::{BenchError, shuffle_numbers};
use sidecar::system::clock::{self, Clock};

const NAMESPACE: NamespaceDigest = NamespaceDigest([7; 16]);
/// The most bytes of waiting writes, and the longest time of a transfer: more than any load needs.
const WRITE_BYTES_MAX: u64 = 256 << 20;
const LATE_MS: u64 = 60_000;

/// The blocks of a measurement, and how many at a time.
#[derive(Copy, Clone, Debug)]
pub struct TierLoad {
    pub block_bytes: u64,
    pub count: u64,
    pub depth: u64,
}

/// Seconds of a load, and microseconds of each block.
#[derive(Debug)]
pub struct Times {
    pub seconds: f64,
    pub blocks_us: Vec<f64>,
}

/// The tier, and a clock.
#[derive(Debug)]
pub struct BenchTier {
    pub log: SegmentLog,
    device: SsdDevice,
    ups: Receiver<DeviceEvent>,
    free: Vec<SlotRef>,
    clock: Clock,
    /// The begin of each slot's job.
    since: HashMap<u64, Duration>,
    blocks_us: Vec<f64>,
}

/// The key of a numbered block.
pub fn make_key(number: u64) -> BlockKey {
    let mut random = Random(number);
    let words = [number, random.next(), random.next(), random.next()];
    BlockKey { namespace: 0, group: 0, hash: BlockHash::from_words(words) }
}

// === impl BenchTier ===

impl BenchTier {
    /// Starts the tier on an opened device, and waits until its earlier blocks are found. The slots are in
    /// `pool`, from its second segment on.
    pub fn start_device(
        opened: OpenedDevice,
        pool: &Arc<Region>,
        wanted: Option<Backend>,
    ) -> Result<Self, BenchError> {
        let devices = vec![opened.geometry()];
        let log = SegmentLog::new(LogConfig { devices, write_bytes_max: WRITE_BYTES_MAX, late_ms: LATE_MS });
        let (sender, ups) = channel();
        let device = SsdDevice::start(opened, 0, Arc::clone(pool), wanted, move |up| drop(sender.send(up)))?;
        let mut tier = Self {
            log,
            device,
            ups,
            free: Vec::new(),
            clock: Clock::start_now(),
            since: HashMap::new(),
            blocks_us: Vec::new(),
        };
        while tier.log.log_stats().devices[0].recovering {
            tier.pump()?;
        }
        Ok(tier)
    }

    fn now_ms(&self) -> u64 {
        clock::count_millis(self.clock.now())
    }

    fn pump(&mut self) -> Result<(), BenchError> {
        match self.ups.recv_timeout(Duration::from_millis(50)) {
            Ok(up) => self.take_event(up)?,
            Err(_) => self.log.tick(self.now_ms(), &mut Vec::new()),
        }
        while let Ok(up) = self.ups.try_recv() {
            self.take_event(up)?;
        }
        self.device.post_jobs(self.log.drain_jobs());
        Ok(())
    }

    fn take_event(&mut self, up: DeviceEvent) -> Result<(), BenchError> {
        match up {
            DeviceEvent::Note(note) => tracing::warn!("{note}"),
            DeviceEvent::Recovered(found) => self.log.recovered(&found, |_, _| Some(0)),
            DeviceEvent::Done(done) => {
                if let Some(EndedJob::Written { slot, ok } | EndedJob::Read { slot, ok, .. }) =
                    self.log.done(self.now_ms(), done)
                {
                    if !ok {
                        let problem = format!(
                            "{:?}: look at the kernel's log (dmesg), or name another disk",
                            done.result
                        );
                        return Err(BenchError::failed("a block was not transferred completely", problem));
                    }
                    let since = self.since.remove(&slot.offset).unwrap_or_default();
                    self.blocks_us.push((self.clock.now() - since).as_secs_f64() * 1e6);
                    self.free.push(slot);
                }
            }
        }
        Ok(())
    }

    /// Runs a load to its end; `begin` returns false if there was no room for the block.
    fn run_load(
        &mut self,
        load: TierLoad,
        mut begin: impl FnMut(&mut SegmentLog, u64, SlotRef) -> Result<bool, BenchError>,
    ) -> Result<Times, BenchError> {
        let slot = |at| SlotRef { offset: SEGMENT_ALIGN + at * load.block_bytes, generation: 0 };
        self.free = (0..load.depth).map(slot).collect();
        let began = self.clock.now();
        let mut next = 0;
        while (self.blocks_us.len() as u64) < load.count {
            while next < load.count
                && let Some(slot) = self.free.pop()
            {
                if !begin(&mut self.log, next, slot)? {
                    self.free.push(slot);
                    break;
                }
                self.since.insert(slot.offset, self.clock.now());
                next += 1;
            }
            self.device.post_jobs(self.log.drain_jobs());
            self.pump()?;
        }
        let seconds = (self.clock.now() - began).as_secs_f64();
        Ok(Times { seconds, blocks_us: std::mem::take(&mut self.blocks_us) })
    }

    /// Writes blocks with numbers from `first` on.
    pub fn write_blocks(&mut self, load: TierLoad, first: u64) -> Result<Times, BenchError> {
        self.run_load(load, |log, number, slot| {
            match log.write_block(&Leaving::copy(make_key(first + number), load.block_bytes), NAMESPACE, slot)
            {
                Ok(_) => Ok(true),
                Err(LogRefusal::Busy) => Ok(false),
                Err(refused) => {
                    let remedy = match refused {
                        LogRefusal::TooLarge => "raise --size, or lower --block-size",
                        _ => "look at the kernel's log (dmesg), or name another disk",
                    };
                    Err(BenchError::failed("a block was not accepted", format!("{refused}: {remedy}")))
                }
            }
        })
    }

    /// Reads these blocks in random order; the tier verifies each.
    pub fn read_blocks(&mut self, load: TierLoad, first: u64) -> Result<Times, BenchError> {
        let order = shuffle_numbers(first..first + load.count);
        self.run_load(load, |log, number, slot| {
            match log.read_block(0, &make_key(order[number as usize]), slot, 1) {
                Some(_) => Ok(true),
                None => {
                    let problem = "its segment was reused before it was read: raise --size";
                    Err(BenchError::failed("a block is missing", problem))
                }
            }
        })
    }
}

// === impl Times ===

impl Times {
    /// The quantile `part` of the blocks' times.
    pub fn part_us(&mut self, part: f64) -> f64 {
        super::part(&mut self.blocks_us, part)
    }
}
