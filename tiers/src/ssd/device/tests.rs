//! Faults no kernel produces on demand, injected at the carrier's answers.

#[path = "../../../tests/rig/mod.rs"]
mod rig;

use std::path::Path;
use std::sync::{Arc, Mutex};

use rig::{Folder, LOG_BYTES, Plan, Rig};
use rustix::io::Errno;

use super::*;
use crate::io::transfer::{Direction, Transfer};
use crate::ssd::format::{Distrusted, Found, Super};
use crate::ssd::{FaultKind, Refused};

const BLOCK_BYTES: u64 = 40_000;

type Answer = Box<dyn FnMut(&Transfer, i32) -> i32 + Send>;

/// The injected answers of the kernel; a test may change them at any time.
#[derive(Clone, Default)]
struct Answers(Arc<Mutex<Option<Answer>>>);

impl Answers {
    fn are(&self, answer: impl FnMut(&Transfer, i32) -> i32 + Send + 'static) {
        *self.0.lock().unwrap() = Some(Box::new(answer));
    }

    fn are_true(&self) {
        *self.0.lock().unwrap() = None;
    }

    /// Replaces the answer for the first transfer of the given direction; all others are real.
    fn once(&self, direction: Direction, errno: Errno) {
        let mut left = 1;
        self.are(move |transfer, result| {
            let this = transfer.direction == direction && left > 0;
            left -= i32::from(this);
            if this { -errno.raw_os_error() } else { result }
        });
    }
}

/// Makes a test of each, for each backend.
macro_rules! on_each_backend {
    ($($name:ident),* $(,)?) => {
        mod by_io_uring {
            $(#[test] fn $name() { super::$name(super::Backend::IoUring) })*
        }
        mod by_threads {
            $(#[test] fn $name() { super::$name(super::Backend::Threads) })*
        }
    };
}

on_each_backend!(
    an_errno_keeps_its_kind_and_costs_one_block,
    memory_that_the_device_does_not_take_goes_through_a_buffer,
    interrupted_and_short_transfers_go_on,
    a_transfer_that_ends_early_is_a_fault,
    a_kernel_that_never_moves_anything_is_not_asked_for_ever,
    a_failing_device_answers_miss_and_is_asked_again_later,
    a_footer_that_cannot_be_written_costs_no_block,
    what_a_device_that_stands_still_was_not_given_yet_comes_back,
    what_is_distrusted_is_found_by_no_later_life,
    what_is_distrusted_lies_on_the_medium_once_it_is_written,
    what_is_distrusted_is_written_though_the_device_is_dropped,
    a_log_with_a_damaged_list_of_what_is_distrusted_starts_empty,
    what_cannot_be_read_at_the_start_is_not_taken_for_empty,
);

fn rig(name: &str, backend: Backend) -> (Folder, Rig, Answers) {
    let (folder, answers) = (Folder::new(name), Answers::default());
    let plan = Plan::new(&folder.file(), LOG_BYTES);
    let mut rig = Rig::start(&plan, |opened, number, pool, ups| {
        let answers = answers.clone();
        let make = move |fd, wake, blocks| {
            let mut carrier = Carrier::new(Some(backend), fd, wake, blocks)?;
            carrier.inject = Some(Box::new(move |transfer, result| {
                answers.0.lock().unwrap().as_mut().map_or(result, |answer| answer(transfer, result))
            }));
            Ok(carrier)
        };
        Device::start_on(opened, number, pool, move |up| drop(ups.send(up)), make).unwrap()
    });
    rig.recover();
    (folder, rig, answers)
}

fn an_errno_keeps_its_kind_and_costs_one_block(backend: Backend) {
    let (_folder, mut rig, answers) = rig("errno", backend);
    let kinds = [
        (Errno::NOSPC, FaultKind::NoSpace),
        (Errno::IO, FaultKind::Io),
        (Errno::NODEV, FaultKind::Gone),
        (Errno::NXIO, FaultKind::Gone),
        (Errno::PERM, FaultKind::Other),
    ];
    assert!(rig.write(0, BLOCK_BYTES));
    for (number, (errno, kind)) in (1..).zip(kinds) {
        let before = rig.faults(kind);
        rig.settle();
        answers.once(Direction::Write, errno);
        assert!(!rig.write(number, BLOCK_BYTES), "{errno}");
        assert_eq!(rig.faults(kind), before + 1, "{errno}");
        assert!(!rig.keeps(number));

        assert!(rig.write(number, BLOCK_BYTES));
        answers.once(Direction::Read, errno);
        assert!(!rig.read(number), "{errno}");
        assert_eq!(rig.faults(kind), before + 2, "{errno}");
        assert!(!rig.keeps(number), "what could not be read is not found again");
        assert!(rig.read(0));
    }
    assert!(rig.read(0) && !rig.stats().devices[0].down);
}

fn memory_that_the_device_does_not_take_goes_through_a_buffer(backend: Backend) {
    let folder = Folder::new("bounce");
    let plan = Plan::new(&folder.file(), LOG_BYTES);
    // Every other slot is aligned to 512 bytes alone.
    let plan = Plan { slot_bytes: plan.slot_bytes + 512, ..plan };
    let mut rig = Rig::start(&plan, |mut opened, number, pool, ups| {
        opened.layout.memory_align = 4096;
        Device::start(opened, number, pool, Some(backend), move |up| drop(ups.send(up))).unwrap()
    });
    rig.recover();
    for number in 0..40 {
        assert!(rig.write(number, BLOCK_BYTES) && rig.read(number));
    }
    assert!((0..40).all(|number| rig.read(number)));
}

fn interrupted_and_short_transfers_go_on(backend: Backend) {
    let (_folder, mut rig, answers) = rig("short", backend);
    let mut round = 0;
    answers.are(move |transfer, result| {
        round += 1;
        match round % 3 {
            0 => -Errno::INTR.raw_os_error(),
            1 => -Errno::AGAIN.raw_os_error(),
            _ if transfer.len - transfer.moved > 4096 && result > 4096 => 4096,
            _ => result,
        }
    });
    for number in 0..20 {
        assert!(rig.write(number, BLOCK_BYTES));
        assert!(rig.read(number));
    }
    answers.are_true();
    assert!((0..20).all(|number| rig.read(number)));
    assert_eq!(rig.stats().devices[0].faults, [0; FaultKind::ALL.len()]);
}

fn a_transfer_that_ends_early_is_a_fault(backend: Backend) {
    let (_folder, mut rig, answers) = rig("ends", backend);
    for (number, short) in (0..).zip([0, 1, 4095, 513]) {
        assert!(rig.write(number, BLOCK_BYTES));
        rig.settle();
        answers.are(move |_, result| result.min(short));
        assert!(!rig.read(number));
        assert!(!rig.write(100 + number, BLOCK_BYTES));
        answers.are_true();
        assert!(rig.write(100 + number, BLOCK_BYTES) && rig.read(100 + number));
    }
    assert_eq!(rig.faults(FaultKind::Short), 8);
    answers.are(|_, result| result.saturating_add(1 << 30));
    assert!(!rig.read(100), "more than was asked for is no answer");
    assert_eq!(rig.faults(FaultKind::Io), 1);
}

fn a_kernel_that_never_moves_anything_is_not_asked_for_ever(backend: Backend) {
    let (_folder, mut rig, answers) = rig("again", backend);
    assert!(rig.write(1, BLOCK_BYTES));
    answers.are(|_, _| -Errno::AGAIN.raw_os_error());
    assert!(!rig.write(0, BLOCK_BYTES));
    assert_eq!(rig.faults(FaultKind::Other), 1);
}

fn a_failing_device_answers_miss_and_is_asked_again_later(backend: Backend) {
    let (_folder, mut rig, answers) = rig("breaker", backend);
    assert!((0..8).all(|number| rig.write(number, BLOCK_BYTES)));
    answers.are(|_, _| -Errno::IO.raw_os_error());
    assert!((0..4).all(|number| !rig.read(number)));
    assert!(rig.stats().devices[0].down);
    assert!(!rig.keeps(5) && rig.log.probe(0, 0, &[rig::key(5).hash]) == 0);
    assert_eq!(rig.begin_write(9, BLOCK_BYTES), Err(Refused::Down));
    // The check fails as all other jobs do.
    rig.ahead_ms += 1_000;
    let before = rig.faults(FaultKind::Io);
    rig.wait("a check", |rig| rig.faults(FaultKind::Io) > before);
    answers.are_true();
    assert!(rig.stats().devices[0].down);
    rig.ahead_ms += 1_900;
    rig.pump();
    assert!(rig.stats().devices[0].down, "the second wait is twice the first");
    rig.ahead_ms += 1_000;
    rig.wait("the device's return", |rig| !rig.stats().devices[0].down);
    assert!(rig.read(5) && rig.write(9, BLOCK_BYTES) && rig.read(9));
    assert_eq!(rig.stats().devices[0].trips_total, 1);
}

fn a_footer_that_cannot_be_written_costs_no_block(backend: Backend) {
    let (folder, mut rig, answers) = rig("footer", backend);
    // Only footers begin behind the last block's place in a segment.
    let is_footer = |transfer: &Transfer| {
        transfer.at > (1 << 20) && (transfer.at + u64::from(transfer.len) - (1 << 20)).is_multiple_of(4 << 20)
    };
    answers.are(move |transfer, result| match transfer.direction {
        Direction::Write if is_footer(transfer) => -Errno::IO.raw_os_error(),
        _ => result,
    });
    assert!((0..170).all(|number| rig.write(number, BLOCK_BYTES)));
    assert!(rig.faults(FaultKind::Io) >= 1);
    assert!((0..170).all(|number| rig.read(number)));
    drop(rig);
    let mut rig = Rig::new(&Plan::new(&folder.file(), LOG_BYTES));
    rig.recover();
    assert!((0..170).all(|number| rig.read(number)), "segments without a footer are read through");
}

fn what_a_device_that_stands_still_was_not_given_yet_comes_back(backend: Backend) {
    let (_folder, mut rig, _) = rig("gives-up", backend);
    assert!((0..40).all(|number| rig.write(number, BLOCK_BYTES)));
    rig.settle();
    assert!((0..40).all(|number| rig.begin_read(number, BLOCK_BYTES as u32).is_some()));
    for _ in 0..3 {
        rig.ahead_ms += 25_000;
        let now_ms = rig.now_ms();
        rig.log.tick(now_ms, &mut Vec::new());
    }
    assert!(rig.stats().devices[0].down);
    rig.post_together();
    let mut ended = Vec::new();
    while ended.len() < 40 {
        rig.pump();
        ended.extend(rig.take_ended());
    }
    assert!(ended.iter().all(|(_, ok)| !ok), "{ended:?}");
    rig.ahead_ms += 1_000;
    rig.wait("the device's return", |rig| !rig.stats().devices[0].down);
    assert!((0..20).all(|number| rig.read(number)), "none of them was forgotten");
}

/// Blocks of three segments.
const LATER: u64 = 250;

fn what_is_distrusted_is_found_by_no_later_life(backend: Backend) {
    let (folder, mut rig, _) = rig("distrust", backend);
    assert!((0..4).all(|number| rig.write(number, BLOCK_BYTES)));
    rig.log.distrust(0, rig::NAMESPACE, false);
    rig.settle();
    assert!((0..4).all(|number| rig.read(number)));
    // More than the open segment and the next one hold.
    assert!((4..LATER).all(|number| rig.write(number, BLOCK_BYTES)));
    rig.settle();
    drop(rig);
    let plan = Plan { backend, ..Plan::new(&folder.file(), LOG_BYTES) };
    let mut rig = Rig::new(&plan);
    rig.recover();
    assert!(!(0..LATER).any(|number| rig.keeps(number)), "blocks that the life wrote before or after");
    assert!((LATER..LATER + 4).all(|number| rig.write(number, BLOCK_BYTES)));
    rig.log.distrust(0, rig::NAMESPACE, true);
    // Blocks saved after a new start of the namespace, in segments begun later.
    assert!((1000..1250).all(|number| rig.write(number, BLOCK_BYTES)));
    rig.settle();
    drop(rig);
    let mut rig = Rig::new(&plan);
    rig.recover();
    assert!(!(0..LATER + 4).any(|number| rig.keeps(number)) && (1200..1250).all(|number| rig.read(number)));
}

fn what_is_distrusted_lies_on_the_medium_once_it_is_written(backend: Backend) {
    let (folder, mut rig, answers) = rig("medium", backend);
    let written = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&written);
    answers.are(move |transfer, result| {
        seen.lock().unwrap().push((transfer.at, transfer.durable));
        result
    });
    rig.log.distrust(0, rig::NAMESPACE, false);
    rig.settle();
    let at = Distrusted::offset(superblock(&folder.file()).unit_bytes);
    assert_eq!(*written.lock().unwrap(), [(at, true)]);
}

fn what_is_distrusted_is_written_though_the_device_is_dropped(backend: Backend) {
    let (folder, mut rig, answers) = rig("dropped", backend);
    assert!(rig.write(0, BLOCK_BYTES));
    rig.settle();
    let (say, begun) = std::sync::mpsc::channel();
    answers.are(move |_, result| {
        let _ = say.send(());
        std::thread::sleep(Duration::from_millis(100));
        result
    });
    assert!(rig.begin_read(0, BLOCK_BYTES as u32).is_some());
    rig.post_together();
    begun.recv().unwrap();
    rig.log.distrust(0, rig::NAMESPACE, false);
    rig.post_together();
    drop(rig);
    let mut rig = Rig::new(&Plan { backend, ..Plan::new(&folder.file(), LOG_BYTES) });
    rig.recover();
    assert!(!rig.keeps(0));
}

fn superblock(path: &Path) -> Super {
    match Super::read(&std::fs::read(path).unwrap()[..4096]) {
        Found::Log(superblock) => superblock,
        found => panic!("{found:?}"),
    }
}

/// Overwrites a log's list of distrusted blocks with these bytes.
fn spoil_list(path: &Path, byte: u8) {
    let (superblock, mut bytes) = (superblock(path), std::fs::read(path).unwrap());
    let (unit, list) = (superblock.unit_bytes as usize, Distrusted::offset(superblock.unit_bytes) as usize);
    bytes[list..list + unit].fill(byte);
    std::fs::write(path, bytes).unwrap();
}

fn a_log_with_a_damaged_list_of_what_is_distrusted_starts_empty(backend: Backend) {
    for damage in [0, 1] {
        let (folder, mut rig, _) = rig("list", backend);
        assert!(rig.write(0, BLOCK_BYTES));
        rig.settle();
        drop(rig);
        let plan = Plan { backend, ..Plan::new(&folder.file(), LOG_BYTES) };
        spoil_list(&folder.file(), damage);
        let mut rig = Rig::new(&plan);
        rig.recover();
        assert!(!rig.keeps(0));
        let said =
            rig.notes.iter().any(|note| note.contains("a damaged list of what engines disagreed about"));
        assert!(said, "{:?}", rig.notes);
        assert!(rig.write(1, BLOCK_BYTES));
        rig.settle();
        drop(rig);
        let mut rig = Rig::new(&plan);
        rig.recover();
        assert!(rig.read(1) && !rig.keeps(0), "the list was written again");
    }
}

/// A device with a cut file gives zeros; a failing one gives errors, for a while.
fn what_cannot_be_read_at_the_start_is_not_taken_for_empty(backend: Backend) {
    let (folder, mut rig, _) = rig("unreadable", backend);
    assert!((0..4).all(|number| rig.write(number, BLOCK_BYTES)));
    rig.settle();
    drop(rig);
    let plan = Plan { backend, ..Plan::new(&folder.file(), LOG_BYTES) };
    let mut rig = Rig::start(&plan, |opened, number, pool, ups| {
        // The carrier has the device; recovery's own descriptor can only write.
        let wrong = std::fs::OpenOptions::new().write(true).open(folder.file()).unwrap();
        let recovered = ups.clone();
        let recovery = Recovery::new(
            wrong.into(),
            number,
            &opened,
            Arc::new(move |up| drop(recovered.send(up))),
            Arc::default(),
        );
        recovery.run();
        let device = Device::start(opened, number, pool, Some(backend), |_| ()).unwrap();
        drop(ups);
        device
    });
    rig.recover();
    let device = &rig.stats().devices[0];
    assert_eq!((device.blocks, device.segments_free), (0, 0));
    assert_eq!(device.faults[FaultKind::Io as usize], u64::from(device.segments));
    drop(rig);
    let mut rig = Rig::new(&plan);
    rig.recover();
    assert!((0..4).all(|number| rig.read(number)), "the next life finds what lay there");
}
