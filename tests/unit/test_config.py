"""`kv_connector_extra_config` as Python hands it over. Tests of the rules: connector-shim/src/core/options.rs."""

from __future__ import annotations

import dataclasses
from typing import get_type_hints

import pytest

from pillion import _shim
from pillion.config import Config, ConfigError, parse_options


def test_defaults() -> None:
    config = parse_options({"pillion.socket": "/s"})
    assert (config.socket, config.mode, config.load, config.layout, config.copy) == ("/s", "read_write", "auto", "auto", "auto")
    assert (config.query_timeout_us, config.model_id, config.namespace) == (2000, None, None)


def test_every_option_has_its_type() -> None:
    config, hints = parse_options({}), get_type_hints(Config)
    assert list(dataclasses.asdict(config)) == [name for name, *_ in _shim.engine_options()]
    for name, value in dataclasses.asdict(config).items():
        assert isinstance(value, hints[name]), name


def test_values_and_keys_of_others_are_handed_over() -> None:
    others = ("lmcache.host", "lmcache.mode", "mode", "load", "connectors", "bench.namespace")
    config = parse_options({"pillion.miss_wait_ms": 2000, "pillion.salt": "s"} | dict.fromkeys(others, "x"))
    assert (config.miss_wait_ms, config.salt, config.mode) == (2000, "s", "read_write")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"pilion.mode": "save_only"}, "unknown option pilion.mode"),
        ({"pillion.mode": "write"}, "is 'write'; it must be one of read_write, save_only"),
        ({"pillion.salt": 7}, "a text"),
        ({"pillion.query_timeout_us": -1}, "is -1; it must be a whole number of microseconds, 0 to 10000000"),
        ({"pillion.query_timeout_us": True}, "is True"),
        ({"pillion.miss_wait_ms": 0.5}, "is 0.5"),
        ({"pillion.record_every": 1 << 70}, "0 (none) to 1000000"),
        ({"pillion.mode": "\ud800"}, "save_only"),
        ({"pillion.namespace": None}, "is None"),
    ],
)
def test_errors_show_the_value(extra: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_options(extra)
    assert named in str(error.value)
    assert next(iter(extra)) in str(error.value)


@pytest.mark.parametrize(
    ("copy", "on_cpu", "on_gpu"),
    [("auto", "engine", "sidecar"), ("engine", "engine", "engine"), ("sidecar", "sidecar", "sidecar")],
)
def test_who_copies(copy: str, on_cpu: str, on_gpu: str) -> None:
    config = parse_options({"pillion.copy": copy})
    assert (config.copier(on_gpu=False), config.copier(on_gpu=True)) == (on_cpu, on_gpu)
