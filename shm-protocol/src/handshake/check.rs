//! The rules of a [`Hello`], stated once: the engine checks them before it connects, the sidecar before it
//! answers.
//!
//! The sidecar checks the sizes of descriptors' files, and the senders of descriptors, elsewhere.

use std::fmt::{self, Display, Formatter};

use super::{
    BlockRegion, CUTS_MAX, Copier, CudaMemory, DESCRIPTORS_MAX, FACTS_MAX, HandshakeError, Hello, RANKS_MAX,
    REGIONS_MAX, Role, WEIGHTS_LIVE, WorkerHello,
};
use crate::layout::{
    LOAD_PREFERENCE_MAX, LOAD_WAIT_MS_MAX, PROMISED_WAIT_MS_MAX, QUERY_WAIT_MS_MAX, STAGING_SLOTS_MAX,
    STAGING_WORDS_BYTES,
};
use crate::versions::RELEASE_BYTES_MAX;

/// An exclusive limit for the bytes of a block, above those of any engine: sums of a few block lengths cannot
/// overflow.
const BLOCK_BYTES_END: u64 = 1 << 40;

/// Bytes of the longest name of an engine.
const ENGINE_BYTES_MAX: usize = 256;

/// A value of one region among many.
struct OfRegion {
    value: u64,
    number: usize,
}

impl Display for OfRegion {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} (region {})", self.value, self.number)
    }
}

fn range(
    field: &'static str,
    value: impl Display,
    valid: bool,
    rule: &'static str,
) -> Result<(), HandshakeError> {
    if valid { Ok(()) } else { Err(HandshakeError::Range { field, value: value.to_string(), rule }) }
}

/// Checks the name of a release, since logs and errors repeat it.
pub(super) fn release(name: &str) -> Result<(), HandshakeError> {
    let length = name.len();
    range("release (its length)", length, (1..=RELEASE_BYTES_MAX).contains(&length), "1 to 64 bytes")
}

// === impl Hello ===

impl Hello {
    /// Checks every field against the limits, against the other fields, and against the number of descriptors
    /// sent with the record.
    pub fn check(&self, descriptors: usize) -> Result<(), HandshakeError> {
        release(&self.release)?;
        let length = self.engine.len();
        range("engine (its length)", length, (1..=ENGINE_BYTES_MAX).contains(&length), "1 to 256 bytes")?;
        let ranks = (1..=RANKS_MAX).contains(&self.world_size);
        range("world_size", self.world_size, ranks, "1 to 64 ranks")?;
        if let Some(wait_ms) = self.miss_wait_ms {
            range(
                "miss_wait_ms",
                wait_ms,
                wait_ms <= QUERY_WAIT_MS_MAX,
                "at most 2,000 milliseconds, the longest that a query may be pending: set a smaller pillion.miss_wait_ms",
            )?;
        }
        if let Some(wait_ms) = self.handover_wait_ms {
            let rule = "at most 30,000 milliseconds: set a smaller pillion.handover_wait_ms";
            range("handover_wait_ms", wait_ms, wait_ms <= PROMISED_WAIT_MS_MAX, rule)?;
        }
        if let Some(wait_ms) = self.promise_wait_ms {
            let rule = "at most 2,000 milliseconds: set a smaller pillion.promise_wait_ms";
            range("promise_wait_ms", wait_ms, wait_ms <= QUERY_WAIT_MS_MAX, rule)?;
        }
        if let Some(wait_ms) = self.wait_max_ms {
            let rule = "at most 600,000 milliseconds: set a smaller pillion.wait_max_ms";
            range("wait_max_ms", wait_ms, wait_ms <= LOAD_WAIT_MS_MAX, rule)?;
        }
        if let Some(preference) = self.load_preference {
            let rule = "at most 100,000 thousandths: set a smaller pillion.load_preference";
            range("load_preference", preference, preference <= LOAD_PREFERENCE_MAX, rule)?;
        }
        match &self.role {
            Role::Scheduler { .. } => {
                range("descriptors", descriptors, descriptors == 0, "0: a scheduler sends none")
            }
            Role::Worker(worker) => worker.check(self.world_size, descriptors),
        }
    }
}

// === impl WorkerHello ===

impl WorkerHello {
    fn check(&self, world_size: u32, descriptors: usize) -> Result<(), HandshakeError> {
        self.check_place(world_size)?;
        range("blocks", self.blocks, self.blocks > 0, "at least 1")?;
        range("facts (their number)", self.facts.len(), self.facts.len() <= FACTS_MAX, "at most 256")?;
        self.check_claims()?;
        range("descriptors", descriptors, descriptors <= DESCRIPTORS_MAX, "at most 64")?;
        let memories = match &self.cuda {
            None => descriptors,
            Some(cuda) => {
                range("descriptors", descriptors, descriptors == 0, "0 beside GPU memory")?;
                cuda.allocations.len()
            }
        };
        self.check_regions(memories)?;
        self.staging.map_or(Ok(()), |slots| self.check_staging(slots, descriptors))?;
        self.cuda.as_ref().map_or(Ok(()), |cuda| cuda.check(self))
    }

    /// Checks the rank's number and its part of a block.
    fn check_place(&self, world_size: u32) -> Result<(), HandshakeError> {
        range("rank", self.rank, self.rank < world_size, "below world_size")?;
        range("shards", self.shards, (1..=world_size).contains(&self.shards), "1 to world_size")?;
        range("shards", self.shards, world_size.is_multiple_of(self.shards), "a divisor of world_size")?;
        let shard = self.rank / (world_size / self.shards);
        range("shard", self.shard, self.shard == shard, "rank / (world_size / shards)")
    }

    /// Checks the statements about its namespace outside the facts.
    fn check_claims(&self) -> Result<(), HandshakeError> {
        if let Some(expects) = &self.expects {
            let digits = expects.bytes().filter(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f')).count();
            let valid = (expects.len(), digits) == (32, 32);
            range(
                "expects (its hex digits)",
                digits,
                valid,
                "32 in lower case, and nothing else, as pillion ctl namespaces shows them (pillion.namespace)",
            )?;
        }
        if let Some(stated) = self.facts.get(WEIGHTS_LIVE).filter(|_| self.live_weights.is_some()) {
            let rule = "absent from the facts beside live_weights, which the sidecar makes it from";
            range("fact weights_live", stated.escape_debug(), false, rule)?;
        }
        Ok(())
    }

    fn check_regions(&self, memories: usize) -> Result<(), HandshakeError> {
        let regions = self.regions.len();
        range("regions (their number)", regions, (1..=REGIONS_MAX).contains(&regions), "1 to 1,024")?;
        let places = self.staging.map_or(self.blocks, |slots| slots.max(1));
        for (number, region) in self.regions.iter().enumerate() {
            let BlockRegion { fd, offset, stride, bytes } = *region;
            let of = |value: u64| OfRegion { value, number };
            range("region.fd", of(fd.into()), (fd as usize) < memories, "below the number of memories")?;
            range("region.bytes", of(bytes), bytes > 0, "at least 1")?;
            range("region.stride", of(stride), stride >= bytes, "at least region.bytes")?;
            let inside = region.checked_end(places).is_some();
            range("region.offset", of(offset), inside, "so small that the last block ends below 2^63")?;
        }
        let total = self.block_bytes();
        let valid = total.is_some_and(|bytes| bytes < BLOCK_BYTES_END);
        range("bytes of a block", total.unwrap_or(u64::MAX), valid, "below 1 TiB")
    }

    fn check_staging(&self, slots: u32, descriptors: usize) -> Result<(), HandshakeError> {
        let few = (1..=STAGING_SLOTS_MAX as u32).contains(&slots);
        range("staging", slots, few, "1 to 512 slots")?;
        range("staging", slots, self.cuda.is_none(), "absent beside GPU memory")?;
        range("descriptors", descriptors, descriptors == 1, "1, of the staging segment")?;
        let regions = self.regions.len();
        range("regions (their number)", regions, regions == 1, "1, of the staging segment")?;
        let offset = self.regions[0].offset;
        let behind = offset >= STAGING_WORDS_BYTES as u64;
        range("region.offset", offset, behind, "at least 4,096, behind the words of the slots")?;
        range(
            "copy",
            format_args!("'{}'", self.copy),
            self.copy == Copier::Engine,
            "'engine' where saves are staged",
        )
    }

    /// Checks the ends of the parts of a load. A rank that sends no cuts, but copies by them, calls this too.
    pub fn check_cuts(&self, cuts: &[u64]) -> Result<(), HandshakeError> {
        let count = cuts.len();
        range("cuts (their number)", count, (1..=CUTS_MAX).contains(&count), "1 to 255")?;
        let ascending = cuts[0] > 0 && cuts.is_sorted_by(|one, next| one < next);
        range(
            "cuts (the first)",
            cuts[0],
            ascending,
            "above 0, and every other one above the one before it",
        )?;
        let last = cuts[count - 1];
        range("cuts (the last)", last, Some(last) == self.block_bytes(), "the bytes of a block")
    }
}

// === impl CudaMemory ===

impl CudaMemory {
    fn check(&self, worker: &WorkerHello) -> Result<(), HandshakeError> {
        let count = self.allocations.len();
        range("allocations (their number)", count, (1..=DESCRIPTORS_MAX).contains(&count), "1 to 64")?;
        for (number, allocation) in (0..).zip(&self.allocations) {
            let enough = allocation.bytes >= worker.descriptor_bytes(number);
            range("allocation.bytes", allocation.bytes, enough, "at least the end of its last region")?;
        }
        worker.check_cuts(&self.cuts)?;
        let by_sidecar = worker.copy == Copier::Sidecar;
        range("copy", format_args!("'{}'", worker.copy), by_sidecar, "'sidecar' where the memory is a GPU's")
    }
}
