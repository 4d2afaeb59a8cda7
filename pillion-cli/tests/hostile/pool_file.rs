//! A pool file cut, punched, deleted or replaced under an engine's saves and loads, or changed between two
//! sidecars: the result is misses and no wrong byte, and the sidecar lives.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use shm_protocol::key::BlockHash;
use shm_protocol::message::{Kind, Message, Status};
use shm_protocol::pool::{PoolView, slot};

use crate::client::engine::{Engine, SAVED};
use crate::client::sidecar::Sidecar;
use crate::client::watch;

/// Targets of loads: blocks that are not saved.
const LOADED: std::ops::Range<u32> = 101..127;
/// Rounds under load after the damage.
const ROUNDS: u32 = 20;

/// A damage of a pool file, and true if it loses the file's bytes.
type Damage = (&'static str, fn(&Path), bool);
const DAMAGES: [Damage; 6] = [
    ("cut to nothing", |path| cut(path, 0), true),
    ("cut behind its first slots", |path| cut(path, (2 << 20) + (300 << 10)), true),
    (
        "cut and made as long as before",
        |path| {
            let bytes = fs::metadata(path).unwrap().len();
            cut(path, (2 << 20) + (300 << 10));
            cut(path, bytes);
        },
        true,
    ),
    (
        "punched",
        |path| {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(opened(path), punch, (2 << 20) + (200 << 10), 1 << 20).unwrap();
        },
        true,
    ),
    ("deleted", |path| fs::remove_file(path).unwrap(), false),
    (
        "replaced",
        |path| {
            let other = path.with_extension("other");
            fs::write(&other, "something else").unwrap();
            fs::rename(other, path).unwrap();
        },
        false,
    ),
];

fn opened(path: &Path) -> File {
    File::options().write(true).open(path).unwrap()
}

fn cut(path: &Path, bytes: u64) {
    opened(path).set_len(bytes).unwrap();
}

/// Queries the first keys and loads the served blocks. Returns their number and the load's end. A load that
/// ends well has no wrong byte.
fn load(engine: &mut Engine, keys: &[BlockHash]) -> (u32, Option<Status>) {
    let wanted = &keys[..LOADED.len()];
    let (lease, found) = engine.ask_early(wanted);
    if found.value == 0 {
        engine.scheduler.post(shm_protocol::request::SchedulerRequest::Close { log: 0, way: 0 });
        return (0, None);
    }
    let op = engine.next_op();
    let load = Message { op, lease, step: 1, ..Message::new(Kind::Load) };
    let blocks = LOADED.start..LOADED.start + found.value;
    engine.scheduler.with_blocks(load, &blocks.clone().collect::<Vec<_>>());
    let ended = watch("the end of a load", || engine.load_ended(op));
    assert!(ended != Status::Ok || engine.loaded(blocks, wanted), "a load gave wrong bytes");
    engine.give_up(op, ended);
    engine.scheduler.post(shm_protocol::request::SchedulerRequest::Close { log: 0, way: 0 });
    (found.value, Some(ended))
}

fn start(folder: &Path, pool: &Path) -> Sidecar {
    let sidecar = Sidecar::start(folder, &[&"--dram", &"32MiB", &"--pool-path", &pool]);
    sidecar.wait_started();
    sidecar
}

#[test]
fn a_pool_file_that_is_cut_deleted_or_replaced_costs_misses() {
    for (name, damage, lost) in DAMAGES {
        let folder = tempfile::tempdir().unwrap();
        let pool = PathBuf::from(format!("/dev/shm/pillion-test-{}-damaged", std::process::id()));
        let sidecar = start(folder.path(), &pool);
        let (mut engine, mut stamp) = (Engine::connect(&sidecar), 0);
        let kept = engine.save(&mut stamp);
        assert_eq!(load(&mut engine, &kept), (LOADED.len() as u32, Some(Status::Ok)), "{name}");

        // Saves are under way during the damage.
        (0..3).for_each(|_| _ = engine.post_save(&mut stamp));
        damage(&pool);
        let mut served = 0;
        for _ in 0..ROUNDS {
            served += load(&mut engine, &kept).0;
        }
        (0..3).for_each(|_| _ = engine.scheduler.saved());
        if lost {
            sidecar.wait_metric("pillion_pool_lost", |lost| lost == 1);
            assert_eq!(load(&mut engine, &kept), (0, None), "{name}");
            engine.post_save(&mut stamp);
            assert_eq!(
                engine.scheduler.saved().committed,
                0,
                "{name}: no block is kept in the rest of the file"
            );
        } else {
            assert_eq!(served, ROUNDS * LOADED.len() as u32, "{name}: the open file is still there");
        }
        drop(engine);
        // The sidecar ends in order, and the next one starts on the rest of the file.
        sidecar.terminate();
        let _ = (!lost).then(|| fs::remove_file(&pool));
        let sidecar = start(folder.path(), &pool);
        let mut engine = Engine::connect(&sidecar);
        load(&mut engine, &kept);
        engine.save(&mut stamp);
        drop((engine, sidecar));
        let _ = fs::remove_file(&pool);
    }
}

/// Offsets of the slot's header and bytes of each of `keys` in a pool file.
fn places(path: &Path, keys: &[BlockHash]) -> Vec<(u64, u64)> {
    let bytes = fs::read(path).unwrap();
    let word = |at: usize| u64::from_le_bytes(*bytes[at..].first_chunk().unwrap());
    let view = PoolView::new(word, bytes.len() as u64).unwrap();
    let place = |key: &BlockHash| {
        let segments = (0..view.segments()).filter_map(|segment| Some((segment, view.geometry(segment)?)));
        let mut slots = segments.flat_map(|(segment, geometry)| {
            let offsets = (0..geometry.slot_count).filter_map(move |index| geometry.offset(segment, index));
            offsets.map(move |offset| (offset, geometry.block_bytes))
        });
        let kept = slots.find(|(offset, bytes)| view.read_header(*offset, *bytes).unwrap().hash == *key);
        let (offset, bytes) = kept.expect("it was kept");
        (view.place_of(offset, bytes).unwrap().header, offset)
    };
    keys.iter().map(place).collect()
}

#[test]
fn bits_that_were_changed_between_two_sidecars_cost_their_blocks_alone() {
    let folder = tempfile::tempdir().unwrap();
    let pool = PathBuf::from(format!("/dev/shm/pillion-test-{}-flipped", std::process::id()));
    let sidecar = start(folder.path(), &pool);
    let mut engine = Engine::connect(&sidecar);
    let keys = engine.post_save(&mut 0);
    sidecar.wait_metric("pillion_saved_blocks_total", |blocks| blocks == SAVED.len() as u64);
    sidecar.wait_metric("pillion_pool_unsummed_blocks", |blocks| blocks == 0);
    sidecar.kill();
    drop(engine);

    let (places, file) = (places(&pool, &keys), File::options().read(true).write(true).open(&pool).unwrap());
    let flip = |at: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 16], at).unwrap();
    };
    // A bit of a block, a bit of another block's hash, and a committed block without a checksum yet.
    flip(places[10].1 + 1000);
    flip(places[20].0 + slot::HASH);
    file.write_all_at(&[0; 8], places[30].0 + slot::CHECKSUM).unwrap();

    let sidecar = Sidecar::start(folder.path(), &[&"--dram", &"32MiB", &"--pool-path", &pool]);
    let (served, wrong) = Engine::connect(&sidecar).served(&keys);
    let expected: Vec<BlockHash> =
        (0..).zip(keys).filter(|(at, _)| ![10, 20, 30].contains(at)).map(|(_, key)| key).collect();
    assert!(served == expected && wrong == 0, "{wrong} wrong of {}", served.len());
    sidecar.wait_metric("pillion_adoption_unverified_blocks", |blocks| blocks == 0);
    let metric = |name: &str| sidecar.metric(&format!("pillion_{name}_total"));
    assert_eq!(
        (metric("adoption_corrupt"), metric("adoption_dropped"), metric("adopted_blocks")),
        (2, 1, 97)
    );
    let log = fs::read_to_string(folder.path().join("log")).unwrap();
    assert_eq!(log.matches("differs from what an earlier sidecar wrote").count(), 1, "{log}");
    drop(sidecar);
    fs::remove_file(pool).unwrap();
}
