"""The numbers between the policy and its engine, as types."""

from __future__ import annotations

from typing import Literal

# A request as it is now: tokens, computed tokens, preemptions, the word for its adapter, and its keys.
Numbers = tuple[int, int, int, bytes | None, list[bytes]]
# A load: the request, the plan, and True if the step waits for it.
PolicyLoad = tuple[int, bytes, bool]
# A load reported as failed by the ranks: the request, its blocks, and True if the step would have waited.
PolicyLost = tuple[int, list[int], bool]
# A cache group's part of a step: loads, lost ones, and True if the sidecar waits for the fences.
StepPart = tuple[list[PolicyLoad], list[PolicyLost], bool]
# A step: its number, its parts, True if it fills a tail, True if its output is waited for, earlier steps with loads perhaps not
# begun by ranks, passed-over steps, and the count of possible changes of the weights.
PolicyStep = tuple[int, list[StepPart], bool, bool, list[int], list[int], int]
# A change of blocks: True if they are on a disk, their hashes, True if they can be found, the request (-1: not known) and the
# place of the first one in it.
PolicyEvent = tuple[bool, list[bytes], bool, int, int]
# The service to an engine; [pillion.state][] has the meanings.
PolicyState = Literal["serving", "unbound", "unaccepted", "away"]
# A remark: True if it is an error, its text, and the request named in place of `%s`, if one is.
PolicyRemark = tuple[bool, str, int | None]
# A record of a request: its number; its tokens, those of its prompt in vLLM's own cache and those of its hit; the last by the
# place of the hit; its load; True if it was aborted; seconds of each part; and True if outcomes of its hints are to come.
PolicyRecord = tuple[int, tuple[int, int, int], list[int], str, bool, list[float], bool]
