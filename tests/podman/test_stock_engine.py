"""`pillion inject` on the manifest of an engine without Pillion: podman plays the pod, and a restarted engine hits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from containers import ROOT, Podman, debian
from testkit import model, tokenizer
from testkit.sidecar import find_binary
from testkit.waiting import wait_for

IMAGE = "localhost/stock-vllm:1"
SIDECAR = "localhost/pillion:0.3.0"
# Debian's Python looks for packages here, without a PYTHONPATH.
PACKAGES = "/usr/local/lib/python3.11/dist-packages"
PROMPT_WORDS = 400
START_WATCHDOG_S = 600
MANIFEST = """\
apiVersion: v1
kind: Pod
metadata:
  name: stock
spec:
  containers:
  - name: engine
    image: IMAGE
    command: [vllm, serve, /model]
    args: [--dtype=float32, --enforce-eager, --max-model-len=4096, --max-num-seqs=4]
    env:
    - {name: HF_HUB_OFFLINE, value: "1"}
    - {name: VLLM_NO_USAGE_STATS, value: "1"}
    - {name: VLLM_CPU_KVCACHE_SPACE, value: "1"}
    - {name: VLLM_CPU_OMP_THREADS_BIND, value: nobind}
    - {name: OMP_NUM_THREADS, value: "1"}
    volumeMounts:
    - {name: packages, mountPath: PACKAGES}
    - {name: model, mountPath: /model, readOnly: true}
    - {name: shm, mountPath: /dev/shm}
  volumes:
  - name: packages
    hostPath: {path: FOLDER/packages}
  - name: model
    hostPath: {path: FOLDER/model}
  - name: shm
    emptyDir: {medium: Memory}
"""
VLLM = '#!/usr/bin/python3\nfrom vllm.entrypoints.cli.main import main\n\nif __name__ == "__main__":\n    main()\n'
# Within the pod: its network is its own.
ASK = """
import json, sys, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() or None
request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=300).read().decode())
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, as volumes of medium Memory are."""
    made = Path("/dev/shm") / f"pillion-test-{uuid.uuid4()}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def prepare_packages(into: Path) -> None:
    """This environment's packages without Pillion: links to their files, and a record of vLLM's release."""
    libraries = Path(sysconfig.get_path("purelib"))
    shutil.copytree(libraries, into, copy_function=os.link, symlinks=True, ignore=shutil.ignore_patterns("pillion*"))
    (build,) = into.glob("vllm_cpu-*.dist-info")
    version = build.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    named = build.with_name(f"vllm-{version}.dist-info")
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def import_image(podman: Podman, scratch: Path) -> None:
    """An image of a Debian with Python and the command `vllm`."""
    command = scratch / "usr/local/bin/vllm"
    command.parent.mkdir(parents=True)
    command.write_text(VLLM)
    command.chmod(0o755)
    archive = scratch / "image.tar"
    subprocess.run(["tar", "-cf", archive, "-C", debian(), ".", "-C", scratch, "./usr/local/bin/vllm"], check=True)
    podman("import", "--change=ENV PATH=/usr/local/bin:/usr/bin:/bin", archive, IMAGE)
    archive.unlink()


def as_podman_plays(text: str, folder: Path) -> dict[str, Any]:
    """The manifest in podman's forms: podman has no native sidecars and no kubelet's emptyDirs.

    It limits annotations, starts probes by timers of systemd, and publishes ports.
    """
    pod: dict[str, Any] = yaml.safe_load(text)
    del pod["metadata"]["annotations"]
    spec = pod["spec"]
    # Podman 4.3 restarts init containers, too.
    spec["restartPolicy"] = "Never"
    [connector, sidecar] = spec["initContainers"]
    assert sidecar.pop("restartPolicy") == "Always"
    spec["initContainers"], spec["containers"] = [connector], [sidecar, *spec["containers"]]
    for key in ("livenessProbe", "readinessProbe", "ports"):
        del sidecar[key]
    for volume in spec["volumes"]:
        if volume.pop("emptyDir", None) is not None:
            place = folder / volume["name"]
            place.mkdir()
            place.chmod(0o777)
            volume["hostPath"] = {"path": str(place)}
    return pod


class Pod:
    """The played pod."""

    def __init__(self, podman: Podman, manifest: Path) -> None:
        self._podman = podman
        podman("kube", "play", "--network=none", manifest)

    def fetch(self, address: str, body: object = None) -> str:
        """The answer of a server in the pod."""
        sent = "" if body is None else json.dumps(body)
        return self._podman("exec", "stock-engine", "python3", "-c", ASK, f"http://127.0.0.1:{address}", sent)

    def wait_ready(self) -> None:
        """Waits until the engine answers."""

        def answers() -> bool:
            state = self._podman.inspect("stock-engine", "Status")
            assert state == "running", self._podman("logs", "stock-engine")[-4000:]
            try:
                self.fetch("8000/health")
            except AssertionError:
                return False
            return True

        wait_for(answers, "engine of a pod", START_WATCHDOG_S)

    def ask(self) -> list[int]:
        """The tokens of an answer to a prompt."""
        body = {
            "model": "/model",
            "prompt": " ".join(map(str, range(PROMPT_WORDS))),
            "max_tokens": 8,
            "temperature": 0,
            "return_token_ids": True,
        }
        return list(json.loads(self.fetch("8000/v1/completions", body))["choices"][0]["token_ids"])

    def count(self, address: str, name: str) -> float:
        """The value of a metric."""
        lines = [line for line in self.fetch(address).splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def restart_engine(self) -> None:
        """Restarts the engine's container alone."""
        self._podman("restart", "--time=30", "stock-engine")
        self.wait_ready()

    def remove(self) -> None:
        """Removes the pod in any state."""
        self._podman("pod", "rm", "--force", "--time=0", "stock")


def test_an_engine_that_never_heard_of_pillion_hits_after_its_restart(podman: Podman, folder: Path, tmp_path: Path) -> None:
    """The init container brings the connector; the prompt of before is not computed again, and its tokens are the same."""
    # Links need the file system of the environment.
    scratch = ROOT / ".cache" / f"stock-{uuid.uuid4()}"
    try:
        prepare_packages(scratch / "packages")
        model.write(scratch / "model", model.TINY)
        tokenizer.write(scratch / "model")
        import_image(podman, tmp_path)
        text = MANIFEST.replace("IMAGE", IMAGE).replace("PACKAGES", PACKAGES).replace("FOLDER", str(scratch))
        assert "illion" not in text
        options = ["--dram=128MiB", f"--image={SIDECAR}", "--cpu=1"]
        done = subprocess.run([str(find_binary()), "inject", *options], input=text, capture_output=True, text=True, check=True)
        manifest = tmp_path / "stock.yaml"
        manifest.write_text(yaml.safe_dump(as_podman_plays(done.stdout, folder)))
        pod = Pod(podman, manifest)
        try:
            pod.wait_ready()
            assert not list((scratch / "packages").glob("pillion*"))
            first = pod.ask()
            wait_for(lambda: pod.count("9440/metrics", "pillion_saved_bytes_total") > 0, "saved blocks")
            pod.restart_engine()
            assert pod.count("8000/metrics", "vllm:external_prefix_cache_hits_total") == 0
            assert pod.ask() == first
            assert pod.count("8000/metrics", "vllm:external_prefix_cache_hits_total") > 0
        finally:
            pod.remove()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
