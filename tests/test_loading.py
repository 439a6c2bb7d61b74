"""No process has the whole model in host memory without need, and the plan counts what the start of a run takes.

python -m pytest -q tests/test_loading.py
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from curves import ROOT, run_to_end, write_chats
from transformers import LlamaConfig, LlamaForCausalLM

from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.strategy import Strategy, load_strategy
from cookbook.forecast.costs.inputs import Skeleton, Weight, cost_inputs
from cookbook.forecast.costs.loading import loading
from cookbook.forecast.costs.states import ResidentBytes, States
from cookbook.forecast.memory import GIB
from cookbook.forecast.ranking import forecast_all
from cookbook.system.hardware import parse_machines
from cookbook.training.models.tokenizer_files import train_tokenizer

RECIPE = """\
strategy: accelerate_configs/fsdp2.yaml
mixed_precision: bf16
model: {name_or_path: MODEL}
data: {train: DATA, max_length: 512}
batch: {global_batch_size: 4, micro_batch_size: 2}
optim: {learning_rate: 1e-3}
run: {max_steps: 1, output_dir: OUTPUT, check_export: false}
"""
SIZES = {"vocab_size": 512, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 4}


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 38 million weights in bf16, as most are published: read as float32 they are copies, not pages of the
    file."""
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(**SIZES, num_attention_heads=8, num_key_value_heads=8)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    train_tokenizer(["the quick brown fox"], 300).save_pretrained(folder)
    return folder


def read_in(tmp_path: Path, model_folder: Path, strategy: str) -> list[dict]:
    """Bytes of each of two processes after reading the model, and after handing it to the engine."""
    write_chats(tmp_path / "chats.jsonl")
    text = RECIPE.replace("MODEL", str(model_folder)).replace("DATA", str(tmp_path / "chats.jsonl"))
    (tmp_path / "recipe.yaml").write_text(text.replace("OUTPUT", str(tmp_path / "out")))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", f"accelerate_configs/{strategy}.yaml", "--num_processes", "2"]
    command += ["tests/loading_bytes.py", str(tmp_path), str(tmp_path / "recipe.yaml")]
    done = run_to_end(command, timeout=300)
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("loading-*.json"))]
    assert len(records) == 2, done.stdout[-3000:] + done.stderr[-3000:]
    return records


def whole_of(model_folder: Path) -> int:
    """Bytes in float32."""
    return 2 * sum(path.stat().st_size for path in model_folder.glob("*.safetensors"))


def test_under_fsdp_one_process_of_a_machine_reads_the_weights(tmp_path: Path, model_folder: Path):
    first, second = read_in(tmp_path, model_folder, "fsdp2")
    whole = whole_of(model_folder)
    assert whole > 150 * 10**6
    assert first["resident"] == pytest.approx(whole, rel=0.1)
    assert second["resident"] < 0.1 * whole
    # Each has its half in the end.
    for record in (first, second):
        assert record["prepared"]["cpu"] == pytest.approx(whole / 2, rel=0.01)


def test_a_stage_reads_its_own_layers(tmp_path: Path, model_folder: Path):
    """Two of the four, which are nearly all of the model."""
    for record in read_in(tmp_path, model_folder, "pp"):
        assert record["resident"] == pytest.approx(whole_of(model_folder) / 2, rel=0.1)
        assert record["prepared"]["cpu"] == pytest.approx(whole_of(model_folder) / 2, rel=0.05)


@pytest.mark.thorough
def test_the_measurement_sees_a_whole_copy(tmp_path: Path, model_folder: Path):
    """On a CPU each process of DDP trains on weights of its own."""
    for record in read_in(tmp_path, model_folder, "ddp"):
        assert record["resident"] == pytest.approx(whole_of(model_folder), rel=0.1)


# By hand: five weights of 100, 90, 80, 70 and 60 numbers.
WEIGHTS = tuple(
    Weight(
        name=f"layers.{i}",
        shape=(10, 10 - i),
        layer=i,
        part="layer",
        is_trained=True,
        is_quantized=False,
        shard_dim=None,
        is_matrix=True,
        is_orthogonal=False,
    )
    for i in range(5)
)
SHARES = States(
    gpu=ResidentBytes(weights=50),
    host=ResidentBytes(weights=200, moments=400),
    gradients_at_first=0,
    gradients_between=0,
)
ON_GPU = replace(SHARES, host=ResidentBytes())


def skeleton_of(*weights: Weight) -> Skeleton:
    return Skeleton(weights=weights, num_layers=5, is_tied=True, buffers=())


def read(name: str) -> Strategy:
    return load_strategy(Path(f"accelerate_configs/{name}.yaml"))


@pytest.fixture
def full() -> Recipe:
    return load_recipe(Path("recipes/llama31_8b/sft.yaml"), [])


@pytest.mark.parametrize(
    ("name", "states", "host", "gpu"),
    [
        # Four threads of each of two processes have one of the four largest, in float32.
        # It sends what it has in two buckets, which together could hold far more.
        ("ddp", ON_GPU, 2 * 4 * (100 + 90 + 80 + 70), 2 * 4 * 400),
        ("zero2", ON_GPU, 2 * 4 * (100 + 90 + 80 + 70), 4 * 400),
        ("tp", ON_GPU, 2 * 4 * (100 + 90 + 80 + 70), 0),
        ("fsdp1", ON_GPU, 4 * 400, 0),
        ("fsdp2", ON_GPU, 4 * 400, 0),
        ("fsdp2_offload", SHARES, 4 * 400 + 2 * 200, 0),
        ("zero3", ON_GPU, 0, 0),
        ("zero3_offload", SHARES, 2 * 200, 0),
    ],
)
def test_the_start_by_hand(full: Recipe, name: str, states: States, host: int, gpu: int):
    peak = loading(skeleton_of(*WEIGHTS), cost_inputs(full, read(name), 2), states, local=2)
    assert (peak.host, peak.gpu) == (host, gpu)


def test_an_adapter_is_whole_on_each_gpu_before_it_joins_the_shards(full: Recipe):
    """Four numbers of each of two processes in float32, beside the shards that 50 bytes are."""
    adapted, sharded = full.model_copy(update={"adapter": load_adapter("lora")}), replace(ON_GPU.gpu, gradients=4 * 4)
    inputs = cost_inputs(adapted, read("fsdp2_tp"), 4)
    assert loading(skeleton_of(*WEIGHTS), inputs, replace(ON_GPU, gpu=sharded), local=4).gpu == 50 + 2 * 4 * 4


def test_without_efficient_loading_each_process_has_a_copy(full: Recipe):
    strategy = read("fsdp2")
    assert strategy.fsdp is not None
    block = strategy.fsdp.model_copy(update={"fsdp_cpu_ram_efficient_loading": False})
    peak = loading(skeleton_of(*WEIGHTS), cost_inputs(full, replace(strategy, fsdp=block), 2), ON_GPU, local=2)
    assert peak.host == 2 * 4 * 400


def four_bits(full: Recipe, name: str) -> int:
    """Bytes of a GPU at the start, in 4 bits but for a trained weight of 60 numbers."""
    frozen = [replace(weight, is_trained=False, is_quantized=True) for weight in WEIGHTS[:4]]
    adapter = full.model_copy(update={"adapter": load_adapter("qlora")})
    peak = loading(skeleton_of(*frozen, WEIGHTS[4]), cost_inputs(adapter, read(name), 2), ON_GPU, local=2)
    assert peak.host == 2 * 4 * 100  # one at a time
    return peak.gpu


SCALES = 2 + 4 * (1 + 1 + 16 + 256)
"""The scales of each weight, in 8 bits for 64 numbers, in float32 for 256 of those; an offset and two tables."""


def test_in_4_bits_each_gpu_of_ddp_has_all_and_buckets_to_send_it(full: Recipe):
    # 340 numbers of half a byte, in bf16 storage two bytes at a time. The trained one stays float32.
    packed = sum(2 * (numel // 4) for numel in (100, 90, 80, 70))
    assert four_bits(full, "ddp") == 2 * (packed + 4 * SCALES + 4 * 60)


@pytest.mark.parametrize(
    ("name", "kept"), [("fsdp2", 25 + 22 + 20 + 17), ("fsdp2_offload", 4), ("zero3", 25 + 22 + 20 + 17)]
)
def test_in_4_bits_a_weight_is_cut_before_the_next_is_read(full: Recipe, name: str, kept: int):
    """The last one, of 70 numbers: it in bf16 and in 4 bits, beside halves of all; or beside its scales in float32,
    where the halves lie on the host.
    """
    assert four_bits(full, name) == kept + 4 * SCALES + 2 * 70 + 34


def load_adapter(name: str) -> object:
    adapter = load_recipe(Path("recipes/llama31_8b/sft.yaml"), [f"adapter.name={name}"]).adapter
    assert adapter is not None
    return adapter


def test_host_memory_that_is_too_small_for_the_start_is_reported(full: Recipe):
    """Llama 3.1 8B: 8.03e9 weights of 4 bytes are 29.9 GiB, and that once on each machine."""
    (forecast,) = forecast_all(full, [read("fsdp2")], parse_machines("8xH100", host_gib=25), "recipe").forecasts
    assert forecast.host / GIB == pytest.approx(29.9, abs=0.1)
    assert forecast.verdict == "does not fit"
    assert forecast.why == ["needs 30 GiB of host memory to read the weights in a machine that has 25"]
    (forecast,) = forecast_all(full, [read("fsdp2")], parse_machines("8xH100", host_gib=64), "recipe").forecasts
    assert forecast.verdict == "fits"
