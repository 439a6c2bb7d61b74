"""Protects the doctor: what it finds on a machine is so, it ends in time whatever hangs, and it leaves nothing behind.

python -m pytest -q tests/test_doctor.py
"""

import contextlib
import errno
import http.server
import json
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from conftest import ROOT, clean_environment
from documented import documented

import simulated_gpus
from cookbook.commands.doctor import driver as gpus
from cookbook.commands.doctor import (
    environment,
    examination,
    finding,
    host,
    hub,
    nvme,
    probe,
    software,
)
from cookbook.commands.doctor.storage import Sizes, sizes
from cookbook.commands.shared.labels import Needs
from cookbook.config.strategy import load_strategy
from cookbook.start import hosts, launchers
from cookbook.start.run_plan import load_pair
from cookbook.system import machine, signals
from cookbook.system.gpus import Driver, InstalledGpu
from tests import simulated_driver
from tests.needs import end_without, need_compiler, need_simulated_gpus

CANARY = "hf_canaryThatMustNeverBeSeen"
RECIPE_7B = Path("recipes/qwen25_7b/sft.yaml")

# What drivers answer. The values are made up, within what such machines have.
H100 = (
    "count 8\ndriver 570.124.06\ngpu.*.name NVIDIA H100 80GB HBM3\n"
    f"gpu.*.memory.total {81559 << 20}\ngpu.*.memory.used {5 << 20}\n"
    "gpu.*.pcie.generation 5\ngpu.*.pcie.width 16\ngpu.*.pcie.width.max 16\n"
    f"gpu.*.nvlinks {'switch ' * 18}\ngpu.*.field.90 26562\npair.*.ancestor 50\npair.*.peer 0\n"
)
TWO_4090 = (
    "count 2\ndriver 560.35.03\ngpu.*.name NVIDIA GeForce RTX 4090\n"
    f"gpu.*.memory.total {24564 << 20}\ngpu.0.memory.used {18 << 20}\ngpu.1.memory.used {9120 << 20}\n"
    "gpu.*.pcie.generation 4\ngpu.0.pcie.width 16\ngpu.1.pcie.width 8\ngpu.*.pcie.width.max 16\n"
    "gpu.1.processes 4242\nprocess.4242 /opt/conda/bin/python3.11\npair.*.ancestor 30\npair.*.peer 1\n"
)


def link_of(driver):
    return gpus.find_link(driver.gpus, driver.pairs)


def statuses(findings):
    return [(result.status, result.text) for result in findings]


def worst(findings):
    return max((result.status for result in findings), key=finding.EXIT_CODES.__getitem__, default="ok")


def test_eight_h100_are_read_as_such():
    driver = simulated_driver.read(H100)
    assert [gpu.index for gpu in driver.gpus] == list(range(8)) and driver.gpus[0].total_bytes == 81559 * 2**20
    assert len(driver.pairs) == 8 * 7 / 2 and {pair.nvlinks for pair in driver.pairs} == {18}
    link = link_of(driver)
    assert link.kind == "NVLink (18 links)" and link.gb == pytest.approx(18 * 26.562)
    said = [*gpus.check_gpus(driver), *gpus.check_links(driver)]
    assert worst(said) == "ok" and said[0].text == "8 x NVIDIA H100 80GB HBM3, 80 GiB, driver 570.124.06"


def test_two_4090_without_peer_access_a_narrow_slot_and_company_are_read_as_such():
    driver = simulated_driver.read(TWO_4090)
    link = link_of(driver)
    # 16 GT/s x 128/130 / 8 bits = 1.969 GB/s for a lane; the slower card has 8.
    assert link.kind == "PCIe through the CPU" and link.gb == pytest.approx(8 * 16 * 128 / 130 / 8, rel=1e-3)
    said = [*gpus.check_gpus(driver), *gpus.check_links(driver)]
    (busy,) = [result for result in said if "in use" in result.text]
    assert busy.status == "warning" and "python3.11 (4242)" in busy.text and busy.text.startswith("GPU 1: 8.9 GiB")
    assert busy.remedy == "end it, or export CUDA_VISIBLE_DEVICES=0"
    (lanes,) = [result for result in said if "lanes" in result.text]
    assert lanes.text == "GPU 1 has 8 of 16 PCIe lanes" and lanes.status == "warning"
    assert any("no peer access between GPU 0 and 1 (the chipset does not support it)" in result.text for result in said)


def test_nvlinks_without_a_switch_are_counted_pair_by_pair():
    """Four GPUs in a ring: two links to each neighbour, none across."""
    ring = "".join(f"gpu.{i}.nvlinks {' '.join(f'{(i + 1) % 4} {(i + 3) % 4}' for _ in range(2))}\n" for i in range(4))
    driver = simulated_driver.read(f"count 4\npair.*.ancestor 20\ngpu.*.field.90 25000\n{ring}")
    assert {tuple(pair.gpus): pair.nvlinks for pair in driver.pairs} == {
        (0, 1): 2, (0, 2): 0, (0, 3): 2, (1, 2): 2, (1, 3): 0, (2, 3): 2,
    }  # fmt: skip
    assert link_of(driver).kind == "PCIe through several switches"
    assert gpus.find_link(driver.gpus[:2], driver.pairs) == gpus.Link(kind="NVLink (2 links)", gb=50.0)


def test_only_the_gpus_that_a_run_will_see_count():
    broken = simulated_driver.read(H100 + "gpu.0.nvlinks \n")
    assert link_of(broken).kind == "PCIe through two CPUs"
    assert gpus.find_link(broken.gpus[2:4], broken.pairs).kind == "NVLink (18 links)"


def test_lack_of_peers_and_unlike_gpus_are_reported():
    no_peers = simulated_driver.read(H100 + "pair.0.1.peer 5\n")
    assert ("warning", "no peer access between GPU 0 and 1 (not supported), in spite of NVLink") in statuses(
        gpus.check_links(no_peers)
    )
    mixed = simulated_driver.read(H100 + "gpu.1.name NVIDIA GeForce RTX 4090\n")
    assert any("several kinds" in text for _, text in statuses(gpus.check_gpus(mixed)))


def test_the_label_of_a_recipe_is_held_against_the_gpus():
    installed = simulated_driver.read(H100).gpus
    needs = Needs(gpus_each=8, gpu_gb=80)
    assert list(gpus.check_needs(needs, installed, 8, "r.yaml")) == []
    (few,) = gpus.check_needs(needs, installed[:2], 2, "r.yaml")
    assert few.status == "failure" and few.text == "r.yaml needs 8 GPUs of 80 GB; a run would see 2"
    (small,) = gpus.check_needs(Needs(gpus_each=2, gpu_gb=80), simulated_driver.read(TWO_4090).gpus, 2, "r.yaml")
    assert small.status == "warning" and "the smallest here has 24 GiB" in small.text
    assert list(gpus.check_needs(Needs(gpus_each=None, gpu_gb=None), [], 0, "r.yaml")) == []


def test_where_the_driver_tells_no_rate_the_data_sheet_does():
    assert link_of(simulated_driver.read(H100 + "gpu.*.field.90 error 3\n")).gb == 450.0


def test_one_gpu_has_no_link_and_what_a_driver_does_not_support_is_no_mistake():
    driver = simulated_driver.read("count 1\ngpu.*.name NVIDIA L4\ngpu.*.processes error 13\ngpu.*.memory.used error 4")
    assert link_of(driver) is None and list(gpus.check_links(driver)) == []
    assert worst(gpus.check_gpus(driver)) == "ok" and gpus.pcie_gb(driver.gpus[0]) is None
    assert driver.gpus[0].total_bytes == 0


def test_no_gpu_is_fine_and_a_driver_that_is_not_loaded_is_not():
    assert statuses(gpus.check_gpus(Driver(gpus=[]))) == [("ok", "no GPU: runs use the CPU")]
    assert worst(gpus.check_gpus(simulated_driver.read("init error 9"))) == "failure"
    assert worst(gpus.check_gpus(Driver(gpus=[InstalledGpu(index=i) for i in range(2)]))) == "warning"


@pytest.mark.parametrize(
    ("cuda", "driver", "status"),
    [(None, "570.1", "failure"), ("13.0", "570.1", "failure"), ("13.0", "580.65", "ok"), ("12.8", "525.60", "ok")],
)
def test_torch_is_held_against_gpus_and_driver(monkeypatch, cuda, driver, status):
    monkeypatch.setattr(software, "torch_cuda", lambda: cuda)
    findings = list(software.check_torch_build(8, driver))
    assert worst(findings) == status
    if cuda is None:
        assert "built for CPU only, and 8 GPUs are here" in findings[0].text and "torch==" in findings[0].remedy
        assert worst(software.check_torch_build(0, None)) == "ok"


def test_the_cuda_of_torch_is_read_without_importing_it():
    assert machine.torch_cuda() == torch.version.cuda


# Versions.


def test_versions_are_held_against_the_pins(tmp_path, monkeypatch):
    pins = tmp_path / "requirements.txt"
    pins.write_text("# exact\ntorch==2.13.0\ntransformers==5.23.0\npydantic==2.14.3\nnot-there==1.0\n")
    here = {"torch": "2.5.1+cu121", "transformers": "5.22.0", "pydantic": "2.14.3"}

    def version(name):
        if name not in here:
            raise software.metadata.PackageNotFoundError(name)
        return here[name]

    monkeypatch.setattr(software.metadata, "version", version)
    findings = list(software.check_versions(pins))
    assert [(result.status, result.remedy) for result in findings] == [
        ("failure", "pip install torch==2.13.0"),
        ("warning", "pip install transformers==5.23.0"),
        ("failure", "pip install not-there==1.0"),
    ]
    assert "CVE-2025-32434" in findings[0].text and "not-there is not installed" in findings[2].text
    here |= {"torch": "2.13.0+cu130", "transformers": "5.23.0", "not-there": "1.0"}
    assert statuses(software.check_versions(pins)) == [("ok", "all 4 packages are those of requirements.txt")]


def test_the_pins_of_the_project_are_all_read():
    text = (ROOT / "requirements.txt").read_text()
    pins = software.read_pins(text)
    assert len(pins) == sum(not line.startswith("#") for line in text.splitlines()) and pins["torch"]
    assert {package for package, *_ in software.KNOWN_BAD} <= set(pins)
    assert not any(software._is_before(pins[package], first) for package, first, _ in software.KNOWN_BAD)


# The host.


def test_limits_of_control_groups_are_the_tightest_of_all_above(tmp_path):
    inner = tmp_path / "pod/run"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "cpu.max").write_text("max 100000\n")
    assert host.read_limits("0::/pod/run\n", tmp_path) == host.Limits(memory_bytes=None, cores=None)
    (tmp_path / "pod/memory.max").write_text(f"{8 << 30}\n")
    (inner / "cpu.max").write_text("150000 100000\n")
    assert host.read_limits("0::/pod/run\n", tmp_path) == host.Limits(memory_bytes=8 << 30, cores=1.5)


def test_limits_of_the_first_version_are_read_also_where_the_name_is_the_hosts(tmp_path):
    for name, value in (
        ("memory/memory.limit_in_bytes", 4 << 30),
        ("cpu/cpu.cfs_quota_us", 200000),
        ("cpu/cpu.cfs_period_us", 100000),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")
    groups = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n"
    assert host.read_limits(groups, tmp_path) == host.Limits(memory_bytes=4 << 30, cores=2.0)
    (tmp_path / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert host.read_limits(groups, tmp_path) == host.Limits(memory_bytes=None, cores=None)


NO_LIMITS = host.Limits(memory_bytes=None, cores=None)


def test_threads_are_held_against_cores(monkeypatch):
    monkeypatch.setattr(host, "num_cores", lambda: 16)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert worst(host.check_cpu(8, NO_LIMITS, False)) == "ok"
    (quota,) = host.check_cpu(8, replace(NO_LIMITS, cores=8.0), False)
    assert quota.status == "warning" and quota.remedy == "export OMP_NUM_THREADS=1"
    for text, offloads, status in (
        ("2", True, "ok"),
        ("4", True, "warning"),
        ("1", True, "warning"),
        ("1", False, "ok"),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert worst(host.check_cpu(8, NO_LIMITS, offloads)) == status, (text, offloads)
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert worst(host.check_cpu(8, NO_LIMITS, False)) == "failure"


def test_memory_is_held_against_what_is_offloaded():
    needs = Sizes(host=1 << 50, host_why="x")
    assert worst(host.check_memory(NO_LIMITS, needs)) == "failure"
    assert worst(host.check_memory(NO_LIMITS, Sizes(host=1, host_why="x"))) == "ok"
    tight = replace(NO_LIMITS, memory_bytes=1 << 20)
    assert worst(host.check_memory(tight, Sizes(host=2 << 20, host_why="x"))) == "failure"


def test_sizes_are_those_by_hand(monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe, strategy = load_pair(RECIPE_7B, strategy=Path("accelerate_configs/zero3_nvme.yaml"))
    count = 7_615_616_512  # of Qwen2.5-7B, as its safetensors index has it
    kept = recipe.run.keep_last + 1  # the next checkpoint is written before the oldest goes
    needed = sizes(recipe, strategy, 2, on_gpus=False)
    # On disk lie weights in bf16, and in float32 gradients, masters and two moments. In memory gradients in bf16, and
    # of each process four buffers for the largest group's part, five for its half of the embedding, and its new
    # weights whole.
    assert needed.nvme == pytest.approx(18 * count, rel=0.01)
    assert needed.disk == pytest.approx((12 * kept + 2) * count, rel=1e-6)
    assert needed.host == pytest.approx(2 * count + 2 * (4 * 4e9 + 5 * 152_064 * 3584 + 2 * 2e9), rel=0.05)
    on_host = sizes(recipe, load_strategy(Path("accelerate_configs/zero2_offload.yaml")), 2, on_gpus=True)
    # And of each process a buffer of two bytes for the largest gradient, that of the embedding.
    assert on_host.host == pytest.approx(20 * count + 2 * 2 * 152_064 * 3584, rel=1e-3) and on_host.nvme == 0
    assert sizes(recipe, load_strategy(Path("accelerate_configs/ddp.yaml")), 2, on_gpus=False).host == 0


def test_a_low_limit_of_open_files_is_reported():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        (result,) = host.check_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert result.status == "warning" and result.remedy.startswith("ulimit -n ")
    assert worst(host.check_files()) == "ok"


# Variables.


@pytest.mark.parametrize(
    ("name", "value", "status", "remedy"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "7", "failure", "unset ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
        ("FSDP_OFFLOAD_PARAMS", "true", "failure", "unset FSDP_OFFLOAD_PARAMS"),
        ("RANK", "0", "failure", "unset RANK"),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "unset CUDA_LAUNCH_BLOCKING"),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok", ""),
        ("GLOO_SOCKET_IFNAME", "eth77", "failure", "unset GLOO_SOCKET_IFNAME, or name one of those"),
        ("NCCL_SOCKET_IFNAME", "lo", "ok", ""),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok", ""),
        ("ACCELERATE_LOG_LEVEL", "info", "ok", ""),
    ],
)
def test_variables_that_would_change_or_slow_a_run_are_reported(monkeypatch, name, value, status, remedy):
    for other in list(os.environ):
        if other.startswith(("ACCELERATE_", "FSDP_", "NCCL_", "GLOO_", "CUDA_")) or other in hosts.TORCHRUN:
            monkeypatch.delenv(other)
    assert worst(environment.check_variables(None, "bf16")) == "ok"
    monkeypatch.setenv(name, value)
    (result,) = environment.check_variables(None, "bf16")
    assert (result.status, result.remedy) == (status, remedy)


def test_hidden_gpus_are_reported():
    assert list(environment.hidden_gpus(None, 8, 8)) == []
    assert list(environment.hidden_gpus("0,1", 2, 2)) == []
    assert worst(environment.hidden_gpus("0,1", 2, 8)) == "warning"
    assert worst(environment.hidden_gpus("", 0, 8)) == "warning"
    assert worst(environment.hidden_gpus("0,9", 1, 8)) == "failure"


# Compiled operations.


def test_a_lock_left_by_a_dead_build_is_reported_unless_a_run_is_building(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert list(software.check_locks()) == []
    lock = tmp_path / "async_io/lock"
    lock.parent.mkdir()
    lock.touch()
    (result,) = software.check_locks()
    assert result.status == "warning" and result.remedy == f"rm {lock}"
    with software.FileLock(tmp_path / "cookbook.lock"):
        holder = [
            sys.executable,
            "-c",
            "from cookbook.commands.doctor.software import check_locks; print(*check_locks())",
        ]
        done = subprocess.run(holder, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "status='ok'" in done.stdout and "another run is building" in done.stdout
    assert lock.exists()


def test_a_missing_header_is_noticed(tmp_path):
    need_compiler()
    assert software._compiles("c++", "cstdio", "return 0;", [], tmp_path)
    assert not software._compiles("c++", "no_such_header.h", "return 0;", [], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_compiler_fails_only_where_something_must_be_built(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    findings = list(software.check_build(True, False, tmp_path))
    assert findings[0].status == "failure" and findings[0].remedy == "apt-get install g++"
    assert worst(software.check_build(False, False, tmp_path)) == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def toolkit(tmp_path, monkeypatch):
    """A CUDA toolkit of version 12.8, as far as anyone looks."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "include").mkdir()
    (home / "include/cuda_runtime.h").touch()
    (home / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    (home / "bin/nvcc").chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(home))
    return home


def test_operations_for_nvme_want_the_cuda_toolkit_of_torch_s_version(toolkit, tmp_path, monkeypatch):
    assert machine.toolkit_problem("12.6") is None, "DeepSpeed takes any 12 for another"
    assert machine.toolkit_problem(None) is None, "torch for CPU has nothing to do with CUDA"
    problem, remedy = machine.toolkit_problem("13.0")
    assert "is version 12, and torch is built for CUDA 13.0" in problem and "cuda-toolkit=13.0" in remedy
    (toolkit / "include/cuda_runtime.h").unlink()
    assert "no headers" in machine.toolkit_problem("12.8")[0]
    (toolkit / "bin/nvcc").unlink()
    assert "no bin/nvcc that runs" in machine.toolkit_problem("12.8")[0]
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    assert "nowhere" in machine.toolkit_problem("12.8")[0]


def test_what_cannot_be_built_without_the_toolkit_fails_in_doctor_and_before_a_run(toolkit, tmp_path, monkeypatch):
    """An 8B model would be downloaded before the compiler fails."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    nvme, plain = (load_strategy(ROOT / f"accelerate_configs/{name}.yaml") for name in ("zero3_nvme", "zero3"))
    for module in (software, launchers):
        monkeypatch.setattr(module, "torch_cuda", lambda: "12.8")

    def of_toolkit(needs_nvme, on_gpus):
        return [result for result in software.check_build(needs_nvme, on_gpus, tmp_path) if "CUDA" in result.text]

    assert of_toolkit(True, True) == launchers.check_machine(nvme, 8, deterministic=False) == []
    (toolkit / "bin/nvcc").unlink()
    (result,) = of_toolkit(True, True)
    assert result.status == "failure" and "CUDA_HOME" in result.remedy
    assert not any("can be built" in result.text for result in software.check_build(True, True, tmp_path))
    (result,) = of_toolkit(False, True)
    assert result.status == "ok"
    assert of_toolkit(True, False) == [], "on a CPU nothing of CUDA is built"
    (mistake,) = launchers.check_machine(nvme, 8, deterministic=False)
    assert mistake.startswith(f"{nvme.path}: ") and "CUDA_HOME" in mistake
    assert launchers.check_machine(nvme, 0, deterministic=False) == []
    assert launchers.check_machine(plain, 8, deterministic=False) == []


# The disk.


def strategy_on(folder):
    nvme_strategy = load_strategy(ROOT / "accelerate_configs/zero3_nvme.yaml")
    zero = json.loads(json.dumps(nvme_strategy.deepspeed))
    for key in ("offload_optimizer", "offload_param"):
        zero["zero_optimization"][key]["nvme_path"] = str(folder)
    return replace(nvme_strategy, deepspeed=zero)


def test_a_folder_that_is_to_be_made_is_looked_at_and_left_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    folder = tmp_path / "swap/of mine"
    strategy = strategy_on(folder)
    assert nvme.nvme_folders(strategy) == [folder]
    space, direct = nvme.check_nvme(folder, strategy, None)
    assert space.status == "ok" and "free" in space.text
    if "O_DIRECT" in direct.text:
        end_without("no direct access in the temporary folder; set TMPDIR to one on a disk")
    aio = json.loads((ROOT / "ds_configs/zero3_nvme.json").read_text())["aio"]
    assert f"block_size {aio['block_size']}, queue_depth {aio['queue_depth']}" in direct.text
    assert f"ds_nvme_tune --nvme_dir '{folder}'" in direct.text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [("nfs4", "warning"), ("fuse.sshfs", "warning"), ("wekafs", "warning"), ("ext4", "ok"), ("overlay", "ok")],
)
def test_a_file_system_of_no_disk_is_warned_of_by_what_the_kernel_says(kind, status, tmp_path, monkeypatch):
    (tmp_path / "filesystems").write_text("nodev\ttmpfs\nnodev\twekafs\n\text3\n\text4\n")
    monkeypatch.setattr(nvme, "KERNELS", tmp_path / "filesystems")
    monkeypatch.setattr(nvme, "filesystem", lambda folder: kind)
    space, *_ = nvme.check_nvme(tmp_path, strategy_on(tmp_path), None)
    assert space.status == status and f"({kind})" in space.text


def test_a_file_system_without_direct_access_is_a_failure(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    opened = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as tmpfs before Linux 6.6
        return opened(path, flags, *mode)

    monkeypatch.setattr(nvme.os, "open", refuse)
    _, direct = nvme.check_nvme(tmp_path, strategy_on(tmp_path), None)
    assert direct.status == "failure" and "O_DIRECT" in direct.text
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_and_one_too_small_are_failures(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (result,) = nvme.check_nvme(Path("/proc/swap"), strategy_on("/proc/swap"), None)
    assert result.status == "failure" and "nvme_path in ds_configs/zero3_nvme.json" in result.remedy
    needs = Sizes(nvme=1 << 60, nvme_why="x")
    assert worst(nvme.check_nvme(tmp_path, strategy_on(tmp_path), needs)) == "failure"


def test_the_program_that_a_finding_names_is_deepspeeds_and_prints_an_aio_block(tmp_path, capsys):
    """By its own reader, of logs as its sweep writes them: its operations need libaio, which may not be here."""
    from deepspeed.nvme import perf_generate_param, perf_run_sweep, perf_sweep_utils

    assert (Path(sys.executable).parent / "ds_nvme_tune").is_file()
    lines = perf_run_sweep.get_sweep_cmd_lines({"block_size": ["1M", "8M"], "queue_depth": [32], "io_parallel": [2]})
    for name, word in (("read", "Read"), ("write", "Write")):
        folder = tmp_path / getattr(perf_sweep_utils, f"{name.upper()}_LOG_DIR")
        folder.mkdir()
        for speed, line in enumerate(lines, start=1):
            file = folder / perf_run_sweep.get_log_file(name, line)
            file.write_text(f"E2E {word} Speed = {speed}.5 GB/sec\n")
    perf_generate_param.generate_main(str(tmp_path))
    printed = capsys.readouterr().out
    block = json.loads(printed[printed.index("{") :])["aio"]
    known = json.loads((ROOT / "ds_configs/zero3_nvme.json").read_text())["aio"]
    assert block["block_size"] == 8 << 20 and {"block_size", "queue_depth"} <= block.keys() & known.keys()


def test_the_file_system_is_that_of_the_deepest_mount(monkeypatch):
    mounts = [("/", "ext4"), ("/proc", "proc"), ("/mnt/my disk", "tmpfs"), ("/mnt/my disk", "nfs4")]
    listed = [SimpleNamespace(mountpoint=point, fstype=kind) for point, kind in mounts]
    monkeypatch.setattr(nvme.psutil, "disk_partitions", lambda all: listed)
    assert nvme.filesystem(Path("/mnt/my disk/swap")) == "nfs4"
    assert nvme.filesystem(Path("/mnt/other")) == "ext4"


# The Hub.


class Server(http.server.BaseHTTPRequestHandler):
    """A Hub with one gated model, one that is moved elsewhere, and one revision."""

    def do_HEAD(self):
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        status, code = 200, None
        if "gated" in self.path:
            status, code = 403, "GatedRepo"
        elif "secret" in self.path:
            status, code = 401, "RepoNotFound"
        elif "public" in self.path and self.headers.get("Authorization"):
            status = 401  # what the Hub answers to a token that has expired, whatever is asked
        elif "moved" in self.path:
            status = 302
        elif "rev9" in self.path:
            status, code = 404, "RevisionNotFound"
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 302:
            self.send_header("Location", f"http://127.0.0.1:{self.server.elsewhere}/model")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def servers(monkeypatch):
    started = []
    for _ in range(2):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
        server.seen, server.elsewhere = [], None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        started.append(server)
    started[0].elsewhere = started[1].server_port
    monkeypatch.setattr(
        "huggingface_hub.constants.ENDPOINT", f"http://user:{CANARY}@127.0.0.1:{started[0].server_port}"
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", CANARY)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield started
    for server in started:
        server.shutdown()


def model(name, revision=None):
    return hub.HubRepo(key="model.name_or_path", name=name, revision=revision, repo_type="model")


def test_gated_private_and_missing_models_are_distinguished_and_no_token_is_shown(servers, monkeypatch):
    port = servers[0].server_port
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")
    things = [model("a/gated"), model("a/secret"), model("a/open", "rev9"), model("a/open"), model("a/public")]
    findings = list(hub.check_hub(things))
    assert [result.status for result in findings] == ["failure", "failure", "failure", "ok", "failure"]
    assert "the token that is set is refused" in findings[4].text
    assert (
        "gated" in findings[0].text and "accept its licence" in findings[0].remedy and "HF_TOKEN" in findings[0].remedy
    )
    assert "private or does not exist" in findings[1].text and "no revision rev9" in findings[2].text
    assert all("a token is set" in result.text for result in (findings[0], findings[1], findings[3]))
    assert f"Bearer {CANARY}" in [sent for _, sent in servers[0].seen], "the token was not even used"
    assert CANARY not in json.dumps([asdict(result) for result in findings])


def test_the_token_does_not_follow_a_redirection(servers, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{servers[0].server_port}")
    (result,) = hub.check_hub([model("a/moved")])
    assert result.status == "ok" and servers[1].seen == []


def test_a_password_in_the_address_of_the_hub_is_not_shown(servers):
    findings = list(hub.check_hub([model("a/gated")]))
    assert CANARY not in json.dumps([asdict(result) for result in findings])


def test_a_token_is_not_sent_in_the_clear(servers, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://hub.example")
    (result,) = hub.check_hub([])
    assert result.status == "failure" and "https" in result.text


def test_without_network_what_is_in_the_cache_is_enough(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--a--small"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/main").write_text("c0ffee")
    snapshot = folder / "snapshots/c0ffee"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert worst(hub.check_hub([model("a/small")])) == "failure"  # no weights yet
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert worst(hub.check_hub([model("a/small")])) == "failure"
    (snapshot / "one.safetensors").touch()
    assert statuses(hub.check_hub([model("a/small")])) == [("ok", "a/small is in the local cache")]


def test_a_hub_that_never_answers_matters_only_if_something_must_be_fetched(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "TIMEOUT_SECONDS", 0.2)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as deaf:  # listens, and nobody serves
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{deaf.server_port}")
        assert worst(hub.check_hub([])) == "ok"
        (result,) = hub.check_hub([model("nobody/has-this")])
    assert result.status == "failure" and "nobody/has-this must be fetched" in result.text


# Processes that hang, break or leave something.


def is_alive(process):
    """Not for a process that has ended, though nobody has asked for its code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def pid_is_alive(pid):
    try:
        return is_alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def children_with(word, pid):
    children = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):  # ended since
            children += [child] if word in " ".join(child.cmdline()) else []
    return children


def descendants():
    return [child for child in psutil.Process().children(recursive=True) if is_alive(child)]


def run_probe(produce, seconds):
    started = time.monotonic()
    check = probe.start("x", produce, seconds)
    probe.finish([check], started + 20)
    return check, time.monotonic() - started


def test_a_check_that_hangs_is_ended_with_its_children_and_what_it_said_is_kept():
    def hang():
        child = subprocess.Popen(["sleep", "1000"])
        yield {"first": child.pid}
        child.wait()

    check, seconds = run_probe(hang, 1.0)
    assert check.ended == "out of time" and seconds < 3
    (said,) = check.said
    limit = time.monotonic() + 5
    while pid_is_alive(said["first"]) and time.monotonic() < limit:
        time.sleep(0.01)
    assert not pid_is_alive(said["first"])
    (result,) = examination._trouble(check)
    assert result.status == "failure" and "hangs" in result.text


def test_a_check_that_breaks_or_dies_is_a_line_of_the_report():
    def raises():
        yield {"first": 1}
        raise ValueError("odd")

    def dies():
        yield {"first": 1}
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out

    assert run_probe(raises, 5)[0].trouble == "ValueError: odd"
    check, _ = run_probe(dies, 5)
    assert check.trouble == "its process died of SIGKILL" and check.said == [{"first": 1}]
    assert worst(examination._trouble(check)) == "warning"
    fine, _ = run_probe(lambda: iter([{"all": 2}]), 5)
    assert fine.said == [{"all": 2}] and examination._trouble(fine) == []


def test_what_a_check_said_in_time_counts_however_late_it_is_read():
    check = probe.start("x", lambda: [{"said": "in time"}], 0.5)
    time.sleep(0.8)
    probe.finish([check], time.monotonic() + 5)
    assert check.said == [{"said": "in time"}] and check.ended == "by itself"


# The front door.


def doctor_command(*arguments):
    return [sys.executable, "-m", "cookbook", "doctor", *arguments]


def front_door(tmp_path, **extra):
    """An environment in which nothing of this machine's owner is found, and what is left behind is seen."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    settings = {"TMPDIR": str(tmp_path / "tmp"), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    kept = clean_environment(**settings, **extra)
    return {name: value for name, value in kept.items() if name not in ("HF_TOKEN", "HF_HUB_CACHE", "OMP_NUM_THREADS")}


def test_this_machine_is_examined_as_a_user_would(tmp_path):
    done = subprocess.run(
        doctor_command("--json"), cwd=ROOT, env=front_door(tmp_path), capture_output=True, text=True, timeout=90
    )
    told = documented("doctor", done.stdout)
    findings = told["findings"]
    assert done.returncode == max({"ok": 0, "warning": 1, "failure": 2}[result["status"]] for result in findings)
    assert told["ready"] == (done.returncode < 2) and done.stderr == ""
    checks = {result["check"] for result in findings}
    assert {
        "Python",
        "versions",
        "environment",
        "GPUs",
        "CPU",
        "memory",
        "shm",
        "files",
        "build",
    } <= checks
    assert all(bool(result["remedy"]) == (result["status"] != "ok") for result in findings)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_shared_memory_of_a_container_is_enough_for_one_gpu_and_not_for_two(monkeypatch, tmp_path):
    """Docker gives 64 MiB, in which NCCL's buffers for two processes of a machine have no room."""
    usage = SimpleNamespace(free=64 << 20)
    monkeypatch.setattr(host.psutil, "disk_usage", lambda folder: usage)
    assert worst(host.check_shared_memory(1, tmp_path)) == "ok"
    (result,) = host.check_shared_memory(2, tmp_path)
    assert result.status == "warning" and "--shm-size=8g" in (result.remedy or "")


def test_gpus_that_this_torch_cannot_use_are_a_failure_with_its_remedy(tmp_path):
    if torch.version.cuda:
        pytest.skip("torch is built for CUDA here")
    variables = simulated_driver.variables(tmp_path, H100)
    environment_ = front_door(tmp_path, CUDA_VISIBLE_DEVICES="0,1", **variables)
    done = subprocess.run(doctor_command(), cwd=ROOT, env=environment_, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "8 x NVIDIA H100 80GB HBM3" in done.stdout and "NVLink (18 links), 478 GB/s" in done.stdout
    assert "built for CPU only, and 8 GPUs are here" in done.stdout
    assert "-> pip install --force-reinstall" in done.stdout and "leaves 2 of 8 GPUs" in done.stdout


def test_a_driver_that_never_answers_is_named_before_the_deadline_and_nothing_stays(tmp_path):
    start = time.monotonic()
    running = subprocess.Popen(
        doctor_command("--deadline", "6"),
        cwd=ROOT,
        env=front_door(tmp_path, **simulated_driver.variables(tmp_path, "init hang")),
        stdout=subprocess.PIPE,
        text=True,
    )
    asking: list[psutil.Process] = []
    while not asking:
        for child in psutil.Process(running.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # another one, at its end
                asking += [child] if "nvml.py" in " ".join(child.cmdline()) else []
        assert time.monotonic() - start < 10
    said, _ = running.communicate(timeout=60)
    assert time.monotonic() - start < 6 + 4  # the interpreter's own start is not in the deadline
    assert running.returncode == 2 and "the NVIDIA driver does not answer within" in said, said
    assert not any(map(is_alive, asking))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(
            pytest.param(number, marks=pytest.mark.thorough)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGKILL)
        ),
    ],
)
def test_a_doctor_that_is_ended_takes_its_processes_along(tmp_path, number):
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # a Hub that never answers, which a check waits for
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        environment_ = front_door(tmp_path, HF_ENDPOINT=address, no_proxy="127.0.0.1") | {"HF_HUB_OFFLINE": "0"}
        running = subprocess.Popen(
            doctor_command(), cwd=ROOT, env=environment_, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deaf.settimeout(30)
        with deaf.accept()[0]:  # open until the end: else the check fails, and the doctor ends before the signal comes
            children = psutil.Process(running.pid).children(recursive=True)
            assert children
            running.send_signal(number)
            assert running.wait(20) in (signals.EXIT_CODE, 130, -signal.SIGKILL)
    limit = time.monotonic() + 10
    while any(map(is_alive, children)) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not any(map(is_alive, children))
    assert number == signal.SIGKILL or list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--deadline", "1"], "--deadline is 1; write at least 5 seconds"),
        (["--deadline", "nan"], "--deadline is nan"),
        (["recipes/none.yaml"], "recipes/none.yaml"),
        (["--strategy", "zero9"], "zero9"),
    ],
)
def test_a_mistake_on_the_command_line_is_reported_in_a_moment(arguments, said):
    done = subprocess.run(
        doctor_command(*arguments), cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr and done.stdout == ""


SOME = [finding.ok("Python", "3.11.7"), finding.warning("CPU", "too many " * 30, "export OMP_NUM_THREADS=1")]


def test_lines_are_aligned_and_remedies_can_be_copied():
    text = examination.in_words(SOME, 1.23)
    lines = text.splitlines()
    assert lines[0] == "ok       Python  3.11.7" and lines[1].startswith("warning  CPU     too many")
    assert lines[-2] == " " * 17 + "-> export OMP_NUM_THREADS=1" and lines[-1] == "ready: 1 warning (1.2 s)"
    assert len(lines) == 6 and max(map(len, lines)) <= 120


@pytest.mark.parametrize(("extra", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals_alone(extra, coloured):
    code = (
        "from cookbook.commands.doctor.examination import report; from cookbook.commands.doctor.finding import ok;"
        "report([ok('Python', 'x')], 1.0, as_json=False)"
    )
    command = [sys.executable, "-c", code]
    settings = {name: value for name, value in clean_environment(**extra).items() if name != "NO_COLOR" or extra}
    piped = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in piped
    ours, theirs = pty.openpty()
    subprocess.run(command, cwd=ROOT, env=settings, stdout=theirs, check=True)
    os.close(theirs)
    assert (b"\x1b[32mok" in os.read(ours, 4096)) == coloured
    os.close(ours)


@pytest.mark.slow
@pytest.mark.parametrize(("memory", "status"), [(1 << 30, "ok"), (1 << 20, "warning")])
def test_the_allocator_is_tried_as_a_run_has_it(memory: int, status: str):
    """A simulated GPU without room stands for one whose driver does not allocate so."""
    need_simulated_gpus()
    tell = "from cookbook.commands.doctor.driver import try_allocator as t; print(*[(f.status, f.text) for f in t()])"
    variables = clean_environment() | simulated_gpus.environment(2, memory=memory)
    done = subprocess.run([sys.executable, "-c", tell], cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.stdout.startswith(f"('{status}', '"), done.stdout + done.stderr[-1000:]
    assert "expandable_segments:True" in done.stdout
