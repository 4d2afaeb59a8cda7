"""Which blocks of vLLM's pool hold the KV of their keys, as far as this run has seen them filled.

vLLM lists a block under its hash when it schedules the step that is to fill the block. That step may be skipped, raise or be
refused, and its request may be preempted in the same schedule(). A listed hash therefore proves nothing. A block is proven by
an accepted step that filled it under the listed key, or by a load that ended well. An unproven block is neither saved nor
handed over, and no block that is computed upon it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from pillion import vllm_compat
from pillion.tracked import Tracked

# Encoders' outputs that are remembered as new ones: beyond it, all count as old.
ENCODED_MAX = 1 << 16
# Steps that wait for vLLM to take their output; vLLM has two in flight at most. Beyond it no output is ever taken.
OPEN_STEPS_MAX = 32
# vLLM's null block, in place of each block before a window. Nothing is ever written to it.
NULL_BLOCK = 0
logger = vllm_compat.init_logger("vllm.pillion")


@dataclass(slots=True)
class OpenStep:
    """A step whose output vLLM has not taken yet."""

    number: int
    # Requests whose tokens the step computes.
    req_ids: Collection[str]
    # Blocks that the step fills: cache group, blocks, and the request that computes them; None for a load, whose content
    # depends on no block before it.
    fills: list[tuple[int, list[int], Tracked | None]]
    # The blocks under each request at its begin in the step. A request with a window forgets them before vLLM takes the output.
    begins: list[tuple[Tracked, list[int]]]


class Passed(NamedTuple):
    """What vLLM has passed over when it took a later output."""

    steps: list[int]
    # Whether later steps have computed upon them: then no save counts that was posted until now.
    voids: bool


NOTHING_PASSED = Passed([], False)


class Proof:
    """The proven blocks of one engine, of all its cache groups."""

    def __init__(self, groups: int = 1, beside_others: bool = False) -> None:
        """`beside_others`: another connector loads blocks, too. They are unproven here."""
        # By cache group: the key under which this run saw each block filled, by an accepted step, a load or an open step.
        self._keys: list[dict[int, bytes]] = [{} for _ in range(groups)]
        self._open: deque[OpenStep] = deque()
        # By request: the tokens from the first up to which its KV is right. A request that is absent is right as a whole.
        self._doubts: dict[str, int] = {}
        # Requests that begin in the current step and were in doubt until then.
        self._doubted_before: set[str] = set()
        # vLLM's identifiers of what encoders made since all blocks were disowned; None: no blocks ever were. vLLM may still use
        # older outputs, which encoders made with other weights.
        self._encoded: set[str] | None = None
        # Whether vLLM takes no output, as far as this run is told: then nothing is kept, and nothing promised.
        self.stalled = False
        # Since they were taken last: steps that vLLM has passed over, and unproven blocks on which requests began.
        self.counts: Counter[str] = Counter()
        self._warned = False
        self._beside_others = beside_others

    @property
    def waits(self) -> bool:
        """Whether there are steps whose output vLLM has not taken."""
        return bool(self._open)

    @property
    def encodes(self) -> bool:
        """Whether what encoders make is followed."""
        return self._encoded is not None

    def doubts(self, tracked: Tracked) -> bool:
        """Whether the request has computed upon an unproven block."""
        return tracked.request.request_id in self._doubts

    def may_keep(self, tracked: Tracked) -> bool:
        """Whether what the request computes next may be kept."""
        return not self.stalled and not self.doubts(tracked)

    # --- one step ---

    def schedule(self, step: int, req_ids: Collection[str], begun: Iterable[str]) -> None:
        """A step is scheduled that computes tokens of these requests. Some of them begin on new block tables."""
        doubts = self._doubts
        self._doubted_before = {req_id for req_id in begun if doubts.pop(req_id, None) is not None} if doubts else set()
        if self.stalled:
            # One of them is enough to tell that vLLM has passed steps over.
            return
        self._open.append(OpenStep(step, req_ids, [], []))
        if len(self._open) > OPEN_STEPS_MAX:
            self.void()
            self.stalled = True
            logger.error(
                "pillion: vLLM reported no output of the last %d steps to this connector, so nothing is kept until it does: "
                "let any wrapper of the model runner or executor pass on kv_connector_worker_meta",
                OPEN_STEPS_MAX,
            )

    def overwrite(self, blocks: Collection[int]) -> None:
        """The step writes these blocks."""
        for group in range(len(self._keys)):
            self._forget(group, blocks)

    def load(self, tracked: Tracked) -> None:
        """The step waits for the request's load, so its blocks are filled by the step."""
        if self.stalled:
            return
        self._open[-1].fills.append((tracked.group, [block for block, _ in tracked.loading], None))
        self.loaded(tracked, ())

    def begin(self, tracked: Tracked, computed_tokens: int) -> None:
        """The request begins on blocks that hold so many tokens, as vLLM counts them."""
        found, tokens = divmod(computed_tokens, tracked.block_tokens)
        tracked.filled = self._leading(tracked, found)
        if tracked.filled < found:
            if self._encoded is None and not self._beside_others:
                self._count_unproven(tracked, found - tracked.filled)
            self._doubt(tracked, tracked.filled * tracked.block_tokens)
        elif tokens and not self._is_partly_proven(tracked, found):
            self._doubt(tracked, found * tracked.block_tokens)
        if computed_tokens and self._open:
            self._open[-1].begins.append((tracked, tracked.blocks[: found + 1]))

    def _count_unproven(self, tracked: Tracked, blocks: int) -> None:
        self.counts["unproven_blocks"] += blocks
        if not self._warned:
            self._warned = True
            logger.warning(
                "pillion: vLLM's prefix cache lists %d blocks of request %s that no accepted step has filled. vLLM computes "
                "with them, so its answer may be wrong, and nothing of it is kept. A failed step leaves such blocks, and so "
                "does a preemption under --scheduling-policy priority: reset vLLM's prefix cache, and use --scheduling-policy "
                "fcfs. This line is logged once; vllm:pillion_unproven_blocks_total counts the blocks",
                blocks,
                tracked.request.request_id,
            )

    def _is_partly_proven(self, tracked: Tracked, place: int) -> bool:
        """Whether the beginning of the block at `place` is right: the block was loaded, or the request computed that part."""
        key = self._keys[tracked.group].get(tracked.blocks[place])
        if key is not None and key in (tracked.tail and tracked.tail[1], *tracked.keys_of(place, place + 1)):
            return True
        return tracked.goes_on and tracked.request.request_id not in self._doubted_before

    def fill(self, tracked: Tracked, start: int, end: int) -> None:
        """Notes the blocks that are full once the current step has computed the request's tokens from `start` to `end`."""
        doubts, req_id, size = self._doubts, tracked.request.request_id, tracked.block_tokens
        if doubts and (doubt := doubts.get(req_id)) is not None:
            if start > doubt:
                return
            # The step computes everything again that was in doubt.
            del doubts[req_id]
        if self._encoded is not None and (old := self._old_outputs(tracked, start, end)):
            end = doubts[req_id] = min(old)
        # vLLM may have taken tokens back: the step writes again what was filled.
        first = min(tracked.filled, start // size)
        full = tracked.keys_of(first, end // size)
        blocks = tracked.blocks[first : first + len(full)]
        tracked.filled = first + len(blocks)
        if not blocks:
            return
        keys = self._keys[tracked.group]
        keys.update(zip(blocks, full, strict=False))
        if NULL_BLOCK in blocks:
            del keys[NULL_BLOCK]
            blocks = [block for block in blocks if block != NULL_BLOCK]
        self._open[-1].fills.append((tracked.group, blocks, tracked))

    def accept(self, step: int, requests: Collection[Tracked]) -> Passed:
        """vLLM has taken the output of `step`, which proves what that step has filled, and nothing of the steps before it that
        vLLM has passed over. `requests`: those that are not over, of all cache groups."""
        if self._open and self._open[0].number == step and not self.stalled:
            self._open.popleft()
            return NOTHING_PASSED
        passed = []
        while self._open and self._open[0].number < step:
            passed.append(self._open.popleft())
        voids = self.stalled
        if passed or voids:
            voids |= self._pass_over(passed, requests)
            self.counts["unaccepted_steps"] += len(passed)
            logger.warning(
                "pillion: vLLM did not take the output of %d steps before step %d, because they raised, were skipped or were "
                "refused. Nothing that they computed is kept. vLLM may still list their blocks: reset its prefix cache",
                len(passed),
                step,
            )
        self.stalled = False
        if self._open and self._open[0].number == step:
            self._open.popleft()
        return Passed([each.number for each in passed], voids)

    def _pass_over(self, passed: list[OpenStep], requests: Collection[Tracked]) -> bool:
        """Nothing of these steps is proven, nor what was computed while this run was told of no output. Returns whether steps
        that are still open have computed upon them."""
        req_ids = {req_id for each in passed for req_id in each.req_ids}
        lost = {block for each in passed for _, blocks, _ in each.fills for block in blocks}
        for each in passed:
            self._forget_fills(each)
        affected = {tracked for tracked in requests if self.stalled or tracked.request.request_id in req_ids}
        return self._spread(lost, affected, requests)

    # --- what ends well beside the steps, and what does not ---

    def loaded(self, tracked: Tracked, failed: Collection[int]) -> None:
        """The request's load has ended, well but for the `failed` blocks."""
        self._keys[tracked.group].update((block, key) for block, key in tracked.loading if block not in failed)
        tracked.loading = []

    def void(self) -> None:
        """Nothing that the open steps fill is proven by them."""
        for step in self._open:
            self._forget_fills(step)

    def _forget_fills(self, step: OpenStep) -> None:
        for group, blocks, _ in step.fills:
            self._forget(group, blocks)
        step.fills = []

    def _forget(self, group: int, blocks: Collection[int]) -> None:
        keys = self._keys[group]
        for block in keys.keys() & blocks:
            del keys[block]

    def fail(self, blocks: Iterable[int], requests: Iterable[Tracked]) -> None:
        """Blocks were not loaded; what the open steps have computed upon them, and upon that, is not proven."""
        lost = set(blocks)
        self.overwrite(lost)
        self._spread(lost, set(), requests)

    def _spread(self, lost: set[int], affected: set[Tracked], requests: Iterable[Tracked]) -> bool:
        """What the open steps have computed of the `affected` requests, or upon the `lost` blocks, is not proven, nor what they
        have computed upon that. Returns whether they have computed any of it."""
        # Requests that ended in the meantime have filled blocks, too.
        owners = {owner for step in self._open for _, _, owner in step.fills if owner is not None}
        left = {tracked: set(tracked.blocks) for tracked in owners.union(requests)}
        for step in self._open:
            for tracked, blocks in step.begins:
                left.setdefault(tracked, set()).update(blocks)
        voids = False
        while affected := affected or {tracked for tracked, blocks in left.items() if not lost.isdisjoint(blocks)}:
            # A request is in doubt in all of its cache groups.
            req_ids = {tracked.request.request_id for tracked in affected}
            affected |= {tracked for tracked in left if tracked.request.request_id in req_ids}
            left = {tracked: blocks for tracked, blocks in left.items() if tracked not in affected}
            for step in self._open:
                gone = [fill for fill in step.fills if fill[2] in affected]
                step.fills = [fill for fill in step.fills if fill[2] not in affected]
                voids |= not req_ids.isdisjoint(step.req_ids)
                for group, blocks, _ in gone:
                    self._forget(group, blocks)
                    lost.update(blocks)
            for tracked in affected:
                self.fall_back(tracked)
            affected = set()
        return voids

    def fall_back(self, tracked: Tracked) -> None:
        """What the request has computed beyond its proven blocks is in doubt."""
        if tracked.blocks and tracked.live:
            tracked.slide()
            tracked.filled = self._leading(tracked, tracked.filled)
            self._doubt(tracked, tracked.filled * tracked.block_tokens)

    def disown(self, requests: Iterable[Tracked]) -> None:
        """No block belongs to what the engine computes from now on. Where vLLM's own cache could not be reset, requests still
        find blocks of before in it."""
        for keys in self._keys:
            keys.clear()
        self.void()
        self._encoded = set()
        for tracked in requests:
            tracked.loading = []
            self.fall_back(tracked)

    def encode(self, identifiers: Iterable[str]) -> None:
        """A step has encoders make these outputs."""
        if self._encoded is not None:
            self._encoded.update(identifiers)
            if len(self._encoded) > ENCODED_MAX:
                self._encoded.clear()

    def forget(self, tracked: Tracked) -> None:
        """The request is over."""
        self._doubts.pop(tracked.request.request_id, None)

    def _doubt(self, tracked: Tracked, tokens: int) -> None:
        req_id = tracked.request.request_id
        self._doubts[req_id] = min(tokens, self._doubts.get(req_id, tokens))

    def _leading(self, tracked: Tracked, end: int) -> int:
        """Blocks of the request before `end` and before the first one that is not filled under its key. A null block, which
        stands for one before a window, is not read."""
        keys = self._keys[tracked.group]
        blocks = tracked.blocks[:end]
        right = tracked.keys_of(0, len(blocks))
        if [keys.get(block) for block in blocks] == right:
            return len(blocks)
        for place, (block, key) in enumerate(zip(blocks, right, strict=False)):
            if block and keys.get(block) != key:
                return place
        return min(len(blocks), len(right))

    def _old_outputs(self, tracked: Tracked, start: int, end: int) -> list[int]:
        """Tokens from `start` to `end` at which begins what an encoder made with weights of before."""
        encoded = self._encoded or ()
        old = [media.mm_position for media in tracked.request.mm_features if media.identifier not in encoded]
        return [max(start, place.offset) for place in old if place.offset < end and place.offset + place.length > start]
