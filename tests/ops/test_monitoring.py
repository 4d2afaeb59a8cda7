"""The alerts and the dashboard ask for metrics that a sidecar has."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from manifests import DEPLOY, ROOT, of
from testkit import ports
from testkit.sidecar import serving

NAME = re.compile(r"\bpillion_[a-z_]+\b")
# Metrics with a label for each engine are on the page once there is one.
NAMED_IN_SOURCE = re.compile(r'"(pillion_[a-z_]+)"')


def alerts() -> list[str]:
    """The expressions of the rules."""
    (rules,) = of(DEPLOY / "monitoring/rules.yaml")
    return [rule["expr"] for group in rules["spec"]["groups"] for rule in group["rules"]]


def queries() -> list[str]:
    """The expressions of the dashboard, as Grafana would send them."""
    dashboard = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return [query.replace("$__rate_interval", "5m").replace("$pod", ".*") for query in found]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The metrics of two sidecars with disks that are peers, and those that have a line for each engine."""
    listen = [ports.free_port() for _ in range(2)]
    with contextlib.ExitStack() as stack:
        for number in range(2):
            folder = tmp_path_factory.mktemp(f"sidecar{number}")
            (folder / "disk").mkdir()
            more = (
                f"--mesh-listen=127.0.0.1:{listen[number]}",
                f"--peer=127.0.0.1:{listen[1 - number]}",
                f"--node-id=node{number}",
                "--mesh-plaintext",
            )
            sidecar = stack.enter_context(serving(folder, "64MiB", gpu=False, ssd=(f"{folder / 'disk'}:64MiB",), more=more))
        sidecar.wait_metric("pillion_mesh_peers", 1)
        names = set(sidecar.metrics())
    sources = [ROOT / "sidecar/src/metrics.rs", *(ROOT / "sidecar/src/metrics").glob("*.rs")]
    return names | {name for source in sources for name in NAMED_IN_SOURCE.findall(source.read_text())}


def test_alerts_and_dashboard_ask_for_metrics_that_exist(known: set[str]) -> None:
    """A name that no sidecar has makes an alert that never fires."""
    asked = {name for expression in alerts() + queries() for name in NAME.findall(expression)}
    assert len(asked) > 30
    assert asked <= known, asked - known
    assert "pillion_blocks_total" not in known


def test_every_expression_is_promql(tmp_path: Path) -> None:
    """By Prometheus itself, which refuses one that is cut."""
    rules = [{"record": f"a:b{number}", "expr": text} for number, text in enumerate(alerts() + queries())]

    def check(found: list[dict[str, str]]) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "rules.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "a", "rules": found}]}))
        return subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)

    assert check(rules).returncode == 0, check(rules).stderr
    assert check([*rules, {"record": "a:b", "expr": rules[0]["expr"][:-4] + "("}]).returncode != 0


def test_alerts_are_rules_of_prometheus(tmp_path: Path) -> None:
    """With their labels, times and templates."""
    (rules,) = of(DEPLOY / "monitoring/rules.yaml")
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rules["spec"]))
    checked = subprocess.run(["promtool", "check", "rules", file], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
