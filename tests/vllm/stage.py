"""Plays scenarios on scripted engines: vLLM's own schedulers, 0.33's too, over KV with known right bytes.

An engine's process is started once for each release, since importing vLLM costs more than most scenarios. A scenario is a list
of acts, each a method of `ScriptedEngine` and its arguments; this module names the acts for tests.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holder import Holder

from testkit import model, ports, sidecar
from testkit.child import Child, python
from testkit.waiting import Failed

HERE = Path(__file__).resolve().parent
# scripts/setup unpacks the Python sources of this release here: it exists for CUDA only.
TREE_033 = HERE.parents[1] / ".cache/vllm-0.33.0"
SCENARIO_WATCHDOG_S = 300
BLOCK_TOKENS = 32
BLOCK_BYTES = BLOCK_TOKENS * model.TINY.kv_bytes_per_token()
RELEASES = ["0.32.0", "0.33.0"]
SCHEDULERS = {"scheduler": False, "async-scheduler": True}
LOADS = ("sync", "async")

Act = dict[str, Any]


class Player:
    """The scripted engine's process for one release."""

    def __init__(self, release: str, log: Path) -> None:
        path = [HERE]
        if release == "0.33.0":
            assert (TREE_033 / "vllm").is_dir(), f"{TREE_033} is missing: run scripts/setup tests"
            path.insert(0, TREE_033)
        fixed = {"PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        self.release = release
        self._child = Child(python("scripted.engine"), log, fixed, path)

    def play(self, scenarios: list[dict[str, Any]]) -> Any:
        """A report for each scenario, all played one after another."""
        self._child.tell(scenarios)
        try:
            reply = self._child.hear(SCENARIO_WATCHDOG_S)
        except Failed:
            # A late report must not be taken for the report of the next scenarios.
            self._child.kill()
            raise
        if not isinstance(reply, list):
            raise self._child.failed(reply["error"])
        return reply

    def end(self) -> None:
        """Stops the process."""
        self._child.close_input()
        try:
            self._child.wait_exit()
        finally:
            self._child.close()


class Stage:
    """Plays scenarios against one release and one scheduler."""

    def __init__(self, player: Player, async_scheduling: bool, directory: Path) -> None:
        self.release = player.release
        self.async_scheduling, self.directory = async_scheduling, directory
        self._player = player

    def play(self, acts: list[Act], *connectors: dict[str, Any], **more: Any) -> list[list[dict[str, Any]]]:
        """One engine after another, all with the same acts: for each connector the results of the acts."""
        return self.play_each([(acts, connector) for connector in connectors], **more)

    def play_each(self, parts: Iterable[tuple[list[Act], dict[str, Any]]], **more: Any) -> list[list[dict[str, Any]]]:
        """One engine after another, each with its own acts and connector: the results of each one's acts."""
        scenario = {
            "model": str(model.write(self.directory / "model")),
            "block_tokens": BLOCK_TOKENS,
            "batched_tokens": 256,
            "max_model_len": 1024,
            "blocks": 128,
            "async_scheduling": self.async_scheduling,
        }
        scenarios = [
            scenario | {"acts": acts, "connector": connector, "engine_id": f"scripted-{number}"} | more
            for number, (acts, connector) in enumerate(parts)
        ]
        reports = self._player.play(scenarios)
        assert [report["vllm"] for report in reports] == [self._player.release] * len(scenarios)
        return [report["results"] for report in reports]


# --- connectors ---


def pillion(socket: Path, load: str, **extra: Any) -> dict[str, Any]:
    """Pillion's connector with a query budget long enough for a busy machine, and whole hits; with `sync` steps wait."""
    settings: dict[str, Any] = {"pillion.socket": str(socket), "pillion.load": load}
    settings |= {"pillion.query_timeout_us": 10_000_000, "pillion.check_every": 0}
    return {
        "kv_connector": "PillionConnector",
        "kv_connector_module_path": "testkit.waiting_connector" if load == "sync" else "pillion.connector",
        "kv_connector_extra_config": settings | extra,
    }


def by_load(keeper: sidecar.Sidecar, *loads: str, **extra: Any) -> list[dict[str, Any]]:
    """A connector for each way to load, each with a namespace, so no engine hits the blocks of another one."""
    return [pillion(keeper.socket, load, **{"pillion.model_id": load}, **extra) for load in loads or LOADS]


def metrics(keeper: sidecar.Sidecar) -> str:
    """The address of the sidecar's metrics."""
    return f"http://{keeper.http}/metrics"


def peers() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Options of two sidecars, peers of each other."""
    here, there = (f"127.0.0.1:{ports.free_port()}" for _ in range(2))

    def member(name: str, own: str, other: str) -> tuple[str, ...]:
        return ("--mesh-listen", own, "--peer", other, "--node-id", name, "--mesh-plaintext")

    return member("a", here, there), member("b", there, here)


# --- prompts and right answers ---


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Some tokens, the same for the same seed."""
    generator = random.Random(seed)
    return [generator.randrange(3, model.TINY.vocab) for _ in range(tokens)]


def right_answers(prompts: list[list[int]], output_tokens: int, weights: int = 0) -> list[list[int]]:
    """The answers of an engine with right KV."""
    from scripted import worker

    return [worker.right_answer(prompt, output_tokens, weights) for prompt in prompts]


def hit_tokens(tokens: int) -> int:
    """The tokens of a prompt that a cache may serve: whole blocks, and one token is left."""
    return (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def block_count(prompts: list[list[int]], output_tokens: int) -> int:
    """Full blocks after all tokens but the last are computed: the last token's KV is never computed."""
    return sum((len(prompt) + output_tokens - 1) // BLOCK_TOKENS for prompt in prompts)


# --- acts ---

# More loads than any scenario has.
EVERY_LOAD = 1_000
SLOW_STEPS: Act = {"do": "slow_steps", "with": {"seconds": 0.01}}
RESET: Act = {"do": "reset"}
RESET_ALL: Act = {"do": "reset", "with": {"reset_connector": True}}
SETTLE: Act = {"do": "settle"}
SLEEP: Act = {"do": "sleep"}


def generate(prompts: list[list[int]], output_tokens: int, **more: Any) -> Act:
    """Answers prompts. `at` has acts before a step ("4"), between its scheduling and its execution ("4:scheduled"), or between
    its execution and the look at an output ("4:executed")."""
    return {"do": "generate", "with": {"prompts": prompts, "output_tokens": output_tokens, **more}}


def new_weights(weights: int | None = None) -> Act:
    """Replaces the weights without a notice to Pillion: by new ones, or by those of `weights`."""
    return {"do": "new_weights", "with": {"weights": weights}}


def call(method: str, *args: Any) -> Act:
    """Calls a method of every worker, through vLLM's engine core."""
    return {"do": "call", "with": {"method": method, "args": list(args)}}


def add(prompt: list[int], output_tokens: int) -> Act:
    """Adds a request."""
    return {"do": "add", "with": {"prompt": prompt, "output_tokens": output_tokens}}


def abort(*indexes: int) -> list[Act]:
    """Aborts these requests, as clients that disconnect."""
    return [{"do": "abort", "with": {"index": index}} for index in indexes]


def send(keeper: sidecar.Sidecar, name: str) -> Act:
    """Sends the sidecar a signal, and waits for its effect."""
    return {"do": "signal", "with": {"pid": keeper.pid, "name": name}}


def stop(keeper: sidecar.Sidecar) -> Act:
    """Freezes the sidecar."""
    return send(keeper, "SIGSTOP")


def go_on(keeper: sidecar.Sidecar) -> Act:
    """Thaws the sidecar."""
    return send(keeper, "SIGCONT")


def spoil(count: int = 1, first_block: int = 0) -> Act:
    """Makes the next `count` loads fail from a block on."""
    return {"do": "spoil_plans", "with": {"count": count, "first_block": first_block}}


def lose_leases(count: int) -> Act:
    """Takes the lease from the next `count` loads."""
    return {"do": "lose_leases", "with": {"count": count}}


def break_slots(keeper: sidecar.Sidecar, word: str) -> Act:
    """Damages a header word of every committed slot of the pool, until `MEND`."""
    return {"do": "break_slots", "with": {"path": str(keeper.pool), "word": word}}


MEND: Act = {"do": "mend_pool"}


def wait_saved(blocks: int) -> Act:
    """Waits for so many blocks to be committed."""
    return {"do": "wait_saved", "with": {"saved_bytes": blocks * BLOCK_BYTES}}


def tell(holder: Holder, verb: str, name: str) -> Act:
    """Has threads of the sidecar held, let go, or waited for until they are idle."""
    return {"do": "tell", "with": {"address": holder.address, "text": f"{verb} {name}"}}


# Waits until the sidecar's data thread has done all due work.
TURN: Act = {"do": "turn"}
# Waits until the sidecar's copies for loads have ended.
WAIT_RELEASED: Act = {"do": "wait_released"}


def wait_filled(keeper: sidecar.Sidecar) -> Act:
    """Waits until every slot that is being filled has the engine's present bytes of a block."""
    return {"do": "wait_filled", "with": {"path": str(keeper.pool)}}


# --- verdicts ---


def expect_right(result: dict[str, Any], right: list[list[int]], what: str) -> None:
    """Every position that attention read was right, and every request was answered to its end."""
    assert result["wrong"] == 0, f"wrong KV: {what}: {result['wrong']} positions were read that do not hold their tokens' KV"
    lost = [index for index, answer in enumerate(result["value"]) if len(answer) < len(right[index])]
    assert not lost, f"lost request: {what}: requests {lost} ended early"
    assert result["value"] == right, f"wrong KV: {what}: the answers differ"


def play_sets_that_lack_a_group(stage: Stage, prompts: list[list[int]], copy: str, lost: bool, engine: dict[str, Any]) -> None:
    """The load of each prompt lacks another group's blocks, or its lease; the request is computed, and hits again later."""
    groups, right = len(prompts), right_answers(prompts, 8)
    hits = sum(hit_tokens(len(prompt)) for prompt in prompts)
    fault = lose_leases(groups) if lost else spoil(groups)
    with sidecar.serving(stage.directory) as keeper:
        acts = [generate(prompts, 1), SETTLE, RESET, SLOW_STEPS, fault, generate(prompts, 8)]
        acts += [SETTLE, RESET, generate(prompts, 8)]
        (connector,) = by_load(keeper, "auto", **{"pillion.copy": copy})
        (results,) = stage.play(acts, connector, metrics=metrics(keeper), **engine)
        failed, last = results[5], results[-1]
        assert (failed["hits"], failed["failed_requests"], failed["failed_blocks"]) == (hits, groups, 0)
        expect_right(failed, right, "of sets of which one group lacked blocks")
        expect_right(last, right, "after such loads")
        assert (last["hits"], last["failed_requests"]) == (hits, 0)
