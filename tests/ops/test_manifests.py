"""deploy/ and the manifests of `pillion inject`: every field exists, and the sidecar starts with these arguments."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from manifests import (
    BUILT_IN_GROUPS,
    DEPLOY,
    INJECTED,
    KUBERNETES,
    MONITORING,
    ROOT,
    VERSIONS,
    Document,
    at,
    built_in,
    documents,
    mappings,
    of,
    operators,
    pod,
    pods_of,
    sidecar,
)
from testkit import ports
from testkit.sidecar import Sidecar, find_binary

# Mappings with keys of the user's choice.
FREE = {"labels", "annotations", "matchLabels", "limits", "requests", "data", "nodeSelector"}
BUILT_IN = [pytest.param(path, version, id=f"{path.stem}-{version}") for path in KUBERNETES + INJECTED for version in VERSIONS]
# The time in which a Service may still send requests to an ending pod.
ENDPOINTS_GO_S = 5
# The longest end after SIGTERM of `pillion route`, and of a sidecar with disks.
ROUTER_ENDS_S, SIDECAR_ENDS_S = 20, 25
# The options of `pillion inject` for each manifest.
OPTIONS = {
    "copy-engine": [],
    "gpu-in-both": ["--copy=sidecar"],
    "gpu-in-both-dra": ["--copy=sidecar"],
    "prefill-decode": ["--copy=sidecar", "--container=vllm"],
    "mesh": ["--peer=vllm-mesh:9441", "--mesh-secret=pillion-mesh"],
}


def misspellings(document: Document) -> list[Document]:
    """The document with an unknown field, in each of its mappings in turn."""
    wrong = []
    for path in mappings(document):
        of_user = FREE & set(path) or (path == ("spec", "selector") and document["kind"] == "Service")
        if of_user or path[:1] == ("metadata",):
            continue
        changed = copy.deepcopy(document)
        at(changed, path)["misspelt"] = "value"
        wrong.append(changed)
    return wrong


@pytest.mark.parametrize(("path", "version"), BUILT_IN)
def test_every_field_exists(path: Path, version: str) -> None:
    """Three releases of Kubernetes know each field; in an operator's kind, those of its descriptions of pods."""
    for document in of(path):
        for found in [document] if document["apiVersion"] in BUILT_IN_GROUPS else list(pods_of(document)):
            built_in(version)(found)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_a_misspelt_field_fails_in_every_mapping(path: Path) -> None:
    """The check fails in every mapping."""
    for document in of(path):
        wrong = misspellings(document)
        assert len(wrong) >= 3
        for changed in wrong:
            with pytest.raises(Exception, match="misspelt"):
                built_in(VERSIONS[-1])(changed)


@pytest.mark.parametrize("path", MONITORING, ids=lambda path: path.stem)
def test_monitoring_is_what_the_operator_takes(path: Path) -> None:
    """The operator's own schema accepts the files; a misspelt field fails in every mapping."""
    for document in of(path):
        operators(document)
        for changed in misspellings(document):
            with pytest.raises(Exception, match="misspelt"):
                operators(changed)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_clients_have_a_service(path: Path) -> None:
    """A Service has the port for clients, by its name in the pod; of several replicas one ends at a time."""
    kinds = {(document["kind"], document["metadata"]["name"]): document["spec"] for document in of(path)}
    workload = next(document for document in of(path) if pod(document))
    service = kinds["Service", "vllm-server"]
    assert service["selector"] == workload["spec"]["template"]["metadata"]["labels"]
    numbers = {port["name"]: port["containerPort"] for found in pod(workload)["containers"] for port in found["ports"]}
    [port] = service["ports"]
    assert port["port"] == numbers[port["targetPort"]] == (8080 if path.stem == "prefill-decode" else 8000)
    if workload["spec"]["replicas"] > 1:
        budget = kinds["PodDisruptionBudget", "vllm"]
        assert budget["maxUnavailable"] == 1 and budget["selector"] == workload["spec"]["selector"]


def test_the_documented_certificate_is_that_of_the_manifest() -> None:
    """The block of docs/several-nodes.md has the manifest's Secret, and the name required of peers."""
    text = (ROOT / "docs/several-nodes.md").read_text().partition("```yaml\n")[2].partition("```")[0]
    certificate = yaml.safe_load(text)["spec"]
    mesh = of(DEPLOY / "kubernetes/mesh.yaml")[0]
    [secret] = [volume["secret"]["secretName"] for volume in pod(mesh)["volumes"] if "secret" in volume]
    assert certificate["secretName"] == secret
    assert f"--mesh-cert-name={certificate['dnsNames'][0]}" in sidecar(mesh)["args"]


def scraped(document: Document) -> list[tuple[str, str]]:
    """The containers and ports of a workload's pod that PodMonitors find, once for each PodMonitor."""
    labels = document["spec"]["template"]["metadata"]["labels"].items()
    monitors = [found["spec"] for path in MONITORING for found in of(path) if found["kind"] == "PodMonitor"]
    selected = [monitor for monitor in monitors if monitor["selector"].get("matchLabels", {}).items() <= labels]
    names = [endpoint["port"] for monitor in selected for endpoint in monitor["podMetricsEndpoints"]]
    containers = [sidecar(document), *pod(document)["containers"]]
    ports = [(container["name"], port["name"]) for container in containers for port in container["ports"]]
    return sorted(found for found in ports for _ in range(names.count(found[1])))


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_every_page_of_metrics_is_scraped_once(path: Path) -> None:
    """The sidecar, each engine and the router have one such port; the mesh's port is not scraped."""
    document = next(document for document in of(path) if pod(document))
    names = ["pillion", *(container["name"] for container in pod(document)["containers"])]
    assert [name for name, _ in scraped(document)] == sorted(names)


def test_no_alert_fires_while_an_engine_loads_its_model() -> None:
    """An engine joins after its start, and the alert waits longer than its startup probe allows."""
    groups = [group for path in MONITORING for found in of(path) for group in found["spec"].get("groups", [])]
    [rule] = [rule for group in groups for rule in group["rules"] if rule["alert"] == "PillionNoEngine"]
    waits_s = int(rule["for"].removesuffix("m")) * 60
    for document in (document for path in KUBERNETES for document in of(path) if pod(document)):
        probes = [found["startupProbe"] for found in pod(document)["containers"] if "startupProbe" in found]
        assert probes and all(waits_s > probe["periodSeconds"] * probe["failureThreshold"] for probe in probes)


def inject(text: str, options: list[str]) -> str:
    """The manifest after `pillion inject`; the engines of deploy/ have the wheel."""
    command = [str(find_binary()), "inject", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def without_sidecar(document: Document) -> Document:
    """A manifest of deploy/ as it would be without Pillion."""
    bare = copy.deepcopy(document)
    description = bare["spec"]["template"]["spec"]
    del description["initContainers"]
    description["volumes"] = [volume for volume in description["volumes"] if not volume["name"].startswith("pillion")]
    # The router is Pillion's, too.
    description["containers"] = [container for container in description["containers"] if container["name"] != "router"]
    for container in description["containers"]:
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "pillion-socket"]
    engine = description["containers"][0]
    engine["args"] = engine["args"][:1]
    engine["env"] = [variable for variable in engine["env"] if variable["name"] != "PYTHONHASHSEED"]
    return bare


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_inject_adds_what_the_manifest_has(path: Path) -> None:
    """The sidecar, the volumes, and the engine's part of them are equal in the program and in deploy/."""
    document = next(document for document in of(path) if pod(document))
    options = ["--dram=30GiB", "--image=registry.example/pillion:0.3.0", "--wheel-installed", *OPTIONS[path.stem]]
    written = inject(yaml.safe_dump(without_sidecar(document)), options)
    (injected,) = documents(written)
    assert sidecar(injected) == sidecar(document)

    def named(key: str, found: Document) -> dict[str, Any]:
        return {item["name"]: item for item in found[key]}

    assert named("volumes", pod(injected)) == named("volumes", pod(document))
    engines = [named("containers", pod(found))["vllm"] for found in (injected, document)]
    assert named("volumeMounts", engines[0]) == named("volumeMounts", engines[1])
    assert named("env", engines[0]) == named("env", engines[1])
    settings = [yaml.safe_load(text.partition("=")[2] or text) for text in engines[0]["command"] if "kv_connector" in text]
    settings += [yaml.safe_load(text) for text in engines[1]["args"] if "kv_connector" in text]
    # The manifest alone states the role of an engine of a pair.
    assert len(settings) == 2 and settings[0] == settings[1] | {"kv_role": "kv_both"}


@pytest.mark.parametrize("path", INJECTED, ids=lambda path: path.stem)
def test_a_removal_gives_back_what_was(path: Path) -> None:
    """Another reader of YAML finds equal values and types."""
    before = path.with_name(path.name.replace(".injected", "")).read_text()
    assert list(yaml.safe_load_all(inject(path.read_text(), ["--remove"]))) == list(yaml.safe_load_all(before))


def seconds_to_end(container: Document) -> tuple[int, int]:
    """How long a serving container takes requests at its end, and how long its answers may then take."""
    if container["name"] == "router":
        [drains] = [argument.partition("=")[2] for argument in container["args"] if argument.startswith("--drain-time=")]
        return int(drains.removesuffix("s")), ROUTER_ENDS_S
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    [ends] = [argument.partition("=")[2] for argument in container["args"] if argument.startswith("--shutdown-timeout=")]
    return waits, int(ends)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_answers_end_before_their_containers(path: Path) -> None:
    """No request comes after the last one is accepted. The router ends before its engines, the sidecar after them."""
    description = next(pod(document) for document in of(path) if pod(document))
    ends = {container["name"]: seconds_to_end(container) for container in description["containers"]}
    assert all(waits >= ENDPOINTS_GO_S and answers > 0 for waits, answers in ends.values())
    router = sum(ends.pop("router", (0, 0)))
    assert all(waits > router for waits, _ in ends.values())
    last = max(sum(found) for found in ends.values())
    assert description["terminationGracePeriodSeconds"] >= last + SIDECAR_ENDS_S


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_clients_reach_the_port_that_answers_them_alone(path: Path) -> None:
    """Prometheus also reaches the sidecar's port; a pair's engines are behind their router."""
    workload = next(document for document in of(path) if pod(document))
    [policy] = [document["spec"] for document in of(path) if document["kind"] == "NetworkPolicy"]
    assert policy["podSelector"]["matchLabels"] == workload["spec"]["template"]["metadata"]["labels"]
    containers = [sidecar(workload), *pod(workload)["containers"]]
    numbers = {port["name"]: port["containerPort"] for container in containers for port in container["ports"]}
    admitted: dict[str, set[int]] = {}
    for rule in policy["ingress"]:
        [who] = [found["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for found in rule.get("from", [])] or ["anybody"]
        admitted[who] = {numbers.get(port["port"], port["port"]) for port in rule["ports"]}
    pair = path.stem == "prefill-decode"
    assert admitted.pop("anybody") == ({8080} if pair else {8000})
    assert admitted.pop("prometheus") == ({9440, 8000, 8100} if pair else {9440})
    assert admitted == ({"vllm": {9441, 9442}} if path.stem == "mesh" else {})


def control_socket(container: Document) -> Path:
    """The path in the variable that `pillion serve` and `pillion ctl` read."""
    [path] = [variable["value"] for variable in container["env"] if variable["name"] == "PILLION_CONTROL_SOCKET"]
    return Path(path)


@pytest.mark.parametrize("path", KUBERNETES + INJECTED, ids=lambda path: path.stem)
def test_no_engine_mounts_the_control_socket(path: Path) -> None:
    """An engine that runs as root may use any socket in its container."""
    for description in (pod(document) for document in of(path) if any(pod(document).get("initContainers", []))):
        [container] = [found for found in description["initContainers"] if found["name"] == "pillion"]
        folder = str(control_socket(container).parent)
        [volume] = [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == folder]
        mounted = {mount["name"] for found in description["containers"] for mount in found.get("volumeMounts", [])}
        assert "pillion-socket" in mounted and volume not in mounted


def test_the_documented_disk_fits_a_manifest() -> None:
    """The block of docs/deploy.md, added to copy-engine.yaml, gives a valid pod in every release."""
    section = (ROOT / "docs/deploy.md").read_text().partition("\n## Disks\n")[2]
    disk = yaml.safe_load(section.partition("```yaml\n")[2].partition("```")[0])
    document = copy.deepcopy(of(DEPLOY / "kubernetes/copy-engine.yaml")[0])
    description = document["spec"]["template"]["spec"]
    prepares, more = disk["initContainers"]
    container = sidecar(document)
    for key in ("args", "volumeMounts"):
        container[key] = container[key] + more[key]
    assert more == {"name": container["name"], **{key: more[key] for key in ("args", "volumeMounts")}}
    description |= {"initContainers": [prepares, container], "volumes": description["volumes"] + disk["volumes"]}
    for version in VERSIONS:
        built_in(version)(document)
    [owned] = [word for word in prepares["command"] if ":" in word]
    assert owned.partition(":")[0] == str(container["securityContext"]["runAsUser"])
    [argument] = more["args"]
    [mount] = more["volumeMounts"]
    assert Path(argument.partition("=")[2]).parent == Path(mount["mountPath"]), "right below a mount point"


def replaced(arguments: list[str], folder: Path) -> list[str]:
    """A pod's arguments with paths, sizes and addresses of this machine, without certificates."""
    listen = ports.free_port("127.0.0.1")
    values = {
        "--dram": "64MiB",
        "--socket-group": "0",
        "--http": f"127.0.0.1:{ports.free_port()}",
        "--mesh-listen": f"127.0.0.1:{listen}",
        "--peer": f"127.0.0.1:{listen + 2}",
        "--pool-view": None,
    }
    found = []
    for argument in arguments[1:]:
        name, _, value = argument.partition("=")
        if name.startswith(("--mesh-ce", "--mesh-key", "--mesh-ca")) or (name in values and values[name] is None):
            continue
        value = value.replace("/run/pillion", str(folder)).replace("/var/lib/pillion/pool/blocks", f"/dev/shm/{folder.name}")
        found.append(f"{name}={values.get(name, value)}")
    return [*found, *(["--mesh-plaintext"] if any("mesh-listen" in argument for argument in found) else [])]


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_a_sidecar_starts_by_these_arguments(path: Path, tmp_path: Path) -> None:
    """The sidecar also answers its probes, and `pillion ctl` without options."""
    container = next(sidecar(document) for document in of(path) if pod(document))
    arguments = replaced(container["args"], tmp_path)
    http = next(argument.partition("=")[2] for argument in arguments if argument.startswith("--http="))
    pool = next(Path(argument.partition("=")[2]) for argument in arguments if argument.startswith("--pool-path="))
    rest = [argument for argument in arguments if not argument.startswith(("--http=", "--socket=", "--dram=", "--pool-path="))]
    environment = f"PILLION_CONTROL_SOCKET={tmp_path / control_socket(container).name}"
    started = Sidecar(tmp_path, dram="64MiB", http=http, pool=pool, prefix=("env", environment), more=tuple(rest))
    try:
        started.wait_ready()
        assert all(
            started.get(container[probe]["httpGet"]["path"]) is not None for probe in ("livenessProbe", "readinessProbe")
        )
        asked = ["env", environment, str(find_binary()), "ctl", "namespaces"]
        assert subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        started.finish()
    finally:
        started.kill()
        pool.unlink(missing_ok=True)
