"""The rules and the dashboard of deploy/monitoring, as Prometheus reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
MONITORING = ROOT / "deploy/monitoring"
# Values of Grafana's variables.
RATE_INTERVAL, POD = "1m", ".*"

Rules = dict[str, Any]


def rules() -> Rules:
    """The rule groups, without the operator's envelope."""
    return dict(yaml.safe_load((MONITORING / "rules.yaml").read_text())["spec"])


def impatient() -> Rules:
    """The same rules without their waits: `for` would be a test's longest wait, and does not decide whether a rule fires."""
    found = rules()
    for group in found["groups"]:
        for rule in group["rules"]:
            rule.pop("for", None)
    return found


def alerts() -> dict[str, str]:
    """The expression of each alert."""
    return {rule["alert"]: rule["expr"] for group in rules()["groups"] for rule in group["rules"]}


def queries() -> list[str]:
    """The expressions of the dashboard, as Grafana would send them."""
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", RATE_INTERVAL).replace("$pod", POD) for query in found]
