//! An engine: requests, their KV, and the memory behind it.

use std::cell::RefCell;
use std::fmt;
use std::ops::Range;
use std::path::Path;

use connector_shim::blocking::{BlockMemory, BlockingEngine, CheckRate, EngineSetup, ProofStart, RequestId};
use shm_protocol::hints::{Advice, Hint, HintAction, HintEnd};

use crate::memory::BlockFile;
use crate::pages::{self, Axes, Element, Page};
use crate::{EngineError, Namespace};

/// An engine's name, memory and checks.
#[derive(Clone, Debug)]
pub struct JoinOptions {
    /// The engine's name, its own among all engines of the sidecar.
    pub name: String,
    /// Blocks of memory: a request holds those of its tokens until it is dropped.
    pub blocks: u32,
    /// Hits from one checked hit to the next: the engine computes the last blocks of a checked hit, and the
    /// sidecar compares them. 0 checks none. The default is 1,000, and the first hit is checked.
    pub check_every: u32,
    /// Tokens of wholly computed hits for 1,000 loaded ones. By default 2.
    pub check_per_mille: u32,
    /// The longest wait of a load for blocks under computation on another node, in ms. By default it does not wait.
    pub miss_wait_ms: Option<u32>,
}

/// K and V of one layer, each dense [heads, tokens, dim]; heads of all shards.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerKv<T> {
    /// K, rotated by its positions as the model's attention reads it.
    pub k: Vec<T>,
    /// V.
    pub v: Vec<T>,
}

/// An engine of a namespace. See the crate's example.
pub struct Engine {
    inner: RefCell<BlockingEngine>,
    memory: BlockFile,
    /// The pages of a shard, layer by layer, each with its first byte in the shard.
    layers: Vec<(usize, Page)>,
    shards: usize,
    shard_bytes: usize,
}

/// A request of an engine, and the blocks with its KV. Dropping it ends it, and frees its blocks.
#[derive(Debug)]
pub struct EngineRequest<'engine> {
    engine: &'engine Engine,
    id: RequestId,
}

// === impl JoinOptions ===

impl JoinOptions {
    /// An engine of this name with so many blocks.
    pub fn new(name: impl Into<String>, blocks: u32) -> Self {
        Self { name: name.into(), blocks, check_every: 1000, check_per_mille: 2, miss_wait_ms: None }
    }
}

// === impl Engine ===

impl Engine {
    /// Joins a namespace at the sidecar of `socket`.
    ///
    /// Fails if no sidecar is there, or if it refuses the engine: the text says which fact differs. A sidecar lost later costs misses, and the
    /// engine connects again by itself.
    pub fn join(
        socket: impl AsRef<Path>,
        namespace: &Namespace,
        options: &JoinOptions,
    ) -> Result<Self, EngineError> {
        let (shards, block_bytes) = (namespace.shards()?, namespace.block_bytes());
        // No request has block 0.
        let blocks = options.blocks.saturating_add(1);
        let memory = BlockFile::new(blocks, block_bytes)?;
        let setup = EngineSetup {
            socket: socket.as_ref().to_owned(),
            name: options.name.clone(),
            facts: namespace.facts().clone(),
            expects: namespace.expects(),
            shards,
            memory: BlockMemory {
                descriptor: memory.descriptor(),
                blocks,
                block_bytes,
                piece_bytes: block_bytes,
            },
            checks: CheckRate { every: options.check_every, per_mille: options.check_per_mille },
            miss_wait_ms: options.miss_wait_ms,
        };
        let inner = BlockingEngine::new(&setup)?;
        if !inner.is_connected() {
            return Err(EngineError::Absent(socket.as_ref().display().to_string()));
        }
        let layers = list_layers(namespace.pages()?);
        let shard_bytes = (block_bytes / u64::from(shards)) as usize;
        Ok(Self { inner: RefCell::new(inner), memory, layers, shards: shards as usize, shard_bytes })
    }

    /// Begins a request with the KV kept for its tokens: from the first token on, of all but the last one at most. [`EngineRequest::held`] says of
    /// how many. Waits for blocks of disks and of other pods, 2 s at most. Without a sidecar, and without room, nothing is held.
    ///
    /// Some hits leave the last blocks for the engine to compute: these are compared once they are saved.
    pub fn load(&self, tokens: &[u32]) -> EngineRequest<'_> {
        self.begin_request(|inner| inner.begin_load(tokens))
    }

    /// [`Engine::load`] of tokens that another engine computes, or is about to: waits for that, 2 s at most, and 30 s while the other engine
    /// [promises](Engine::promise) them.
    pub fn load_awaited(&self, tokens: &[u32]) -> EngineRequest<'_> {
        self.begin_request(|inner| inner.begin_awaited(tokens))
    }

    /// [`Engine::load`], and a promise: this engine computes and saves the rest of these tokens for another engine, which may await them
    /// meanwhile. For as soon as the prompt has come; [`Engine::save`] may be called part by part. The promise lasts until the request is
    /// dropped, 30 s at most, while the engine makes a call at least every 5 s. 64 promises of an engine count at once.
    pub fn promise(&self, tokens: &[u32]) -> EngineRequest<'_> {
        self.begin_request(|inner| inner.begin_promised(tokens))
    }

    /// Carries a hint out for the kept blocks of these tokens; it is no use of them. `seconds` is for retain and pin, by
    /// default 300. Fails if the action does not have this time.
    pub fn hint(
        &self,
        tokens: &[u32],
        action: HintAction,
        seconds: Option<u32>,
    ) -> Result<HintEnd, EngineError> {
        let hint = Hint { advice: Advice::new(action, seconds)?, tokens: None };
        Ok(self.inner.borrow_mut().hint_tokens(tokens, hint))
    }

    fn begin_request(&self, begin: impl FnOnce(&mut BlockingEngine) -> RequestId) -> EngineRequest<'_> {
        EngineRequest { engine: self, id: begin(&mut self.inner.borrow_mut()) }
    }

    /// K and V of all held tokens, layer by layer. Fails if the pages have other elements than `T`.
    pub fn read<T: Element>(&self, request: &EngineRequest<'_>) -> Result<Vec<LayerKv<T>>, EngineError> {
        let held = request.held();
        let mut found = self
            .layers
            .iter()
            .map(|(_, page)| self.empty_kv(page, held))
            .collect::<Result<Vec<_>, EngineError>>()?;
        for (block, tokens) in self.spans(request.id, 0..held) {
            let bytes = self.memory.read_block(block)?;
            self.for_each_page(|layer, page, shard, place| {
                let page_bytes = &bytes[place];
                let LayerKv { k, v } = &mut found[layer];
                for (axes, array) in [(Axes::keys(page), k), (Axes::values(page), v)] {
                    let part = axes.heads() * held * axes.dim();
                    let array = &mut array[shard * part..(shard + 1) * part];
                    pages::read_tokens(page_bytes, &axes, in_page(&tokens, &axes), array, tokens.start)?;
                }
                Ok(())
            })?;
        }
        Ok(found)
    }

    /// Keeps the KV computed for a request: `kv` has, for each layer, K and V of the tokens from [`EngineRequest::held`] to the end of `tokens`,
    /// which are all tokens of the request from its first one on, those of its answer too. They are held then. Full blocks are kept; the
    /// rest is once it is full.
    ///
    /// Call it once the computation has returned without an error. It returns once the sidecar has taken the blocks: the number of those
    /// kept now. Nothing is kept of an engine in a found namespace before a comparison has proven it ([`Engine::prove`]), unless it is the
    /// first there. Fails for arrays of other shapes, and without room for the tokens.
    pub fn save<T: Element>(
        &self,
        request: &EngineRequest<'_>,
        tokens: &[u32],
        kv: &[LayerKv<T>],
    ) -> Result<u64, EngineError> {
        self.write_kv(request.id, tokens, kv)?;
        Ok(self.inner.borrow_mut().save(request.id)?)
    }

    /// Shows that this engine computes the kept KV of its namespace, by the first block of a prompt. `compute` gives K and V of its tokens,
    /// as for [`Engine::save`]; it is called only if the block is kept, and if the engine has shown nothing to this sidecar yet.
    ///
    /// True: the engine may save, as long as the sidecar lives. False: the block is not kept, so try the next prompt. Fails with
    /// [`EngineError::Engine`] if the KV differs: the namespace is closed to this engine then.
    pub fn prove<T: Element, E: From<EngineError>>(
        &self,
        tokens: &[u32],
        compute: impl FnOnce(&[u32]) -> Result<Vec<LayerKv<T>>, E>,
    ) -> Result<bool, E> {
        let id = match self.inner.borrow_mut().begin_proof(tokens) {
            ProofStart::Proven => return Ok(true),
            ProofStart::NotKept => return Ok(false),
            ProofStart::Compute(id) => id,
        };
        // Ends the request if anything fails.
        let request = EngineRequest { engine: self, id };
        let root = &tokens[..self.block_tokens()];
        self.write_kv(id, root, &compute(root)?)?;
        let proven = self.inner.borrow_mut().end_proof(id).map_err(EngineError::from);
        drop(request);
        Ok(proven?)
    }

    /// The number of kept leading tokens among these, in this sidecar, on its disks or at its peers. Loads nothing.
    pub fn kept(&self, tokens: &[u32]) -> usize {
        let blocks = self.inner.borrow_mut().kept_blocks(tokens) as usize;
        blocks * self.block_tokens()
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.inner.borrow().block_tokens() as usize
    }

    /// Messages for the engine's log, each handed over once: a lost or found sidecar, refusals, failed checks.
    pub fn take_notices(&self) -> Vec<String> {
        self.inner.borrow_mut().take_notices()
    }

    /// Leaves the sidecar; all requests have ended.
    pub fn leave_sidecar(self) {
        self.inner.into_inner().disconnect_all();
    }

    // --- memory ---

    fn empty_kv<T: Element>(&self, page: &Page, tokens: usize) -> Result<LayerKv<T>, EngineError> {
        let dtype = page.dtype.as_text();
        if !T::DTYPES.contains(&dtype) {
            let text = format!(
                "pages have {dtype}, and the arrays {}: pages are never converted",
                T::DTYPES.join(" or ")
            );
            return Err(EngineError::Shape(text));
        }
        let [k, v] = [Axes::keys(page), Axes::values(page)]
            .map(|axes| vec![T::default(); self.shards * axes.heads() * tokens * axes.dim()]);
        Ok(LayerKv { k, v })
    }

    fn check_sizes<T: Element>(&self, kv: &[LayerKv<T>], tokens: usize) -> Result<(), EngineError> {
        let right = self
            .layers
            .iter()
            .map(|(_, page)| self.empty_kv::<T>(page, tokens))
            .collect::<Result<Vec<_>, EngineError>>()?;
        let sizes =
            |kv: &[LayerKv<T>]| kv.iter().map(|layer| (layer.k.len(), layer.v.len())).collect::<Vec<_>>();
        if sizes(kv) == sizes(&right) {
            return Ok(());
        }
        let shape = |page: &Page| {
            format!("[{}, {tokens}, {} and {}]", self.shards * page.kv_heads as usize, page.keys, page.values)
        };
        let text = format!(
            "K and V have other sizes than {} layers of {}: pass those of the {tokens} tokens from EngineRequest::held on",
            self.layers.len(),
            self.layers.first().map_or(String::new(), |(_, page)| shape(page))
        );
        Err(EngineError::Shape(text))
    }

    fn write_kv<T: Element>(
        &self,
        id: RequestId,
        tokens: &[u32],
        kv: &[LayerKv<T>],
    ) -> Result<(), EngineError> {
        let first = self.inner.borrow().held_tokens(id) as usize;
        let new = tokens.len().saturating_sub(first);
        self.check_sizes(kv, new)?;
        self.inner.borrow_mut().reserve(id, tokens)?;
        for (block, span) in self.spans(id, first..first + new) {
            let begins = span.start % self.block_tokens() == 0;
            let mut bytes = if begins {
                vec![0; self.shards * self.shard_bytes]
            } else {
                self.memory.read_block(block)?
            };
            self.for_each_page(|layer, page, shard, place| {
                let page_bytes = &mut bytes[place];
                for (axes, array) in [(Axes::keys(page), &kv[layer].k), (Axes::values(page), &kv[layer].v)] {
                    let part = axes.heads() * new * axes.dim();
                    let array = &array[shard * part..(shard + 1) * part];
                    pages::write_tokens(page_bytes, &axes, in_page(&span, &axes), array, span.start - first)?;
                }
                Ok(())
            })?;
            self.memory.write_block(block, &bytes)?;
        }
        Ok(())
    }

    /// The blocks with these tokens of a request, each with its own ones.
    fn spans(&self, id: RequestId, tokens: Range<usize>) -> Vec<(u32, Range<usize>)> {
        let (inner, size) = (self.inner.borrow(), self.block_tokens());
        let spans = inner
            .blocks_of(id)
            .iter()
            .enumerate()
            .map(|(at, block)| (*block, tokens.start.max(at * size)..tokens.end.min((at + 1) * size)));
        spans.filter(|(_, span)| !span.is_empty()).collect()
    }

    /// Calls with each page of a block: its layer, form, shard and bytes.
    fn for_each_page(
        &self,
        mut call: impl FnMut(usize, &Page, usize, Range<usize>) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        for shard in 0..self.shards {
            for (layer, (begin, page)) in self.layers.iter().enumerate() {
                let begin = shard * self.shard_bytes + begin;
                call(layer, page, shard, begin..begin + page.page_bytes() as usize)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layers, shards) = (self.layers.len(), self.shards);
        f.debug_struct("Engine").field("layers", &layers).field("shards", &shards).finish_non_exhaustive()
    }
}

/// The layers of a shard one by one, each with its first byte.
fn list_layers(pages: &[Page]) -> Vec<(usize, Page)> {
    let single = pages.iter().flat_map(|page| std::iter::repeat_n(page, page.layers as usize));
    single
        .scan(0, |begin, page| {
            let own = *begin;
            *begin += page.page_bytes() as usize;
            Some((own, page.clone()))
        })
        .collect()
}

/// Tokens of a request as those of their block.
fn in_page(tokens: &Range<usize>, axes: &Axes) -> Range<usize> {
    let start = tokens.start % axes.tokens();
    start..start + tokens.len()
}

// === impl EngineRequest ===

impl EngineRequest<'_> {
    /// Tokens of the request with their KV in its blocks, from the first one on.
    pub fn held(&self) -> usize {
        self.engine.inner.borrow().held_tokens(self.id) as usize
    }
}

impl Drop for EngineRequest<'_> {
    fn drop(&mut self) {
        self.engine.inner.borrow_mut().end_request(self.id);
    }
}
