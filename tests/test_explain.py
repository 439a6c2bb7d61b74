"""Protects `explain` and `check`: quantities by hand, places that are right, what differs, and no torch for any of it.

python -m pytest -q tests/test_explain.py
"""

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import RECIPE, ROOT, clean_environment

from cookbook.commands.cli import main
from cookbook.commands.explain import compare
from cookbook.commands.explain.chart import HEIGHT, LETTERS, WIDTH, draw
from cookbook.commands.explain.explanation import explain, in_words
from cookbook.config import effects
from cookbook.config.optim import Optimizer
from cookbook.config.recipe import Recipe, leaves
from cookbook.config.sections import AdapterSection
from cookbook.config.strategy import load_strategy
from cookbook.facts.model_types import look_up
from cookbook.forecast.costs import per_parameter as costs
from cookbook.forecast.costs.inputs import CostInputs
from cookbook.system.console import can_show
from cookbook.system.files import RecipeError
from cookbook.training.checkpoint.resume import rule_of
from tests.test_cli import AS_PINNED

RECIPES = sorted(path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml"))
STRATEGIES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "numpy", "datasets", "tokenizers")
ZERO3 = Path("recipes/qwen25_7b/sft.yaml")


@pytest.fixture
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def strategy(name):
    return Path(f"accelerate_configs/{name}.yaml")


# Quantities.


# recipe, what is asked -> processes, accumulation, tokens a step; worked out by hand from the files
BY_HAND = {
    "needs 4 GPUs": (ZERO3, {}, 4, "32 = 128 / (1 x 4)", "at most 262,144 = 128 x 2,048"),
    "16 asked for": (ZERO3, {"processes": 16}, 16, "8 = 128 / (1 x 16)", "at most 262,144 = 128 x 2,048"),
    "pairs": ("recipes/llama31_8b/dpo_lora.yaml", {}, 4, "8 = 32 / (1 x 4)", "at most 65,536 = 32 x 2 x 1,024"),
    "one GPU": ("recipes/llama31_8b/sft_qlora.yaml", {}, 1, "16 = 16 / (1 x 1)", "at most 32,768 = 16 x 2,048"),
    "no GPU": ("recipes/quickstart.yaml", {}, 2, "4 = 16 / (2 x 2)", "at most 2,048 = 16 x 128"),
    "mesh of 4": (
        "recipes/quickstart.yaml",
        {"strategy_path": strategy("hsdp")},
        4,
        "2 = 16 / (2 x 4)",
        "at most 2,048",
    ),
    "tensor parallel": ("recipes/quickstart.yaml", {"strategy_path": strategy("tp")}, 2, "8 = 16 / (2 x 1)", "at most"),
    "token limit": ("recipes/smollm2_135m/sft.yaml", {}, 1, "at most 128 = 128 / 1", "at most 262,144"),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_quantities_are_those_worked_out_by_hand(case, in_root, monkeypatch):
    monkeypatch.setattr("cookbook.start.run_plan.num_cores", lambda: 8)
    recipe, asked, processes, accumulation, tokens = BY_HAND[case]
    batch = explain(Path(recipe), **asked).sections["BATCH"]
    assert batch["processes"].value == processes
    assert batch["accumulation"].text.startswith(accumulation)
    assert batch["tokens a step"].text.startswith(tokens)


def test_rows_are_packed_unless_that_is_known_to_be_wrong(in_root, tmp_path, monkeypatch):
    monkeypatch.setattr("cookbook.facts.packing.installed_version", lambda name: look_up("bloom").transformers)
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    quantities = {
        name: explain(ZERO3, assignments=[name]).sections["WHAT"]["rows"]
        for name in ("seed=1", "data.packing=false", f"model.name_or_path={tmp_path}", "model.name_or_path=no/such")
    }
    assert [quantity.text for quantity in quantities.values()] == [
        "packed",
        "padded: data.packing is false",
        "padded: its attention is code of its own in transformers, which cannot be told where a sample begins",
        "packed, if its architecture can be",
    ]
    assert [quantity.sources for quantity in quantities.values()] == [
        ("default",),
        ("command line",),
        ("default",),
        ("default",),
    ]


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_every_shipped_recipe_is_explained(path, in_root):
    run = explain(path)
    page, plain = in_words(run), in_words(run, plain=True)
    for title in ("WHAT", "BATCH", "LENGTH", "OPTIMIZER", "PRECISION", "BYTES", "LAUNCH"):
        assert re.search(rf"(?m)^{title}", page)
    assert plain.isascii() and len(plain.splitlines()) == len(page.splitlines())
    assert ("DEEPSPEED" in page) == (run.strategy.kind == "zero")
    assert page.endswith(f"train.py {path}")


def test_there_are_recipes_to_explain():
    assert len(RECIPES) >= 20 and len(STRATEGIES) >= 14


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_recipe_is_explained_under_every_strategy(name, in_root):
    recipe = "olmoe_1b_7b/sft" if name == "fsdp2_ep" else "quickstart"
    run = explain(Path(f"recipes/{recipe}.yaml"), strategy_path=strategy(name))
    assert run.strategy.name == name and run.files["yaml"].sources == ("command line",)
    launched = f"--config_file accelerate_configs/{name}.yaml --num_processes {run.plan.num_processes}"
    assert launched in in_words(run)


@pytest.mark.parametrize(
    ("recipe", "name", "problem"),
    [
        ("quickstart", "fsdp2_ep", "llama has no experts; use fsdp2"),
        ("olmoe_1b_7b/sft", "tp", "olmoe is not among the architectures"),
        ("qwen3_30b_a3b/sft", "pp", "qwen3_moe is not one of the models that a pipeline is known to suit"),
    ],
)
def test_a_mesh_that_does_not_suit_the_model_is_refused_where_its_structure_is_known(recipe, name, problem, in_root):
    with pytest.raises(RecipeError) as refused:
        explain(Path(f"recipes/{recipe}.yaml"), strategy_path=strategy(name))
    assert [mistake for mistake in refused.value.mistakes if mistake.startswith(f"{strategy(name)}: {problem}")]


# Places.


# quantity -> words of which the line of each place must have one
WORDS = {
    "step": ["global_batch_size"],
    "accumulation": ["global_batch_size", "micro_batch_size", "num_processes"],
    "tokens a step": ["global_batch_size", "max_length"],
    "peak rate": ["learning_rate"],
    "warm-up": ["warmup_steps"],
    "schedule": ["name:"],
    "processes": ["num_processes", "Needs:"],
    "steps": ["max_steps", "num_epochs", "global_batch_size", "num_rounds"],
    "written to": ["output_dir"],
    "evaluation": ["eval_every_steps"],
    "sample": ["max_length"],
    "rows": ["packing"],
    "compute": ["mixed_precision"],
}


def misplaced(run, shift=0):
    """How many places were looked up, and those whose line is about something else."""
    quantities = {name: quantity for section in run.sections.values() for name, quantity in section.items()}
    looked, wrong = 0, []
    for name, words in WORDS.items():
        for place in quantities[name].sources:
            if match := re.fullmatch(r"(.+):(\d+)", place):
                line = Path(match[1]).read_text().splitlines()[int(match[2]) - 1 + shift]
                looked += 1
                wrong += [] if any(word in line for word in words) else [(name, place, line)]
    return looked, wrong


@pytest.mark.parametrize("path", RECIPES, ids=str)
def test_every_place_is_the_line_of_the_value(path, in_root):
    looked, wrong = misplaced(explain(path))
    assert looked >= 12
    assert wrong == []


def test_a_wrong_place_would_be_found(in_root):
    looked, wrong = misplaced(explain(ZERO3), shift=-1)
    assert len(wrong) > looked / 2


def test_a_loss_scale_and_what_follows_a_shortage_are_shown_where_they_are(in_root):
    plain = explain(ZERO3).sections
    assert "loss scale" not in plain["OPTIMIZER"] and "out of memory" not in plain["LENGTH"]
    words = ["mixed_precision=fp16", "loss_scale={window: 500, hysteresis: 2}", "run.on_out_of_memory=next_strategy"]
    sections = explain(ZERO3, assignments=words).sections
    scale = sections["OPTIMIZER"]["loss scale"]
    assert scale.text == "65536, doubles after 500 steps, halves at each overflow from number 2 on"
    assert scale.sources == ("command line", "default")
    assert sections["LENGTH"]["out of memory"].text == "starts again with a smaller micro-batch or strategy"


def test_a_default_and_the_command_line_are_distinguished_from_the_file(in_root):
    assignments = ["batch.micro_batch_size=2", "run={num_epochs: 3, output_dir: outputs/x}"]
    sections = explain(ZERO3, assignments=assignments).sections
    assert sections["BATCH"]["forward"].sources == ("command line",)
    assert sections["LENGTH"]["epochs"].sources == ("command line",)
    assert sections["LENGTH"]["evaluation"].sources == ("default",)
    assert sections["OPTIMIZER"]["clipping"].sources == ("default",)
    assert sections["BATCH"]["step"].sources == (f"{ZERO3}:32",)
    assert sections["BATCH"]["accumulation"].text == "16 = 128 / (2 x 4)"


def test_a_section_that_only_the_command_line_has_comes_from_there(in_root):
    sections = explain(ZERO3, assignments=["adapter.name=lora", "adapter.rank=8"]).sections
    assert sections["WHAT"]["trained"].text == "lora of rank 8, alpha 32, on all-linear"
    assert sections["WHAT"]["trained"].sources == ("command line", "default")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.jsonl.gz"])
def test_a_file_is_shown_without_a_split_and_a_folder_with_one(book, name):
    book.write(name, "text\nx\n")
    book.write("chats/train.csv", "text\nx\n")
    sections = explain(Path(RECIPE), assignments=[f"data.train=[{name}, chats]"]).sections
    assert sections["WHAT"]["data"].text == f"{name}; chats (train)"


# Length.


def rows(book, count, name="rows.jsonl"):
    book.write(name, "\n".join([json.dumps({"text": "x"})] * count) + "\n\n \n")


def length(*assignments, path=RECIPE):
    run = explain(Path(path), assignments=list(assignments))
    return run.num_steps, run.sections["LENGTH"]["steps"].text


THREE_EPOCHS = ("run.max_steps=null", "run.num_epochs=3", "batch.global_batch_size=4", "batch.micro_batch_size=2")


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ("data.train=rows.jsonl", 9),  # 3 x 10 / 4, rounded up
        ("data.train={path: rows.jsonl, max_rows: 8}", 6),
        ("data.train=[rows.jsonl, {path: rows.jsonl, weight: 0.25}]", 12),  # 10 + 3 (2.5 rounded) of them
        ("data.train={path: rows.jsonl, weight: 2}", 15),
    ],
    ids=["ten rows", "first eight", "a quarter", "twice"],
)
def test_rows_of_a_local_file_are_counted(book, train, steps):
    rows(book, 10)
    num_steps, text = length(train, *THREE_EPOCHS, "schedule.warmup_steps=0")
    assert num_steps == steps and text.startswith(f"at most {steps} = 3 x (")


@pytest.mark.parametrize(
    "unknown", [["objective={name: cpt}"], ["data.holdout=0.2"], ["data.train=python-stdlib"]], ids=str
)
def test_what_depends_on_the_tokens_is_not_made_up(book, unknown):
    rows(book, 10)
    num_steps, text = length("data.train=rows.jsonl", *THREE_EPOCHS, *unknown)
    assert num_steps is None and "counted when the data is tokenised" in text


def test_a_warm_up_longer_than_the_rows_allow_is_refused_at_once(book):
    rows(book, 10)
    with pytest.raises(RecipeError, match="warmup_steps is 10, but the run has 9 steps"):
        length("data.train=rows.jsonl", *THREE_EPOCHS)


def test_steps_that_are_written_need_no_data(book):
    assert length() == (30, "30")


# The curve.


def test_the_curve_is_that_of_the_run(in_root):
    """Linear from 1.0 over 10 steps after 2 of warm-up: 1/2, 2/2, then 8/8 to 1/8 of the peak."""
    settings = ["schedule={name: linear, warmup_steps: 2}", "run.max_steps=10", "optim.learning_rate=0.8"]
    settings.append("run.eval_every_steps=5")
    run = explain(Path("recipes/quickstart.yaml"), assignments=settings)
    assert run.rates == pytest.approx([0.4, 0.8] + [0.1 * n for n in (8, 7, 6, 5, 4, 3, 2, 1)])


def test_of_an_unknown_length_the_chart_says_for_how_many_steps_it_is(in_root):
    run = explain(ZERO3)
    assert run.num_steps is None
    assert "drawn for 1,600 steps" in run.sections["OPTIMIZER"]["schedule"].text
    assert max(run.rates) == pytest.approx(2e-5, rel=0.02)
    assert "100 %" in in_words(run)


def test_a_scaled_learning_rate_is_shown_with_its_arithmetic(in_root):
    scaled = ["schedule.scale_lr=sqrt", "schedule.base_batch_size=4", "optim.learning_rate=1e-3"]
    run = explain(Path("recipes/quickstart.yaml"), assignments=scaled)
    assert run.sections["OPTIMIZER"]["peak rate"].text == "2e-3 = 1e-3 x sqrt(16 / 4)"
    assert max(run.rates) == pytest.approx(2e-3)


def dots(lines):
    """For each character column of a plain chart, the rows that have a dot, from the top."""
    body = [line.split("|", 1)[1].ljust(WIDTH) for line in lines[:HEIGHT]]
    return [{row for row in range(HEIGHT) if body[row][column] == "*"} for column in range(WIDTH)]


def test_a_chart_has_the_shape_of_its_values():
    rising = [i / 99 for i in range(100)]
    columns = dots(draw(rising, bottom="0", top="1", ticks=["a", "b"], plain=True))
    assert all(columns), "every column has a dot"
    assert HEIGHT - 1 in columns[0] and 0 in columns[-1]
    tops = [min(column) for column in columns]
    assert tops == sorted(tops, reverse=True)
    assert dots(draw(rising[::-1], bottom="0", top="1", ticks=["a"], plain=True)) != columns


def test_a_chart_in_braille_has_the_same_shape():
    values = [0.0, 1.0] + [1.0] * 40
    for line in draw(values, bottom="0", top="1", ticks=["a"])[:HEIGHT]:
        assert all(0x2800 < ord(letter) <= 0x28FF for letter in line.split("┤")[1] if letter != " ")
    assert len(draw(values, bottom="0", top="1", ticks=["a"])) == HEIGHT + 2


def test_a_curve_that_is_zero_everywhere_can_be_drawn():
    assert draw([0.0], bottom="0", top="0", ticks=["a"], plain=True)


@pytest.mark.parametrize(("encoding", "answer"), [("utf-8", True), ("ascii", False), (None, False), ("odd", False)])
def test_a_terminal_without_braille_is_known(encoding, answer):
    assert can_show(LETTERS, encoding) == answer


def cookbook(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "cookbook", *arguments],
        cwd=ROOT,
        env={**clean_environment(CUDA_VISIBLE_DEVICES=""), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_terminal_without_braille_gets_letters():
    done = cookbook("explain", str(ZERO3), PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stdout.isascii() and "*" in done.stdout


# DeepSpeed.


def test_the_engine_has_no_other_way_to_make_the_configuration():
    """The last test here compares what a run hands over."""
    text = (ROOT / "cookbook/training/engine/zero.py").read_text()
    assert "from cookbook.start.ds_config import deepspeed_config, separate_swap" in text
    assert "config = deepspeed_config(" in text and "self.deepspeed_config = config\n" in text
    assert text.count("deepspeed_config(") == 1


def test_the_differences_from_the_json_are_all_shown(in_root):
    run = explain(ZERO3, processes=8)
    assert run.deepspeed_changes == {
        "bf16.enabled": ("auto", True),
        "fp16.enabled": ("auto", False),
        "train_batch_size": ("auto", 128),
        "train_micro_batch_size_per_gpu": ("auto", 1),
        "gradient_accumulation_steps": ("auto", 16),
        "gradient_clipping": ("auto", 1.0),
        "zero_allow_untested_optimizer": (None, True),
        "steps_per_print": (None, 2**31),
    }
    assert "auto" not in json.dumps(run.deepspeed)


def test_a_second_copy_of_the_weights_is_shared_by_the_processes_of_a_machine(in_root):
    run = explain(ZERO3, strategy_path=strategy("zero3_hpz"), processes=8)
    assert run.deepspeed_changes["zero_optimization.zero_hpz_partition_size"] == ("auto", 8)
    assert "auto" not in json.dumps(run.deepspeed)


def test_a_swap_folder_is_that_of_the_run(in_root):
    run = explain(Path("recipes/llama31_70b/sft.yaml"), strategy_path=strategy("zero3_nvme"))
    before, after = run.deepspeed_changes["zero_optimization.offload_param.nvme_path"]
    assert before == "nvme_swap" and re.fullmatch(r"nvme_swap/llama31_70b-sft-zero3_nvme-[0-9a-f]{8}", after)


def test_what_only_the_model_tells_is_named_as_open(in_root):
    page = in_words(explain(Path("recipes/llama31_70b/sft.yaml"), strategy_path=strategy("zero3_nvme")))
    assert re.search(r'offload_param\.buffer_size +"auto" -> what a run finds in the model', page)
    assert "what a run finds" not in in_words(explain(ZERO3))


# Costs, per trained parameter.


def setting(name, processes=8, **options):
    options = {"accumulation": 1} | options
    if "optim" in options:
        options["optim"] = Optimizer.of(learning_rate=1.0, **options["optim"])
    if "adapter" in options:
        options["adapter"] = AdapterSection(name=options["adapter"])
    return CostInputs(strategy=load_strategy(strategy(name)), num_processes=processes, **options)


# Bytes on the GPU and on the host or disk with 8 processes (hsdp: 2 x 2, tp: 2), under bf16 and AdamW.
# Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1, for ZeRO: 2 + 2 + 12 cut at each stage; float32 elsewhere.
STATES = {
    "single": (1, 16, 0, 0),
    "ddp": (8, 16, 0, 0),
    "ddp_sp": (8, 16, 0, 0),
    "zero1": (8, 2 + 2 + 12 / 8, 0, 0),
    "zero2": (8, 2 + (2 + 12) / 8, 0, 0),
    "zero3": (8, 16 / 8, 0, 0),
    "fsdp1": (8, 16 / 8, 0, 0),
    "fsdp2": (8, 16 / 8, 0, 0),
    "fsdp2_grad_op": (8, 16 / 8 + 2, 0, 0),
    "fsdp2_sp": (8, 16 / 8, 0, 0),
    "zero3_sp": (8, 16 / 8, 0, 0),
    "zero3_hpz": (8, (16 + 2) / 8, 0, 0),  # one machine
    "fsdp2_offload": (8, 0, 16 / 8, 0),
    "hsdp": (4, 16 / 2, 0, 0),
    "tp": (2, 16 / 2, 0, 0),
    "ddp_tp": (8, 16 / 2, 0, 0),
    "fsdp2_tp": (8, 16 / 8, 0, 0),
    "hsdp_tp": (8, 16 / 4, 0, 0),
    "fsdp2_ep": (8, 16 / 8, 0, 0),
    "pp": (8, 16 / 2, 0, 0),
    "pp_fsdp2": (8, 16 / 8, 0, 0),
    "pp_tp": (8, 16 / 4, 0, 0),
    "pp_tp_fsdp2": (8, 16 / 8, 0, 0),
    "zero2_offload": (8, 2, (12 + 4 + 2 + 2) / 8, 0),
    "zero3_offload": (8, 0, (14 + 6) / 8, 0),
    "zero3_nvme": (8, 0, 2 / 8, (14 + 4) / 8),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_states_are_those_of_the_paper(name, in_root):
    processes, *expected = STATES[name]
    shares = costs.shares(setting(name, processes, accumulation=2))
    assert [costs.total(shares, where) for where in costs.PLACES] == pytest.approx(expected)


def test_gradients_that_do_not_add_up_need_not_wait(in_root):
    """One micro-batch a step: ZeRO-1's go into the bucket as they come, and none wait on the host."""
    for name, where, fewer in (("zero1", "GPU", 2 - 2 / 8), ("zero2_offload", "host", 2 / 8), ("zero3", "GPU", 0)):
        several, whole = (costs.total(costs.shares(setting(name, accumulation=a)), where) for a in (2, 1))
        assert several - whole == pytest.approx(fewer), name


def test_the_example_of_the_page_on_strategies(in_root):
    """7e9 parameters on 8 GPUs under zero2."""
    assert costs.total(costs.shares(setting("zero2")), "GPU") * 7e9 / 1e9 == pytest.approx(26.25)
    assert "26.25 GB" in (ROOT / "docs/strategies.md").read_text()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"mixed_precision": "no"}, {"ddp": 16, "zero2": 4 + 4 / 8 + 12 / 8}),
        ({"optim": {"name": "sgd"}}, {"ddp": 12, "zero3": 12 / 8}),
        ({"optim": {"name": "sgd", "momentum": 0.0}}, {"ddp": 8, "zero3": 8 / 8}),
        ({"optim": {"name": "adamw_8bit"}}, {"ddp": 10 + 8 / 256, "zero3": (10 + 8 / 256) / 8}),
    ],
    ids=str,
)
def test_states_follow_precision_and_optimizer(options, expected, in_root):
    for name, num_bytes in expected.items():
        assert costs.total(costs.shares(setting(name, **options)), "GPU") == pytest.approx(num_bytes)


# Numbers sent, in units of the parameters: section 7 of the paper, and A micro-batches where gradients are sharded. Of
# ZeRO-1 and -2 the paper has one less for each reduction: DeepSpeed makes all-reduces of them, as
# tests/test_forecast_speed.py counts in a run.
VOLUMES = {
    "ddp": lambda a: {4: 2},
    "zero1": lambda a: {2: 2 + 1},
    "zero2": lambda a: {2: 2 * a + 1},
    "zero3": lambda a: {2: 3 * a},
    "fsdp2": lambda a: {2: 2 * a, 4: a},
    "fsdp2_grad_op": lambda a: {2: a, 4: a},
}


@pytest.mark.parametrize(("name", "accumulation"), list(itertools.product(VOLUMES, (1, 4))))
def test_traffic_is_that_of_the_paper(name, accumulation, in_root):
    """Keys: bytes of a number. An all-reduce of float32 is 8 bytes, sent as two of 4."""
    expected = sum(size * count for size, count in VOLUMES[name](accumulation).items())
    assert costs.total_traffic(setting(name, accumulation=accumulation)) == expected


def test_alone_nothing_is_sent(in_root):
    assert costs.total_traffic(setting("zero3", 1)) == 0
    assert costs.traffic_in_words(setting("zero3", 1)) == "none: one process"


# Two machines of eight: a group of consecutive ranks lies in one, its counterparts in both.
@pytest.mark.parametrize(
    ("name", "inside", "between", "both"),
    [
        ("ddp", [], [], ["gradients"]),
        (
            "hsdp_tp",
            ["activations", "loss", "weights (forward)", "weights (backward)", "gradients"],
            ["gradients of the shard"],
            [],
        ),
        ("pp", ["gradients"], ["hidden states"], []),
        (
            "fsdp2_ep",
            ["tokens to experts"],
            [],
            [f"{what} ({when})" for what in ("weights", "experts") for when in ("forward", "backward")]
            + ["gradients", "gradients of experts"],
        ),
        ("zero3_hpz", ["weights (after it)"], [], ["weights (first forward)", "gradients"]),
    ],
)
def test_links_are_those_between_the_processes_of_a_group(name, inside, between, both, in_root):
    inputs = setting(name, 16, num_local=8)
    inputs = replace(inputs, strategy=inputs.strategy.for_processes(16, 8))
    links = costs.as_dict(inputs)["links"]
    names = ("inside a machine", "between machines", "inside a machine and between machines")
    assert [sorted(links.pop(key, [])) for key in names] == [sorted(names) for names in (inside, between, both)]
    assert links == {}
    alone = costs.links(replace(inputs, num_local=16))
    assert [*alone] == ["inside a machine"], "on one machine nothing leaves it"


def test_micro_batches_in_flight_and_links_are_on_the_page(in_root):
    """Two stages of 16 of 32 processes, on four machines of eight: the first begins a forward ahead."""
    run = explain(Path("recipes/llama33_70b/sft.yaml"), strategy_path=strategy("pp_tp_fsdp2"))
    assert run.sections["BATCH"]["in flight"].value == [2, 1]
    page = " ".join(in_words(run).split())
    assert "in flight at most 2, 1 micro-batches, from the first stage to the last yaml:12" in page
    assert "links between machines: hidden states; inside a machine: activations, loss;" in page
    alone = explain(Path("recipes/llama33_70b/sft.yaml"), strategy_path=strategy("fsdp2"))
    assert "in flight" not in alone.sections["BATCH"]


def test_a_frozen_parameter_is_cut_where_the_strategy_cuts_weights(in_root):
    words = {name: costs.states_in_words(setting(name, adapter="lora"), "GPU") for name in ("ddp", "zero2", "zero3")}
    assert words["ddp"].endswith("of a frozen one weights 2") and words["zero2"].endswith("of a frozen one weights 2")
    assert words["zero3"].endswith("of a frozen one weights 2/8")
    # FSDP1's gradient is that of the flat parameter, frozen weights and all (tests/test_forecast_states.py).
    flat = costs.states_in_words(setting("fsdp1", adapter="lora"), "GPU")
    assert flat.endswith("of a frozen one weights 4/8 + gradients 4/8")


def test_float32_reductions_that_a_json_asks_for_are_counted(book):
    book.edit(
        "ds_configs/zero3.json", ('"zero_optimization"', '"communication_data_type": "fp32",\n  "zero_optimization"')
    )
    assert costs.precision(setting("zero3"))["reductions"] == "float32"
    assert costs.total_traffic(setting("zero3")) == 2 * 2 + 4


# What differs.


def difference(first, second, **options):
    options = {"override": None, "assignments": [], "processes": None} | options
    return compare.compare(str(first), str(second), **options)


def test_another_strategy_leaves_the_curve_alone_and_says_what_it_costs(in_root):
    changes = difference(ZERO3, "zero2")
    assert changes.same_curve
    page = compare.in_words(changes)
    assert re.search(r"zero_optimization.stage +3 -> 2 +A json:13 -> B json:13", page)
    assert "= 4\n" in page and "= 5.5\n" in page
    assert "the same, but for rounding" in page


def test_every_pair_of_strategies_can_be_compared(in_root):
    for first, second in itertools.combinations(STRATEGIES, 2):
        changes = difference(first, second)
        assert changes.same_curve and changes.differences, (first, second)


KEYS = {
    "batch.micro_batch_size=2": "speed",
    "data.packing=false": "speed",
    "model.gradient_checkpointing=false": "speed",
    "model.gradient_checkpointing=offload": "speed",
    "model.compile=true": "rounding",
    "run.save_every_steps=50": "run",
    "run.max_steps=5000": "curve",
    "run.skip_nonfinite_steps=1": "curve",
    "run.deterministic=true": "rounding",
    "data.eval=python-stdlib": "run",
    "optim.learning_rate=1e-5": "curve",
    "batch.global_batch_size=64": "curve",
    "data.max_length=1024": "curve",
    "seed=7": "curve",
    "mixed_precision='no'": "curve",
    "adapter={name: lora}": "curve",
}


@pytest.mark.parametrize("assignment", KEYS)
def test_a_key_that_changes_the_curve_is_distinguished_from_one_that_does_not(assignment, in_root):
    strategy = Path("accelerate_configs/fsdp2.yaml") if "compile" in assignment else None  # not served with ZeRO-3
    before, other = (explain(ZERO3, strategy_path=strategy, assignments=asked) for asked in ([], [assignment]))
    changes = compare.compare_runs(before, other)
    assert {difference.effect for difference in changes.differences} == {KEYS[assignment]}
    assert changes.same_curve == (KEYS[assignment] != "curve")


def test_the_lists_of_keys_name_keys_of_a_recipe():
    known = set(leaves(Recipe))
    listed = {*effects.NEVER_THE_CURVE, *effects.ONLY_ROUNDING, *effects.ONLY_THE_RUN}
    assert listed - known == set()
    assert {"data.pakcing"} - known == {"data.pakcing"}
    assert effects.effect_of("optim.betas") == effects.effect_of("a.key.of.tomorrow") == "curve"
    assert effects.effect_of("run.key_of_tomorrow") == "curve" and rule_of("run.key_of_tomorrow") == "fixed"
    in_run = {key for key in known if key.startswith("run.") and effects.effect_of(key) == "curve"}
    early = {"run.early_stopping_patience", "run.early_stopping_threshold", "run.metric_for_best_model"}
    assert in_run == {"run.num_epochs", "run.max_steps", "run.skip_nonfinite_steps", *early}


def test_what_is_said_never_to_change_the_curve_is_in_the_equivalence_tests():
    text = "".join(path.read_text() for path in (ROOT / "tests").glob("test_equivalence*.py"))
    for key in effects.NEVER_THE_CURVE:
        assert re.search(rf'\b{key.rpartition(".")[2]}"?: ', text), key


def test_dropout_leaves_the_curve_to_the_recipe(in_root):
    changes = difference("recipes/llama31_8b/sft_qlora.yaml", "fsdp2", processes=4)
    assert changes.same_curve
    assert [setting.num_processes for setting in changes.settings] == [1, 4]


def test_the_same_twice_is_the_same(in_root):
    assert compare.in_words(difference(ZERO3, ZERO3)).endswith("Nothing differs.")


def test_a_recipe_may_stand_beside_another_of_another_kind(in_root):
    changes = difference("recipes/quickstart.yaml", "recipes/qwen3_0_6b/sft_lora.yaml")
    keys = {difference.key for difference in changes.differences}
    assert {"model.from_scratch", "data.train", "adapter"} <= keys
    assert not changes.same_curve


# Bad input.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["zero3"], "zero3: a strategy; write a recipe before it, or another strategy after it"),
        (["nope"], "strategy 'nope': no file accelerate_configs/nope.yaml; known here: ddp, ..."),
        (["recipes/nope.yaml"], "recipes/nope.yaml: no such file (looked in ...)"),
        (["zero2", "recipes/small.yaml"], "explain zero2 recipes/small.yaml: write the recipe first"),
        (["zero2", "zero9"], "strategy 'zero9': no file accelerate_configs/zero9.yaml; did you mean ...?"),
        (["zero2", "zero3", "--set", "seed=1"], "--set and --strategy go with a recipe; two strategies have none"),
        ([RECIPE, "--processes", "0"], "--processes is 0; write a number above 0"),
        ([RECIPE, "--processes", "3"], "recipes/small.yaml: batch.global_batch_size is 16, but 3 processes x ..."),
        ([RECIPE, "--set", "seed=-1"], "--set seed is -1; it must be greater than or equal to 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_explained_is_an_error_of_one_line(book, capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(re.escape(message).replace(re.escape("..."), ".*"), line), line


def test_a_reader_who_has_seen_enough_gets_no_traceback():
    command = f"{sys.executable} -m cookbook check | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, env=clean_environment(), capture_output=True, text=True)
    assert done.stderr == "" and len(done.stdout.splitlines()) == 1


# Check.


def checked(capsys, *arguments):
    code = main(["check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out.splitlines(), captured.err.splitlines()


def test_check_lists_all_mistakes_of_all_files_in_one_run(book, capsys):
    book.edit(RECIPE, ("ddp.yaml", "zero3.yaml"), ("learning_rate", "learnig_rate"), ("max_steps: 30", "max_steps: x"))
    book.edit("accelerate_configs/zero3.yaml", ("num_processes: auto", "num_processes: -2\nmixed_precision: bf16"))
    book.edit(
        "ds_configs/zero3.json",
        ('"stage": 3', '"stage": 4'),
        ('"overlap_comm"', '"overlap_com"'),
        ('"gradient_clipping": "auto"', '"gradient_clipping": 0.5'),
    )
    book.edit("accelerate_configs/fsdp2_tp.yaml", ("num_processes: auto", "num_processes: 6"))
    code, _, mistakes = checked(capsys)
    assert code == 2
    starts = [
        "recipes/small.yaml:23: optim.learnig_rate: unknown key; did you mean learning_rate?",
        "recipes/small.yaml:29: run.max_steps is 'x' (text); it must be an integer",
        "accelerate_configs/zero3.yaml:2: num_processes is -2; use auto",
        "ds_configs/zero3.json:13: zero_optimization.stage is 4; use 1, 2 or 3",
        "ds_configs/zero3.json:14: zero_optimization.overlap_com: unknown key",
        "ds_configs/zero3.json:11: gradient_clipping is 0.5, but the recipe's optim.max_grad_norm is 1.0",
        "accelerate_configs/zero3.yaml:3: mixed_precision is",
        "accelerate_configs/fsdp2_tp.yaml:2: num_processes is 6, but the mesh",
        "accelerate_configs/zero3.yaml: `cookbook convert accelerate_configs/zero3.yaml` writes it",
    ]
    for start in starts:
        assert sum(line.startswith(start) for line in mistakes) == 1, (start, mistakes)
    assert len(mistakes) == len(starts)


def test_check_names_the_lines_of_a_clash_and_of_an_impossible_split(book, capsys):
    book.edit(RECIPE, ("ddp.yaml", "fsdp1.yaml"), ("  learning_rate", "  name: muon\n  learning_rate"))
    book.edit(RECIPE, ("global_batch_size: 16", "global_batch_size: 17"))
    code, _, mistakes = checked(capsys, RECIPE)
    assert code == 2
    assert [line.split(": ")[0] for line in mistakes] == [
        "recipes/small.yaml:23 under accelerate_configs/fsdp1.yaml",
        "recipes/small.yaml:20",
    ]
    assert "muon with FSDP1" in mistakes[0] and "global_batch_size is 17" in mistakes[1]


def test_a_misspelt_key_does_not_hide_a_clash(book, capsys):
    book.edit(RECIPE, ("weight_decay", "wieght_decay"), ("global_batch_size: 16", "global_batch_size: 17"))
    _, _, mistakes = checked(capsys, RECIPE)
    assert len(mistakes) == 2
    assert "wieght_decay" in mistakes[0] and mistakes[1].startswith("recipes/small.yaml:20: batch.global_batch_size")


@pytest.mark.parametrize(("needs", "code"), [("2 GPUs of 24 GB.", 0), ("3 GPUs of 24 GB.", 2), ("1 GPU of 24 GB.", 0)])
def test_check_splits_the_batch_over_the_gpus_that_the_label_names(book, capsys, monkeypatch, needs, code):
    monkeypatch.setattr("cookbook.commands.check.recipe_checks.num_gpus", lambda: 1 / 0)  # not this machine's
    text = Path(RECIPE).read_text()
    book.write(RECIPE, f"# Needs: {needs}\n{text}")
    exit_code, lines, mistakes = checked(capsys, RECIPE)
    assert exit_code == code, mistakes
    if code == 0:
        count = int(needs[0])
        assert f"{count} data-parallel process" in lines[0] and lines[0].endswith(f"accumulation {2 // count}")


def test_check_takes_the_values_and_the_processes_of_a_command_line(book, capsys):
    code, (line,), _ = checked(capsys, RECIPE, "--processes", "2", "--set", "batch.micro_batch_size=4")
    assert code == 0 and line.endswith("2 data-parallel processes x micro-batch 4 x accumulation 2")
    _, (line,), _ = checked(capsys, RECIPE, "--processes", "2", "--set", "batch.micro_batch_size=auto")
    assert "16 sequences a step = 2 data-parallel processes x micro-batch 1 (auto: that or more) x" in line
    assert line.endswith("accumulation 8")
    code, _, mistakes = checked(capsys, RECIPE, "--set", "optim.lr=3", "--set", "nonsense=1")
    assert code == 2 and len(mistakes) == 2 and "optim.lr" in mistakes[0] and "nonsense" in mistakes[1]
    code, _, mistakes = checked(capsys, RECIPE, "--processes", "3")
    assert code == 2 and "3 processes x micro_batch_size 8" in mistakes[0] and re.match(rf"{RECIPE}:\d+: ", mistakes[0])
    for given in ("batch.micro_batch_size=3", "batch.global_batch_size=9"):  # whose line in the file has another value
        code, _, mistakes = checked(capsys, RECIPE, "--processes", "2", "--set", given)
        assert code == 2 and mistakes[0].startswith(f"--set {given}: batch.global_batch_size is "), mistakes
    code, _, mistakes = checked(capsys, RECIPE, "--processes", "0")
    assert code == 2 and mistakes == ["--processes is 0; write a number above 0"]


def test_check_refuses_fp16_where_neither_the_label_nor_the_machine_has_a_gpu(book, capsys, monkeypatch):
    book.edit(RECIPE, ("mixed_precision: 'no'", "mixed_precision: fp16"))
    monkeypatch.setattr("cookbook.commands.check.recipe_checks.num_gpus", lambda: 0)
    code, _, mistakes = checked(capsys, RECIPE)
    assert code == 2 and "fp16 needs a GPU" in mistakes[0]
    monkeypatch.setattr("cookbook.commands.check.recipe_checks.num_gpus", lambda: 2)
    assert checked(capsys, RECIPE)[0] == 0


def test_groups_of_hpz_that_do_not_divide_the_processes_are_refused(book, capsys):
    """DeepSpeed would take min(group, processes) without a word (0.19.8, utils/groups.py)."""
    book.edit("ds_configs/zero3.json", ('"stage": 3,', '"stage": 3,\n    "zero_hpz_partition_size": 3,'))
    code, _, mistakes = checked(capsys, RECIPE, "--strategy", "zero3", "--processes", "2")
    assert code == 2 and "zero_hpz_partition_size is 3, which does not divide 2 processes" in mistakes[0]


# No torch.


NO_TORCH = f"""{AS_PINNED}
code = main(sys.argv[1:])
print(*[name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", str(ZERO3)],
        ["explain", str(ZERO3)],
        ["explain", str(ZERO3), "--json"],
        ["explain", str(ZERO3), "fsdp2"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(arguments):
    environment = clean_environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.strip()) == (0, "")


def test_something_heavy_would_be_seen():
    done = subprocess.run(
        [sys.executable, "-c", f"import numpy\n{NO_TORCH}", "explain", str(ZERO3)],
        cwd=ROOT,
        env=clean_environment(CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip() == "numpy"


def test_json_says_the_same_for_programs(in_root, capsys):
    assert main(["explain", str(ZERO3), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    accumulation = record["quantities"]["batch"]["accumulation"]
    assert accumulation["value"] == 32
    assert accumulation["from"] == [f"{ZERO3}:32", f"{ZERO3}:33", "accelerate_configs/zero3.yaml:5"]
    assert record["deepspeed"]["train_batch_size"] == 128 and record["learning_rate"]["num_steps"] is None
    assert main(["explain", "zero2", "zero3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same_curve"] is True


# Against a run.


PROBE = """
import json, sys
sys.path.insert(0, {root!r})
import train
from cookbook.training import engine

right = engine.Engine.step

def step(self, *arguments):
    named = [p for p in self.model.parameters() if p.requires_grad]
    found = {{"weights": {{str(p.dtype) for p in named}}}}
    if self.strategy.kind == "zero":
        inner = self.model.optimizer
        flat = getattr(inner, "fp32_partitioned_groups_flat", None) or inner.single_partition_of_fp32_groups
        found["master copy"] = {{str(p.dtype) for p in flat}}
        found["reductions"] = {{str(self.model.communication_data_type)}}
        found["gradients"] = {{str(self.model.get_data_types()[1])}}
    else:
        found["gradients"] = {{str(p.grad.dtype) for p in named if p.grad is not None}}
    if self.is_main:
        print("CONFIG", json.dumps(getattr(self, "deepspeed_config", None)), flush=True)
        print("PROBE", json.dumps({{key: sorted(value) for key, value in found.items()}}), flush=True)
    return right(self, *arguments)

engine.Engine.step = step
sys.exit(train.main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero2", "zero3"])
def test_precision_and_configuration_are_those_of_a_run(book, lab, name):
    book.write("probe.py", PROBE.format(root=str(book.root)))
    settings = ["mixed_precision=bf16", "run.max_steps=1", "schedule.warmup_steps=0", *lab.small_data]
    flags = ["--config_file", str(strategy(name)), "--num_processes", "2", "--main_process_port", "0"]
    words = ["probe.py", RECIPE, *(word for setting in settings for word in ("--set", setting))]
    printed = lab.accelerate(flags, words, book.root)
    probed = re.search(r"PROBE (.*)", printed)
    assert probed, printed
    run = explain(Path(RECIPE), strategy_path=strategy(name), assignments=settings, processes=2)
    handed_over = re.search(r"CONFIG (.*)", printed)
    assert handed_over and json.loads(handed_over[1]) == run.deepspeed
    said = costs.precision(run.setting)
    for what, dtypes in json.loads(probed[1]).items():
        assert dtypes == [f"torch.{said[what].split(',')[0]}"], (what, dtypes, said)
