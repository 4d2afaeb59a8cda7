"""The manifests of deploy/ and of `pillion inject`, as Kubernetes reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
INJECTED = sorted((ROOT / "tools/tests/inject").glob("*.injected.yaml"))
# The manifests before.
CHARTS = [path.with_name(path.name.replace(".injected", "")) for path in INJECTED]
# Groups of Kubernetes itself; operators have others.
BUILT_IN_GROUPS = {"v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "policy/v1", "resource.k8s.io/v1"}
KUBERNETES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MONITORING = sorted((DEPLOY / "monitoring").glob("*.yaml"))
# The releases of Kubernetes in which every kind exists: resource.k8s.io/v1 came with 1.34.
VERSIONS = ("1.35", "1.36", "1.37")
SCHEMAS = Path(__file__).parent / "schemas"

Document = dict[str, Any]
Path_ = tuple[str | int, ...]


def documents(text: str) -> list[Document]:
    """All documents of a text; those of a List one by one."""
    found = [document for document in yaml.safe_load_all(text) if document]
    return [item for document in found for item in (document["items"] if document["kind"] == "List" else [document])]


def of(path: Path) -> list[Document]:
    """All documents of a file."""
    return documents(path.read_text())


def built_in(version: str) -> Callable[[Document], None]:
    """The check of a release of Kubernetes. A kind unknown to it is an error."""

    def check(document: Document) -> None:
        kubernetes_validate.validate(document, version, strict=True)

    return check


def operators(document: Document) -> None:
    """The check of the Prometheus operator."""
    schema = json.loads((SCHEMAS / f"{document['kind']}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)


def mappings(value: Any, path: Path_ = ()) -> Iterator[Path_]:
    """The paths of a document's mappings."""
    if isinstance(value, dict):
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from mappings(below, (*path, key))


def at(value: Any, path: Path_) -> Any:
    """The value at the path."""
    for key in path:
        value = value[key]
    return value


def pod(document: Document) -> Document:
    """The pod's description of a workload; empty for other kinds."""
    if document["kind"] == "Pod":
        return dict(document["spec"])
    return dict(document.get("spec", {}).get("template", {}).get("spec", {}))


def pods_of(document: Document) -> Iterator[Document]:
    """Each description of a pod in an operator's object, as a pod."""
    for path in mappings(document):
        found = at(document, path)
        if isinstance(found.get("containers"), list):
            yield {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "of-an-operator"}, "spec": found}


def sidecar(document: Document) -> Document:
    """The sidecar's container."""
    return next(dict(found) for found in pod(document).get("initContainers", []) if found["name"] == "pillion")
