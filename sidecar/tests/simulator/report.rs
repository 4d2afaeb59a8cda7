//! Many worlds on all cores, what they reached, and the seed of whichever failed.

use std::io::Write;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::coverage::{Coverage, POINTS};
use crate::ctx::Canary;
use crate::rng::mix;
use crate::world::World;

/// Events that are printed of a run that failed.
const EVENTS: usize = 60;
/// Runs of a plain `cargo test`.
const RUNS: u64 = 1_000;
/// From this many runs on every point must have been reached.
const RUNS_COVERING: u64 = 50_000;
/// Worlds without a protection among which one must fail.
const CANARY_RUNS: u64 = 10_000;
/// How a failure begins that only wrong bytes can cause.
const WRONG_BYTES: &str = "wrong bytes";

/// What the command line asks for.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    runs: u64,
    seed: u64,
    replay: Option<u64>,
    canary: Canary,
    events: usize,
}

/// What a world that failed said.
#[derive(Clone, Debug)]
struct Failure {
    seed: u64,
    text: String,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Report {
    coverage: Mutex<Coverage>,
}

// === impl Options ===

impl Options {
    /// Reads the arguments; those that `cargo test` passes to every test are ignored.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { runs: RUNS, seed: 1, replay: None, canary: Canary::None, events: EVENTS };
        while let Some(argument) = arguments.next() {
            let mut number = || {
                let value = arguments.next().and_then(|text| text.parse().ok());
                value.ok_or_else(|| format!("{argument} needs a number"))
            };
            match argument.as_str() {
                "--runs" => options.runs = number()?,
                "--seed" => options.seed = number()?,
                "--replay" => options.replay = Some(number()?),
                "--events" => options.events = number()? as usize,
                "--without" => {
                    let name = arguments.next().unwrap_or_default();
                    let found = CANARIES.iter().find(|(known, _, _)| *known == name);
                    options.canary = found.ok_or_else(|| format!("no protection is called {name}"))?.1;
                }
                _ => {}
            }
        }
        Ok(options)
    }
}

/// Protections of the model that are taken away, and whether its failure must be one of bytes.
const CANARIES: [(&str, Canary, &str); 4] = [
    ("cancel", Canary::NoCancel, "blocks are used again without CANCEL"),
    ("drain", Canary::CommitWithoutDrain, "saves are committed before the rings are read"),
    ("gate", Canary::GateIgnored, "copies do not look at the gate"),
    ("rescue", Canary::NoRescue, "unfinished loads are called finished"),
];

// === impl Report ===

impl Report {
    pub(crate) fn run(&self, options: &Options) -> ExitCode {
        if let Some(seed) = options.replay {
            return replay(seed, options.canary, options.events);
        }
        // The message of a failure is told with its seed, not by each thread as it comes.
        panic::set_hook(Box::new(|_| {}));
        say(&format!("simulator: {} runs from seed {}", options.runs, options.seed));
        let failures = self.many(options.seed, options.runs, options.canary);
        if let Some(failure) = failures.first() {
            return tell(failure, options.canary);
        }
        let mut sound = self.print_coverage(options.runs);
        if options.canary == Canary::None {
            for (name, canary, text) in CANARIES {
                sound &= self.check_canary(name, canary, text, options.seed);
            }
            sound &= check_replay(options.seed);
        }
        if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Runs worlds on every core until one fails.
    fn many(&self, first: u64, runs: u64, canary: Canary) -> Vec<Failure> {
        let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let failures = Mutex::new(Vec::new());
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let mut coverage = Coverage::default();
                    while !stop.load(Ordering::Relaxed) {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= runs {
                            break;
                        }
                        match one(seed_of(first, index), canary, 0) {
                            (world, None) => coverage.merge(&world.ctx.cover),
                            (_, Some(failure)) => {
                                failures.lock().expect("no panic under it").push(failure);
                                stop.store(true, Ordering::Relaxed);
                            }
                        }
                    }
                    self.coverage.lock().expect("no panic under it").merge(&coverage);
                });
            }
        });
        failures.into_inner().expect("no panic under it")
    }

    /// Whether worlds without a protection are found out by wrong bytes.
    fn check_canary(&self, name: &str, canary: Canary, text: &str, first: u64) -> bool {
        let failures = self.many(first, CANARY_RUNS, canary);
        let Some(Failure { seed, text: found }) = failures.iter().min_by_key(|f| f.seed ^ mix(first)) else {
            eprintln!("simulator: {text}, and {CANARY_RUNS} runs did not notice");
            return false;
        };
        let run = (seed ^ mix(first)) + 1;
        if !found.starts_with(WRONG_BYTES) {
            eprintln!("simulator: without {name}, seed {seed} failed by: {found}");
            return false;
        }
        say(&format!("canary: {text}: found by run {run}, seed {seed}: {found}"));
        true
    }

    /// Prints what was reached; false where enough runs left something out.
    fn print_coverage(&self, runs: u64) -> bool {
        let coverage = self.coverage.lock().expect("no panic under it");
        for point in POINTS {
            say(&format!("{:>12}  {point}", coverage.count(point)));
        }
        let missing = coverage.missing();
        if missing.is_empty() || runs < RUNS_COVERING {
            return true;
        }
        eprintln!("simulator: never reached in {runs} runs: {missing:?}");
        false
    }
}

/// Seeds lie far apart, so that neighbouring `--seed` values share none.
fn seed_of(first: u64, index: u64) -> u64 {
    mix(first) ^ index
}

/// Runs one world; how it ended, and its failure if it failed.
fn one(seed: u64, canary: Canary, events: usize) -> (World, Option<Failure>) {
    let mut world = World::new(seed, canary, events);
    let failure = panic::catch_unwind(AssertUnwindSafe(|| world.run())).err().map(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
        Failure { seed, text: text.unwrap_or_else(|| "a panic without words".into()) }
    });
    (world, failure)
}

fn say(line: &str) {
    // A closed pipe must not hide the exit status.
    let _ = writeln!(std::io::stdout(), "{line}");
}

fn flag(canary: Canary) -> String {
    let name = CANARIES.iter().find(|(_, known, _)| *known == canary).map(|(name, _, _)| *name);
    name.map(|name| format!(" --without {name}")).unwrap_or_default()
}

/// Runs the failed seed again, with a trace, and prints its end.
fn tell(failure: &Failure, canary: Canary) -> ExitCode {
    let Failure { seed, text } = failure;
    eprintln!("simulator: seed {seed} failed: {text}");
    match one(*seed, canary, EVENTS) {
        (_, None) => {
            eprintln!("simulator: the seed did not fail again: something depends on more than the seed")
        }
        (world, Some(again)) => {
            world.ctx.trace().for_each(|line| eprintln!("{line}"));
            if again.text != *text {
                eprintln!("simulator: it failed differently: {}", again.text);
            }
        }
    }
    let flag = flag(canary);
    let program = std::env::args().next().unwrap_or_default();
    eprintln!("simulator: replay with: {program} --replay {seed}{flag}");
    ExitCode::FAILURE
}

fn replay(seed: u64, canary: Canary, events: usize) -> ExitCode {
    let (world, failure) = one(seed, canary, events);
    world.ctx.trace().for_each(|line| say(line));
    match failure {
        None => say(&format!("simulator: seed {seed} holds; {} us simulated", world.ctx.now)),
        Some(Failure { text, .. }) => {
            eprintln!("simulator: seed {seed} fails: {text}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Whether a seed means one run.
fn check_replay(first: u64) -> bool {
    let same = (0..20).all(|index| {
        let seed = seed_of(first, index);
        let prints = [0, 1].map(|_| one(seed, Canary::None, 0).0.ctx.fingerprint);
        prints[0] == prints[1]
    });
    if !same {
        eprintln!("simulator: a seed ran differently twice");
    }
    same
}
