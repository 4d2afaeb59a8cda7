//! Worlds of wrong KV: the product's core among correct engines, faulty steps, wrong engines and liars. KV
//! depends on the KV before it. An oracle knows the computation of each block.
//!
//! - No engine loads a block of a step once a chain of that step was found. A request in progress may still
//!   keep blocks computed from such blocks later; their own checks find them.
//! - A correct engine is barred by chains of two savers, or if eight removals were made within the hour.
//! - Nothing computed by an engine in doubt is kept.
//! - At most eight chains an hour are removed.
//! - After the last fault all prompts hit again with correct KV.

mod check;
mod engine;
mod pod;

use std::collections::BTreeSet;
use std::time::Duration;

use shm_protocol::key::BlockHash;
use sidecar::core::{CoreEvent, SessionId};

use self::check::Check;
use self::engine::{Engine, LENGTH, Nature};
use self::pod::{Cause, DOUBT_MAX, HOUR, OTHER, Pod, RIGHT};
use crate::coverage::Coverage;
use crate::rng::{Rng, mix_bits};

/// Bits for causes.
const CAUSES: Cause = 64;
/// Requests of a malicious client.
const TRIES: u64 = 10_000;
/// Rounds over all prompts until all KV is right again.
const ROUNDS: usize = 40;

/// The disturbance of a world.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Disturbance {
    /// Faulty steps of one run.
    Fault,
    /// Faulty steps of any run.
    Faults,
    WrongEngine,
    Liar,
}

#[derive(Debug)]
pub(crate) struct Verdicts {
    rng: Rng,
    pub(crate) cover: Coverage,
    disturbance: Disturbance,
    pod: Pod,
    engines: Vec<Engine>,
    prompts: Vec<Vec<BlockHash>>,
    /// Runs of engines closed out.
    barred: BTreeSet<SessionId>,
    causes: Cause,
    /// Faulty steps to come, and the run of the last one.
    faults: u64,
    faulty: Option<SessionId>,
}

/// Prompts with shared beginnings.
fn prompts(rng: &mut Rng) -> Vec<Vec<BlockHash>> {
    let key = |seed: u64| BlockHash::from_words([mix_bits(seed + 1), mix_bits(seed + 2), 0, 0]);
    let count = rng.within(3, 7);
    let prompt = |number: u64| {
        let (trunk, length) = (number % 3, rng.within(2, LENGTH as u64));
        let shared = 1 + trunk;
        (0..length).map(|at| key(1000 * if at < shared { trunk } else { 10 + number } + 10 * at)).collect()
    };
    (0..count).map(prompt).collect()
}

// === impl Verdicts ===

impl Verdicts {
    /// Without `long_checks`, wrong beginnings are never found.
    pub(crate) fn new(seed: u64, long_checks: bool, events: usize) -> Self {
        let mut rng = Rng::new(seed);
        let disturbance = rng.pick(&[
            Disturbance::Fault,
            Disturbance::Fault,
            Disturbance::Faults,
            Disturbance::WrongEngine,
            Disturbance::Liar,
        ]);
        let pod = Pod::new(events);
        let right = rng.within(1, 3) as usize;
        let other = match disturbance {
            Disturbance::WrongEngine => Some(Nature::Wrong(OTHER)),
            Disturbance::Liar => Some(Nature::Liar),
            _ => None,
        };
        let natures = std::iter::repeat_n(Nature::Right, right).chain(other);
        let engines = natures.enumerate().map(|(number, nature)| {
            let per_mille = if long_checks { rng.pick(&[2, 100, 500]) } else { 0 };
            Engine::new(number, nature, 4096, Check::new(rng.pick(&[1, 2, 8]), per_mille))
        });
        let engines = engines.collect();
        let faults = if other.is_none() { rng.within(1, 3) } else { 0 };
        let (cover, barred, prompts, faulty) =
            (Coverage::default(), BTreeSet::new(), prompts(&mut rng), None);
        Self { rng, cover, disturbance, pod, engines, prompts, barred, causes: OTHER, faults, faulty }
    }

    /// Panics at a broken guarantee.
    pub(crate) fn run(&mut self) {
        self.engines.iter_mut().for_each(|engine| engine.start(&mut self.pod, &mut self.rng));
        for _ in 0..self.rng.within(100, 300) {
            self.advance();
            let index = self.rng.below(self.engines.len() as u64) as usize;
            if self.rng.one_in(40) {
                self.restart(index);
            }
            self.turn(index);
        }
        self.faults = 0;
        self.end_disturbance();
        for round in 0..ROUNDS {
            if round % 10 == 0 {
                // A doubt ends when no kept block is left to agree with.
                self.pod.now += DOUBT_MAX;
            }
            self.ask_all();
        }
        self.audit();
    }

    /// One client sends pairs of prompts with one xxhash, prompts of one block, more prompts than are kept,
    /// and ends requests under check. Panics if a correct engine is harmed.
    pub(crate) fn try_client(seed: u64, is_xxhash: bool, events: usize) {
        let mut rng = Rng::new(seed);
        let mut pod = Pod::new(events);
        let mut engine = Engine::new(0, Nature::Right, 4096, Check::new(2, 500));
        engine.is_xxhash = is_xxhash;
        engine.start(&mut pod, &mut rng);
        for _ in 0..TRIES {
            pod.now += Duration::from_millis(1 + rng.below(100));
            let (prompt, length) = (1 + rng.below(400), rng.within(1, LENGTH as u64));
            let end = [prompt, mix_bits(prompt + 1000 * length), rng.below(2), 0];
            let blocks = (1..length).map(|at| BlockHash::from_words([mix_bits(prompt), at, 0, 0]));
            let keys: Vec<BlockHash> = blocks.chain([BlockHash::from_words(end)]).collect();
            engine.admit(&keys, &mut pod, &mut rng);
            if rng.one_in(4) {
                engine.abort(&mut pod);
            }
            engine.step(rng.within(1, LENGTH as u64) as usize, RIGHT, &mut pod);
            if rng.one_in(8) {
                engine.abort(&mut pod);
            }
            assert!(pod.is_undisputed(), "wrong bytes: one client had a right engine contradict a chain");
        }
        let (found, asked) = engine.hits;
        assert!(found > asked / 4, "{found} hits of {asked} blocks");
    }

    pub(crate) fn trace(&self) -> impl Iterator<Item = &String> {
        self.pod.trace.iter()
    }

    /// Advances the time by seconds, occasionally by minutes.
    fn advance(&mut self) {
        let most = if self.rng.one_in(40) { 400_000 } else { 3_000 };
        self.pod.now += Duration::from_millis(self.rng.below(most));
        self.pod.tell(CoreEvent::Tick);
    }

    fn restart(&mut self, index: usize) {
        self.engines[index].stop(&mut self.pod);
        self.engines[index].start(&mut self.pod, &mut self.rng);
        self.cover.hit("verdicts engine restarts");
    }

    /// Makes a step of an engine, sometimes with a new request.
    fn turn(&mut self, index: usize) {
        if self.rng.one_in(2) {
            let prompt = self.rng.below(self.prompts.len() as u64) as usize;
            self.engines[index].admit(&self.prompts[prompt], &mut self.pod, &mut self.rng);
        }
        if self.engines[index].is_idle() {
            return;
        }
        let (cause, chunk) = (self.cause(index), self.rng.within(1, 4) as usize);
        self.engines[index].step(chunk, cause, &mut self.pod);
        self.judge();
    }

    /// The computation of an engine's next step.
    fn cause(&mut self, index: usize) -> Cause {
        let engine = &self.engines[index];
        let is_new = match engine.nature {
            Nature::Wrong(cause) => return cause,
            Nature::Liar => true,
            Nature::Right => {
                let may_be = self.disturbance == Disturbance::Faults
                    || self.faulty.is_none_or(|faulty| faulty == engine.session());
                self.faults > 0 && may_be && self.rng.one_in(6)
            }
        };
        if !is_new {
            return RIGHT;
        }
        if engine.nature == Nature::Right {
            (self.faults, self.faulty) = (self.faults - 1, Some(engine.session()));
            self.cover.hit("verdicts faulty step");
        }
        self.causes = (self.causes + 1).min(CAUSES - 1);
        self.causes
    }

    /// Panics if an engine was barred without a reason.
    fn judge(&mut self) {
        for engine in &self.engines {
            let session = engine.session();
            if !self.pod.is_barred(&engine.name) || !self.barred.insert(session) {
                continue;
            }
            if engine.nature != Nature::Right {
                self.cover.hit("verdicts wrong engine barred");
                continue;
            }
            self.cover.hit("verdicts right engine barred");
            let said = self.pod.contradictions.get(&session).map(Vec::as_slice).unwrap_or_default();
            let of_doubt = said.chunk_by(|a, b| b.at < a.at + DOUBT_MAX).last().unwrap_or_default();
            let savers: BTreeSet<SessionId> = of_doubt.iter().map(|said| said.kept.saver()).collect();
            let is_at_fault = of_doubt.iter().any(|said| said.own != RIGHT);
            let may_be = is_at_fault || self.disturbance != Disturbance::Fault;
            // A correct saver computed from wrong blocks before their removal: its chain is contradicted too.
            let by_two = savers.len() > 1;
            assert!(
                by_two || may_be && (self.pod.is_spent() || self.pod.retired),
                "right engine {} was closed out: {said:?}",
                engine.name
            );
        }
    }

    /// Stops wrong engines and liars, and lets an hour pass if engines were barred.
    fn end_disturbance(&mut self) {
        let Self { engines, pod, .. } = self;
        engines
            .extract_if(.., |engine| engine.nature != Nature::Right)
            .for_each(|mut engine| engine.stop(pod));
        if self.disturbance == Disturbance::WrongEngine || self.disturbance == Disturbance::Liar {
            self.pod.now += HOUR;
            for index in 0..self.engines.len() {
                self.restart(index);
            }
        }
        for engine in &mut self.engines {
            if engine.check.per_mille > 0 {
                engine.check.per_mille = 1000;
            }
            engine.check.every = 1;
        }
    }

    /// Each engine answers each prompt, in random order.
    fn ask_all(&mut self) {
        for index in 0..self.engines.len() {
            self.engines[index].hits = (0, 0);
            let first = self.rng.below(self.prompts.len() as u64) as usize;
            for at in 0..self.prompts.len() {
                while !self.engines[index].is_idle() {
                    self.engines[index].step(2, RIGHT, &mut self.pod);
                }
                let prompt = (first + at) % self.prompts.len();
                self.engines[index].admit(&self.prompts[prompt], &mut self.pod, &mut self.rng);
                self.advance();
            }
            while !self.engines[index].is_idle() {
                self.engines[index].step(2, RIGHT, &mut self.pod);
            }
            self.judge();
        }
    }

    /// Checks that all KV is correct and all of it is hit.
    fn audit(&mut self) {
        let is_barred = |engine: &Engine| self.barred.contains(&engine.session());
        if !self.engines.iter().all(is_barred) {
            let left = (1..CAUSES).find(|cause| !self.pod.is_free_of(*cause));
            assert!(left.is_none(), "wrong bytes of cause {left:?} are still kept");
        }
        for engine in &self.engines {
            let (found, asked) = engine.hits;
            assert!(is_barred(engine) || found == asked, "{} hits {found} of {asked} blocks", engine.name);
            let (wrong, left) = engine.wrong_reads;
            self.cover.add("verdicts wrong block loaded", wrong);
            self.cover.add("verdicts left block loaded", left);
        }
        self.cover.add("verdicts namespace began again", self.pod.retired.into());
    }
}
