"""Each alert of deploy/monitoring fires at its fault, and no unrelated alert does.

Two of them need a GPU whose driver refuses or hangs: promtool tests them with series of numbers.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from faults import BESIDE, FAULTS, JOINING, never_answers

from expressions import alerts, rules
from testkit.sidecar import serving

# The longest answer beside a silent prefill engine. After so many seconds no prompt waits for it.
WAIT_MAX_S, NOTICED_S = 5.0, 10.0
# An answer without a wait, on a busy machine.
AT_ONCE_S = 0.5
# The metric raised by a fault that no test without a GPU can cause.
SERIES = {"PillionParkedRanks": "pillion_parked_ranks", "PillionPoolNotLocked": "pillion_pool_pin_failures_total"}
# A metric of vLLM's page, for the same reason: tests/vllm/test_state.py tests it.
OF_ENGINES = {"PillionStaysOut": "vllm:pillion_stays_out"}
ASKED, FOUND = "pillion_query_blocks_total", "pillion_query_hit_blocks_total"
FAILED, ALONE = 'pillion_route_prefill_failures_total{reason="silent"}', 'pillion_route_prompts_total{way="no_prefill"}'
TAKEN, RECOMPUTED = (
    f'pillion_route_engine_handovers_total{{role="decode", result="{result}"}}' for result in ("taken", "recomputed")
)
# Series of values each 15 s that make an alert fire, and the wait after which it does.
WAITS = {
    "PillionParkedRanks": ({"pillion_parked_ranks": "1x480"}, "1m"),
    "PillionDiskDown": ({"pillion_ssd_down": "1x480"}, "5m"),
    "PillionStaysOut": ({"vllm:pillion_stays_out": "1x480"}, "5m"),
    "PillionPeerMissing": ({"pillion_mesh_endpoints_empty": "1x480"}, "10m"),
    "PillionNoPeers": ({"pillion_mesh_peers": "0x480"}, "30m"),
    "PillionPeerNameUnresolved": ({"pillion_mesh_peer_names_unresolved": "1x480"}, "10m"),
    "PillionNoEngine": ({"pillion_sessions": "0x480"}, "45m"),
    # The first 1,000 blocks are asked for within 3 min.
    # An engine never answers: each of its trials fails.
    "PillionPrefillFails": ({FAILED: "0+1x480", ALONE: "0+10x480"}, "10m"),
    "PillionPromptsRecomputed": ({TAKEN: "0+8x480", RECOMPUTED: "0+1x480"}, "15m"),
    "PillionFindsNothing": ({ASKED: "0+100x480", FOUND: "0x480"}, "1h3m"),
}


def test_every_alert_has_a_fault() -> None:
    """Each alert has a real fault, or a series."""
    assert sorted(alerts()) == sorted([*FAULTS, *SERIES, *OF_ENGINES])


@pytest.mark.parametrize("alert", FAULTS)
def test_an_alert_fires_at_its_fault(alert: str, tmp_path: Path) -> None:
    """The alert fires, without the wait of deploy/monitoring, and no unrelated one."""
    with FAULTS[alert](tmp_path) as (prometheus, keep_on):

        def fires() -> bool:
            keep_on()
            return alert in prometheus.firing()

        prometheus.wait_for(fires, f"alert {alert}", poll_s=0.2)
        assert prometheus.fired() <= {alert} | BESIDE.get(alert, set()) | JOINING


def test_a_prefill_engine_that_never_answers_is_an_alert(tmp_path: Path) -> None:
    """Prompts wait until the router notices it, and fifty later ones do not.

    Until then a prompt of the decode engine counts as computed again, since the other engine may have it.
    """
    with never_answers(tmp_path) as (prometheus, ask):
        begun, before = time.monotonic(), [seconds_of(ask)]
        while before[-1] > AT_ONCE_S:
            before.append(seconds_of(ask))
        assert time.monotonic() - begun < NOTICED_S and max(before) <= WAIT_MAX_S, before
        assert max(seconds_of(ask) for _ in range(50)) <= AT_ONCE_S
        prometheus.wait_firing("PillionPrefillFails")
        assert prometheus.fired() <= {"PillionPrefillFails", "PillionPromptsRecomputed"} | JOINING


def seconds_of(ask: Callable[[], object]) -> float:
    """The time of one prompt."""
    begun = time.monotonic()
    ask()
    return time.monotonic() - begun


def of_pod(metric: str) -> str:
    """A metric, with or without labels of its own, and with the label of its pod."""
    name, _, labels = metric.partition("{")
    return f'{name}{{pod="one", {labels}' if labels else f'{name}{{pod="one"}}'


def holds(directory: Path, metrics: dict[str, str], expected: dict[str, Any]) -> bool:
    """True if promtool finds an alert as expected, with metrics of these values every 15 s, evaluated every 12 s."""
    (directory / "rules.yml").write_text(yaml.safe_dump(rules()))
    series = [{"series": of_pod(metric), "values": values} for metric, values in metrics.items()]
    case = {"interval": "15s", "input_series": series, "alert_rule_test": [expected]}
    file = directory / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "12s", "tests": [case]}))
    return subprocess.run(["promtool", "test", "rules", file], capture_output=True, check=False).returncode == 0


def fires_in_series(directory: Path, alert: str, metric: str, value: int) -> bool:
    """True if the alert fires after an hour with this value of a metric, with its own wait."""
    (found,) = [rule for group in rules()["groups"] for rule in group["rules"] if rule["alert"] == alert]
    labels = {"pod": "one"} | found["labels"]
    summary = found["annotations"]["summary"].replace("{{ $labels.pod }}", "one").replace("{{ $value }}", str(value))
    annotations = found["annotations"] | {"summary": summary}
    fires = {"eval_time": "1h", "alertname": alert, "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}]}
    return holds(directory, {metric: f"{value}x480"}, fires)


def quiet(directory: Path, alert: str, metrics: dict[str, str], at: str) -> bool:
    """True if the alert does not fire at this time, with its own wait."""
    return holds(directory, metrics, {"eval_time": at, "alertname": alert, "exp_alerts": []})


@pytest.mark.parametrize("alert", SERIES)
def test_an_alert_fires_in_a_series(alert: str, tmp_path: Path) -> None:
    """A metric of every sidecar; at 0 the alert does not fire."""
    with serving(tmp_path, "16MiB", gpu=False) as sidecar:
        assert sidecar.metrics()[SERIES[alert]] == 0
    assert fires_in_series(tmp_path, alert, SERIES[alert], 1)
    assert not fires_in_series(tmp_path, alert, SERIES[alert], 0)


@pytest.mark.parametrize("alert", OF_ENGINES)
def test_an_alert_fires_in_a_series_of_an_engine(alert: str, tmp_path: Path) -> None:
    """A metric of vLLM's page; at 0 the alert does not fire."""
    assert fires_in_series(tmp_path, alert, OF_ENGINES[alert], 1)
    assert not fires_in_series(tmp_path, alert, OF_ENGINES[alert], 0)


def test_a_thread_that_turns_is_no_alert_late_after_a_scrape(tmp_path: Path) -> None:
    """The metric's last value is from the scrape 12 s ago."""
    metric = "pillion_last_turn_timestamp_seconds"
    assert quiet(tmp_path, "PillionStandsStill", {metric: "0+15x300"}, "60m12s")
    assert not quiet(tmp_path, "PillionStandsStill", {metric: "0+15x200 3000x100"}, "60m12s")


def seconds(duration: str) -> int:
    """The seconds of a duration in Prometheus's form."""
    hours, _, rest = duration.rpartition("h")
    return int(hours or 0) * 3600 + int(rest.removesuffix("m") or 0) * 60


@pytest.mark.parametrize("alert", WAITS)
def test_an_alert_waits(alert: str, tmp_path: Path) -> None:
    """An alert is quiet a moment before its wait ends, and fires a moment after."""
    metrics, wait = WAITS[alert]
    before, after = (f"{seconds(wait) + moment}s" for moment in (-30, 30))
    assert quiet(tmp_path, alert, metrics, before)
    assert not quiet(tmp_path, alert, metrics, after)


def test_a_cache_that_finds_something_or_is_hardly_asked_is_no_alert(tmp_path: Path) -> None:
    """A block of a hundred is found, or few are asked for."""
    for asked, found in (("0+100x480", "0+1x480"), ("0+10x480", "0x480")):
        assert quiet(tmp_path, "PillionFindsNothing", {ASKED: asked, FOUND: found}, "2h")


def steps(each: int) -> str:
    """A counter with one step in so many scrapes, for two hours."""
    return " ".join(f"{count}x{each - 1}" for count in range(480 // each))


def test_an_engine_that_never_answers_few_prompts_is_an_alert(tmp_path: Path) -> None:
    """One prompt each 4 min is enough, and one failure alone is not."""
    assert not quiet(tmp_path, "PillionPrefillFails", {FAILED: steps(each=16)}, "30m")
    for at in ("2m", "6m", "10m30s", "15m"):
        assert quiet(tmp_path, "PillionPrefillFails", {FAILED: "0x3 1x470"}, at)


def test_prompts_of_which_few_are_recomputed_are_no_alert(tmp_path: Path) -> None:
    """One of twenty, or none at all."""
    for taken, recomputed in (("0+19x480", "0+1x480"), ("0x480", "0x480")):
        assert quiet(tmp_path, "PillionPromptsRecomputed", {TAKEN: taken, RECOMPUTED: recomputed}, "1h")
