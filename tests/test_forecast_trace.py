"""The trace on tensors without data counts what a real forward and backward allocate on the CPU.

python -m pytest -q tests/test_forecast_trace.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import inject_adapter_in_model
from target_grid import from_grid, packed
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from benchmarks.tiny_models import tiny_config
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import load_strategy
from cookbook.forecast import ledger as ledgers
from cookbook.forecast import repeated, second_process, verdict
from cookbook.forecast import trace as tracing
from cookbook.forecast.activations import ActivationTrace
from cookbook.forecast.autocast import autocast_of_cuda
from cookbook.forecast.four_bits import _PackedExperts, _Product
from cookbook.forecast.layer_kinds import ShortModel, few_layers
from cookbook.forecast.ledger import Ledger
from cookbook.forecast.ranking import forecast_all
from cookbook.forecast.repeated import light, run
from cookbook.forecast.show import in_words
from cookbook.forecast.trace import Untraceable, trace
from cookbook.forecast.verdict import TraceCache
from cookbook.system.hardware import parse_machines
from cookbook.training.adapters.adapted_layers import lora_config
from cookbook.training.adapters.four_bit_experts import Dequantizer
from cookbook.training.models import loss as losses
from cookbook.training.models.attention import PACKED
from cookbook.training.models.efficiency import compile_layers, save_activations
from cookbook.training.models.logits import in_turn
from cookbook.training.models.loss import add_loss, compile_loss
from tests.experts import experts_config
from tests.needs import need_compiler

ROWS, LENGTH, VOCAB = 3, 256, 1500
SINGLE = load_strategy(Path("accelerate_configs/single.yaml"))
LLAMA = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 500,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 7,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}


def config_of(**sizes: Any) -> PreTrainedConfig:
    return AutoConfig.for_model(**{**LLAMA, **sizes})


def recipe(
    checkpointing: Any = False,
    adapter: Any = None,
    precision: str = "no",
    compiled: bool = False,
    packing: bool = False,
    **sections: Any,
) -> Recipe:
    values: dict[str, Any] = {
        "strategy": "accelerate_configs/single.yaml",
        "mixed_precision": precision,
        "model": {"name_or_path": "x/y", "gradient_checkpointing": checkpointing, "compile": compiled},
        "data": {"train": "python-stdlib", "max_length": LENGTH, "packing": packing},
        "batch": {"global_batch_size": ROWS, "micro_batch_size": ROWS},
        "optim": {"learning_rate": 1e-4},
        "run": {"max_steps": 1, "output_dir": "out"},
        **sections,
    }
    return Recipe(**values, **({"adapter": adapter} if adapter else {}))


def traced(settings: Recipe, config: PreTrainedConfig, *, autocast: bool = True) -> ActivationTrace:
    rows, length = (1, ROWS * LENGTH) if settings.data.packing is True else (ROWS, LENGTH)
    sizes = {"rows": rows, "length": length, "num_targets": ROWS * LENGTH}
    return trace(config, settings, **sizes, autocast=autocast, tp_size=1)


def without_scratch(events: list[dict]) -> list[tuple[float, int]]:
    """The time and bytes of each change of memory, in order, without what a product takes and gives back by itself: of
    16 bits a CPU without instructions for them computes it in float32.
    """
    products = [event for event in events if event["name"] in ("aten::mm", "aten::addmm")]
    changes = sorted(
        (event["ts"], event["args"]["Addr"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"
    )
    scratch = set()
    for product in products:
        taken: dict[int, Any] = {}
        for change in (change for change in changes if 0 <= change[0] - product["ts"] <= product["dur"]):
            if change[2] > 0:
                taken[change[1]] = change
            elif change[1] in taken:
                scratch |= {change, taken.pop(change[1])}
    return [(change[0], change[2]) for change in changes if change not in scratch]


def allocated(settings: Recipe, config: PreTrainedConfig, tmp_path) -> tuple[int, int]:
    """Bytes that torch's CPU allocator has given out in a real pass: when the head begins, and at most.

    Gradients are dropped as they come, and counted by neither side.
    """
    torch.manual_seed(0)
    # None: transformers' own choice, scores of T x T where a model has no kernel
    attention = PACKED if settings.data.packing else "sdpa" if config.model_type == "llama" else None
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model.config.use_cache = False
    if settings.adapter is not None:
        inject_adapter_in_model(lora_config(settings.adapter, model), model, adapter_name="default")
    if settings.model.gradient_checkpointing:
        save_activations(model, selective=settings.model.gradient_checkpointing == "selective")
    if settings.model.compile:
        need_compiler()
        compile_layers(model)
    add_loss(model)
    if settings.model.compile:
        compile_loss(model.get_output_embeddings())
    model.train()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    layers = model.base_model.layers
    layers[-1].register_forward_hook(_note_head)
    ids = torch.randint(0, VOCAB, (ROWS, LENGTH))
    positions, apart = torch.arange(LENGTH).expand(ROWS, -1), {}
    if settings.data.packing:
        ids, positions, apart = ids.view(1, -1), positions.reshape(1, -1), packed([LENGTH] * ROWS)
    low = torch.bfloat16 if settings.mixed_precision == "bf16" else None

    def one_pass() -> None:
        with torch.autocast("cpu", dtype=low, enabled=low is not None):
            loss = model(input_ids=ids, position_ids=positions, **from_grid(ids), **apart).sum()
        loss.backward()

    one_pass()  # what is made once, as by oneDNN
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        one_pass()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begins = next(event["ts"] for event in events if event["name"] == "head begins")
    changes = without_scratch(events)
    live = at_head = most = 0
    for time, size in changes:
        live += size
        most = max(most, live)
        at_head = live if time <= begins else at_head
    return at_head, most


def _note_head(*arguments: Any) -> None:
    with record_function("head begins"):
        pass


CASES = {
    "kept": recipe(),
    "recomputed": recipe(checkpointing=True),
    "selective": recipe(checkpointing="selective"),
    "autocast": recipe(precision="bf16"),
    "lora": recipe(adapter={"name": "lora", "rank": 8}),
    "lora, recomputed": recipe(checkpointing=True, adapter={"name": "lora", "rank": 8}),
}
WITHOUT_KERNEL: dict[str, dict[str, Any]] = {
    "caps": {"model_type": "gemma2", "head_dim": 32, "num_hidden_layers": 3, "num_key_value_heads": 6},
    "sinks": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 64,
    },
}
LORA = {"name": "lora", "rank": 8}
COMPILED = {
    "kept": recipe(compiled=True),
    "recomputed": recipe(compiled=True, checkpointing=True),
    "selective": recipe(compiled=True, checkpointing="selective"),
    "autocast": recipe(compiled=True, precision="bf16"),
    "lora": recipe(compiled=True, adapter={"name": "lora", "rank": 8}),
}


@pytest.mark.parametrize("settings", CASES.values(), ids=CASES)
def test_the_trace_counts_what_a_real_pass_allocates(settings, tmp_path, monkeypatch):
    hold_against_a_real_pass(settings, tmp_path, monkeypatch)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("config", WITHOUT_KERNEL.values(), ids=WITHOUT_KERNEL)
def test_attention_that_no_kernel_computes_holds_its_scores(config, checkpointing, packing, tmp_path, monkeypatch):
    settings = recipe(checkpointing=checkpointing, packing=packing)
    hold_against_a_real_pass(settings, tmp_path, monkeypatch, config_of(**config))


def test_experts_that_split_rows_by_numbers_without_data_have_equal_parts(tmp_path, monkeypatch):
    """JetMoE reads how many rows each expert gets; what they take together is the same however they are split."""
    sizes = {"kv_channels": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    hold_against_a_real_pass(recipe(), tmp_path, monkeypatch, config_of(model_type="jetmoe", **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [pytest.param(COMPILED["kept"], id="kept")]
    + [pytest.param(COMPILED[name], id=name, marks=pytest.mark.thorough) for name in ("autocast", "lora", "selective")],
)
def test_the_trace_counts_what_compiled_layers_allocate(settings, tmp_path, monkeypatch):
    hold_against_a_real_pass(settings, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_compiled_layer_that_is_recomputed_takes_more_than_the_trace_counts(tmp_path, monkeypatch):
    """Inductor joins operations of the backward that the trace runs one after another (docs/plan.md)."""
    hold_against_a_real_pass(COMPILED["recomputed"], tmp_path, monkeypatch, missing=0.2)


def hold_against_a_real_pass(
    settings: Recipe, tmp_path, monkeypatch, config: PreTrainedConfig | None = None, *, missing: float = 0.0
) -> None:
    """`missing`: the share of the real peak that the trace does not count, at most."""
    monkeypatch.setattr(ledgers, "ALLOCATION_BYTES", 1)  # that of CUDA's allocator
    # In float32 a GPU repeats grouped keys and values, and a CPU does not.
    config = config or (config_of() if settings.mixed_precision == "bf16" else config_of(num_key_value_heads=6))
    work = traced(settings, config)
    at_head, most = allocated(settings, config, tmp_path)
    head = next(phase for phase in work.phases if phase.name == "head")
    assert head.held == pytest.approx(at_head, rel=0.01)
    peak = max(phase.peak for phase in work.phases)
    assert (1 - missing - 0.01) * most <= peak <= 1.01 * most


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
def test_compiled_layers_hold_less(checkpointing):
    plain, compiled = (
        traced(recipe(checkpointing, compiled=is_compiled), config_of()).phases for is_compiled in (False, True)
    )
    assert [phase.name for phase in compiled] == [phase.name for phase in plain]
    assert max(phase.peak for phase in compiled) <= max(phase.peak for phase in plain)
    if checkpointing is not True:  # there only a layer's input is kept
        assert max(phase.held for phase in compiled) < 0.95 * max(phase.held for phase in plain)


def test_a_trace_that_took_other_settings_would_be_seen(tmp_path):
    at_head, _ = allocated(recipe(), config_of(), tmp_path)
    work = traced(recipe(checkpointing=True), config_of())
    assert next(phase for phase in work.phases if phase.name == "head").held < 0.5 * at_head


def test_layers_that_cannot_be_compiled_are_counted_as_they_are():
    dropout = {"name": "lora", "rank": 8, "dropout": 0.1}  # its state of random numbers stops the partitioner
    plain, compiled = (
        traced(recipe(True, dropout, compiled=is_compiled), config_of()) for is_compiled in (False, True)
    )
    assert compiled == plain
    plain, cut = (
        traced(recipe("selective", compiled=is_compiled, packing=True), config_of()) for is_compiled in (False, True)
    )
    assert cut == plain


def trace_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_layers(config: PreTrainedConfig, start: int = 0) -> ShortModel:
        layers = [*range(config.num_hidden_layers)]
        return ShortModel(config, layers, layers)

    monkeypatch.setattr(tracing, "few_layers", all_layers)


MIXED: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (3, {}),
    "qwen3": (3, {}),
    "gpt_neox": (3, {}),
    "gemma3_text": (4, {"sliding_window": 64, "head_dim": 32}),
    "qwen2_moe": (5, {"num_experts": 4, "moe_intermediate_size": 64, "decoder_sparse_step": 2}),
    "deepseek_v3": (
        4,
        {
            "first_k_dense_replace": 2,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
        },
    ),
    "qwen3_next": (
        4,
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 8},
    ),
}


OFTEN = [("llama", False), ("llama", True), ("qwen3_next", True)]


@pytest.mark.parametrize(
    ("model_type", "checkpointing"),
    OFTEN + [pytest.param(name, True, marks=pytest.mark.slow) for name in MIXED if (name, True) not in OFTEN],
)
def test_a_few_layers_tell_of_all(model_type, checkpointing, monkeypatch):
    """Dense and sparse layers, windows, linear attention: one of each kind between the first and the last."""
    settings = recipe(checkpointing=checkpointing, precision="bf16" if checkpointing else "no")
    count, sizes = MIXED[model_type]
    config = config_of(model_type=model_type, **sizes)
    of_few = traced(settings, config)
    assert len(few_layers(config).layers) == count
    trace_all_layers(monkeypatch)
    assert of_few == traced(settings, config)


@pytest.mark.parametrize("autocast", [False, True])
def test_what_the_backward_of_a_layer_leaves_grows_with_their_number(autocast, monkeypatch):
    """RecurrentGemma's layers keep their state in an attribute, when they are recomputed with all that made it."""
    config = config_of(model_type="recurrent_gemma", lru_width=192, head_dim=32, num_hidden_layers=8)
    settings = recipe(True, precision="bf16")
    sizes = {"rows": ROWS, "length": 8, "num_targets": ROWS * 8, "autocast": autocast, "tp_size": 1}
    of_few = trace(config, settings, **sizes)
    assert len(few_layers(config).layers) < 8
    trace_all_layers(monkeypatch)
    of_all = trace(config, settings, **sizes)
    assert of_few == of_all
    held = [phase.held for phase in of_all.phases if phase.name == "backward"]
    assert held[-1] > held[0]


def test_layers_before_the_first_with_an_adapter_keep_nothing_and_those_like_them_behind_it_do(monkeypatch):
    """Attention, whose projections alone are adapted, is in the fourth and the eighth of qwen3_next's layers."""
    settings = recipe(precision="bf16", adapter={"name": "lora", "rank": 8, "targets": ["q_proj", "v_proj"]})
    count, sizes = MIXED["qwen3_next"]
    config = config_of(model_type="qwen3_next", **sizes | {"num_hidden_layers": 12})
    of_few = traced(settings, config)
    assert len(few_layers(config).layers) == count and few_layers(config, 3).layers == [0, 1, 3, 4, 7, 11]
    trace_all_layers(monkeypatch)
    assert of_few == traced(settings, config)
    reached = {phase.layer for phase in of_few.phases if phase.name == "backward"}
    assert reached == {*range(3, 12)}


def test_all_layers_are_run_where_a_few_would_be_another_model():
    """Gemma 4 has a table of embeddings as wide as it has layers."""
    config = config_of(model_type="gemma4_text", num_hidden_layers=12)
    assert few_layers(config).layers == [*range(12)]


def test_activations_grow_with_tokens_and_with_layers():
    def held(**sizes: Any) -> int:
        return next(phase for phase in traced(recipe(), config_of(**sizes)).phases if phase.name == "head").held

    seven, eight, nine = (held(num_hidden_layers=count) for count in (7, 8, 9))
    assert seven < eight
    assert nine - eight == eight - seven


def test_offloaded_inputs_of_layers_leave_the_gpu_until_their_layer_is_recomputed():
    def phases(kind: bool | str, count: int) -> tuple:
        settings = recipe(checkpointing=kind, precision="bf16")
        return traced(settings, config_of(num_hidden_layers=count), autocast=False).phases

    def held(phases: tuple, name: str) -> int:
        return next(phase for phase in phases if phase.name == name).held

    kept, kept_of_more, gone, gone_of_more = (phases(kind, count) for kind in (True, "offload") for count in (7, 9))
    size = ROWS * LENGTH * 192 * 2
    for name in ("head", "head backward"):
        assert held(kept_of_more, name) - held(kept, name) == 2 * size
        assert held(gone_of_more, name) == held(gone, name)
    assert held(kept, "head backward") - held(gone, "head backward") == 7 * size
    # Plain checkpoints of a layer and of those before it lie there in its backward; of it alone only until it is
    # computed again.
    most, less = ({phase.layer: phase.peak for phase in phases if phase.name == "backward"} for phases in (kept, gone))
    assert [most[layer] - less[layer] for layer in range(7)] == [(layer + 1) * size for layer in range(7)]


def test_autocast_keeps_copies_of_float32_weights():
    settings = recipe(checkpointing=True, precision="bf16")
    works = [traced(settings, config_of(), autocast=autocast) for autocast in (True, False)]
    copied, cast = (next(phase for phase in work.phases if phase.name == "head").held for work in works)
    inner = 7 * (192 * 32 * (6 + 2 + 2 + 6) + 3 * 192 * 500)  # of the layers; that of the head comes later
    hidden = ROWS * LENGTH * 192 * 2  # hidden states are float32 under autocast, once for each layer and the last
    assert copied - cast == pytest.approx(2 * inner + 8 * hidden, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["jamba", pytest.param("mamba", marks=pytest.mark.thorough)])
def test_a_loop_over_tokens_is_traced_in_short_rows_of_as_many(model_type, monkeypatch):
    """Bytes and kernels; its backward moves with the square of a row, since each token's gradient is a whole row's."""
    config = tiny_config(model_type)
    settings = recipe(checkpointing=True, precision="bf16")
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"max_length": 64})})
    work = TraceCache(config, settings).work(SINGLE, 1)
    monkeypatch.setattr(verdict, "SHORT", (64, 64))
    exact = TraceCache(config, settings).work(SINGLE, 1)
    for name in ("held", "peak", "kernels", "moved"):
        ours, theirs = ([getattr(phase, name) for phase in work.phases] for work in (work, exact))
        assert max(ours) == pytest.approx(max(theirs), rel=0.015)


@pytest.mark.parametrize(
    "checkpointing", [True, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (False, "selective"))]
)
def test_large_micro_batches_of_compiled_layers_follow_from_two_traces_to_the_byte(checkpointing, monkeypatch):
    """Where the chunks of the loss are half a sample long and divide it."""
    for module in (verdict, losses):
        monkeypatch.setattr(module, "LOGITS_BUDGET", VOCAB * LENGTH // 2)
    calls: list[int] = []
    monkeypatch.setattr(verdict, "trace_pass", lambda *a, **sizes: calls.append(sizes["rows"]) or trace(*a, **sizes))
    config = config_of(num_hidden_layers=3)
    compiled, plain = (recipe(checkpointing, LORA, "bf16", compiled=is_compiled) for is_compiled in (True, False))
    traces = TraceCache(config, compiled)

    def exact(settings: Recipe, rows: int) -> ActivationTrace:
        sizes = {"rows": rows, "length": LENGTH, "num_targets": rows * LENGTH}
        return trace(config, settings, **sizes, autocast=True, tp_size=1)

    few, whole = traces.work(SINGLE, 7), exact(compiled, 7)
    for name in ("held", "peak", "making"):
        assert [getattr(phase, name) for phase in few.phases] == [getattr(phase, name) for phase in whole.phases], name
    traces.work(SINGLE, 64)
    assert calls == [3, 6], "others have graphs of their own, which take seconds"
    # Of less than a chunk the logits grow too, and two such traces tell of more than there are.
    monkeypatch.setattr(losses, "LOGITS_BUDGET", losses.OF_FROZEN * VOCAB * LENGTH * 2)
    short = exact(plain, 1).towards(exact(plain, 2), 6)
    peaks = [next(phase.peak for phase in work.phases if phase.name == "head") for work in (short, exact(plain, 7))]
    assert peaks[0] > 1.1 * peaks[1]


@pytest.mark.parametrize("adapter", [None, LORA])
@pytest.mark.parametrize("objective", [{"name": "sft"}, {"name": "sft", "label_smoothing": 0.1}])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chunks_of_the_loss_that_are_alike_are_counted_as_if_each_were_run(compiled, objective, adapter, monkeypatch):
    """With a head that is trained, and with one whose gradient the forward makes; the last chunk is smaller."""
    for name, times in (("LOGITS_BUDGET", VOCAB * 100), ("OF_FROZEN", 1)):
        monkeypatch.setattr(losses, name, times)
    settings = recipe(True, adapter, "bf16", compiled=compiled, objective=objective)
    sizes: list[int] = []
    evaluate = losses._evaluate
    counting = lambda *given, **named: sizes.append(len(given[1])) or evaluate(*given, **named)  # noqa: E731
    monkeypatch.setattr(losses, "_evaluate", counting)
    counted = traced(settings, config_of(num_hidden_layers=2))
    few, _ = list(sizes), sizes.clear()
    monkeypatch.setattr(tracing, "TRACED_MODELS", {})
    monkeypatch.setattr(Ledger, "in_chunks", lambda ledger, *given: in_turn(*given))
    assert counted == traced(settings, config_of(num_hidden_layers=2))
    assert few[:3] == [100, 100, ROWS * LENGTH % 100] and len(few) < len(sizes)


@pytest.mark.slow
def test_a_long_sample_of_linear_attention_is_extrapolated_from_two_shorter_ones():
    _, sizes = MIXED["qwen3_next"]
    config = config_of(model_type="qwen3_next", **sizes | {"num_hidden_layers": 4})
    settings = recipe(checkpointing=True, precision="bf16")
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"max_length": 1280})})
    work = TraceCache(config, settings).work(SINGLE, 1)
    exact = trace(config, settings, rows=1, length=1280, num_targets=1280, autocast=True, tp_size=1)
    for name in ("held", "peak", "kernels"):
        ours, theirs = ([getattr(phase, name) for phase in work.phases] for work in (work, exact))
        assert ours == pytest.approx(theirs, rel=1e-3)


def test_layers_with_a_state_have_a_second_rate_for_kernels_of_their_own(tmp_path):
    rates = {}
    for model_type in ("lfm2", "llama"):
        tiny_config(model_type).save_pretrained(tmp_path / model_type)
        settings = recipe(precision="bf16")
        model = settings.model.model_copy(update={"name_or_path": str(tmp_path / model_type)})
        data = settings.data.model_copy(update={"max_length": 128})
        settings = settings.model_copy(update={"model": model, "data": data})
        report = forecast_all(settings, [SINGLE], parse_machines("1xH100"), "recipe.yaml", limits=False)
        said = in_words(report, "recipe.yaml", num_samples=None, price=None)
        rates[model_type] = report.forecasts[0].time, report.forecasts[0].time_of_kernels, "causal-conv1d" in said
    (traced, of_kernels, is_said), without = rates["lfm2"], rates["llama"]
    assert traced is not None and of_kernels is not None and is_said
    assert of_kernels.low < traced.low and of_kernels.high < traced.high
    assert without[1:] == (None, False)


def test_a_model_with_too_many_operations_has_no_forecast(monkeypatch, tmp_path):
    """Their number ends a trace and no time, which depends on what else the machine does."""
    config = config_of()
    config.save_pretrained(tmp_path / "model")
    settings = recipe(precision="bf16")
    model = settings.model.model_copy(update={"name_or_path": str(tmp_path / "model")})
    settings = settings.model_copy(update={"model": model})
    machines = parse_machines("1xH100")
    assert forecast_all(settings, [SINGLE], machines, "recipe.yaml", limits=False).forecasts[0].verdict == "fits"
    monkeypatch.setattr(verdict, "TRACES", {})
    monkeypatch.setattr(ledgers, "MOST_OPERATIONS", 100)
    why = "llama cannot be traced: its forward has more than 100 operations"
    with pytest.raises(Untraceable, match=f"^{why}$"):
        traced(recipe(), config)
    several = [load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in ("single", "ddp", "zero3", "tp")]
    report = forecast_all(settings, several, machines, "recipe.yaml", suggests="all")
    assert {forecast.strategy.name: forecast.verdict for forecast in report.forecasts} == {
        **dict.fromkeys(("single", "ddp", "zero3"), "no forecast"),
        "tp": "cannot run",
    }
    assert all(forecast.memory is None and forecast.time is None for forecast in report.forecasts)
    said = " ".join(in_words(report, "recipe.yaml", num_samples=None, price=None).split())
    assert f"no forecast of single, ddp, zero3: {why}; launch it with --set run.max_steps=2" in said
    assert "fit" not in said and "GiB a GPU" not in said


def test_a_strategy_that_cannot_be_traced_is_named_beside_those_that_can(monkeypatch, tmp_path):
    config_of().save_pretrained(tmp_path / "model")
    settings = recipe(precision="bf16")
    model = settings.model.model_copy(update={"name_or_path": str(tmp_path / "model")})
    batch = settings.batch.model_copy(update={"micro_batch_size": 1})
    settings = settings.model_copy(update={"model": model, "batch": batch})

    def without_zero3(*args: Any, is_zero3: bool, **kwargs: Any) -> ActivationTrace:
        if is_zero3:
            raise Untraceable("llama cannot be traced: here")
        return trace(*args, is_zero3=is_zero3, **kwargs)

    monkeypatch.setattr(verdict, "TRACES", {})
    monkeypatch.setattr(verdict, "trace_pass", without_zero3)
    both = [load_strategy(Path(f"accelerate_configs/{name}.yaml")) for name in ("zero3", "zero2")]
    report = forecast_all(settings, both, parse_machines("3xH100"), "recipe.yaml", limits=False)
    verdicts = [(forecast.strategy.name, forecast.verdict) for forecast in report.forecasts]
    assert verdicts == [("zero2", "fits"), ("zero3", "no forecast")]
    said = in_words(report, "recipe.yaml", num_samples=None, price=None)
    assert "no forecast of zero3:\n" in said and "llama cannot be traced: here; launch it" in said


@pytest.mark.parametrize("model_type", ["qwen3_moe", "llama4_text"])
def test_what_is_made_again_counts_as_if_each_operation_were_run(model_type: str, monkeypatch):
    """By torch's fake mode, of which everything else then is. Llama 4 turns queries and keys by complex numbers."""
    settings, config = recipe(model_type == "qwen3_moe", precision="bf16"), tiny_config(model_type)
    again = [traced(settings, config) for _ in range(2)][1]
    num_run = []

    def plain(function: Any, args: Any, kwargs: Any, given: Any) -> Any:
        num_run.append(function)
        return function(*args, **kwargs)

    monkeypatch.setattr(tracing, "TRACED_MODELS", {})
    monkeypatch.setattr(ledgers, "run", plain)
    monkeypatch.setattr(tracing, "light", lambda mode, tensor: FakeTensor(mode, tensor.detach(), torch.device("cpu")))
    assert traced(settings, config) == again
    assert len(num_run) > 500


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_a_model_tells_of_other_sizes_what_a_new_one_does(model_type: str, keeps: bool, monkeypatch):
    """But not one that has kept something of the trace before: then each trace makes its own."""
    settings, config, made = recipe(True, {"name": "lora"}, "bf16"), tiny_config(model_type), []
    sizes = [{"rows": rows, "length": 64, "num_targets": rows * 64} for rows in (1, 3, 2)]
    build = tracing._fake_model

    def counted(*arguments: Any) -> Any:
        made.append(model := build(*arguments))
        norm = tracing.backbone_of(model).norm
        if keeps:
            norm.register_forward_hook(lambda module, _, result: setattr(module, "last", result))
        return model

    def all_sizes(*, anew: bool) -> list[ActivationTrace]:
        traces = []
        for each in sizes:
            if anew:
                tracing.TRACED_MODELS.clear()
            traces.append(trace(config, settings, **each, autocast=False, tp_size=1))
        return traces

    monkeypatch.setattr(tracing, "TRACED_MODELS", {})
    monkeypatch.setattr(tracing, "_fake_model", counted)
    alone = all_sizes(anew=True)
    made.clear()
    tracing.TRACED_MODELS.clear()
    assert all_sizes(anew=False) == alone and len({work.phases for work in alone}) == 3
    assert len(made) == (3 if keeps else 1)


@pytest.mark.parametrize("ends", [False, True])
def test_a_second_process_makes_half_of_the_traces_of_a_hybrid(ends: bool, monkeypatch):
    """With the result of one, also where it has ended or cannot be sent its work."""
    settings, config = recipe(True, precision="bf16"), tiny_config("qwen3_5_text")
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"max_length": 4096})})
    here: list[int] = []

    def counted(*arguments: Any, length: int, **options: Any) -> ActivationTrace:
        here.append(length)
        return trace(*arguments, length=length, **options)

    monkeypatch.setattr(verdict, "trace_pass", counted)

    def work() -> ActivationTrace:
        monkeypatch.setattr(verdict, "TRACES", {})
        here.clear()
        return TraceCache(config, settings).work(SINGLE, 1)

    alone = work()
    assert here == list(verdict.LONG)
    with second_process.second_process():
        if ends:
            monkeypatch.setattr(second_process, "_answer", lambda parents, own: None)
        assert work() == alone
        assert here == (list(verdict.LONG) if ends else [verdict.LONG[0]])
        assert work() == alone
    assert work() == alone and here == list(verdict.LONG)


def test_strategies_share_traces_and_traces_what_they_have_found(monkeypatch):
    """By hand: `single` is `ddp`'s; two kinds, each of one and two samples, of two lengths from which longer ones are
    extrapolated. What takes time is the operations, and above all those that the fake mode has not yet answered.
    """
    monkeypatch.setattr(verdict, "TRACES", {})
    monkeypatch.setattr(repeated, "RESULTS", {})
    num_operations, num_asked, asked = [], 0, repeated._run_plainly

    def counted(*arguments: Any) -> Ledger:
        traced_work = trace_phases(*arguments)
        num_operations.append(traced_work._operations)
        return traced_work

    def answer(*arguments: Any) -> Any:
        nonlocal num_asked
        num_asked += 1
        return asked(*arguments)

    trace_phases = tracing._trace_phases
    monkeypatch.setattr(tracing, "_trace_phases", counted)
    monkeypatch.setattr(repeated, "_run_plainly", answer)
    settings = recipe(True, {"name": "lora"}, "bf16")
    settings = settings.model_copy(update={"data": settings.data.model_copy(update={"max_length": 2048})})
    traces = TraceCache(tiny_config("qwen3_next"), settings)
    for name in ("single", "ddp", "fsdp2"):
        for micro_batch in (1, 2, 1):
            traces.work(load_strategy(Path(f"accelerate_configs/{name}.yaml")), micro_batch)
    assert len(num_operations) == 2 * 2 * 2
    assert 1000 < max(num_operations) < 5500
    assert 100 < num_asked < sum(num_operations) / 8


def test_an_operation_is_run_again_for_what_it_tells_apart():
    aten = torch.ops.aten
    with FakeTensorMode() as mode:
        whole = light(mode, torch.zeros(4, 6, dtype=torch.int64, device="meta"))

        def done(function: Any, *args: Any) -> Any:
            return run(function, args, {}, [args[0]])

        def rows_from(row: int) -> Any:
            return done(aten.slice.Tensor, whole, 0, row, 4)

        for _ in range(2):
            assert [done(aten.add.Tensor, whole, number).dtype for number in (1, 1.0)] == [torch.int64, torch.float32]
            assert done(aten.add.Tensor, done(aten.t.default, whole), 1).stride() == (1, 6)
            part = done(aten.slice.Tensor, whole, 0, 1, 3)
            assert (part.storage_offset(), part.shape) == (6, (2, 6))
            assert part.untyped_storage() is whole.untyped_storage()
            slices = [done(aten.slice.Tensor, rows_from(row), 0, 1, 2) for row in (0, 2)]
            assert [tensor.storage_offset() for tensor in slices] == [6, 18]
            assert done(aten.as_strided.default, rows_from(2), (2,), (1,), 5).storage_offset() == 5
            assert done(aten.add_.Tensor, whole, 1) is whole
            longer = done(aten.unsqueeze_.default, done(aten.add.Tensor, whole, 1), 0)
            assert longer.shape == (1, 4, 6) and done(aten.t.default, done(aten.select.int, longer, 0, 0)).shape == (
                6,
                4,
            )


def test_experts_of_a_forecast_answer_as_those_of_a_run_do():
    methods = {name for name, value in vars(Dequantizer).items() if callable(value) and not name.startswith("_")}
    assert methods and methods <= vars(_PackedExperts).keys()


def test_a_product_in_4_bits_has_the_weight_and_its_scales_for_a_moment():
    """By hand: of 3 x 256 tokens in bf16, 192 to 512 features and back. A float32 scale for each 64 weights, twice in
    the forward (bitsandbytes 0.50.2, backends/cuda/ops.py, _dequant_linear_fallback) and once in the backward."""
    tokens, weights = ROWS * LENGTH, 192 * 512
    scales = weights // 64 * 4
    with FakeTensorMode():
        weight = torch.empty(512, 192, dtype=torch.bfloat16)
        hidden = torch.empty(tokens, 192, dtype=torch.bfloat16, requires_grad=True)
        with Ledger(iter([weight, hidden])) as ledger:
            result = _Product.apply(hidden, weight, None)
            assert ledger.peak == 2 * scales + 2 * weights + 2 * tokens * 512
            assert ledger.live == 2 * tokens * 512  # nothing else waits for the backward
            gradient = torch.empty_like(result)
            before = ledger.live
            ledger.peak = 0
            result.backward(gradient)
            assert ledger.peak == before + scales + 2 * weights + 2 * tokens * 192
            # Each way the scales, their offset, the weight and the product; half a byte read and two written.
            assert ledger.kernels == 2 * (3 + 1) and ledger.moved == 2 * (weights / 2 + scales + 2 * weights)


def indices(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.long)


def of_loss(logits: torch.Tensor) -> torch.Tensor:
    """The gradient alone."""
    with torch.no_grad():
        each, total = torch.empty(100), torch.empty(())
        return torch.ops.aten.nll_loss_backward(each, logits, indices(100), None, 0, -100, total)


def of_experts(rows: torch.Tensor) -> torch.Tensor:
    weights, ends = torch.empty(4, 64, 32, dtype=torch.bfloat16), torch.empty(4, dtype=torch.int32)
    return torch._grouped_mm(torch.empty(100, 64, dtype=torch.bfloat16), weights, offs=ends)


ATEN = torch.ops.aten
# What is done with 100 x 64 float32 numbers, 25,600 bytes; the kernels it starts, and the bytes that these move.
BY_HAND: dict[str, tuple[Callable[[torch.Tensor], Any], int, int]] = {
    "slice_backward": (lambda x: ATEN.slice_backward(x[:, :16], [100, 64], 1, 0, 16, 1), 2, 25600 + 2 * 6400),
    "select_backward": (lambda x: ATEN.select_backward(x[0], [100, 64], 0, 0), 2, 25600 + 2 * 256),
    "nll_loss_forward": (lambda x: F.nll_loss(x, indices(100), reduction="none"), 1, 800 + 2 * (400 + 4)),
    "nll_loss_backward": (of_loss, 2, 25600),
    "scatter_": (lambda x: x.scatter_(1, indices(100, 1), torch.empty(100, 1)), 1, 800 + 2 * 400),
    "index_put_": (lambda x: ATEN.index_put_(x, [indices(10)], torch.empty(10, 64)), 1, 80 + 2 * 2560),
    "new_zeros": (lambda x: x.new_zeros(50, 64), 1, 12800),
    "ones_like": (torch.ones_like, 1, 25600),
    "_grouped_mm": (of_experts, 1, 0),
    "addmm_": (lambda x: x.addmm_(torch.empty(100, 32), torch.empty(32, 64)), 1, 0),
}


@pytest.mark.parametrize(("operation", "kernels", "moved"), BY_HAND.values(), ids=BY_HAND)
def test_kernels_and_their_bytes_by_hand(operation: Callable[[torch.Tensor], Any], kernels: int, moved: int):
    with FakeTensorMode():
        numbers = torch.empty(100, 64)
        with Ledger([numbers]) as ledger:
            operation(numbers)
    assert (ledger.kernels, ledger.moved, ledger.streamed) == (kernels, moved, 0)


def test_a_product_with_four_experts_is_four_where_it_is_a_loop():
    with FakeTensorMode(), Ledger([]) as ledger:
        of_experts(torch.empty(100, 64))
    assert (ledger.kernels, ledger.looped) == (1, 3)


@pytest.mark.parametrize(("heads", "kernels"), [(6, 3), (2, 5)])
def test_the_backward_of_attention_sums_the_gradients_of_grouped_heads(heads: int, kernels: int):
    with FakeTensorMode():
        query = torch.empty(1, 6, 128, 32, dtype=torch.bfloat16, requires_grad=True)
        shared = torch.empty(1, heads, 128, 32, dtype=torch.bfloat16)
        result, _ = tracing._flash(query, shared, shared)
        with Ledger([]) as ledger:
            result.backward(torch.empty_like(result))
    assert ledger.kernels == kernels


# Of 100 x 64 numbers in 16 bits: the type of the result, the kernels, and the bytes these move.
OF_AUTOCAST: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], torch.dtype, int, int]] = {
    # three casts; then 25,600 bytes and the two weights read, as many written, and the mean and spread of each row
    "layer norm": (
        lambda x: F.layer_norm(x, (64,), x[0], x[0]),
        torch.float32,
        4,
        12800 + 25600 + 2 * (128 + 256) + (2 * 25600 + 2 * 256 + 2 * 400),
    ),
    "power": (lambda x: torch.pow(x, 3.0), torch.float32, 2, 12800 + 25600 + 2 * 25600),
    "sum": (lambda x: x.sum(dim=1), torch.float32, 1, 12800 + 400),
    "softmax": (lambda x: F.softmax(x, dim=-1), torch.float32, 2, 12800 + 25600 + 2 * 25600),
    "its own type": (lambda x: x.sum(dim=1, dtype=torch.bfloat16), torch.bfloat16, 1, 12800 + 200),
    "gelu": (F.gelu, torch.bfloat16, 1, 2 * 12800),
    "an operation of no shipped model": (torch.expm1, torch.float32, 2, 12800 + 25600 + 2 * 25600),
}


@pytest.mark.parametrize(("operation", "dtype", "kernels", "moved"), OF_AUTOCAST.values(), ids=OF_AUTOCAST)
def test_autocast_computes_in_float32_what_cuda_s_does(
    operation: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, kernels: int, moved: int
):
    with FakeTensorMode():
        numbers = torch.empty(100, 64, dtype=torch.bfloat16)
        with autocast_of_cuda(), torch.autocast("cpu", dtype=torch.bfloat16), Ledger([numbers]) as ledger:
            assert operation(numbers).dtype == dtype
    assert (ledger.kernels, ledger.moved) == (kernels, moved)
    assert torch.ones(2, dtype=torch.bfloat16).sum().dtype == torch.bfloat16


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "16 bits"])
def test_under_autocast_4_bit_layers_make_no_float32_copies(autocast):
    """peft casts the input of a LoRA layer to the adapter's float32, but not beside 4 bits under autocast (0.21.2,
    lora/bnb.py and lora/layer.py); without autocast the adapter is in 16 bits, and there is nothing to cast."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}

    def most(name: str) -> int:
        settings = recipe(adapter={"name": name, "rank": 8}, precision="bf16")
        return max(phase.held for phase in traced(settings, config_of(**sizes), autocast=autocast).phases)

    assert (most("qlora") < most("lora")) is autocast


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_layer_is_divided_at_its_experts_and_layers_between_are_like_those_traced(monkeypatch, checkpointing: bool):
    """Experts are computed again once their backward has begun, when their weights are there."""
    config = experts_config(num_hidden_layers=5)
    call = partial(trace, config, recipe(checkpointing, precision="bf16"), rows=ROWS, length=LENGTH, autocast=False)
    call = partial(call, num_targets=ROWS * LENGTH, tp_size=1, fsdp=2, is_sharded_while_read=True)
    work = call(ep_size=2)
    of_layer = [phase.name for phase in work.phases if phase.layer == 3]
    assert of_layer == [
        *("forward", "experts forward", "rest forward"),
        *("backward", "experts backward", "rest backward"),
    ]
    trace_all_layers(monkeypatch)
    whole = call(ep_size=2)
    assert [replace(phase, kernels=0, looped=0, moved=0, streamed=0) for phase in work.phases] == [
        replace(phase, kernels=0, looped=0, moved=0, streamed=0) for phase in whole.phases
    ]
    assert {phase.name for phase in call().phases} == {"embed", "forward", "head", "head backward", "backward", "end"}
