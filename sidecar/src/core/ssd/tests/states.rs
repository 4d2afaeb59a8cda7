//! Queries for the last kept key, of blocks on a device.

use super::*;

/// The device keeps keys 0 and 3 of the six keys of log 1, and DRAM keeps key 1.
fn scene() -> Scene {
    let mut scene = Scene::on_ssd(0..1);
    scene.write(3..4);
    scene.flood();
    scene.save(1..2);
    scene.end_all();
    scene.engine.out.clear();
    scene
}

impl Scene {
    fn ask_last(&mut self, count: u32) -> u64 {
        self.engine.open(1, 0..6);
        let op = self.next_op();
        let keys = LogKeys::new(1, 0..count);
        self.ask(SchedulerRequest::Query(Query { last: true, ..Query::new(op, keys) }));
        op
    }
}

#[test]
fn the_last_key_is_read_from_the_device() {
    let mut scene = scene();
    let op = scene.ask_last(6);
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    let reads = scene.reads();
    assert_eq!(reads.len(), 1, "that one alone");
    scene.end_well(reads);
    assert_eq!(scene.answers(), [(op, Status::Ok, 4)]);
    assert_eq!(scene.refs.keys().copied().collect::<Vec<_>>(), [3]);
    assert_eq!(scene.leases(), 1);
}

#[test]
fn a_key_that_cannot_be_read_is_passed_over() {
    let mut scene = scene();
    let op = scene.ask_last(6);
    assert_eq!(scene.answers(), [(op, Status::Pending, 0)]);
    let reads = scene.reads();
    scene.end(reads[0], Err(JobFault::Corrupt("checksum")));
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)], "the one in memory");
    assert_eq!(scene.refs.keys().copied().collect::<Vec<_>>(), [1]);
}

#[test]
fn a_key_in_memory_above_those_on_the_device_is_found_at_once() {
    let mut scene = scene();
    let op = scene.ask_last(3);
    assert_eq!(scene.answers(), [(op, Status::Ok, 2)]);
    assert!(scene.reads().is_empty());
}
