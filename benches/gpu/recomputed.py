"""The distance of KV from the same KV computed again, and from wrong KV: one engine's part of `gpu/limits`.

Prompts are computed and their blocks kept. Then, for many ends of a hit, the last 64 tokens before the end are computed again
behind the kept blocks of the tokens before, as a standing check has it done, and compared with the kept ones, in the engine's
own memory. A layer's rms is sqrt(sum (kept - computed)^2 / sum kept^2); the rms of a check is that of its worst layer. For
wrong KV, the kept blocks are overwritten with blocks of a model changed for a while.

A line's `rms` is over checks, `rms_of_a_block` over their blocks; `equal_blocks` is the share of bit-equal blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benches.gpu import limits, wrong
from benches.gpu.engine import Engine
from testkit.child import Parent

CHECK_TOKENS = 64
# The tokens after the hit: nearly none, a short question, a longer one.
TAILS = (1, 17, 200)
# Checks of one step.
TOGETHER = 8
# Decoding requests beside the measured ones.
BESIDE = 8
BESIDE_TOKENS = 24
SCALE_BYTES = 4
FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
PER_TOKEN_HEAD = {"fp8_per_token_head": torch.float8_e4m3fn, "int8_per_token_head": torch.int8}


@dataclasses.dataclass(frozen=True)
class Computed:
    """A request's tokens, answer included, and the blocks it had."""

    tokens: list[int]
    blocks: list[int]


@dataclasses.dataclass(frozen=True)
class Kept:
    """A sequence with kept blocks, to be compared from the token `begin` on."""

    sequence: Computed
    begin: int

    def ends(self) -> range:
        """The ends of hits: after whole checks, each behind at least as many tokens."""
        begin = max(CHECK_TOKENS, -(-self.begin // CHECK_TOKENS) * CHECK_TOKENS)
        # The last token's KV is not computed.
        return range((len(self.sequence.tokens) - 1) // CHECK_TOKENS * CHECK_TOKENS, begin, -CHECK_TOKENS)


@dataclasses.dataclass(frozen=True)
class Check:
    """The kept blocks of 64 tokens, and the same tokens' computed again."""

    kept: list[int]
    computed: list[int]


class Recomputing(Engine):
    """An engine with an upper limit for a request's hit in its prefix cache; it records the blocks of requests."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._block_ids: dict[str, list[int]] = {}
        self._found_max: dict[str, int] = {}
        self._watch()

    def _watch(self) -> None:
        scheduler, manager = self._scheduler, self._scheduler.kv_cache_manager
        look_up, find = manager.get_computed_blocks, manager.coordinator.find_longest_cache_hit
        free = scheduler._free_request_blocks
        limit = sys.maxsize

        def look_up_within(request: Any) -> Any:
            nonlocal limit
            limit = self._found_max.get(_name(request), sys.maxsize)
            return look_up(request)

        def free_noted(request: Any) -> Any:
            self._block_ids[_name(request)] = list(manager.get_block_ids(request.request_id)[0])
            return free(request)

        manager.get_computed_blocks = look_up_within
        manager.coordinator.find_longest_cache_hit = lambda hashes, longest: find(hashes, min(longest, limit))
        scheduler._free_request_blocks = free_noted

    def compute(self, prompts: list[list[int]], outputs: int = 1, found_max: list[int] | None = None) -> list[Computed]:
        """Computes requests at once; each finds at most so many tokens in the prefix cache."""
        ids = []
        for number, prompt in enumerate(prompts):
            ids.append(self.add(prompt, outputs))
            self._found_max[ids[-1]] = found_max[number] if found_max else 0
        ended: dict[str, Any] = {}
        while not ended.keys() >= set(ids):
            ended.update(self.step())
        return [
            Computed(prompt + ended[request_id].tokens, self._block_ids.pop(request_id))
            for request_id, prompt in zip(ids, prompts, strict=True)
        ]

    @contextlib.contextmanager
    def at_most(self, tokens: int) -> Iterator[None]:
        """Within this block steps have at most so many tokens."""
        given = self._scheduler.max_num_scheduled_tokens
        self._scheduler.max_num_scheduled_tokens = min(tokens, given)
        yield
        self._scheduler.max_num_scheduled_tokens = given

    @contextlib.contextmanager
    def decoding_beside(self, tokens: int) -> Iterator[None]:
        """Requests decode within this block, until they have `tokens` tokens or the block ends."""
        added = [self.add(self.prompt(BESIDE_TOKENS, seed=-1 - number), tokens) for number in range(BESIDE)]
        for _ in range(3):
            self.step()
        yield
        self._engine.abort_request(added)
        for request_id in added:
            self._running.pop(request_id, None)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    @contextlib.contextmanager
    def holding(self, kept: list[Kept]) -> Iterator[None]:
        """Within this block kept blocks are not reused."""
        pool = self._scheduler.kv_cache_manager.block_pool
        blocks = [pool.blocks[block] for one in kept for block in one.sequence.blocks]
        pool.touch(blocks)
        yield
        pool.free_blocks(blocks)
        self.reset()

    def change(self, use: Callable[[torch.nn.Module], Any]) -> Any:
        """The result of a function of the loaded model."""
        return self._llm.apply_model(use)[0]

    def pages(self, blocks: list[int]) -> list[torch.Tensor]:
        """Copies of blocks, by layer, as bytes: some of the KV's data types cannot be indexed."""
        _finish()
        caches = self._kv_caches()
        return [self._by_block(cache)[torch.tensor(blocks, device=cache.device)].contiguous() for cache in caches]

    def numbers(self, pages: torch.Tensor) -> torch.Tensor:
        """A layer's pages in the KV's own data type."""
        return pages.view(self._kv_caches()[0].dtype)

    def overwrite(self, blocks: list[int], pages: list[torch.Tensor]) -> None:
        """Writes other bytes into blocks, without vLLM's knowledge."""
        with torch.inference_mode():
            for cache, page in zip(self._kv_caches(), pages, strict=True):
                places = torch.tensor(blocks, device=cache.device)
                self._by_block(cache)[places] = page.to(cache.device)
        _finish()

    def _by_block(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.view(torch.uint8).movedim(list(cache.shape).index(self.blocks), 0)


def _name(request: Any) -> str:
    # vLLM adds a random suffix to ids.
    return str(request.request_id).rpartition("-")[0]


def _finish() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# === What is measured ===


class Measurement:
    """The engine of a case."""

    def __init__(self, case: limits.Case, engine: Recomputing, tell: Callable[[dict[str, Any]], None]) -> None:
        self._case = case
        self._size = case.size()
        self._engine = engine
        self._tell = tell
        self._chance = random.Random(1)
        self._prompts = [engine.prompt(self._size.prompt_tokens, seed) for seed in range(self._size.prompts)]

    def right(self) -> None:
        """Compares KV computed in one way with KV computed again in another."""
        prompts, engine = self._prompts, self._engine
        short = [prompt[: self._size.prompt_tokens // 4] for prompt in prompts]
        ways: dict[str, Callable[[], list[Kept]]] = {
            "each whole": lambda: [Kept(engine.compute([prompt])[0], 0) for prompt in prompts],
            "in chunks of 500": lambda: self._chunked(500),
            "all together": lambda: [Kept(found, 0) for found in engine.compute(prompts)],
            "decoded together": lambda: [Kept(found, len(short[0])) for found in engine.compute(short, self._size.outputs)],
            "decoded alone": lambda: [Kept(engine.compute(short[:1], self._size.outputs)[0], len(short[0]))],
        }
        for name, compute in ways.items():
            kept = compute()
            with engine.holding(kept):
                for together in (1, TOGETHER):
                    self._report({"kept": name, "again": _again(together)}, self._checks(kept, together))

    def _chunked(self, tokens: int) -> list[Kept]:
        with self._engine.at_most(tokens):
            return [Kept(self._engine.compute([prompt])[0], 0) for prompt in self._prompts]

    def wrong(self) -> None:
        """Compares kept blocks of a changed model with blocks that the right one computes behind them."""
        model = self._engine.change(lambda module: wrong.Model(module, self._engine.shape, self._case.calm))
        for name, way in wrong.ways(model, fp8=self._case.kv_dtype in FP8).items():
            with way():
                pages = self._pages()
            self._against(pages, {"wrong": name})
        pages = self._pages()
        blocks = self._size.prompt_tokens // self._engine.block_tokens
        # By prompt, and in each block after block.
        by_prompt = [page.unflatten(0, (-1, blocks)) for page in pages]
        self._against([page.roll(1, 0).flatten(0, 1) for page in by_prompt], {"wrong": "another prompt's"})
        self._against([page.roll(1, 1).flatten(0, 1) for page in by_prompt], {"wrong": "the block before"})
        for page in by_prompt:
            page[:, 0] = 0
        self._against(pages, {"wrong": "the first block zeroed"})
        self._against(self._pages(), {"wrong": "nothing, as a control"})

    def keep(self, file: Path) -> None:
        """Writes this engine's KV to a file, for `others` of another one."""
        part = file.with_suffix(".part")
        torch.save([page.cpu() for page in self._pages()], part)
        part.rename(file)

    def others(self, file: Path) -> None:
        """Compares kept blocks of another engine of the same model, which ran in another way."""
        self._against(torch.load(file), {"kept": f"by {self._case.reference}"})

    def _some(self) -> list[Kept]:
        """The first prompts, computed together."""
        self._engine.reset()
        return [Kept(found, 0) for found in self._engine.compute(self._prompts[: self._size.some])]

    def _blocks(self, kept: list[Kept]) -> list[int]:
        whole = self._size.prompt_tokens // self._engine.block_tokens
        return [block for one in kept for block in one.sequence.blocks[:whole]]

    def _pages(self) -> list[torch.Tensor]:
        return self._engine.pages(self._blocks(self._some()))

    def _against(self, pages: list[torch.Tensor], names: dict[str, str]) -> None:
        """Compares given blocks with those that the right model computes behind them."""
        kept = self._some()
        with self._engine.holding(kept):
            self._engine.overwrite(self._blocks(kept), pages)
            self._report({**names, "again": _again(TOGETHER)}, self._checks(kept, TOGETHER))

    def _checks(self, kept: list[Kept], together: int) -> list[dict[str, torch.Tensor]]:
        """Checks every end of every kept sequence; late ends first, so no hit has blocks that were computed again."""
        places = [(one, end) for one in kept for end in one.ends()]
        if together == 1:
            places = places[:: max(1, len(places) // self._size.checks_alone)]
        found = []
        with self._engine.decoding_beside(self._size.beside) if together > 1 else contextlib.nullcontext():
            for first in range(0, len(places), together):
                found.append(self._compare(self._compute_again(places[first : first + together])))
        return found

    def _compute_again(self, places: list[tuple[Kept, int]]) -> list[Check]:
        tails = [self._engine.prompt(self._chance.choice(TAILS), self._chance.randrange(1 << 30)) for _ in places]
        asked = [one.sequence.tokens[:end] + tail for (one, end), tail in zip(places, tails, strict=True)]
        block = self._engine.block_tokens
        checks = []
        again = self._engine.compute(asked, found_max=[end - CHECK_TOKENS for _, end in places])
        for (one, end), found in zip(places, again, strict=True):
            begin, stop = (end - CHECK_TOKENS) // block, end // block
            assert found.blocks[:begin] == one.sequence.blocks[:begin], "it was not computed behind the kept blocks"
            check = Check(one.sequence.blocks[begin:stop], found.blocks[begin:stop])
            assert not set(check.kept) & set(check.computed), "nothing was computed again"
            checks.append(check)
        return checks

    def _compare(self, checks: list[Check]) -> dict[str, torch.Tensor]:
        """Sums of squares, of the difference and of the kept values, and shares of differing bytes: [check, block, layer]."""
        kept = self._engine.pages([block for check in checks for block in check.kept])
        computed = self._engine.pages([block for check in checks for block in check.computed])
        sums: dict[str, list[torch.Tensor]] = {"difference": [], "kept": [], "bytes": []}
        for before, after in zip(kept, computed, strict=True):
            left, right = self._values(before), self._values(after)
            sums["difference"].append((left - right).square().flatten(1).sum(1))
            sums["kept"].append(left.square().flatten(1).sum(1))
            sums["bytes"].append((before != after).flatten(1).double().mean(1))
        return {name: torch.stack(found, -1).cpu().unflatten(0, (len(checks), -1)) for name, found in sums.items()}

    def _values(self, pages: torch.Tensor) -> torch.Tensor:
        kv_dtype = self._case.kv_dtype
        if kv_dtype in FP8:
            return pages.view(FP8[kv_dtype]).double()
        if kv_dtype in PER_TOKEN_HEAD:
            # Keys, their scale, values, their scale.
            halves = pages.unflatten(-1, (2, -1))
            numbers, scales = halves.split((halves.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)
            numbers, scales = numbers.contiguous().view(PER_TOKEN_HEAD[kv_dtype]), scales.contiguous().view(torch.float32)
            return numbers.double() * scales.double()
        return self._engine.numbers(pages).double()

    def _report(self, names: dict[str, str], found: list[dict[str, torch.Tensor]]) -> None:
        sums = {name: torch.cat([one[name] for one in found]) for name in found[0]}
        checks = (sums["difference"].sum(1) / sums["kept"].sum(1)).sqrt()
        blocks = (sums["difference"] / sums["kept"]).sqrt().flatten(0, 1)
        worst, layer = checks.max(1)
        line: dict[str, Any] = {"case": self._case.name, **names, "checks": len(checks), "blocks": len(blocks)}
        line |= {"equal_blocks": _short(float((sums["bytes"] == 0).all(-1).double().mean()))}
        line |= {"rms": _spread(worst), "rms_of_a_block": _spread(blocks.max(1).values)}
        line |= {"worst_layer": int(layer[worst.argmax()]), "differing_bytes": _spread(sums["bytes"].mean(1).max(1).values)}
        line |= {f"rms_of_layers_{name}": [_short(value) for value in values] for name, values in _layers(checks).items()}
        self._tell(line)


def _again(together: int) -> str:
    return "alone" if together == 1 else f"{together} together beside {BESIDE} that decode"


def _layers(checks: torch.Tensor) -> dict[str, list[float]]:
    return {"max": checks.max(0).values.tolist(), "min": checks.min(0).values.tolist()}


def _spread(samples: torch.Tensor) -> dict[str, float]:
    """The least, the largest and percentiles."""
    ordered = samples.sort().values.tolist()
    parts = {"min": 0.0, "p1": 0.01, "p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: _short(ordered[round((len(ordered) - 1) * part)]) for name, part in parts.items()}


def _short(value: float) -> float:
    return value if math.isnan(value) else float(f"{value:.4g}")


def main() -> None:
    """`recomputed.py CASE FOLDER`: runs the engine of a case; the folder has the KV kept for other cases."""
    case, folder = limits.Case(**json.loads(sys.argv[1])), Path(sys.argv[2])
    parent = Parent()
    model = folder / case.model
    engine = Recomputing({"model": str(model), **case.arguments()}, case.shape(), print, case.calm)
    measurement = Measurement(case, engine, parent.tell)
    parent.tell({"case": case.name, "facts": engine.facts()})
    reference = folder / f"{case.reference}.pt"
    if case.reference == case.name:
        measurement.keep(reference)
    elif reference.exists():
        measurement.others(reference)
    measurement.right()
    if case.wrong:
        measurement.wrong()


if __name__ == "__main__":
    main()
