//! `pillion_engine_*`: an engine of one process that waits for its cache. Keys, plans and steps stay inside.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use shm_protocol::hints::{Hint, HintEnd};

use super::error::{CallFailure, Status, require_pointer, run_call};
use super::handle::{GuardedHandle, HandleNotices, end_handle, put_result};
use super::raw::{Items, Text};
use super::worker::{Fact, read_facts};
use crate::blocking::{BlockMemory, BlockingEngine, CheckRate, EngineSetup, ProofStart};

/// An engine of one process.
#[derive(Debug)]
pub struct Engine(GuardedHandle<BlockingState>);

#[derive(Debug)]
struct BlockingState {
    engine: BlockingEngine,
    notices: HandleNotices,
    /// Handed out last.
    blocks: Vec<u32>,
}

/// An engine, its namespace and its memory.
#[repr(C)]
#[derive(Debug)]
pub struct EngineOptions {
    /// Path of the sidecar's socket.
    pub socket: Text,
    /// Name of this engine, 1 to 256 bytes; each engine has another one.
    pub name: Text,
    /// As in PillionWorkerOptions.
    pub facts: Items<Fact>,
    /// The namespace joined with other engines' facts, 32 hex digits. NULL: the facts are this engine's own.
    pub expects: Text,
    /// Parts of a block, each with some of the heads: 1, or as many as the other engines have ranks.
    pub shards: u32,
    /// A descriptor of shared memory (memfd_create(2)) that can be written; the caller closes it.
    pub descriptor: i32,
    /// Blocks in the memory. Block 0 is never used.
    pub blocks: u32,
    /// Bytes of a block, all shards.
    pub block_bytes: u64,
    /// Bytes of a piece, a divisor of `block_bytes`: the memory has the first pieces of all blocks, then their second ones. With
    /// several shards a block is one piece.
    pub piece_bytes: u64,
    /// Hits from one checked hit to the next, 0: none is checked. vLLM's default is 1,000.
    pub check_every: u32,
    /// Tokens of wholly computed hits for 1,000 loaded ones. vLLM's default is 2.
    pub check_per_mille: u32,
    /// How long a load waits for blocks that an engine in another pod is computing, in milliseconds; at most 2,000.
    pub miss_wait_ms: u32,
}

/// The blocks of a request, and the tokens with their KV in them. Valid until the next call with the engine.
#[repr(C)]
#[derive(Debug)]
pub struct HeldTokens {
    /// Tokens with KV, from the request's first one on.
    pub tokens: u32,
    /// Block ids, in the order of the tokens.
    pub blocks: Items<u32>,
}

/// The begin of a proof.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct ProofBegin {
    /// The engine may save: nothing is to be computed.
    pub proven: bool,
    /// The request of the tokens to compute; 0: there is none, as the first block is not kept.
    pub request: u64,
}

/// The outcome of a hint.
#[repr(C)]
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum HintOutcome {
    /// It was carried out for all blocks.
    Done = 0,
    /// The engine's limit left some blocks out.
    Clipped = 1,
    /// Some blocks are nowhere, or there is no sidecar that knows hints.
    Missing = 2,
}

// === exported ===

/// Joins a namespace. Fails where the sidecar refuses the engine, and the text says why; and where there is none.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_join(
    options: Option<&EngineOptions>,
    engine: Option<&mut MaybeUninit<Box<Engine>>>,
) -> Status {
    run_call(|| {
        let (options, out) = (require_pointer("options", options)?, require_pointer("engine", engine)?);
        let setup = options.engine_setup()?;
        let engine = BlockingEngine::new(&setup)?;
        if !engine.is_connected() {
            let socket = setup.socket.display();
            let text =
                format!("no sidecar answers at {socket}: start one with `pillion serve --socket {socket}`");
            return Err(CallFailure { status: Status::Refused, text });
        }
        let state = BlockingState { engine, notices: HandleNotices::default(), blocks: Vec::new() };
        out.write(Box::new(Engine(GuardedHandle::new(state))));
        Ok(())
    })
}

/// Leaves the sidecar and frees the handle; NULL is allowed.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_free(engine: Option<Box<Engine>>) {
    end_handle(engine.map(|engine| engine.0), |state| state.engine.disconnect_all());
}

/// Begins a request of these tokens, with the KV kept for them: from the first token on, of all but the last one at most. Waits for
/// blocks of disks and of other pods, 2 s at most. Without a sidecar, and without room, nothing is held: see pillion_engine_held.
/// Some hits leave the last blocks for the engine to compute: these are compared once they are saved.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_load(
    engine: Option<&Engine>,
    tokens: Items<u32>,
    request: Option<&mut MaybeUninit<u64>>,
) -> Status {
    begin_request(engine, request, &tokens, BlockingEngine::begin_load)
}

/// pillion_engine_load of tokens that another engine computes, or is about to: waits for that, 2 s at most, and 30 s while the other
/// engine promises them.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_load_awaited(
    engine: Option<&Engine>,
    tokens: Items<u32>,
    request: Option<&mut MaybeUninit<u64>>,
) -> Status {
    begin_request(engine, request, &tokens, BlockingEngine::begin_awaited)
}

/// pillion_engine_load, and a promise: this engine computes and saves the rest for another one, which may await it meanwhile. The promise
/// lasts until pillion_engine_end, 30 s at most, while the engine makes a call at least every 5 s. 64 of an engine count at once.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_promise(
    engine: Option<&Engine>,
    tokens: Items<u32>,
    request: Option<&mut MaybeUninit<u64>>,
) -> Status {
    begin_request(engine, request, &tokens, BlockingEngine::begin_promised)
}

/// The tokens held by a request, and its blocks: none of a request that has ended.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_held(
    engine: Option<&Engine>,
    request: u64,
    held: Option<&mut MaybeUninit<HeldTokens>>,
) -> Status {
    call(engine, |state| {
        state.blocks = state.engine.blocks_of(request).to_vec();
        let tokens = state.engine.held_tokens(request);
        put_result("held", held, || HeldTokens { tokens, blocks: Items::of_slice(&state.blocks) })
    })
}

/// Gives a request blocks for the KV of `tokens`: all of the request from its first one on, those of its answer too. `blocks` has them
/// then, and `tokens` is the first token whose KV is to be written. Fails without room, and for other tokens than before.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_reserve(
    engine: Option<&Engine>,
    request: u64,
    tokens: Items<u32>,
    blocks: Option<&mut MaybeUninit<HeldTokens>>,
) -> Status {
    call(engine, |state| {
        let out = require_pointer("blocks", blocks)?;
        let reserved = state.engine.reserve(request, tokens.get("tokens")?)?;
        state.blocks = reserved.blocks;
        out.write(HeldTokens { tokens: reserved.first, blocks: Items::of_slice(&state.blocks) });
        Ok(())
    })
}

/// Keeps the KV of the reserved tokens, which is written: they are held then. Returns once the sidecar has taken the blocks that are full;
/// `kept` becomes how many of these it keeps. May be NULL. To be called once the computation has returned without an error.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_save(
    engine: Option<&Engine>,
    request: u64,
    kept: Option<&mut MaybeUninit<u64>>,
) -> Status {
    call(engine, |state| {
        let saved = state.engine.save(request)?;
        if let Some(kept) = kept {
            kept.write(saved);
        }
        Ok(())
    })
}

/// Carries a hint out for the kept blocks of these tokens. `hint` is a JSON object as in docs/hints.md, such as
/// {"action": "pin", "seconds": 600}. Fails if it breaks the schema. It is no use of the blocks.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_hint(
    engine: Option<&Engine>,
    tokens: Items<u32>,
    hint: Text,
    outcome: Option<&mut MaybeUninit<HintOutcome>>,
) -> Status {
    call(engine, |state| {
        let hint =
            Hint::read_json(hint.get("hint")?).map_err(|error| CallFailure::argument(error.to_string()))?;
        let tokens = tokens.get("tokens")?;
        put_result("outcome", outcome, || match state.engine.hint_tokens(tokens, hint) {
            HintEnd::Done => HintOutcome::Done,
            HintEnd::Clipped => HintOutcome::Clipped,
            HintEnd::Missing | HintEnd::Refused => HintOutcome::Missing,
        })
    })
}

/// Ends a request: its blocks are free, and its promise is over.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_end(engine: Option<&Engine>, request: u64) -> Status {
    call(engine, |state| {
        state.engine.end_request(request);
        Ok(())
    })
}

/// Begins a proof by the first block of these tokens: in a namespace that it joined, nothing of an engine is kept before a comparison
/// has proven it, unless it is the first there. With a `proof.request`, reserve that block's tokens, write their KV, and call
/// pillion_engine_end_proof.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_begin_proof(
    engine: Option<&Engine>,
    tokens: Items<u32>,
    proof: Option<&mut MaybeUninit<ProofBegin>>,
) -> Status {
    call(engine, |state| {
        let out = require_pointer("proof", proof)?;
        out.write(match state.engine.begin_proof(tokens.get("tokens")?) {
            ProofStart::Proven => ProofBegin { proven: true, request: 0 },
            ProofStart::NotKept => ProofBegin { proven: false, request: 0 },
            ProofStart::Compute(request) => ProofBegin { proven: false, request },
        });
        Ok(())
    })
}

/// Compares the computed block with the kept one. `proven` becomes whether the engine may save. PILLION_STATUS_REFUSED: they differ, and
/// the namespace is closed to the engine.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_end_proof(
    engine: Option<&Engine>,
    request: u64,
    proven: Option<&mut MaybeUninit<bool>>,
) -> Status {
    call(engine, |state| {
        let out = require_pointer("proven", proven)?;
        out.write(state.engine.end_proof(request)?);
        Ok(())
    })
}

/// The next message for the engine's log, or NULL; each is handed over once, and valid until the next call with this handle.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_engine_notice(
    engine: Option<&Engine>,
    notice: Option<&mut MaybeUninit<*const c_char>>,
) -> Status {
    call(engine, |BlockingState { engine, notices, .. }| {
        put_result("notice", notice, || notices.next(|| engine.take_notices()))
    })
}

fn begin_request(
    engine: Option<&Engine>,
    request: Option<&mut MaybeUninit<u64>>,
    tokens: &Items<u32>,
    begin: impl FnOnce(&mut BlockingEngine, &[u32]) -> u64,
) -> Status {
    call(engine, |state| {
        let tokens = tokens.get("tokens")?;
        put_result("request", request, || begin(&mut state.engine, tokens))
    })
}

fn call(engine: Option<&Engine>, call: impl FnOnce(&mut BlockingState) -> Result<(), CallFailure>) -> Status {
    run_call(|| require_pointer("engine", engine)?.0.enter_call(call))
}

// === impl EngineOptions ===

impl EngineOptions {
    fn engine_setup(&self) -> Result<EngineSetup, CallFailure> {
        Ok(EngineSetup {
            socket: self.socket.get("socket")?.into(),
            name: self.name.get("name")?.into(),
            facts: read_facts(&self.facts)?,
            expects: self.expects.get_some("expects")?.map(str::to_owned),
            shards: self.shards,
            memory: BlockMemory {
                descriptor: self.descriptor,
                blocks: self.blocks,
                block_bytes: self.block_bytes,
                piece_bytes: self.piece_bytes,
            },
            checks: CheckRate { every: self.check_every, per_mille: self.check_per_mille },
            miss_wait_ms: Some(self.miss_wait_ms),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::last_text;
    use super::super::raw::take_result;
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let none = || Items::of_slice(&[]);
        assert_eq!(take_result(|out| pillion_engine_load(None, none(), out)).unwrap_err(), Status::Argument);
        assert_eq!(last_text(), "engine is NULL: pass a pointer");
        assert_eq!(take_result(|out| pillion_engine_join(None, out)).unwrap_err(), Status::Argument);
        let options = EngineOptions {
            socket: Text::of_static(c"/nowhere/pillion.sock"),
            name: Text::of_static(c"engine"),
            facts: Items::of_slice(&[]),
            expects: Text::null(),
            shards: 1,
            descriptor: 0,
            blocks: 2,
            block_bytes: 64,
            piece_bytes: 64,
            check_every: 0,
            check_per_mille: 0,
            miss_wait_ms: 0,
        };
        assert_eq!(
            take_result(|out| pillion_engine_join(Some(&options), out)).unwrap_err(),
            Status::Argument
        );
        assert!(last_text().contains("states no hash_algorithm"), "{}", last_text());
        assert_eq!(pillion_engine_end(None, 1), Status::Argument);
        pillion_engine_free(None);
    }
}
