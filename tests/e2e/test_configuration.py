"""An edited model configuration has KV of its own; the same configuration served with other settings keeps its KV."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit import asking, engine, model, prompts, sidecar

OUTPUT_TOKENS = 8


def edit(directory: Path, **values: Any) -> None:
    """Changes config.json as a user would."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def differing(keeper: sidecar.Sidecar) -> set[str]:
    """The names of the facts that differ between a sidecar's two namespaces."""
    one, other = (entry["facts"] for entry in keeper.namespaces())
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


class Asker:
    """Starts engines one after the other and asks each the same prompt."""

    def __init__(self, keeper: sidecar.Sidecar, options: engine.Options, prompt_tokens: int) -> None:
        self.keeper = keeper
        self.prompt = prompts.prompt(prompt_tokens, seed=160)
        self._options = options

    def right(self, log: Path, **arguments: Any) -> list[int]:
        """The answer of vLLM without a connector."""
        with self._running(None, log, arguments) as plain:
            return self._answer(plain)

    def ask(self, log: Path, **arguments: Any) -> tuple[list[int], int]:
        """The engine's answer and its hit, with the cache; the prompt is kept afterwards."""
        before = self.keeper.metrics()["pillion_saved_blocks_total"]
        with self._running(self.keeper.socket, log, arguments) as running:
            tokens = self._answer(running)
            hits = running.metrics()["external_hits"]
            missed = (len(self.prompt) - hits) // engine.BLOCK_TOKENS
            if not hits:
                self.keeper.wait_metric("pillion_saved_blocks_total", before + missed)
            running.exit()
        return tokens, hits

    @contextlib.contextmanager
    def _running(self, socket: Path | None, log: Path, arguments: dict[str, Any]) -> Iterator[engine.Engine]:
        with engine.running(dataclasses.replace(self._options, socket=socket, arguments=arguments), log) as running:
            yield running

    def _answer(self, running: engine.Engine) -> list[int]:
        return list(running.generate([self.prompt], max_tokens=OUTPUT_TOKENS)[0]["tokens"])


def test_an_edited_configuration_has_kv_of_its_own(tmp_path: Path) -> None:
    """Another rope_theta: no hit, and the logs show both. Edited back and served otherwise: every hit."""
    directory = model.write(tmp_path / "model")
    with sidecar.serving(tmp_path) as keeper:
        asker = Asker(keeper, engine.Options(model=directory), asking.PROMPT_TOKENS)
        first, _ = asker.ask(tmp_path / "first.log")
        edit(directory, rope_theta=5000.0)
        right = asker.right(tmp_path / "plain.log")
        assert right != first, "the configurations differ where it shows"
        assert asker.ask(tmp_path / "edited.log") == (right, 0)
        edit(directory, rope_theta=10000.0)
        again, hits = asker.ask(tmp_path / "again.log", max_num_seqs=3, seed=7, max_model_len=2048)
        assert again == first
        assert asking.whole(hits)
        assert differing(keeper) == {"config", "rotary"}
    for log in (keeper.log, tmp_path / "edited.log"):
        (miss,) = [line for line in log.read_text().splitlines() if "near miss" in line]
        assert "config is" in miss and "rope_theta=5000.0" in miss and "rope_theta=10000.0" in miss, log


def test_longrope_of_another_length_has_kv_of_its_own(tmp_path: Path) -> None:
    """vLLM chooses LongRoPE's factors by max_model_len: beyond the original length a prompt has other KV, not below."""
    directory = model.write(tmp_path / "model", model.TINY_PHI3)
    with sidecar.serving(tmp_path) as keeper:
        asker = Asker(keeper, engine.Options(model=directory), asking.PROMPT_TOKENS)
        short, _ = asker.ask(tmp_path / "short.log", max_model_len=1700)
        right = asker.right(tmp_path / "plain.log", max_model_len=4096)
        assert right != short, "the factors differ where it shows"
        assert asker.ask(tmp_path / "long.log", max_model_len=4096) == (right, 0)
        again, hits = asker.ask(tmp_path / "again.log", max_model_len=model.LONGROPE_ORIGINAL)
        assert again == short
        assert asking.whole(hits)
        assert differing(keeper) == {"rotary"}
