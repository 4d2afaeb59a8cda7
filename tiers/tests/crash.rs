//! A process is killed at any moment while it writes, reads and reclaims; the next one serves the whole
//! blocks, and no others. `KILLS=200 SEED=7 cargo test -p tiers --test crash -- --nocapture` prints the
//! tally.

mod rig;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rig::{Folder, LOG_BYTES, Plan, Rig};
use shm_protocol::random::Random;
use tiers::ssd::Backend;

/// Kills of a plain `cargo test`.
const KILLS: u64 = 6;
/// Kills on one log: by then it has gone round several times.
const LIVES: u64 = 8;
/// The longest time from the first kept block to the end.
const LIFE_US_MAX: u64 = 250_000;
/// The youngest blocks of a life, out of reach of any reclamation: a tenth of the log's bytes.
const YOUNGEST: usize = 50;

/// The findings after the kills.
#[derive(Debug, Default)]
struct Tally {
    /// Blocks reported as kept by a process before it was killed.
    kept: usize,
    /// Their bytes, in logs: reclamation begins before the first is full.
    logs: f64,
    served: u64,
    /// Blocks among the youngest kept ones that were not served.
    lost: u64,
    /// Blocks served without an earlier report.
    unreported: u64,
    /// Blocks with a found header and missing bytes.
    torn: u64,
    wrong: u64,
}

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var_os(name).map(|text| text.to_str().and_then(|text| text.parse().ok()));
    given.map_or(default, |number| number.unwrap_or_else(|| panic!("{name} is no number")))
}

/// Bytes of a block: from one unit to sixteen, mostly not whole units.
fn bytes(block: u64) -> u64 {
    (block * 7919 % 8000 + 1) * 8
}

/// Runs a life until it is killed, and returns the blocks it reported as kept.
fn life(log: &Path, seed: u64, first: u64, kill_us: u64) -> Vec<u64> {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--ignored", "--nocapture"])
        .env("PILLION_TEST_LOG", log)
        .env("PILLION_TEST_SEED", seed.to_string())
        .env("PILLION_TEST_FIRST", first.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let kept = |line: String| line.strip_prefix("kept ").and_then(|number| number.parse().ok());
    let begun: Option<u64> = lines.by_ref().find_map(|line| kept(line.unwrap()));
    let mut all: Vec<u64> = begun.into_iter().collect();
    let listener =
        std::thread::spawn(move || lines.filter_map(|line| kept(line.unwrap())).collect::<Vec<u64>>());
    std::thread::sleep(Duration::from_micros(kill_us));
    child.kill().unwrap();
    child.wait().unwrap();
    all.extend(listener.join().unwrap());
    assert!(!all.is_empty(), "the child of seed {seed} kept nothing");
    all
}

/// Reads the log of a killed process through.
fn look(log: &Path, kept: &[u64], all: &BTreeSet<u64>, next: u64, tally: &mut Tally) {
    let mut rig = Rig::new(&Plan::new(log, LOG_BYTES));
    rig.recover();
    let youngest = &kept[kept.len().saturating_sub(YOUNGEST)..];
    for block in 0..next {
        if !rig.keeps(block) {
            tally.lost += u64::from(youngest.contains(&block));
            continue;
        }
        match rig.read_unchecked(block) {
            Some(true) => {
                tally.served += 1;
                tally.unreported += u64::from(!all.contains(&block));
            }
            Some(false) => tally.wrong += 1,
            None => {
                tally.torn += 1;
                tally.lost += u64::from(youngest.contains(&block));
            }
        }
    }
}

#[test]
fn what_is_served_after_a_kill_is_right() {
    let (kills, seed) = (number("KILLS", KILLS), number("SEED", 1));
    let mut random = Random(seed);
    let mut tally = Tally::default();
    for file in 0..kills.div_ceil(LIVES) {
        let folder = Folder::new("crash");
        let (mut all, mut first) = (BTreeSet::new(), 0);
        for _ in file * LIVES..kills.min((file + 1) * LIVES) {
            let (child, kill_us) = (random.next(), random.next() % LIFE_US_MAX);
            let kept = life(&folder.file(), child, first, kill_us);
            tally.kept += kept.len();
            tally.logs += kept.iter().map(|block| bytes(*block)).sum::<u64>() as f64 / LOG_BYTES as f64;
            // Some were on their way beyond the last known one.
            first = kept.iter().max().unwrap().max(&first) + 1000;
            all.extend(&kept);
            look(&folder.file(), &kept, &all, first, &mut tally);
        }
    }
    eprintln!("{kills} kills, seed {seed}: {tally:?}");
    assert_eq!((tally.wrong, tally.lost), (0, 0), "seed {seed}");
    assert!(tally.served > 0);
}

#[test]
#[ignore = "run, and killed, by what_is_served_after_a_kill_is_right"]
fn child() {
    let log = PathBuf::from(std::env::var_os("PILLION_TEST_LOG").expect("given"));
    let mut random = Random(number("PILLION_TEST_SEED", 0));
    let mut next = number("PILLION_TEST_FIRST", 0);
    let backend = Backend::ALL[(random.next() % 2) as usize];
    let mut rig = Rig::new(&Plan { backend, ..Plan::new(&log, LOG_BYTES) });
    rig.recover();
    loop {
        match random.next() % 8 {
            // Used again: reclamation moves it.
            0 => drop(rig.read(next.saturating_sub(1 + random.next() % 200))),
            // Dropped, or never there: written again.
            1 => {
                let old = random.next() % (next + 1);
                let _ = rig.begin_write(old, bytes(old));
            }
            _ => {
                next += u64::from(rig.begin_write(next, bytes(next)).is_ok());
            }
        }
        rig.pump_within(Duration::ZERO);
        let kept: String = rig
            .take_ended()
            .iter()
            .filter(|ended| ended.1)
            .map(|ended| format!("kept {}\n", ended.0))
            .collect();
        // The parent only goes away after this process has.
        std::io::stdout().write_all(kept.as_bytes()).unwrap();
    }
}
