"""A hand-over between two engines without a model: one writes prompts and promises them, the other awaits and loads them.

The writer reuses blocks right after their step, while they are saved and the reader waits.
"""

from __future__ import annotations

from bare_engine import Engine, Options
from bare_rank import Load, Prompt

from pillion import _shim

# Steps between a prompt's save and the end of its log, as for a request that ends.
STEPS_OPEN = 2
# The most prompts awaited at once.
AWAITED_MAX = 8


class Writer(Engine):
    """Engine P: saves every prompt in two parts, and loads nothing."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        # The prompts promised in this engine's last step.
        self.promised: list[Prompt] = []
        self._open: list[tuple[int, int]] = []

    def _plan_loads(self) -> list[Load]:
        self.promised.clear()
        ended = [log for step, log in self._open if step + STEPS_OPEN <= self._step]
        self._open = [(step, log) for step, log in self._open if step + STEPS_OPEN > self._step]
        for log in ended:
            self._scheduler.close(log)
        return []

    def _save(self, prompt: Prompt, blocks: list[int]) -> None:
        log = self._scheduler.open()
        assert log >= 0
        self._scheduler.promise(log)
        assert self._scheduler.append(log, prompt.hashes, 0) == prompt.blocks
        half = (prompt.blocks + 1) // 2
        for first, part in ((0, blocks[:half]), (half, blocks[half:])):
            assert not part or self._scheduler.save(log, first, part, self._step)
        self._open.append((self._step, log))
        self.promised.append(prompt)


class Reader(Engine):
    """Engine D: awaits prompts of another engine and loads their announced blocks, in parts, beside its steps."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._awaited: list[tuple[int, Prompt]] = []
        # Blocks of awaited prompts, and the found ones of them.
        self.asked = self.found_blocks = 0

    @property
    def idle(self) -> bool:
        """True if no prompt is awaited any more."""
        return not self._awaited

    @property
    def answered_early(self) -> int:
        """The number of prompts found while their blocks were on their way."""
        return int(self._scheduler.stats()["queries_answered_early"])

    def wait_for(self, prompts: list[Prompt]) -> None:
        """Awaits these prompts, which another engine is about to write."""
        for prompt in prompts[: AWAITED_MAX - len(self._awaited)]:
            log = self._scheduler.open()
            assert log >= 0
            self._scheduler.await_producer(log)
            assert self._scheduler.append(log, prompt.hashes, 0) == prompt.blocks
            self._awaited.append((log, prompt))
            self.asked += prompt.blocks

    def _plan_writes(self) -> list[tuple[Prompt, list[int]]]:
        return []

    def _plan_loads(self) -> list[Load]:
        loads: list[Load] = []
        awaited, self._awaited = self._awaited, []
        for log, prompt in awaited:
            hits = self._scheduler.query(log, 0, prompt.blocks)
            if hits < 0 or (hits and len(self._free) < hits):
                self._awaited.append((log, prompt))
            elif hits:
                loads += self._load(log, prompt, hits)
            else:
                self._scheduler.close(log)
        return loads

    def _load(self, log: int, prompt: Prompt, hits: int) -> list[Load]:
        self.found_blocks += hits
        blocks, loads, first = self._take(hits), [], 0
        plans = self._scheduler.load(log, 0, blocks, self._step, False)
        for plan in plans:
            count = len(_shim.plan_blocks(plan))
            part = slice(first, first + count)
            # The log is closed with the last part.
            loads.append(Load(plan, blocks[part], prompt.keys[part], False, log if first + count == hits else -1))
            first += count
        if not plans:
            self._free.update(blocks)
            self._scheduler.close(log)
        return loads
