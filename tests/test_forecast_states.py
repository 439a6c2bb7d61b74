"""The forecast of weights, gradients, optimizer state and buffers is what the engines hold, to the byte.

Real runs are stopped before their third update (`tests/held_bytes.py`), on a model whose
sizes divide by nothing. Run alone: pytest -m "slow or not slow" tests/test_forecast_states.py
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from transformers import LlamaConfig

from cookbook.config.recipe import Recipe, load_recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast.costs import loading as start
from cookbook.forecast.costs import states as ledger
from cookbook.forecast.costs.inputs import CostInputs, Skeleton, Weight, WeightsKey, cost_inputs
from cookbook.forecast.costs.loading import loading
from cookbook.forecast.costs.states import States, heaviest, states
from cookbook.forecast.costs.table import add_up, evaluate, read_table
from cookbook.forecast.skeleton import skeleton
from cookbook.training.models.structure import find_config
from tests.curves import ROOT, Lab, with_stages, write_chats
from tests.experts import experts
from tests.needs import need_builds_of

RECIPE = """\
strategy: accelerate_configs/single.yaml
mixed_precision: 'no'
seed: 7
model:
  from_scratch: {vocab_size: 515, hidden_size: 52, intermediate_size: 93, num_hidden_layers: 3,
                 num_attention_heads: 2, num_key_value_heads: 1, tie_word_embeddings: false}
data: {train: DATA, max_length: 96}
batch: {global_batch_size: 24, micro_batch_size: 2}
optim: {name: adamw, learning_rate: 3e-3}
schedule: {name: cosine}
run: {max_steps: 5, output_dir: OUTPUT}
"""

STRATEGIES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
FULL: tuple[str, ...] = ()
LORA = ("adapter={name: lora, rank: 5}",)
QLORA = ("adapter={name: qlora, rank: 5}",)
BF16 = ("mixed_precision=bf16",)
# transformers cuts heads and columns into equal parts only; rows of the vocabulary also into unequal ones.
EVEN = ("model.from_scratch.num_key_value_heads=2", "model.from_scratch.intermediate_size=94")
# DeepSpeed swaps from 1 MiB on: two matrices of each layer, embedding and head reach that in four parts.
LARGE = (
    "model.from_scratch={vocab_size: 12203, hidden_size: 128, intermediate_size: 16411, num_hidden_layers: 1,"
    " num_attention_heads: 2, num_key_value_heads: 1, tie_word_embeddings: false}",
)
# bitsandbytes takes rows of multiples of 64.
BLOCKS = (
    "model.from_scratch={vocab_size: 515, hidden_size: 128, intermediate_size: 320, num_hidden_layers: 3,"
    " num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: false}",
)
# Keys of a JSON that no shipped strategy has, by the name of one that gets them.
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 100}}
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
VARIANTS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "zero3-hpz": ("zero3", HPZ),
    "zero3_offload-hpz": ("zero3_offload", HPZ),
    "zero3-sums": ("zero3", SUMS),
    "zero2-sums": ("zero2", SUMS),
}
CHUNKS = {"pp-chunks": "pp", "pp_fsdp2-chunks": "pp_fsdp2"}
"""Pipelines of two stages, each of two ranges of layers."""
EXPERTS = ("model={name_or_path: EXPERTS}",)
"""A mixture, in a folder that the run makes."""
ON_EXPERTS = "adapter={name: lora, rank: 5, targets: [all-linear, gate_up_proj, down_proj]}"
PACKED_EXPERTS = ON_EXPERTS.replace("lora", "qlora")
SIZES = dict.fromkeys(("tp", "ddp_tp", "fsdp2_tp", "hsdp_tp", "pp_tp", "pp_tp_fsdp2"), EVEN)
SIZES |= {"fsdp2_ep": EXPERTS, "zero3_nvme": LARGE}

# The largest tensor that a run holds and no category counts: a micro-batch's tokens, 2 x 96 in int64.
TOKENS = 2 * 96 * 8


@dataclass(frozen=True, kw_only=True)
class Run:
    strategy: str
    processes: int
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = {FULL: "full", LORA: "lora", QLORA: "qlora"}
        fixed = (*EVEN, *LARGE, *BLOCKS, *EXPERTS)
        words = [names.get((setting,), setting) for setting in self.settings if setting not in fixed]
        return "-".join([self.strategy, str(self.processes), *words])


def run(strategy: str, processes: int, *settings: str) -> Run:
    sizes = BLOCKS if QLORA[0] in settings else SIZES.get(strategy, ())
    return Run(strategy=strategy, processes=processes, settings=(*sizes, *settings))


def counts(strategy: str) -> list[int]:
    if strategy in ("hsdp", "ddp_tp", "fsdp2_tp", "fsdp2_ep", "pp_fsdp2", "pp_tp"):
        return [4]
    if strategy in ("hsdp_tp", "pp_tp_fsdp2"):
        return [8]
    if strategy.endswith("_sp"):
        return [2, 4]
    return {"single": [1], "tp": [2], "pp": [2, 4]}.get(strategy, [1, 2, 3, 4])


QUICK = [
    run("zero3", 2, *LORA, *BF16),
    run("zero2_offload", 3),
    run("zero1", 2, *BF16),
    run("fsdp2", 3, *LORA, *BF16),
    run("fsdp1", 3),
    run("ddp", 2, *LORA),
    run("tp", 2),
]
OWN_ARITHMETIC = ("ddp", "ddp_sp", "fsdp1", "fsdp2", "fsdp2_offload", "pp", "tp", "zero1", "zero2_offload", "zero3")
OWN_ARITHMETIC += ("zero3_nvme", "zero3_offload")
"""Strategies for two processes with states of their own; the others hold what one of these does."""
SLOW = [
    *(run(name, 2, *BF16) for name in OWN_ARITHMETIC),
    run("single", 1, *LORA, *BF16),
    run("hsdp", 4, *LORA, *BF16),
    run("tp", 2, *LORA),
    run("ddp_tp", 4, *BF16),
    run("fsdp2_tp", 4, *BF16),
    run("fsdp2_ep", 4, *BF16),
    run("fsdp2_ep", 4, ON_EXPERTS, *BF16),
    Run(strategy="fsdp2", processes=2, settings=(*EXPERTS, PACKED_EXPERTS, *BF16)),
    run("pp_fsdp2", 4, *BF16),
    run("pp_tp", 4, *BF16),
]
FEATURES = [
    run("hsdp_tp", 8, *BF16),
    run("pp_tp_fsdp2", 8, *BF16),
    run("fsdp2", 2, *QLORA, *BF16),
    run("zero3", 2, *QLORA, *BF16),
    run("single", 1, "optim.name=adamw_8bit"),
    run("fsdp2", 3, "optim.name=adamw_8bit"),
    run("fsdp2", 3, "optim.name=muon"),
    run("zero2", 3, "optim.name=muon"),
    run("zero3_nvme", 2, "optim.name=muon"),
    run("zero1", 3, "batch.global_batch_size=6"),
    run("zero2_offload", 3, "batch.global_batch_size=6"),  # one micro-batch a step: nothing waits on the host
    run("fsdp2", 2, "model.from_scratch.tie_word_embeddings=true"),
    run("pp_fsdp2", 4, "model.from_scratch.tie_word_embeddings=true"),
    run("pp-chunks", 2, "model.from_scratch.tie_word_embeddings=true", "model.from_scratch.num_hidden_layers=5"),
    run("zero3", 2, *LORA, *BF16, "adapter.modules_to_save=[lm_head]"),
    run("fsdp2", 2, *LORA, *BF16, "adapter.modules_to_save=[lm_head]"),
    run("fsdp2", 2, *BF16, "adapter={name: dora, rank: 5}"),
]
FEATURES += [
    run("zero3-hpz", 4, *BF16),
    run("zero3-hpz", 2, *LORA, *BF16),
    run("zero3-sums", 2, *BF16),
]
ALL = [
    run(name, processes, *adapter, *precision)
    for name in STRATEGIES
    for processes in counts(name)
    for adapter in (FULL, LORA)
    for precision in (FULL, BF16)
]
REST = [case for case in ALL if case not in {*QUICK, *SLOW}]
REST += [
    run("fsdp2", 2, "optim.name=sgd", "optim.momentum=0"),
    run("zero2", 3, "optim.name=sgd"),
    run("zero2", 3, "optim.name=adamw_8bit"),
    run("fsdp1", 2, "model.from_scratch.tie_word_embeddings=true"),
    run("zero3_offload-hpz", 2, *BF16),
    run("zero2-sums", 3, *BF16),
]
REST += [run("pp_fsdp2-chunks", 4, *BF16, "model.from_scratch.num_hidden_layers=4")]
REST += [
    Run(strategy=name, processes=count, settings=(*EXPERTS, PACKED_EXPERTS, *BF16))
    for name, count in (("single", 1), ("zero2", 2), ("zero3", 2))
]
REST += [run("single", 1, *QLORA), run("zero2", 2, *QLORA, *BF16), run("zero3_offload", 2, *QLORA, *BF16)]
CASES = [
    *(pytest.param(case, id=str(case)) for case in QUICK),
    *(pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in SLOW if case not in QUICK),
    *(pytest.param(case, id=str(case), marks=[pytest.mark.slow, pytest.mark.thorough]) for case in FEATURES + REST),
]


class Scale:
    """Runs recipes until their third update; what was measured once, by whatever worker, is not measured again."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.lab, self.parent = lab, lab.parent
        self.recipe = folder / "recipe.yaml"
        with FileLock(folder / "recipe.lock"):
            if not self.recipe.exists():
                write_chats(folder / "chats.jsonl")
                text = RECIPE.replace("DATA", str(folder / "chats.jsonl")).replace("OUTPUT", str(folder / "out"))
                self.recipe.write_text(text)

    def strategy(self, case: Run) -> Path:
        """The file of a strategy; of a variant, written here."""
        if case.strategy in CHUNKS:
            return Path(with_stages(self.folder, CHUNKS[case.strategy], chunks=2))
        shipped, changes = VARIANTS.get(case.strategy, (case.strategy, {}))
        path = ROOT / "accelerate_configs" / f"{shipped}.yaml"
        if not changes:
            return path
        varied = self.folder / f"{case.strategy}.yaml"
        with FileLock(f"{varied}.lock"):
            if not varied.exists():
                text, source = path.read_text(), f"ds_configs/{shipped}.json"
                config = json.loads((ROOT / source).read_text())
                for block, keys in changes.items():
                    config[block] = {**config.get(block, {}), **keys}
                varied.with_suffix(".json").write_text(json.dumps(config))
                varied.write_text(text.replace(source, str(varied.with_suffix(".json"))))
        return varied

    def settings(self, case: Run) -> list[str]:
        changes = {"tie_word_embeddings": False}
        return [
            f"model={experts(self.lab, **changes)['model']}" if setting in EXPERTS else setting
            for setting in case.settings
        ]

    def read(self, case: Run) -> Recipe:
        return load_recipe(self.recipe, self.settings(case))

    def skeleton(self, case: Run) -> Skeleton:
        recipe = self.read(case)
        return skeleton(find_config(recipe.model)[0], recipe)

    def predicted(self, case: Run, rank: int) -> States:
        strategy = load_strategy(self.strategy(case))
        return states(self.skeleton(case), cost_inputs(self.read(case), strategy, case.processes), rank)

    def held(self, case: Run) -> list[dict[str, Any]]:
        """Tensors that each process holds."""
        folder = self.folder / f"{case.strategy}-{sha256(repr(case).encode()).hexdigest()[:10]}"
        said = folder / "output.txt"
        with FileLock(f"{folder}.lock"):
            if not said.exists():
                shutil.rmtree(folder, ignore_errors=True)
                printed = self._run(case, folder)
                said.write_text(printed)
        held = [json.loads(path.read_text()) for path in sorted(folder.glob("held-*.json"))]
        assert len(held) == case.processes, f"{case} did not run:\n{said.read_text()[-4000:]}"
        return held

    def _run(self, case: Run, folder: Path) -> str:
        """Returns what was printed."""
        need_builds_of(case.strategy)
        folder.mkdir()
        words = ["tests/held_bytes.py", str(folder), str(self.recipe)]
        for setting in (
            *self.settings(case),
            f"run.output_dir={folder / 'out'}",
            f"strategy={self.strategy(case)}",
        ):
            words += ["--set", setting]
        launched = case.strategy != "single"
        self.parent.run(folder, words, processes=case.processes, limit=900, eager=True, launched=launched)
        return "".join(path.read_text(errors="replace") for path in folder.glob("log_*"))


@pytest.fixture(scope="module")
def scale(lab: Lab, shared_folder: Path, monkeypatch_module: pytest.MonkeyPatch) -> Scale:
    monkeypatch_module.chdir(ROOT)  # a strategy names its JSON from here
    return Scale(shared_folder / "states", lab)


@pytest.fixture(scope="module")
def monkeypatch_module() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def places(predicted: States) -> dict[str, dict[str, int]]:
    return {place: asdict(getattr(predicted, place)) for place in ("gpu", "host", "disk")}


@pytest.mark.parametrize("case", CASES)
def test_each_process_holds_the_predicted_bytes(scale: Scale, case: Run):
    for rank, held in enumerate(scale.held(case)):
        predicted = scale.predicted(case, rank)
        assert {place: held[place] for place in ("gpu", "host", "disk")} == places(predicted), f"process {rank}"
        before = [predicted.gradients_at_first, predicted.gradients_between]
        if case.strategy.startswith("pp") and rank < case.processes // 2:
            before[1] = 0  # the first stage begins two micro-batches before the first backward
        began = held["gradients_before"]
        if case.strategy in CHUNKS:  # two micro-batches in the first range of layers, and one in the second
            began, before = began[:3], [0, 0, 0]
        assert began == before[: len(began)], f"process {rank}"
        # DDP's buckets, whose views they are: beside them nothing is held.
        assert held["gradients_stay"] or case.strategy != "ddp", f"process {rank}"
        # Nothing was overlooked: what no category counts is what the data loader made.
        size, dtype, _ = held["largest_others"][0]
        assert size <= TOKENS and dtype == "torch.int64", held["largest_others"]


def test_every_strategy_file_is_measured_with_each_count_of_processes():
    assert len(STRATEGIES) >= 14
    runs = [case.values[0] for case in CASES]
    measured = {(run.strategy, run.processes) for run in runs if run.strategy not in {*VARIANTS, *CHUNKS}}
    assert measured == {(name, processes) for name in STRATEGIES for processes in counts(name)}
    assert len(CASES) >= 180


@pytest.mark.parametrize(
    ("case", "other"),
    [
        (run("zero3", 2, *LORA, *BF16), run("zero2", 2, *LORA, *BF16)),
        (run("zero3", 2, *LORA, *BF16), run("zero3", 3, *LORA, *BF16)),
        (run("zero3", 2, *LORA, *BF16), run("zero3", 2, *LORA)),
        (run("zero2_offload", 3), run("zero2", 3)),
        (run("zero1", 2, *BF16), run("zero2", 2, *BF16)),
        (run("fsdp2", 3, *LORA, *BF16), run("fsdp2_offload", 3, *LORA, *BF16)),
        (run("fsdp1", 3), run("fsdp2", 3)),
        (run("ddp", 2, *LORA), run("ddp", 2)),
    ],
    ids=str,
)
def test_a_forecast_for_another_run_is_not_what_is_held(scale: Scale, case: Run, other: Run):
    held = scale.held(case)[0]
    predicted = scale.predicted(other, 0)
    before = [predicted.gradients_at_first, predicted.gradients_between]
    assert (places(predicted), before) != ({p: held[p] for p in ("gpu", "host", "disk")}, held["gradients_before"])


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


# Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: GB of 1e9 for each process, by billions of parameters and
# processes. Data parallel, then ZeRO-1, -2 and -3. Their 2 + 2 + 12 bytes are those of our bf16 under ZeRO with AdamW;
# without ZeRO ours are 4 + 4 + 8.
ZERO_TABLE_1 = [
    (7.5, 4, (120, 52.5, 41.3, 30)),
    (7.5, 16, (120, 35.6, 21.6, 7.5)),
    (7.5, 64, (120, 31.4, 16.6, 1.88)),
    (7.5, 256, (120, 30.4, 15.4, 0.47)),
    (7.5, 1024, (120, 30.1, 15.1, 0.12)),
    (128, 64, (2048, 536, 284, 32)),
    (128, 1024, (2048, 513, 257, 2)),
    (1000, 64, (16000, 4187, 2218, 250)),
    (1000, 1024, (16000, 4011, 2013, 15.6)),
]


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.parametrize(("billions", "processes", "published"), ZERO_TABLE_1)
def test_the_zero_papers_table_of_memory(tmp_path: Path, billions: float, processes: int, published: tuple):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("DATA", "python-stdlib").replace("OUTPUT", "out"))
    recipe = load_recipe(tmp_path / "recipe.yaml", list(BF16))
    # So many that those on the border between two parts, which ZeRO-2 keeps whole, weigh nothing.
    model = of_layers(*10_000 * [[round(billions * 1e5)]])
    for name, expected in zip(("ddp", "zero1", "zero2", "zero3"), published, strict=True):
        strategy = load_strategy(Path(f"accelerate_configs/{name}.yaml"))
        held = states(model, cost_inputs(recipe, strategy, processes))
        # The paper counts ZeRO-1's gradients whole, as they are until the last micro-batch; and no buffers.
        gradients = max(held.gpu.gradients, held.gradients_between)
        total = held.gpu.weights + held.gpu.masters + gradients + held.gpu.moments
        assert total / 1e9 == pytest.approx(expected, rel=4e-3, abs=0.005), name


def of_layers(*layers: list[int], frozen: Sequence[int] = (), outside: Sequence[int] = ()) -> Skeleton:
    """A model whose weights have so many elements, layer by layer.

    Args:
        frozen: of the first layer's, before its trained ones.
        outside: of the layers, frozen too.
    """

    def weight(size: int, layer: int | None, *, is_trained: bool) -> Weight:
        return Weight(
            name="weight",
            shape=(1, size),
            layer=layer,
            part="embedding" if layer is None else "layer",
            is_trained=is_trained,
            is_quantized=False,
            shard_dim=None,
            is_matrix=True,
            is_orthogonal=True,
        )

    weights = [weight(size, None, is_trained=False) for size in outside]
    weights += [weight(size, 0, is_trained=False) for size in frozen]
    weights += [weight(size, i, is_trained=True) for i, sizes in enumerate(layers) for size in sizes]
    return Skeleton(weights=tuple(weights), num_layers=len(layers), is_tied=False, buffers=())


# By hand, in bf16: what of the measured runs above takes several processes to be seen, on weights of a few elements.


def inputs_of(name: str, num_processes: int, *, accumulation: int = 1, **keys: Any) -> CostInputs:
    """Args: of the JSON's block zero_optimization."""
    strategy = load_strategy(ROOT / f"accelerate_configs/{name}.yaml")
    if keys:
        zero = {**strategy.zero, **keys}
        strategy = replace(strategy, deepspeed={**(strategy.deepspeed or {}), "zero_optimization": zero})
    return CostInputs(strategy=strategy, num_processes=num_processes, num_local=2, accumulation=accumulation)


@pytest.mark.usefixtures("from_the_root")
def test_flat_weights_are_padded_to_twice_the_processes():
    """5 + 6 elements of 4 processes are 16 (deepspeed 0.19.8, stage_1_and_2.py, nccl_start_alignment_factor)."""
    held = states(of_layers([5, 6]), inputs_of("zero1", 4)).gpu
    assert (held.weights, held.masters) == (2 * 16, 4 * 16 / 4)


@pytest.mark.usefixtures("from_the_root")
def test_what_was_reckoned_for_another_run_is_what_would_be_reckoned_for_this_one():
    """For other micro-batches and tokens; and two micro-batches hold more than one where gradients wait."""
    model, several = of_layers([90, 10], frozen=[60, 4], outside=[40]), {}
    for name, accumulation, num_tokens in product(STRATEGIES, (1, 2, 16), (0, 512)):
        inputs = replace(inputs_of(name, 16, accumulation=accumulation), num_tokens=num_tokens)
        inputs = replace(inputs, strategy=inputs.strategy.for_processes(16, 2), offloads_checkpoints=num_tokens > 0)
        asked: Any = SimpleNamespace(skeleton=model, inputs=inputs)
        held = several[name, accumulation] = states(model, inputs)
        assert held == ledger._states.__wrapped__(asked, 0), name
        assert heaviest(model, inputs) == ledger._heaviest.__wrapped__(WeightsKey(model, inputs))
        assert loading(model, inputs, held, 2) == start._loading.__wrapped__(asked, held, 2)
    assert several["zero2_offload", 1] != several["zero2_offload", 2] == several["zero2_offload", 16]


@pytest.mark.usefixtures("from_the_root")
def test_without_any_row_of_the_table_a_shipped_strategy_would_hold_less(monkeypatch: pytest.MonkeyPatch):
    """Each row is memory of a strategy that ships, in the place that it names."""
    model, rows = replace(of_layers([90, 10**8], frozen=[60], outside=[40]), buffers=(8,)), [*ledger.ROWS]
    settings = [
        replace(each, strategy=each.strategy.for_processes(8, 2))
        for each in (inputs_of(name, 8) for name in STRATEGIES)
    ]

    def held() -> list[tuple[int, ...]]:
        asked: list[Any] = [SimpleNamespace(skeleton=model, inputs=inputs) for inputs in settings]
        each = [ledger._states.__wrapped__(key, 0) for key in asked]
        return [(predicted.gpu.total, predicted.host.total, predicted.disk.total) for predicted in each]

    whole = held()
    for row in rows:
        monkeypatch.setattr(ledger, "ROWS", [other for other in rows if other is not row])
        place = ("gpu", "host", "disk").index(row[1])
        less = [(now, before) for now, before in zip(held(), whole, strict=True) if now != before]
        assert less, row
        assert all(now[place] < before[place] for now, before in less), row


def test_a_cell_adds_up_products_from_the_left():
    """In floats, as in 0.1 + 0.2 + 0.3, that is not the sum that is closest."""
    assert evaluate("4*trained + frozen", {"trained": 3, "frozen": 5}) == 17
    assert evaluate("-", {}) == 0
    assert evaluate("a + b + c", {"a": 0.1, "b": 0.2, "c": 0.3}) == 0.6000000000000001
    assert add_up(["x", "y"], [["a", "-"], ["2*a", "a"]], {"a": 7}) == {"x": 21, "y": 7}
    with pytest.raises(KeyError, match="other"):
        evaluate("4*other", {"trained": 3})
    with pytest.raises(AssertionError):
        read_table("engine  bytes\nwhole")


@pytest.mark.usefixtures("from_the_root")
def test_exchanges_beside_the_backward_have_a_second_bucket():
    """(deepspeed 0.19.8, stage_1_and_2.py, backward_prologue)"""
    for overlap, count in ((True, 2), (False, 1)):
        inputs = inputs_of("zero2", 2, overlap_comm=overlap, reduce_bucket_size=1000)
        assert states(of_layers([90, 10]), inputs).gradient_buckets == count * 2 * 1000


@pytest.mark.usefixtures("from_the_root")
def test_offloaded_gradients_of_several_micro_batches_wait_whole_in_16_bits():
    """A share of 50 in float32, and what it touches of 90 + 10: the first process one weight, the second both."""
    for accumulation, waiting in ((1, (0, 0)), (2, (90, 100))):
        inputs = inputs_of("zero2_offload", 2, accumulation=accumulation)
        held = [states(of_layers([90, 10]), inputs, rank).host.gradients for rank in (0, 1)]
        assert held == [4 * 50 + 2 * number for number in waiting]


@pytest.mark.usefixtures("from_the_root")
def test_a_flat_parameter_without_a_trained_weight_has_no_gradient():
    """Behind 60 frozen elements of a layer 20 trained ones begin at 64; each of 2 processes has half of 84."""
    held = states(of_layers([20], frozen=[60], outside=[40]), inputs_of("fsdp1", 2)).gpu
    assert (held.weights, held.gradients) == (4 * (20 + 42), 4 * 42)


@pytest.mark.usefixtures("from_the_root")
def test_small_weights_that_stay_gathered_are_those_of_the_json_s_threshold():
    """Beside half of 50 + 200 elements; one process has no second copy, unless its share is on the host."""
    model = of_layers([50, 200])
    for threshold, gathered in ((10, 0), (100, 50), (1000, 250)):
        changed = {"stage3_param_persistence_threshold": threshold}
        assert states(model, inputs_of("zero3", 2, **changed)).gpu.weights == 2 * (125 + gathered)
        assert states(model, inputs_of("zero3", 1, **changed)).gpu.weights == 2 * 250
        offloaded = states(model, inputs_of("zero3_offload", 1, **changed))
        assert (offloaded.gpu.weights, offloaded.host.weights) == (2 * gathered, 2 * 250)


@pytest.mark.usefixtures("from_the_root")
def test_a_second_copy_is_of_what_is_gathered_again_over_the_smaller_group():
    """4 processes, in groups of 2: half of 200 elements; 50 stay gathered anyway."""
    model, threshold = of_layers([50, 200]), {"stage3_param_persistence_threshold": 100}
    plain, second = (
        states(model, inputs_of("zero3", 4, zero_hpz_partition_size=size, **threshold)).gpu.buffers for size in (1, 2)
    )
    assert second - plain == 2 * 100


LLAMA3_8B = dict(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
)


def test_a_skeleton_has_the_published_number_of_parameters(tmp_path: Path):
    """8,030,261,248 of Llama-3-8B (its safetensors index on the Hub); and an adapter of rank 16 on every linear layer
    but the head: 16 x (inputs + outputs) of each.
    """
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("DATA", "python-stdlib").replace("OUTPUT", "out"))
    config = LlamaConfig(**LLAMA3_8B, tie_word_embeddings=False)
    full = skeleton(config, load_recipe(tmp_path / "recipe.yaml"))
    assert sum(elements(weight) for weight in full.weights) == 8_030_261_248
    assert all(weight.is_trained and not weight.is_quantized for weight in full.weights)
    assert full.num_layers == 32 and sum(weight.layer == 31 for weight in full.weights) == 9
    qlora = skeleton(config, load_recipe(tmp_path / "recipe.yaml", ["adapter={name: qlora, rank: 16}"]))
    trained = [weight for weight in qlora.weights if weight.is_trained]
    sides = [4096 + 4096, 4096 + 1024, 4096 + 1024, 4096 + 4096, *3 * [4096 + 14336]]
    assert sum(elements(weight) for weight in trained) == 32 * 16 * sum(sides) == 41_943_040
    assert sum(weight.is_quantized for weight in qlora.weights) == 32 * 7


def test_tied_weights_come_once(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("DATA", "python-stdlib").replace("OUTPUT", "out"))
    recipe = load_recipe(tmp_path / "recipe.yaml")
    tied = skeleton(LlamaConfig(**LLAMA3_8B, tie_word_embeddings=True), recipe)
    assert sum(elements(weight) for weight in tied.weights) == 8_030_261_248 - 128256 * 4096
    assert tied.is_tied and [weight.part for weight in tied.weights if weight.layer is None] == ["embedding", "norm"]


def elements(weight: Weight) -> int:
    product = 1
    for size in weight.shape:
        product *= size
    return product
