//! The SSD tier on real devices: files, block devices, and their failures.

#[path = "ssd/faults.rs"]
mod faults;
#[path = "ssd/opening.rs"]
mod opening;
pub(crate) mod rig;

use rig::{Folder, LOG_BYTES, Plan, Rig};

#[test]
fn what_is_written_is_read_back_in_this_life_and_the_next() {
    let folder = Folder::new("roundtrip");
    let plan = Plan::new(&folder.file(), LOG_BYTES);
    // Blocks of one unit, of some, and some that end within one.
    let bytes = |number: u64| [4096, 65536, 8, 4104, 12288, 40000][number as usize % 6];
    let mut rig = Rig::new(&plan);
    rig.recover();
    for number in 0..60 {
        assert!(rig.write(number, bytes(number)));
    }
    for number in 0..60 {
        assert!(rig.read(number), "{number}");
    }
    assert!(!rig.read(60));
    drop(rig);
    let mut rig = Rig::new(&plan);
    rig.recover();
    assert_eq!(rig.stats().blocks, 60);
    for number in 0..60 {
        assert_eq!(rig.log.keeps(&rig::key(number)), Some(bytes(number) as u32));
        assert!(rig.read(number), "{number}");
    }
}

#[test]
fn what_was_asked_for_outlives_reclamation_and_the_rest_goes_in_order() {
    let folder = Folder::new("reclaim");
    let plan = Plan::new(&folder.file(), 5 * LOG_BYTES);
    let mut rig = Rig::new(&plan);
    rig.recover();
    rig.makes_room = true;
    // Twenty segments have place for some 900 such blocks: 3,000 go round thrice. The first ten are read all
    // the time.
    let bytes = 64 << 10;
    for number in 0..3_000 {
        assert!(rig.write(number, bytes));
        if number >= 10 && number % 20 == 0 {
            let hot = (0..10).filter(|hot| rig.read(*hot)).count();
            assert_eq!(hot, 10, "at {number}");
        }
    }
    rig.settle();
    let stats = rig.stats().devices[0].clone();
    assert!(stats.dropped_blocks_total >= 1_500, "{stats:?}");
    // The first segment holds fewer blocks than this. Its evicted ones stay as long as others have none in use.
    let first = 64;
    let beside_hot = (0..first).filter(|number| rig.read(*number)).count() as u64;
    let kept: Vec<u64> = (first..3_000).filter(|number| rig.read(*number)).collect();
    assert_eq!(stats.blocks, kept.len() as u64 + beside_hot);
    assert!(kept.len() >= 600, "{}", kept.len());
    assert_eq!(kept, (3_000 - kept.len() as u64..3_000).collect::<Vec<_>>(), "the youngest");
    drop(rig);
    let mut rig = Rig::new(&plan);
    rig.recover();
    let again: Vec<u64> = (0..3_000).filter(|number| rig.read(*number)).collect();
    // Dropped blocks not overwritten yet are found again.
    assert!((0..10).chain(kept).all(|number| again.contains(&number)), "{again:?}");
}

#[test]
fn blocks_spread_over_devices() {
    let folder = Folder::new("several");
    let devices = (0..3).map(|number| (folder.0.join(number.to_string()), LOG_BYTES)).collect();
    let plan = Plan { devices, ..Plan::new(&folder.file(), LOG_BYTES) };
    let mut rig = Rig::new(&plan);
    rig.recover();
    for number in 0..60 {
        while rig.begin_write(number, 65536).is_err() {
            rig.pump();
        }
        rig.pump();
    }
    rig.settle();
    let spread: Vec<u64> = rig.stats().devices.iter().map(|device| device.blocks).collect();
    assert!(spread.iter().all(|blocks| *blocks > 0) && spread.iter().sum::<u64>() == 60, "{spread:?}");
    assert!((0..60).all(|number| rig.read(number)));
    drop(rig);
    let mut rig = Rig::new(&plan);
    rig.recover();
    assert!((0..60).all(|number| rig.read(number)));
}
