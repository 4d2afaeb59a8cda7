"""The changes that `pillion inject` makes, in manifests as kubectl reads them before and after: the sidecar and nothing
else."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

from manifests import ROOT, Document
from testkit.sidecar import find_binary

KUBECTL = ROOT / ".cache/tools/bin/kubectl"
OPTIONS = ["--dram=30GiB", "--image=registry.example/pillion:0.3.0"]
CONTAINERS = ["pillion-connector", "pillion"]
VOLUMES = ["pillion-socket", "pillion-pool", "pillion-connector"]
CONNECTOR = "/opt/pillion"
IN_SCRIPTS = re.compile(r" --kv-transfer-config\.\w+=[\w.]+")
JSON_OBJECT = re.compile(r"\{.*\}")


def inject(source: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    """The result of the program with a stream of manifests."""
    return subprocess.run([str(find_binary()), "inject", *options], input=source, capture_output=True, check=False)


def split(stream: bytes) -> list[bytes]:
    """The documents of a stream, with this machine's line ends."""
    text = stream.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    return re.split(rb"^(?=---(?:\s|$))", text, flags=re.MULTILINE)


def read(document: bytes) -> list[Document]:
    """The objects of a document as Kubernetes reads them: kubectl writes them again, with an annotation."""
    command = [str(KUBECTL), "annotate", "--local", "--filename=-", "--output=json", "odd=odd"]
    done = subprocess.run(command, input=document, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode() + document.decode()
    text, objects = done.stdout.decode().strip(), []
    while text:
        found, end = json.JSONDecoder().raw_decode(text)
        objects.append(found)
        text = text[end:].lstrip()
    return objects


def check_words(before: list[str], after: list[str]) -> None:
    """One more word, a text in scripts, or another value for another connector; no change where this connector is
    configured."""
    if before == after:
        assert any("PillionConnector" in word for word in before)
        return
    if len(after) == len(before) + 1:
        [place] = [number for number, word in enumerate(after) if word.startswith("--kv-transfer-config={")][:1]
        assert json.loads(after[place].partition("=")[2])["kv_connector_module_path"] == "pillion.connector"
        assert [*after[:place], *after[place + 1 :]] == before
        return
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        if old != new and IN_SCRIPTS.sub("", new) != old:
            [was], [now] = (JSON_OBJECT.findall(word) for word in (old, new))
            assert old.replace(was, "") == new.replace(now, "")
            settings = json.loads(now)
            connectors = settings.get("kv_connector_extra_config", {}).get("connectors", [settings])
            assert connectors[-1]["kv_connector"] == "PillionConnector"
            assert [json.loads(was)] == connectors[:-1] or settings["kv_connector"] == "PillionConnector"


def check_engine(before: Document, after: Document) -> None:
    """Two mounts, two variables and the connector, and nothing else."""
    mounts = [(mount["name"], mount["mountPath"], mount["readOnly"]) for mount in after["volumeMounts"][-2:]]
    assert mounts == [("pillion-socket", "/run/pillion", True), ("pillion-connector", CONNECTOR, True)]
    assert after["volumeMounts"][:-2] == (before.get("volumeMounts") or [])
    variables = [dict(variable) for variable in before.get("env") or []]
    names = {variable["name"]: variable for variable in variables}
    if "PYTHONHASHSEED" not in names:
        variables.append({"name": "PYTHONHASHSEED", "value": "0"})
    if "PYTHONPATH" in names:
        path = names["PYTHONPATH"]
        path["value"] = f"{CONNECTOR}:{path['value']}".removesuffix(":")
    else:
        variables.append({"name": "PYTHONPATH", "value": CONNECTOR})
    assert after["env"] == variables
    check_words(*([str(word) for key in ("command", "args") for word in found.get(key) or []] for found in (before, after)))
    rest = {"volumeMounts", "env", "command", "args"}
    assert {key: before[key] for key in before.keys() - rest} == {key: after[key] for key in after.keys() - rest}


def check_pod(before: Document, after: Document) -> None:
    """Two init containers, three volumes and one engine, and nothing else."""
    assert [container["name"] for container in after["initContainers"][:2]] == CONTAINERS
    assert after["initContainers"][2:] == (before.get("initContainers") or [])
    assert [volume["name"] for volume in after["volumes"][-3:]] == VOLUMES
    assert after["volumes"][:-3] == (before.get("volumes") or [])
    changed = [pair for pair in zip(before["containers"], after["containers"], strict=True) if pair[0] != pair[1]]
    assert len(changed) == 1
    check_engine(*changed[0])
    rest = {"initContainers", "volumes", "containers"}
    assert {key: before[key] for key in before.keys() - rest} == {key: after[key] for key in after.keys() - rest}


def pods(before: Any, after: Any) -> int:
    """The number of pods with a sidecar; all else of the two values is the same."""
    if before == after:
        return 0
    if isinstance(after, list):
        return sum(pods(old, new) for old, new in zip(before, after, strict=True))
    if isinstance(after.get("containers"), list):
        check_pod(before, after)
        return 1
    assert before.keys() == after.keys()
    return sum(pods(before[key], after[key]) for key in after)


def count_pods(before: Document, after: Document) -> int:
    """The pods of an object. One more annotation records them."""
    annotations = after["metadata"]["annotations"]
    record = annotations.pop("pillion/injected", None)
    found = pods(before, after)
    assert bool(record) == bool(found)
    return found


def check_stream(source: bytes, *options: str) -> tuple[int, subprocess.CompletedProcess[bytes]]:
    """The number of pods with a sidecar, and the run. A second run changes nothing, and a removal gives everything back."""
    done = inject(source, *OPTIONS, *options)
    found = 0
    for before, after in zip(split(source), split(done.stdout), strict=True):
        if before != after:
            found += sum(count_pods(*pair) for pair in zip(read(before), read(after), strict=True))
    again = inject(done.stdout, *OPTIONS, *options)
    assert (again.stdout, again.returncode) == (done.stdout, done.returncode)
    removed = inject(done.stdout, "--remove").stdout
    for before, after in zip(split(source), split(removed), strict=True):
        assert before == after or read(before) == read(after)
    return found, done
