"""The scheduler role over a session that is played."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pillion import vllm_compat
from pillion.config import Config
from pillion.metadata import StepOutput
from pillion.scheduler import Scheduler

BLOCK_TOKENS, BLOCKS = 16, 64
BLOCK_BYTES = 1024
HERE, ELSEWHERE = 7, 8


class Session:
    """Writes down what is saved; everything that is asked for is a hit of `hits` blocks."""

    def __init__(self, *options: Any) -> None:
        self.groups, _, _ = options[-3:]
        self.generation, self.namespace = 1, HERE
        # Blocks that the sidecar may still read.
        self.read: set[int] = set()
        self.connected = True
        self.hits = 0
        self.counts: list[int] = []
        self.voided = 0
        # Steps whose output vLLM took.
        self.accepted: list[int] = []
        # The fold of every log, by its number.
        self.logs: list[bytes | None] = []
        self.closed: list[int] = []
        # Logs whose keys another engine computes, and those that another engine will load.
        self.awaited: list[int] = []
        self.promised: list[int] = []
        # By log the key of a tail, at a sidecar that knows such keys.
        self.tails: dict[int, bytes] = {}
        self.knows_tails = True
        # (log, first key, blocks) of each save.
        self.saves: list[tuple[int, int, list[int]]] = []
        # (log, first key, blocks) of each save whose blocks are compared, and how many blocks the sidecar has compared.
        self.checked: list[tuple[int, int, list[int]]] = []
        self.compared = self.differing = 0
        self.queries: list[int] = []
        # Logs for whose blocks a step waited.
        self.lingered: list[int] = []
        # Logs with a released lease.
        self.released: list[int] = []

    def open(self, fold: bytes | None) -> int:
        """A log."""
        self.logs.append(fold)
        return len(self.logs) - 1

    def close(self, log: int) -> None:
        """Ends a log."""
        self.closed.append(log)

    def append(self, log: int, hashes: list[bytes], start: int) -> int:
        """All of them."""
        assert log not in self.closed and log not in self.tails
        return len(hashes)

    def append_tail(self, log: int, tail: bytes) -> bool:
        """Written down."""
        assert log not in self.closed
        if self.knows_tails:
            self.tails[log] = tail
        return self.knows_tails

    def await_producer(self, log: int) -> None:
        """Written down."""
        self.awaited.append(log)

    def promise(self, log: int) -> None:
        """Written down."""
        self.promised.append(log)

    def query(self, log: int, start: int, count: int) -> int:
        """As many as there are."""
        assert log not in self.closed
        self.queries.append(log)
        return min(self.hits, count)

    def linger(self, log: int, start: int, count: int, linger_us: int) -> int:
        """Written down."""
        self.lingered.append(log)
        return min(self.hits, count)

    def save(self, log: int, start: int, blocks: list[int], step: int, checked: bool = False) -> bool:
        """Written down."""
        assert log not in self.closed
        (self.checked if checked else self.saves).append((log, start, blocks))
        return True

    def stats(self) -> dict[str, int]:
        """Of checks alone."""
        return {"blocks_checked": self.compared, "blocks_differing": self.differing}

    def load(self, log: int, start: int, blocks: list[int], step: int, sync: bool) -> list[bytes]:
        """A plan."""
        return [b"plan"]

    def sources(self, log: int, start: int, count: int) -> list[int]:
        """All in memory."""
        return [count, 0, 0]

    def weights(self, count: int) -> None:
        """Bound to nothing until ranks say what they hold."""
        self.counts.append(count)
        self.namespace = 0

    @property
    def saving(self) -> int:
        """Blocks of all unfinished saves."""
        return len(self.read)

    def unsaved(self, blocks: list[int]) -> list[int]:
        """Of `blocks`, those that the sidecar may still read."""
        return [block for block in blocks if block in self.read]

    def overwrite(self, blocks: list[int]) -> int:
        """The saves of these blocks are given up."""
        self.read -= set(blocks)
        return 0

    def accept(self, step: int) -> None:
        """Written down."""
        self.accepted.append(step)

    def void_saves(self) -> None:
        """Counted."""
        self.voided += 1

    def arriving(self, log: int) -> bool:
        """Never."""
        return False

    def hint(self, log: int, start: int, count: int) -> None:
        """Not looked at."""

    def release(self, log: int) -> None:
        """Written down."""
        self.released.append(log)

    def end_step(self) -> None:
        """Not looked at."""

    def disconnect(self) -> None:
        """The end."""
        self.generation = 0

    def take_notices(self) -> list[str]:
        """None."""
        return []

    def reconnect(self, namespace: int) -> None:
        """A new connection, whose logs are new."""
        self.generation += 1
        self.namespace = namespace


class Engine:
    """One request after another on the scheduler role, in the order of vLLM's calls."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        check_every: int = 0,
        steps: int = 1,
        on_gpu: bool = False,
        beside_others: bool = False,
        speculative: Any = None,
        **options: Any,
    ) -> None:
        monkeypatch.setattr("pillion.scheduler._shim.SchedulerSession", Session)
        monkeypatch.setattr(vllm_compat, "on_gpu", lambda: on_gpu)
        monkeypatch.setattr(vllm_compat, "groups", lambda kv_cache_config: b"groups", raising=False)
        spec = SimpleNamespace(block_size=BLOCK_TOKENS, page_size_bytes=BLOCK_BYTES)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=["layer"])
        cache = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
        engine = SimpleNamespace(
            max_concurrent_batches=steps,
            kv_transfer_config=SimpleNamespace(engine_id="engine", kv_role="kv_both"),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
            cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor"),
            speculative_config=speculative,
        )
        config: Any = Config("/nowhere", check_every=check_every, **options)
        self.role = Scheduler(config, engine, cache, beside_others=beside_others)
        self.session: Any = self.role._session
        self._free = 1
        self._requests = 0
        # What encoders make in the next steps: places among a request's media, by its id.
        self.encoded: dict[str, list[int]] = {}

    def arrive(self, tokens: int, lora: Any = None, transfer: Any = None) -> Any:
        """A request; `transfer`: its kv_transfer_params."""
        self._requests += 1
        request = SimpleNamespace(
            request_id=f"request-{self._requests}",
            num_tokens=tokens,
            num_prompt_tokens=tokens,
            num_computed_tokens=0,
            kv_transfer_params=transfer,
            num_preemptions=0,
            block_hashes=[bytes([block] * 32) for block in range(tokens // BLOCK_TOKENS)],
            all_token_ids=list(range(tokens)),
            mm_features=[],
            lora_request=lora,
            cache_salt=None,
            prompt_embeds=None,
            skip_reading_prefix_cache=False,
        )
        self.role.announced(request)
        return request

    def ask(self, request: Any) -> int | None:
        """The tokens that the role tells vLLM to take from the cache; None: vLLM is to ask again."""
        return self.role.match(request, 0)[0]

    def compute(
        self,
        request: Any,
        found: int = 0,
        most: int | None = None,
        proven: bool = True,
        blocks: list[int] | None = None,
        loaded: bool = True,
    ) -> Any:
        """A step that computes the prompt, or `most` tokens of it, without the first `found` ones, which the cache holds. Their
        blocks were loaded, or, where they are not `proven` or named as `blocks`, vLLM lists them alone. Another
        connector brings the `found` tokens unless this one has `loaded` them."""
        if blocks is None:
            count = -(-request.num_tokens // BLOCK_TOKENS)
            blocks = list(range(self._free, self._free + count))
            self._free += count
        else:
            proven = False
        self.role.allocated(request, SimpleNamespace(get_block_ids=lambda: [blocks]), found if loaded else 0)
        if found and proven:
            self._end_load(request, blocks[: -(-found // BLOCK_TOKENS)])
        new = SimpleNamespace(req_id=request.request_id, block_ids=[blocks], num_computed_tokens=found)
        request.num_computed_tokens = found
        tokens = min(request.num_tokens - found, most or request.num_tokens)
        metadata = self._step([new], {request.request_id: tokens})
        request.num_computed_tokens += tokens
        return metadata

    def _end_load(self, request: Any, blocks: list[int]) -> None:
        """Blocks of a request were loaded before the step that it begins in."""
        tracked = self.role._requests.follow(request)
        self.role._loaded.clear()
        tracked.loads(0, blocks)
        self.role.loads_ended([request.request_id], ())

    def take(self, step: int) -> None:
        """vLLM takes the output of a step."""
        self.role.accepts(StepOutput(self.role._run, step))

    def go_on(self, request: Any) -> Any:
        """A step that computes the rest of the prompt."""
        metadata = self._step([], {request.request_id: request.num_tokens - request.num_computed_tokens})
        request.num_computed_tokens = request.num_tokens
        return metadata

    def decode(self, *requests: Any) -> Any:
        """A step in which each of them computes a token of a block that is there."""
        return self._step([], {request.request_id: 1 for request in requests})

    def _step(self, new: list[Any], scheduled: dict[str, int]) -> Any:
        cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
        output: Any = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=scheduled,
            new_block_ids_to_zero=None,
            scheduled_encoder_inputs=self.encoded,
        )
        return self.role.step(output)
