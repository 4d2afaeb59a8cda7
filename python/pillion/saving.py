"""What of the computed KV is offered to the cache, and when; and what of it belongs to another namespace by now.

The cost of a step does not depend on how long or how many the running requests are: a decoding request is looked at
only in the step that may fill its next block (`_due`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pillion import handover, vllm_compat
from pillion._shim import SchedulerSession
from pillion.checking import Check
from pillion.events import Events
from pillion.proof import Passed, Proof
from pillion.resuming import Resuming
from pillion.tracked import Requests, Tracked

logger = vllm_compat.init_logger("vllm.pillion")


@dataclass
class Saving:
    """Offers each block once it is full, if it belongs where the session is bound to."""

    _session: SchedulerSession
    _requests: Requests
    _check: Check
    _proof: Proof
    _block_tokens: int
    # The most that a decoding request computes.
    _tokens_per_step: int
    # Blocks of a part in which a prompt is handed over.
    _part_blocks: int
    _resuming: Resuming
    # Who tells others of what is kept, if they are told.
    _events: Events | None = None
    _due: dict[int, list[Tracked]] = field(default_factory=dict)
    # How often the weights may have changed.
    weights: int = 0
    # The last step that saved something, until vLLM has taken its output; 0: none.
    _posted_in: int = 0
    # To which namespace belongs what vLLM holds; 0: not known yet.
    _namespace: int = 0

    # --- blocks that are full ---

    def save(self, begun: list[tuple[Tracked, int]], scheduled: dict[str, int], step: int) -> bool:
        """Saves what a step fills, of the requests that are due and of those that begin on blocks; whether anything."""
        posted = False
        if self._proof.stalled:
            self._fall_back(True)
            scheduled = {}
        due = [tracked for tracked in self._due.pop(step, ()) if tracked.due == step and tracked.live]
        for tracked in due + [tracked for tracked, _ in begun if tracked.due != step]:
            tokens, wait = scheduled.get(tracked.request.request_id), 1
            if tokens is not None:
                start = tracked.request.num_computed_tokens
                computed = start + tokens
                tracked.slide()
                self._proof.fill(tracked, start, computed)
                posted |= self._save(tracked, computed, step)
                if computed >= tracked.request.num_tokens and not tracked.found_in:
                    # The block of a tail was saved, and will be full.
                    saved = min(tracked.saved, computed // self._block_tokens)
                    missing = (saved + 1) * self._block_tokens - computed
                    wait = max(1, -(-missing // self._tokens_per_step))
            if tracked.due != step + wait:
                tracked.due = step + wait
                self._due.setdefault(tracked.due, []).append(tracked)
        if posted:
            self._posted_in = step
        return posted

    def _save(self, tracked: Tracked, computed: int, step: int) -> bool:
        """Saves the request's blocks that are full once `computed` tokens are, and its prompt's tail for another engine."""
        tracked.fill(computed)
        full, is_right = tracked.filled, not self._proof.doubts(tracked)
        if not is_right:
            self._requests.break_promise(tracked)
        checked = self._checked(tracked)
        # A request that another engine goes on with may have no step after: blocks that this engine alone has go over at once.
        hands_over = tracked.hands_over
        again = 0 < tracked.found_in < step + hands_over and checked is None
        tail = is_right and hands_over and full == tracked.tail_at < len(tracked.blocks)
        tail &= computed >= tracked.request.num_prompt_tokens
        if not (again or full + tail > tracked.saved) or (checked is not None and full < checked[1]):
            return False
        if not self._requests.append(tracked) or full > tracked.appended or not self._is_home():
            return False
        posted, fresh, end = False, tracked.saved, full + (tail and tracked.tailed)
        if checked is not None:
            first, fresh = checked
            posted = self._session.save(tracked.log, first, tracked.blocks[first:fresh], step, True)
            if posted:
                self._check.saved()
            else:
                self._check.give_up()
        # Blocks that the request computed in an earlier step were offered then; offering them says nothing of their use.
        used = min(tracked.found, tracked.saved, full) if again else 0
        for first, last in ((0, used), (fresh, end)):
            for begin, stop in self._needed(tracked, max(first, tracked.freed), last, hands_over):
                posted |= self._session.save(tracked.log, begin, tracked.blocks[begin:stop], step)
                if self._events:
                    self._events.offered(tracked, begin, stop)
        tracked.saved = end
        if again:
            tracked.found_in = 0
        return posted

    def _needed(self, tracked: Tracked, first: int, end: int, hands_over: bool) -> Iterator[tuple[int, int]]:
        """The parts of the blocks `first..end` that are offered, each by a save."""
        prompt = (tracked.request.num_prompt_tokens - 1) // self._block_tokens
        for begin, stop in self._resuming.needed(first, end, prompt, (tracked.found, tracked.parted)):
            yield from handover.parts(begin, stop, self._part_blocks if hands_over else stop - begin)

    def _checked(self, tracked: Tracked) -> tuple[int, int] | None:
        """Blocks of the request that are to be saved by themselves because they are compared, if they still can be."""
        span = self._check.span(tracked)
        if span is None or (tracked.freed <= span[0] == tracked.saved and not self._proof.doubts(tracked)):
            return span
        self._check.give_up(tracked)
        return None

    def _is_home(self) -> bool:
        """Whether what vLLM holds belongs where a save would go. A new connection may be bound to another namespace; only the
        first one keeps saves until it is bound to any."""
        namespace = self._session.namespace
        return namespace == self._namespace and bool(namespace or not self.weights)

    # --- saves that are taken back ---

    def accept(self, step: int, passed: Passed) -> None:
        """vLLM has taken the output of a step. Saves of the steps that it has `passed` over are void by that."""
        if passed.steps or passed.voids:
            self._fall_back(passed.voids)
        if self._posted_in:
            self._session.accept(step)
            if step >= self._posted_in:
                self._posted_in = 0

    def _fall_back(self, voids: bool) -> None:
        """Blocks that requests have lost may be offered again; all of them where every unfinished save is void."""
        if voids:
            self._session.void_saves()
        for tracked in self._requests.by_id.values():
            tracked.saved = 0 if voids else min(tracked.saved, tracked.filled)
            if not self._proof.may_keep(tracked):
                self._requests.break_promise(tracked)

    def fail(self, block_ids: set[int]) -> None:
        """KV computed on blocks that were not loaded must never be kept: every unfinished save is given up."""
        self._session.void_saves()
        self._check.give_up()
        requests = self._requests.by_id.values()
        self._proof.fail(block_ids, requests)
        for tracked in requests:
            tracked.saved = 0
            tracked.refused |= not block_ids.isdisjoint(tracked.loaded)

    def disown(self) -> None:
        """Nothing that was computed, or loaded, until now is kept. A sleep discards the KV memory next: no save may read it."""
        self._session.void_saves()
        self._check.forget()
        requests = self._requests.by_id.values()
        self._proof.disown(requests)
        for tracked in requests:
            tracked.hit, tracked.saved = None, 0

    def rebind(self) -> None:
        """The weights may have changed: every rank says anew what it computes with, and until then saves wait."""
        self.weights += 1
        self._namespace = 0
        self.disown()
        self._session.weights(self.weights)

    def contradicts(self, step: int) -> bool:
        """Whether a check has found other KV since the last call. Earlier blocks do not count then."""
        contradicts = self._check.goes_on and self._check.learn(self._session.stats(), step)
        if contradicts:
            self.disown()
        return contradicts

    def follow(self) -> None:
        """Learns that ranks compute with something else than before although nothing was seen to change it."""
        namespace = self._session.namespace
        if namespace not in (0, self._namespace):
            if self._namespace:
                logger.warning(
                    "pillion: the weights of the ranks have changed without a visible call, so blocks from before are not "
                    "kept. Reset vLLM's prefix cache whenever you change weights"
                )
                self.disown()
            self._namespace = namespace
