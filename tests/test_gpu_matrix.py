"""Protects the promise on GPUs: every strategy has the curve of one process, in each precision, padded and packed.

On simulated GPUs, whose numbers are real; `make test-gpu` runs the same on real ones. Bands are stated below.

python -m pytest -q -m "slow or not slow" tests/test_gpu_matrix.py
"""

import pytest

from tests.curves import Lab
from tests.experts import experts
from tests.gpu_runs import REAL, GpuLab, GpuRun
from tests.step_messages import assert_sends_what_is_forecast
from tests.test_equivalence import ADAMW_LOSS, ADAMW_NORM, DISTRIBUTED, NVME_MODEL
from tests.test_equivalence_features import FAMILIES

PRECISIONS = ("'no'", "bf16", "fp16")
PACKED = {"data.packing": "true"}
REFUSED = {(name, "fp16") for name in ("tp", "ddp_tp", "fsdp2_tp", "hsdp_tp", "pp", "pp_fsdp2", "pp_tp", "pp_tp_fsdp2")}
"""By cookbook/start/refusals.py."""

# Loss (absolute) and gradient norm (relative) over three steps of AdamW. Float32 as on the CPU. In 16 bits, autocast
# rounds the inputs of each product (single, ddp, tp), FSDP and ZeRO round the weights once and every operation after,
# and ZeRO reduces gradients in 16 bits.
BANDS = {"'no'": (ADAMW_LOSS, ADAMW_NORM), "bf16": (5e-3, 5e-3), "fp16": (1e-3, 1e-3)}


def assert_same_curve(run: GpuRun, reference: GpuRun, band: tuple[float, float]) -> None:
    assert len(run.losses) == len(reference.losses) == 3
    loss = max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=True))
    norm = max(abs(a / b - 1) for a, b in zip(run.norms, reference.norms, strict=True))
    pairs = zip(run.evaluations, reference.evaluations, strict=True)
    held_out = max((abs(a[1] - b[1]) for a, b in pairs), default=0.0)
    print(f"{run.folder.name}: loss {loss:.1e}, norm {norm:.1e}, held-out loss {held_out:.1e}")
    assert loss < band[0] and held_out < band[0] and norm < band[1], (loss, norm, held_out)


def settings_for(strategy: str, precision: str, packing: bool) -> dict[str, str]:
    settings = {"mixed_precision": precision} | (PACKED if packing else {})
    return settings | (NVME_MODEL if strategy == "zero3_nvme" else {})


OFTEN = ("fsdp2", "pp", "zero3")


def cases() -> list:
    """Packed in bf16: those of `OFTEN` for `make test`, the others of it and those padded in float32 and
    fp16 for `make test-long`; the rest.
    """
    cases = []
    for strategy in DISTRIBUTED:
        for precision in (precision for precision in PRECISIONS if (strategy, precision) not in REFUSED):
            for packing in (False, True):
                quick = precision == "bf16" and packing
                chosen = precision == ("'no'" if packing else "fp16") and strategy in FAMILIES
                marks = (
                    [pytest.mark.core] * (strategy in OFTEN)
                    if quick
                    else [pytest.mark.slow]
                    if chosen
                    else [pytest.mark.slow, pytest.mark.thorough]
                )
                name = f"{strategy}-{precision.strip(chr(39))}-{'packed' if packing else 'padded'}"
                cases.append(pytest.param(strategy, precision, packing, marks=marks, id=name))
    return cases


@pytest.mark.parametrize(("strategy", "precision", "packing"), cases())
def test_every_strategy_has_the_curve_of_one_gpu(gpu_lab: GpuLab, strategy: str, precision: str, packing: bool):
    settings = settings_for(strategy, precision, packing)
    run = gpu_lab.run(strategy, settings)
    assert run.record["hardware"]["device"] == "cuda"
    assert run.record["strategy"]["precision"] == precision.strip("'")
    assert_same_curve(run, gpu_lab.run("single", settings), BANDS[precision])
    if precision == "bf16" and packing and not REAL:
        assert_sends_what_is_forecast(run, strategy)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "reference"), [("'no'", "single"), ("bf16", "fsdp2")])
def test_expert_parallel_has_the_curve_of_one_gpu(gpu_lab: GpuLab, lab: Lab, precision: str, reference: str):
    """In bf16 that of FSDP2, which rounds where it does, and with each token at all experts: else rounding, which
    differs by processor, sends some tokens to others.
    """
    chosen = {} if precision == "'no'" else {"num_experts_per_tok": 6}
    settings = settings_for("fsdp2_ep", precision, True) | experts(lab, **chosen)
    run = gpu_lab.run("fsdp2_ep", settings)
    assert run.record["hardware"]["device"] == "cuda"
    assert_same_curve(run, gpu_lab.run(reference, settings), BANDS[precision])


def test_every_strategy_file_is_in_the_matrix():
    assert {case.values[0] for case in cases()} == set(DISTRIBUTED)
    assert len(cases()) >= 13 * 6 - 2


@pytest.mark.parametrize("precision", ["'no'", "bf16"])
@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_one_gpu_has_the_curve_of_the_cpu(gpu_lab: GpuLab, precision: str, packing: bool):
    settings = settings_for("single", precision, packing)
    assert_same_curve(gpu_lab.run("single", settings), gpu_lab.run("single", settings, on="cpu"), BANDS[precision])


def test_a_gpu_has_expandable_segments_unless_the_user_chose_and_a_cpu_has_no_such_setting(gpu_lab: GpuLab):
    settings, variable = settings_for("single", "bf16", True), "PYTORCH_CUDA_ALLOC_CONF"
    on_gpu = gpu_lab.run("single", settings).record["hardware"]
    chosen = gpu_lab.run("single", settings, variables={variable: "max_split_size_mb:512"}).record["hardware"]
    on_cpu = gpu_lab.run("single", settings, on="cpu").record["hardware"]
    assert on_gpu["allocator"] == "expandable_segments:True" and chosen["allocator"] == "max_split_size_mb:512"
    assert "allocator" not in on_cpu


@pytest.mark.parametrize("precision", PRECISIONS)
def test_packed_rows_have_the_curve_of_padded_ones(gpu_lab: GpuLab, precision: str):
    padded, packed = (gpu_lab.run("single", settings_for("single", precision, packing)) for packing in (False, True))
    assert_same_curve(packed, padded, BANDS[precision])


@pytest.mark.simulated
@pytest.mark.parametrize("precision", PRECISIONS)
def test_padded_rows_take_the_kernel_without_scores_of_all_by_all(gpu_lab: GpuLab, precision: str):
    run = gpu_lab.run("single", settings_for("single", precision, False))
    kernel = "memory-efficient attention forward" if precision == "'no'" else "flash attention forward"
    assert run.report()["attention"].get(kernel, 0) >= 2 * 2 * 3


def test_another_learning_rate_leaves_the_bands(gpu_lab: GpuLab):
    """The negative control: half the rate of the others."""
    reference = gpu_lab.run("single", settings_for("single", "bf16", True))
    wrong = gpu_lab.run("single", settings_for("single", "bf16", True) | {"optim.learning_rate": "5e-4"})
    assert len(wrong.losses) == 3
    with pytest.raises(AssertionError):
        assert_same_curve(wrong, reference, BANDS["bf16"])


REFUSALS = {
    "host_tensor_in_a_collective": "No backend type associated with device type cpu",
    "strided_tensor_in_a_collective": "Tensors must be contiguous",
    "host_tensor_beside_the_loss": "Expected all tensors to be on the same device",
    "two_processes_on_one_gpu": "Duplicate GPU detected",
    "offsets_of_64_bits": "cu_seqlens must have dtype int32",
    "offsets_that_end_too_soon": "the offsets do not end at the last token",
    "float32_into_flash_attention": "FlashAttention only support fp16 and bf16",
}


@pytest.mark.simulated
@pytest.mark.parametrize("mistake", REFUSALS)
def test_a_mistake_that_the_cpu_lets_pass_is_refused(gpu_lab: GpuLab, mistake: str):
    run = gpu_lab.run("ddp", PACKED, sabotage=mistake, ends=None)
    assert run.codes != [0, 0]
    assert any(REFUSALS[mistake] in run.log(rank) for rank in range(2)), run.log(0)[-2000:]
