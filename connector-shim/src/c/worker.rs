//! `pillion_worker_*`: one rank of an engine, which shows its KV memory, says how far its steps are, and loads blocks.

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
    /// Asynchronous loads that ended and were not told yet.
    ended: VecDeque<EndedLoad>,
    /// Of the load told last.
    failed: Vec<u32>,
    namespace: CString,
    notices: HandleNotices,
}

/// One run of bytes in every block: block `b` has `bytes` bytes at `offset + b * stride` of a memory.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct Region {
    /// Which of the descriptors, or of the pointers, counted from 0.
    pub memory: u32,
    /// Where block 0 begins, in bytes.
    pub offset: u64,
    /// From one block to the next, in bytes; at least `bytes`.
    pub stride: u64,
    /// Length of the run.
    pub bytes: u64,
}

/// One of the facts that make the bytes of two engines interchangeable. The same facts are the same namespace.
#[repr(C)]
#[derive(Debug)]
pub struct Fact {
    /// Its name.
    pub name: Text,
    /// Its value.
    pub value: Text,
}

/// What a worker's session needs to know. Either `descriptors` or `pointers` are given.
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
    /// Which part of every block lies here: `rank / (world_size / shards)`.
    pub shard: u32,
    /// Distinct parts of a block over all ranks, a divisor of `world_size`: fewer than ranks where ranks hold equal bytes.
    pub shards: u32,
    /// Blocks in the memory; a block's id is below it. Block 0 is never saved.
    pub blocks: u32,
    /// Whether the sidecar writes loaded blocks: true on a GPU; on a host false keeps a frozen sidecar from writing late.
    pub sidecar_copies: bool,
    /// What a block consists of, in the order of its bytes in the cache; 1 to 1,024.
    pub regions: Items<Region>,
    /// At most 256. `pillion ctl namespaces` tells those of the engines that it knows.
    pub facts: Items<Fact>,
    /// The namespace that the facts must make, 32 hex digits: another one is refused, with what differs. NULL: any.
    pub expects: Text,
    /// 16 bytes, or none: a digest of a sample of the rank's live weights, equal in every engine that loaded the same.
    /// Engines that state it share with no engine that does not. Instead, an engine that joins others may state the fact
    /// `weights_live` that `pillion ctl namespaces` tells of them. An engine that does, or that has `expects` and no digest, has
    /// to prove what it computes before it may save: see pillion_scheduler_check.
    pub live_weights: Items<u8>,
    /// Host memory, by descriptors of shared memory (memfd_create(2)) that can be written; at most 64. They stay the
    /// caller's and may be closed after the call.
    pub descriptors: Items<i32>,
    /// GPU memory, by CUDA device pointers into allocations that can be exported (cudaMalloc); at most 64. The
    /// calling thread's context is the GPU's. A connect writes zeros into the last block, so it comes before any use. The
    /// memory is freed after pillion_worker_free only, and after pillion_worker_poll has told the end of every load.
    pub pointers: Items<u64>,
    /// With `pointers`: ascending ends of the parts of a block in which a load is delivered, in bytes, the last one the
    /// block's; at most 255.
    pub cuts: Items<u64>,
    /// With `pointers`: the CUstream on which the engine computes.
    pub stream: u64,
    /// As in PillionSchedulerOptions.
    pub groups: Items<u8>,
}

/// What is known of a worker's session.
#[repr(C)]
#[derive(Debug)]
pub struct WorkerState {
    /// Connections so far.
    pub generation: u64,
    /// Whether a sidecar is there, as far as is known.
    pub connected: bool,
    /// The namespace of this rank's blocks, 32 hex digits; empty while it is not known. Where several workers state their
    /// weights it is known once each has begun a step, and after pillion_scheduler_weights once each has answered.
    pub namespace_id: *const c_char,
    /// The next message for the engine's log, or NULL; each is handed over once.
    pub notice: *const c_char,
}

/// The end of a load.
#[repr(C)]
#[derive(Debug)]
pub struct Loaded {
    /// Whether the load has ended; of pillion_worker_poll: whether there is one to tell.
    pub ended: bool,
    /// Number of the load, by which the end of an asynchronous one is known again.
    pub op: u64,
    /// Blocks that do not hold what was asked for and must be computed; then pillion_scheduler_void_saves is due.
    pub failed: Items<u32>,
}

// === exported ===

/// Shows a rank's KV memory to the sidecar, or leaves that to the background while none is there. Fails where the
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

/// Leaves the sidecar and frees the handle; NULL is allowed. Loads in progress end by themselves, and may write until then:
/// poll their ends first where the memory is to be freed.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_free(worker: Option<Box<Worker>>) {
    end_handle(worker.map(|worker| worker.0), |state| state.session.disconnect());
}

/// What is known of the session; its texts are valid until the next call with this handle.
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

/// Step `step` of run `run` begins: blocks are as the scheduler meant them, loads of the step may be written. On a GPU,
/// once `stream` gets there. Steps are numbered by the scheduler from 1 on and never go back.
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

/// States, in answer to the `count`th pillion_scheduler_weights, which weights this rank holds: `live` is a digest of 16 bytes
/// as in PillionWorkerOptions. None: they are not known, and its blocks are from now on shared with nobody. To be called before
/// pillion_worker_start of the first step that the scheduler posted after its call; loads fail until all workers have.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_weights(worker: Option<&Worker>, count: u64, live: Items<u8>) -> Status {
    call(worker, |state| Ok(state.session.set_weights(count, live.get16("live")?)?))
}

/// The KV of step `step` is written; on a GPU, once `stream` gets there. Not to be called for a step computed upon blocks
/// that were not loaded, until the scheduler voided its saves. `wake`: a load or save waits for this step, so wake a
/// sleeping sidecar.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_done(worker: Option<&Worker>, step: u64, wake: bool, stream: u64) -> Status {
    call(worker, |state| {
        state.session.done(step, wake, stream);
        Ok(())
    })
}

/// Carries out this rank's part of a load, after pillion_worker_start of its step. A synchronous one has ended when the
/// call returns, or, on a GPU, `stream` waits for it: with `by_cuts` not at once, but where pillion_worker_wait_cut says.
/// An asynchronous one goes on; pillion_worker_poll tells its end. `loaded.failed` is valid until the next call with this
/// handle.
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

/// On a GPU: `stream` waits for cut `cut` (counted from 0) of every synchronous load of the step, and for those before
/// it. To be called for the last cut, at the latest before the step ends.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_worker_wait_cut(worker: Option<&Worker>, cut: u32, stream: u64) -> Status {
    call(worker, |state| Ok(state.session.wait_cut(cut as usize, stream)?))
}

/// Tells the end of one asynchronous load, each once. `loaded.failed` is valid until the next call with this handle.
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

/// Facts by name, each stated once.
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
