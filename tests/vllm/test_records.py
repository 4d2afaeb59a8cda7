"""Records of requests: a receiver gets each slow one, and its parts sum up to the request's wait.

No behaviour of a receiver stops requests.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from stage import RESET, Stage, abort, block_count, by_load, generate, hit_tokens, metrics, peers, prompt_of, wait_saved

from pillion.records import PARTS, QUEUE_MAX, Records
from testkit import collector, ports, sidecar
from testkit.engine_config import engine_config
from testkit.waiting import wait_for

KEPT, AWAITED = prompt_of(333, 1), prompt_of(290, 2)
STEP_S, SLOW_MS = 0.3, 200
TO_ANSWER = {"do_remote_prefill": True}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("stage", ["scheduler"], indirect=True)
@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_receiver_gets_what_slow_requests_waited_for(stage: Stage, load: str) -> None:
    """A load in slow steps, a prompt without a producer, and its aborted copy have records; the quick request before them has
    none."""
    waits: dict[str, list[list[float]]]
    acts = [generate([KEPT], 1), wait_saved(block_count([KEPT], 1)), RESET, {"do": "slow_steps", "with": {"seconds": STEP_S}}]
    acts += [generate([KEPT], 1), generate([AWAITED], 1, transfer=TO_ANSWER)]
    acts += [generate([prompt_of(290, 3)], 1, transfer=TO_ANSWER, at={"1": abort(0)}), {"do": "waits"}]
    # Awaited blocks may come from a peer; without a peer or another engine, no request would wait.
    here, there = peers()
    (stage.directory / "there").mkdir()
    with (
        collector.collecting() as receiver,
        sidecar.serving(stage.directory, anonymous=True, more=here) as keeper,
        sidecar.serving(stage.directory / "there", anonymous=True, more=there),
    ):
        keeper.wait_metric("pillion_mesh_peers", 1)
        told = {"pillion.record_otlp": receiver.url, "pillion.record_slow_ms": SLOW_MS, "pillion.record_every": 0}
        [results] = stage.play(acts, *by_load(keeper, load, **told), metrics=metrics(keeper))
        records = receiver.records()
    waits = results[-1]["value"]
    assert set(records) == {"request-1", "request-2", "request-3"}
    for name, record in records.items():
        parts = sum(record[f"pillion.{part}_ms"] for part in PARTS)
        assert parts == pytest.approx(record["pillion.whole_ms"], abs=0.01)
        if name in waits:
            # A synchronous load ends with its step.
            least, most = waits[name][name == "request-1" and load == "sync"]
            assert least * 1e3 <= parts + 0.01 and parts - 0.01 <= most * 1e3
    loaded, awaited, left = (records[f"request-{number}"] for number in (1, 2, 3))
    hit = hit_tokens(len(KEPT))
    assert loaded["pillion.hit_tokens"] == loaded["pillion.found.host"] == hit and loaded["pillion.load"] == load
    assert loaded["pillion.copy_ms"] >= STEP_S * 1e3 and loaded["pillion.tokens"] == len(KEPT)
    assert awaited["pillion.producer_ms"] >= STEP_S * 1e3 and awaited["pillion.hit_tokens"] == 0
    assert (awaited["pillion.end"], left["pillion.end"]) == ("computed", "aborted")


class Played:
    """Records of requests that are computed at once."""

    def __init__(self, url: str | None) -> None:
        self.records = Records(engine_config(record_otlp=url), "engine")
        self.ends: Counter[str] = Counter()

    def play(self, count: int, headers: dict[str, str] | None = None) -> None:
        """Records `count` requests."""
        for number in range(count):
            self.records.keep(
                f"request-{number}",
                headers,
                (number, (40, 8, 24), [16, 0, 8], "async", False, [0.1, 0.0, 0.2, 0.0, 0.3], False),
            )

    def wait_ends(self, **ends: int) -> None:
        """Waits until so many have ended, by the kinds of ends."""

        def ended() -> bool:
            self.ends.update(self.records.take_ends())
            return self.ends == ends

        wait_for(ended, f"records that end as {ends}")


def test_a_kept_record_is_a_line_of_the_log_and_a_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to the client's trace, if vLLM passes the trace on."""
    lines: list[str] = []
    monkeypatch.setattr("pillion.records.logger.info", lambda text, *parts: lines.append(text % parts))
    with collector.collecting() as receiver:
        played = Played(receiver.url)
        played.play(2, {"traceparent": f"00-{TRACE}-{SPAN}-01"})
        played.wait_ends(written=2)
        played.records.close()
    told = [json.loads(line.removeprefix("pillion request ")) for line in lines]
    assert [one["request"] for one in told] == list(receiver.records()) == ["request-0", "request-1"]
    assert told[0]["found"] == {"host": 16, "p2p": 8} and (told[0]["load"], told[0]["end"]) == ("async", "computed")
    assert [told[0][f"{part}_ms"] for part in PARTS] == [100, 0, 200, 0, 300] and told[0]["whole_ms"] == 600
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in receiver.spans} == {(TRACE, SPAN)}
    assert receiver.resource["service.name"] == "pillion" and receiver.resource["service.instance.id"] == "engine"


@pytest.mark.parametrize("receiver", ["refuses", "is away"])
def test_records_that_are_not_taken_are_counted(receiver: str) -> None:
    """The reason is in the exporter's own line of the log."""
    with collector.collecting(status=400) as refusing:
        played = Played(refusing.url if receiver == "refuses" else f"http://127.0.0.1:{ports.free_port()}/v1/traces")
        played.play(1)
        played.wait_ends(refused=1)
        played.records.close()


def test_requests_do_not_wait_for_a_receiver() -> None:
    """It answers after all requests have gone on: records beyond the queue's length are dropped."""
    with collector.collecting(silent=True) as receiver:
        played = Played(receiver.url)
        played.play(1)
        # The exporter's thread has the first record.
        wait_for(lambda: played.records._kept.empty(), "a record on its way")
        played.play(QUEUE_MAX + 5)
        assert not receiver.answers.is_set() and not receiver.spans
        played.ends.update(played.records.take_ends())
        assert played.ends == {"dropped": 5}
        receiver.answers.set()
        played.wait_ends(dropped=5, written=QUEUE_MAX + 1)
        played.records.close()
