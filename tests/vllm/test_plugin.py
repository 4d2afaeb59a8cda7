"""The wheel's plugin registers the connector by its name, and in Dynamo's table of connectors for prefill and decode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from testkit.child import python_path

# scripts/setup unpacks it here.
DYNAMO = Path(__file__).resolve().parents[2] / ".cache/dynamo-1.6.1"
PLAY = """
import json, sys
from types import SimpleNamespace
{imports}
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
named = KVTransferConfig(kv_connector="PillionConnector", kv_role="kv_both")
print(json.dumps({{"class": KVConnectorFactory.get_connector_class(named).__module__, **{more}}}))
"""
# Alone, and beside NIXL.
PROTOCOLS = """{
    name: (lambda found: [
        type(found).__name__, found.prefill_request_kv_transfer_params(),
        found.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params={"do_remote_prefill": True})),
        found.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=None)),
    ])(make_kv_connector_protocol(SimpleNamespace(kv_transfer_config=SimpleNamespace(**config))))
    for name, config in {
        "alone": {"kv_connector": "PillionConnector"},
        "beside": {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [
            {"kv_connector": "NixlConnector"}, {"kv_connector": "PillionConnector"}]}},
    }.items()
}"""


def played(imports: str, more: str) -> dict[str, Any]:
    """The output of a process with vLLM's plugins. It imports Dynamo first, as Dynamo's workers do."""
    program = PLAY.format(imports=imports, more=more)
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | python_path([DYNAMO]))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_vllm_knows_the_connector_by_its_name() -> None:
    """The configuration has no module path."""
    assert played("", "{}") == {"class": "pillion.connector"}


def test_dynamo_accepts_the_connector() -> None:
    """Its params are those of `pillion.handover`."""
    assert (DYNAMO / "dynamo/vllm").is_dir(), f"{DYNAMO} is missing: run scripts/setup tests"
    imports = "import dynamo.vllm\nfrom dynamo.vllm.kv_connector_protocols import make_kv_connector_protocol"
    found = played(imports, PROTOCOLS)
    words = {"do_remote_decode": True, "do_remote_prefill": False}
    assert found["alone"] == ["PillionProtocol", words, {"do_remote_prefill": True}, {}]
    assert found["beside"][0] == "NixlConnectorProtocol"
