"""The numbers between the policy and its engine, as types."""

from __future__ import annotations

from typing import Literal

# A request as it is now: tokens, computed tokens, preemptions, the word for its adapter, and its keys.
Numbers = tuple[int, int, int, bytes | None, list[bytes]]
# A load: the request, the plan, and whether the step waits for it.
PolicyLoad = tuple[int, bytes, bool]
# A load reported as failed by the ranks: the request, its blocks, and whether the step would have waited for it.
PolicyLost = tuple[int, list[int], bool]
# A cache group's part of a step: loads, lost ones, and whether the sidecar waits for the fences.
StepPart = tuple[list[PolicyLoad], list[PolicyLost], bool]
# A step: its number, its parts, whether it fills a tail, whether its output is waited for, earlier steps with loads perhaps
# not begun by ranks, passed-over steps, and how often the weights may have changed.
PolicyStep = tuple[int, list[StepPart], bool, bool, list[int], list[int], int]
# A change of blocks: whether they are on a disk, their hashes, whether they can be found, the request (-1: not known) and the
# first one's place in it.
PolicyEvent = tuple[bool, list[bytes], bool, int, int]
# The service to an engine; [pillion.state][] has the meanings.
PolicyState = Literal["serving", "unbound", "unaccepted", "away"]
# A remark: whether it is an error, its text, and the request named in place of `%s`, if one is.
PolicyRemark = tuple[bool, str, int | None]
# A record of a request: its number; its tokens, those of its prompt in vLLM's own cache and those of its hit; the last by the
# place of the hit; its load; whether it was aborted; and seconds of each part.
PolicyRecord = tuple[int, tuple[int, int, int], list[int], str, bool, list[float]]
