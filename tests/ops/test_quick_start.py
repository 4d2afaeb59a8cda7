"""Every block of docs/quick-start.md as it is, with vLLM's CPU build and its HTTP server in an environment made for it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from manifests import ROOT

PAGE = ROOT / "docs/quick-start.md"
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The block after which a new engine has answered from the cache.
WARM = "ask warm"
WATCHDOG_S = 3_600
# Ports, sockets and processes of its own: the machine's do not disturb it, and none remains.
ALONE = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-eu", "-o", "pipefail")
PREPARED = "ip link set lo up\nmount -t tmpfs none /run\n"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has namespaces of its own")


def call(*command: object, **variables: str) -> None:
    """Run a command of the preparation."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, env=os.environ | variables
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `make dist`, or else one of this tree."""
    folder = ROOT / "dist"
    if not list(folder.glob("pillion-*.whl")):
        folder = tmp_path_factory.mktemp("wheel")
        tools = ROOT / ".cache/tools/bin"
        call(ROOT / "scripts/build-wheel", folder, PATH=f"{tools}:{os.environ['PATH']}")
    (found,) = folder.glob("pillion-*.whl")
    return found


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's CPU build without Pillion."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    call(ROOT / "scripts/setup", "python", PILLION_VENV=str(folder))
    assert not (folder / "bin/pillion").exists()
    # The command `vllm` reads the version of the package `vllm`, and the CPU build's package has another name.
    (build,) = folder.glob("lib/python3.*/site-packages/vllm_cpu-*.dist-info")
    version = build.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    named = build.with_name(f"vllm-{version}.dist-info")
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return folder


@pytest.fixture
def model(environment: Path, tmp_path: Path) -> Path:
    """A tiny model with a tokenizer."""
    folder = tmp_path / "model"
    for script in ("model.py", "tokenizer.py"):
        call(environment / "bin/python", ROOT / "tests/testkit" / script, folder)
    return folder


def last(name: str, output: str) -> float:
    """The last printed value of a metric."""
    return float(re.findall(rf"^{name}\S* (\S+)$", output, re.MULTILINE)[-1])


def answer(file: Path) -> str:
    """The text of a completion."""
    return str(json.loads(file.read_text())["choices"][0]["text"])


def test_every_block_runs_and_the_second_engine_answers_from_the_cache(
    wheel: Path, environment: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All blocks run in one shell, which ends at the first failure."""
    blocks = BLOCK.findall(PAGE.read_text())
    (warm,) = [number for number, block in enumerate(blocks) if WARM in block]
    times = tmp_path / "times"
    script = tmp_path / "quick-start.sh"
    script.write_text(PREPARED + "".join(f'{block}echo "$EPOCHREALTIME" >>{times}\n' for block in blocks))
    work = tmp_path / "work"
    work.mkdir()
    variables = {
        "PATH": f"{environment}/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(tmp_path),
        "WHEEL": str(wheel),
        "MODEL": str(model),
        "DRAM": "256MiB",
        # A small machine without a GPU or a network.
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    began = time.time()
    with (tmp_path / "output").open("w+") as output:
        done = subprocess.run(
            [*ALONE, script], stdout=output, stderr=output, cwd=work, env=variables, timeout=WATCHDOG_S, check=False
        )
        output.seek(0)
        said = output.read()
    ends = [float(end) for end in times.read_text().split()] if times.exists() else []
    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(work.glob("*.log")))
    assert done.returncode == 0 and len(ends) == len(blocks), f"block {len(ends)} failed:\n{said}\n{logs}"
    assert last("pillion_saved_bytes_total", said) > 0
    assert last("pillion_loaded_bytes_total", said) > 0
    assert last("vllm:external_prefix_cache_hits_total", said) > 0
    assert answer(work / "warm.json") == answer(work / "cold.json") != ""
    assert re.search(r"^first token: \d+ ms computed, \d+ ms from the cache .*\nanswers: equal$", said, re.MULTILINE)
    took = " ".join(f"{end - begin:.0f}" for begin, end in zip([began, *ends], ends, strict=False))
    with capsys.disabled():
        print(f"\nfrom the wheel to the first warm hit: {(ends[warm] - began) / 60:.1f} minutes; seconds of each block: {took}")
