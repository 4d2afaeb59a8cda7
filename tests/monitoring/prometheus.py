"""A real Prometheus with the rules of deploy/monitoring; it scrapes sidecars each second."""

from __future__ import annotations

import contextlib
import json
import math
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from expressions import Rules
from testkit import ports
from testkit.server import PAGE_WATCHDOG_S, Server

Labels = dict[str, str]


class Scraped(Protocol):
    """A sidecar, or a router."""

    # The host and port of its pages.
    http: str


class Prometheus(Server):
    """One server; `sidecars`, or routers, are named by their pods."""

    def __init__(self, directory: Path, sidecars: Mapping[str, Scraped], rules: Rules) -> None:
        directory.mkdir()
        self._address = f"127.0.0.1:{ports.free_port()}"
        (directory / "rules.yml").write_text(yaml.safe_dump(rules))
        targets = [{"targets": [sidecar.http], "labels": {"pod": pod}} for pod, sidecar in sidecars.items()]
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [{"job_name": "pillion", "static_configs": targets}],
        }
        file = directory / "prometheus.yml"
        file.write_text(yaml.safe_dump(configuration))
        command = [
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={self._address}",
            "--log.level=warn",
        ]
        super().__init__(command, directory / "prometheus.log", f"http://{self._address}/-/ready")

    def query(self, expression: str) -> list[tuple[Labels, float]]:
        """The present samples of an expression, without NaN."""
        samples = self._ask("query", query=expression)["result"]
        found = [(dict(sample["metric"]), float(sample["value"][1])) for sample in samples]
        return [(labels, value) for labels, value in found if not math.isnan(value)]

    def firing(self) -> set[str]:
        """The firing alerts."""
        return {alert["labels"]["alertname"] for alert in self._ask("alerts")["alerts"] if alert["state"] == "firing"}

    def fired(self) -> set[str]:
        """The alerts that fired or were pending, since this server started."""
        return {labels["alertname"] for labels, _ in self.query("count_over_time(ALERTS[1h])")}

    def rules(self) -> list[dict[str, Any]]:
        """The rules, with the result of their last evaluation."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def wait_scraped(self, pods: int) -> None:
        """Waits until so many sidecars were scraped twice: a counter's later growth has a rate then."""
        self.wait_for(lambda: len(self.query("count_over_time(up[1m]) > 1 and up == 1")) == pods, f"scrapes of {pods} pods")

    def wait_firing(self, alert: str) -> None:
        """Waits until this alert fires."""
        self.wait_for(lambda: alert in self.firing(), f"alert {alert}", poll_s=0.2)

    def _ask(self, page: str, **parameters: str) -> dict[str, Any]:
        url = f"http://{self._address}/api/v1/{page}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=PAGE_WATCHDOG_S) as response:
            return dict(json.load(response)["data"])


@contextlib.contextmanager
def scraping(directory: Path, sidecars: Mapping[str, Scraped], rules: Rules) -> Iterator[Prometheus]:
    """A Prometheus that has scraped all of the sidecars."""
    started = Prometheus(directory / "prometheus", sidecars, rules)
    try:
        started.wait_ready()
        started.wait_scraped(len(sidecars))
        yield started
    finally:
        started.kill()
