//! The thread of a device: takes jobs, keeps some in flight, continues and repeats transfers, and reports the
//! end of each job.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::super::Tell;
use super::activity::{Activity, Desk, PART_BITS, Part};
use crate::io::carrier::Carrier;
use crate::io::transfer::Transfer;
use crate::ssd::{Done, Fault, Job, Up, Work};

/// Most jobs of reads, and most jobs of writes, in the device at a time: enough to keep a fast device busy
/// with blocks of some KiB.
const JOBS_MAX: usize = 64;
/// Most bytes of these jobs: enough to keep a device busy with large blocks, and no read waits behind them
/// for long.
const BYTES_MAX: u64 = 32 << 20;
/// Most jobs under way: others are verified while as many are in the device.
const ACTIVE_MAX: usize = 4 * JOBS_MAX;
/// Rounds of one job that may move no byte (EINTR, EAGAIN).
const RETRIES_MAX: u32 = 64;
/// The longest wait of an ending thread for the kernel; shorter than the wait of the thread that drops the
/// device.
const STOP_MAX: Duration = Duration::from_secs(4);

/// A job that waits, or is under way.
#[derive(Debug)]
struct Taken {
    job: Job,
    since: Instant,
}

/// Jobs of one direction.
#[derive(Debug, Default)]
struct Lane {
    waiting: VecDeque<Taken>,
    jobs: usize,
    bytes: u64,
}

pub(super) struct Worker {
    number: usize,
    carrier: Carrier,
    desk: Desk,
    inbox: Receiver<Job>,
    tell: Tell,
    reads: Lane,
    writes: Lane,
    active: Vec<Option<(Taken, Activity)>>,
    vacant: Vec<usize>,
    /// Jobs whose transfers have ended, to be continued one by one: the device gets further jobs in between.
    back: VecDeque<usize>,
    /// Transfers beyond the carrier's room.
    backlog: VecDeque<Transfer>,
    fresh: Vec<Transfer>,
    stopping: Option<Instant>,
    /// Set once the carrier failed: no job can be done any more.
    broken: Option<Errno>,
}

#[expect(clippy::disallowed_methods, reason = "jobs are timed")]
fn now() -> Instant {
    Instant::now()
}

fn is_read(work: &Work) -> bool {
    matches!(work, Work::Read { .. })
}

fn moves_block(work: &Work) -> bool {
    matches!(work, Work::Read { .. } | Work::Write { .. })
}

/// Returns the bytes of a job counted against [`BYTES_MAX`].
fn bytes(work: &Work) -> u64 {
    match work {
        Work::Write { label, .. } | Work::Read { label, .. } | Work::Move { label, .. } => label.bytes.into(),
        Work::Begin { .. } | Work::Seal { .. } | Work::Check | Work::GiveUp | Work::Distrust { .. } => 0,
    }
}

fn tell_done(tell: &Tell, device: usize, taken: &Taken, result: Result<(), Fault>) {
    let micros = u64::try_from((now() - taken.since).as_micros()).unwrap_or(u64::MAX);
    tell(Up::Done(Done { device, ticket: taken.job.ticket, micros, result }));
}

// === impl Lane ===

impl Lane {
    /// Returns the next job, if the device may have one more.
    fn next(&mut self) -> Option<Taken> {
        if self.jobs >= JOBS_MAX || self.bytes >= BYTES_MAX {
            return None;
        }
        let taken = self.waiting.pop_front()?;
        self.again(&taken.job.work);
        Some(taken)
    }

    /// Counts a job that goes to the device, maybe a second time.
    fn again(&mut self, work: &Work) {
        self.jobs += 1;
        self.bytes += bytes(work);
    }

    /// Counts a job that has left the device.
    fn left(&mut self, work: &Work) {
        self.jobs -= 1;
        self.bytes -= bytes(work);
    }
}

// === impl Worker ===

impl Worker {
    pub(super) fn new(number: usize, desk: Desk, carrier: Carrier, inbox: Receiver<Job>, tell: Tell) -> Self {
        Self {
            number,
            carrier,
            desk,
            inbox,
            tell,
            reads: Lane::default(),
            writes: Lane::default(),
            active: (0..ACTIVE_MAX).map(|_| None).collect(),
            vacant: (0..ACTIVE_MAX).collect(),
            back: VecDeque::new(),
            backlog: VecDeque::new(),
            fresh: Vec::new(),
            stopping: None,
            broken: None,
        }
    }

    /// Serves until the device is dropped. A round continues one job, since its checksum takes time, after
    /// the device got its next jobs.
    pub(super) fn run(mut self) {
        loop {
            self.take();
            let begun = self.start_some();
            self.submit();
            if let Some(note) = self.carrier.take_note() {
                (self.tell)(Up::Note(note));
            }
            if self.over() {
                return;
            }
            let entered = if self.broken.is_some() {
                Ok(())
            } else if begun || !self.back.is_empty() {
                self.carrier.flush()
            } else {
                self.carrier.wait(self.stopping.map(|_| Duration::from_millis(100)))
            };
            if let Err(error) = entered {
                self.broke(&error);
            }
            if let Some(at) = self.back.pop_front() {
                self.proceed(at);
            }
            while let Some((transfer, result)) = self.carrier.reap() {
                self.returned(transfer, result);
            }
        }
    }

    fn over(&self) -> bool {
        let late = self.stopping.is_some_and(|since| now() - since > STOP_MAX);
        late || (self.stopping.is_some() && (self.idle() || self.broken.is_some()))
    }

    fn idle(&self) -> bool {
        self.vacant.len() == ACTIVE_MAX && self.writes.waiting.is_empty()
    }

    /// Takes posted jobs. Once no thread can post any more, waiting jobs are given up, except those of
    /// distrusted blocks.
    fn take(&mut self) {
        loop {
            let job = if self.broken.is_some() && self.stopping.is_none() {
                self.inbox.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.inbox.try_recv()
            };
            match job {
                Ok(job) => {
                    let taken = Taken { job, since: now() };
                    if job.work == Work::GiveUp {
                        self.give_up(Fault::Stopped, moves_block);
                        self.done(&taken, Ok(()));
                        continue;
                    }
                    self.lane(&job.work).waiting.push_back(taken);
                    if self.broken.is_some() {
                        return;
                    }
                }
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    if self.stopping.is_none() {
                        self.stopping = Some(now());
                        self.give_up(Fault::Stopped, |work| !matches!(work, Work::Distrust { .. }));
                    }
                    return;
                }
            }
        }
    }

    /// Ends waiting jobs chosen by `which`.
    fn give_up(&mut self, fault: Fault, which: impl Fn(&Work) -> bool) {
        for lane in [&mut self.reads, &mut self.writes] {
            let (ended, left): (VecDeque<Taken>, _) =
                lane.waiting.drain(..).partition(|taken| which(&taken.job.work));
            lane.waiting = left;
            ended.iter().for_each(|taken| tell_done(&self.tell, self.number, taken, Err(fault)));
        }
    }

    fn broke(&mut self, error: &std::io::Error) {
        let errno = Errno::from_io_error(error).unwrap_or(Errno::IO);
        self.broken = Some(errno);
        let backend = self.carrier.backend().name();
        let number = self.number;
        (self.tell)(Up::Note(format!(
            "SSD device {number} is given up, because {backend} failed: {error}. Restart the \
             sidecar to use it again"
        )));
    }

    fn lane(&mut self, work: &Work) -> &mut Lane {
        if is_read(work) { &mut self.reads } else { &mut self.writes }
    }

    /// Starts as many reads as the device may have, and one other job. Returns true if there was such another
    /// one.
    fn start_some(&mut self) -> bool {
        if let Some(errno) = self.broken {
            self.give_up(Fault::Io(errno), |_| true);
        }
        while self.vacant.len() > 1
            && let Some(taken) = self.reads.next()
        {
            self.start(taken);
        }
        if self.vacant.is_empty() {
            return false;
        }
        let write = self.writes.next();
        write.map(|taken| self.start(taken)).is_some()
    }

    fn start(&mut self, taken: Taken) {
        let at = self.vacant.pop().expect("an entry for every job at a time");
        match Activity::begin(taken.job.work, &mut self.desk, &mut self.fresh) {
            Ok(mut activity) => {
                activity.pending = self.fresh.len() as u32;
                for mut transfer in self.fresh.drain(..) {
                    transfer.token |= (at as u64) << PART_BITS;
                    self.backlog.push_back(transfer);
                }
                self.active[at] = Some((taken, activity));
            }
            Err(fault) => {
                self.fresh.clear();
                self.lane(&taken.job.work).left(&taken.job.work);
                self.end(at, &taken, Err(fault));
            }
        }
    }

    fn submit(&mut self) {
        while let Some(transfer) = self.backlog.pop_front() {
            if let Err(transfer) = self.carrier.push(transfer) {
                self.backlog.push_front(transfer);
                return;
            }
        }
    }

    /// Handles the end of a transfer: repeats it, continues it, or ends its part.
    fn returned(&mut self, mut transfer: Transfer, result: Result<u32, Errno>) {
        let at = (transfer.token >> PART_BITS) as usize;
        let unit = self.desk.layout.unit_bytes as u32;
        let (taken, activity) = self.active[at].as_mut().expect("under way while a transfer is");
        let ended = match result {
            Err(Errno::INTR | Errno::AGAIN) if activity.retries < RETRIES_MAX => {
                activity.retries += 1;
                return self.backlog.push_back(transfer);
            }
            Err(errno) => Err(Fault::Io(errno)),
            Ok(moved) => {
                transfer.moved += moved;
                let short = Fault::Short { moved: transfer.moved.into(), wanted: transfer.len.into() };
                match transfer.moved {
                    all if all == transfer.len => Ok(()),
                    // Direct I/O continues at whole units alone, and a short read at the end of a file stays
                    // short.
                    some if moved == 0 || !some.is_multiple_of(unit) => Err(short),
                    _ => return self.backlog.push_back(transfer),
                }
            }
        };
        let part = match transfer.token & ((1 << PART_BITS) - 1) {
            0 => Part::Head,
            1 => Part::Body,
            _ => Part::Tail,
        };
        activity.returned(part, transfer.memory, ended);
        activity.pending -= 1;
        if activity.pending == 0 {
            let work = taken.job.work;
            self.lane(&work).left(&work);
            self.back.push_back(at);
        }
    }

    fn proceed(&mut self, at: usize) {
        let (taken, mut activity) = self.active[at].take().expect("under way");
        match activity.proceed(&mut self.desk) {
            Ok(Some(mut transfer)) => {
                transfer.token |= (at as u64) << PART_BITS;
                activity.pending = 1;
                let work = taken.job.work;
                self.lane(&work).again(&work);
                self.active[at] = Some((taken, activity));
                self.backlog.push_back(transfer);
            }
            Ok(None) => self.end(at, &taken, Ok(())),
            Err(fault) => self.end(at, &taken, Err(fault)),
        }
    }

    fn end(&mut self, at: usize, taken: &Taken, result: Result<(), Fault>) {
        self.vacant.push(at);
        self.done(taken, result);
    }

    fn done(&self, taken: &Taken, result: Result<(), Fault>) {
        tell_done(&self.tell, self.number, taken, result);
    }
}
