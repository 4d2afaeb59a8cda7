"""The seccomp profile of a node, and the systemd unit with its configuration."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from manifests import DEPLOY, ROOT
from testkit import ports
from testkit.sidecar import Sidecar, find_binary, new_pool

DEFAULT = Path("/usr/share/containers/seccomp.json")


def test_the_profile_is_the_default_and_io_uring() -> None:
    """scripts/seccomp-profile writes the committed profile."""
    written = subprocess.run([ROOT / "scripts/seccomp-profile", DEFAULT], capture_output=True, text=True, check=True).stdout
    kept = (DEPLOY / "seccomp/pillion.json").read_text()
    assert json.loads(written) == json.loads(kept)

    def allowed(text: str) -> set[str]:
        rules = json.loads(text)["syscalls"]
        plain = [rule for rule in rules if rule["action"] == "SCMP_ACT_ALLOW" and not (rule.get("includes") or {}).get("caps")]
        return {name for rule in plain for name in rule["names"]}

    more = allowed(kept) - allowed(DEFAULT.read_text())
    assert more == {"io_uring_setup", "io_uring_enter", "io_uring_register"}


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """Every line of it; a misspelt line is named."""

    def complaints(text: str) -> str:
        unit = tmp_path / "pillion.service"
        unit.write_text(text.replace("/usr/bin/pillion", str(find_binary())).replace("User=pillion", "User=root"))
        verified = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
        return "\n".join(line for line in verified.stderr.splitlines() if "pillion" in line)

    text = (DEPLOY / "systemd/pillion.service").read_text()
    assert complaints(text) == ""
    [page] = [line.partition("/usr/share/doc/pillion/")[2] for line in text.splitlines() if line.startswith("Documentation=")]
    assert (ROOT / page).is_file(), "installed where it lies in the tarball"
    assert "ProtectHomes" in complaints(text.replace("ProtectHome=", "ProtectHomes="))


def test_a_sidecar_starts_by_the_units_configuration(tmp_path: Path) -> None:
    """The sidecar has less memory, and runs as this user."""
    file = tmp_path / "pillion.toml"
    file.write_text((DEPLOY / "systemd/pillion.toml").read_text().replace('"pillion"', '"root"'))
    more = (f"--config={file}", f"--http=127.0.0.1:{ports.free_port()}")
    started = Sidecar(tmp_path, dram="64MiB", pool=new_pool(), http=more[1].partition("=")[2], more=more[:1])
    try:
        started.wait_ready()
        started.finish()
    finally:
        started.kill()
        started.pool.unlink(missing_ok=True)
