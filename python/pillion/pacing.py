"""What one step takes in: which loads it waits for, which go on in the background, and which are put off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pillion import vllm_compat
from pillion.config import Config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

# `auto` loads synchronously when the copy is predicted to take no longer than this, 4 GB, unless pillion.sync_ms says how long.
# The step computes layer by layer behind the copy, and an asynchronous load costs its request a step more. Measured beside
# eleven other requests: 912 tokens/s so, 886 with a limit of 2 ms (benches/README.md).
AUTO_SYNC_MS = 100.0
# An engine that decodes what others compute is there for even gaps between tokens.
AUTO_SYNC_CONSUMER_MS = 2.0
# Bytes copied in a millisecond over PCIe, for that prediction: scattered pieces of 32 KiB were measured at 42 GB/s, whole
# blocks at 54.
BYTES_PER_MS = 40_000_000
# What one step of a GPU takes in before it is full: new tokens to compute, and what synchronous loads copy. Requests that
# arrive together then begin one after the other instead of all waiting for the last one's KV and prompt: first tokens of
# conversations came after 190 ms so, 288 before (benches/README.md).
STEP_NEW_TOKENS = 512
STEP_COPY_MS = 10.0
# Beside a full step a load begins in the background, so that a later step need not wait for it: so many at once, since each
# holds blocks that nothing computes on. Measured: 914 tokens/s with none, 932 with 1, 889 with 3.
BACKGROUND_LOADS = 1
# A prompt of another engine whose copy takes no longer, and which a step would wait for beside other requests, is loaded by the
# step that goes on with it, once all of it is there. A load between steps would begin earlier, but it is seen to have ended two
# steps later, behind vLLM's pauses of 1 ms. On a host answers came 5 to 10 ms sooner from parts, of 250 to 2,900 tokens.
WHOLE_MS = 8.0
# How long a step that has nothing else to do waits for what comes from another engine: vLLM looks once in a millisecond.
LINGER_US = 2000
# Bytes of each part in which blocks are saved for another engine, and loaded that are still on their way: a millisecond on the
# wire, and enough for a copy. A host copies a quarter of it in about that time.
PART_BYTES = 16 << 20
HOST_PART_BYTES = 4 << 20
logger = vllm_compat.init_logger("vllm.pillion")


class Pacing:
    """What may be loaded how, and what the next step has taken in so far."""

    def __init__(self, config: Config, vllm_config: VllmConfig, block_bytes: int) -> None:
        self._load = config.load
        on_gpu = vllm_compat.on_gpu()
        by_engine = config.copier(on_gpu) == "engine"
        # Before a step begins vLLM's prefix cache has the hashes of what it loads and computes, and the step behind it may be
        # in flight. Of a load that fails both would stay: where its request is aborted or preempted, nobody computes those
        # blocks again. On a GPU whose sidecar copies, the engine's stream goes on over whole loads alone.
        self._may_wait = on_gpu and not by_engine
        if not self._may_wait and self._load == "sync":
            logger.warning(
                "pillion: pillion.load=sync has no effect because %s, and tokens computed from a load that fails could be "
                "answered. Loads are asynchronous: leave the option out",
                "this engine copies for itself (pillion.copy=engine)" if on_gpu else "KV lies in host memory",
            )
        ms = AUTO_SYNC_CONSUMER_MS if vllm_config.kv_transfer_config.kv_role == "kv_consumer" else AUTO_SYNC_MS
        if config.sync_ms is not None:
            ms = config.sync_ms
        # The most blocks that `auto` loads synchronously beside other requests.
        self._sync_blocks = int(ms * BYTES_PER_MS) // block_bytes
        # Blocks of synchronous loads after which a step takes no more of them.
        self._step_blocks_max = int(STEP_COPY_MS * BYTES_PER_MS) // block_bytes
        # Blocks of a part; 0: nothing is loaded while blocks are on their way, because it could not be, or must not fail.
        may_fail = self._load != "sync" and vllm_compat.recomputes_failed_loads(vllm_config)
        self.blocks_of_part = -(-(PART_BYTES if on_gpu else HOST_PART_BYTES) // block_bytes)
        self.part_blocks = self.blocks_of_part if may_fail and not by_engine else 0
        # The most blocks of another engine's prompt that are not loaded in parts.
        waits = self._may_wait and self._load != "async"
        self.whole_blocks = min(int(WHOLE_MS * BYTES_PER_MS) // block_bytes, self._sync_blocks) if waits else 0
        # Whether nothing was computed in the last step, and nothing is to be in this one so far.
        self._idle = True
        # Blocks of this step's synchronous loads, and new tokens of its requests, so far.
        self._step_blocks = self._step_tokens = 0
        # Requests whose load goes on in the background.
        self._background: set[str] = set()

    def ranks_copy(self) -> None:
        """Ranks copy for themselves although the sidecar was to: their loads can fail."""
        self._may_wait = False

    def synchronous(self, blocks: int, alone: bool) -> bool | None:
        """Whether a step waits for a load of so many blocks, `alone`: beside no other request; None: not in this step."""
        if not self._may_wait or self._load == "async":
            return False
        if self._load == "auto" and blocks > self._sync_blocks and not alone:
            return False
        # The first request always fits into the step.
        if self._step_blocks <= self._step_blocks_max and self._step_tokens <= STEP_NEW_TOKENS:
            return True
        return None if self._load == "sync" or len(self._background) >= BACKGROUND_LOADS else False

    def linger_us(self) -> int:
        """How long this step may wait for another engine: once, and only where nothing waits for the step."""
        if not self._idle or self._background:
            return 0
        self._idle = False
        return LINGER_US

    def begin(self) -> None:
        """A request was given memory in this step."""
        self._idle = False

    def load(self, request: Request, blocks: int, new_tokens: int, sync: bool) -> None:
        """A load begins; with `sync` its request is computed in this step."""
        if sync:
            self._step_blocks += blocks
            self._step_tokens += new_tokens
        else:
            self._background.add(request.request_id)

    def compute(self, request: Request) -> None:
        """A request without a load, perhaps any more, is computed in this step."""
        if request.request_id in self._background:
            self._background.discard(request.request_id)
            self._step_tokens += request.num_tokens - request.num_computed_tokens

    def end_step(self, idle: bool) -> None:
        """The next step has taken in nothing; `idle`: neither had this one."""
        self._step_blocks = self._step_tokens = 0
        self._idle = idle

    def forget(self, request: Request) -> None:
        """The request is over."""
        self._background.discard(request.request_id)
