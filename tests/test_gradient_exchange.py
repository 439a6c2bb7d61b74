"""optim.gradient_dtype: gradients cross processes in 16 bits under every engine, in a band, for half the bytes; and DDP
has the buckets of its file.

What is sent is counted by the kernel, in the sockets of each process. Run alone:
python -m pytest -q -m "slow or not slow" tests/test_gradient_exchange.py
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cookbook.config.strategy import load_strategy
from cookbook.forecast.costs.flops import ModelSizes, Step
from cookbook.forecast.costs.traffic import transfers
from cookbook.system import replaced
from cookbook.training.engine import fsdp2
from tests.curves import ADAMW, ROOT, SGD, Curve, Lab, distance, processes_of
from tests.gpu_runs import GpuLab
from tests.test_equivalence import ADAMW_LOSS, ADAMW_NORM, NVME_MODEL
from tests.test_gpu_matrix import BANDS, assert_same_curve

# 20 steps of SGD, measured: see docs/equivalence.md. Below ROUNDED nothing was rounded: that is the limit of float32.
LOSS, NORM, ROUNDED = 3e-4, 5e-3, 2e-6
SIXTEEN_BITS = "sums_over_micro_batches_in_16_bits"
BF16 = {"optim.gradient_dtype": "bf16"}
ONE_STEP = {"run.max_steps": "1", "schedule.warmup_steps": "0", "data.eval": "null"}


def seldom(*names: str) -> list:
    return [pytest.param(name, marks=[pytest.mark.slow, pytest.mark.thorough]) for name in names]


ENGINES = ["ddp", "fsdp2", "zero3"]
STRATEGIES = [*ENGINES, *seldom("fsdp1", "zero1", "zero2", "hsdp", "ddp_tp", "fsdp2_tp", "pp", "pp_fsdp2")]
STRATEGIES += seldom("hsdp_tp", "pp_tp_fsdp2")


def run(lab: Lab, strategy: str, settings: dict[str, str], sabotage: str = "bytes_on_the_wire") -> Curve:
    processes = 4 if strategy == "pp" else processes_of(strategy)  # two copies of two stages
    smaller = {"batch.micro_batch_size": "2"} if strategy.startswith("hsdp") else {}  # two a step, as under the others
    return lab.run(strategy, smaller | settings, processes=processes, sabotage=sabotage)


def sent(curve: Curve) -> tuple[float, int]:
    """Bytes that the first process sends in a step, and the parameters of the model."""
    printed = (curve.folder / "output.txt").read_text()
    rows = [[int(word) for word in row] for row in re.findall(r"SENT (\d+) 0 (\d+) (\d+) (\d+)", printed)]
    counts = {step: count for step, count, _, _ in rows}
    assert len(counts) == 20
    return (counts[6] - counts[2]) / 4, rows[0][2]


def forecast(strategy: str, num_parameters: int, processes: int, dtype: str | None) -> float:
    """Bytes that a process sends by the ledger."""
    sizes = ModelSizes(num_parameters=num_parameters, num_trained=num_parameters, num_matrix=1, num_matrix_trained=1)
    step = Step(num_tokens=0, num_labelled=0, length=1, micro_batches=2, precision="no", gradient_dtype=dtype)
    messages = transfers(load_strategy(Path(f"accelerate_configs/{strategy}.yaml")), sizes, step, processes)
    # gloo reduces and scatters by an all-reduce.
    return sum(
        message.sent * (2 if message.kind == "reduce-scatter" else 1)
        for message in messages
        if "gradients" in message.what
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_are_exchanged_in_bf16_in_a_band_of_one_process(lab: Lab, strategy: str):
    apart = distance(run(lab, strategy, BF16), lab.run("single", SGD))
    print(strategy, apart)
    assert ROUNDED < apart.loss < LOSS and ROUNDED < apart.norm < NORM, apart


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_half_the_bytes_of_the_gradients_are_sent(lab: Lab, strategy: str, monkeypatch):
    """The negative control is the same run without the key."""
    monkeypatch.chdir(ROOT)
    equal_stages = {"model.from_scratch.tie_word_embeddings": "false"} if strategy.startswith("pp") else {}
    _saves_half(lab, strategy, equal_stages)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", *seldom("fsdp1", "ddp", "zero2", "zero3")])
def test_under_bf16_too_only_the_key_rounds_what_is_exchanged_but_by_zero(lab: Lab, strategy: str, monkeypatch):
    """accelerate's default for FSDP2 would reduce in bf16 as DeepSpeed does (docs/strategies.md)."""
    monkeypatch.chdir(ROOT)
    _saves_half(lab, strategy, {"mixed_precision": "bf16"}, is_low_anyway="zero" in strategy)


def _saves_half(lab: Lab, strategy: str, settings: dict[str, str], *, is_low_anyway: bool = False) -> None:
    rounded, whole = run(lab, strategy, BF16 | settings), run(lab, strategy, settings)
    (few, num_parameters), (many, _) = sent(rounded), sent(whole)
    processes = rounded.record["strategy"]["processes"]
    by_ledger = [forecast(strategy, num_parameters, processes, dtype) for dtype in ("bf16", None)]
    print(strategy, few, many, by_ledger)
    saved = by_ledger[0]
    assert by_ledger[1] == 2 * saved > 0
    assert many - few == (0 if is_low_anyway else pytest.approx(saved, rel=0.01))


@pytest.mark.core
def test_what_ddp_exchanges_in_16_bits_is_a_mean_in_buckets_of_its_files_size(lab: Lab):
    """By the norm of one step, before it is clipped, of one process and of two."""
    file = lab.folder / "buckets_of_50.yaml"
    text = (ROOT / "accelerate_configs/ddp.yaml").read_text()
    file.write_text(f"{text}parallelism_config: {{parallelism_config_ddp_bucket_cap_mb: 50}}\n")
    curve = lab.run(str(file), ONE_STEP | BF16, processes=2)
    norms = [curve.steps[0]["grad_norm"] for curve in (curve, lab.run("single", ONE_STEP))]
    assert ROUNDED < abs(norms[0] / norms[1] - 1) < NORM, norms
    assert "'bucket_cap_mb': 50" in curve.record["strategy"]["DDP"]


@pytest.mark.core
def test_fsdp2_reduces_in_float32_what_it_computes_in_bf16(lab: Lab):
    """accelerate's default would reduce in bf16; what is read of torch's wrapper is in run.json."""
    record = lab.run("fsdp2", ONE_STEP | {"mixed_precision": "bf16"}, processes=2).record["strategy"]
    weights, reductions, _ = record["dtypes of a layer's weights, reductions and output"]
    assert (weights, reductions) == ("bfloat16", "float32")


def test_an_exchange_that_stays_in_float32_is_refused(lab: Lab):
    folder, output = lab.attempt("ddp", BF16, processes=2, sabotage="exchange_left_in_float32")
    assert (folder / "exit_code").read_text() != "0"
    assert "is not what runs" in output and "dtypes of exchanged gradients" in output


@pytest.mark.slow
@pytest.mark.thorough
def test_sums_over_micro_batches_that_wait_for_the_replicas_stay_float32(lab: Lab):
    """FSDP2's own would be rounded at each of them: the curve of one process is farther away."""
    settings = BF16 | {"batch.micro_batch_size": "1"}
    right, wrong = (run(lab, "hsdp", settings, name) for name in ("bytes_on_the_wire", SIXTEEN_BITS))
    assert right.losses != wrong.losses
    reference = lab.run("single", SGD)
    apart, others = distance(right, reference), distance(wrong, reference)
    print(apart, others)
    assert apart.weight < others.weight


def test_a_release_of_torch_that_casts_what_waits_is_kept_from_it(monkeypatch):
    """As torch 2.15 does. The negative control is the same group before."""

    class Group:
        def _prepare_partial_reduce_output(self, params: list, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.ones(sum(sizes)).to(dtype)

    name, Group.__module__ = "_prepare_partial_reduce_output", fsdp2.FSDPParamGroup.__module__
    monkeypatch.setattr(fsdp2, "FSDPParamGroup", Group)
    monkeypatch.setitem(replaced.KNOWN, replaced.place_of(Group, name), {replaced.digest_of(Group, name): ["here"]})
    dtypes = [Group()._prepare_partial_reduce_output([], [3], torch.bfloat16).dtype]
    fsdp2._leave_sums_in_float32.__wrapped__()
    dtypes.append(Group()._prepare_partial_reduce_output([], [3], torch.bfloat16).dtype)
    assert dtypes == [torch.bfloat16, torch.float32]


def test_a_sum_that_was_rounded_ends_the_run():
    """Whatever a release of torch may do to it between two micro-batches."""
    engine = object.__new__(fsdp2.Fsdp2)
    engine.model = torch.nn.Linear(1, 1)
    group = SimpleNamespace(_partial_reduce_output=torch.ones(3), _module_fqn="layers.0")
    engine._keep_sums_in_float32([group])
    group._partial_reduce_output = group._partial_reduce_output.bfloat16()
    with pytest.raises(RuntimeError, match=r"layers\.0 to torch\.bfloat16"):
        engine._keep_sums_in_float32([group])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", *seldom("fsdp1", "fsdp2", "zero2")])
def test_fp16_under_a_loss_scale_stays_in_its_band(gpu_lab: GpuLab, strategy: str):
    settings = {"mixed_precision": "fp16", "optim.gradient_dtype": "fp16"}
    run = gpu_lab.run(strategy, settings)
    assert_same_curve(run, gpu_lab.run("single", {"mixed_precision": "fp16"}), BANDS["fp16"])
    assert "float16" in str(run.record["strategy"])


@pytest.mark.slow
def test_an_overflow_of_the_exchange_skips_the_step_and_halves_the_scale(gpu_lab: GpuLab):
    """The control is the exchange in float32, which goes on at the same scale."""
    settings = {"mixed_precision": "fp16", "loss_scale.initial": str(2**20), "run.max_steps": "12"}
    whole, rounded = (gpu_lab.run("ddp", settings | more).steps for more in ({}, {"optim.gradient_dtype": "fp16"}))
    first = next(i for i, (a, b) in enumerate(zip(whole, rounded, strict=True)) if a["grad_norm"] != b["grad_norm"])
    scale = whole[first]["loss_scale"]
    assert (rounded[first]["loss_scale"], rounded[first + 1]["loss_scale"]) == (scale, scale / 2)
    assert rounded[first]["grad_norm"] is None and whole[first]["grad_norm"] is not None
    assert rounded[-1]["grad_norm"] is not None


def test_buckets_have_the_size_of_the_strategys_file(lab: Lab):
    """And the curve stays. By default the first bucket is smaller; accelerate launches both files."""
    file, key = lab.folder / "buckets.yaml", "parallelism_config_ddp_bucket_cap_mb"
    text = (ROOT / "accelerate_configs/ddp.yaml").read_text()
    file.write_text(f"{text}parallelism_config: {{{key}: 50}}\n")
    settings, sizes = ADAMW | NVME_MODEL, {}
    for name in (str(file), "ddp"):
        curve = lab.run(name, settings, processes=2, launched=True, sabotage="sizes_of_buckets")
        (printed,) = re.findall(r"BUCKETS (.*)", (curve.folder / "output.txt").read_text())
        sizes[name] = printed.split()
        apart = distance(curve, lab.run("single", settings))
        assert apart.loss < ADAMW_LOSS and apart.norm < ADAMW_NORM, apart
    print(sizes)
    assert [len(size) for size in sizes.values()] == [1, 2]
