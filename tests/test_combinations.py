"""Every row of the table of refused combinations is refused, and its page is the table's. No process starts."""

from pathlib import Path

import pytest

from cookbook.commands.cli import main
from cookbook.start.refusals import combinations, page
from cookbook.start.run_plan import load_pair, make_plan
from cookbook.system.files import RecipeError
from tests.conftest import RECIPE, ROOT

LORA, DORA, QLORA = (f"adapter={{name: {name}}}" for name in ("lora", "dora", "qlora"))
HEAD = "adapter={name: lora, modules_to_save: [lm_head]}"
DPO = "objective={name: dpo}"
CLASHES = {
    "mixed_precision: fp16 without a GPU": (["mixed_precision=fp16"], "ddp", 0),
    "mixed_precision: fp16 with tensor parallel": (["mixed_precision=fp16"], "tp", 2),
    "mixed_precision: fp16 with pipeline parallel": (["mixed_precision=fp16"], "pp", 2),
    "mixed_precision: fp16 with expert parallel": (["mixed_precision=fp16"], "fsdp2_ep", 4),
    "mixed_precision: fp8 without a GPU": (["mixed_precision=fp8"], "ddp", 0),
    "mixed_precision: fp8 with an adapter": (["mixed_precision=fp8", LORA], "ddp", 2),
    "mixed_precision: fp8 with ZeRO-3": (["mixed_precision=fp8"], "zero3", 2),
    "mixed_precision: fp8 with tensor parallel": (["mixed_precision=fp8"], "tp", 2),
    "mixed_precision: fp8 with FSDP2 over pipeline or expert parallel": (["mixed_precision=fp8"], "pp_fsdp2", 4),
    "optim.gradient_dtype with communication_data_type in the JSON": (["optim.gradient_dtype=bf16"], "zero1", 0),
    "adapter.name: dora or qlora with tensor parallel": ([DORA], "tp", 0),
    "adapter.name: dora or qlora with FSDP2 over pipeline or expert parallel": ([DORA], "pp_fsdp2", 0),
    "adapter.modules_to_save with tensor parallel, or FSDP2 over pipeline or expert parallel": ([HEAD], "tp", 0),
    "objective.name: reward, classify or regress and an adapter, with tensor parallel, or FSDP2 over pipeline or "
    "expert parallel": (
        ["objective={name: reward}", "adapter={name: lora}"],
        "tp",
        0,
    ),
    "adapter.name: qlora with FSDP1": ([QLORA], "fsdp1", 0),
    "adapter.name: qlora with weights on NVMe": ([QLORA], "zero3_nvme", 0),
    "model.gradient_checkpointing: selective with ZeRO-3": (["model.gradient_checkpointing=selective"], "zero3", 0),
    "model.gradient_checkpointing: offload with model.compile": (
        ["model.gradient_checkpointing=offload", "model.compile=true"],
        "ddp",
        0,
    ),
    "model.compile with ZeRO-3": (["model.compile=true"], "zero3", 0),
    "model.compile with sequence parallel": (["model.compile=true"], "fsdp2_sp", 0),
    "model.liger_kernels on GPUs": (["model.liger_kernels=true"], "ddp", 2),
    "model.compile with FSDP2 over pipeline parallel": (["model.compile=true"], "pp_fsdp2", 0),
    "model.compile with expert parallel": (["model.compile=true"], "fsdp2_ep", 0),
    "model.compile with tensor parallel": (["model.compile=true"], "tp", 0),
    "optim.name: adamw_8bit with optimizer state on NVMe": (
        ["optim={name: adamw_8bit, learning_rate: 1e-3}"],
        "zero3_nvme",
        0,
    ),
    "optim.name: muon with FSDP1": (["optim={name: muon, learning_rate: 1e-3}"], "fsdp1", 0),
}
BESIDE = [
    ([DPO], "ddp"),
    (["optim.gradient_dtype=bf16"], "fsdp2_ep"),
    ([LORA], "zero3_sp"),
    ([DPO], "ddp_sp"),
    ([QLORA], "pp"),
    ([DPO], "pp"),
    (["model.liger_kernels=true"], "pp"),
    (["model.compile=true"], "pp"),
    ([LORA], "fsdp1"),
    ([LORA], "tp"),
    ([LORA], "ddp_tp"),
    ([LORA], "pp_tp"),
    ([LORA], "hsdp_tp"),
    ([LORA], "pp_tp_fsdp2"),
    ([LORA, "model.new_tokens=[<a>]"], "fsdp2_ep"),
    ([HEAD], "fsdp2"),
    ([DPO], "pp_tp"),
    ([DPO], "hsdp_tp"),
    ([DPO], "pp_tp_fsdp2"),
    ([QLORA], "fsdp2"),
    ([QLORA], "zero3_offload"),
    ([LORA], "zero3_nvme"),
    (["optim={name: muon, learning_rate: 1e-3}"], "fsdp2"),
    (["optim={name: adamw_8bit, learning_rate: 1e-3}"], "zero3_offload"),
    (["model.gradient_checkpointing=selective"], "zero2"),
    (["model.gradient_checkpointing=true"], "zero3"),
    (["model.gradient_checkpointing=offload"], "zero3"),
    (["model.gradient_checkpointing=true", "model.compile=true"], "ddp"),
    (["model.compile=true"], "zero2"),
    (["model.compile=true"], "fsdp2"),
    (["optim.gradient_dtype=bf16"], "zero1"),
]


def plan(assignments: list[str], strategy: str, num_gpus: int):
    micro = ["batch.micro_batch_size=2"]
    name = str(ROOT / "recipes/olmoe_1b_7b/sft.yaml") if strategy == "fsdp2_ep" else RECIPE
    recipe, loaded = load_pair(Path(name), assignments + micro, Path(f"accelerate_configs/{strategy}.yaml"))
    count = max(2, loaded.written_mesh.num_processes)
    return make_plan(recipe, loaded, num_processes=count, num_gpus=num_gpus, recipe_name=name)


def test_every_row_has_a_clash_here():
    assert [row.what for row in combinations()] == list(CLASHES)


@pytest.mark.parametrize("row", combinations(), ids=lambda row: row.what)
def test_a_clash_is_refused_with_the_way_out(book, row):
    book.edit(
        "ds_configs/zero1.json", ('"zero_optimization"', '"communication_data_type": "fp32",\n  "zero_optimization"')
    )
    with pytest.raises(RecipeError) as caught:
        plan(*CLASHES[row.what])
    (mistake,) = caught.value.mistakes
    assert row.what in mistake and row.why in mistake and row.way_out in mistake


@pytest.mark.parametrize(("assignments", "strategy"), BESIDE)
def test_what_stands_beside_a_clash_is_fine(book, assignments: list[str], strategy: str):
    assert plan(assignments, strategy, 0).num_processes >= 2


def test_check_refuses_it_with_exit_code_2(book, capsys):
    book.edit(
        RECIPE,
        ("accelerate_configs/ddp.yaml", "accelerate_configs/tp.yaml"),
        ("objective:", f"{DORA.replace('=', ': ')}\nobjective:"),
    )
    assert main(["check", RECIPE]) == 2
    assert "dora or qlora with tensor parallel" in capsys.readouterr().err


def test_the_page_is_that_of_the_table():
    assert (ROOT / "docs/combinations.md").read_text() == page()
