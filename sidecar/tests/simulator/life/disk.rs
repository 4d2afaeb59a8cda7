//! The sidecar's disk: written blocks outlive the sidecar. Jobs end in any order, some as failed, some late.
//! A read spoils its slot when it begins and fills it when it ends, so the oracle sees a slot reused too
//! early.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use shm_protocol::key::NamespaceDigest;
use shm_protocol::region::Region;
use sidecar::config::SsdAdmission;
use sidecar::core::{CopyDirection, NewTier, RankBlock, disk_tier};
use tiers::ssd::{
    DeviceGeometry, DeviceJob, DevicePlace, DeviceWork, JobDone, JobFault, Label, LogConfig, Recovered,
    SegmentLog,
};

use crate::ctx::{Ctx, Micros};
use crate::ledger::Form;
use crate::origin::WORDS;

const SEGMENTS: u32 = 8;
/// Duration of a late job.
const LATE: Micros = 20_000;

/// The contents of the disk.
#[derive(Debug, Default)]
pub(crate) struct Medium {
    blocks: BTreeMap<(u32, u32), Stored>,
    lives: u64,
    /// Blocks that no later life may find: those of a namespace with lower sequences.
    distrusted: Vec<(NamespaceDigest, u64)>,
}

#[derive(Clone, Debug)]
struct Stored {
    sequence: u64,
    label: Label,
    words: Vec<u64>,
}

/// The disk in one life of the sidecar.
#[derive(Debug)]
pub(super) struct Disk {
    medium: Rc<RefCell<Medium>>,
    /// Its jobs take longer, and fail more often.
    slow: bool,
    running: Vec<(DeviceJob, Micros)>,
    /// Blocks of earlier lives not yet reported to the core.
    pub(super) recovered: VecDeque<Recovered>,
}

/// The slot of a job, and the direction of its use.
pub(super) fn use_of(job: &DeviceJob) -> Option<(CopyDirection, RankBlock)> {
    match job.work {
        DeviceWork::Write { from, .. } => Some((CopyDirection::Load, RankBlock { block: 0, offset: from })),
        DeviceWork::Read { into, .. } => Some((CopyDirection::Save, RankBlock { block: 0, offset: into })),
        _ => None,
    }
}

// === impl Disk ===

impl Disk {
    /// The disk with the blocks of earlier lives, and the tier of a log on it.
    pub(super) fn start(medium: &Rc<RefCell<Medium>>, slow: bool) -> (Self, NewTier) {
        let mut found: BTreeMap<(u64, u32), Vec<(u32, Label)>> = BTreeMap::new();
        let is_distrusted = |stored: &&Stored| {
            let of = |(namespace, before): &(_, u64)| {
                *namespace == stored.label.namespace && stored.sequence < *before
            };
            medium.borrow().distrusted.iter().any(of)
        };
        for ((segment, unit), stored) in
            medium.borrow().blocks.iter().filter(|(_, stored)| !is_distrusted(stored))
        {
            found.entry((stored.sequence, *segment)).or_default().push((*unit, stored.label));
        }
        medium.borrow_mut().lives += 1;
        let first_sequence = medium.borrow().lives << 32;
        let geometry =
            DeviceGeometry { unit_bytes: 4096, segment_bytes: 4 << 20, segments: SEGMENTS, first_sequence };
        let config = LogConfig { devices: vec![geometry], write_bytes_max: 4 << 20, late_ms: LATE / 1000 };
        let part = |(sequence, segment), blocks, last| {
            let segments_read = if last { SEGMENTS } else { 0 };
            Recovered { device: 0, segment, sequence, blocks, unreadable: false, segments_read, last }
        };
        let mut recovered: VecDeque<_> =
            found.into_iter().rev().map(|(at, blocks)| part(at, blocks, false)).collect();
        recovered.push_back(part((0, 0), Vec::new(), true));
        let disk = Self { medium: Rc::clone(medium), slow, running: Vec::new(), recovered };
        (disk, disk_tier(SegmentLog::new(config), SsdAdmission::All))
    }

    pub(super) fn post(&mut self, job: DeviceJob, form: Option<Form>, memory: &Region, ctx: &mut Ctx) {
        if let (DeviceWork::Read { into, .. }, Some(form)) = (job.work, form) {
            let spoiled = ctx.taint();
            words(form, into).for_each(|at| memory.word64(at).store(spoiled, Ordering::Relaxed));
        }
        let takes = match ctx.rng.one_in(100) {
            true => 3 * LATE,
            false if self.slow => ctx.rng.within(2_000, LATE - 2_000),
            false => ctx.rng.within(10, 2_000),
        };
        self.running.push((job, ctx.now + takes));
    }

    /// Time of the next job's end.
    pub(super) fn next_due(&self) -> Option<Micros> {
        self.running.iter().map(|(_, due)| *due).min()
    }

    /// Takes a job that has ended.
    pub(super) fn pop_due(&mut self, now: Micros) -> Option<DeviceJob> {
        let at = self.running.iter().position(|(_, due)| *due <= now)?;
        Some(self.running.swap_remove(at).0)
    }

    /// Ends the jobs of a dead sidecar: each was carried out, or was not.
    pub(super) fn die(mut self, form_of: impl Fn(u64) -> Form, memory: &Region, ctx: &mut Ctx) {
        while let Some((job, _)) = self.running.pop() {
            let form = use_of(&job).map(|(_, piece)| form_of(piece.offset));
            if ctx.rng.one_in(2) {
                self.carry_out(&job, form, memory, ctx);
            }
        }
    }

    pub(super) fn carry_out(
        &mut self,
        job: &DeviceJob,
        form: Option<Form>,
        memory: &Region,
        ctx: &mut Ctx,
    ) -> JobDone {
        let fails = ctx.knobs.failing_copies > 0 && ctx.rng.one_in(ctx.knobs.failing_copies)
            || self.slow && use_of(job).is_some() && ctx.rng.one_in(4);
        let result =
            if fails { Err(JobFault::Corrupt("simulated")) } else { self.try_job(job, form, memory) };
        if self.slow && matches!(job.work, DeviceWork::Read { .. }) {
            ctx.hit(if result.is_ok() { "slow disk read" } else { "slow disk read failed" });
        }
        JobDone { device: 0, ticket: job.ticket, micros: 1, result }
    }

    fn try_job(&mut self, job: &DeviceJob, form: Option<Form>, memory: &Region) -> Result<(), JobFault> {
        let mut medium = self.medium.borrow_mut();
        match job.work {
            DeviceWork::Begin { segment, .. } => medium.blocks.retain(|(at, _), _| *at != segment),
            DeviceWork::Write { place, sequence, label, from } => {
                let load = |at: usize| memory.word64(at).load(Ordering::Relaxed);
                let words = words(form.expect("it has a slot"), from).map(load).collect();
                medium.blocks.insert(key(place), Stored { sequence, label, words });
            }
            DeviceWork::Read { place, sequence, label, into } => {
                let stored = medium.find(place, sequence, label)?;
                for (at, word) in words(form.expect("it has a slot"), into).zip(stored.words) {
                    memory.word64(at).store(word, Ordering::Relaxed);
                }
            }
            DeviceWork::Move { from, from_sequence, to, to_sequence, label } => {
                let stored = medium.find(from, from_sequence, label)?;
                medium.blocks.insert(key(to), Stored { sequence: to_sequence, ..stored });
            }
            DeviceWork::Distrust { namespace, before } => {
                // As on a disk, a namespace's last record counts.
                medium.distrusted.retain(|(other, _)| *other != namespace);
                medium.distrusted.push((namespace, before));
            }
            DeviceWork::Seal { .. } | DeviceWork::Check | DeviceWork::GiveUp => {}
        }
        Ok(())
    }
}

// === impl Medium ===

impl Medium {
    fn find(&self, place: DevicePlace, sequence: u64, label: Label) -> Result<Stored, JobFault> {
        let stored = self.blocks.get(&key(place));
        let right = stored.filter(|stored| (stored.sequence, stored.label) == (sequence, label));
        right.cloned().ok_or(JobFault::Corrupt("header"))
    }
}

fn key(place: DevicePlace) -> (u32, u32) {
    (place.segment, place.unit)
}

/// Offsets of the words of a slot.
pub(super) fn words(form: Form, offset: u64) -> impl Iterator<Item = usize> {
    let bases = (0..u64::from(form.shards)).map(move |shard| offset + shard * form.shard_bytes);
    bases.flat_map(|base| (0..WORDS).map(move |index| base as usize + index * 8))
}
