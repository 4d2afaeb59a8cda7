"""The share of prompts found when a pod starts and when one ends: a real trace over real sidecars that are peers over TCP.

Requests of the trace go to pods by their prefix, as a router sends them. Two pods serve; a third starts, gets a third of all
conversations and the next `--seconds` of requests; then the first pod gets SIGTERM, and each of its last prompts is asked for
at the others. Engines are scripted: they save what a query does not find. `--today` is another sidecar's binary, measured
the same way.

    benches/run births [--seconds N] [--room MiB] [--today PILLION]

By sidecar: `new_pod_share` is the part of the prompts' blocks found by the third pod, `new_pod_share_here` without a fetch
while the request waits, `steady_share` what the other two find in that time. `kept_before` and `kept_after` are the parts of
the first pod's last prompts found before its end and behind it; the difference is the loss.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

from benches import harness, rig, traces
from testkit.ports import free_port
from testkit.sidecar import Sidecar
from testkit.waiting import wait_for

PROMPT_TOKENS = 30_000
BLOCK_BYTES = 64 << 10
# Blocks of the engine's memory: more than any request has.
DEVICE_BLOCKS = 256
# Requests before the third pod starts; those of its time; the first pod's last prompts.
WARM, PLAYED, LAST = 1200, 600, 200
# The longest wait for a block on its way from a peer.
WAIT_MAX_MS = 2000
QUIET_S = 1.5


class Pod:
    """A sidecar in the mesh with a scripted engine."""

    def __init__(self, stack: contextlib.ExitStack, own: str, others: list[str], room: int, binary: Path | None) -> None:
        peers = [option for other in others for option in ("--peer", other)]
        mesh = ("--mesh-listen", own, *peers, "--node-id", own, "--mesh-plaintext")
        self.sidecar: Sidecar = stack.enter_context(rig.sidecar(f"{room}MiB", mesh, binary))
        self.engine = rig.Engine(self.sidecar.socket, DEVICE_BLOCKS, BLOCK_BYTES, wait_max_ms=WAIT_MAX_MS)
        self.asked = self.found = 0

    def find(self, keys: list[bytes]) -> int:
        """The leading keys found, here or at peers."""
        scheduler = self.engine.scheduler
        log = self.engine.log(keys)
        while (hits := scheduler.query(log, 0, len(keys))) < 0:
            scheduler.end_step()
            time.sleep(rig.POLL_S)
        scheduler.release(log)
        scheduler.close(log)
        scheduler.end_step()
        return hits

    def serve(self, keys: list[bytes], prompt: int) -> None:
        """Serves a request: finds the blocks of its prompt, and saves the others and those of its answer."""
        self.asked += prompt
        hits = self.find(keys[:prompt]) if prompt else 0
        self.found += hits
        engine, missing = self.engine, keys[hits:]
        log = engine.log(keys)
        if not engine.scheduler.save(log, hits, list(range(1, len(missing) + 1)), engine.next_step):
            raise engine.failed("a save found no room")
        with engine.step():
            pass
        wait_for(engine.saved, "end of a save", poll_s=rig.POLL_S, failed=engine.failed)
        engine.scheduler.close(log)
        engine.scheduler.end_step()

    def metric(self, name: str) -> int:
        """A metric of the sidecar; 0 if the sidecar has none of this name."""
        return self.sidecar.metrics().get(name, 0)


class Router:
    """Sends a request to the pod that served most of its prefix, and conversations without a pod to all in turn."""

    def __init__(self) -> None:
        self.pods: list[Pod] = []
        self._of_key: dict[bytes, Pod] = {}
        # By key, the second key of its prompts.
        self._of_prompt: dict[bytes, bytes] = {}
        self._turn = 0

    def choose(self, keys: list[bytes]) -> Pod:
        """The pod for a request."""
        # The first block is the same in most conversations.
        known = next((pod for key in reversed(keys[1:]) if (pod := self._of_key.get(key)) in self.pods), None)
        if known is None:
            known, self._turn = self.pods[self._turn % len(self.pods)], self._turn + 1
        self._of_key |= dict.fromkeys(keys, known)
        self._of_prompt |= dict.fromkeys(keys[1:], keys[1] if len(keys) > 1 else b"")
        return known

    def move_third(self, pod: Pod) -> None:
        """Gives a new pod each third conversation: those with one second block go together."""
        moves = {key for key, begin in self._of_prompt.items() if begin[0] % 3 == 0}
        self._of_key |= dict.fromkeys(moves, pod)
        self.pods.append(pod)


def chain(blocks: list[int]) -> list[bytes]:
    """The key of each block: it depends on all blocks before."""
    keys, before = [], b""
    for block in blocks:
        before = hashlib.sha256(before + block.to_bytes(8, "little", signed=True)).digest()
        keys.append(before)
    return keys


def share(found: int, asked: int) -> float:
    """A part of 1."""
    return round(found / max(asked, 1), 4)


def measure(seconds: float, room: int, binary: Path | None) -> dict[str, float]:
    """Plays the trace with one binary."""
    answered = traces.with_answers(traces.FILES["conversation"], PROMPT_TOKENS, WARM + PLAYED)
    requests = [(chain(one.blocks), one.prompt // traces.BLOCK_TOKENS) for one in answered]
    ends = [f"127.0.0.{number}:{free_port(f'127.0.0.{number}')}" for number in (1, 2, 3)]
    router = Router()
    served_first: list[list[bytes]] = []
    with contextlib.ExitStack() as stack:
        router.pods = [Pod(stack, own, [end for end in ends if end != own], room, binary) for own in ends[:2]]
        first, second = router.pods
        for keys, prompt in requests[:WARM]:
            router.choose(keys).serve(keys, prompt)
        harness.say("the third pod starts")
        new = Pod(stack, ends[2], ends[:2], room, binary)
        router.move_third(new)
        before = [(pod.asked, pod.found) for pod in (first, second)]
        begun = time.monotonic()
        for number, (keys, prompt) in enumerate(requests[WARM:]):
            time.sleep(max(0.0, begun + number * seconds / PLAYED - time.monotonic()))
            pod = router.choose(keys)
            pod.serve(keys, prompt)
            if pod is first:
                served_first.append(keys[:prompt])
        asked, found = (
            sum(now)
            for now in (
                [pod.asked - was for pod, (was, _) in zip((first, second), before, strict=True)],
                [pod.found - was for pod, (_, was) in zip((first, second), before, strict=True)],
            )
        )
        fetched = new.metric("pillion_mesh_fetched_blocks_total")
        prefetched = new.metric("pillion_mesh_prefetched_blocks_total")
        result = {
            "steady_share": share(found, asked),
            "new_pod_share": share(new.found, new.asked),
            "new_pod_share_here": share(new.found - (fetched - prefetched), new.asked),
            "prefetched_blocks": prefetched,
            "prefetched_used_blocks": new.metric("pillion_mesh_prefetched_used_blocks_total"),
            "unique_value_seconds": first.metric("pillion_unique_value_seconds"),
        }
        last = served_first[-LAST:]
        asked = sum(map(len, last))
        time.sleep(QUIET_S)
        blocks = first.metric("pillion_blocks")
        kept = sum(first.find(keys) for keys in last)
        began = time.monotonic()
        first.engine.close()
        first.sidecar.terminate()
        took = time.monotonic() - began
        time.sleep(QUIET_S)
        router.pods = [second, new]
        after = sum(max(pod.find(keys) for pod in router.pods) for keys in last)
        rescued = sum(pod.metric("pillion_mesh_rescued_blocks_total") for pod in router.pods)
        return result | {
            "first_pod_blocks": blocks,
            "kept_before": share(kept, asked),
            "kept_after": share(after, asked),
            "rescued_blocks": rescued,
            "drain_s": round(took, 2),
        }


def main() -> None:
    """Measures one or two sidecars."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="the time of the third pod's requests (default: %(default)s)")
    parser.add_argument("--room", type=int, default=1024, help="MiB of each pod (default: %(default)s)")
    parser.add_argument("--binary", type=Path, help="the sidecar's executable")
    parser.add_argument("--today", type=Path, help="another sidecar's executable")
    options = parser.parse_args()
    line = {"new": measure(options.seconds, options.room, options.binary)}
    if options.today:
        line["today"] = measure(options.seconds, options.room, options.today)
    harness.report(line)


if __name__ == "__main__":
    main()
