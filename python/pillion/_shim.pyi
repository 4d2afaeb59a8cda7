"""The engine's side of Pillion in Rust (crate `connector-shim`).

Nothing here waits for the sidecar, except `query` within the step's budget, `linger` and `WorkerSession.finished` for the time
that they are given, and `WorkerSession.load` of a synchronous load into host memory; these release the interpreter. Without a
sidecar every answer is a miss and every save is dropped.
"""

from collections.abc import Sequence
from os import PathLike
from typing import final

__all__ = [
    "ITEM_BYTES",
    "KEYS_THEN_VALUES",
    "KEY_THEN_VALUE",
    "Chain",
    "SchedulerSession",
    "ShimError",
    "WorkerSession",
    "derive_keys",
    "differences",
    "extend_hashes",
    "folded",
    "hash_fact",
    "none_hash",
    "plan_blocks",
    "plan_op",
    "read_page_form",
    "weight_files",
    "write_page_form",
]

# Of an element of each type that a page can have.
ITEM_BYTES: dict[str, int]
# How attention kernels arrange a page: a token's key and then its value, or a head's keys, dimension by dimension, and then its
# values, token by token. Any other packing is a name for equal engines alone.
KEY_THEN_VALUE: str
KEYS_THEN_VALUES: str

class ShimError(Exception):
    """A wrong call, or a sidecar that refuses; the text names the remedy."""

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
    ) -> SchedulerSession:
        """`part_blocks`: blocks of a part, where queries may be answered while their blocks are on their way; 0: they may
        not. `whole_blocks`: nor may those of an awaiting log for so many blocks. `groups`: 16 bytes, a digest of the table of
        cache groups, which the workers state too."""
    @property
    def connected(self) -> bool: ...
    @property
    def generation(self) -> int:
        """Connections so far."""
    @property
    def saving(self) -> int:
        """Blocks that the sidecar may still read."""
    @property
    def namespace(self) -> int:
        """The first 8 bytes of the namespace that the engine is bound to; 0 while it is not."""
    def open(self, fold: bytes | None = None) -> int:
        """A new key log; -1 without sidecar or room. `fold`: 16 bytes that are mixed into each of its keys. Picks up a new
        connection."""
    def append(self, log: int, hashes: list[bytes], start: int) -> int:
        """Appends `hashes[start:]`, `start` being the log's length; returns the length, unchanged without room."""
    def append_tail(self, log: int, tail: bytes) -> bool:
        """Ends a log with the key of a prompt's tail. False: without room, or the sidecar does not know tails."""
    def await_producer(self, log: int) -> None:
        """Another engine computes the keys of `log`, or is about to: a query of it asks again (-1) until they are there, or
        until that is not worth waiting for."""
    def hand_over(self, log: int) -> None:
        """Another engine will load the keys of `log`: what is saved of it from now on is kept for that."""
    def promise(self, log: int) -> None:
        """This engine computes the keys of `log`, which has none yet, for another one: that waits until this log is closed,
        while this engine works. What is saved of it is handed over."""
    def hint(self, log: int, start: int, count: int) -> None:
        """Tells that keys `start..start + count` will be asked for soon; awaits nothing."""
    def query(self, log: int, start: int, count: int) -> int:
        """Leading hits among keys `start..start + count`, under a lease; 0 is a miss, -1: ask again next step."""
    def linger(self, log: int, start: int, count: int, within_us: int) -> int:
        """What `query`, which answered -1, answers within so much time."""
    def ask_ahead(self, log: int, start: int, count: int) -> None:
        """Posts what the next `query` of the log will ask for, so that the sidecar looks meanwhile; awaits nothing."""
    def arriving(self, log: int) -> bool:
        """Whether blocks of the last answer were on their way: load them asynchronously."""
    def sources(self, log: int, start: int, count: int) -> list[int]:
        """Blocks among hits `start..start + count`, to be loaded, that were found in memory, on a disk and at a peer."""
    def load(self, log: int, start: int, block_ids: list[int], step: int, sync: bool) -> list[bytes]:
        """Posts a load under the log's lease and returns its plan, or, where blocks are on their way, one for each part, a load
        that ends by itself; empty: no lease covers it, load nothing."""
    def save(self, log: int, start: int, block_ids: list[int], step: int, checked: bool = False) -> bool:
        """Posts a save of keys from `start`, to be read once `step` is done, and kept once it was accepted; False: dropped.

        `checked`: what is kept already under these keys is compared with the blocks; `stats` counts them as `blocks_checked`
        and `blocks_differing`, and those that may not be kept, since this engine has proven nothing, as `blocks_unproven`.
        """
    def accept(self, step: int) -> None:
        """The engine went on with the output of `step`, which every rank returned: saves of that step may be kept. Those of
        earlier steps that were not accepted are void; `stats` counts their blocks as `blocks_unaccepted`."""
    def overwrite(self, block_ids: list[int]) -> int:
        """Gives up the unfinished saves of these blocks; returns how many there were."""
    def unsaved(self, block_ids: list[int]) -> list[int]:
        """Of `block_ids`, those that the sidecar may still read."""
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
        200 ms at most, until every rank has called `set_weights` with this count. A count that is not above the last one does
        nothing."""
    def end_step(self) -> None:
        """Publishes, reaps, refills the budget, and looks whether the sidecar is still there."""
    def announce(self) -> None:
        """Has `take_changes` tell of every block that this engine could find at the sidecar, and then of what changes. Called
        again, of every block again: whoever was told has forgotten all."""
    def take_changes(self) -> tuple[list[tuple[bool, bool, bytes]], bool]:
        """What has changed since the last call, in its order: whether the block can be found there now, whether that is on a
        disk, and its key; and whether a save has not ended. Of one block at one place what is told alternates. Without a
        sidecar nothing can be found."""
    def stats(self) -> dict[str, int]: ...
    def take_notices(self) -> list[str]:
        """Messages for the log, each handed over once."""
    def disconnect(self) -> None:
        """Ends the session for good."""

@final
class WorkerSession:
    """One rank's session.

    Its memory is the host's, behind `fds`, or a GPU's, at `pointers`: one for each storage, the offsets of its regions
    counting from there, in the CUDA context that is current on the calling thread. A `stream` is a CUstream of that GPU,
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
        """`cuts`, on a GPU: ascending ends, in bytes of a block, of the parts that a load is delivered in. `expects`: the
        namespace that the facts must make. `live_weights`: 16 bytes, a digest of a sample of every parameter as loaded.
        `groups`: as the scheduler's. `proves`: the facts are others', so what is saved is kept once a check has passed; a fact
        weights_live says the same."""
    @property
    def connected(self) -> bool: ...
    @property
    def generation(self) -> int:
        """Connections so far."""
    @property
    def namespace(self) -> str:
        """32 hex digits; empty while unknown. Where several ranks state their weights it is known once each has joined the run,
        and after `set_weights` once the engine is bound anew."""
    @property
    def namespace_line(self) -> str:
        """The namespace and its facts in one line, as the sidecar logs it; empty as `namespace` is."""
    def set_weights(self, count: int, digest: bytes | None) -> None:
        """States the weights that this rank holds, by a digest of 16 bytes, in answer to the scheduler's `weights(count)`; 0:
        the rank found the change by itself. None: they cannot be sampled, and its blocks are shared with nobody from now on.
        Loads fail until the engine is bound anew."""
    def join(self, run: bytes) -> None:
        """Takes part in the scheduler's run; idempotent. Picks up a new connection."""
    def start(self, step: int, stream: int = 0) -> None:
        """The step begins, on a GPU once the stream gets there: its loads may be written. Picks up a new connection."""
    def done(self, step: int, wake: bool, stream: int = 0) -> None:
        """The step's KV is written, on a GPU once the stream gets there; `wake` wakes the sidecar because something
        waits for that."""
    def load(self, plan: bytes, stream: int = 0, by_cuts: bool = False) -> list[int] | None:
        """Of a synchronous load: loads now and returns the failed blocks. On a GPU nothing is waited for and none fail: the
        wait for all blocks is enqueued on the stream, or with `by_cuts` left to `wait_cut`. Any other load begins, and
        `finished` tells its end."""
    def wait_cut(self, cut: int, stream: int) -> None:
        """Enqueues the wait for cut `cut`, counted from 0, and all before it, of every sync load since `start`."""
    @property
    def loading(self) -> int:
        """Sync loads since `start` whose last cut was not waited for yet; 0 on host memory."""
    def finished(self, within_us: int = 0) -> list[tuple[int, list[int]]]:
        """Loads begun without `sync` that ended, each once: operation and failed blocks. Waits for one for so long at most."""
    def stats(self) -> dict[str, int]: ...
    def take_notices(self) -> list[str]:
        """Messages for the log, each handed over once."""
    def end_session(self, within_us: int) -> bool:
        """Ends the session permanently, and returns once nothing of it reads or writes the rank's memory. Returns False after
        `within_us`: then the memory may not go."""
    def disconnect(self) -> None:
        """Ends the session for good."""

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
    """The key of a block of this hash in a log that was opened with this fold."""

def plan_op(plan: bytes) -> int:
    """The operation of a plan."""

def plan_blocks(plan: bytes) -> list[int]:
    """The blocks that a plan writes."""

def weight_files(directory: str | PathLike[str]) -> str | None:
    """The digest of a directory's safetensors files, as the fact `weights` states it; None if there are none."""

def differences(ours: dict[str, str], theirs: dict[str, str]) -> list[tuple[str, str | None, str | None, str]]:
    """Facts that differ, the most telling first: name, ours, theirs, and what makes them agree."""

def read_page_form(
    text: str,
) -> list[tuple[tuple[int, int, int, int, int, int], str, tuple[int, list[int]], tuple[int, list[int]]]]:
    """What the fact `page_form` says of each run of like layers: layers, tokens, kernel block, heads, keys and values; dtype;
    of K and of V in elements the offset, and the strides of heads, kernel blocks, tokens and content, 0 for an axis of length
    1."""

def hash_fact(algorithm: str) -> str:
    """The fact `hash_algorithm` for vLLM's algorithm of this name."""

def write_page_form(layers: Sequence[tuple[Sequence[int], Sequence[int], int, str, tuple[int, int, str]]]) -> str:
    """The fact `page_form` of a cache group's tensors: lengths and strides of all axes, the axis of blocks, the dtype, and of a
    head the elements of a key and of a value, 0 where they are not known, and the packing."""
