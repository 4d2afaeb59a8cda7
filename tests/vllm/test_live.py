"""The digest of a rank's weights while it runs: equal for the same weights, and never equal for different ones."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pillion import memory as module
from pillion.live import Live
from pillion.metadata import PillionMetadata
from pillion.models import Models
from pillion.sample import DIGEST_BYTES, Sample, Sampler
from pillion.worker import Worker
from testkit.engine_config import engine_config

FACTS = {"config": "one", "rotary": "two"}


def model(seed: int) -> torch.nn.Module:
    """A model with weights drawn from the seed, and a part without weights."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(40, 50), torch.nn.Identity())


def experts(seed: int) -> torch.nn.ModuleDict:
    """Experts beside shared weights; the shared ones are the same with every seed."""
    torch.manual_seed(seed)
    shared = torch.nn.Linear(4, 4)
    with torch.no_grad():
        shared.weight.fill_(1)
        shared.bias.fill_(1)
    return torch.nn.ModuleDict({"experts": torch.nn.Linear(40, 50), "shared_experts": shared})


class Emptied(torch.nn.Module):
    """A layer with weights that only its kernel can read."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(0))


def change(module: torch.nn.Module) -> None:
    """Changes the weights of a linear layer by very little."""
    with torch.no_grad():
        module.weight.view(torch.int32).add_(1)


def live(*models: torch.nn.Module, facts: dict[str, str] | None = None, **more: Any) -> Live:
    """The live digest of whole models; the test may change the facts."""
    return Live(Sampler(Models(models), more.pop("experts_apart", False)), lambda: facts or FACTS, **more)


def test_the_digest_changes_with_the_weights_and_back_with_them() -> None:
    """With the old weights again, an engine finds its blocks again."""
    one = model(1)
    rank = live(one)
    first = rank.begin(FACTS)
    assert first == Sampler(Models([one])).take().weights == rank.again()
    assert not rank.differs()
    change(one[0])
    assert rank.differs()
    second = rank.again()
    assert second != first
    assert not rank.differs()
    one.load_state_dict(model(1).state_dict())
    assert rank.differs()
    assert rank.again() == first


def test_a_fact_that_changes_counts_from_then_on() -> None:
    """It counts no longer once it is back."""
    facts = dict(FACTS)
    rank = live(model_ := model(1), facts=facts)
    first = rank.begin(facts)
    facts["rotary"] = "three"
    second = rank.again()
    facts["rotary"] = "four"
    assert len({first, second, rank.again()}) == 3
    facts.update(FACTS)
    assert rank.again() == first
    assert model_


def test_experts_that_are_kept_apart_count_once_they_change() -> None:
    """Engines with different experts at their starts are equal; moved experts are never known to be equal again."""
    one, other = experts(1), experts(2)
    ranks = [live(it, experts_apart=True) for it in (one, other)]
    assert ranks[0].begin(FACTS) == ranks[1].begin(FACTS) == ranks[0].again()
    change(one["experts"])
    assert ranks[0].differs()
    assert ranks[0].again() != ranks[1].again()
    moving = live(other, experts_apart=True, experts_move=True)
    first = moving.begin(FACTS)
    change(other["experts"])
    assert not moving.differs()
    assert len({first, moving.again(), moving.again()}) == 3


def test_weights_that_cannot_be_read_are_equal_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start the files stand for them; afterwards each digest is new."""
    said: list[str] = []
    monkeypatch.setattr("pillion.live.logger.warning", lambda text, *parts: said.append(text % parts))
    rank = live(one := torch.nn.ModuleDict({"q_proj": Emptied()}))
    assert rank.begin(FACTS) is None
    assert not rank.differs()
    found = {rank.again(), rank.again()}
    assert len(found) == 2 and {len(digest) for digest in found} == {DIGEST_BYTES}
    assert len(said) == 1 and "q_proj" in said[0]
    assert one


def test_a_model_that_goes_away_is_equal_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next look notices that, too, once."""
    said: list[str] = []
    monkeypatch.setattr("pillion.live.logger.warning", lambda text, *parts: said.append(text % parts))
    one = model(1)
    rank = live(one)
    first = rank.begin(FACTS)
    del one
    gc.collect()
    assert rank.differs()
    assert rank.again() not in (first, rank.again())
    assert not rank.differs()
    assert "no longer exists" in said[0]


# --- the worker role ---


class Session:
    """Records the rank's digests of its weights, and is bound to a namespace of the test's choice."""

    def __init__(self) -> None:
        self.said: list[tuple[int, bytes | None]] = []
        self.namespace = ""
        self.namespace_line = "namespace 00 config=one"

    def set_weights(self, count: int, digest: bytes | None) -> None:
        """Records the present weights of the rank."""
        self.said.append((count, digest))

    def join(self, run: bytes) -> None:
        """Ignored."""

    def start(self, step: int, stream: int) -> None:
        """Ignored."""

    def done(self, step: int, wake: bool, stream: int) -> None:
        """Ignored."""

    def take_notices(self) -> list[str]:
        """No notices."""
        return []


class Rank:
    """One rank of an engine, its session and its clock played."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.steps = 0
        self.log: list[str] = []
        monkeypatch.setattr("time.monotonic", lambda: self.now)
        for level in ("info", "warning"):
            monkeypatch.setattr(module.logger, level, lambda text, *parts: self.log.append(text % parts))
        self.model = model(1)
        self.session = Session()
        config: Any = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2, rank=1))
        group = SimpleNamespace(layer_names=["layer"], kv_cache_spec=None)
        blocks: Any = SimpleNamespace(kv_cache_groups=[group])
        played: Any = self.session
        self.worker = Worker(engine_config(), config, blocks)
        (self.memory,) = self.worker._parts
        self.memory.session = played
        self.memory._live = live(self.model)
        self.first = self.memory._live.begin(FACTS)

    def step(self, weights: int | None = None, seconds: float = 0.01) -> None:
        """Plays a step of this length; `weights` is the scheduler's count of changes of the weights."""
        self.steps += 1
        metadata: Any = PillionMetadata(run=b"", step=self.steps)
        if weights is not None:
            metadata.weights = weights
        self.worker.begin_step(metadata)
        self.now += seconds
        self.worker.end_step()


def test_weights_are_sampled_when_the_scheduler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each count, changed or not."""
    rank = Rank(monkeypatch)
    rank.step()
    rank.step(0)
    assert rank.session.said == []
    rank.step(1)
    rank.step(1)
    assert rank.session.said == [(1, rank.first)]
    change(rank.model[0])
    rank.step(3)
    rank.step(3)
    (_, (count, digest)) = rank.session.said
    assert count == 3 and digest != rank.first and len(digest or b"") == DIGEST_BYTES


@pytest.mark.parametrize(("device", "pause"), [("cuda", module.LOOK_AFTER_S_GPU), (None, module.LOOK_AFTER_S_CPU)])
def test_a_pause_is_followed_by_a_look(monkeypatch: pytest.MonkeyPatch, device: str | None, pause: float) -> None:
    """It comes before the first step after the pause loads anything; consecutive steps, however long, are no pause."""
    rank = Rank(monkeypatch)
    monkeypatch.setattr(rank.memory, "stream", lambda: 0)
    rank.memory.device = torch.device(device) if device else None
    looks: list[int] = []
    take = Sampler.take

    def counted(sampler: Sampler, moment: int | None = None) -> Sample:
        looks.append(1)
        return take(sampler, moment)

    monkeypatch.setattr(Sampler, "take", counted)
    rank.step(0, seconds=10 * pause)
    rank.now += pause / 2
    rank.step(0)
    assert not looks
    rank.now += 2 * pause
    rank.step(0)
    assert len(looks) == 1 and rank.session.said == [] and not rank.log
    change(rank.model[0])
    rank.step(0)
    assert rank.session.said == []
    rank.now += 2 * pause
    rank.step(0)
    ((count, digest),) = rank.session.said
    assert count == 0 and digest != rank.first
    assert "reset it whenever you change weights" in rank.log[0]
    rank.now += 2 * pause
    rank.step(0)
    assert len(rank.session.said) == 1, "said once"


def test_the_namespace_is_named_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log names it again when it changes."""
    rank = Rank(monkeypatch)
    rank.step()
    assert not rank.log
    rank.session.namespace = "00"
    rank.step()
    rank.session.namespace = ""
    rank.step()
    rank.session.namespace = "00"
    rank.step()
    assert rank.log == ["pillion: rank 1 of 2, namespace 00 config=one"]
    rank.session.namespace, rank.session.namespace_line = "01", "namespace 01"
    rank.step()
    assert rank.log[1:] == ["pillion: rank 1 of 2, namespace 01"]


def test_metadata_of_the_connector_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata of a scheduler role without a count of changes fits, too."""
    rank = Rank(monkeypatch)
    rank.worker.begin_step(PillionMetadata(b"", 1))
    assert rank.session.said == []
