//! Faults of a world; the seed chooses each of them and its time.

use crate::ctx::{Actor, COPIERS, Ctx, Micros};
use crate::engine::Engine;
use crate::world::World;

/// The longest freeze: longer than the deadline of a load, a lease, and the life of an earlier pool's
/// mapping.
const FREEZE_MAX: Micros = 120_000;
/// Time that a draining sidecar waits for its copies.
const GRACE: Micros = 10_000;

/// The faults still to come.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    left: u64,
    next: Micros,
    sidecar_starts: Option<Micros>,
    /// Latest end of a draining sidecar.
    sidecar_ends: Option<Micros>,
}

/// A kind of fault.
#[derive(Copy, Clone, Debug)]
enum Fault {
    CrashEngine,
    CrashRank,
    CrashSidecar,
    DrainSidecar,
    FreezeSidecar,
    FreezeScheduler,
    FreezeWorker,
    FreezeThread,
    FreezeCopiers,
    Cut,
    CutScheduler,
    FloodScheduler,
    FloodWorker,
    Violate,
}

/// Faults at any time.
const FAULTS: [Fault; 16] = [
    Fault::CrashEngine,
    Fault::CrashRank,
    Fault::CrashSidecar,
    Fault::CrashSidecar,
    Fault::DrainSidecar,
    Fault::FreezeSidecar,
    Fault::FreezeScheduler,
    Fault::FreezeScheduler,
    Fault::FreezeWorker,
    Fault::FreezeThread,
    Fault::FreezeThread,
    Fault::Cut,
    Fault::Cut,
    Fault::FloodScheduler,
    Fault::FloodWorker,
    Fault::Violate,
];
/// Faults during a load, when most protections are needed.
const FAULTS_LOADING: [Fault; 14] = [
    Fault::CrashRank,
    Fault::CrashSidecar,
    Fault::CrashSidecar,
    Fault::FreezeSidecar,
    Fault::FreezeThread,
    Fault::FreezeCopiers,
    Fault::FreezeCopiers,
    Fault::FreezeCopiers,
    Fault::FreezeWorker,
    Fault::FloodWorker,
    Fault::Cut,
    Fault::CutScheduler,
    Fault::CutScheduler,
    Fault::CutScheduler,
];

// === impl Faults ===

impl Faults {
    pub(crate) fn new(left: u64) -> Self {
        Self { left, next: 2_000, sidecar_starts: None, sidecar_ends: None }
    }

    /// True if no fault is active and the sidecar runs.
    pub(crate) fn over(&self) -> bool {
        self.sidecar_starts.is_none() && self.sidecar_ends.is_none()
    }

    pub(crate) fn sidecar_starts(&mut self, at: Micros) {
        self.sidecar_starts = Some(at);
    }

    /// Ends the faults.
    pub(crate) fn end(&mut self) {
        self.left = 0;
    }

    /// Returns true if a sidecar stopped in the middle of a header dies there.
    pub(crate) fn may_kill(&mut self, ctx: &mut Ctx) -> bool {
        let may = self.left > 0 && ctx.rng.one_in(2);
        self.left -= u64::from(may);
        may
    }

    /// Causes the faults that are due. Returns the time until the next look.
    pub(crate) fn act(&mut self, world: &mut World) -> Micros {
        let now = world.ctx.now;
        if self
            .sidecar_ends
            .is_some_and(|by| now >= by || !world.life.as_ref().is_some_and(|life| life.busy()))
        {
            self.sidecar_ends = None;
            world.ctx.hit("fault sidecar restart while serving");
            self.kill_sidecar(world);
        }
        if self.sidecar_starts.is_some_and(|at| now >= at) {
            self.sidecar_starts = None;
            world.start_sidecar();
        }
        for index in 0..world.engines.len() {
            let engine = &mut world.engines[index];
            if engine.dies_at.is_some_and(|at| now >= at) {
                engine.crash();
                engine.start(&mut world.ctx);
            }
        }
        if self.left > 0 && world.ctx.rng.one_in(4) {
            self.restart_under_a_plan(world);
        }
        let busy = !world.engines.iter().all(|engine| engine.done());
        let loading = world.engines.iter().any(|engine| engine.loading()) && world.ctx.rng.one_in(4);
        if self.left > 0 && (now >= self.next || loading) && busy {
            self.left -= 1;
            self.next = now + world.ctx.rng.below(30_000);
            let choices: &[Fault] = if loading { &FAULTS_LOADING } else { &FAULTS };
            let fault = world.ctx.rng.pick(choices);
            world.ctx.note(|| format!("fault: {fault:?}"));
            self.strike(fault, world);
        }
        world.ctx.pause(200)
    }

    fn kill_sidecar(&mut self, world: &mut World) {
        // The world notes the restart in its own `faults`, which this value replaces afterwards.
        if world.life.is_some() {
            world.kill_sidecar();
            self.sidecar_starts = Some(world.ctx.now + back_after(&mut world.ctx));
            self.sidecar_ends = None;
        }
    }

    /// Replaces the sidecar of a planned load before the ranks learn of the plan.
    fn restart_under_a_plan(&mut self, world: &mut World) {
        let plans = |engine: &Engine| engine.scheduler.as_ref().is_some_and(|scheduler| scheduler.plans());
        if let Some(index) = world.engines.iter().position(plans) {
            self.left -= 1;
            world.ctx.note(|| "fault: the sidecar is replaced under a plan".into());
            let pause = world.ctx.rng.within(1_000, 60_000);
            world.freeze(&[Actor::Scheduler(index)], pause);
            self.kill_sidecar(world);
        }
    }

    fn strike(&mut self, fault: Fault, world: &mut World) {
        let index = world.ctx.rng.below(world.engines.len() as u64) as usize;
        let rank = world.ctx.rng.below(world.engines[index].model.world as u64) as usize;
        let pause = world.ctx.rng.below(FREEZE_MAX);
        match fault {
            Fault::CrashEngine => {
                world.ctx.hit("fault engine crash");
                if world.life.as_ref().is_some_and(|life| life.copying()) {
                    world.ctx.hit("fault engine crash, copy running");
                }
                let engine = &mut world.engines[index];
                engine.crash();
                engine.start(&mut world.ctx);
            }
            Fault::CrashRank => {
                // vLLM ends the engine after the end of a rank; until then the other ranks run on.
                let engine = &mut world.engines[index];
                if engine.alive() {
                    engine.crash_rank(rank);
                    engine.dies_at = Some(world.ctx.now + world.ctx.rng.below(5_000));
                    world.ctx.hit("fault rank dies first");
                }
            }
            Fault::CrashSidecar => self.kill_sidecar(world),
            Fault::DrainSidecar => {
                if let Some(life) = &mut world.life {
                    life.drain();
                    self.sidecar_ends = Some(world.ctx.now + GRACE);
                }
            }
            Fault::FreezeSidecar
            | Fault::FreezeScheduler
            | Fault::FreezeWorker
            | Fault::FreezeThread
            | Fault::FreezeCopiers => freeze(fault, index, rank, pause, world),
            Fault::Cut => {
                if let Some(life) = &mut world.life {
                    life.cut(false, &mut world.ctx);
                }
            }
            Fault::CutScheduler => {
                // The scheduler's leases and promises end while its ranks still copy.
                if let Some(life) = &mut world.life {
                    life.cut(true, &mut world.ctx);
                }
            }
            Fault::Violate => {
                if let Some(scheduler) = &mut world.engines[index].scheduler {
                    scheduler.misbehave(&mut world.ctx);
                }
            }
            Fault::FloodScheduler => {
                world.freeze(&[Actor::Data], pause);
                if let Some(scheduler) = &mut world.engines[index].scheduler {
                    scheduler.flood();
                }
            }
            Fault::FloodWorker => {
                world.freeze(&[Actor::Data], pause);
                if let Some(worker) = &mut world.engines[index].workers[rank] {
                    worker.flood();
                }
            }
        }
    }
}

/// Freezes some threads for a while.
fn freeze(fault: Fault, index: usize, rank: usize, pause: Micros, world: &mut World) {
    let copiers: Vec<Actor> = (0..COPIERS).map(Actor::Copier).collect();
    let (point, threads, pause) = match fault {
        Fault::FreezeSidecar => ("fault freeze sidecar", [copiers, vec![Actor::Data]].concat(), pause),
        // Queued loads are copied long after their engine stopped waiting for them.
        Fault::FreezeCopiers => ("fault freeze copiers", copiers, FREEZE_MAX / 2 + pause),
        Fault::FreezeScheduler => ("fault freeze scheduler", vec![Actor::Scheduler(index)], pause),
        Fault::FreezeWorker => {
            ("fault freeze worker", vec![Actor::Worker(index, rank), Actor::Rescuer(index, rank)], pause)
        }
        _ => {
            let one = [Actor::Data, Actor::Copier(0), Actor::Copier(1), Actor::Rescuer(index, rank)];
            ("fault freeze thread", vec![world.ctx.rng.pick(&one)], pause)
        }
    };
    world.freeze(&threads, pause);
    world.ctx.hit(point);
}

/// Time until a dead sidecar is started again.
pub(crate) fn back_after(ctx: &mut Ctx) -> Micros {
    let longest = ctx.rng.pick(&[500, 40_000]);
    ctx.rng.below(longest)
}
