"""Parts of a machine that some tests need. Where one is missing they are skipped, by name and with what to install."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

import simulated_gpus
from cookbook.commands.doctor import software
from cookbook.facts.model_types import TYPES
from cookbook.system import sandbox
from cookbook.system.imports import has_torchao

ROOT = Path(__file__).parents[1]


def need_simulated_gpus() -> None:
    """Ends the test where GPUs cannot be simulated."""
    if why := simulated_gpus.problem():
        end_without(f"needs simulated GPUs: {why}")


def need_compiler() -> None:
    """Ends the test where nothing can be compiled, such as a model's layers."""
    if why := simulated_gpus.compiler_problem():
        end_without(f"needs a C++ compiler and Python's headers: {why}")


def need_trackers() -> None:
    """Ends the test where the packages of trackers are missing."""
    if missing := [name for name in ("tensorboard", "wandb", "mlflow", "trackio") if find_spec(name) is None]:
        end_without(f"needs pip install --group trackers: {', '.join(missing)}")


def need_torchao() -> None:
    """Ends the test where the package of fp8 is missing."""
    if not has_torchao():
        end_without("needs pip install --group fp8")


def need_package(name: str) -> None:
    """Ends the test where a package is missing that no file of ours asks for."""
    if find_spec(name) is None:
        end_without(f"needs pip install {name}")


@cache
def lacked_types() -> dict[str, str]:
    """Model types that the installed transformers lacks, each with the version that it was measured with."""
    here = metadata.version("transformers")
    others = {name: facts.transformers for name, facts in TYPES.items() if facts.transformers not in (None, here)}
    if not others:
        return {}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return {name: version for name, version in others.items() if name not in CONFIG_MAPPING_NAMES}


def python_with_timm(folder: Path) -> Path:
    """The interpreter of an environment, made in a folder, that has timm beside the packages of this one; ends the test
    where timm is missing.
    """
    packages = ROOT / ".cache/with_timm"
    if not (packages / "timm").is_dir():
        end_without("needs pip install --no-deps --target .cache/with_timm --group timm")
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    shutil.copytree(packages, own, dirs_exist_ok=True)
    # What torchvision registers for torch's compiler wants its C++ operators, which a torch of another build lacks.
    (own / "torchvision/_meta_registrations.py").write_text("")
    (own / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "bin/python"


def need_trl() -> None:
    """Ends the test where TRL is missing."""
    if find_spec("trl") is None:
        end_without("needs pip install --group peers")


def need_zensical() -> None:
    """Ends the test where the generator of the site is missing."""
    if find_spec("zensical") is None:
        end_without("needs pip install --group site")


def need_chromium() -> str:
    """The path of a browser; ends the test where there is none."""
    return shutil.which("chromium") or end_without("needs chromium: apt-get install --no-install-recommends chromium")


def need_builds_of(strategy: str, *, on_gpus: bool = False) -> None:
    """Ends the test where a strategy, a name or a path, compiles what cannot be compiled here; else has it compiled
    before the run, whose limit of time it would use up on a slow machine.
    """
    if not Path(strategy).stem.startswith("zero3_nvme"):
        return
    if why := _nvme_problem(on_gpus):
        end_without(f"needs offload to NVMe: {why}")
    if not on_gpus:
        _build_nvme()


@cache
def _nvme_problem(on_gpus: bool) -> str | None:
    """Why DeepSpeed's reads and writes cannot be built, in the words of `cookbook doctor`."""
    with tempfile.TemporaryDirectory() as folder:
        checks = list(software.check_build(True, on_gpus, Path(folder)))
    return "; ".join(f"{check.text} ({check.remedy})" for check in checks if check.status == "failure") or None


@cache
def _build_nvme() -> None:
    if (ROOT / software.extensions_folder() / "async_io/async_io.so").is_file():
        return
    code = "build_ops(load_strategy(Path('accelerate_configs/zero3_nvme.yaml')), Path('.cache'))"
    imports = "from pathlib import Path\nfrom cookbook.training.engine import build_ops\n"
    imports += "from cookbook.config.strategy import *"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "c++").symlink_to(ROOT / "tests/compile_as_one.py")
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        subprocess.run([sys.executable, "-c", f"{imports}\n{code}"], cwd=ROOT, env=hidden, check=True)


def need_namespaces() -> None:
    """Ends the test where two network namespaces cannot stand for two machines."""
    if os.geteuid() != 0:
        end_without("needs root, for network namespaces")
    if shutil.which("ip") is None:
        end_without("needs iproute2, for network namespaces: apt-get install iproute2")
    tried = subprocess.run(["ip", "netns", "add", "cookbook-try"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", "cookbook-try"], capture_output=True)
    if tried.returncode:
        end_without(f"needs a kernel that lets root make network namespaces: {tried.stderr.strip()}")


def need_own_network() -> None:
    """Ends the test where no process gets a network of its own."""
    try:
        sandbox.passes("", "")
    except OSError as error:
        end_without(f"needs a kernel that lets this user unshare its network: {error}")


def need_tun() -> None:
    """Ends the test where no slow cable can be laid."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        end_without(f"needs /dev/net/tun, for a slow cable: {error.strerror}")


def need_slurm() -> None:
    """Ends the test where no Slurm can be started."""
    if not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))):
        end_without("needs Slurm: apt-get install --no-install-recommends slurm-wlm munge")
    need_namespaces()


def end_without(reason: str) -> NoReturn:
    """Where nothing may be missing, as in CI, the test fails."""
    (pytest.fail if "SKIP_NOTHING" in os.environ else pytest.skip)(reason)
