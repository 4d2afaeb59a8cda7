//! A thread forecasts the hits of pools of other sizes: it replays every ended request in scaled-down pools.
//!
//! The data thread never waits for it: a request is skipped if the queue is full.

use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use prometheus::{IntCounter, Registry};
use shm_protocol::pool::slot_count;
use tiers::dram;
use tiers::forecast::{Forecast, OtherRequest, ROOMS, SLOTS_MAX};

use crate::core::{FinishedRequest, SetPart};
use crate::error::StartError;
use crate::pages::metrics::figures::{raise_counter, register_counter, register_counters};

/// Largest number of queued requests.
const WAITING_MAX: usize = 256;
/// The lowest priority.
const NICE: i32 = 19;

/// The data thread's handle of the forecaster.
#[derive(Debug)]
pub struct Forecaster {
    requests: SyncSender<FinishedRequest>,
    counts: ForecastCounts,
}

/// The forecast of a pool.
#[derive(Debug)]
pub struct Replay {
    config: dram::DramConfig,
    /// Bytes of a block that counts, and the miniatures; made by the first request.
    forecast: Option<(u64, Forecast)>,
}

/// The counters of the forecast; all clones share them.
#[derive(Clone, Debug)]
pub struct ForecastCounts {
    asked: IntCounter,
    /// A counter for each size, in the order of [`ROOMS`].
    found: Vec<IntCounter>,
}

// === impl Forecaster ===

impl Forecaster {
    /// Starts the thread; it ends when this value is dropped.
    pub fn start_thread(registry: &Registry, config: &dram::DramConfig) -> Result<Self, StartError> {
        let counts = ForecastCounts::new(registry)?;
        let (config, shown) = (*config, counts.clone());
        let (requests, to_play) = mpsc::sync_channel(WAITING_MAX);
        thread::Builder::new()
            .name("pillion-foretell".into())
            .spawn(move || play(&to_play, &config, &shown))?;
        Ok(Self { requests, counts })
    }

    pub fn counts(&self) -> ForecastCounts {
        self.counts.clone()
    }

    /// Queues an ended request for the replay.
    pub fn record_request(&self, ended: FinishedRequest) {
        // The queue is full or the thread has failed. A skipped request changes only the forecast.
        let _ = self.requests.try_send(ended);
    }
}

fn play(requests: &Receiver<FinishedRequest>, config: &dram::DramConfig, counts: &ForecastCounts) {
    if let Err(error) = rustix::process::nice(NICE) {
        tracing::warn!(%error, "hits of other pool sizes are forecast at the sidecar's own priority, because a lower \
             one was refused");
    }
    let mut replay = Replay::new(*config);
    for ended in requests {
        replay.record(ended);
        replay.forecast().into_iter().for_each(|forecast| counts.show(forecast));
    }
}

// === impl Replay ===

impl Replay {
    pub fn new(config: dram::DramConfig) -> Self {
        Self { config, forecast: None }
    }

    /// Records an ended request. One with another size of blocks than the first one is left out.
    pub fn record(&mut self, ended: FinishedRequest) {
        let FinishedRequest { namespace, block_bytes, keys, asked, ending, part } = ended;
        if self.forecast.is_none() && matches!(part, SetPart::Other { .. }) {
            // The sizes are those of full attention.
            return;
        }
        let config = &self.config;
        let (bytes, forecast) = self.forecast.get_or_insert_with(|| {
            let by_segment = slot_count(config.segment_bytes, block_bytes).unwrap_or(1);
            let slots = config.pool_bytes / config.segment_bytes * u64::from(by_segment);
            (block_bytes, Forecast::new(slots, SLOTS_MAX))
        });
        match part {
            SetPart::Other { saved, reads } => {
                let size = block_bytes as f64 / *bytes as f64;
                let (keys, saved, asked_end) = (&keys[..], &saved[..], asked.end);
                forecast.beside(&OtherRequest { namespace, keys, saved, asked_end, reads, ending, size });
            }
            // All blocks that count have one size in a scaled-down pool.
            _ if *bytes != block_bytes => {}
            SetPart::Lead(others) => forecast.lead(namespace, &keys, asked, ending, &others),
            SetPart::Whole => forecast.request(namespace, &keys, asked, ending),
        }
    }

    /// Returns the forecast; `None` before the first request.
    pub fn forecast(&self) -> Option<&Forecast> {
        self.forecast.as_ref().map(|(_, forecast)| forecast)
    }
}

// === impl ForecastCounts ===

impl ForecastCounts {
    fn new(registry: &Registry) -> Result<Self, prometheus::Error> {
        let asked = "Blocks requested by ended requests, replayed in simulated pools of other sizes; of a model with several cache \
             groups those of full attention.";
        let asked = register_counter(registry, "forecast_blocks_total", asked)?;
        let help = "Blocks that a pool of `dram` times the size of --dram would have found. endless: a pool that never \
             evicts. Divide by pillion_forecast_blocks_total.";
        let found = register_counters(registry, "forecast_hit_blocks_total", help, &["dram"])?;
        let found = ROOMS.iter().map(|room| found.with_label_values(&[*room])).collect();
        Ok(Self { asked, found })
    }

    /// Requested blocks, and the hits in a pool of each size of [`ROOMS`].
    pub fn block_counts(&self) -> (u64, impl Iterator<Item = (&'static str, u64)>) {
        let found = ROOMS.into_iter().zip(&self.found).map(|(room, found)| (room, found.get()));
        (self.asked.get(), found)
    }

    fn show(&self, forecast: &Forecast) {
        raise_counter(&self.asked, forecast.asked());
        for (counter, found) in self.found.iter().zip(forecast.found()) {
            raise_counter(counter, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use shm_protocol::key::BlockHash;

    use super::*;

    #[test]
    fn requests_of_one_size_are_played() {
        let config = dram::DramConfig { pool_bytes: 64 << 20, segment_bytes: 2 << 20, lease_ttl_ms: 1000 };
        let counts = ForecastCounts::new(&Registry::new()).unwrap();
        let (sender, requests) = mpsc::channel();
        let keys: Vec<BlockHash> = (0..10).map(|number| BlockHash([number; 32])).collect();
        for (block_bytes, asked) in [(1 << 20, 0..8), (1 << 20, 2..8), (1 << 19, 0..8)] {
            sender
                .send(FinishedRequest {
                    namespace: 0,
                    block_bytes,
                    keys: keys.clone(),
                    asked,
                    ending: dram::Ending::default(),
                    part: SetPart::Whole,
                })
                .unwrap();
        }
        drop(sender);
        play(&requests, &config, &counts);
        let (asked, found) = counts.block_counts();
        assert_eq!((asked, found.collect()), (14, ROOMS.map(|room| (room, 6)).to_vec()));
    }
}
