"""Engines that almost share blocks: both sides log the difference between them, and wrong bytes are never shared."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from testkit import engine, model, prompts, sidecar

PROMPT_TOKENS = 200
REMEDY = "set PYTHONHASHSEED to the same value on both"
STAYS_OUT = "PILLION STAYS OUT"
# A first request waits a while for its engine's ranks to join: on a busy machine sometimes not long enough.
STARTS_MAX = 3


def namespaces(keeper: sidecar.Sidecar) -> list[dict[str, Any]]:
    """The sidecar's list of namespaces."""
    return keeper.namespaces()


def namespace_lines(log: Path) -> set[str]:
    """The namespaces in a log with their facts, each from `namespace` to the line's end."""
    lines = log.read_text().splitlines()
    return {line[line.index("namespace ") :].strip() for line in lines if "namespace " in line and " none_hash=" in line}


def saved(keeper: sidecar.Sidecar, running: engine.Engine) -> dict[str, Any]:
    """An answer to a prompt; the sidecar keeps the prompt's blocks then."""
    before = keeper.metrics()["pillion_saved_blocks_total"]
    answer = running.generate([prompts.prompt(PROMPT_TOKENS, seed=900)])[0]
    keeper.wait_metric("pillion_saved_blocks_total", before + PROMPT_TOKENS // engine.BLOCK_TOKENS)
    return answer


def test_another_seed_is_explained_in_both_logs(options: engine.Options, tmp_path: Path) -> None:
    """Two engines differ in PYTHONHASHSEED alone: no hit, and both logs explain it."""
    logs = {seed: tmp_path / f"engine-{seed}.log" for seed in ("0", "1")}
    with sidecar.serving(tmp_path) as keeper:
        ours = dataclasses.replace(options, socket=keeper.socket)
        other = dataclasses.replace(ours, variables={"PYTHONHASHSEED": "1"})
        with engine.running(ours, logs["0"]) as first, engine.running(other, logs["1"]) as second:
            right = saved(keeper, first)
            answer = saved(keeper, second)
            assert answer["tokens"] == right["tokens"]
            assert second.metrics()["external_hits"] == 0
            known = namespaces(keeper)
            second.exit()
            first.exit()
    assert [entry["engines"] for entry in known] == [1, 1]
    facts = [entry["facts"] for entry in known]
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"none_hash"}
    for log in (logs["1"], keeper.log):
        text = log.read_text()
        assert "near miss" in text and "same model and layout; none_hash is" in text and REMEDY in text, log
    assert REMEDY not in logs["0"].read_text(), "the first engine had nobody to miss"
    lines = [namespace_lines(log) for log in logs.values()]
    assert all(len(own) == 1 for own in lines), lines
    assert lines[0] | lines[1] == namespace_lines(keeper.log), "both sides print one line, to be compared"


def test_an_engine_of_other_pages_cannot_claim_the_namespace(options: engine.Options, tmp_path: Path) -> None:
    """An engine with other pages under one `pillion.namespace` is refused with both descriptors, and serves without the
    cache."""
    with sidecar.serving(tmp_path) as keeper:
        ours = dataclasses.replace(options, socket=keeper.socket)
        with engine.running(ours, tmp_path / "first.log") as first:
            saved(keeper, first)
            first.exit()
        claim = {"pillion.namespace": namespaces(keeper)[0]["namespace"]}
        with engine.running(dataclasses.replace(ours, extra=claim), tmp_path / "same.log") as same:
            same.generate([prompts.prompt(PROMPT_TOKENS, seed=900)])
            assert same.metrics()["external_hits"] > 0
            same.exit()
        wide = dataclasses.replace(ours, extra=claim, dtype="float32")
        with engine.running(wide, tmp_path / "wide.log", until_served=False) as refused:
            assert refused.generate([prompts.prompt(PROMPT_TOKENS, seed=900)])[0]["tokens"]
            assert refused.metrics()["external_hits"] == 0
            refused.exit()
        assert len(namespaces(keeper)) == 1
    for log in (keeper.log, tmp_path / "wide.log"):
        text = log.read_text()
        for dtype in ("bfloat16", "float32"):
            assert f" kv_heads=2 keys=64 values=64 dtype={dtype} " in text, log
        assert "pillion.namespace" in text
    assert STAYS_OUT in (tmp_path / "wide.log").read_text()
    assert STAYS_OUT not in (tmp_path / "same.log").read_text()


def test_other_weights_under_one_name_are_apart(options: engine.Options, tmp_path: Path) -> None:
    """One `pillion.model_id` for two models: the second has a namespace of its own; a copy of the first is served."""
    copy = model.write(tmp_path / "copy", model.TINY)
    other = model.write(tmp_path / "other", dataclasses.replace(model.TINY, seed=99))
    with sidecar.serving(tmp_path) as keeper:
        named = dataclasses.replace(options, socket=keeper.socket, extra={"pillion.model_id": "tiny"})
        with engine.running(named, tmp_path / "first.log") as first:
            right = saved(keeper, first)
            first.exit()
        with engine.running(dataclasses.replace(named, model=other), tmp_path / "other.log") as apart:
            answer = saved(keeper, apart)
            assert apart.metrics()["external_hits"] == 0
            assert answer["tokens"] != right["tokens"], "the models differ where it shows"
            apart.exit()
        with engine.running(dataclasses.replace(named, model=copy), tmp_path / "copy.log") as same:
            again = same.generate([prompts.prompt(PROMPT_TOKENS, seed=900)])[0]
            assert same.metrics()["external_hits"] > 0
            assert again["tokens"] == right["tokens"]
            same.exit()
        facts = [entry["facts"] for entry in namespaces(keeper)]
        assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"weights_live"}
    for log in (keeper.log, tmp_path / "other.log"):
        text = log.read_text()
        assert "near miss" in text and "weights_live is" in text, log
    assert "near miss" not in (tmp_path / "copy.log").read_text()


def test_engines_under_one_id_are_served_their_own_blocks(options: engine.Options, tmp_path: Path) -> None:
    """Two models, one explicit `engine_id`, both registered before either steps: each first request finds its own blocks."""
    other = model.write(tmp_path / "other", dataclasses.replace(model.TINY, seed=99))
    prompt = [prompts.prompt(PROMPT_TOKENS, seed=900)]
    hit = prompts.hit_tokens(PROMPT_TOKENS)
    with sidecar.serving(tmp_path) as keeper:
        ours = dataclasses.replace(options, socket=keeper.socket, engine_id="shared")
        theirs = dataclasses.replace(ours, model=other)
        right = {}
        for name, kind in (("ours", ours), ("theirs", theirs)):
            with engine.running(dataclasses.replace(kind, socket=None), tmp_path / f"plain-{name}.log") as plain:
                right[name] = plain.generate(prompt)[0]["tokens"]
                plain.exit()
            with engine.running(kind, tmp_path / f"keeps-{name}.log") as first:
                assert saved(keeper, first)["tokens"] == right[name]
                assert first.metrics()["external_hits"] == 0, "the other model's blocks are none of its own"
                first.exit()
        assert right["ours"] != right["theirs"], "the models differ where it shows"
        hits: list[int] = []
        while hits[-2:] != [hit, hit] and len(hits) < 2 * STARTS_MAX:
            with (
                engine.running(ours, tmp_path / f"ours-{len(hits)}.log", until_served=False) as mine,
                engine.running(theirs, tmp_path / f"theirs-{len(hits)}.log", until_served=False) as yours,
            ):
                for name, running in (("ours", mine), ("theirs", yours)):
                    assert running.generate(prompt)[0]["tokens"] == right[name]
                    hits.append(running.metrics()["external_hits"])
                    running.exit()
        assert hits[-2:] == [hit, hit], f"the first request after a start hits wholly: {hits}"
        assert len(namespaces(keeper)) == 2
