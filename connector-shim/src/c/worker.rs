//! `pillion_worker_*`: one rank of an engine, which shares its KV memory, reports the progress of its steps,
//! and loads blocks.

use std::collections::VecDeque;
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;

use shm_protocol::handshake::{self, BlockRegion, Copier, HelloDigest};
use shm_protocol::namespace::Facts;

use super::error::{CallFailure, Status, require_pointer, run_call};
use super::handle::{GuardedHandle, HandleNotices, Run, end_handle, put_result};
use super::raw::{Items, Text};
use crate::core::plan::Plan;
use crate::error::ShimError;
use crate::worker::{self, Begun, EndedLoad, RegionMemory, WorkerSetup};

/// The session of one rank.
#[derive(Debug)]
pub struct Worker(GuardedHandle<WorkerCalls>);

#[derive(Debug)]
struct WorkerCalls {
    session: worker::RankClient,
    /// Asynchronous loads that ended, for pillion_worker_poll to return.
    ended: VecDeque<EndedLoad>,
    /// Failed blocks of the load returned last.
    failed: Vec<u32>,
    namespace: CString,
    notices: HandleNotices,
}

/// One run of bytes in every block: block `b` has `bytes` bytes at `offset + b * stride` of a memory.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct Region {
    /// Index of the descriptor or pointer, counted from 0.
    pub memory: u32,
    /// Offset of block 0, in bytes.
    pub offset: u64,
    /// Bytes from one block to the next; at least `bytes`.
    pub stride: u64,
    /// Length of the run.
    pub bytes: u64,
}

/// A fact: a property of an engine by which the bytes of its blocks are interchangeable with those of other
/// engines. Engines with the same facts share a namespace.
#[repr(C)]
#[derive(Debug)]
pub struct Fact {
    /// The fact's name.
    pub name: Text,
    /// The fact's value.
    pub value: Text,
}

/// Settings of a worker's session. Pass either `descriptors` or `pointers`.
#[repr(C)]
#[derive(Debug)]
pub struct WorkerOptions {
    /// As in PillionSchedulerOptions.
    pub socket: Text,
    /// As in PillionSchedulerOptions.
    pub engine: Text,
    /// As in PillionSchedulerOptions.
    pub world_size: u32,
    /// This worker's number, below `world_size`.
    pub rank: u32,
    /// Number of the part of every block in this worker's memory: `rank / (world_size / shards)`.
    pub shard: u32,
    /// Distinct parts of a block over all ranks, a divisor of `world_size`: fewer than ranks if several ranks
    /// hold equal bytes.
    pub shards: u32,
    /// Blocks in the memory; a block's id is below it. Block 0 is never saved.
    pub blocks: u32,
    /// True if the sidecar writes loaded blocks: true on a GPU. On a host, false keeps a frozen sidecar from
    /// writing late.
    pub sidecar_copies: bool,
    /// The regions of a block, in the order of its bytes in the cache; 1 to 1,024.
    pub regions: Items<Region>,
    /// At most 256. `pillion ctl namespaces` prints the facts of the connected engines.
    pub facts: Items<Fact>,
    /// The expected namespace of the facts, 32 hex digits. The sidecar refuses a rank with another namespace
    /// and names the differences. NULL: any namespace.
    pub expects: Text,
    /// 16 bytes, or none: a digest of a sample of the rank's live weights, equal in all engines with the same
    /// weights. Engines with this digest share no blocks with engines without it. An engine that joins others
    /// may instead state their fact `weights_live`, as `pillion ctl namespaces` prints it. Such an engine,
    /// and one with `expects` and no digest, must pass a comparison of its blocks before it may save: see
    /// pillion_scheduler_check.
    pub live_weights: Items<u8>,
    /// Host memory, by writable descriptors of shared memory (memfd_create(2)); at most 64. The caller keeps
    /// them and may close them after the call.
    pub descriptors: Items<i32>,
    /// GPU memory, by CUDA device pointers into allocations that can be exported (cudaMalloc); at most 64.
    /// The calling thread must have the GPU's context. Connect before any use of the memory: the call writes
    /// zeros into the last block. Free the memory only after pillion_worker_free, and after
    /// pillion_worker_poll has returned the end of every load.
    pub pointers: Items<u64>,
    /// With `pointers`: ascending ends, in bytes, of the parts (cuts) of a block in which a load is
    /// delivered. The last end is the block's length. At most 255.
    pub cuts: Items<u64>,
    /// With `pointers`: the CUstream on which the engine computes.
    pub stream: u64,
    /// As in PillionSchedulerOptions.
    pub groups: Items<u8>,
}

/// State of a worker's session.
#[repr(C)]
#[derive(Debug)]
pub struct WorkerState {
    /// Connections so far.
    pub generation: u64,
    /// True while a sidecar is connected, as far as is known.
    pub connected: bool,
    /// The namespace of this rank's blocks, 32 hex digits; empty while it is not known. If several workers
    /// state their weights, it is known once each has begun a step, and after pillion_scheduler_weights once
    /// each has answered.
    pub namespace_id: *const c_char,
    /// The next message for the engine's log, or NULL; each is handed over once.
    pub notice: *const c_char,
}

/// The end of a load.
#[repr(C)]
#[derive(Debug)]
pub struct Loaded {
    /// True if the load has ended; for pillion_worker_poll, true if there is an end to return.
    pub ended: bool,
    /// Number of the load, the same as pillion_worker_load returned for it.
    pub op: u64,
    /// Blocks whose load failed: the engine must compute them and call pillion_scheduler_void_saves.
    pub failed: Items<u32>,
}

// === exported ===

/// Shares a rank's KV memory with the sidecar; without a sidecar, retries in the background. Fails if the
/// sidecar refuses, and the text says why.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_connect(
    options: Option<&WorkerOptions>,
    worker: Option<&mut MaybeUninit<Box<Worker>>>,
) -> Status {
    run_call(|| {
        let (options, out) = (require_pointer("options", options)?, require_pointer("worker", worker)?);
        let state = WorkerCalls {
            session: worker::RankClient::new(options.read_setup()?)?,
            ended: VecDeque::new(),
            failed: Vec::new(),
            namespace: CString::default(),
            notices: HandleNotices::default(),
        };
        out.write(Box::new(Worker(GuardedHandle::new(state))));
        Ok(())
    })
}

/// Leaves the sidecar and frees the handle; NULL is allowed. Loads in progress end by themselves, and may
/// write until then: poll their ends before you free the memory.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_free(worker: Option<Box<Worker>>) {
    end_handle(worker.map(|worker| worker.0), |state| state.session.disconnect());
}

/// Returns the session's state; its texts are valid until the next call with this handle.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_state(
    worker: Option<&Worker>,
    state: Option<&mut MaybeUninit<WorkerState>>,
) -> Status {
    call(worker, |WorkerCalls { session, namespace, notices, .. }| {
        let bound = session.namespace().map_or_else(String::new, |(digest, _)| digest.to_string());
        *namespace = CString::new(bound).map_err(|_| CallFailure::internal())?;
        put_result("state", state, || WorkerState {
            generation: session.connection_count(),
            connected: session.is_connected(),
            namespace_id: namespace.as_ptr(),
            notice: notices.next(|| session.take_notices()),
        })
    })
}

/// Says that step `step` of run `run` begins: the blocks are as the scheduler planned, and loads of the step
/// may be written. On a GPU this holds once `stream` reaches this call. The scheduler numbers steps from 1
/// on, and never backwards.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_start(
    worker: Option<&Worker>,
    run: Option<&Run>,
    step: u64,
    stream: u64,
) -> Status {
    call(worker, |state| {
        state.session.join(require_pointer("run", run)?.bytes);
        state.session.start_step(step, stream);
        Ok(())
    })
}

/// States the weights of this rank, in answer to the `count`th pillion_scheduler_weights: `live` is a digest
/// of 16 bytes as in PillionWorkerOptions. None: the weights are not known, and this rank's blocks are from
/// now on not shared. Call this before pillion_worker_start of the first step that the scheduler posted after
/// its call; loads fail until all workers have called it.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_weights(worker: Option<&Worker>, count: u64, live: Items<u8>) -> Status {
    call(worker, |state| Ok(state.session.set_weights(count, live.get16("live")?)?))
}

/// Says that the KV of step `step` is written; on a GPU, once `stream` reaches this call. Do not call it for
/// a step computed from blocks that were not loaded, until the scheduler has voided its saves. `wake`: a load
/// or save waits for this step, so wake a sleeping sidecar.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_done(worker: Option<&Worker>, step: u64, wake: bool, stream: u64) -> Status {
    call(worker, |state| {
        state.session.done(step, wake, stream);
        Ok(())
    })
}

/// Carries out this rank's part of a load, after pillion_worker_start of its step. A synchronous load has
/// ended when the call returns; on a GPU, `stream` waits for it instead: at this call, or with `by_cuts` at
/// pillion_worker_wait_cut. An asynchronous load goes on; pillion_worker_poll returns its end.
/// `loaded.failed` is valid until the next call with this handle.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_load(
    worker: Option<&Worker>,
    plan: Items<u8>,
    stream: u64,
    by_cuts: bool,
    loaded: Option<&mut MaybeUninit<Loaded>>,
) -> Status {
    call(worker, |state| {
        let out = require_pointer("loaded", loaded)?;
        let plan = Plan::decode(plan.get("plan")?).map_err(ShimError::from)?;
        let op = plan.op;
        let begun = state.session.begin_load(plan, stream, by_cuts)?;
        let ended = begun != Begun::Later;
        state.failed = match begun {
            Begun::Later => Vec::new(),
            Begun::OnStream(failed) => failed,
            Begun::No(plan) => state.session.load_behind(plan, stream)?,
        };
        out.write(Loaded { ended, op, failed: Items::of_slice(&state.failed) });
        Ok(())
    })
}

/// On a GPU: `stream` waits for cut `cut` (counted from 0) of every synchronous load of the step, and for all
/// cuts before it. Call this for the last cut before the step ends.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_wait_cut(worker: Option<&Worker>, cut: u32, stream: u64) -> Status {
    call(worker, |state| Ok(state.session.wait_cut(cut as usize, stream)?))
}

/// Returns the end of one asynchronous load; each end is returned once. `loaded.failed` is valid until the
/// next call with this handle.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_poll(
    worker: Option<&Worker>,
    loaded: Option<&mut MaybeUninit<Loaded>>,
) -> Status {
    call(worker, |state| {
        let out = require_pointer("loaded", loaded)?;
        state.ended.extend(state.session.finished());
        let next = state.ended.pop_front();
        let (ended, op) = (next.is_some(), next.as_ref().map_or(0, |next| next.op));
        state.failed = next.map_or(Vec::new(), |next| next.failed);
        out.write(Loaded { ended, op, failed: Items::of_slice(&state.failed) });
        Ok(())
    })
}

fn call(worker: Option<&Worker>, call: impl FnOnce(&mut WorkerCalls) -> Result<(), CallFailure>) -> Status {
    run_call(|| require_pointer("worker", worker)?.0.enter_call(call))
}

/// Returns the facts by name. Fails if a name occurs twice.
pub(super) fn read_facts(stated: &Items<Fact>) -> Result<Facts, CallFailure> {
    let stated = stated.get("facts")?;
    let fact = |fact: &Fact| -> Result<_, CallFailure> {
        Ok((fact.name.get("a fact's name")?.to_owned(), fact.value.get("a fact's value")?.to_owned()))
    };
    let facts = stated.iter().map(fact).collect::<Result<Facts, _>>()?;
    if facts.len() != stated.len() {
        return Err(CallFailure::argument("two facts have the same name: state each once"));
    }
    Ok(facts)
}

// === impl WorkerOptions ===

impl WorkerOptions {
    fn read_setup(&self) -> Result<WorkerSetup, CallFailure> {
        let region = |region: &Region| BlockRegion {
            fd: region.memory,
            offset: region.offset,
            stride: region.stride,
            bytes: region.bytes,
        };
        let live_weights = self.live_weights.get16("live_weights")?.map(HelloDigest);
        let expects = self.expects.get_some("expects")?.map(str::to_owned);
        let worker = handshake::WorkerHello {
            rank: self.rank,
            shard: self.shard,
            shards: self.shards,
            blocks: self.blocks,
            regions: self.regions.get("regions")?.iter().map(region).collect(),
            copy: if self.sidecar_copies { Copier::Sidecar } else { Copier::Engine },
            facts: read_facts(&self.facts)?,
            proves: live_weights.is_none() && expects.is_some(),
            expects,
            live_weights,
            ..handshake::WorkerHello::default()
        };
        Ok(WorkerSetup {
            socket: self.socket.get("socket")?.into(),
            engine: self.engine.get("engine")?.into(),
            world_size: self.world_size,
            worker,
            memory: RegionMemory::new(
                self.descriptors.get("descriptors")?,
                self.pointers.get("pointers")?.to_vec(),
                self.cuts.get("cuts")?.to_vec(),
                self.stream,
            )?,
            staged: false,
            groups: self.groups.get16("groups")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::last_text;
    use super::super::raw::take_result;
    use super::*;

    /// A rank of two blocks in these memories.
    fn connect(descriptors: &[i32], pointers: &[u64], facts: &[Fact]) -> Result<Box<Worker>, Status> {
        let options = WorkerOptions {
            socket: Text::of_static(c"/nowhere/pillion.sock"),
            engine: Text::of_static(c"engine"),
            world_size: 1,
            rank: 0,
            shard: 0,
            shards: 1,
            blocks: 2,
            sidecar_copies: false,
            regions: Items::of_slice(&[Region { memory: 0, offset: 0, stride: 512, bytes: 512 }]),
            facts: Items::of_slice(facts),
            expects: Text::null(),
            live_weights: Items::of_slice(&[]),
            descriptors: Items::of_slice(descriptors),
            pointers: Items::of_slice(pointers),
            cuts: Items::of_slice(&[]),
            stream: 0,
            groups: Items::of_slice(&[]),
        };
        take_result(|worker| pillion_worker_connect(Some(&options), worker))
    }

    fn memory() -> std::os::fd::OwnedFd {
        let memory = rustix::fs::memfd_create(c"kv", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, 1024).unwrap();
        memory
    }

    #[test]
    fn without_a_sidecar_a_rank_goes_on_and_says_so() {
        let memory = memory();
        let worker = connect(&[std::os::fd::AsRawFd::as_raw_fd(&memory)], &[], &[]).unwrap();
        let handle = Some(&*worker);
        let state = take_result(|state| pillion_worker_state(handle, state)).unwrap();
        assert!(!state.connected && state.generation == 0 && !state.notice.is_null());
        assert_eq!(pillion_worker_start(handle, Some(&Run { bytes: [7; 16] }), 1, 0), Status::Ok);
        assert_eq!(pillion_worker_weights(handle, 1, Items::of_slice(&[])), Status::Ok);
        assert_eq!(pillion_worker_weights(handle, 2, Items::of_slice(&[1])), Status::Argument);
        assert_eq!(pillion_worker_done(handle, 1, true, 0), Status::Ok);
        assert!(!take_result(|loaded| pillion_worker_poll(handle, loaded)).unwrap().ended);
        let no_plan =
            take_result(|loaded| pillion_worker_load(handle, Items::of_slice(&[1, 2]), 0, false, loaded));
        assert_eq!(no_plan.err(), Some(Status::Plan));
        assert!(last_text().contains("not a load plan"));
        assert_eq!(pillion_worker_start(handle, None, 2, 0), Status::Argument);
        pillion_worker_free(Some(worker));
    }

    #[test]
    fn impossible_memory_is_an_error() {
        let twice = || Fact { name: Text::of_static(c"model"), value: Text::of_static(c"m") };
        for (descriptors, pointers, facts, text) in [
            (&[][..], &[][..], vec![], "has no memory"),
            (&[0], &[1], vec![], "descriptors and pointers"),
            (&[-1], &[], vec![], "descriptor -1"),
            (&[0], &[], vec![twice(), twice()], "same name"),
        ] {
            assert_eq!(connect(descriptors, pointers, &facts).err(), Some(Status::Argument));
            assert!(last_text().contains(text), "{}", last_text());
        }
    }
}
