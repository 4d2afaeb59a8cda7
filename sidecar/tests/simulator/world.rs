//! The world of one seed: the order of all moves, the faults, and the checks at the end.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use shm_protocol::pool::{self, PoolView, slot};
use tempfile::TempDir;

use crate::ctx::{Actor, COPIERS, Ctx, ENGINES, Micros, WORKERS};
use crate::engine::{Engine, Model, Second, Spec, keys};
use crate::faults::{Faults, back_after};
use crate::ledger::Form;
use crate::life::{Life, Medium};
use crate::origin::WORDS;
use crate::rng::mix;

/// More moves than any seed needs: beyond this number an actor waits without end.
const MOVES_MAX: u64 = 2_000_000;
/// The same in simulated time: every wait of an engine has a limit of 20 ms, or of the longest freeze.
const TIME_MAX: Micros = 60_000_000;
/// Time to rest after the last request: a disk is tried again a second after a failed write.
const REST_MAX: Micros = 8_000_000;
/// Mixed into a seed, to decide which worlds have engines with a second cache group.
const SECOND: u64 = 0x7365_636f;
const ACTORS: usize = 2 + COPIERS + ENGINES * (1 + 2 * WORKERS);

/// The time of an actor's next move; older entries of the queue are void.
#[derive(Copy, Clone, Debug, Default)]
struct Turn {
    at: Micros,
    entry: u64,
    waiting: bool,
    frozen_until: Micros,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) ctx: Ctx,
    pub(crate) life: Option<Life>,
    pub(crate) engines: Vec<Engine>,
    forms: Vec<Form>,
    /// The sidecar's disks, by the number of their tier.
    disks: Vec<Rc<RefCell<Medium>>>,
    faults: Faults,
    queue: BinaryHeap<Reverse<(Micros, u64, usize)>>,
    turns: [Turn; ACTORS],
    entries: u64,
    next_epoch: u64,
    folder: Option<TempDir>,
}

fn number(actor: Actor) -> usize {
    let engine = |engine: usize| 2 + COPIERS + engine * (1 + 2 * WORKERS);
    match actor {
        Actor::Data => 0,
        Actor::Fate => 1,
        Actor::Copier(thread) => 2 + thread,
        Actor::Scheduler(index) => engine(index),
        Actor::Worker(index, rank) => engine(index) + 1 + rank,
        Actor::Rescuer(index, rank) => engine(index) + 1 + WORKERS + rank,
    }
}

fn actor(number: usize) -> Actor {
    match number {
        0 => Actor::Data,
        1 => Actor::Fate,
        thread if thread < 2 + COPIERS => Actor::Copier(thread - 2),
        other => {
            let (engine, part) =
                ((other - 2 - COPIERS) / (1 + 2 * WORKERS), (other - 2 - COPIERS) % (1 + 2 * WORKERS));
            match part {
                0 => Actor::Scheduler(engine),
                rank if rank <= WORKERS => Actor::Worker(engine, rank - 1),
                rank => Actor::Rescuer(engine, rank - 1 - WORKERS),
            }
        }
    }
}

// === impl World ===

impl World {
    pub(crate) fn new(seed: u64, without_rescue: bool, events: usize) -> Self {
        let mut ctx = Ctx::new(seed, without_rescue, events);
        // Only the seed decides, so worlds with one group stay as they were.
        let kinds = [Second::Window(1), Second::Window(2), Second::States, Second::States];
        let second =
            mix(seed ^ SECOND).is_multiple_of(3).then(|| kinds[(mix(seed) >> 40) as usize % kinds.len()]);
        let mut models = vec![Model::random(0, None, second, &mut ctx.rng)];
        if ctx.rng.one_in(2) {
            let twin = ctx.rng.one_in(2).then(|| models[0].clone());
            models.push(Model::random(1, twin.as_ref(), second, &mut ctx.rng));
        }
        let forms = models.iter().map(|model| model.form).collect();
        let engines = models.into_iter().map(|model| {
            let specs = specs(model.index as u64 * 1000, &mut ctx);
            Engine::new(model, specs)
        });
        let engines: Vec<Engine> = engines.collect();
        let folder =
            ctx.knobs.pool_file.then(|| tempfile::tempdir_in("/dev/shm").expect("a folder on tmpfs"));
        let faults = Faults::new(ctx.knobs.faults);
        let (queue, turns) = Default::default();
        let disks = if ctx.knobs.disk { 1 + usize::from(ctx.knobs.slow_disk.is_some()) } else { 0 };
        Self {
            ctx,
            life: None,
            engines,
            forms,
            disks: (0..disks).map(|_| Rc::default()).collect(),
            faults,
            queue,
            turns,
            entries: 0,
            next_epoch: 1,
            folder,
        }
    }

    /// Runs until no work is left, and checks the rest. Panics at any breach.
    pub(crate) fn run(&mut self) {
        self.ctx.wakes.push((Actor::Fate, 1));
        if self.ctx.rng.one_in(4) {
            self.faults.sidecar_starts(self.ctx.now + self.ctx.rng.below(30_000));
        } else {
            self.start_sidecar();
        }
        for index in 0..self.engines.len() {
            self.engines[index].start(&mut self.ctx);
        }
        let mut moves = 0;
        while !self.over() {
            self.advance(&mut moves);
        }
        self.faults.end();
        let rest_by = self.ctx.now + REST_MAX;
        while !self.at_rest() {
            assert!(self.ctx.now < rest_by, "no rest: {}", self.unrest());
            self.advance(&mut moves);
        }
        let life = self.life.as_ref().expect("it is at rest");
        life.audit();
        self.engines.iter().for_each(Engine::audit);
        self.engines.iter_mut().for_each(Engine::crash);
        while self.life.as_ref().is_some_and(|life| life.sessions() > 0 || !life.at_rest()) {
            assert!(self.ctx.now < rest_by + REST_MAX, "no rest after the last session: {}", self.unrest());
            self.advance(&mut moves);
        }
        self.life.as_ref().expect("nothing ends it any more").audit();
    }

    /// True if every request was answered and no fault is active.
    fn over(&self) -> bool {
        self.faults.over() && self.life.is_some() && self.engines.iter().all(Engine::done)
    }

    fn at_rest(&self) -> bool {
        self.life.as_ref().is_some_and(Life::at_rest) && self.engines.iter().all(Engine::at_rest)
    }

    fn unrest(&self) -> String {
        let life = self.life.as_ref().map(Life::unrest);
        let engines: Vec<String> = self.engines.iter().map(Engine::unrest).collect();
        format!("{life:?}, {engines:?}")
    }

    /// Makes the next move of the first actor due.
    fn advance(&mut self, moves: &mut u64) {
        *moves += 1;
        assert!(*moves < MOVES_MAX && self.ctx.now < TIME_MAX, "no progress: {}", self.unrest());
        self.take_wakes();
        let Reverse((at, entry, number)) = self.queue.pop().expect("Fate always moves");
        let turn = &mut self.turns[number];
        if !turn.waiting || turn.entry != entry {
            return;
        }
        if turn.frozen_until > at {
            turn.waiting = false;
            let until = turn.frozen_until;
            return self.schedule(number, until);
        }
        turn.waiting = false;
        self.ctx.now = at;
        if let Some(pause) = self.act(actor(number)) {
            self.schedule(number, self.ctx.now + pause);
        }
        self.ring_bell();
        if self.life.is_none() {
            // No sidecar listens.
            self.ctx.dials.drain(..).for_each(|dial| dial.pending.set(false));
        }
    }

    fn act(&mut self, actor: Actor) -> Option<Micros> {
        let ctx = &mut self.ctx;
        match actor {
            Actor::Fate => Some(self.fate()),
            Actor::Data => {
                let pause = self.life.as_mut()?.step(ctx);
                if self.life.as_ref().is_some_and(Life::is_torn) && self.faults.may_kill(ctx) {
                    self.kill_sidecar();
                    return None;
                }
                Some(pause)
            }
            Actor::Copier(thread) => self.life.as_mut()?.copy(thread, ctx),
            Actor::Scheduler(index) => {
                let engine = &mut self.engines[index];
                Some(engine.scheduler.as_mut()?.act(&mut engine.shared, &mut engine.pending, ctx))
            }
            Actor::Worker(index, rank) => {
                let engine = &mut self.engines[index];
                Some(engine.workers[rank].as_mut()?.act(&mut engine.shared, ctx))
            }
            Actor::Rescuer(index, rank) => {
                let engine = &mut self.engines[index];
                engine.workers[rank].as_mut()?.copy(&engine.shared, ctx)
            }
        }
    }

    fn fate(&mut self) -> Micros {
        let mut faults = std::mem::take(&mut self.faults);
        let pause = faults.act(self);
        self.faults = faults;
        pause
    }

    fn schedule(&mut self, number: usize, at: Micros) {
        self.entries += 1;
        let turn = &mut self.turns[number];
        (turn.at, turn.entry, turn.waiting) = (at, self.entries, true);
        self.queue.push(Reverse((at, self.entries, number)));
    }

    /// Schedules each woken actor at its time, unless it moves earlier.
    fn take_wakes(&mut self) {
        for (actor, at) in std::mem::take(&mut self.ctx.wakes) {
            let number = number(actor);
            if !self.turns[number].waiting || self.turns[number].at > at {
                self.schedule(number, at);
            }
        }
    }

    fn ring_bell(&mut self) {
        if !self.ctx.bell.get() || !self.life.as_ref().is_some_and(Life::sleeps) {
            return;
        }
        self.ctx.bell.set(false);
        if self.ctx.knobs.lost_wakeups > 0 && self.ctx.rng.one_in(self.ctx.knobs.lost_wakeups) {
            return self.ctx.hit("fault lost wake-up");
        }
        let at = self.ctx.now + 5 + self.ctx.rng.below(60);
        self.ctx.wakes.push((Actor::Data, at));
    }

    /// Freezes these actors for a while.
    pub(crate) fn freeze(&mut self, actors: &[Actor], pause: Micros) {
        for actor in actors {
            self.turns[number(*actor)].frozen_until = self.ctx.now + pause;
        }
    }

    pub(crate) fn start_sidecar(&mut self) {
        let path: Option<PathBuf> = self.folder.as_ref().map(|folder| folder.path().join("pool"));
        if self.ctx.knobs.faults > 0
            && path.as_ref().is_some_and(|path| path.exists())
            && self.ctx.rng.one_in(4)
        {
            // No engine reads the file during the change: a reader would see the changed bytes.
            self.engines.iter_mut().for_each(Engine::crash);
            path.iter().for_each(|path| change(path, &mut self.ctx));
            self.engines.iter_mut().for_each(|engine| engine.start(&mut self.ctx));
        }
        self.life = Some(Life::start(self.next_epoch, path, &self.disks, &self.forms, &mut self.ctx));
        self.next_epoch += 1;
        for thread in 0..COPIERS {
            self.turns[number(Actor::Copier(thread))].frozen_until = 0;
        }
        self.turns[number(Actor::Data)].frozen_until = 0;
    }

    /// Kills the sidecar between two instructions; it is started again later.
    pub(crate) fn kill_sidecar(&mut self) {
        let Some(mut life) = self.life.take() else { return };
        life.leave_disks(&mut self.ctx);
        self.ctx.note(|| format!("sidecar {} dies", life.epoch));
        self.ctx.hit("fault sidecar crash");
        if life.copying() {
            self.ctx.hit("fault sidecar crash, copy running");
        }
        if life.is_torn() {
            self.ctx.hit("fault torn header, dead");
        }
        drop(life);
        let back = self.ctx.now + back_after(&mut self.ctx);
        self.faults.sidecar_starts(back);
    }
}

/// The requests of an engine: paths through one tree, so that prefixes are shared.
fn specs(first_id: u64, ctx: &mut Ctx) -> VecDeque<Spec> {
    let rng = &mut ctx.rng;
    let count = rng.within(6, 20);
    let spec = |id| {
        let length = rng.within(2, 6) as usize;
        let path: Vec<u64> = (0..length).map(|_| rng.below(4) / 3).collect();
        let total = length * WORDS - rng.below(WORDS as u64) as usize;
        let prompt = total - (rng.below(6) as usize).min(total - 1);
        let (awaits, hands_over) = (rng.one_in(8), rng.one_in(3));
        Spec { id: first_id + id, keys: keys(&path), prompt, total, awaits, hands_over }
    };
    (0..count).map(spec).collect()
}

/// Changes a bit of a block in the pool file, or of its header.
fn change(path: &Path, ctx: &mut Ctx) {
    let mut bytes = std::fs::read(path).expect("a pool file");
    let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().expect("inside"));
    let Ok(view) = PoolView::new(word, bytes.len() as u64) else { return };
    let slots = (0..view.segments()).filter_map(|segment| Some((segment, view.geometry(segment)?)));
    let slots = slots.flat_map(|(segment, geometry)| {
        (0..geometry.slot_count)
            .filter_map(move |index| geometry.offset(segment, index))
            .map(move |offset| (offset, geometry))
    });
    let headers = slots.map(|(offset, geometry)| (offset, geometry.place(offset).expect("its own").header));
    let kept: Vec<_> =
        headers.filter(|(_, header)| word((header + slot::STATE) as usize) == pool::COMMITTED).collect();
    if kept.is_empty() {
        return;
    }
    let (offset, header) = ctx.rng.pick(&kept);
    let place = match ctx.rng.below(2) {
        0 => header + ctx.rng.within(slot::GENERATION, slot::PADDING - 1),
        // The words of the first shard, checked by the oracle.
        _ => offset + ctx.rng.below(WORDS as u64 * 8),
    };
    bytes[place as usize] ^= 1 << ctx.rng.below(8);
    let file = std::fs::File::options().write(true).open(path).expect("a pool file");
    file.write_all_at(&bytes[place as usize..][..1], place).expect("written");
    ctx.changed.insert(offset);
    ctx.hit("fault pool file changed");
    ctx.note(|| format!("fault: byte {place} of the pool file is changed"));
}
