"""The engine's side of Pillion in Rust (crate `connector-shim`).

Nothing here waits for the sidecar, except `query` within the step's budget, `linger` and `WorkerSession.finished` for the given
time, and `WorkerSession.load` of a synchronous load into host memory; these release the interpreter. Without a
sidecar every answer is a miss and every save is dropped.
"""

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, final

from pillion.numbers import Numbers, PolicyEvent, PolicyRecord, PolicyRemark, PolicyState, PolicyStep

__all__ = [
    "ITEM_BYTES",
    "KEYS_THEN_VALUES",
    "KEY_THEN_VALUE",
    "Adapters",
    "BlockingEngine",
    "Chain",
    "ConfigError",
    "LayerWaits",
    "Policy",
    "RankLoads",
    "SchedulerSession",
    "ShimError",
    "WorkerSession",
    "check_shared_memory",
    "derive_keys",
    "differences",
    "engine_options",
    "extend_hashes",
    "folded",
    "hash_fact",
    "lay_out_block",
    "needed_blocks",
    "none_hash",
    "plan_blocks",
    "plan_op",
    "read_options",
    "read_page_form",
    "served_tokens",
    "weight_files",
]

# The bytes of an element, by the types of a page.
ITEM_BYTES: dict[str, int]
# The order of a page's bytes in attention kernels: a token's key and then its value, or a head's keys, dimension by dimension,
# and then its values, token by token. Any other packing is a name for equal engines alone.
KEY_THEN_VALUE: str
KEYS_THEN_VALUES: str

class ShimError(Exception):
    """A wrong call, or a refusal by the sidecar; the text names the remedy."""

class ConfigError(ValueError):
    """A wrong option. The text names the valid ones."""

def engine_options() -> list[tuple[str, str, str, str]]:
    """Each option's name, its default in words, the rule of its values, and its meaning."""

def read_options(extra: dict[str, object]) -> dict[str, Any]:
    """The options among the keys of `kv_connector_extra_config`, without their prefix, and the defaults of the others."""

@final
class Adapters:
    """The adapters named by an engine's requests. `request`: the number, name and folder of one; True if ranks read it in every
    step, if its bytes are not in its files, and if its experts are fused."""

    def __new__(cls, run: bytes, form: str) -> Adapters:
        """`form`: further facts on the use of adapters."""
    def look_at(self, request: tuple[int, str, str, bool, bool, bool]) -> bool:
        """Ranks load the adapter unless they hold it. True: they hold other bytes than before."""
    def loads(self, request: tuple[int, str, str, bool, bool, bool]) -> bool:
        """Every rank is about to load the adapter. True: they hold other bytes than before."""
    def forget(self, number: int) -> bool:
        """Ranks no longer hold the adapter. True: they held it."""
    def may_differ(self) -> None:
        """Ranks may hold other bytes than their files had."""
    def word(self, request: tuple[int, str, str, bool, bool, bool]) -> bytes:
        """The adapter's fold, empty for requests without the cache, or `?` while its digest is being computed."""
    def take_notices(self) -> list[str]:
        """Messages for the log, each handed over once."""

@final
class Policy:
    """An engine's decisions on its cache (`connector-shim/src/core/policy`), with a session for each cache group.

    The engine passes numbers. `follow_request` numbers a request. A panic ends the policy: from then on no block is found or
    kept, and loads that the engine counts on in the step are reported as failed.
    """

    def __new__(
        cls,
        options: object,
        engines: list[str],
        world_size: int,
        runs: list[bytes],
        early: list[bool],
        tables: list[bytes],
        algorithm: str,
        groups: list[tuple[int, int, int, int, int]],
        waits: bool,
        on_gpu: bool,
        by_engine: bool,
        consumer: bool,
        recomputes: bool,
        block_bytes: list[int],
        drafts: bool,
        drops_last_block: bool,
        tokens_per_step: int,
        beside_others: bool,
        events: bool,
        steps_in_flight: int,
    ) -> Policy:
        """`options`: a `pillion.config.Config`. `engines`, `runs`, `early`, `tables`, `groups` and `block_bytes` have an item
        for each group. An item of `groups`: tokens of a block, hashes of it, tokens of a window (0: none), blocks read before a
        boundary (0: all). `waits`: a step may wait for a load. `drafts`: a drafter's KV may differ
        under one key. ConfigError: an option does not fit the engine."""
    # --- requests ---
    def may_announce(self, running: int) -> bool:
        """True if one more waiting request is announced, beside so many running ones."""
    def look_for_verdict(self) -> bool:
        """True if a check has found other KV since the last step: blocks of before may be wrong."""
    def follow_request(
        self,
        prompt: int,
        reads: bool,
        awaits: int | None,
        hands_over: bool,
        numbers: Numbers,
        tokens: Sequence[int] | None = None,
    ) -> int:
        """Follows a request from now on, and returns its number. `reads`: it may be served from the cache. `awaits`: its tokens
        saved by another engine. `tokens`: all of its tokens, if its keys depend on nothing else."""
    def follow_hints(self, id: int, params: str | None, envelope: str | None) -> None:
        """The hints of a request's client, as JSON: the member `pillion` of its params, and vLLM's `kv_hints`."""
    def follow_media(self, id: int, media: list[tuple[str, int, int]]) -> None:
        """Outputs of encoders for a request: identifier, first token, tokens."""
    def progress(self, computed: list[tuple[int, int]]) -> None:
        """So many tokens of these requests are computed by now."""
    def announce(self, id: int) -> None:
        """Notes that a request waits for its turn."""
    def matched(self, id: int, numbers: Numbers, computed: int, alone: bool) -> tuple[int | None, bool]:
        """Found tokens beyond `computed`, None: ask again; and True if they come beside the steps. The call waits for the
        step's budget at most."""
    def junction(self, id: int) -> int:
        """The boundary of the request's prefix at which a state is missing: up to there full attention has it; 0: none."""
    def allocated(self, id: int, numbers: Numbers, external: int) -> list[tuple[int, int]] | None:
        """The engine takes so many tokens of the cache. The places of the blocks for `load_blocks`, by group; None: no load."""
    def load_blocks(self, id: int, blocks: list[list[int]]) -> None:
        """Has the step load the hit into these blocks, by group."""
    def sources(self, id: int, tokens: int) -> list[int] | None:
        """Tokens of the last load by the place of their hit: memory, disk, peer; None for unknown places."""
    def take_hit_tokens(self) -> list[int]:
        """The same of all loads since the last call."""
    def loads_ended(self, ids: list[int], failed: list[int]) -> None:
        """The loads of these requests have ended on every rank, without the `failed` blocks."""
    def loads_failed(self, blocks: list[int]) -> None:
        """These blocks were not loaded."""
    def requests_failed(self, ids: list[int]) -> None:
        """The loads of these requests have failed as a whole."""
    def end_request(
        self, id: int, numbers: Numbers, aborted: bool, reason: int, tokens: list[int]
    ) -> tuple[int | None, list[int]]:
        """Ends a request, `aborted` before it was computed or not. Returns the tokens of its prompt kept for another engine, if
        one goes on, and blocks to hold."""
    def held(self, blocks: list[int]) -> None:
        """The engine holds these blocks until `begin_step` or `release_held` gives them back."""
    def release_held(self) -> list[int]:
        """Gives back all held blocks."""
    # --- one step ---
    def begin_step(
        self,
        begun: list[tuple[int, Sequence[list[int]], int, Numbers | None]],
        grown: list[tuple[int, Sequence[list[int]]]],
        filled: list[int],
        encoded: list[str],
        offered: list[tuple[int, int, int, int]] = ...,
        copied: list[tuple[int, int]] = ...,
    ) -> tuple[list[int], list[int], bool, int]:
        """A step has been scheduled. `begun`: requests with a new block table: number (-1: not followed), blocks by group,
        groups without a session last, their tokens. `grown`: further blocks. `filled`: other blocks the step writes.
        `offered`: states made by the step: request, group, block, and tokens of the state. `copied`: blocks copied before it
        computes, from and to. Returns the requests due in `end_step`, released blocks, True if blocks of before may be wrong,
        and the number of blocks to name in `end_step`."""
    def end_step(self, due: list[tuple[int, int | None, Numbers]], computes: int, named: list[int]) -> PolicyStep:
        """Posts the step's saves. `due`: each such request and its tokens computed by the step. `computes`: the number of all
        requests computed by the step. `named`: the blocks that vLLM reuses next."""
    def passes_over(self, step: int) -> bool:
        """True if `accept_step` of this step needs the requests of the open steps."""
    def accept_step(self, step: int, scheduled: dict[int, list[int]] = ...) -> None:
        """The engine has taken the output of a step; earlier outputs not taken by now never will be."""
    # --- weights ---
    @property
    def updating(self) -> bool: ...
    def update(self, updating: bool) -> None:
        """Notes the begin or the end of an update of the weights."""
    def disown(self) -> None:
        """Keeps no block of before."""
    def weights_may_have_changed(self) -> None:
        """Has every rank state its weights again."""
    def ranks_copy(self) -> None:
        """Ranks copy for themselves."""
    # --- state and messages ---
    @property
    def state(self) -> PolicyState: ...
    def take_unkept(self) -> tuple[int, int]:
        """Since the last call: passed-over steps, and unproven blocks."""
    def take_notices(
        self,
    ) -> tuple[list[str], list[PolicyRemark], list[PolicyRecord], list[tuple[int, list[tuple[str, str]]]]]:
        """Messages for the log, remarks, records of requests, and ended requests with the outcomes of their hints."""
    def take_events(self, group: int) -> list[PolicyEvent]:
        """Changes of a group's blocks."""
    def lingers(self) -> bool:
        """True if an engine without requests must step on for these."""
    def blocks_cleared(self) -> None:
        """Routers were told to forget all blocks."""
    def sessions(self) -> list[SchedulerSession]:
        """The sessions of the groups, for their figures."""
    def log(self, id: int, group: int) -> int:
        """The key log of a request in a group; -1: none."""
    def disconnect(self) -> None:
        """Ends the sessions permanently."""

@final
class RankLoads:
    """A rank's loads in all cache groups, and the reports of their ends. Each report is repeated until vLLM has taken the
    output of its step: vLLM frees the blocks of a request with a running load only after the report of the load's end."""

    def __new__(cls, whole: bool) -> RankLoads:
        """`whole`: a load without all blocks has failed as a whole."""
    def begin_step(self, step: int, passed: Sequence[int]) -> None:
        """A step begins; vLLM has passed over those others."""
    def begin_load(self, group: int, request: str, plan: bytes) -> None:
        """A load of a waiting request has begun."""
    def lose_load(self, request: str, blocks: list[int]) -> None:
        """A load of a waiting request is over before it began, without these blocks."""
    def end_group(self, group: int) -> None:
        """All loads of a group have ended, without any block."""
    def fail_blocks(self, blocks: list[int]) -> None:
        """Notes blocks that a step reads, and that were not loaded."""
    def look_for_ends(self, group: int, session: WorkerSession, within_us: int) -> None:
        """Notes the ends of a group's loads, and waits at most so long for that of a request."""
    def take_ended(self) -> set[str] | None:
        """Requests with an ended load, well or not, each once; the load has ended in all groups."""
    def take_failed(self) -> set[str]:
        """Requests with a load that failed as a whole; each is among the last `take_ended`."""
    def take_failed_blocks(self) -> set[int]:
        """Blocks not loaded. Blocks read by a step are reported once: other requests may have the blocks since."""

@final
class LayerWaits:
    """A forward on a GPU with waits for its loads cut by cut, just before the layers that read them. A kind of forward may do
    so once a whole forward of that kind has called the hook of every layer in order."""

    def __new__(
        cls, layers: list[str], cut_layers: list[int], allowed: bool, running_mode: Callable[[], str | None]
    ) -> LayerWaits:
        """`cut_layers`: layers of each cut. `allowed`: one forward a step calls the hooks. `running_mode`: the kind of the
        forward under a hook; None: a forward that proves nothing."""
    def begin_step(self) -> list[int]:
        """The waits left by a forward that raised, by their cuts."""
    def permits(self, mode: str | None) -> bool:
        """True if a forward of this kind may wait cut by cut."""
    def expect_blocks(self, blocks: list[int]) -> None:
        """This step's forward waits for these blocks cut by cut."""
    @property
    def waiting(self) -> bool:
        """True if this step's forward still has waits to enqueue."""
    def reach_layer(self, layer: str) -> list[int] | None:
        """The waits to enqueue before a layer; None: no further hook of the step has an effect."""
    def end_step(self, loading: int) -> tuple[list[int], list[int]] | None:
        """A forward that did not wait for all of its loads: waits to enqueue now, and blocks that it may have read too early.
        `loading`: loads without an enqueued wait."""

@final
class SchedulerSession:
    """The scheduler's session. Log numbers are opaque; those of an earlier connection are void: they miss."""

    def __new__(
        cls,
        socket: str | PathLike[str],
        engine: str,
        world_size: int,
        run: bytes,
        budget_us: int,
        by_engine: bool,
        early: bool,
        miss_wait_ms: int | None = None,
        part_blocks: int = 0,
        whole_blocks: int = 0,
        groups: bytes | None = None,
        handover_wait_ms: int | None = None,
        promise_wait_ms: int | None = None,
        wait_max_ms: int | None = None,
    ) -> SchedulerSession:
        """`part_blocks`: blocks of a part, if queries may be answered while their blocks are on their way; 0: they may not.
        `whole_blocks`: queries of an awaiting log for so many blocks may not either. `groups`: 16 bytes, a digest of the table
        of cache groups, as stated by the workers too."""
    @property
    def connected(self) -> bool: ...
    @property
    def generation(self) -> int:
        """Connections so far."""
    @property
    def saving(self) -> int:
        """Blocks still to be read by the sidecar."""
    @property
    def namespace(self) -> int:
        """The first 8 bytes of the bound engine's namespace; 0 while it is not bound."""
    def open(self, fold: bytes | None = None) -> int:
        """A new key log; -1 without sidecar or room. `fold`: 16 bytes to mix into each of its keys. Picks up a new
        connection."""
    def append(self, log: int, hashes: list[bytes], start: int) -> int:
        """Appends `hashes[start:]`, `start` being the log's length; returns the length, unchanged without room."""
    def append_tail(self, log: int, tail: bytes) -> bool:
        """Ends a log with the key of a prompt's tail. False: without room, or the sidecar does not know tails."""
    def await_producer(self, log: int) -> None:
        """Another engine computes the keys of `log`, or is about to: a query of it asks again (-1) until they are there, or
        until the wait is not worthwhile."""
    def hand_over(self, log: int) -> None:
        """Another engine will load the keys of `log`: its blocks saved from now on are kept for the handover."""
    def promise(self, log: int) -> None:
        """This engine computes the keys of a `log` without keys for another engine: the other one waits until this log is
        closed, while this engine works. The saved blocks of the log are handed over."""
    def hint(self, log: int, start: int, count: int) -> None:
        """Announces a coming query of keys `start..start + count`; awaits nothing."""
    def query(self, log: int, start: int, count: int) -> int:
        """Leading hits among keys `start..start + count`, under a lease; 0 is a miss, -1: ask again next step."""
    def linger(self, log: int, start: int, count: int, within_us: int) -> int:
        """The answer of a `query` pending with -1, within so much time."""
    def ask_ahead(self, log: int, start: int, count: int) -> None:
        """Posts the next `query` of the log, so the sidecar looks meanwhile; awaits nothing."""
    def tell_prefill(self, token_ns: float, slope_ns: float) -> None:
        """The engine computes a prompt's first token in so many nanoseconds, and each further one `slope_ns` slower."""
    def arriving(self, log: int) -> bool:
        """True if blocks of the last answer were on their way: load them asynchronously."""
    def sources(self, log: int, start: int, count: int) -> list[int]:
        """Blocks among hits `start..start + count`, to be loaded: found in memory, on a disk and at a peer."""
    def load(self, log: int, start: int, block_ids: list[int], step: int, sync: bool) -> list[bytes]:
        """Posts a load under the log's lease and returns its plan; if blocks are on their way, one plan for each part, each a
        load with its own end; empty: no lease covers it, load nothing."""
    def save(self, log: int, start: int, block_ids: list[int], step: int, checked: bool = False) -> bool:
        """Posts a save of keys from `start`, to be read once `step` is done, and kept once it was accepted; False: dropped.

        `checked`: blocks already kept under these keys are compared with the saved ones; `stats` counts them as
        `blocks_checked` and `blocks_differing`. Blocks not kept, because this engine has proven nothing, count as
        `blocks_unproven`.
        """
    def accept(self, step: int) -> None:
        """The engine went on with the output of `step`, returned by every rank: saves of the step may be kept. Saves of
        earlier steps without `accept` are void; `stats` counts their blocks as `blocks_unaccepted`."""
    def overwrite(self, block_ids: list[int]) -> int:
        """Gives up the unfinished saves of these blocks; returns how many there were."""
    def unsaved(self, block_ids: list[int]) -> list[int]:
        """The blocks among `block_ids` still to be read by the sidecar."""
    def void_saves(self) -> None:
        """Gives up every unfinished save."""
    def release(self, log: int) -> None:
        """Ends the log's lease unused."""
    def close(self, log: int) -> None:
        """Ends the log."""
    def salt(self) -> bool:
        """Starts a new generation of the namespace; no lease survives. False: no randomness, nothing changed."""
    def weights(self, count: int) -> None:
        """The weights may have changed for the `count`th time: no lease survives, saves are dropped and queries pending, for
        200 ms at most, until every rank has called `set_weights` with this count. A count not above the last one does
        nothing."""
    def end_step(self) -> None:
        """Publishes, reaps, refills the budget, and checks that the sidecar is still there."""
    def announce(self) -> None:
        """Has `take_changes` report every block within this engine's reach at the sidecar, and then changes. A further call has
        every block reported again: the router has forgotten all."""
    def take_changes(self) -> tuple[list[tuple[bool, bool, bytes]], bool]:
        """Changes since the last call, in their order: True if the block can be found there now, True if its place is a disk,
        and its key; and True if a save has not ended. Changes of one block at one place alternate. Without a sidecar no block
        can be found."""
    def stats(self) -> dict[str, int]: ...
    def take_notices(self) -> list[str]:
        """Messages for the log, each handed over once."""
    def disconnect(self) -> None:
        """Ends the session permanently."""

@final
class BlockingEngine:
    """An engine of one process: its calls wait for the cache. `pillion.engine` documents them. A request is a number."""

    def __new__(
        cls,
        socket: str | PathLike[str],
        name: str,
        facts: dict[str, str],
        expects: str | None,
        shards: int,
        descriptor: int,
        blocks: int,
        block_bytes: int,
        piece_bytes: int,
        check_every: int,
        check_per_mille: int,
        miss_wait_ms: int,
    ) -> BlockingEngine:
        """`expects`: the digest of a found namespace; none: the facts are the engine's own. `descriptor`: its memory, all
        blocks' first pieces before their second ones; block 0 is never used."""
    @property
    def connected(self) -> bool: ...
    def begin_load(self, tokens: list[int]) -> int: ...
    def begin_awaited(self, tokens: list[int]) -> int: ...
    def begin_promised(self, tokens: list[int]) -> int: ...
    def held_tokens(self, request: int) -> int: ...
    def blocks_of(self, request: int) -> list[int]: ...
    def reserve(self, request: int, tokens: list[int]) -> list[int]:
        """The request's blocks, with room for the KV of all of these tokens; raises without room."""
    def save(self, request: int) -> int:
        """Takes the reserved tokens' KV as written; returns the number of kept blocks among them."""
    def end_request(self, request: int) -> None: ...
    def kept_blocks(self, tokens: list[int]) -> int: ...
    def hint_tokens(self, tokens: list[int], action: str, seconds: int | None) -> str:
        """The outcome's name; raises for an action or a time outside of the schema."""
    def begin_proof(self, tokens: list[int]) -> tuple[bool, int | None]:
        """True if the engine has proven itself; and the request to reserve, write and pass to `end_proof`."""
    def end_proof(self, request: int) -> bool: ...
    def counts(self) -> dict[str, int]: ...
    def take_notices(self) -> list[str]: ...
    def disconnect(self) -> None: ...

@final
class WorkerSession:
    """One rank's session.

    Its memory is the host's, behind `fds`, or a GPU's, at `pointers`: one for each storage, the offsets of its regions
    counting from there, in the current CUDA context of the calling thread. A `stream` is a CUstream of that GPU,
    such as `torch.cuda.current_stream().cuda_stream`; host memory ignores it.
    """

    def __new__(
        cls,
        socket: str | PathLike[str],
        engine: str,
        world_size: int,
        rank: int,
        shard: int,
        shards: int,
        blocks: int,
        regions: list[tuple[int, int, int, int]],
        fds: list[int],
        copy: str,
        facts: dict[str, str],
        pointers: list[int] = ...,
        cuts: list[int] = ...,
        stream: int = 0,
        expects: str | None = None,
        live_weights: bytes | None = None,
        groups: bytes | None = None,
        proves: bool = False,
    ) -> WorkerSession:
        """`cuts`, on a GPU: ascending ends, in bytes of a block, of the parts of a load's delivery. `expects`: the required
        namespace of the facts. `live_weights`: 16 bytes, a digest of a sample of every parameter as loaded.
        `groups`: as in the scheduler's session. `proves`: the facts are others', so saved blocks are kept once a check has
        passed; a fact weights_live says the same."""
    @property
    def connected(self) -> bool: ...
    @property
    def generation(self) -> int:
        """Connections so far."""
    @property
    def namespace(self) -> str:
        """32 hex digits; empty while unknown. With several ranks to state their weights it is known once each has joined the
        run, and after `set_weights` once the engine is bound again."""
    @property
    def namespace_line(self) -> str:
        """The namespace and its facts in one line, as the sidecar logs it; empty as `namespace` is."""
    def set_weights(self, count: int, digest: bytes | None) -> None:
        """States the weights of this rank, by a digest of 16 bytes, in answer to the scheduler's `weights(count)`; 0:
        the rank found the change by itself. None: they cannot be sampled, and its blocks are not shared from now on.
        Loads fail until the engine is bound again."""
    def join(self, run: bytes) -> None:
        """Takes part in the scheduler's run; idempotent. Picks up a new connection."""
    def start(self, step: int, stream: int = 0) -> None:
        """The step begins, on a GPU once the stream gets there: its loads may be written. Picks up a new connection."""
    def done(self, step: int, wake: bool, stream: int = 0) -> None:
        """The step's KV is written, on a GPU once the stream gets there; `wake` wakes the sidecar because something
        waits for the fence."""
    def load(self, plan: bytes, stream: int = 0, by_cuts: bool = False) -> list[int] | None:
        """A synchronous load: loads now and returns the failed blocks. On a GPU nothing is waited for and none fail: the
        wait for all blocks is enqueued on the stream, or with `by_cuts` left to `wait_cut`. Any other load begins, and
        `finished` reports its end."""
    def wait_cut(self, cut: int, stream: int) -> None:
        """Enqueues the wait for cut `cut`, counted from 0, and all before it, of every sync load since `start`."""
    @property
    def loading(self) -> int:
        """Sync loads since `start` whose last cut was not waited for yet; 0 on host memory."""
    def finished(self, within_us: int = 0) -> list[tuple[int, list[int]]]:
        """Ends of loads begun without `sync`, each once: operation and failed blocks. Waits for one for so long at most."""
    def stats(self) -> dict[str, int]: ...
    def take_notices(self) -> list[str]:
        """Messages for the log, each handed over once."""
    def end_session(self, within_us: int) -> bool:
        """Ends the session permanently, and returns once nothing of it reads or writes the rank's memory. Returns False after
        `within_us`: then the memory may not go."""
    def disconnect(self) -> None:
        """Ends the session permanently."""

@final
class Chain:
    """One request's block hashes; `pillion.keys.Chain` documents it."""

    def __new__(cls, algo: str, none_hash: bytes, block_size: int, form: str, before: bytes | None = None) -> Chain: ...
    def append(
        self,
        token_ids: Sequence[int],
        extra_keys: Sequence[Sequence[str | bytes | tuple[str | int | bytes, ...]] | None] | None,
    ) -> None: ...
    def hashes(self, start: int) -> list[bytes]: ...
    def keys(self, start: int) -> list[bytes]: ...
    def tail(self, extra_keys: Sequence[str | bytes | tuple[str | int | bytes, ...]] | None) -> bytes | None: ...
    def __len__(self) -> int: ...

def extend_hashes(
    before: bytes | None,
    hashes: Sequence[bytes],
    token_ids: Sequence[int],
    extra_keys: Sequence[Sequence[str | bytes | tuple[str | int | bytes, ...]] | None] | None,
    form: str,
) -> list[bytes]:
    """The keys of blocks behind one with the key `before`, of hashes of 16 bytes."""

def needed_blocks(reads: int, every: int, first: int, end: int, prompt: int, own: tuple[int, int]) -> list[tuple[int, int]]:
    """The parts of the blocks `first..end` to save for a cache group, if `reads` blocks are read before a point (0: all), and
    each prompt has a point `every` some blocks (0: none). `prompt`: its whole blocks; `own`: further points of it."""

def none_hash(algo: str, seed: str | None, rule: str) -> bytes:
    """The parent of a first block."""

def derive_keys(
    algo: str,
    seed: str | None,
    rule: str,
    form: str,
    block_size: int,
    token_ids: Sequence[int],
    extra_keys: Sequence[Sequence[str | bytes | tuple[str | int | bytes, ...]] | None] | None,
    group: int,
    hash_block_size: int | None,
) -> tuple[bytes, list[bytes], bytes | None]:
    """First hash, keys of the full blocks, key of the tail."""

def folded(hash: bytes, fold: bytes) -> bytes:
    """The key of a block of this hash in a log opened with this fold."""

def plan_op(plan: bytes) -> int:
    """The operation of a plan."""

def plan_blocks(plan: bytes) -> list[int]:
    """The blocks written by a plan."""

def check_shared_memory(needed: int, ranks: int, full: bool) -> None:
    """Raises an OSError unless /dev/shm has room for so many bytes, which each rank moves there. `full`: there was none."""

def weight_files(directory: str | PathLike[str]) -> str | None:
    """The digest of a directory's safetensors files, as the fact `weights` states it; None if there are none."""

def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str | None, str | None, str]]:
    """Differing facts, the most telling first: name, ours, theirs, and the remedy."""

def read_page_form(
    text: str,
) -> list[tuple[tuple[int, int, int, int, int, int], str, tuple[int, list[int]], tuple[int, list[int]]]]:
    """The fact `page_form` by runs of like layers: layers, tokens, kernel block, heads, keys and values; dtype; of K and of V
    in elements the offset, and the strides of heads, kernel blocks, tokens and content, 0 for an axis of length 1."""

def hash_fact(algorithm: str) -> str:
    """The fact `hash_algorithm` for vLLM's algorithm of this name."""

def lay_out_block(
    layers: Sequence[tuple[tuple[int, int, int], Sequence[int], Sequence[int], int, str, tuple[int, int, str]]],
) -> tuple[list[tuple[int, int, int, int]], str, list[int], list[int]]:
    """The layout of a cache group's tensors in a block: its regions (storage, offset of block 0, stride, bytes), the fact
    `page_form`, and the ends and the layers of cuts. A tensor has its storage, the elements before it
    and bytes of one, lengths and strides of all axes, the axis of blocks, the dtype, and of a head the elements of a key and
    of a value, 0 where they are not known, and the packing."""

def served_tokens(
    groups: list[tuple[int, int, int, int, int]], limit: int, kept: list[list[bool]], first: int = 0, drops: bool = False
) -> tuple[int, int]:
    """The end of the tokens served beyond `first` of a prompt with `limit` of them, by cache groups with these blocks, and the
    boundary at which a state is missing (0: none); each group as in `Policy`. `drops`: the engine takes a block from its own
    hits, for a drafter."""
