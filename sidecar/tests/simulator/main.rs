//! The deterministic simulator: the sidecar's core, its session and ring code, the shim's core with its
//! policy, and the headers of the pool, all from the product, among simulated engines, copies, disks, clocks
//! and faults. A seed is a world; an oracle knows the origin of every byte.
//!
//! ```text
//! simulator [--runs N] [--seed S]    N worlds of processes and N of wrong KV from seed S on; then worlds that must fail
//! simulator --replay SEED [--without-rescue]    one world, with its last events
//! simulator --replay SEED --verdicts | --without-long-checks    one world of wrong KV
//! ```

mod connection;
mod coverage;
mod ctx;
mod engine;
mod faults;
mod fingerprint;
mod ledger;
mod life;
mod origin;
mod report;
mod rng;
mod verdicts;
mod world;

use std::process::ExitCode;

use self::report::{Options, Report};

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)) {
        Ok(options) => Report::default().run(&options),
        Err(text) => {
            eprintln!("{text}");
            ExitCode::from(2)
        }
    }
}
