"""Two pods, each an engine and a sidecar on a host of its own: one pod loads the blocks that the other computed.

During faults between them every request is answered with the same tokens, after a bounded time; then the mesh heals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import network
import proxy
from pods import BLOCK_PORT, CONTROL_PORT, OUTPUT_TOKENS, Pod, start_engine, start_pod, start_sidecar
from testkit import answers, engine, handover, pool_file, prompts, weights
from testkit.transfer import TO_ANSWER, TO_COMPUTE

# Hosts have fixed names and addresses: one test at a time has any.
pytestmark = pytest.mark.xdist_group("hosts")

PROMPT_TOKENS = 700
HIT = prompts.hit_tokens(PROMPT_TOKENS)
# Prompts asked one after the other, until the peer gives the blocks of one again.
TRIES_MAX, TRY_EVERY_S = 20, 3.0
# A evicts nothing: of 10,900 blocks all tests together need 6,000, 22 for each prompt, most of them for eight times TRIES_MAX.
DRAM = "512MiB"
# The wait of a query for blocks on their way from a peer.
QUERY_WAIT_S = 2.0
# The time from a request to its fetch.
FETCH_BEGINS_S = 0.5
# A sidecar shows the mesh's figures ten times a second.
SHOWN_S = 0.3
REQUEST_WATCHDOG_S = 60
PROXY_SEED = 1
# The longest wait that can be set: another process may take so long to start its prompt.
MISS_WAIT_MS = 2000
# B's wait for a prompt without a promise. A takes longer for its requests before.
PROMISE_WAIT_MS = 50
BEFORE = 20
# After so many waits without effect, requests wait no more.
IN_VAIN = 3
# One of so many prompts is to be computed as soon, or as late, as a test needs.
PLAYS_MAX = 4
WAITS, EXHAUSTED = "pillion_mesh_miss_waits_total", "pillion_mesh_miss_waits_exhausted_total"
BREAKERS = "pillion_mesh_miss_wait_breakers_open"

Fault = Callable[["Mesh"], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass
class Mesh:
    """Two pods that find each other by etcd; `a` computes prompts, `b` asks for them later.

    `patient` is b's sidecar with another engine, whose requests wait for a producer; `other` with an engine of other weights
    under the same name.
    """

    directory: Path
    etcd: network.Etcd
    a: Pod
    b: Pod
    patient: Pod
    other: Pod
    seed: int = 7_000

    def new(self, count: int) -> list[list[int]]:
        """Prompts without KV in any engine."""
        self.seed += count
        return [prompts.prompt(PROMPT_TOKENS, seed=self.seed - number) for number in range(count)]

    def computed(self, count: int) -> list[list[int]]:
        """New prompts, computed by A and known to B."""
        made = self.new(count)
        kept = self.a.sidecar.metrics()["pillion_blocks"]
        for tokens in made:
            self.a.ask(tokens)
        self.a.sidecar.wait_metric("pillion_blocks", kept + count * HIT // engine.BLOCK_TOKENS)
        self.wait_told()
        return made

    def exhausted(self) -> int:
        """The number of B's requests that waited without effect."""
        return self.b.sidecar.metrics()[EXHAUSTED]

    @contextlib.contextmanager
    def promised(self, tokens: list[int]) -> Iterator[bool]:
        """A is to compute the prompt after others. Yields whether B knows of the promise while A has not answered. Ends when A
        has answered all, and promises nothing."""
        for number, other in enumerate(self.new(BEFORE)):
            self.a.engine.ask(number, other, 1)
        self.a.engine.ask(BEFORE, tokens, 1, transfer=TO_COMPUTE)
        answered: list[int] = []

        def promises() -> int:
            return self.b.sidecar.metrics()["pillion_mesh_peer_promises"]

        def known_or_answered() -> bool:
            is_known = promises() > 0
            answered.extend(answer["answered"] for answer in self.a.engine.answered(0))
            return is_known or BEFORE in answered

        self.b.sidecar.wait_for(known_or_answered, "promise of A")
        yield BEFORE not in answered
        while len(answered) <= BEFORE:
            answered.extend(answer["answered"] for answer in self.a.engine.answered(REQUEST_WATCHDOG_S))
        # B's metrics may not show the promise yet.
        time.sleep(SHOWN_S)
        self.b.sidecar.wait_for(lambda: promises() == 0, "end of A's promise")

    def wait_told(self) -> None:
        """Waits until B knows of every block that A keeps."""
        kept = self.a.sidecar.metrics()["pillion_blocks"]
        self.b.sidecar.wait_metric("pillion_mesh_peer_keys", kept)

    def healed(self, waiting: list[list[int]]) -> tuple[float, int]:
        """Seconds until B hits a prompt of A again, and the number of prompts until then."""
        began = time.monotonic()
        for asked, tokens in enumerate(waiting, 1):
            before, now = self.b.hits(), time.monotonic()
            self.b.ask(tokens)
            if self.b.hits() - before == HIT:
                return now - began, asked
            time.sleep(TRY_EVERY_S)
        raise self.a.sidecar.failed(f"no hit in {len(waiting)} prompts: the mesh does not heal{self.b.sidecar.evidence()}")


@pytest.fixture(scope="module")
def mesh(options: engine.Options, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Both pods, ready, and members."""
    directory = tmp_path_factory.mktemp("mesh")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(network.hosts("a", "b"))
        etcd = network.Etcd(directory)
        stack.callback(etcd.kill)
        named = dataclasses.replace(options, extra={"pillion.model_id": "tiny"})
        impatient = dataclasses.replace(named, extra=named.extra | {"pillion.promise_wait_ms": PROMISE_WAIT_MS})
        a, b = (
            start_pod(stack, options, host, directory / host.name, dram=DRAM)
            for options, host in zip((named, impatient), hosts, strict=True)
        )
        patience = dataclasses.replace(b.engine.options, extra=named.extra | {"pillion.miss_wait_ms": MISS_WAIT_MS})
        patient = dataclasses.replace(b, engine=start_engine(stack, patience, b.directory / "patient.log"))
        changed = weights.changed(options.model, directory / "model", weights.one_tensor)
        otherwise = dataclasses.replace(b.engine.options, model=changed)
        other = dataclasses.replace(b, engine=start_engine(stack, otherwise, b.directory / "other.log"))
        for pod in (a, b, patient, other):
            pod.engine.wait_started()
            pod.sidecar.wait_metric("pillion_mesh_peers", 1)
            pod.engine.wait_served()
        yield Mesh(directory, etcd, a, b, patient, other)


@pytest.mark.supports("mesh")
def test_another_pods_prompt(mesh: Mesh, plain: engine.Engine) -> None:
    """Same tokens as vLLM alone, same logprobs as A's own cache; damaged bytes change the answer."""
    [tokens] = mesh.computed(1)
    local = mesh.a.ask(tokens)
    right = plain.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]
    before = mesh.b.hits()
    answer = mesh.b.ask(tokens)
    assert mesh.b.hits() - before == HIT
    assert answer["tokens"] == right["tokens"] == local["tokens"]
    assert answer["logprobs"] == local["logprobs"]
    blocks = HIT // engine.BLOCK_TOKENS
    mesh.b.sidecar.wait_metric("pillion_mesh_fetched_blocks_total", blocks)
    metrics = mesh.b.sidecar.metrics()
    assert metrics["pillion_mesh_fetched_blocks_total"] == blocks
    assert metrics["pillion_mesh_faults_total"] == 0
    mesh.a.sidecar.wait_metric("pillion_mesh_served_blocks_total", blocks)
    # The negative control: one wrong K value in every fetched block.
    assert mesh.b.engine.reset_prefix_cache()
    with pool_file.damaged(mesh.b.sidecar.pool) as damaged:
        assert damaged >= blocks
        assert mesh.b.ask(tokens)["logprobs"] != local["logprobs"]


def test_another_pods_prompt_with_other_weights(mesh: Mesh, tmp_path: Path) -> None:
    """One tensor differs in a model of the same name: that engine fetches nothing; the pod's own engine loads every block."""
    [tokens] = mesh.computed(1)
    changed = dataclasses.replace(mesh.other.engine.options, socket=None, prefix=())
    with engine.running(changed, tmp_path / "plain.log") as alone:
        right = alone.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]["tokens"]
        alone.exit()
    fetched = mesh.b.sidecar.metrics()["pillion_mesh_fetched_blocks_total"]
    assert mesh.other.ask(tokens)["tokens"] == right
    assert mesh.other.hits() == 0
    assert mesh.b.sidecar.metrics()["pillion_mesh_fetched_blocks_total"] == fetched
    before = mesh.b.hits()
    assert mesh.b.ask(tokens)["tokens"] == mesh.a.ask(tokens)["tokens"] != right
    assert mesh.b.hits() - before == HIT


def test_a_prompt_that_nobody_has(mesh: Mesh) -> None:
    """It is computed, and no peer is asked for it."""

    def asks() -> int:
        shown = [-1]

        def stands_still() -> bool:
            shown.append(mesh.a.sidecar.metrics()["pillion_mesh_asks_total"])
            return shown[-1] == shown[-2]

        mesh.a.sidecar.wait_for(stands_still, "end of what was asked before", poll_s=SHOWN_S)
        return shown[-1]

    asked, before = asks(), mesh.b.hits()
    mesh.b.ask(prompts.prompt(PROMPT_TOKENS, seed=6_999))
    assert mesh.b.hits() == before
    assert asks() == asked


def test_a_request_waits_for_the_pod_that_computes_its_prompt(mesh: Mesh, plain: engine.Engine) -> None:
    """B is asked before A computes the prompt, and loads every block. If A was too slow for that, the sidecar counts it."""
    # An engine's first prompt takes seconds.
    for given in mesh.computed(PLAYS_MAX):
        [tokens] = mesh.new(1)
        right = plain.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]
        metrics, before = mesh.b.sidecar.metrics(), mesh.patient.hits()
        mesh.patient.engine.ask(0, tokens, OUTPUT_TOKENS)
        mesh.b.sidecar.wait_metric(WAITS, metrics[WAITS] + 1)
        mesh.a.ask(tokens)
        [answer] = mesh.patient.engine.answered(REQUEST_WATCHDOG_S)
        assert answers.alike(answer, right)
        if mesh.patient.hits() - before == HIT:
            assert mesh.b.sidecar.metrics()[EXHAUSTED] == metrics[EXHAUSTED]
            return
        mesh.b.sidecar.wait_for(lambda: mesh.exhausted() == metrics[EXHAUSTED] + 1, "count of a wait in vain")  # noqa: B023
        # After a block from a peer the next request waits, also after waits without effect.
        mesh.patient.ask(given)
    raise mesh.b.sidecar.failed(f"none of {PLAYS_MAX} prompts was loaded wholly")


def test_who_waits_in_vain_stops_waiting(mesh: Mesh, plain: engine.Engine) -> None:
    """Requests wait again once a peer has given a block. Every prompt is answered with the right tokens."""
    given, *asked = mesh.computed(1) + mesh.new(IN_VAIN + 2)
    right = [answer["tokens"] for answer in plain.generate(asked, max_tokens=OUTPUT_TOKENS)]
    vain, unawaited, awaited = asked[:IN_VAIN], asked[IN_VAIN], asked[IN_VAIN + 1]
    begin = mesh.b.sidecar.metrics()

    def since_begin() -> tuple[int, int, int]:
        metrics = mesh.b.sidecar.metrics()
        return metrics[WAITS] - begin[WAITS], metrics[EXHAUSTED] - begin[EXHAUSTED], metrics[BREAKERS]

    def wait_counted(*counts: int) -> None:
        mesh.b.sidecar.wait_for(lambda: since_begin() == counts, f"waits, exhausted, breakers {counts}")

    answers = mesh.patient.engine.generate(vain, max_tokens=OUTPUT_TOKENS)
    wait_counted(IN_VAIN, IN_VAIN, 1)
    log = mesh.b.sidecar.log.read_text()
    assert "(pillion.miss_wait_ms)" in log and f"after {IN_VAIN} such waits in a row" in log
    answers.append(mesh.patient.ask(unawaited))
    before = mesh.patient.hits()
    mesh.patient.ask(given)
    assert mesh.patient.hits() - before == HIT
    wait_counted(IN_VAIN, IN_VAIN, 0)
    answers.append(mesh.patient.ask(awaited))
    wait_counted(IN_VAIN + 1, IN_VAIN + 1, 0)
    assert [answer["tokens"] for answer in answers] == right


def test_a_request_waits_for_its_turn_at_the_pod_that_has_promised_it(mesh: Mesh, plain: engine.Engine) -> None:
    """A begins to compute the prompt later than B waits without a promise. B is asked once it knows of the promise: on a busy
    machine A's engine may otherwise see the request too late. After its end the prompt is not promised any more."""
    for tokens in mesh.new(PLAYS_MAX):
        right = plain.generate([tokens], max_tokens=OUTPUT_TOKENS)[0]
        hits, exhausted = mesh.b.hits(), mesh.b.sidecar.metrics()[handover.EXHAUSTED]
        with mesh.promised(tokens) as is_known:
            if not is_known:
                continue
            mesh.b.engine.ask(0, tokens, OUTPUT_TOKENS, transfer=TO_ANSWER)
            [answer] = mesh.b.engine.answered(REQUEST_WATCHDOG_S)
        assert answer["tokens"] == right["tokens"]
        assert mesh.b.hits() - hits == len(tokens) - 1
        assert mesh.b.sidecar.metrics()[handover.EXHAUSTED] == exhausted
        return
    raise mesh.b.sidecar.failed(f"A answered {PLAYS_MAX} prompts before B knew of a promise")


@contextlib.contextmanager
def owner_killed(mesh: Mesh) -> Iterator[None]:
    """A is frozen, so B's fetch is under way when A is killed. A's next sidecar has its pool, and keeps the blocks with a
    checksum."""
    dying = mesh.a.sidecar
    dying.wait_summed()
    dying.freeze()
    death = threading.Timer(FETCH_BEGINS_S, dying.kill)
    death.start()
    yield
    death.join()
    mesh.a.sidecar = start_sidecar(mesh.a.host, mesh.a.directory, dying.pool, dram=DRAM)
    # Its engine saves again.
    mesh.a.sidecar.wait_metric("pillion_sessions", 2)
    mesh.a.engine.wait_served()


@contextlib.contextmanager
def link_down(mesh: Mesh) -> Iterator[None]:
    """A's only link is down, for a shorter time than its etcd lease."""
    with mesh.a.host.unplugged():
        yield


@contextlib.contextmanager
def pods_apart(mesh: Mesh) -> Iterator[None]:
    """Both reach etcd, and neither gets an answer from the other."""
    with mesh.a.host.deaf_to(mesh.b.host.address):
        yield


@contextlib.contextmanager
def fenced(mesh: Mesh) -> Iterator[None]:
    """A is cut off from etcd until its lease ends: it is no member any more, though B would reach it."""
    with mesh.a.host.deaf_to(network.BRIDGE_ADDRESS):
        mesh.b.sidecar.wait_for(lambda: mesh.b.sidecar.metrics()["pillion_mesh_peers"] == 0, "fencing")
        yield


@contextlib.contextmanager
def bad_network(mesh: Mesh, fault: proxy.Fault) -> Iterator[None]:
    """Disturbs B's connections to A, for announcements and for blocks. B gets announcements through it first."""
    a, b = mesh.a.host, mesh.b.host
    between = proxy.Proxy(network.BRIDGE_ADDRESS, a.address, (CONTROL_PORT, BLOCK_PORT), fault, PROXY_SEED)
    with between, b.diverted(a.address, between.ports):
        mesh.computed(1)
        yield
        assert between.disturbances[BLOCK_PORT] > 0, "no block was on the way"


# Hits that B may have during the fault.
NOTHING, ANYTHING, ALL = range(1), range(HIT + 1), range(HIT, HIT + 1)
FAULTS: dict[str, tuple[Fault, range]] = {
    "owner_killed": (owner_killed, NOTHING),
    "link_down": (link_down, NOTHING),
    "pods_apart": (pods_apart, NOTHING),
    "fenced": (fenced, NOTHING),
    "delay": (functools.partial(bad_network, fault=proxy.delay), ALL),
    "loss": (functools.partial(bad_network, fault=proxy.loss), ANYTHING),
    "cut": (functools.partial(bad_network, fault=proxy.cut), ANYTHING),
    "slow": (functools.partial(bad_network, fault=proxy.slow), ANYTHING),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_a_bounded_time_and_heals(mesh: Mesh, plain: engine.Engine, name: str) -> None:
    """The prompt during the fault is answered with the right tokens; later ones are fetched again."""
    fault, expected = FAULTS[name]
    [met, *later] = mesh.computed(1 + TRIES_MAX)
    right = plain.generate([met], max_tokens=OUTPUT_TOKENS)[0]
    with fault(mesh):
        began, before = time.monotonic(), mesh.b.hits()
        answer = mesh.b.ask(met)
        took, given = time.monotonic() - began, mesh.b.hits() - before
    # After a hit of a part of the prompt, steps have other lengths than those of `plain`.
    assert answers.alike(answer, right)
    was_late = expected == ALL and took >= QUERY_WAIT_S
    assert given in (ANYTHING if was_late else expected), "B's hit during the fault has an unexpected length"
    heal_s, asked = mesh.healed(later)
    wrong = mesh.b.sidecar.sample('pillion_mesh_faults_total{kind="corrupt"}')
    wrong += mesh.b.sidecar.metrics()["pillion_load_failures_total"]
    line = {"fault": name, "request_s": round(took, 2), "given": given, "heal_s": round(heal_s, 1), "asked": asked}
    print(json.dumps({**line, "wrong": wrong}))
    assert wrong == 0
    assert took < REQUEST_WATCHDOG_S


def test_etcd_away(mesh: Mesh) -> None:
    """The members go on without etcd; once it is back, the membership does, too."""
    tokens, later = mesh.computed(2)
    mesh.etcd.kill()
    before = mesh.b.hits()
    mesh.b.ask(tokens)
    assert mesh.b.hits() - before == HIT
    mesh.etcd.start()
    mesh.b.ask(later)
    assert mesh.b.hits() - before == 2 * HIT
    assert mesh.b.sidecar.metrics()["pillion_mesh_peers"] == 1
