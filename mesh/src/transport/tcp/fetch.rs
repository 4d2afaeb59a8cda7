//! The fetching side: fetches under way, and the streams for them.

mod exchange;
pub(in crate::transport) mod standing;
mod stream;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub(super) use self::exchange::Exchange;
use self::stream::FetchStream;
use super::TcpShared;
use super::frame::ASK_BLOCKS_MAX;
use super::link::PeerLink;
use super::piece::{FetchPiece, PIECE_BYTES_MAX, RunningFetch};
use crate::sync::{lock_mutex, read_clock};
use crate::transport::{Fetch, FetchDone, FetchFault, FetchStage, Label, Refusal, TransportEvent};

/// Maximum fetches under way: one for each request of an engine, and as many again.
const FETCHES_MAX: usize = 2048;
/// Fetches of fewer bytes are not cut.
const PIECE_BYTES_MIN: u64 = 256 << 10;
/// Maximum sleep of the clock without a fetch.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// The fetches under way, by ticket, with a clock for their limits.
#[derive(Default)]
pub(super) struct Fetches {
    table: Mutex<FetchTable>,
    bell: Condvar,
}

#[derive(Default)]
struct FetchTable {
    running: HashMap<u64, Arc<RunningFetch>>,
    /// The time of the clock's next look.
    next: Option<Instant>,
}

/// Begins a fetch, or ends its blocks at once.
pub(super) fn post_fetch(shared: &Arc<TcpShared>, fetch: Fetch) {
    let inside =
        |(label, offset): &(Label, u64)| shared.blocks.bytes_at(*offset, label.bytes as usize).is_some();
    assert!(fetch.blocks.iter().all(inside), "a fetch into slots of the pool");
    if fetch.blocks.is_empty() {
        return;
    }
    if shared.draining() {
        return refuse_fetch(shared, &fetch, Refusal::Draining);
    }
    let Some(link) = shared.member(fetch.peer) else {
        return refuse_fetch(shared, &fetch, Refusal::NotMember);
    };
    if !link.start_threads(|| start_streams(shared, &link)) {
        return refuse_fetch(shared, &fetch, Refusal::Busy);
    }
    let running = RunningFetch::begin_all(
        shared,
        fetch.ticket,
        fetch.blocks,
        fetch.standing,
        read_clock() + fetch.deadline,
    );
    let pieces = cut_up(&running, shared.config.streams);
    if !shared.fetches.insert(&running) {
        return running.stop_early(FetchFault::Refused(Refusal::Busy));
    }
    if link.push_pieces(pieces).is_err() {
        running.stop_early(FetchFault::Refused(if link.is_open() {
            Refusal::Busy
        } else {
            Refusal::NotMember
        }));
    }
}

/// Ends all blocks of a fetch before its begin.
fn refuse_fetch(shared: &TcpShared, fetch: &Fetch, refusal: Refusal) {
    for index in 0..fetch.blocks.len() as u32 {
        let result = Err(FetchFault::Refused(refusal));
        shared.report_event(TransportEvent::Done(FetchDone { ticket: fetch.ticket, index, result }));
    }
}

fn start_streams(shared: &Arc<TcpShared>, link: &Arc<PeerLink>) -> bool {
    // One started thread is enough to go on.
    let start = |number: usize| {
        let stream = FetchStream::new(number, Arc::clone(shared), Arc::clone(link));
        shared.threads.spawn(format!("mesh-{}-{number}", link.number.0), move || stream.run_stream())
    };
    (0..shared.config.streams).filter(|number| start(*number).is_ok()).count() > 0
}

/// Cuts a fetch so that every stream gets a part of it, and none waits long behind a large piece.
fn cut_up(fetch: &Arc<RunningFetch>, streams: usize) -> Vec<FetchPiece> {
    let total: u64 = fetch.blocks.iter().map(|(label, _)| u64::from(label.bytes)).sum();
    let piece_bytes = total.div_ceil(streams as u64).clamp(PIECE_BYTES_MIN, PIECE_BYTES_MAX);
    let mut pieces = Vec::new();
    let (mut begin, mut bytes) = (0, 0);
    for (index, (label, _)) in (0u32..).zip(&fetch.blocks) {
        let full = bytes + u64::from(label.bytes) > piece_bytes || (index - begin) as usize == ASK_BLOCKS_MAX;
        if full && index > begin {
            pieces.push(FetchPiece::new(fetch, begin..index));
            (begin, bytes) = (index, 0);
        }
        bytes += u64::from(label.bytes);
    }
    pieces.push(FetchPiece::new(fetch, begin..fetch.blocks.len() as u32));
    pieces
}

// === impl Fetches ===

impl Fetches {
    /// Returns false if too many are under way.
    fn insert(&self, running: &Arc<RunningFetch>) -> bool {
        let mut table = lock_mutex(&self.table);
        if table.running.len() >= FETCHES_MAX {
            table.running.retain(|_, running| !running.has_ended());
        }
        if table.running.len() >= FETCHES_MAX {
            return false;
        }
        let before = table.running.insert(running.ticket, Arc::clone(running));
        if table.next.is_none_or(|next| running.until() < next) {
            self.bell.notify_one();
        }
        drop(table);
        assert!(before.is_none_or(|before| before.has_ended()), "a ticket under way is used again");
        true
    }

    pub(super) fn cancel(&self, ticket: u64) {
        let running = lock_mutex(&self.table).running.get(&ticket).cloned();
        if let Some(running) = running {
            running.stop_early(FetchFault::Stopped);
        }
    }

    pub(super) fn stop_all(&self) {
        let running: Vec<_> = lock_mutex(&self.table).running.drain().map(|(_, running)| running).collect();
        running.iter().for_each(|running| running.stop_early(FetchFault::Stopped));
        self.bell.notify_all();
    }

    /// The clock's thread: ends late fetches.
    pub(super) fn keep_time(&self, stopping: &AtomicBool) {
        let mut table = lock_mutex(&self.table);
        while !stopping.load(Ordering::Relaxed) {
            table.running.retain(|_, running| !running.has_ended());
            let now = read_clock();
            let late: Vec<_> =
                table.running.values().filter(|running| running.until() <= now).cloned().collect();
            table.running.retain(|_, running| running.until() > now);
            if !late.is_empty() {
                drop(table);
                late.iter().for_each(|running| running.stop_early(FetchFault::Timeout(FetchStage::Whole)));
                table = lock_mutex(&self.table);
                continue;
            }
            let next = table.running.values().map(|running| running.until()).min().unwrap_or(now + SLEEP_MAX);
            table.next = Some(next);
            table = self.bell.wait_timeout(table, next - now).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
