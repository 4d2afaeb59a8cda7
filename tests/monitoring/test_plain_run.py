"""Metrics, pages and alerts of two sidecars that serve engines and each other, and of a router, without a fault."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pair
import pytest
import screens
from faults import JOINING

import mesh
from expressions import alerts, impatient, queries
from pillion.engine import Engine
from prometheus import Prometheus, scraping
from testkit.browser import browse
from testkit.sidecar import Sidecar, find_binary

# One run for all tests.
pytestmark = pytest.mark.xdist_group("plain-run")

PROMPTS = [mesh.prompt(seed) for seed in range(1, 21)]
HANDED_OVER = mesh.prompt(21)
# A folder for the pictures, to keep them: SCREENS=docs writes those of the documentation.
SCREENS = os.environ.get("SCREENS")
# The time after the traffic in which levels fall and an alert could still fire.
QUIET_S = 5.0
# The tables of a sidecar's page.
TITLES = ("Tiers", "Hits", "Hits of other pool sizes", "Transfers", "Handovers", "Engines", "Peers")
TYPE = re.compile(r"^# TYPE (\w+) (\w+)$", re.MULTILINE)
HELP = re.compile(r"^# HELP (\w+) (.*)$", re.MULTILINE)
# Words of names for a unit, not for an event.
MEASURES = {"blocks", "bytes", "seconds"}
# Gauges that only grow, or may, or have a counter's name, with the reason why each is a level.
LEVELS = {
    "pillion_last_turn_timestamp_seconds": "a time of the clock",
    "pillion_check_difference_max": "a maximum",
    "pillion_pool_pinned_bytes": "how far the start has got",
    "pillion_mesh_peer_promises": "those that are open at present",
    "pillion_tier_read_bytes_per_second": "a rate of past reads",
    "process_resident_memory_bytes": "the kernel's",
}


@dataclass(frozen=True)
class Run:
    """A run with its engines still connected."""

    prometheus: Prometheus
    sidecars: tuple[Sidecar, Sidecar]
    engines: tuple[Engine, ...]
    router: pair.Router

    def page(self) -> str:
        """The first sidecar's metrics."""
        page = self.sidecars[0].get("/metrics")
        assert page is not None
        return page

    def end(self) -> None:
        """Closes the engines and removes their blocks."""
        for engine in self.engines:
            engine.close()
        for sidecar in self.sidecars:
            empty(sidecar)
        time.sleep(QUIET_S)


def empty(sidecar: Sidecar) -> None:
    """Removes every block."""
    for found in sidecar.namespaces():
        ctl = [find_binary(), "ctl", "--socket", sidecar.socket, "evict", found["namespace"]]
        subprocess.run(ctl, stdout=subprocess.DEVNULL, check=True)
    sidecar.wait_for(lambda: sidecar.metrics()["pillion_blocks"] == 0, "a pool without blocks")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Every prompt is saved at the first sidecar and evicted to its disk, and found there, and by the second.

    One more is handed over between two engines of that sidecar. The router's engines hand over one prompt.
    """
    directory = tmp_path_factory.mktemp("run")
    with (
        mesh.peers(directory) as (first, second),
        pair.routing(directory, computes=True, cached=len(pair.PROMPT) - 1) as router,
        scraping(directory, {"first": first, "second": second, "router": router}, impatient()) as prometheus,
        mesh.joined(first.socket, "saves") as saves,
        mesh.joined(first.socket, "answers") as answers,
        mesh.joined(second.socket, "asks") as asks,
    ):
        mesh.save_to_disk(first, saves, PROMPTS)
        second.wait_metric("pillion_mesh_peer_keys", first.metrics()["pillion_blocks"])
        assert sum(mesh.load(saves, tokens) for tokens in PROMPTS) > 0
        assert sum(mesh.load(asks, tokens) for tokens in PROMPTS) > 0
        first.wait_metric("pillion_ssd_read_bytes_total", 1)
        second.wait_metric("pillion_mesh_fetched_bytes_total", 1)
        assert mesh.save(saves, HANDED_OVER, handover=True) == mesh.load(answers, HANDED_OVER, awaits=True) > 0
        assert first.metrics()["pillion_handover_queries_total"] == 1
        router.ask()
        time.sleep(QUIET_S)
        yield Run(prometheus, (first, second), (saves, answers, asks), router)


def test_every_query_of_the_dashboard_has_samples(run: Run) -> None:
    """The query of the dashboard's list of pods has samples, too."""
    assert len(queries()) > 20
    empty = [query for query in queries() if not run.prometheus.query(query)]
    assert empty == []
    assert {labels["pod"] for labels, _ in run.prometheus.query("pillion_pool_bytes")} == {"first", "second"}


def test_no_alert_fires(run: Run) -> None:
    """Prometheus evaluated all alerts, without the waits of deploy/monitoring."""
    run.prometheus.wait_for(
        lambda: {rule["health"] for rule in run.prometheus.rules()} == {"ok"}, "an evaluation of every rule without an error"
    )
    assert {rule["name"] for rule in run.prometheus.rules()} == set(alerts())
    assert run.prometheus.fired() <= JOINING


def test_the_page_and_top_show_all_of_it(run: Run, tmp_path: Path) -> None:
    """The sidecar's page in a browser, and `pillion top` on a terminal."""
    folder = Path(SCREENS).resolve() if SCREENS else tmp_path
    http = run.sidecars[0].http
    page = browse(f"http://{http}/", "--dump-dom")
    screens.picture(f"http://{http}/", folder / "status-page.png")
    text = screens.top(find_binary(), http, folder / "top.png", last="Peers")
    for shown in (page, text):
        assert [title for title in TITLES if title not in shown] == []
        assert "node1" in shown and "saves" in shown
    assert all((folder / name).stat().st_size > 10_000 for name in ("status-page.png", "top.png"))


def test_promtool_has_no_complaint(run: Run) -> None:
    """It has one about a counter without `_total`."""

    def complaints(page: str) -> str:
        checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
        return checked.stdout + checked.stderr

    assert complaints(run.page()) == complaints(run.router.page()) == ""
    assert "_total" in complaints(run.page().replace("pillion_queries_total", "pillion_queries"))


def wrong_types(page: str) -> set[str]:
    """Counters without `_total`, other metrics with it, and gauges of events, found by their names and help."""
    types, helps = dict(TYPE.findall(page)), dict(HELP.findall(page))
    happened = {name.split("_")[-2] for name, kind in types.items() if kind == "counter"} - MEASURES
    happened = {word for word in happened if word.endswith("s")}
    wrong = {name for name, kind in types.items() if (kind == "counter") != name.endswith("_total")}
    gauges = [name for name, kind in types.items() if kind == "gauge" and name not in LEVELS]
    texts = ("Times ", "Number of ")
    return wrong | {name for name in gauges if name.split("_")[-1] in happened or helps[name].startswith(texts)}


def test_counters_and_gauges_are_what_their_names_say(run: Run) -> None:
    """A counter with the type of a gauge has no rate, and a restart looks like a fall."""
    page = run.page()
    assert wrong_types(page) == wrong_types(run.router.page()) == set()
    lie = page.replace("# TYPE pillion_ssd_trips_total counter", "# TYPE pillion_ssd_trips_total gauge")
    assert wrong_types(lie) == {"pillion_ssd_trips_total"}


def test_no_gauge_only_grows_and_no_counter_falls(run: Run) -> None:
    """The scrapes include the end: every block is removed, and no engine is connected."""
    page = run.page()
    run.end()
    types = dict(TYPE.findall(page))
    changed = {name for name in types if run.prometheus.query(f"changes({name}[1h]) > 0")}
    # The query also counts the falls of a gauge.
    fell = {name for name in types if run.prometheus.query(f"resets({name}[1h]) > 0")}
    assert {name for name in fell if types[name] == "counter"} == set()
    gone = {name for name in types if run.prometheus.query(f"count_over_time({name}[1h]) unless {name}")}
    assert {name for name in changed - fell - gone if types[name] == "gauge"} - set(LEVELS) == set()
    assert len(fell) > 5, "levels that came down"
