"""Protects the ledger of costs: explain, doctor, plan and every text give its numbers, and its FLOPs are torch's.

python -m pytest -q tests/test_costs.py
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from cookbook.commands.doctor.storage import sizes
from cookbook.commands.shared import labels
from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.sections import AdapterSection
from cookbook.config.strategy import Strategy, load_strategy
from cookbook.forecast.costs.flops import ModelSizes, Step, attention_flops, sizes_of, work
from cookbook.forecast.costs.inputs import CostInputs, cost_inputs, sketch
from cookbook.forecast.costs.loading import machine_bytes
from cookbook.forecast.costs.per_parameter import PLACES, frozen_shares, messages, shares, states_in_words, total
from cookbook.forecast.costs.states import checkpoint_bytes, states
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.skeleton import skeleton
from cookbook.system.files import RecipeError
from cookbook.system.hardware import parse_machines
from cookbook.training.adapters.insertion import inject
from cookbook.training.models.structure import config_of, find_config
from tests.experts import needs_experts
from tests.turns import others_by_turn

STRATEGIES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
SFT_7B = min(str(path.relative_to(ROOT)) for path in (ROOT / "recipes/qwen25_7b").glob("sft*.yaml"))


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def shipped(name: str) -> Strategy:
    return load_strategy(Path(f"accelerate_configs/{name}.yaml"))


def count_of(strategy: Strategy) -> int:
    """Processes on one machine that any shipped mesh takes."""
    return strategy.num_processes or max(4, strategy.written_mesh.num_processes)


def with_zero(strategy: Strategy, **keys: object) -> Strategy:
    assert strategy.deepspeed is not None
    zero = strategy.deepspeed["zero_optimization"]
    return replace(strategy, deepspeed={**strategy.deepspeed, "zero_optimization": {**zero, **keys}})


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load_recipe(ROOT / SFT_7B)


# One recipe, one answer.


@pytest.mark.parametrize("name", STRATEGIES)
def test_bytes_a_parameter_are_the_bytes_of_the_model(recipe: Recipe, name: str):
    """Explain's bytes, times the parameters, are what plan counts, but for rounding: norms and biases, which stay
    whole or are AdamW's, padding, weights on the border of two parts, and buffers that do not grow with the model. Of a
    pipeline the mean of its stages.
    """
    strategy = shipped(name)
    inputs = cost_inputs(recipe, strategy, count_of(strategy))
    model = skeleton(find_config(recipe.model)[0], recipe)
    numel = sum(weight.num_elements for weight in model.weights)
    stages = [states(model, inputs, stage * inputs.mesh.stage_size) for stage in range(strategy.pp_size)]
    buffers = ("gathered weights", "second copy of the weights")
    on_gpu = [share for share in shares(inputs) if share.what not in buffers]
    gpu = mean(
        held.gpu.total - held.gpu.buffers + max(0, held.gradients_between - held.gpu.gradients) for held in stages
    )
    held = stages[0]
    assert gpu == pytest.approx(total(on_gpu, "GPU") * numel, rel=0.02, abs=0.001 * numel)
    host = held.host.total - (held.host.buffers if name == "zero3_nvme" else 0)
    if name == "zero2_offload":  # its buffer for the largest gradient, in 16 bits
        host -= 2 * max(weight.num_elements for weight in model.weights)
    assert host == pytest.approx(total(shares(inputs), "host") * numel, rel=0.02, abs=0.001 * numel)
    assert held.disk.total == pytest.approx(total(shares(inputs), "disk") * numel, rel=0.02)


@pytest.mark.parametrize(
    "name",
    others_by_turn(
        [name for name in STRATEGIES if not needs_experts(name)],
        ["single", "fsdp2", "zero2_offload", "zero3_offload", "zero3_nvme", "pp_tp_fsdp2"],
    ),
)
def test_doctor_and_plan_ask_for_the_same_memory_of_the_host_and_the_same_disk(recipe: Recipe, name: str):
    strategy = shipped(name)
    each = count_of(strategy)
    machines = parse_machines(f"{each}x80GB")
    run = recipe.run.model_copy(update={"save_every_steps": None, "save_every_minutes": None})
    recipe = with_checkpointing(recipe.model_copy(update={"run": run}), "offload")  # one checkpoint, at the end
    (planned,) = forecast_all(recipe, [strategy], machines, SFT_7B).forecasts
    planned_sizes = sizes(recipe, strategy, each, on_gpus=True)
    assert planned_sizes is not None
    assert planned_sizes.host == pytest.approx(planned.host, rel=0.02)
    assert planned_sizes.nvme == pytest.approx(planned.disk, rel=0.02)
    assert planned_sizes.disk - 2 * 7_615_616_512 == pytest.approx(planned.checkpoint, rel=1e-4)


def test_the_host_memory_of_an_offloaded_7b_by_hand(recipe: Recipe):
    """20 bytes: gradients of 4 and, while they add up, 2; master and two moments; updated weights on their way back."""
    for name, here in (("zero2_offload", 4 + 2 + 12 + 2), ("zero3_offload", 2 + 4 + 2 + 12)):
        inputs = cost_inputs(recipe, shipped(name), 2)
        assert 2 * total(shares(inputs), "host") == here, name


@pytest.mark.parametrize(
    ("targets", "count"),
    # Until something is trained, no gradient goes further back: of a layer's queries, keys, values, gate and up.
    [(["q_proj"], 3), (["o_proj"], 3), (["gate_proj"], 5), (["down_proj"], 5), (None, 0)],
)
def test_matrices_whose_input_needs_no_gradient_by_hand(recipe: Recipe, targets: list[str] | None, count: int):
    adapter = None if targets is None else AdapterSection(name="lora", rank=4, targets=targets)
    config = find_config(recipe.model)[0]
    sizes = sizes_of(config, skeleton(config, recipe.model_copy(update={"adapter": adapter})))
    assert (sizes.first_matrices, sizes.column_matrices) == (count, 28 * 5)


def test_the_first_update_under_ddp_has_its_gradients_twice(recipe: Recipe):
    """In float32 each of all parameters, in the old buckets and the new ones; without DDP there are no buckets."""
    model = skeleton(find_config(recipe.model)[0], recipe)
    for name, count in (("ddp", 2), ("ddp", 1), ("single", 1)):
        held = states(model, cost_inputs(recipe, shipped(name), count), 0)
        assert held.update == (4 * 7_615_616_512 if name == "ddp" else 0), (name, count)


INPUTS_BY_HAND = {
    # Of 28 layers, 2 rows x 1,024 tokens x 3,584 in bf16 are 14.7 MB, for which torch takes 16 MiB.
    "fsdp2": 4 * 28 * 16 * 2**20,
    "zero3": 4 * 28 * 16 * 2**20,
    "ddp": 4 * 28 * 32 * 2**20,  # float32 under autocast
    "fsdp2_sp": 4 * 28 * 8 * 2**20,  # half of the tokens each
    "tp": 4 * 28 * 32 * 2**20,  # whole hidden states on each
    "pp": 2 * (15 * 2 + 13 * 1) * 32 * 2**20,  # 15 and 13 layers; the first stage has begun two micro-batches
}


@pytest.mark.parametrize("name", INPUTS_BY_HAND)
def test_inputs_of_layers_that_wait_on_the_host_by_hand(recipe: Recipe, name: str):
    batch = recipe.batch.model_copy(update={"global_batch_size": 64, "micro_batch_size": 2})
    data = recipe.data.model_copy(update={"max_length": 1024})
    recipe = recipe.model_copy(update={"batch": batch, "data": data})
    kept, waiting = (with_checkpointing(recipe, kind) for kind in (True, "offload"))
    model = skeleton(find_config(recipe.model)[0], recipe)

    def offloaded(other: Recipe, *, on_gpus: bool = True) -> int:
        inputs = cost_inputs(other, shipped(name), 4)
        return machine_bytes(model, inputs, states(model, inputs), 4, hidden=3584, on_gpus=on_gpus)[1]

    assert offloaded(waiting) - offloaded(kept) == INPUTS_BY_HAND[name]
    assert offloaded(waiting, on_gpus=False) == offloaded(kept, on_gpus=False), "on a CPU they are there anyway"


def with_checkpointing(recipe: Recipe, kind: bool | str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"gradient_checkpointing": kind})})


def test_a_label_asks_for_the_host_memory_and_disk_that_the_ledger_counts():
    count = 0
    for path in labels.recipe_files():
        recipe, needs = load_recipe(path), labels.read_needs(labels.read_label(path))
        if needs.host_gb is None or needs.num_gpus is None:
            continue
        strategy = load_strategy(Path(recipe.strategy))
        inputs = cost_inputs(recipe, strategy, needs.num_gpus)
        config, _ = find_config(recipe.model)
        model = skeleton(config, recipe)
        held = states(model, inputs)
        hidden = config.get_text_config().hidden_size
        host, _, disk = machine_bytes(model, inputs, held, needs.num_gpus, hidden=hidden, on_gpus=True)
        assert host / 1e9 <= needs.host_gb, path
        assert disk == 0 or (needs.nvme_gb is not None and disk / 1e9 <= needs.nvme_gb), path
        count += 1
    assert count >= 1


# Texts.

BYTES = re.compile(r"(\d+) bytes a parameter")


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_header_of_a_strategy_gives_the_bytes_of_the_ledger(name: str):
    header = header_of(name)
    strategy = shipped(name)
    assert wrong_bytes(header, strategy) == []
    if strategy.offload_optimizer == "cpu" or name == "fsdp2_offload":
        assert BYTES.search(header), "the host memory is not there"


def header_of(name: str) -> str:
    lines = (ROOT / f"accelerate_configs/{name}.yaml").read_text().splitlines()
    return " ".join(line.removeprefix("# ") for line in lines if line.startswith("#"))


def wrong_bytes(text: str, strategy: Strategy) -> list[str]:
    """Every "N bytes a parameter" that is not what all processes hold of one, on their GPUs or hosts."""
    inputs = CostInputs(strategy=strategy, num_processes=strategy.num_processes or 8, accumulation=2)
    sums = {where: sum(share.num_bytes for share in shares(inputs) if share.where == where) for where in PLACES}
    return [number for number in BYTES.findall(text) if float(number) not in sums.values()]


def test_another_number_in_a_header_would_be_found():
    assert wrong_bytes("the host needs 18 bytes a parameter", shipped("zero3_offload")) == ["18"]
    assert wrong_bytes("the host needs 20 bytes a parameter", shipped("zero3_offload")) == []


def rows(heading: str) -> list[list[str]]:
    """The first table under a heading of docs/strategies.md, without its head."""
    text = (ROOT / "docs/strategies.md").read_text().partition(f"\n## {heading}\n")[2]
    lines = text.partition("\n\n|")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


SHARED = {"D": 8, "M": 4, "T": 2, "L": 2}


def bytes_of_cell(cell: str, num_shards: int) -> float:
    """`2 P + (2 + 12) P/D` -> 3.75 for D = 8; `16 P/(TL)` -> 4 for T = L = 2."""
    terms = re.findall(r"(\d+|\([\d +]+\)) P(?:/\(?([DMSTL]+))?", cell)
    shared = SHARED | {"S": num_shards}
    return sum(
        sum(map(int, re.findall(r"\d+", number))) / math.prod(shared[dimension] for dimension in cut)
        for number, cut in terms
    )


SHARDS = {"hsdp": 4, "hsdp_tp": 2}
"""S of eight processes."""


def wrong_cells(table: list[list[str]]) -> list[str]:
    wrong = []
    for names, gpu, elsewhere in table:
        for name in re.findall(r"`(\w+)`", names):
            strategy = shipped(name)
            count = strategy.num_processes or 8
            inputs = CostInputs(strategy=strategy, num_processes=count, num_local=SHARED["M"], accumulation=2)
            totals = [total(shares(inputs), where) for where in PLACES]
            cells = [bytes_of_cell(cell, SHARDS.get(name, 0)) for cell in (gpu, elsewhere)]
            if cells != pytest.approx([totals[0], totals[1] + totals[2]]):
                wrong.append(name)
    return wrong


def test_the_table_of_memory_is_the_ledgers():
    table = rows("Memory")
    assert {name for row in table for name in re.findall(r"`(\w+)`", row[0])} == set(STRATEGIES)
    assert wrong_cells(table) == []
    assert wrong_cells([["`zero1`", "2 P + 2 P/D + 12 P/D", ""], ["`zero2_offload`", "2 P", "18 P/D"]]) == [
        "zero1",
        "zero2_offload",
    ]


def times_of_cell(cell: str, accumulation: int) -> dict[str, int]:
    """`2 A gathers, one all-reduce` -> how often each comes."""
    counts = {"all-gather": 0, "reduce-scatter": 0, "all-reduce": 0}
    kinds = {"gather": "all-gather", "reduction": "reduce-scatter", "all-reduce": "all-reduce"}
    for number, each, kind in re.findall(r"(?:\b(one|\d+) )?(?:\b(A) )?(gather|reduction|all-reduce)s?\b", cell):
        counts[kinds[kind]] += (1 if number in ("one", "") else int(number)) * (accumulation if each else 1)
    return counts


def test_the_table_of_communication_is_the_ledgers():
    table = rows("Communication")
    assert {name for row in table for name in re.findall(r"`(\w+)`", row[0])} == set(STRATEGIES)
    for names, full in table:
        cell = full.partition("; activations")[0]  # which are no parameters
        for name in re.findall(r"`(\w+)`", names):
            strategy = shipped(name)
            count = strategy.num_processes or 8
            inputs = CostInputs(strategy=strategy, num_processes=count, num_local=SHARED["M"], accumulation=3)
            times = {"all-gather": 0.0, "reduce-scatter": 0.0, "all-reduce": 0.0}
            for message in messages(inputs):
                times[message.kind] += message.times
            assert times_of_cell(cell, 3) == times, name


def test_the_formula_of_host_memory_beside_nvme_is_the_ledgers():
    """Gradients of all, and for each process buffers of the optimizer, of weights, and room for new weights."""
    text = re.sub(r"\s+", " ", (ROOT / "docs/strategies.md").read_text())
    written = re.search(r"For 70\.6e9 parameters on 8 GPUs that is 141 \+ 8 x \(16 \+ 1\.3 \+ 16\) = (\d+) GB", text)
    assert written is not None
    llama = {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    llama |= {"num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False}
    model = sketch(llama, 70_553_706_496)
    assert sum(weight.num_elements for weight in model.weights) == pytest.approx(70_553_706_496, rel=1e-6)
    held = states(model, CostInputs(strategy=shipped("zero3_nvme"), num_processes=8, accumulation=2))
    assert 8 * held.host.total / 1e9 == pytest.approx(float(written[1]), rel=0.03)


# hpZ: ZeRO++'s second copy of the weights inside a machine.


def test_hpz_costs_memory_and_lowers_the_traffic_between_machines():
    """Wang et al. 2023 (arXiv 2306.10209), section 3.2: 2 bytes over the GPUs of a machine."""
    plain = CostInputs(strategy=shipped("zero3"), num_processes=16, accumulation=2)
    hpz = replace(plain, strategy=with_zero(plain.strategy, zero_hpz_partition_size=8))
    assert total(shares(hpz), "GPU") == pytest.approx(total(shares(plain), "GPU") + 2 / 8)
    assert "second copy of the weights 0.25" in states_in_words(hpz, "GPU")
    between = {
        key: sum(message.over_links(8)[1] for message in messages(inputs))
        for key, inputs in (("plain", plain), ("hpz", hpz))
    }
    # Gathers of 2 bytes: four across machines in two micro-batches, or the first one alone; reductions as before.
    assert between["plain"] == pytest.approx((4 * 2 + 2 * 2) * 15 / 16)
    assert between["hpz"] == pytest.approx((1 * 2 + 2 * 2) * 15 / 16)
    assert sum(message.volume for message in messages(hpz)) == sum(message.volume for message in messages(plain))
    by_itself = replace(plain, strategy=shipped("zero3_hpz"), num_local=8)
    assert shares(by_itself) == shares(hpz) and messages(by_itself) == messages(hpz)


def test_hpz_beside_offloaded_weights_lies_on_the_host_and_beside_nvme_is_refused(tmp_path: Path):
    offloaded = with_zero(shipped("zero3_offload"), zero_hpz_partition_size=8)
    plain, hpz = (
        total(shares(CostInputs(strategy=strategy, num_processes=16)), "host")
        for strategy in (shipped("zero3_offload"), offloaded)
    )
    assert hpz == pytest.approx(plain + 2 / 8)
    for name in ("accelerate_configs/zero3_nvme.yaml", "ds_configs/zero3_nvme.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        text = (ROOT / name).read_text().replace('"stage": 3,', '"stage": 3, "zero_hpz_partition_size": 2,')
        (tmp_path / name).write_text(text.replace("ds_configs/", f"{tmp_path}/ds_configs/"))
    with pytest.raises(RecipeError, match="zero_hpz_partition_size"):
        load_strategy(tmp_path / "accelerate_configs/zero3_nvme.yaml")


def test_a_checkpoint_is_twelve_bytes_a_parameter_under_adamw(recipe: Recipe):
    model = skeleton(find_config(recipe.model)[0], recipe)
    assert checkpoint_bytes(model, recipe) == 12 * 7_615_616_512


def test_a_frozen_weight_costs_nothing_but_itself_where_gradients_are_its_own():
    lora = {
        name: CostInputs(strategy=shipped(name), num_processes=8, adapter=AdapterSection(name="lora"))
        for name in ("fsdp2", "fsdp1")
    }
    assert [total(frozen_shares(inputs), "GPU") for inputs in lora.values()] == [2 / 8, (4 + 4) / 8]
    assert frozen_shares(replace(lora["fsdp2"], adapter=None)) == []


def test_the_table_of_adapters_is_the_ledgers():
    text = (ROOT / "docs/adapters.md").read_text()
    cells = {
        ("bf16", "fsdp2"): r"`lora`, `dora` under bf16 \| ([\d.]+) \| ([\d.]+)",
        ("no", "fsdp2"): r"`lora`, `dora` in float32 \| ([\d.]+) \| ([\d.]+)",
        ("bf16", "fsdp1"): r"`lora`, `dora` under `fsdp1` \| ([\d.]+) \| ([\d.]+)",
        ("bf16", "zero3"): r"`lora`, `dora` under `zero3` and bf16 \| ([\d.]+) \| ([\d.]+)",
    }
    for (precision, name), row in cells.items():
        inputs = CostInputs(
            strategy=shipped(name), num_processes=8, adapter=AdapterSection(name="lora"), mixed_precision=precision
        )
        written = re.search(row, text)
        assert written is not None, row
        sizes = [8 * total(of_part(inputs), "GPU") for of_part in (frozen_shares, shares)]
        assert [float(number) for number in written.groups()] == sizes, name
    qlora = CostInputs(strategy=shipped("ddp"), num_processes=8, adapter=AdapterSection(name="qlora"))
    assert total(frozen_shares(qlora), "GPU") == pytest.approx(0.5 + 1 / 64, abs=0.001)


# FLOPs.

LENGTH, WINDOW = 64, 16
TINY = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=False,
)
GROUPED = {**TINY, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "head_dim": 16}
ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": AutoConfig.for_model("llama", **TINY),
    "tied": AutoConfig.for_model("llama", **{**TINY, "tie_word_embeddings": True}),
    "grouped heads": AutoConfig.for_model("llama", **GROUPED),
    "head_dim apart": AutoConfig.for_model("qwen3", **GROUPED, head_dim=24),
    "biases": AutoConfig.for_model("qwen2", **GROUPED),
    "sliding window": AutoConfig.for_model("mistral", **GROUPED, sliding_window=WINDOW),
    "every second layer a window": AutoConfig.for_model(
        "gemma2", **GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
    "mixtral": AutoConfig.for_model("mixtral", **EXPERTS, num_local_experts=6),
    "qwen3_moe": AutoConfig.for_model("qwen3_moe", **EXPERTS, num_experts=6, moe_intermediate_size=24),
    "deepseek_v3": AutoConfig.for_model(
        "deepseek_v3",
        **{**TINY, "num_experts_per_tok": 2},
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        moe_intermediate_size=24,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
    ),
    "gpt2": AutoConfig.for_model("gpt2", vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH),
}


def counted_by_torch(config: PreTrainedConfig, recipe: Recipe) -> float:
    """FLOPs of forward and backward over one sample of LENGTH tokens, as torch's dispatcher sees them.

    Eager attention multiplies all positions, masked ones too: 3 x 2 products of T x T x width in each layer. Flash
    kernels skip what a mask leaves out, and so a ruler must not count it: it is taken off here and counted by hand.
    Grouped products of experts are none for the dispatcher, so these are eager ones.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    if recipe.adapter is not None:
        inject(model, recipe.adapter)
        # Else the first layer's input needs no gradient: a share that shrinks with the layers, and is not modelled.
        model.enable_input_require_grads()
    ids = torch.arange(LENGTH)[None] % 96
    with FlopCounterMode(display=False, depth=None) as counter:
        model(ids).logits.float().logsumexp(-1).sum().backward()
    counts = counter.get_flop_counts()
    # Rotary frequencies x positions is a matrix product for the dispatcher.
    rotary = sum(sum(numbers.values()) for name, numbers in counts.items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - rotary


def seen(window: int | None) -> float:
    """Positions that a token of a sample of LENGTH sees on average, off the mask itself."""
    rows, columns = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    return float(mask.sum()) / LENGTH


@pytest.mark.parametrize("adapter", [None, "lora"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_flops_are_those_that_torch_counts(recipe: Recipe, name: str, adapter: str | None):
    config = ARCHITECTURES[name]
    if adapter is not None:
        if name in ("gpt2", "mixtral", "qwen3_moe", "deepseek_v3"):
            targets = {"gpt2": ["c_attn"], "deepseek_v3": ["o_proj"]}.get(name, ["q_proj", "o_proj"])
        else:
            targets = ["q_proj", "down_proj"]
        recipe = recipe.model_copy(update={"adapter": AdapterSection(name="lora", rank=4, targets=targets)})
    sizes = sizes_of(config, skeleton(config, recipe))
    step = Step(num_tokens=LENGTH, num_labelled=LENGTH, length=LENGTH)
    ours = work(sizes, step).of_model
    attention = 3 * LENGTH * attention_flops(sizes, LENGTH)
    windows = sizes.windows
    assert len(windows) == config.get_text_config().num_hidden_layers
    whole = sum(3 * 4 * sizes.width * LENGTH * LENGTH for _ in windows)
    assert ours - attention == pytest.approx(counted_by_torch(config, recipe) - whole, rel=1e-6)
    # A token sees itself too: half a position that T / 2 leaves out, or W / 2T of a window.
    by_mask = sum(seen(window) - (window or LENGTH) / (2 * LENGTH) for window in windows)
    assert attention == pytest.approx(3 * 4 * sizes.width * LENGTH * by_mask, rel=1e-6)
    assert (WINDOW in windows) == ("window" in name)


def test_a_score_is_counted_once_a_sequence_and_not_as_the_words_of_a_head():
    """By hand: the layers' products with 6 FLOPs a weight and token, and 6 for each label's weights."""
    recipe = load_recipe(
        ROOT / "recipes/quickstart.yaml",
        ["objective={name: classify, classes: [bad, fair, good]}"],
    )
    config, _ = config_of(recipe)
    sizes = sizes_of(config, skeleton(config, recipe))
    assert sizes.vocab == 3
    step = Step(num_tokens=2 * LENGTH, num_labelled=2, length=LENGTH)
    attention = 3 * 2 * LENGTH * attention_flops(sizes, LENGTH)
    by_hand = 6 * sizes.num_matrix * 2 * LENGTH + 6 * 3 * config.hidden_size * 2
    assert work(sizes, step).of_model - attention == pytest.approx(by_hand, rel=1e-9)


def test_a_ruler_that_counts_everything_would_be_found(recipe: Recipe):
    """All experts, or all parameters with the embedding, are not what torch counts."""
    for name in ("mixtral", "llama"):
        sizes = sizes_of(ARCHITECTURES[name], skeleton(ARCHITECTURES[name], recipe))
        active = 6 * LENGTH * (sizes.num_matrix + sizes.head)
        assert active < 0.9 * 6 * LENGTH * sizes.num_parameters, name


def test_a_window_in_a_long_sample_is_what_a_token_sees():
    sizes = ModelSizes(
        num_parameters=1,
        num_trained=1,
        num_matrix=1,
        num_matrix_trained=1,
        num_layers=2,
        hidden=1,
        num_heads=1,
        head_dim=1,
        vocab=1,
        windows=(4096, None),
    )
    assert attention_flops(sizes, 32768) == 4 * (4096 - 4096**2 / 65536 + 32768 / 2)
    assert attention_flops(sizes, 2048) == 4 * (1024 + 1024)
