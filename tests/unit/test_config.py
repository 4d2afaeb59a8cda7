"""`kv_connector_extra_config`: what is accepted, and what the errors say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pillion import config as module
from pillion.config import Config, ConfigError, parse


def test_defaults() -> None:
    config = parse({"pillion.socket": "/s"})
    assert config == Config(socket="/s", mode="read_write", load="auto", layout="auto", copy="auto", query_timeout_us=2000)
    assert config.loads
    assert config.saves
    assert config.required_layout is None


def test_the_waits_are_those_of_the_protocol() -> None:
    layout = (Path(__file__).resolve().parents[2] / "shm-protocol/src/layout.rs").read_text()
    numbers = {name: int(number) for name, number in re.findall(r"pub const (\w+): u32 = ([\d_]+);", layout)}
    assert numbers["QUERY_WAIT_MS_MAX"] == module.MISS_WAIT_MS_MAX
    assert numbers["PROMISED_WAIT_MS_MAX"] == module.HANDOVER_WAIT_MS_MAX
    assert numbers["AWAIT_MS"] == module.PROMISE_WAIT_MS


def test_a_namespace_is_taken_as_it_is_shown() -> None:
    assert parse({"pillion.namespace": "0a" * 16}).namespace == "0a" * 16
    assert parse({}).namespace is None


def test_requests_wait_for_a_producer_only_where_told_to() -> None:
    assert parse({}).miss_wait_ms == 0
    assert parse({"pillion.miss_wait_ms": 2000}).miss_wait_ms == 2000


def test_records_go_where_they_are_told_to() -> None:
    assert parse({"pillion.record_otlp": "http://[::1]:4318/v1/traces"}).record_otlp == "http://[::1]:4318/v1/traces"
    assert parse({}).record_otlp is None


def test_other_connectors_keys_are_left_alone() -> None:
    others = ("lmcache.host", "lmcache.mode", "mode", "load", "connectors", "bench.namespace")
    assert parse({"pillion.socket": "/s"} | dict.fromkeys(others, "x")).socket == "/s"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"pillion.sockett": "/s"}, "pillion.query_timeout_us"),
        ({"pilion.mode": "save_only"}, "unknown option pilion.mode"),
        ({"Pillion.load": "sync"}, "unknown option Pillion.load"),
        ({"pillion_mode": "save_only"}, "unknown option pillion_mode"),
        ({"pillon.check_every": 0}, "unknown option pillon.check_every"),
        ({"pillion.mode": "write"}, "save_only"),
        ({"pillion.load": "lazy"}, "async"),
        ({"pillion.layout": "NHD"}, "BLNHC"),
        ({"pillion.copy": "gpu"}, "sidecar"),
        ({"pillion.socket": ""}, "not empty"),
        ({"pillion.salt": ""}, "not empty"),
        ({"pillion.salt": 7}, "a text"),
        ({"pillion.query_timeout_us": 10_000_001}, "10000000"),
        ({"pillion.query_timeout_us": -1}, "10000000"),
        ({"pillion.query_timeout_us": "2ms"}, "10000000"),
        ({"pillion.query_timeout_us": True}, "10000000"),
        ({"pillion.miss_wait_ms": 2001}, "0 (off) to 2000"),
        ({"pillion.miss_wait_ms": -1}, "2000"),
        ({"pillion.miss_wait_ms": 0.5}, "2000"),
        ({"pillion.miss_wait_ms": True}, "2000"),
        ({"pillion.namespace": "0" * 31}, "32 lower-case hex digits"),
        ({"pillion.namespace": "A" * 32}, "32 lower-case hex digits"),
        ({"pillion.record_every": -1}, "0 (none) to 1000000"),
        ({"pillion.record_slow_ms": 3_600_001}, "0 (every request) to 3600000"),
        ({"pillion.record_otlp": "collector:4318"}, "an http or https URL with its path"),
        ({"pillion.record_otlp": "http://collector:4318"}, "an http or https URL with its path"),
        ({"pillion.namespace": 7}, "32 lower-case hex digits"),
    ],
)
def test_errors_name_the_valid_values(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(extra)
    assert named in str(error.value)
    assert next(iter(extra)) in str(error.value)


@pytest.mark.parametrize(("mode", "loads", "saves"), [("save_only", False, True), ("load_only", True, False)])
def test_modes(mode: str, loads: bool, saves: bool) -> None:
    config = parse({"pillion.mode": mode})
    assert (config.loads, config.saves) == (loads, saves)


@pytest.mark.parametrize(("layout", "asked"), [("auto", None), ("none", None), ("BLNHC", "BLNHC")])
def test_layout(layout: str, asked: str | None) -> None:
    assert parse({"pillion.layout": layout}).required_layout == asked


@pytest.mark.parametrize(
    ("copy", "on_cpu", "on_gpu"),
    [("auto", "engine", "sidecar"), ("engine", "engine", "engine"), ("sidecar", "sidecar", "sidecar")],
)
def test_who_copies(copy: str, on_cpu: str, on_gpu: str) -> None:
    config = parse({"pillion.copy": copy})
    assert (config.copier(on_gpu=False), config.copier(on_gpu=True)) == (on_cpu, on_gpu)
