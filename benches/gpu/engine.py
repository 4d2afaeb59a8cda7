"""The engine's side of the GPU benchmarks: one real vLLM engine in this process, stepped by hand.

A first-token time runs from `add_request` to the step that returns the token, in one process
(VLLM_ENABLE_V1_MULTIPROCESSING=0): scheduler, worker and clock share a thread, and no queue lies between.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from benches.gpu import weights

# Steps and pauses in which every connector can end its saves; an unfinished save leads to a short hit.
REST_ROUNDS = 4
REST_PAUSE_S = 0.25
REST_TOKENS = 4
# A connector may hold blocks for a moment after a request; then a reset is refused.
RESET_WATCHDOG_S = 30.0
# Requests shorter than a block never fill one: none of their KV is cached or saved.
SHORT_PROMPT_TOKENS = 8
SHORT_OUTPUT_TOKENS_MAX = 7
FIRST_TOKEN_ID = 3


@dataclasses.dataclass
class Answer:
    """One request and its answer."""

    prompt_tokens: int
    added: float
    # The time of its first place in a step: until then it waited for room, or for an asynchronous load.
    scheduled: float = 0.0
    first: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    logprobs: list[dict[int, float]] = dataclasses.field(default_factory=list)
    block_ids: list[int] = dataclasses.field(default_factory=list)
    # The `kv_transfer_params` of the answer, for a router and the decode engine.
    transfer: dict[str, Any] | None = None

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from adding the request to its first token."""
        return (self.first - self.added) * 1e3

    @property
    def waited_ms(self) -> float:
        """Milliseconds from adding the request to its first place in a step."""
        return (self.scheduled - self.added) * 1e3

    @property
    def gaps_ms(self) -> list[float]:
        """Times between tokens; a step with several tokens counts as one."""
        return [(late - early) * 1e3 for early, late in zip(self.times, self.times[1:], strict=False)]


class Engine:
    """vLLM's engine, one step at a time."""

    def __init__(
        self, arguments: dict[str, Any], shape: dict[str, int], say: Callable[[str], None], calm: bool = False
    ) -> None:
        from vllm import LLM

        self.say = say
        self.shape = shape
        weights.register(calm)
        begun = time.monotonic()
        self._llm = LLM(
            skip_tokenizer_init=True,
            load_format=weights.LOAD_FORMAT,
            enable_prefix_caching=True,
            prefix_caching_hash_algo="xxhash_cbor",
            **{"dtype": "bfloat16"} | arguments,
        )
        self._engine = self._llm.llm_engine
        self._config = self._engine.vllm_config
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._next_request = 0
        self._running: dict[str, Answer] = {}
        self._note_places()
        self.start_s = time.monotonic() - begun
        say(f"engine started in {self.start_s:.1f} s, {self.blocks} blocks of {self.block_tokens} tokens")

    def _note_places(self) -> None:
        """Puts a clock behind vLLM's `schedule`."""
        schedule = self._scheduler.schedule

        def timed(*arguments: Any) -> Any:
            output = schedule(*arguments)
            now = time.perf_counter()
            for new in output.scheduled_new_reqs:
                # vLLM adds a random suffix to ids.
                answer = self._running.get(new.req_id.rpartition("-")[0])
                if answer is not None:
                    answer.scheduled = answer.scheduled or now
            return output

        self._scheduler.schedule = timed

    @property
    def blocks(self) -> int:
        """Blocks of KV memory on the device."""
        return int(self._config.cache_config.num_gpu_blocks)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return int(self._config.cache_config.block_size)

    def facts(self) -> dict[str, Any]:
        """Facts of the run, beside the figures."""
        import torch
        import vllm

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        facts = {"device": device, "torch": torch.__version__, "vllm": vllm.__version__, "blocks": self.blocks}
        cache = self._config.cache_config
        return facts | {
            "pillion": self._pillion_counts(),
            "start_s": round(self.start_s, 1),
            "batched_tokens": int(self._config.scheduler_config.max_num_batched_tokens),
            "layout": getattr(cache, "kv_cache_layout", None),
            "async_scheduling": bool(self._config.scheduler_config.async_scheduling),
            "v2_runner": bool(getattr(self._config, "use_v2_model_runner", False)),
        }

    def _pillion_counts(self) -> dict[str, int]:
        """The counts of Pillion's worker in this process: eight waits a load mean a forward that went layer by layer."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        worker = getattr(get_kv_transfer_group(), "_worker", None) if has_kv_transfer_group() else None
        session = getattr(worker, "_session", None)
        return dict(session.stats()) if session is not None else {}

    def prompt(self, tokens: int, seed: int) -> list[int]:
        """Random token ids; another seed is another prompt from its first block on."""
        generator = random.Random(seed)
        return [generator.randrange(FIRST_TOKEN_ID, self.shape["vocab_size"]) for _ in range(tokens)]

    def add(
        self, prompt: list[int], max_tokens: int, logprobs: int | None = None, transfer: dict[str, Any] | None = None
    ) -> str:
        """Begin a request; `step` returns its answer. `transfer`: its `kv_transfer_params`."""
        from vllm import SamplingParams

        request_id = f"request-{self._next_request}"
        self._next_request += 1
        params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=max_tokens, logprobs=logprobs)
        if transfer is not None:
            params.extra_args = {"kv_transfer_params": transfer}
        self._running[request_id] = Answer(prompt_tokens=len(prompt), added=time.perf_counter())
        self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        return request_id

    @property
    def running(self) -> int:
        """Requests in flight."""
        return len(self._running)

    @property
    def parked(self) -> bool:
        """True if no request can go on: those in flight wait, as for an asynchronous load."""
        return not self._scheduler.running

    def step(self) -> Iterable[tuple[str, Answer]]:
        """Plays one step; the requests that it ended."""
        ended = []
        for output in self._engine.step():
            answer = self._running[output.request_id]
            now = time.perf_counter()
            completion = output.outputs[0]
            if len(completion.token_ids) > len(answer.tokens):
                answer.first = answer.first or now
                answer.times.append(now)
                answer.tokens = list(completion.token_ids)
            if output.finished:
                answer.cached_tokens = output.num_cached_tokens or 0
                answer.transfer = output.kv_transfer_params
                answer.logprobs = [{t: e.logprob for t, e in position.items()} for position in completion.logprobs or []]
                ended.append((output.request_id, self._running.pop(output.request_id)))
        return ended

    def ask(self, prompt: list[int], max_tokens: int, logprobs: int | None = None) -> Answer:
        """Asks one request alone."""
        assert not self._running, "a request asked alone must be alone"
        # Its lists of tokens would otherwise cause a collection within the measured time, now and then.
        gc.collect()
        request_id = self.add(prompt, max_tokens, logprobs)
        answer = self._running[request_id]
        while self._running:
            # After the first token: outside the measured time, and before the blocks are freed.
            if answer.first and not answer.block_ids:
                answer.block_ids = self._blocks_of(request_id)
            for _ in self.step():
                pass
        return answer

    def _blocks_of(self, request_id: str) -> list[int]:
        # vLLM adds a random suffix to ids.
        internal = next((r for r in self._scheduler.requests if r.startswith(f"{request_id}-")), None)
        if internal is None:
            return []
        groups = self._scheduler.kv_cache_manager.get_block_ids(internal)
        # vLLM has replaced a window's earlier blocks by block 0.
        return list(max(groups, key=lambda blocks: sum(map(bool, blocks))))

    def ask_all(self, prompts: list[list[int]], max_tokens: list[int]) -> list[Answer]:
        """Asks all requests at once."""
        ids = [self.add(prompt, tokens) for prompt, tokens in zip(prompts, max_tokens, strict=True)]
        answers: dict[str, Answer] = {}
        while self._running:
            answers.update(self.step())
        return [answers[request_id] for request_id in ids]

    def on_hit(self, strike: Callable[[], None] | None) -> None:
        """Calls `strike` after each answer of the connector with a kept part of a prompt; None: no more."""
        connector = self._scheduler.connector
        vars(connector).pop("get_num_new_matched_tokens", None)
        if strike is None:
            return
        asked = connector.get_num_new_matched_tokens

        def answered(*arguments: Any) -> Any:
            found = asked(*arguments)
            if found[0]:
                strike()
            return found

        connector.get_num_new_matched_tokens = answered

    def rest(self, rounds: int = REST_ROUNDS) -> None:
        """Lets saves end: pauses, and short requests for connectors that need further steps."""
        for _ in range(rounds):
            time.sleep(REST_PAUSE_S)
            self._ask_short()

    def reset(self) -> None:
        """Empties the device's own prefix cache, but not the connector's cache. In the short request afterwards Pillion samples
        the weights: `sample` measures that."""
        deadline = time.monotonic() + RESET_WATCHDOG_S
        while not self._engine.reset_prefix_cache(reset_connector=False):
            if time.monotonic() > deadline:
                raise TimeoutError("blocks are still held: vLLM refuses to reset its prefix cache")
            self._ask_short()
        self._ask_short()

    def _ask_short(self) -> None:
        self.ask(self.prompt(SHORT_PROMPT_TOKENS, seed=self._next_request), REST_TOKENS)

    def fragment(self) -> None:
        """Scatters the free list: requests of one block each, over all blocks, end in a random order.

        vLLM puts blocks that were never filled back in front of its free list, where the next request takes the same ones.
        """
        generator = random.Random(0)
        lengths = [generator.randint(1, SHORT_OUTPUT_TOKENS_MAX) for _ in range(self.blocks)]
        self.ask_all([self.prompt(self.block_tokens + 1, seed=-1 - index) for index in range(self.blocks)], lengths)

    def layers(self) -> list[Any]:
        """The attention layers with KV."""
        layers = self._config.compilation_config.static_forward_context
        return [layer for layer in layers.values() if hasattr(layer, "kv_cache")]

    def _kv_caches(self) -> list[Any]:
        return list(itertools.chain.from_iterable(self._layer_caches()))

    def _layer_caches(self) -> list[list[Any]]:
        """The tensors of each layer: a layer with states has several."""
        caches = [layer.kv_cache for layer in self.layers()]
        return [list(cache) if isinstance(cache, list | tuple) else [cache] for cache in caches]

    def spoil_block(self, block: int) -> None:
        """Zeroes one block of every layer on the device, without vLLM's knowledge."""
        for cache in self._kv_caches():
            cache.select(list(cache.shape).index(self.blocks), block).zero_()

    def spoil_layer(self) -> None:
        """Zeroes the KV of the middle layer on the device, without vLLM's knowledge."""
        caches = self._layer_caches()
        for cache in caches[len(caches) // 2]:
            cache.zero_()


def runs(block_ids: list[int]) -> int:
    """Runs of consecutive ids: the least number of pieces in a copy of these blocks."""
    return sum(1 for early, late in zip([-1, *block_ids], block_ids, strict=False) if late != early + 1 or early == -1)
