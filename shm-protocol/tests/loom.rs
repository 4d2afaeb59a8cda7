//! Every interleaving and every allowed stale read of the rings, of the two sleep-and-wake protocols, and of
//! the gates.
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release --package shm-protocol --test loom
//! ```
//!
//! The code under test is the product's own, over loom's atomics instead of a session's memory. Each model
//! has a counterpart without the needed ordering. That counterpart must fail, so the models are known to
//! notice a missing ordering.
#![cfg(loom)]

use std::time::Duration;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

use shm_protocol::gate::{self, GateMemory};
use shm_protocol::message::Slot;
use shm_protocol::ring::{Consumer, Producer, RingMemory};
use shm_protocol::wait::{WaitMemory, must_ring, set_asleep, sleep_turn, wake_engine};

const CAPACITY: usize = 2;

/// The ordering that a ring lacks.
#[derive(Copy, Clone, Eq, PartialEq)]
enum Fault {
    None,
    RelaxedTail,
    RelaxedHead,
}

struct Words {
    tail: AtomicU32,
    head: AtomicU32,
    slots: [AtomicU64; CAPACITY],
    /// Stands for keys and block ids: written before the slot, read after it, reused with it.
    arena: [AtomicU64; CAPACITY],
    /// Holds no value. Through it loom notices an unordered write and read of a slot, even if the values look
    /// right.
    accesses: [UnsafeCell<()>; CAPACITY],
    fault: Fault,
}

#[derive(Clone)]
struct ModelRing(Arc<Words>);

impl ModelRing {
    fn new(fault: Fault) -> Self {
        let words = || [AtomicU64::new(0), AtomicU64::new(0)];
        Self(Arc::new(Words {
            tail: AtomicU32::new(0),
            head: AtomicU32::new(0),
            slots: words(),
            arena: words(),
            accesses: [UnsafeCell::new(()), UnsafeCell::new(())],
            fault,
        }))
    }

    fn unless(&self, fault: Fault, ordering: Ordering) -> Ordering {
        if self.0.fault == fault { Ordering::Relaxed } else { ordering }
    }
}

impl RingMemory for ModelRing {
    fn capacity(&self) -> u32 {
        CAPACITY as u32
    }
    fn load_tail(&self) -> u32 {
        self.0.tail.load(Ordering::Acquire)
    }
    fn store_tail(&self, tail: u32) {
        self.0.tail.store(tail, self.unless(Fault::RelaxedTail, Ordering::Release));
    }
    fn load_head(&self) -> u32 {
        self.0.head.load(self.unless(Fault::RelaxedHead, Ordering::Acquire))
    }
    fn store_head(&self, head: u32) {
        self.0.head.store(head, self.unless(Fault::RelaxedHead, Ordering::Release));
    }
    fn read_slot(&self, index: u32) -> Slot {
        self.0.accesses[index as usize].with(|_| ());
        [self.0.slots[index as usize].load(Ordering::Relaxed), 0, 0, 0, 0, 0, 0, 0]
    }
    fn write_slot(&self, index: u32, slot: &Slot) {
        self.0.accesses[index as usize].with_mut(|_| ());
        self.0.slots[index as usize].store(slot[0], Ordering::Relaxed);
    }
}

// === the ring ===

/// Sends `1..=count` in batches of `batch`; every message's arena word holds ten times its number.
fn produce(ring: ModelRing, count: u64, batch: u64) {
    let mut producer = Producer::new(ring);
    for number in 1..=count {
        while !producer.has_room(0).expect("an honest consumer") {
            thread::yield_now();
        }
        let place = producer.sequence() as usize % CAPACITY;
        producer.memory().0.arena[place].store(number * 10, Ordering::Relaxed);
        producer.push(&[number, 0, 0, 0, 0, 0, 0, 0]);
        if number % batch == 0 || number == count {
            producer.publish();
        }
    }
}

/// Receives `count` messages and asserts number, order and arena word of each.
fn consume(ring: ModelRing, count: u64) {
    let mut consumer = Consumer::new(ring);
    let mut expected = 1;
    while expected <= count {
        if consumer.ready().expect("an honest producer") == 0 {
            thread::yield_now();
            continue;
        }
        while let Some(slot) = consumer.pop() {
            let place = (expected - 1) as usize % CAPACITY;
            let outside = consumer.memory().0.arena[place].load(Ordering::Relaxed);
            assert_eq!((slot[0], outside), (expected, expected * 10), "lost, repeated, overwritten or torn");
            expected += 1;
        }
        consumer.release();
    }
}

/// Three preemptions are enough for each counterpart below to fail; without a bound the loops never end.
fn bounded(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

fn ring_model(fault: Fault, count: u64, batch: u64) {
    bounded(3, move || {
        let ring = ModelRing::new(fault);
        let other = ring.clone();
        let producer = thread::spawn(move || produce(other, count, batch));
        consume(ring, count);
        producer.join().expect("the producer ends");
    });
}

#[test]
fn a_ring_is_first_in_first_out_and_overwrites_nothing_unread() {
    ring_model(Fault::None, 5, 1);
}

#[test]
fn a_batch_is_published_whole() {
    ring_model(Fault::None, 4, 2);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_release_of_the_tail_the_ring_model_fails() {
    ring_model(Fault::RelaxedTail, 3, 1);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_release_of_the_head_the_ring_model_fails() {
    ring_model(Fault::RelaxedHead, 3, 1);
}

// === sleeping and waking ===

/// The words of both protocols, a futex and an eventfd. No wait times out: a lost wake-up is a deadlock.
struct ModelWait {
    fences: bool,
    asleep: AtomicU32,
    waiting: AtomicU32,
    signal: AtomicU32,
    futex: (Mutex<()>, Condvar),
    eventfd: (Mutex<u64>, Condvar),
    /// A ring's tail or a completion word: the sleeper waits for it.
    word: AtomicU32,
}

impl ModelWait {
    fn new(fences: bool) -> Arc<Self> {
        Arc::new(Self {
            fences,
            asleep: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            signal: AtomicU32::new(0),
            futex: (Mutex::new(()), Condvar::new()),
            eventfd: (Mutex::new(0), Condvar::new()),
            word: AtomicU32::new(0),
        })
    }

    fn ring(&self) {
        *self.eventfd.0.lock().unwrap() += 1;
        self.eventfd.1.notify_all();
    }

    fn block_on_eventfd(&self) {
        let mut count = self.eventfd.0.lock().unwrap();
        while *count == 0 {
            count = self.eventfd.1.wait(count).unwrap();
        }
        *count = 0;
    }
}

impl WaitMemory for ModelWait {
    fn fence(&self) {
        if self.fences {
            fence(Ordering::SeqCst);
        }
    }
    fn load_asleep(&self) -> u32 {
        self.asleep.load(Ordering::Relaxed)
    }
    fn store_asleep(&self, asleep: u32) {
        self.asleep.store(asleep, Ordering::Relaxed);
    }
    fn load_waiting(&self) -> u32 {
        self.waiting.load(Ordering::Relaxed)
    }
    fn store_waiting(&self, waiting: u32) {
        self.waiting.store(waiting, Ordering::Relaxed);
    }
    fn load_signal(&self) -> u32 {
        self.signal.load(Ordering::Acquire)
    }
    fn raise_signal(&self) {
        self.signal.fetch_add(1, Ordering::Release);
    }
    fn futex_wait(&self, seen: u32, _: Duration) {
        // The kernel compares and sleeps in one step, as seen by the waking thread.
        let guard = self.futex.0.lock().unwrap();
        if self.signal.load(Ordering::Relaxed) == seen {
            drop(self.futex.1.wait(guard).unwrap());
        }
    }
    fn futex_wake(&self) {
        drop(self.futex.0.lock().unwrap());
        self.futex.1.notify_all();
    }
}

/// The sidecar's turns until it has seen `word` reach `last`.
fn sidecar_until(memory: &ModelWait, last: u32) {
    while memory.word.load(Ordering::Acquire) != last {
        set_asleep(memory, true);
        if memory.word.load(Ordering::Acquire) != last {
            memory.block_on_eventfd();
        }
        set_asleep(memory, false);
    }
}

/// The engine publishes twice; the sidecar must see the second word, for every sleep in between.
fn doorbell_model(fences: bool) {
    bounded(3, move || {
        let memory = ModelWait::new(fences);
        let engine_memory = Arc::clone(&memory);
        let engine = thread::spawn(move || {
            for tail in 1..=2 {
                engine_memory.word.store(tail, Ordering::Release);
                if must_ring(&*engine_memory) {
                    engine_memory.ring();
                }
            }
        });
        sidecar_until(&memory, 2);
        engine.join().expect("the engine ends");
    });
}

/// The sidecar stores two words, waking after each; the engine must see the second word, for every sleep in
/// between.
fn futex_model(fences: bool) {
    bounded(3, move || {
        let memory = ModelWait::new(fences);
        let sidecar_memory = Arc::clone(&memory);
        let sidecar = thread::spawn(move || {
            for value in 1..=2 {
                sidecar_memory.word.store(value, Ordering::Release);
                wake_engine(&*sidecar_memory);
            }
        });
        while !sleep_turn(&*memory, Duration::ZERO, || memory.word.load(Ordering::Acquire) == 2) {}
        sidecar.join().expect("the sidecar ends");
    });
}

/// A query and its answer, both sides asleep in between.
fn round_trip_model(fences: bool) {
    bounded(2, move || {
        let question = ModelWait::new(fences);
        let answer = ModelWait::new(fences);
        let (sidecar_question, sidecar_answer) = (Arc::clone(&question), Arc::clone(&answer));
        let sidecar = thread::spawn(move || {
            sidecar_until(&sidecar_question, 1);
            sidecar_answer.word.store(1, Ordering::Release);
            wake_engine(&*sidecar_answer);
        });
        question.word.store(1, Ordering::Release);
        if must_ring(&*question) {
            question.ring();
        }
        while !sleep_turn(&*answer, Duration::ZERO, || answer.word.load(Ordering::Acquire) == 1) {}
        sidecar.join().expect("the sidecar ends");
    });
}

#[test]
fn a_doorbell_is_never_lost() {
    doorbell_model(true);
}

#[test]
fn a_futex_wake_is_never_lost() {
    futex_model(true);
}

#[test]
fn a_round_trip_between_sleepers_always_ends() {
    round_trip_model(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fences_the_doorbell_model_deadlocks() {
    doorbell_model(false);
}

#[test]
#[should_panic(expected = "deadlock")]
fn without_the_fences_the_futex_model_deadlocks() {
    futex_model(false);
}

// === taking a load back ===

/// The words of two loads, and a block of the first, written by both sides: loom notices unordered writes.
struct ModelGate {
    fences: bool,
    copying: AtomicU64,
    gates: [AtomicU64; 2],
    block: UnsafeCell<()>,
}

impl GateMemory for ModelGate {
    fn fence(&self) {
        if self.fences {
            fence(Ordering::SeqCst);
        }
    }
    fn raise_copying(&self) {
        self.copying.fetch_add(1, Ordering::Relaxed);
    }
    fn lower_copying(&self) {
        self.copying.fetch_sub(1, Ordering::Release);
    }
    fn load_copying(&self) -> u64 {
        self.copying.load(Ordering::Acquire)
    }
    fn raise_gate(&self, op: u64) {
        self.gates[op as usize & 1].fetch_max(op, Ordering::Release);
    }
    fn load_gate(&self, op: u64) -> u64 {
        self.gates[op as usize & 1].load(Ordering::Acquire)
    }
}

fn gate_model(fences: bool) {
    bounded(3, move || {
        let words = ModelGate {
            fences,
            copying: AtomicU64::new(0),
            gates: [AtomicU64::new(0), AtomicU64::new(0)],
            block: UnsafeCell::new(()),
        };
        let memory = Arc::new(words);
        let sidecar = Arc::clone(&memory);
        let copier = thread::spawn(move || {
            gate::write_unless_closed(&*sidecar, 2, || sidecar.block.with_mut(|_| ()));
            let another = gate::write_unless_closed(&*sidecar, 1, || ());
            assert!(another.is_some(), "an earlier load was taken back with it");
        });
        gate::close(&*memory, 2);
        while !gate::is_settled(&*memory) {
            thread::yield_now();
        }
        memory.block.with_mut(|_| ());
        copier.join().expect("the copier ends");
    });
}

#[test]
fn a_load_that_was_taken_back_is_not_written() {
    gate_model(true);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn without_its_fences_the_gate_model_fails() {
    gate_model(false);
}
