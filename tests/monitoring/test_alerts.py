"""Each alert of deploy/monitoring fires at a fault, and none that the fault has no part in.

Two of them need a GPU whose driver refuses or hangs: they are shown by series of numbers, with promtool.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from faults import BESIDE, FAULTS, JOINING

from expressions import alerts, rules
from testkit.sidecar import serving

# The metric that a fault raises, which no test without a GPU can bring about.
SERIES = {"PillionParkedRanks": "pillion_parked_ranks", "PillionPoolNotLocked": "pillion_pool_pin_failures_total"}


def test_every_alert_has_a_fault() -> None:
    """A real one, or a series."""
    assert set(alerts()) == set(FAULTS) | set(SERIES)
    assert not set(FAULTS) & set(SERIES)


@pytest.mark.parametrize("alert", FAULTS)
def test_an_alert_fires_at_its_fault(alert: str, tmp_path: Path) -> None:
    """Without the wait that deploy/monitoring gives it."""
    with FAULTS[alert](tmp_path) as (prometheus, keep_on):

        def fires() -> bool:
            keep_on()
            return alert in prometheus.firing()

        prometheus.wait_for(fires, f"alert {alert}", poll_s=0.2)
        assert prometheus.fired() <= {alert} | BESIDE.get(alert, set()) | JOINING


def fires_in_series(directory: Path, alert: str, metric: str, value: int) -> bool:
    """Whether it does after an hour with this value of a metric, with the wait that it has."""
    (directory / "rules.yml").write_text(yaml.safe_dump(rules()))
    (found,) = [rule for group in rules()["groups"] for rule in group["rules"] if rule["alert"] == alert]
    series = [{"series": f'{metric}{{pod="one"}}', "values": f"{value}x120"}]
    labels = {"pod": "one"} | found["labels"]
    summary = found["annotations"]["summary"].replace("{{ $labels.pod }}", "one").replace("{{ $value }}", str(value))
    annotations = found["annotations"] | {"summary": summary}
    expected = [{"eval_time": "1h", "alertname": alert, "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}]}]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": expected}
    file = directory / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [case]}))
    return subprocess.run(["promtool", "test", "rules", file], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("alert", SERIES)
def test_an_alert_fires_in_a_series(alert: str, tmp_path: Path) -> None:
    """Of a metric that a sidecar has; at 0 it does not."""
    with serving(tmp_path, "16MiB", gpu=False) as sidecar:
        assert sidecar.metrics()[SERIES[alert]] == 0
    assert fires_in_series(tmp_path, alert, SERIES[alert], 1)
    assert not fires_in_series(tmp_path, alert, SERIES[alert], 0)
