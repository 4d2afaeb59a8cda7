"""Beside vLLM's ExampleConnector (`MultiConnector`): an engine keeps its own prompts, and none from files of another engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from testkit import beside, engine, prompts, sidecar

PROMPTS = [prompts.prompt(tokens, seed=tokens) for tokens in (100, 700)]
HITS = sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS)
OWN = prompts.prompt(200, seed=41)
# Several blocks of an answer.
OUTPUT_TOKENS = 70


@pytest.mark.supports("beside-others")
def test_files_of_another_engine_are_not_kept(options: engine.Options, tmp_path: Path) -> None:
    """The reader does not keep blocks of the files or answers upon them. The writer of the files finds its own blocks again
    after a restart."""
    # ExampleConnector writes a prompt of one step alone.
    float32 = dataclasses.replace(options, dtype="float32", batched_tokens=1024)
    folders = {name: tmp_path / name for name in ("writer", "reader")}
    for folder in folders.values():
        folder.mkdir()
    with sidecar.serving(folders["writer"]) as of_writer, sidecar.serving(folders["reader"]) as of_reader:
        other = beside.example(tmp_path / "files")
        alone = dataclasses.replace(float32, socket=of_writer.socket)
        with engine.running(beside.options(alone, other), tmp_path / "writer.log", until_served=False) as writer:
            beside.wait_served(writer, of_writer)
            right = [writer.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]["tokens"] for tokens in PROMPTS]
            of_writer.wait_metric("pillion_saved_blocks_total", HITS // engine.BLOCK_TOKENS)
            writer.kill()
        reading = beside.options(dataclasses.replace(float32, socket=of_reader.socket), other)
        with engine.running(reading, tmp_path / "reader.log", until_served=False) as reader:
            beside.wait_served(reader, of_reader)
            for tokens, wanted in zip(PROMPTS, right, strict=True):
                assert reader.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]["tokens"] == wanted
            assert reader.metrics()["external_hits"] == HITS
            # A prompt of its own is saved after all blocks of the others.
            reader.generate([OWN], max_tokens=1)
            own = prompts.stored_blocks(len(OWN), 1)
            of_reader.wait_metric("pillion_saved_blocks_total", own)
            assert of_reader.metrics()["pillion_saved_blocks_total"] == own
            reader.kill()
        with engine.running(alone, tmp_path / "again.log") as again:
            assert [again.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]["tokens"] for tokens in PROMPTS] == right
            assert again.metrics()["external_hits"] == HITS
            again.exit()
    for log in ("writer.log", "reader.log", "again.log"):
        assert "STAYS OUT" not in (tmp_path / log).read_text()
