"""The facts of a real engine: its ranks' HELLO is written to a file instead of being sent to a sidecar."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from testkit import engine

STAYS_OUT = re.compile(r"PILLION STAYS OUT: (.*)")


def stated(options: engine.Options, log: Path, as_if: Mapping[str, Any]) -> dict[str, str] | str:
    """The facts of an engine, with the one that a sidecar adds; or the reason for which Pillion refuses it."""
    record = log.with_suffix(".stated")
    variables = {"PILLION_TEST_RECORD": str(record), "PILLION_TEST_AS_IF": json.dumps(dict(as_if))}
    stating = dataclasses.replace(
        options,
        socket=log.with_suffix(".nobody"),
        connector="testkit.stating_connector",
        variables=options.variables | variables,
    )
    with engine.running(stating, log, until_served=False):
        pass
    if record.exists():
        return _together([json.loads(line) for line in record.read_text().splitlines()])
    reasons = STAYS_OUT.findall(log.read_text())
    assert reasons, "an engine that states nothing, and stays out without a reason"
    return str(reasons[0])


def _together(ranks: list[dict[str, Any]]) -> dict[str, str]:
    """The facts of all ranks; they must be equal, except their samples."""
    ranks.sort(key=lambda rank: int(rank["rank"]))
    first = ranks[0]
    assert all(rank["facts"] == first["facts"] for rank in ranks)
    return {**first["facts"], "weights_live": " ".join(str(rank["live_weights"]) for rank in ranks)}
