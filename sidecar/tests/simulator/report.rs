//! Runs many worlds on all cores, and reports their coverage and the seed of a failed one.

use std::io::Write;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use crate::coverage::{Coverage, points};
use crate::rng::mix_bits;
use crate::verdicts::Verdicts;
use crate::world::World;

/// Events printed of a failed run.
const EVENTS: usize = 60;
/// Runs of a plain `cargo test`.
const RUNS: u64 = 100;
/// From this many runs on, every point must have been reached.
const RUNS_COVERING: u64 = 50_000;
/// Worlds without a protection: one must fail.
const RUNS_THAT_FAIL: u64 = 10_000;
/// Start of a failure message for wrong bytes.
const WRONG_BYTES: &str = "wrong bytes";

/// A kind of world.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Form {
    /// Processes, copies and their faults.
    Processes,
    /// Unfinished loads count as finished.
    WithoutRescue,
    /// Wrong KV.
    Verdicts,
    /// The same, and engines make no long checks.
    WithoutLongChecks,
}

/// The options of the command line.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    runs: u64,
    seed: u64,
    replay: Option<u64>,
    form: Form,
    events: usize,
}

/// The message of a failed world.
#[derive(Clone, Debug)]
struct Failure {
    seed: u64,
    text: String,
}

#[derive(Debug, Default)]
pub(crate) struct Report {
    coverage: Mutex<Coverage>,
    /// Digest of all actions of every world: two builds with equal decisions print the same.
    fingerprint: AtomicU64,
}

// === impl Options ===

impl Options {
    /// Reads the arguments, and ignores those passed by `cargo test` to every test.
    pub(crate) fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Self, String> {
        let mut options = Self { runs: RUNS, seed: 1, replay: None, form: Form::Processes, events: EVENTS };
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
                "--without-rescue" => options.form = Form::WithoutRescue,
                "--verdicts" => options.form = Form::Verdicts,
                "--without-long-checks" => options.form = Form::WithoutLongChecks,
                _ => {}
            }
        }
        Ok(options)
    }
}

// === impl Report ===

impl Report {
    pub(crate) fn run(&self, options: &Options) -> ExitCode {
        if let Some(seed) = options.replay {
            return replay(seed, options.form, options.events);
        }
        // The message of a failure is printed with its seed, not by its thread at once.
        panic::set_hook(Box::new(|_| {}));
        say(&format!("simulator: {} runs from seed {}", options.runs, options.seed));
        for form in [Form::Verdicts, Form::Processes] {
            if let Some(failure) = self.many(options.seed, options.runs, form).first() {
                return tell(failure, form);
            }
        }
        say(&format!(
            "simulator: all that was done digests to {:016x}",
            self.fingerprint.load(Ordering::Relaxed)
        ));
        let mut sound = self.print_coverage(options.runs);
        sound &= self.check_oracle(options.seed, Form::WithoutRescue);
        sound &= self.check_oracle(options.seed, Form::WithoutLongChecks);
        sound &= check_client(options.seed);
        sound &= check_replay(options.seed);
        if sound { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    /// Runs worlds on every core until one fails.
    fn many(&self, first: u64, runs: u64, form: Form) -> Vec<Failure> {
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
                        let ended = one(seed_of(first, index), form, 0);
                        coverage.merge(&ended.cover);
                        self.fingerprint.fetch_xor(ended.fingerprint, Ordering::Relaxed);
                        if let Some(failure) = ended.failure {
                            failures.lock().expect("no panic under it").push(failure);
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                    self.coverage.lock().expect("no panic under it").merge(&coverage);
                });
            }
        });
        failures.into_inner().expect("no panic under it")
    }

    /// Returns true if the oracle finds wrong bytes in worlds without a protection. A rank's copies and an
    /// engine's checks are simulator code, so this needs no second build; scripts/mutations removes the
    /// product's protections.
    fn check_oracle(&self, first: u64, form: Form) -> bool {
        let failures = Self::default().many(first, RUNS_THAT_FAIL, form);
        let Some(Failure { seed, text }) = failures.iter().min_by_key(|f| f.seed ^ mix_bits(first)) else {
            eprintln!("simulator: {RUNS_THAT_FAIL} runs of {form:?}, and none found wrong bytes");
            return false;
        };
        if !text.starts_with(WRONG_BYTES) {
            eprintln!("simulator: {form:?}, seed {seed} failed by: {text}");
            return false;
        }
        let run = (seed ^ mix_bits(first)) + 1;
        say(&format!("simulator: {form:?}, run {run} fails, seed {seed}: {text}"));
        true
    }

    /// Prints the coverage. Returns false if enough runs left out a point.
    fn print_coverage(&self, runs: u64) -> bool {
        let coverage = self.coverage.lock().expect("no panic under it");
        for point in points() {
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
    mix_bits(first) ^ index
}

/// The end of a world.
struct Ended {
    cover: Coverage,
    fingerprint: u64,
    trace: Vec<String>,
    failure: Option<Failure>,
}

/// Runs one world.
fn one(seed: u64, form: Form, events: usize) -> Ended {
    match form {
        Form::Processes | Form::WithoutRescue => {
            let mut world = World::new(seed, form == Form::WithoutRescue, events);
            let failure = caught(seed, || world.run());
            let trace = world.ctx.trace().cloned().collect();
            Ended { cover: world.ctx.cover, fingerprint: world.ctx.fingerprint, trace, failure }
        }
        Form::Verdicts | Form::WithoutLongChecks => {
            let mut world = Verdicts::new(seed, form == Form::Verdicts, events);
            let failure = caught(seed, || world.run());
            let trace = world.trace().cloned().collect();
            Ended { cover: world.cover, fingerprint: 0, trace, failure }
        }
    }
}

/// Runs a closure. Returns its panic.
fn caught(seed: u64, run: impl FnOnce()) -> Option<Failure> {
    let payload = panic::catch_unwind(AssertUnwindSafe(run)).err()?;
    let text = payload.downcast_ref::<String>().cloned();
    let text = text.or_else(|| payload.downcast_ref::<&str>().map(ToString::to_string));
    Some(Failure { seed, text: text.unwrap_or_else(|| "a panic without words".into()) })
}

fn say(line: &str) {
    // A closed pipe must not hide the exit status.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// Runs the failed seed again with a trace, and prints the end of the trace.
fn tell(failure: &Failure, form: Form) -> ExitCode {
    let Failure { seed, text } = failure;
    eprintln!("simulator: seed {seed} failed: {text}");
    let again = one(*seed, form, EVENTS);
    again.trace.iter().for_each(|line| eprintln!("{line}"));
    match again.failure {
        None => eprintln!("simulator: the seed did not fail again: something depends on more than the seed"),
        Some(again) if again.text != *text => eprintln!("simulator: it failed differently: {}", again.text),
        Some(_) => {}
    }
    let program = std::env::args().next().unwrap_or_default();
    let flag = if form == Form::Verdicts { " --verdicts" } else { "" };
    eprintln!("simulator: replay with: {program} --replay {seed}{flag}");
    ExitCode::FAILURE
}

fn replay(seed: u64, form: Form, events: usize) -> ExitCode {
    let ended = one(seed, form, events);
    ended.trace.iter().for_each(|line| say(line));
    let Some(Failure { text, .. }) = ended.failure else {
        say(&format!("simulator: seed {seed} holds"));
        return ExitCode::SUCCESS;
    };
    eprintln!("simulator: seed {seed} fails: {text}");
    ExitCode::FAILURE
}

/// Returns true if prompts of one xxhash harm no other client, and would without the second digest.
fn check_client(seed: u64) -> bool {
    let tried = [false, true].map(|is_xxhash| caught(seed, || Verdicts::try_client(seed, is_xxhash, 0)));
    let [None, Some(Failure { text, .. })] = &tried else {
        eprintln!("simulator: a client, with the second digest and without: {tried:?}");
        return false;
    };
    let is_found = text.starts_with(WRONG_BYTES);
    say(&format!("simulator: a client without the second digest fails: {text}"));
    is_found
}

/// Returns true if a seed always gives the same run.
fn check_replay(first: u64) -> bool {
    let same = (0..20).all(|index| {
        let seed = seed_of(first, index);
        let prints = [0, 1].map(|_| one(seed, Form::Processes, 0).fingerprint);
        prints[0] == prints[1]
    });
    if !same {
        eprintln!("simulator: a seed ran differently twice");
    }
    same
}
