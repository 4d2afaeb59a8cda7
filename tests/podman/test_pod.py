"""vLLM and the sidecar in two containers of one pod, under load: no event of the sidecar's container costs a request."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from containers import ROOT, USER, Podman, Sidecar, debian, in_debian
from testkit import engine, model, prompts
from testkit.waiting import wait_for

PROMPTS = [prompts.prompt(tokens, seed=900 + tokens) for tokens in (70, 200, 450, 700)]
OUTPUT_TOKENS = 8
HIT = sum(prompts.hit_tokens(len(tokens)) for tokens in PROMPTS)
SERVE = ("--dram=64MiB", "--pool-path=/pool/pool")
PREVIOUS = ROOT / ".cache/previous-release/pillion"


@pytest.fixture
def pool() -> Iterator[Path]:
    """A folder in memory for the pool file, as a volume of medium Memory is."""
    folder = Path("/dev/shm") / f"pillion-test-{uuid.uuid4()}"
    folder.mkdir()
    os.chown(folder, USER, USER)
    yield folder
    shutil.rmtree(folder)


class Load:
    """All prompts again and again, while the engine's own cache is emptied."""

    def __init__(self, served: engine.Engine) -> None:
        self._engine = served
        # No block is kept yet, so these are computed.
        self._right = [answer["tokens"] for answer in self._answers()]
        assert served.metrics()["external_hits"] == 0

    def _answers(self) -> list[dict[str, list[int]]]:
        return [self._engine.generate([tokens], max_tokens=OUTPUT_TOKENS)[0] for tokens in PROMPTS]

    def once(self) -> int:
        """Asks all prompts; the tokens from the sidecar. Each answer must be right."""
        assert self._engine.reset_prefix_cache()
        before = self._engine.metrics()["external_hits"]
        assert [answer["tokens"] for answer in self._answers()] == self._right
        return self._engine.metrics()["external_hits"] - before

    def during(self, what: Callable[[], object]) -> None:
        """Asks all prompts until `what` has returned."""
        with ThreadPoolExecutor() as threads:
            happening = threads.submit(what)
            while not happening.done():
                self.once()
            happening.result()

    def until_all_hit(self) -> None:
        """Asks until all prompts hit: the engine joins a restarted sidecar soon, and its later blocks are kept.

        A sidecar that did not adopt the pool file keeps nothing for 5 s: an engine may still copy from it.
        """
        wait_for(lambda: self.once() == HIT, "a pass with all hits")


def test_the_sidecars_container_is_killed_stopped_replaced_and_back(podman: Podman, pool: Path, tmp_path: Path) -> None:
    """No request fails, every token is right, and hits come back. Beside the release before the engine computes."""
    subprocess.run([ROOT / "scripts/build-release", "previous"], check=True)
    pod = podman("pod", "create", "--share=net,ipc", "--network=host", "--shm-size=128m").splitlines()[-1]
    options = (f"--pod={pod}", f"--volume={pool}:/pool")
    before = (f"--volume={PREVIOUS}:/pillion", f"--user={USER}:{USER}", "--rootfs", debian(), "/pillion")
    sidecars: list[Sidecar] = []

    def replace(start: tuple[object, ...] = ()) -> None:
        """Replaces the running container by one of another release."""
        if sidecars:
            assert sidecars[-1].stop() == 0
            sidecars[-1].remove()
        sidecars.append(Sidecar(podman, tmp_path, *options, start=start, more=SERVE))
        sidecars[-1].wait_ready()

    def killed() -> None:
        sidecars[-1].kill()
        sidecars[-1].start()

    def stopped() -> None:
        assert sidecars[-1].stop() == 0
        sidecars[-1].start()

    try:
        replace()
        tiny = model.write(tmp_path / "model", model.TINY)
        inside = in_debian(podman, f"--pod={pod}", f"--volume={tmp_path}:{tmp_path}")
        asked = engine.Options(tiny, sidecars[-1].socket, batched_tokens=prompts.STEP_TOKENS, prefix=inside)
        with engine.running(asked, tmp_path / "engine.log") as served:
            load = Load(served)
            load.until_all_hit()
            for what in (killed, stopped):
                load.during(what)
                load.until_all_hit()
            load.during(lambda: replace(before))
            assert load.once() == 0, "a release before this one has no protocol in common with it"
            load.during(replace)
            load.until_all_hit()
    finally:
        podman("pod", "rm", "--force", "--time=0", pod)
