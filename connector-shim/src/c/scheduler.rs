//! `pillion_scheduler_*`: an engine's scheduler: queries, loads and saves.

use std::ffi::c_char;
use std::mem::MaybeUninit;
use std::time::Duration;

use shm_protocol::key::BlockHash;

use super::error::{CallFailure, Status, require_pointer, run_call};
use super::handle::{GuardedHandle, HandleNotices, Run, end_handle, put_result};
use super::raw::{Hash, Items, Text};
use crate::core::plan::Plan;
use crate::error::ShimError;
use crate::scheduler::{self, LoadWait, SchedulerSetup, SessionConfig};

/// The session of an engine's scheduler, one for each engine.
#[derive(Debug)]
pub struct Scheduler(GuardedHandle<SchedulerCalls>);

#[derive(Debug)]
pub(super) struct SchedulerCalls {
    pub(super) session: scheduler::SchedulerClient,
    plan: Vec<u8>,
    notices: HandleNotices,
}

/// Settings of a scheduler's session.
#[repr(C)]
#[derive(Debug)]
pub struct SchedulerOptions {
    /// Path of the sidecar's socket.
    pub socket: Text,
    /// Name of this engine, 1 to 256 bytes: the same in its scheduler and its workers, and different from
    /// every other engine.
    pub engine: Text,
    /// Workers of the engine, 1 to 64.
    pub world_size: u32,
    /// This run of the engine.
    pub run: Run,
    /// The longest total wait of all queries of one step, in microseconds, at most 10,000,000; usually 2,000.
    pub query_budget_us: u64,
    /// True if the sidecar writes loaded blocks into the engine's memory; false if the workers copy them. The
    /// same as in PillionWorkerOptions.
    pub sidecar_copies: bool,
    /// True if a load may begin as soon as the previous step is done. Set it only if a step does not zero or
    /// copy blocks before its work.
    pub early_loads: bool,
    /// Milliseconds, at most 2,000, for which a request's first query stays unknown (-1) while another pod
    /// may still compute its blocks. 0, for an engine that computes its prompts itself: not at all.
    pub miss_wait_ms: u32,
    /// 16 bytes, or none: a digest of this engine's cache layout, equal in its scheduler and its workers. A
    /// worker with another digest takes no part.
    pub groups: Items<u8>,
}

/// State of a scheduler's session.
#[repr(C)]
#[derive(Debug)]
pub struct SchedulerState {
    /// Connections so far. When it changes, all logs and leases are void: open the logs again.
    pub generation: u64,
    /// Blocks of unfinished saves: the engine must keep them as they are, or give their saves up.
    pub saving: u64,
    /// True while a sidecar is connected, as far as is known.
    pub connected: bool,
    /// The next message for the engine's log, or NULL; each is handed over once.
    pub notice: *const c_char,
    /// The first 8 bytes of the engine's namespace. 0 until every worker has begun a step of this run and,
    /// after pillion_scheduler_weights, stated its weights.
    pub namespace_word: u64,
    /// Blocks compared so far with kept ones, by pillion_scheduler_check.
    pub blocks_checked: u64,
    /// Compared blocks with different bytes.
    pub blocks_differing: u64,
    /// Blocks not kept because no comparison has passed yet.
    pub blocks_unproven: u64,
    /// Blocks not kept because their step was not accepted.
    pub blocks_unaccepted: u64,
}

// === exported ===

/// Connects to the sidecar; without one, retries in the background. Until every worker is connected too, each
/// query is a miss.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_connect(
    options: Option<&SchedulerOptions>,
    scheduler: Option<&mut MaybeUninit<Box<Scheduler>>>,
) -> Status {
    run_call(|| {
        let (options, out) = (require_pointer("options", options)?, require_pointer("scheduler", scheduler)?);
        let session = scheduler::SchedulerClient::new(SchedulerSetup {
            socket: options.socket.get("socket")?.into(),
            engine: options.engine.get("engine")?.into(),
            world_size: options.world_size,
            run: options.run.bytes,
            config: SessionConfig {
                budget: Duration::from_micros(options.query_budget_us),
                by_engine: !options.sidecar_copies,
                early: options.early_loads,
                part_blocks: 0,
                streams: false,
                whole_blocks: 0,
                last: false,
                load_wait: LoadWait::default(),
            },
            miss_wait_ms: Some(options.miss_wait_ms),
            handover_wait_ms: None,
            promise_wait_ms: None,
            groups: options.groups.get16("groups")?,
        })?;
        let state = SchedulerCalls { session, plan: Vec::new(), notices: HandleNotices::default() };
        out.write(Box::new(Scheduler(GuardedHandle::new(state))));
        Ok(())
    })
}

/// Leaves the sidecar and frees the handle; NULL is allowed. Unfinished saves are dropped, leases end.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_free(scheduler: Option<Box<Scheduler>>) {
    end_handle(scheduler.map(|scheduler| scheduler.0), |state| state.session.disconnect());
}

/// Opens a log: the list of one request's block hashes, from its first block on. `log` becomes -1 while there
/// is no sidecar or no room (65,536 logs may be open); every call with such a log does nothing and answers
/// "miss".
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_open(
    scheduler: Option<&Scheduler>,
    log: Option<&mut MaybeUninit<i64>>,
) -> Status {
    call_session(scheduler, |state| put_result("log", log, || state.session.open_log(None)))
}

/// Opens a log as pillion_scheduler_open does, and mixes `fold`, 16 bytes, into each of its hashes. Use it
/// for requests whose KV depends on something outside the hashes and the facts, such as an adapter's weights;
/// `fold` is then a digest of these.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_open_folded(
    scheduler: Option<&Scheduler>,
    fold: Items<u8>,
    log: Option<&mut MaybeUninit<i64>>,
) -> Status {
    call_session(scheduler, |state| {
        let fold = require_pointer("fold", fold.get16("fold")?)?;
        put_result("log", log, || state.session.open_log(Some(fold)))
    })
}

/// Appends hashes. The first is the request's block `start`, which must equal the log's length so far.
/// `length` becomes the log's length: unchanged if there is no room for all of them, 0 if the log is void; it
/// may be NULL. All open logs together have room for 1,048,576 hashes; each log counts up to a multiple of
/// 64.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_append(
    scheduler: Option<&Scheduler>,
    log: i64,
    start: u32,
    hashes: Items<Hash>,
    length: Option<&mut MaybeUninit<u32>>,
) -> Status {
    call_session(scheduler, |state| {
        let hashes = hashes.get("hashes")?;
        let count = u32::try_from(hashes.len())
            .map_err(|_| CallFailure::argument("more than 2^32 hashes: pass fewer"))?;
        let key = |index: u32, key: &mut BlockHash| {
            key.set_bytes(&hashes[(index - start) as usize].bytes).map_err(ShimError::from)
        };
        let appended = state.session.append_keys(log, start, count, key)?;
        length.map(|length| length.write(appended));
        Ok(())
    })
}

/// Announces a later query of the log's blocks `start..start + count`: the sidecar fetches those on a disk
/// before it. Call this as soon as the request has arrived. The call does not wait and promises nothing.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_hint(
    scheduler: Option<&Scheduler>,
    log: i64,
    start: u32,
    count: u32,
) -> Status {
    tell_session(scheduler, |session| session.hint(log, start, count))
}

/// Asks how many of the log's blocks `start..start + count` the cache holds from `start` on, and waits for
/// the answer within the step's budget. `hits` becomes that number, and the log holds a lease on these blocks
/// until load, release, close, another query, or a time limit. `hits` is -1 while the answer is not known:
/// ask again in a later step. Blocks beyond the log's length, and more than 65,536 at once, are not asked
/// for.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_query(
    scheduler: Option<&Scheduler>,
    log: i64,
    start: u32,
    count: u32,
    hits: Option<&mut MaybeUninit<i64>>,
) -> Status {
    call_session(scheduler, |state| put_result("hits", hits, || state.session.query(log, start, count)))
}

/// Promises that in step `step` every worker loads the log's blocks from `start` on into the engine's blocks
/// `blocks`, and uses up the lease. `plan` becomes the bytes for pillion_worker_load; hand them to every
/// worker. They are valid until the next call with this handle. An empty plan: no lease covers these blocks
/// (any more), load nothing. `sync`: the step needs the blocks; without it the request waits until
/// pillion_worker_poll of every worker has returned the load's end.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_load(
    scheduler: Option<&Scheduler>,
    log: i64,
    start: u32,
    blocks: Items<u32>,
    step: u64,
    sync: bool,
    plan: Option<&mut MaybeUninit<Items<u8>>>,
) -> Status {
    call_session(scheduler, |state| {
        let blocks = blocks.get("blocks")?;
        put_result("plan", plan, || {
            let plans = state.session.post_load(log, start, blocks, step, sync);
            // One at most: this session has no parts.
            state.plan = plans.first().map_or(Vec::new(), Plan::encode);
            Items::of_slice(&state.plan)
        })
    })
}

/// Saves the log's blocks from `start` on from the engine's blocks `blocks`, once every worker has called
/// pillion_worker_done for step `step`. The sidecar keeps them once pillion_scheduler_accept has named that
/// step. They must stay as they are until the save is over (PillionSchedulerState), or be given up before.
/// `posted` becomes false if the save was dropped for lack of a sidecar or of room; it may be NULL.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_save(
    scheduler: Option<&Scheduler>,
    log: i64,
    start: u32,
    blocks: Items<u32>,
    step: u64,
    posted: Option<&mut MaybeUninit<bool>>,
) -> Status {
    post_save(scheduler, log, start, blocks, (step, false), posted)
}

/// Compares blocks that this engine computed itself with kept blocks: the log's blocks from `start` on, in
/// the engine's blocks `blocks`, once every worker has called pillion_worker_done for step `step`.
/// PillionSchedulerState counts the results. An engine that took over its facts (PillionWorkerOptions) may
/// load at once, but its saves are not kept until some of its blocks have passed, unless it is the first of
/// its namespace. For this it computes the first block of a request although that block is kept. An engine
/// whose blocks differ is served nothing any more. `posted` as in pillion_scheduler_save.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_check(
    scheduler: Option<&Scheduler>,
    log: i64,
    start: u32,
    blocks: Items<u32>,
    step: u64,
    posted: Option<&mut MaybeUninit<bool>>,
) -> Status {
    post_save(scheduler, log, start, blocks, (step, true), posted)
}

/// Says that the engine went on with the output of step `step`, and that every worker returned from it
/// without an error. No save of that step is kept before this call. Saves of earlier steps without this call
/// are dropped. If a load of the step failed, call pillion_scheduler_void_saves first.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_accept(scheduler: Option<&Scheduler>, step: u64) -> Status {
    tell_session(scheduler, |session| session.accept_step(step))
}

/// Gives up every unfinished save of these blocks. Call this before a load into them. Call it also in a step
/// that may overwrite them, before that step's saves and its pillion_scheduler_end_step: a save given up
/// later may keep wrong bytes.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_overwrite(scheduler: Option<&Scheduler>, blocks: Items<u32>) -> Status {
    call_session(scheduler, |state| {
        state.session.overwrite(blocks.get("blocks")?.iter().copied());
        Ok(())
    })
}

/// Gives up every unfinished save. Call this when a load failed and blocks may have been computed from it.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_void_saves(scheduler: Option<&Scheduler>) -> Status {
    tell_session(scheduler, |session| session.void_saves())
}

/// Ends the log's lease, if it has one: the engine will not load.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_release(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell_session(scheduler, |session| session.release_lease(log))
}

/// Closes a log when its request is over. Promised loads and saves go on.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_close(scheduler: Option<&Scheduler>, log: i64) -> Status {
    tell_session(scheduler, |session| session.close_log(log, 0))
}

/// Says that the weights may have changed for the `count`th time. Unfinished saves are given up, and nothing
/// is served until every worker has called pillion_worker_weights with this count. Equal weights give the old
/// blocks back. The caller must not save blocks that were computed before this call, or from such blocks. A
/// count not above the last one has no effect.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_weights(scheduler: Option<&Scheduler>, count: u64) -> Status {
    tell_session(scheduler, |session| {
        session.void_saves();
        session.weights(count);
    })
}

/// Forgets this engine's earlier saves: unfinished saves are given up, and earlier blocks are not served to
/// it any more.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_reset(scheduler: Option<&Scheduler>) -> Status {
    call_session(scheduler, |state| {
        state.session.void_saves();
        match state.session.salt() {
            true => Ok(()),
            false => Err(CallFailure::argument("the system gives no random bytes; nothing was forgotten")),
        }
    })
}

/// Ends the scheduling of a step: all posted requests become visible to the sidecar, finished saves are
/// counted, and the budget of queries is whole again. Call this before the workers begin that step. `state`
/// may be NULL; its notice is valid until the next call with this handle.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_scheduler_end_step(
    scheduler: Option<&Scheduler>,
    state: Option<&mut MaybeUninit<SchedulerState>>,
) -> Status {
    call_session(scheduler, |SchedulerCalls { session, notices, .. }| {
        session.end_step();
        if let Some(out) = state {
            let stats = session.stats();
            let counted = |name| stats[name];
            out.write(SchedulerState {
                generation: session.connection_count(),
                saving: session.saving() as u64,
                connected: session.is_connected(),
                notice: notices.next(|| session.take_notices()),
                namespace_word: session.namespace(),
                blocks_checked: counted("blocks_checked"),
                blocks_differing: counted("blocks_differing"),
                blocks_unproven: counted("blocks_unproven"),
                blocks_unaccepted: counted("blocks_unaccepted"),
            });
        }
        Ok(())
    })
}

fn post_save(
    scheduler: Option<&Scheduler>,
    log: i64,
    start: u32,
    blocks: Items<u32>,
    (step, checked): (u64, bool),
    posted: Option<&mut MaybeUninit<bool>>,
) -> Status {
    call_session(scheduler, |state| {
        let blocks = blocks.get("blocks")?.to_vec();
        let saved = state.session.post_save(log, start, blocks, step, checked);
        posted.map(|posted| posted.write(saved));
        Ok(())
    })
}

/// Runs a call without an answer.
pub(super) fn tell_session(
    scheduler: Option<&Scheduler>,
    tell: impl FnOnce(&mut scheduler::SchedulerClient),
) -> Status {
    call_session(scheduler, |state| {
        tell(&mut state.session);
        Ok(())
    })
}

pub(super) fn call_session(
    scheduler: Option<&Scheduler>,
    call: impl FnOnce(&mut SchedulerCalls) -> Result<(), CallFailure>,
) -> Status {
    run_call(|| require_pointer("scheduler", scheduler)?.0.enter_call(call))
}

#[cfg(test)]
mod tests {
    use super::super::error::last_text;
    use super::super::raw::take_result;
    use super::*;

    fn options(world_size: u32) -> SchedulerOptions {
        SchedulerOptions {
            socket: Text::of_static(c"/nowhere/pillion.sock"),
            engine: Text::of_static(c"engine"),
            world_size,
            run: Run { bytes: [7; 16] },
            query_budget_us: 2000,
            sidecar_copies: false,
            early_loads: false,
            miss_wait_ms: 2000,
            groups: Items::of_slice(&[]),
        }
    }

    #[test]
    fn without_a_sidecar_every_answer_is_a_miss_and_no_call_an_error() {
        let scheduler =
            take_result(|scheduler| pillion_scheduler_connect(Some(&options(1)), scheduler)).unwrap();
        let handle = Some(&*scheduler);
        let log = take_result(|log| pillion_scheduler_open(handle, log)).unwrap();
        assert_eq!(log, -1);
        let fold = [9; 16];
        assert_eq!(
            take_result(|log| pillion_scheduler_open_folded(handle, Items::of_slice(&fold), log)),
            Ok(-1)
        );
        let short =
            take_result(|log| pillion_scheduler_open_folded(handle, Items::of_slice(&fold[1..]), log));
        assert_eq!(
            (short, last_text().as_str()),
            (Err(Status::Argument), "fold has 15 bytes: pass 16, or none")
        );
        let hashes = [Hash { bytes: [1; 32] }; 3];
        let length = |length: Option<&mut MaybeUninit<u32>>| {
            pillion_scheduler_append(handle, log, 0, Items::of_slice(&hashes), length)
        };
        assert_eq!(take_result(length), Ok(0));
        assert_eq!(pillion_scheduler_hint(handle, log, 0, 3), Status::Ok);
        assert_eq!(take_result(|hits| pillion_scheduler_query(handle, log, 0, 3, hits)), Ok(0));
        let plan =
            take_result(|plan| pillion_scheduler_load(handle, log, 0, Items::of_slice(&[1]), 1, true, plan));
        assert!(plan.unwrap().get("plan").unwrap().is_empty());
        let posted =
            take_result(|posted| pillion_scheduler_save(handle, log, 0, Items::of_slice(&[1]), 1, posted));
        assert_eq!(posted, Ok(false));
        for call in [pillion_scheduler_release, pillion_scheduler_close] {
            assert_eq!(call(handle, log), Status::Ok);
        }
        for call in [pillion_scheduler_void_saves, pillion_scheduler_reset] {
            assert_eq!(call(handle), Status::Ok);
        }
        assert_eq!(pillion_scheduler_weights(handle, 1), Status::Ok);
        assert_eq!(pillion_scheduler_accept(handle, 1), Status::Ok);
        assert_eq!(pillion_scheduler_overwrite(handle, Items::of_slice(&[1])), Status::Ok);
        let state = take_result(|state| pillion_scheduler_end_step(handle, state)).unwrap();
        assert!(!state.connected && (state.saving, state.generation, state.namespace_word) == (0, 0, 0));
        assert!(!state.notice.is_null(), "the user is told");
        let state = take_result(|state| pillion_scheduler_end_step(handle, state)).unwrap();
        assert!(state.notice.is_null(), "once");
        pillion_scheduler_free(Some(scheduler));
    }

    #[test]
    fn what_is_missing_is_named() {
        let none = take_result(|scheduler| pillion_scheduler_connect(None, scheduler));
        assert_eq!(
            (none.err(), last_text().as_str()),
            (Some(Status::Argument), "options is NULL: pass a pointer")
        );
        assert_eq!(pillion_scheduler_connect(Some(&options(1)), None), Status::Argument);
        let ranks = take_result(|scheduler| pillion_scheduler_connect(Some(&options(65)), scheduler));
        assert_eq!(ranks.err(), Some(Status::Argument));
        assert!(last_text().contains("1 to 64"));
        let patient = SchedulerOptions { miss_wait_ms: 2001, ..options(1) };
        let late = take_result(|scheduler| pillion_scheduler_connect(Some(&patient), scheduler));
        assert_eq!(late.err(), Some(Status::Argument));
        assert!(last_text().contains("miss_wait_ms is 2001; it must be at most 2,000"), "{}", last_text());
        assert_eq!(pillion_scheduler_end_step(None, None), Status::Argument);
        pillion_scheduler_free(None);
    }
}
