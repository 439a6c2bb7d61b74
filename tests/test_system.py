"""Protects the set-up of a bare machine: what pip cannot install is installed or named, and nobody is asked.

python -m pytest -q tests/test_system.py
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

import simulated_gpus
from tests import needs


class Machine:
    """A PATH with little on it, and a Python 3.11 that has neither venv nor headers."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.calls = folder / "bin", folder / "calls"
        self.bin.mkdir()
        for name in ("sh", "tail"):
            (self.bin / name).symlink_to(shutil.which(name) or "")
        self.add("python3", f"case $2 in *version*) echo 3.11 ;; *) test -e {folder}/installed ;; esac")
        self.add("sudo", f"echo sudo >> {self.calls}")
        self.user = 1000

    def add(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def add_apt(self, install: str) -> None:
        self.add("apt-get", f'echo "$@" >> {self.calls}; case "$*" in *install*) {install} ;; esac')

    def run(self, what: str) -> subprocess.CompletedProcess:
        """`system.sh` in it, with standard input that would answer no question."""
        self.add("id", f"echo {self.user}")
        command = [shutil.which("sh") or "", "system.sh", "python3", what]
        variables = {"PATH": str(self.bin)}
        return subprocess.run(
            command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("what", "code"), [("build", 0), ("venv", 1)])
def test_a_user_gets_one_line_and_nothing_is_installed(machine: Machine, what: str, code: int):
    machine.add_apt("false")
    done = machine.run(what)
    assert done.returncode == code and done.stdout == ""
    (line,) = done.stderr.splitlines()
    packages = line.split("as root: apt-get update && apt-get install -y --no-install-recommends ")[1].split()
    missing = {"venv": {"python3.11-venv"}, "build": {"g++", "python3.11-dev"}}[what]
    assert missing <= set(packages) <= missing | {"libaio-dev"}
    assert not machine.calls.exists()


def test_without_apt_the_line_has_names(machine: Machine):
    done = machine.run("build")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and "a C++ compiler, Python's headers" in line and "apt" not in line


def test_root_gets_what_is_missing_and_a_line_that_says_why(machine: Machine, tmp_path: Path):
    machine.user = 0
    machine.add_apt(f"echo noise; : > {tmp_path}/installed")
    done = machine.run("venv")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "installing python3.11-venv, for the virtual environment\n",
        "",
    )
    update, install = machine.calls.read_text().splitlines()
    assert update == "update" and "-y" in install and install.endswith(" python3.11-venv")
    assert machine.run("venv").stdout == "", "installed again"


def test_root_gets_the_error_of_apt_where_it_fails(machine: Machine):
    machine.user = 0
    machine.add_apt("echo 'E: Unable to locate package'; exit 100")
    done = machine.run("build")
    assert done.returncode == 0 and done.stderr.endswith("; apt-get failed: E: Unable to locate package\n")


def test_ci_installs_what_tests_need_beside_make_leaves_the_rest_to_it_and_skips_nothing():
    script = (ROOT / ".ci/run").read_text()
    installed = " ".join(re.findall(r'"\$\{install\[@\]\}" (.+) >', script))
    assert set(installed.split()) == {"make", "iproute2", "util-linux", "slurm-wlm", "munge", "chromium"}
    assert "export SKIP_NOTHING=1" in script


def test_a_test_is_skipped_with_what_is_missing_or_fails_in_ci(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("SKIP_NOTHING", raising=False)
    monkeypatch.setattr(needs, "_nvme_problem", needs._nvme_problem.__wrapped__)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # where nothing has been built
    monkeypatch.setattr(simulated_gpus, "torch_cuda", lambda: None)
    for need in (needs.need_compiler, needs.need_simulated_gpus, lambda: needs.need_builds_of("zero3_nvme")):
        with pytest.raises(pytest.skip.Exception, match=r"apt-get install g\+\+"):
            need()
    needs.need_builds_of("zero3")
    monkeypatch.setenv("SKIP_NOTHING", "1")
    with pytest.raises(pytest.fail.Exception, match=r"apt-get install g\+\+"):
        needs.need_compiler()
