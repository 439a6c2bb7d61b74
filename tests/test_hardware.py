"""Protects the table of GPUs, what a person may write for machines, and what is read of the driver.

python -m pytest -q tests/test_hardware.py
"""

import itertools
import re
from pathlib import Path

import pytest
import torch

from cookbook.system import gpus, hardware, machine
from cookbook.system.files import RecipeError
from cookbook.system.gpus import Driver, InstalledGpu
from cookbook.system.hardware import GPUS, find_gpu, from_driver, parse_machines, peak_flops, this_machine
from tests import simulated_driver

# What drivers call them -> the row, or None for one that the table does not have.
DRIVER_NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200-NVL",
    "NVIDIA H20": "H20",
    "NVIDIA H20-3e": None,
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA B200": "B200",
    "NVIDIA GB200": "GB200",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB300": "GB300",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA A100 80GB PCIe": "A100-PCIe-80GB",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe-40GB",
    "NVIDIA A100-SXM-64GB": None,
    "NVIDIA A100X": None,
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
    "NVIDIA RTX A1000": None,
    "NVIDIA A10": "A10",
    "NVIDIA A10G": "A10G",
    "NVIDIA L4": "L4",
    "NVIDIA L40": "L40",
    "NVIDIA L40S": "L40S",
    "NVIDIA RTX A6000": "A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX6000Ada",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 3090 Ti": None,
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 4090 D": "RTX4090D",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 5090": "RTX5090",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX-PRO-6000",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX-PRO-6000-Max-Q",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": None,
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI300A": None,
    "AMD Instinct MI325X": "MI325X",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32GB",
    "Tesla V100-SXM2-16GB": None,
    "Tesla P100-PCIE-16GB": "P100-PCIe",
    "Tesla P100-PCIE-12GB": None,
    "Tesla P100-SXM2-16GB": "P100",
    "NVIDIA GeForce RTX 2080 Ti": "RTX2080Ti",
    "NVIDIA A40": "A40",
    "NVIDIA A800 80GB PCIe": "A800-PCIe",
    "NVIDIA A800-SXM4-80GB": "A800",
    "NVIDIA A800-SXM4-40GB": None,
    "NVIDIA GeForce RTX 3060": "RTX3060",
    "NVIDIA GeForce RTX 3080": "RTX3080",
    "NVIDIA GeForce RTX 4070": "RTX4070",
    "NVIDIA GeForce RTX 4080": "RTX4080",
    "NVIDIA GeForce RTX 4080 SUPER": None,
    "NVIDIA GeForce RTX 5070": "RTX5070",
    "NVIDIA GeForce RTX 5070 Ti": "RTX5070Ti",
    "NVIDIA GeForce RTX 5080": "RTX5080",
    "NVIDIA RTX PRO 4500 Blackwell": "RTX-PRO-4500",
    "NVIDIA RTX PRO 5000 Blackwell": "RTX-PRO-5000",
    "NVIDIA GB10": "GB10",
    "NVIDIA H800": "H800",
    "NVIDIA H800 PCIe": "H800-PCIe",
    "AMD Instinct MI350X": "MI350X",
    "AMD Instinct MI355X": "MI355X",
    "NVIDIA L40G": None,
}


@pytest.mark.parametrize("name", DRIVER_NAMES)
def test_what_a_driver_calls_a_gpu_is_recognised(name):
    kind = find_gpu(name)
    assert (kind and kind.name) == DRIVER_NAMES[name]
    if kind:
        assert parse_machines(f"8x{name}").gpu is kind, "a person may write what the driver prints"


@pytest.mark.parametrize(
    ("names", "gpu"),
    [
        ("H100 80GB, h100-sxm5, NVIDIA H100 80 GB HBM3, H100SXM", "H100"),
        ("GB200 NVL72, gb200-nvl72, NVIDIA GB200, GB200-186GB, GB200 192GB", "GB200"),
        ("GB300 NVL72, GB300-288GB, HGX GB300", "GB300"),
        ("B200 192GB, DGX B200, HGX B200, B200-180GB", "B200"),
        ("MI325, mi325x OAM, AMD Instinct MI325X, MI325X-256GB", "MI325X"),
        ("MI350, Instinct MI350X", "MI350X"),
        ("MI355, AMD MI355X", "MI355X"),
        ("A40 PCIe, a-40, A40 48GB", "A40"),
        ("L40 PCIe, NVIDIA L40", "L40"),
        ("Tesla P100, P100-SXM2-16GB", "P100"),
        ("PRO 4500, RTXPRO4500, RTX PRO 4500 32GB", "RTX-PRO-4500"),
        ("pro6000, RTX PRO 6000 Blackwell", "RTX-PRO-6000"),
        ("2080ti, RTX 2080 Ti 11GB", "RTX2080Ti"),
        ("RTX 3060 12GB, GeForce RTX 3060", "RTX3060"),
    ],
)
def test_a_gpu_is_known_by_its_kind_in_many_spellings(names, gpu):
    assert {name: parse_machines(f"2x{name}").gpu.name for name in names.split(", ")} == dict.fromkeys(
        names.split(", "), gpu
    )


def test_every_row_has_a_name_of_a_driver_and_its_own_name():
    assert {name for name in DRIVER_NAMES.values() if name} == {gpu.name for gpu in GPUS}
    assert [find_gpu(gpu.name).name for gpu in GPUS] == [gpu.name for gpu in GPUS]
    assert len(GPUS) >= 20


def test_peaks_follow_from_clock_and_units():
    """Tensor cores x FLOPs of a clock x boost clock, from the architecture white papers."""
    by_hand = {
        "V100-32GB": 640 * 128 * 1530e6,
        "A100-80GB": 432 * 512 * 1410e6,
        "H100": 528 * 1024 * 1830e6,
        "RTX3090": 328 * 128 * 1695e6,
        "RTX4090": 512 * 128 * 2520e6,
        "RTX-PRO-6000": 752 * 256 * 2617e6,
        "MI300X": 1216 * 512 * 2100e6,
        "RTX5090": 680 * 128 * 2407e6,
        "A6000": 336 * 256 * 1800e6,
        "A40": 336 * 256 * 1740e6,
        "L40": 568 * 128 * 2490e6,
        "RTX6000Ada": 568 * 256 * 2505e6,
        "RTX2080Ti": 544 * 64 * 1545e6,
        "RTX3060": 112 * 128 * 1777e6,
        "RTX3080": 272 * 128 * 1710e6,
        "RTX4070": 184 * 128 * 2475e6,
        "RTX4080": 304 * 128 * 2505e6,
        "RTX4090D": 456 * 128 * 2520e6,
        "RTX5070": 192 * 128 * 2512e6,
        "RTX5070Ti": 280 * 128 * 2452e6,
        "RTX5080": 336 * 128 * 2617e6,
        "RTX-PRO-4500": 328 * 256 * 2617e6,
        "RTX-PRO-6000-Max-Q": 752 * 256 * 2288e6,
        "MI325X": 1216 * 512 * 2100e6,
        "MI350X": 1024 * 1024 * 2200e6,
        "MI355X": 1024 * 1024 * 2400e6,
    }
    for name, expected in by_hand.items():
        assert find_gpu(name).half_flops == pytest.approx(expected, rel=0.01), name


def test_reported_memory_is_what_was_sold_or_a_sixteenth_less():
    for gpu in GPUS:
        assert 0.93 < gpu.memory_gib / gpu.sold_gb < 1.03, gpu.name
        assert gpu.usable_gib < gpu.memory_gib


def test_torch_gets_no_more_than_we_say():
    """GiB in torch's out-of-memory messages, from public issues; ours is less, by half a GiB at most."""
    capacities = {"T4": 14.75, "V100-32GB": 31.75, "A100-40GB": 39.50, "A100-80GB": 79.25}
    capacities |= {"RTX4090": 23.64, "RTX5090": 31.37, "L40S": 44.40, "MI300X": 191.69}
    for name, capacity in capacities.items():
        assert 0 <= capacity - find_gpu(name).usable_gib <= 0.5, name


def test_pcie_rates_follow_from_the_lanes():
    for generation, transfers in {3: 8e9, 4: 16e9, 5: 32e9}.items():
        assert hardware.PCIE_X16[generation] == pytest.approx(transfers * 16 * 128 / 130 / 8, rel=1e-3)


def test_the_peak_of_a_gpu_without_bf16_is_none():
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Tesla V100-SXM2-32GB") is None and peak_flops("NVIDIA RTX A1000") is None


@pytest.mark.parametrize(
    ("text", "num_machines", "gpus_each", "gpu", "usable"),
    [
        ("8xH100", 1, 8, "H100", 78.9),
        ("2x8xH100", 2, 8, "H100", 78.9),
        ("H200", 1, 1, "H200", 139.6),
        ("4xA100-40GB", 1, 4, "A100-40GB", 39.2),
        ("8xa100", 1, 8, "A100-80GB", 79.2),
        ("2 x RTX 4090", 1, 2, "RTX4090", 23.2),
        ("8 H100", 1, 8, "H100", 78.9),
        ("4 4090", 1, 4, "RTX4090", 23.2),
        ("8 x 80 GB", 1, 8, None, 78.9),
        ("1x4090", 1, 1, "RTX4090", 23.2),
        ("8x80GB", 1, 8, None, 78.9),
        ("1x24GB", 1, 1, None, 21.7),
        ("24gb", 1, 1, None, 21.7),
        ("2x8x64GB", 2, 8, None, 59.2),
        ("cpu", 1, 0, None, None),
        ("16xH100", 2, 8, "H100", 78.9),
        ("64x80GB", 8, 8, None, 78.9),
        ("1x16xH100", 1, 16, "H100", 78.9),
        ("1x12xH100", 1, 12, "H100", 78.9),
        ("RTX PRO 6000", 1, 1, "RTX-PRO-6000", 94.8),
        ("8xmi300x", 1, 8, "MI300X", 191.2),
        ("RTX 6000 Ada", 1, 1, "RTX6000Ada", 47.2),
        ("rtx-4090", 1, 1, "RTX4090", 23.2),
        ("4090D", 1, 1, "RTX4090D", 23.2),
        ("2x5070Ti", 1, 2, "RTX5070Ti", 15.2),
        ("DGX Spark", 1, 1, "GB10", 119.0),
        ("dgx-spark", 1, 1, "GB10", 119.0),
        ("8xH100-PCIe", 1, 8, "H100-PCIe", 78.9),
        ("RTX PRO 6000 Max-Q", 1, 1, "RTX-PRO-6000-Max-Q", 94.8),
        ("RTXPRO6000MAXQ", 1, 1, "RTX-PRO-6000-Max-Q", 94.8),
        ("18x4xGB200", 18, 4, "GB200", 184.3),
    ],
)
def test_machines_are_read(text, num_machines, gpus_each, gpu, usable):
    machines = parse_machines(text)
    assert (machines.num_machines, machines.gpus_each) == (num_machines, gpus_each)
    assert (machines.gpu and machines.gpu.name) == gpu
    assert machines.usable_gib == (usable and pytest.approx(usable, abs=0.06))
    assert machines.num_gpus == num_machines * gpus_each


def test_more_gpus_than_a_machine_has_are_machines_of_8_and_it_is_said():
    assert parse_machines("16xH100").notes == ["16xH100 is taken for 2 machines of 8; one machine with 16 is 1x16xH100"]
    assert parse_machines("16xH100").text == "2x8xH100"
    assert parse_machines("64xH100").notes == ["64xH100 is taken for 8 machines of 8"]
    assert parse_machines("8xH100").notes == parse_machines("2x8xH100").notes == parse_machines("1x16xH100").notes == []


def test_of_an_amd_gpu_it_is_said_that_nothing_was_tried():
    (note,) = parse_machines("8xMI300X").notes
    assert "nothing of this project was tried on ROCm" in note
    assert not any(gpu.is_amd for gpu in GPUS if gpu.sheet.startswith("NVIDIA"))
    assert all("NVIDIA" in gpu.sheet or gpu.is_amd for gpu in GPUS)


def test_a_size_alone_has_no_speed_and_says_so():
    assert parse_machines("8xH100").no_speed is None
    assert "8xH100" in parse_machines("8x80GB").no_speed
    assert "1xRTX4090" in parse_machines("1x24GB").no_speed
    assert parse_machines("cpu").no_speed
    assert "nobody states the speed of a P100" in parse_machines("P100").no_speed


def test_what_a_kind_of_machine_has_that_no_figure_tells_is_a_note():
    assert "one memory for GPU and CPU" in parse_machines("DGX Spark").notes[0]
    assert "--fabric 7200" in parse_machines("18x4xGB200").notes[0]
    assert not parse_machines("18x4xGB200", fabric_gbits=7200).notes and not parse_machines("4xGB200").notes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8xH10O", "did you mean H100?"),
        ("8xB310", "did you mean B300?"),
        ("8xB100", "did you mean B200?"),
        ("L20", "did you mean L40?"),
        ("A100-64GB", "did you mean A100-"),
        ("8xpotato", "known here: "),
        ("4080 SUPER", "did you mean RTX4080, of 16 GB?"),
        ("RTX 3080 12GB", "did you mean RTX3080, of 10 GB?"),
        ("8H100", "write the number of GPUs first, as in 8xH100"),
        ("H100 x 8", "write the number of GPUs first, as in 8xH100"),
        ("8xTPU v5e", "TPU-v5e is a TPU of Google; training here needs GPUs of NVIDIA, or AMD's"),
        ("google tpu", "is a TPU"),
        ("AWS Trainium2", "is a chip of AWS"),
        ("Intel Gaudi 3", "is a Gaudi of Intel"),
        ("Arc B580", "is a GPU of Intel"),
        ("Apple silicon", "is a chip of Apple"),
        ("v5p", "is a TPU"),
        ("trn1", "is a chip of AWS"),
        ("16xInferentia2", "is a chip of AWS"),
        ("8xGaudi3", "is a Gaudi of Intel"),
        ("M4 Max", "is a chip of Apple"),
        ("Ascend 910B", "is an Ascend of Huawei"),
        ("910B", "is an Ascend of Huawei"),
        ("0xH100", "0 GPUs to a machine"),
        ("0x8xH100", "0 machines"),
        ("8x80TB", "write its GB"),
        ("8x8000GB", "no GPU has 8000 GB"),
        ("8x0GB", "no GPU has 0 GB"),
        ("-1", "not understood"),
        ("", "not understood"),
        ("8", "write its GB"),
        ("12xH100", "how are 12 GPUs spread? Most machines have up to 8; write machines x GPUs, as in 3x4xH100; one"),
        ("12x80GB", "one machine with 12 is 1x12x80GB"),
        ("13xH100", "as in 13x1xH100"),
        ("100xH100", "as in 25x4xH100"),
        ("90000xH100", "write 1 to 16"),
        ("2x17xH100", "17 GPUs to a machine"),
        (f"{'9' * 40}xH100", "write 1 to 16"),
        ("9000x8xH100", "write 1 to 8192"),
        ("8xH100; rm -rf /", "not understood"),
    ],
)
def test_what_no_machine_has_is_refused(text, says):
    with pytest.raises(RecipeError) as caught:
        parse_machines(text)
    (mistake,) = caught.value.mistakes
    assert mistake.startswith(f"--gpus {text}:") and says in mistake


def test_the_fabric_is_as_given_or_a_range():
    assert parse_machines("2x8xH100").fabric_gbits == (100, 400)
    assert parse_machines("2x8xH100", fabric_gbits=200).fabric_gbits == (200, 200)
    (note,) = parse_machines("8xH100", fabric_gbits=200).notes
    assert note.startswith("--fabric is of messages between machines") and not parse_machines("8xH100").notes
    with pytest.raises(RecipeError, match="--fabric is -1"):
        parse_machines("2x8xH100", fabric_gbits=-1)


def gpu(index: int, name: str, mib: int = 0, uuid: str = "") -> InstalledGpu:
    return InstalledGpu(index=index, name=name, total_bytes=mib << 20, uuid=uuid)


H100, L4 = ("NVIDIA H100 80GB HBM3", 81559), ("NVIDIA L4", 23034)


def test_the_drivers_list_is_read():
    installed = simulated_driver.read(
        f"count 2\ngpu.0.name NVIDIA L4\ngpu.1.name NVIDIA A100\ngpu.0.uuid GPU-0a\ngpu.1.uuid GPU-1b\n"
        f"gpu.0.memory.total {23034 << 20}\ngpu.1.memory.total error 3\ngpu.1.pcie.width 8\n"
    ).gpus
    assert [(card.index, card.uuid, card.name, card.total_bytes >> 20) for card in installed] == [
        (0, "GPU-0a", "NVIDIA L4", 23034),
        (1, "GPU-1b", "NVIDIA A100", 0),
    ]
    assert installed[1].pcie_generation is None and installed[1].pcie_width == 8


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ("init hang", "the NVIDIA driver does not answer within 2 s"),
        ("count 2\ngpu.*.name hang", "the NVIDIA driver does not answer within 2 s"),
        ("init error 18", "the NVIDIA driver fails: RM has detected an NVML/RM version mismatch; reboot"),
        ("count 2\ngpu.1.handle error 15", "the NVIDIA driver fails: GPU is lost"),
    ],
)
def test_a_driver_that_does_not_answer_is_an_error_in_time(facts, says):
    with pytest.raises(RecipeError, match=says):
        simulated_driver.read(facts, seconds=2)


FOUR = [gpu(i, *H100, uuid=f"GPU-{i}a{i}b") for i in range(4)]


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        (" 3 , 1", [3, 1]),
        ("0,9,1", [0]),
        ("9,0", []),
        ("0,-1,1", [0]),
        ("0,", [0]),
        ("1,1", []),
        ("0,GPU-1a1b", [0]),
        ("GPU-3a,GPU-0a0b", [3, 0]),
        ("GPU-", []),  # fits all
        ("GPU-9,GPU-0a", []),
        ("GPU-1a1b,GPU-1a", []),
    ],
)
def test_visible_gpus_are_those_that_cuda_and_torch_see(visible, seen, monkeypatch):
    assert [gpu.index for gpu in gpus.visible_gpus(FOUR, visible)] == seen
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parsed = torch.cuda._parse_visible_devices()
    if parsed and isinstance(parsed[0], str):
        parsed = torch.cuda._transform_uuid_to_ordinals(parsed, [card.uuid for card in FOUR])
    assert list(itertools.takewhile(lambda index: index < len(FOUR), parsed)) == seen
    assert [gpu.index for gpu in gpus.visible_gpus(FOUR)] == seen


def test_uuids_count_one_each_where_nobody_tells_whose_they_are_and_slices_are_one():
    unnamed = [InstalledGpu(index=i) for i in range(2)]
    assert len(gpus.visible_gpus(unnamed, "GPU-7,GPU-8,GPU-9")) == 2
    (slice,) = gpus.visible_gpus(FOUR, "MIG-1234,MIG-5678")
    assert slice.total_bytes == 0


def test_the_machine_is_what_its_driver_tells():
    machines = from_driver([gpu(0, *H100), gpu(1, *H100)], host_gib=2000)
    assert (machines.text, machines.gpus_each, machines.gpu.name, machines.host_gib) == ("2xH100", 2, "H100", 2000)
    assert machines.usable_gib == pytest.approx(81559 / 1024 - 0.75)
    assert from_driver([]).text == "cpu"


def test_of_different_gpus_the_smallest_counts_and_no_speed_is_known():
    machines = from_driver([gpu(0, *H100), gpu(1, *L4)])
    assert machines.gpu is None and machines.usable_gib < 22 and machines.no_speed


def test_hidden_gpus_do_not_count(monkeypatch):
    driver = Driver(gpus=[gpu(0, *L4), gpu(1, *H100), gpu(2, *L4)])
    monkeypatch.setattr(hardware, "read_driver", lambda: driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert this_machine().text == "1xH100"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,9,1")
    assert this_machine().text == "1xL4"


def test_a_driver_that_does_not_tell_is_an_error(monkeypatch):
    monkeypatch.setattr(hardware, "read_driver", lambda: Driver(gpus=[InstalledGpu(index=i) for i in range(8)]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(RecipeError, match="write --gpus 8xH100"):
        this_machine()


def test_this_machine_has_memory():
    if machine.num_gpus() == 0:
        assert this_machine().gpus_each == 0
    total = re.search(r"MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    assert this_machine().host_gib == pytest.approx(int(total[1]) / 2**20, rel=0.01)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_what_the_user_configured_of_the_allocator_stays(variable: str):
    for given in ("expandable_segments:False", ""):
        environment = {variable: given}
        machine.expand_segments(environment)
        assert environment == {variable: given} and machine.allocator_settings(environment) == given
    environment = {}
    machine.expand_segments(environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
