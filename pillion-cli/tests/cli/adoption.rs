//! A sidecar is killed at any moment under saves; the next one serves the whole blocks of the same pool file,
//! and no others. `KILLS=200 SEED=7 cargo test -p pillion-cli --test adoption -- --nocapture` prints the
//! counts.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::client::engine::{Engine, SAVED};
use crate::client::sidecar::Sidecar;
use crate::client::{BLOCK_BYTES, in_time, now};
use shm_protocol::key::BlockHash;
use shm_protocol::pool;
use shm_protocol::random::Random;

/// Bytes of the pool.
const POOL_BYTES: u64 = 64 << 20;
/// Kills of sidecars with one pool file: by then most of it is full.
const LIVES: u64 = 8;
/// The longest time from the first save of a life to its end.
const LIFE_US_MAX: u64 = 40_000;
/// Within this time after its start, a sidecar has not emptied a pool that engines may still read: less than
/// its 5 s.
const HELD: Duration = Duration::from_secs(4);
/// Kills of a plain `cargo test`.
const KILLS: u64 = 8;

fn number(name: &str, default: u64) -> u64 {
    let given = std::env::var_os(name).map(|text| text.to_str().and_then(|text| text.parse().ok()));
    given.map_or(default, |number| number.unwrap_or_else(|| panic!("{name} is no number")))
}

/// A pool file's name, and a folder for the socket.
struct Place {
    pool: PathBuf,
    folder: tempfile::TempDir,
}

/// The counts after the kills.
#[derive(Debug, Default)]
struct Tally {
    /// Blocks whose save was reported, in all lives of a file.
    kept: u64,
    served: u64,
    /// Kept and not served, of a file without room for all blocks saved.
    evicted: u64,
    /// Kept and not served, because the kill came before their checksums.
    unsummed: u64,
    /// Kept with their checksums, and still not served.
    lost: u64,
    /// Served, and their save was not reported before the kill.
    unreported: u64,
    /// Kills with slots half-written, or without checksums.
    torn: u64,
    wrong: u64,
}

// === impl Place ===

impl Place {
    fn new(name: &str) -> Self {
        let pool = format!("/dev/shm/pillion-test-{}-{name}", std::process::id()).into();
        Self { pool, folder: tempfile::tempdir().unwrap() }
    }

    fn start(&self, dram: &str) -> Sidecar {
        Sidecar::start(self.folder.path(), &[&"--dram", &dram, &"--pool-path", &self.pool])
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.pool);
    }
}

/// Saves until the sidecar is killed, `after` the first save was posted. Returns the posted keys, and how
/// many of them, from the first, were reported as kept.
fn save_until_killed(sidecar: Sidecar, after: Duration, stamp: &mut u64) -> (Vec<BlockHash>, usize) {
    let mut engine = Engine::connect(&sidecar);
    let (mut posted, mut reported) = (engine.post_save(stamp), 0);
    let killer = std::thread::spawn(move || {
        std::thread::sleep(after);
        sidecar.kill();
    });
    while !engine.scheduler.sidecar_gone() {
        let Some(saved) = engine.scheduler.try_saved() else {
            std::thread::sleep(Duration::from_micros(50));
            continue;
        };
        if saved.dropped > 0 {
            // No room: later saves would not be kept either.
            break;
        }
        assert_eq!((saved.committed, saved.present, saved.cancelled), (SAVED.len() as u32, 0, 0));
        reported = posted.len();
        posted.extend(engine.post_save(stamp));
    }
    killer.join().unwrap();
    (posted, reported)
}

// === tests ===

/// Count of blocks in a full pool.
fn room() -> u64 {
    let segment_bytes = tiers::dram::segment_bytes_for(POOL_BYTES);
    let slots = pool::slot_count(segment_bytes, BLOCK_BYTES).expect("small blocks");
    POOL_BYTES / segment_bytes * u64::from(slots)
}

/// Waits until every saved block has its checksum.
fn wait_summed(sidecar: &Sidecar) {
    sidecar.wait_metric("pillion_saved_blocks_total", |blocks| blocks > 0);
    sidecar.wait_metric("pillion_pool_unsummed_blocks", |blocks| blocks == 0);
}

/// `kills` kills of sidecars with shared pool files, `LIVES` each.
fn kill_at_random(kills: u64, seed: u64) -> Tally {
    let (mut tally, mut random, mut stamp) = (Tally::default(), Random(seed), 0);
    for file in 0..kills.div_ceil(LIVES) {
        let place = Place::new(&format!("kills-{seed}-{file}"));
        // `summed`: the kept blocks whose checksums are known to be written.
        let (mut posted, mut kept, mut summed) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        let mut posted_total = 0_u64;
        for life in 0..LIVES.min(kills - file * LIVES) + 1 {
            let sidecar = place.start(&format!("{}MiB", POOL_BYTES >> 20));
            sidecar.wait_started();
            let mut engine = Engine::connect(&sidecar);
            let (served, wrong) = engine.served(&posted);
            let served: BTreeSet<BlockHash> = served.into_iter().collect();
            sidecar.wait_metric("pillion_adoption_unverified_blocks", |blocks| blocks == 0);
            assert_eq!(sidecar.metric("pillion_adoption_corrupt_total"), 0, "{file} {life}");
            assert_eq!(sidecar.metric("pillion_adopted_blocks_total"), served.len() as u64, "{file} {life}");
            tally.torn += u64::from(sidecar.metric("pillion_adoption_dropped_total") > 0);
            tally.wrong += wrong;
            let missing = summed.difference(&served).count() as u64;
            let evicted = missing.min(posted_total.saturating_sub(room()));
            tally.evicted += evicted;
            tally.lost += missing - evicted;
            tally.unsummed += kept.difference(&served).count() as u64 - missing;
            tally.unreported += served.difference(&kept).count() as u64;
            tally.served += served.len() as u64;
            tally.kept += kept.len() as u64;
            // A lost block does not come back, and each miss is a query.
            posted.retain(|key| served.contains(key));
            (kept, summed) = (served.clone(), served);
            if life % 2 == 0 {
                let keys = engine.post_save(&mut stamp);
                if engine.scheduler.saved().committed > 0 {
                    wait_summed(&sidecar);
                    kept.extend(&keys);
                    summed.extend(&keys);
                }
                posted_total += keys.len() as u64;
                posted.extend(keys);
            }
            drop(engine);
            if life == LIVES.min(kills - file * LIVES) {
                break;
            }
            let after = Duration::from_micros(random.below(LIFE_US_MAX));
            let (keys, reported) = save_until_killed(sidecar, after, &mut stamp);
            kept.extend(&keys[..reported]);
            posted_total += keys.len() as u64;
            posted.extend(keys);
        }
    }
    tally
}

#[test]
fn after_a_kill_at_any_moment_what_is_served_is_whole() {
    let (kills, seed) = (number("KILLS", KILLS), number("SEED", 1));
    let tally = kill_at_random(kills, seed);
    eprintln!("{kills} kills, seed {seed}: {tally:?}");
    assert_eq!((tally.wrong, tally.lost), (0, 0), "seed {seed}: {tally:?}");
    assert!(tally.served > 0, "{tally:?}");
}

#[test]
fn a_pool_that_cannot_be_adopted_is_served_empty_and_said() {
    in_time("a kill, or a look, at a start", served_empty);
}

fn served_empty() -> Option<()> {
    let held = |began: Instant| (began.elapsed() < HELD).then_some(());
    let place = Place::new("other");
    let sidecar = place.start("16MiB");
    let mut engine = Engine::connect(&sidecar);
    let keys = engine.save(&mut 0);
    wait_summed(&sidecar);
    sidecar.kill();

    let sidecar = place.start("16MiB");
    sidecar.wait_started();
    assert_eq!(Engine::connect(&sidecar).served(&keys), (keys.clone(), 0));
    sidecar.kill();
    let file = std::fs::OpenOptions::new().write(true).open(&place.pool).unwrap();
    rustix::io::pwrite(&file, &1u64.to_le_bytes(), pool::header::VERSION).unwrap();

    // Killed before it has emptied the file: the next sidecar must not adopt the file.
    let began = now();
    place.start("16MiB").kill();
    held(began)?;
    let began = now();
    let sidecar = place.start("16MiB");
    let page = sidecar.page("/readyz").expect("ready");
    held(began)?;
    assert!(page.contains("0 of 4 segments in service"), "engines may read the old pool for a while: {page}");
    let mut engine = Engine::connect(&sidecar);
    assert_eq!(engine.served(&keys), (Vec::new(), 0));
    let log = std::fs::read_to_string(place.folder.path().join("log")).unwrap();
    assert!(log.contains("while it emptied the file") && log.contains("starts empty"), "{log}");
    sidecar.wait_started();
    engine.save(&mut 1000);
    Some(())
}
