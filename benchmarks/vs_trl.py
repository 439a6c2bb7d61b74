"""Our training beside TRL's SFTTrainer and transformers' Trainer, on this CPU and the same samples.

    pip install --no-deps -r benchmarks/requirements-trl.txt
    python benchmarks/vs_trl.py [--quick]

Writes benchmarks/results/vs_trl.json and the tables of docs/speed.md. Speed is measured in pairs: their trainer runs,
and before or after each of its optimizer steps ours takes the samples that its collator just saw. A second is one of
CPU time of the only thread: what the clock shows on an idle machine, whatever else runs on this one. Start and memory
are measured with one of them alone in a process. No GPU is used.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SECTIONS = ("pairs", "profiles", "alone", "launched")
RESULTS = ROOT / "benchmarks" / "results" / "vs_trl.json"
PAGE = ROOT / "docs" / "speed.md"
BEGIN, END = "<!-- vs_trl:begin -->", "<!-- vs_trl:end -->"
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "trl", "datasets")

MODELS = {
    "5 M": dict(vocab_size=4096, hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4),
    "50 M": dict(
        vocab_size=32000, hidden_size=512, intermediate_size=1408, num_hidden_layers=11, num_attention_heads=8
    ),
}
BASELINES = {"trl": "TRL", "trl_packing": "TRL, 1 packed row", "trainer": "Trainer"}
EIGHT_ROWS = {"trl_8_packed_rows": "TRL, 8 packed rows"}
"""With the small model only: a step has 4,096 tokens."""
NAMES = {"ours": "ours"} | BASELINES | EIGHT_ROWS
GOALS = {"trl": 2.0, "trl_packing": 2.0, "trl_8_packed_rows": 2.0, "trainer": 1.5}
PRECISIONS = {"no": "fp32", "bf16": "bf16"}
PARTS = ("head", "matrices", "attention", "optimizer", "rest")
"""Of a step. `head`: logits and loss, with their gradients, and the embedding, which shares its weight. `matrices`: of
the layers. `attention`: its kernel."""

SEED, MICRO_BATCH_SIZE, LEARNING_RATE, MAX_LENGTH = 0, 8, 1e-4, 512
PACKED_ROWS = {"trl_packing": (1, 768), "trl_8_packed_rows": (8, 512)}
"""Rows of a step and tokens of a row under TRL's packing: as many tokens as eight samples have, which is kind to it, or
eight rows. On CPU it makes one mask over all of a batch, and its own defaults are 8 rows of 1024."""
CHARACTERS = (80, 400)
"""Of an answer. Padding then wastes no more than with GSM8K's chats (65 % of a batch are tokens there)."""
MAX_CELL_SECONDS = 900
"""Of stepping in a paired run, which then ends early; the table tells the steps."""
NUM_WARMUP_STEPS, NUM_STEPS = 2, 14


Cell = dict[str, Any]
"""One row to be: model, precision, baseline, strategy, processes, steps."""
Run = Callable[[Path, Cell], dict[str, Any]]


# Data, models and a recipe, in a folder of their own.


def make_workplace(folder: Path) -> dict[str, Any]:
    """What all runs read. Returns what is to be said of the data."""
    import numpy as np

    from cookbook.config.objectives import Objective
    from cookbook.config.recipe import DataSection, ScratchModel
    from cookbook.training import models
    from cookbook.training.data.batches import epoch_order
    from cookbook.training.data.sets import read_data, tokenize_data
    from cookbook.training.data.stdlib import load_stdlib
    from cookbook.training.data.tokens import TokenSet

    for name in ("cookbook", "train.py", "accelerate_configs", "ds_configs", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    least, most = CHARACTERS
    chats = [row for row in load_stdlib("train") if least <= len(row["messages"][-1]["content"]) <= most]
    write_lines(folder / "chats.jsonl", chats)
    tokenizer = models.train_tokenizer((message["content"] for row in chats for message in row["messages"]), 4096)
    for name, sizes in MODELS.items():
        scratch = ScratchModel.model_validate(sizes | {"num_key_value_heads": sizes["num_attention_heads"] // 2})
        target = folder / folder_of({"model": name})
        models.new_model(scratch, tokenizer, SEED).save_pretrained(target)
        tokenizer.save_pretrained(target)
    data = DataSection.model_validate({"train": str(folder / "chats.jsonl"), "max_length": MAX_LENGTH})
    objective = Objective.of(name="sft")
    rows = read_data(data, objective)
    tokens = tokenize_data(rows, tokenizer, data, objective, cache=folder / "cache").train
    assert isinstance(tokens, TokenSet)
    order = epoch_order(tokens, SEED, 0)
    write_lines(folder / "chats_in_our_order.jsonl", [chats[i] for i in order])
    lengths = tokens.lengths[order[: len(order) // MICRO_BATCH_SIZE * MICRO_BATCH_SIZE]].reshape(-1, MICRO_BATCH_SIZE)
    return {
        "source": f"python-stdlib, answers of {least} to {most} characters",
        "chats": len(chats),
        "mean_tokens": round(float(tokens.lengths.mean()), 1),
        "median_tokens": float(np.median(tokens.lengths)),
        "max_tokens": int(tokens.lengths.max()),
        "label_share": round(float(tokens.num_targets.sum() / tokens.lengths.sum()), 3),
        "padding_efficiency": round(float(lengths.sum() / (lengths.max(1) * MICRO_BATCH_SIZE).sum()), 3),
    }


def folder_of(cell: Cell) -> str:
    """Of the model, in every run's folder."""
    return cell["model"].replace(" ", "")


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_recipe(cell: Cell, folder: Path) -> None:
    """The recipe of a cell, bench.yaml in the folder of its run."""
    recipe = {
        "strategy": f"accelerate_configs/{cell['strategy']}.yaml",
        "mixed_precision": cell["precision"],
        "seed": SEED,
        "model": {"name_or_path": folder_of(cell)},
        "data": {"train": "chats.jsonl", "max_length": MAX_LENGTH, "packing": True},
        "batch": {
            "global_batch_size": MICRO_BATCH_SIZE * cell["processes"],
            "micro_batch_size": MICRO_BATCH_SIZE,
        },
        "optim": {"learning_rate": LEARNING_RATE},
        "schedule": {"name": "constant"},
        "run": {"max_steps": cell["steps"], "output_dir": "outputs/ours"},
    }
    (folder / "bench.yaml").write_text(json.dumps(recipe, indent=1), encoding="utf-8")


# One process: theirs, through its public interface.


def build_baseline(cell: Cell) -> Any:
    """The trainer that a cell compares with, on CPU, with the recipe's settings and no gradient checkpointing."""
    from datasets import Dataset, disable_progress_bars, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments
    from transformers.utils import logging

    disable_progress_bars()
    logging.disable_progress_bar()
    folder = folder_of(cell)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, use_safetensors=True)
    chats = load_dataset("json", data_files="chats_in_our_order.jsonl", split="train")
    is_packing = cell["baseline"] in PACKED_ROWS
    num_rows, max_length = PACKED_ROWS.get(cell["baseline"], (MICRO_BATCH_SIZE, MAX_LENGTH))
    settings = dict(
        output_dir="outputs/theirs",
        per_device_train_batch_size=num_rows,
        max_steps=cell["steps"],
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        # Packing sorts by length: in its order the first rows would hold the longest chats.
        train_sampling_strategy="random" if is_packing else "sequential",
        gradient_checkpointing=False,
        bf16=cell["precision"] == "bf16",
        use_cpu=True,
        ddp_backend="gloo" if cell["strategy"] == "ddp" else None,
        dataloader_pin_memory=False,
        logging_first_step=True,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    if cell["baseline"] == "trainer":
        found = tokenizer.apply_chat_template(
            list(chats["messages"]), return_dict=True, return_assistant_tokens_mask=True
        )
        labels = [
            [token if is_label else -100 for token, is_label in zip(ids, mask, strict=True)]
            for ids, mask in zip(found["input_ids"], found["assistant_masks"], strict=True)
        ]
        tokens = Dataset.from_dict({"input_ids": found["input_ids"], "labels": labels})
        return Trainer(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=tokens,
            data_collator=DataCollatorForSeq2Seq(tokenizer),
        )
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found]

    arguments = SFTConfig(
        **settings,
        assistant_only_loss=True,
        packing=is_packing,
        max_length=max_length,
    )
    return SFTTrainer(model=model, args=arguments, train_dataset=chats, processing_class=tokenizer)


# One process: ours, made of the parts that train.py introduces to each other.


class Ours:
    """The step of train.py in a process where another trainer owns the loop."""

    def __init__(self, cell: Cell) -> None:
        from cookbook.config.optim.groups import build_optimizer
        from cookbook.planning.launch import World
        from cookbook.planning.plan import load_pair, make_plan
        from cookbook.training import models
        from cookbook.training.data.sets import read_data, tokenize_data
        from cookbook.training.data.tokens import TokenSet
        from cookbook.training.engine import engine_class

        write_recipe(cell, Path())
        recipe, strategy = load_pair(Path("bench.yaml"))
        name = folder_of(cell)
        self.tokenizer = models.load_tokenizer(name, None)
        rows = read_data(recipe.data, recipe.objective)
        tokens = tokenize_data(rows, self.tokenizer, recipe.data, recipe.objective, cache=Path(".cache")).train
        assert isinstance(tokens, TokenSet)
        self.tokens = tokens
        self.engine = engine_class(strategy)(
            strategy,
            make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="bench.yaml"),
            World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=False),
            mixed_precision=recipe.mixed_precision,
            micro_batch_size=MICRO_BATCH_SIZE,
            max_grad_norm=recipe.optim.max_grad_norm,
            loss_scale=recipe.loss_scaling,
            run_name="ours",
            timeout=timedelta(minutes=30),
        )
        model = models.load_model(name, recipe.model, packing=True)
        self.engine.prepare(model, build_optimizer(model, recipe.optim, recipe.mixed_precision))
        self.objective = recipe.objective
        bounds = zip(self.tokens.offsets[:-1], self.tokens.offsets[1:], strict=True)
        self.number_of = {tuple(self.tokens.ids[start:end].tolist()): i for i, (start, end) in enumerate(bounds)}

    def samples(self, examples: list[dict]) -> list[int]:
        """The numbers of the samples that a collator was given; packed rows are taken apart."""
        found = []
        for example in examples:
            ids, start = list(example["input_ids"]), 0
            for length in example.get("seq_lengths", [len(ids)]):
                found.append(self.number_of[tuple(ids[start : start + length])])
                start += length
        return found

    def step(self, samples: list[int]) -> dict[str, float]:
        from cookbook.training.data.batches import collate

        started, cpu = time.perf_counter(), time.process_time()
        batch = collate(self.tokens, samples, self.tokenizer.pad_token_id, packing=True)
        num_targets = int(self.tokens.num_targets[samples].sum())
        result = self.engine.step(self.engine.gradients(self.objective.compute, [batch], num_targets))
        return {
            "seconds": time.process_time() - cpu,
            "clock_seconds": time.perf_counter() - started,
            "num_targets": num_targets,
            "num_samples": len(samples),
            "loss": result.means["loss"],
        }


# What a process of its own does.


def watch_collator(trainer: Any) -> deque[list[dict]]:
    """The examples of the coming steps, from when they are collated; the loader runs a batch ahead."""
    collated: deque[list[dict]] = deque()
    collator = trainer.data_collator

    def watch(examples: list[dict]) -> Any:
        collated.append(examples)
        return collator(examples)

    trainer.data_collator = watch
    return collated


def run_pair(cell: Cell) -> dict[str, Any]:
    """Their trainer, and ours before (even steps) or after (odd ones) each of its steps, on the same samples."""
    from transformers import TrainerCallback

    trainer, ours = build_baseline(cell), Ours(cell)
    collated = watch_collator(trainer)
    steps: list[dict[str, float]] = []

    class Alternate(TrainerCallback):
        """Theirs is all time between two ends of their steps, less ours."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began = time.monotonic()
            self.mark()

        def mark(self) -> None:
            self.clock, self.cpu = time.perf_counter(), time.process_time()

        def run_ours(self) -> None:
            clock, cpu = time.perf_counter(), time.process_time()
            steps.append(ours.step(ours.samples(collated.popleft())))
            self.clock += time.perf_counter() - clock
            self.cpu += time.process_time() - cpu

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % 2 == 0:
                self.run_ours()

        def on_step_end(self, args: Any, state: Any, control: Any, **__: Any) -> None:
            clock, cpu = time.perf_counter() - self.clock, time.process_time() - self.cpu
            if state.global_step % 2 == 0:  # counted up already
                self.run_ours()
            steps[-1] |= {"their_seconds": cpu, "their_clock_seconds": clock}
            control.should_training_stop |= time.monotonic() - self.began > MAX_CELL_SECONDS
            self.mark()

    trainer.add_callback(Alternate())
    trainer.train()
    assert not trainer.model.is_gradient_checkpointing
    their_loss = trainer.state.log_history[0]["loss"]
    if cell["precision"] == "no":
        assert abs(steps[0]["loss"] - their_loss) < 1e-4, f"the first losses differ: {steps[0]['loss']}, {their_loss}"
    return {
        "first_loss": steps[0]["loss"],
        "their_first_loss": their_loss,
        "measured": [{key: round(value, 4) for key, value in step.items()} for step in steps],
    }


def run_profile(cell: Cell) -> dict[str, Any]:
    """Where the time of the last step goes, theirs and ours, by part, in seconds by the clock."""
    from torch.profiler import profile
    from transformers import TrainerCallback

    trainer, ours = build_baseline(cell), Ours(cell)
    collated = watch_collator(trainer)
    found: dict[str, Any] = {}

    class Profile(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.samples = ours.samples(collated.popleft())
            self.profiler = profile(record_shapes=True)
            self.profiler.start()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            self.profiler.stop()
            with profile(record_shapes=True) as profiler:
                step = ours.step(self.samples)
            if state.global_step == cell["steps"]:
                vocab_size = MODELS[cell["model"]]["vocab_size"]
                found["ours"], found["theirs"] = (parts(p, vocab_size) for p in (profiler, self.profiler))
                found["num_targets"] = step["num_targets"]

    trainer.add_callback(Profile())
    trainer.train()
    return found


def parts(profiler: Any, vocab_size: int) -> dict[str, float]:
    """Seconds of the operations, by part of the model; the head is what has a dimension of the vocabulary."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in profiler.key_averages(group_by_input_shape=True):
        name = event.key.lower()
        if "adam" in name:
            part = "optimizer"
        elif "attention" in name:
            part = "attention"
        elif any(vocab_size in shape for shape in event.input_shapes if isinstance(shape, list)):
            part = "head"
        else:
            part = "matrices" if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear") else "rest"
        seconds[part] += event.self_cpu_time_total / 1e6
    return {part: round(value, 4) for part, value in seconds.items()}


def run_theirs(cell: Cell) -> dict[str, Any] | None:
    """Their trainer alone, in one process or, started by accelerate, in each of several."""
    from transformers import TrainerCallback

    if cell["strategy"].startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at first use; gloo serves
    trainer = build_baseline(cell)
    seconds: list[float] = []
    first: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.mark = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.mark)
            first.append((time.time() - psutil.Process().create_time(), time.process_time()))

    trainer.add_callback(Clock())
    trainer.train()
    if not trainer.is_world_process_zero():
        return None
    return {
        "processes": trainer.accelerator.num_processes,
        "engine": type(trainer.model_wrapped).__name__,
        "seconds": seconds,
        "first_loss": trainer.state.log_history[0]["loss"],
        "first_step_clock_seconds": first[0][0],
        "first_step_seconds": first[0][1],
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


# What the main process does.


class Failed(RuntimeError):
    """A run that ended with an error; its last line."""


def fresh(shared: Path) -> Path:
    """A folder for one run: nothing there that an earlier run tokenised."""
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=shared.parent))
    for path in shared.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    return folder


def start(folder: Path, cell: Cell, command: list[str]) -> subprocess.Popen:
    """Runs a Python command, by way of accelerate where the cell has several processes."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    python = [sys.executable]
    if cell["processes"] > 1:
        python += ["-m", "accelerate.commands.launch", "--config_file", f"accelerate_configs/{cell['strategy']}.yaml"]
        python += ["--num_processes", str(cell["processes"]), "--main_process_port", "0"]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen([*python, *command], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(folder: Path, process: subprocess.Popen) -> None:
    if process.wait(timeout=1800):
        lines = [line for line in (folder / "log.txt").read_text().splitlines() if "Error" in line]
        raise Failed(lines[-1].strip()[:300] if lines else f"exit code {process.returncode}")


def run_worker(kind: str, shared: Path, cell: Cell) -> dict[str, Any]:
    """What `run_pair` or `run_theirs` returns from processes of their own."""
    folder = fresh(shared)
    finish(folder, start(folder, cell, [__file__, "--worker", kind, json.dumps(cell)]))
    return json.loads((folder / "result.json").read_text())


def run_ours(shared: Path, cell: Cell) -> dict[str, Any]:
    """train.py alone, in as many processes as the cell says. Its own metrics tell all but the start."""
    folder = fresh(shared)
    write_recipe(cell, folder)
    metrics = folder / "outputs" / "ours" / "metrics.jsonl"
    started = time.time()
    process = start(folder, cell, ["train.py", "bench.yaml"])
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.02)
    clock = time.time() - started
    times = psutil.Process(process.pid).cpu_times() if process.poll() is None else None
    finish(folder, process)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "seconds": [line["step_seconds"] for line in lines],
        "first_loss": lines[0]["loss"],
        "first_step_clock_seconds": clock,
        "first_step_seconds": times and times.user + times.system,
        "peak_memory_gib": lines[-1]["peak_memory_gib"],
    }


def attempt(run: Run, shared: Path, cell: Cell) -> dict[str, Any]:
    """The cell with its results, or with the reason why there are none."""
    started = time.monotonic()
    try:
        found = run(shared, cell)
    except Failed as error:
        found = {"failed": str(error)}
    row = {**cell, **found}
    print(f"{time.monotonic() - started:.0f} s: {json.dumps(row)}", file=sys.stderr)
    return row


def run_alone(shared: Path, cell: Cell) -> dict[str, Any]:
    """One side in processes of its own."""
    return run_ours(shared, cell) if cell["baseline"] == "ours" else run_worker("theirs", shared, cell)


def measure(sections: Iterable[str], shared: Path, *, quick: bool, num_jobs: int) -> dict[str, list[dict]]:
    """The rows of the sections; `num_jobs` runs at a time, where a run is one process and so needs one core."""
    kinds = [(model, precision) for model in MODELS for precision in PRECISIONS]
    num_steps = NUM_WARMUP_STEPS + (4 if quick else NUM_STEPS)
    one = {"strategy": "single", "processes": 1}
    two = {"model": "5 M", "precision": "no", "processes": 2, "steps": NUM_WARMUP_STEPS + NUM_STEPS // 2}

    def cells(names: Iterable[str], num_steps: int, precisions: Iterable[str] = PRECISIONS) -> list[Cell]:
        chosen = [kind for kind in kinds[: 1 if quick else None] if kind[1] in precisions]
        settings = {"steps": num_steps, **one}
        return [{"model": m, "precision": p, "baseline": name, **settings} for m, p in chosen for name in names]

    plans: dict[str, tuple[Run, list[Cell]]] = {
        "pairs": (
            partial(run_worker, "pair"),
            cells(BASELINES, num_steps) + [c for c in cells(EIGHT_ROWS, num_steps) if c["model"] == "5 M"],
        ),
        "profiles": (partial(run_worker, "profile"), cells(BASELINES, 3, ["no"])),
        "alone": (run_alone, cells(["ours", *BASELINES], 2)),
        "launched": (
            run_alone,
            [
                {**two, "strategy": strategy, "round": number, "baseline": name}
                for strategy in ("ddp", "zero2")
                for number in range(1 if quick else 2)
                for name in ("ours", "trl")
            ],
        ),
    }
    rows = {}
    for section in sections:
        run, todo = plans[section]
        with ThreadPoolExecutor(1 if section == "launched" else num_jobs) as pool:
            rows[section] = list(pool.map(partial(attempt, run, shared), todo))
    return rows


def environment() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "hardware": {"cpu": names[0], "cores": os.cpu_count(), "machine": platform.machine(), "gpu": None},
        "versions": {name: version(name) for name in PACKAGES},
    }


def write_results(results: dict[str, Any]) -> None:
    """One line for each row, so that a new run reads as a difference."""
    parts = []
    for key, value in results.items():
        text = json.dumps(value)
        if isinstance(value, list):
            text = "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        parts.append(f' "{key}": {text}')
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


# The tables.


def compare(ours: list[float], theirs: list[float]) -> tuple[float, str]:
    """How many times as fast ours is: the median ratio, and cells with its quartiles and with the ratio of the sums."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, f"**{middle:.2f}** [{low:.2f}..{high:.2f}] | {sum(theirs) / sum(ours):.2f}"


def speed_table(rows: list[dict]) -> list[str]:
    """Of the paired runs."""
    lines = [
        "| model | precision | beside | steps | ours | theirs | times as fast | of the sums | by the clock | goal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {row['model']} | {PRECISIONS[row['precision']]} | {NAMES[row['baseline']]} |"
        if "failed" in row:
            lines.append(f"{head} - | did not run: {row['failed']} | | | | | |")
            continue
        steps = row["measured"][NUM_WARMUP_STEPS:]
        columns = {key: [step[key] for step in steps] for key in steps[0]}
        speeds = [
            statistics.median(n / s for n, s in zip(columns["num_targets"], columns[side], strict=True))
            for side in ("seconds", "their_seconds")
        ]
        ratio, words = compare(columns["seconds"], columns["their_seconds"])
        by_clock, _ = compare(columns["clock_seconds"], columns["their_clock_seconds"])
        goal = GOALS[row["baseline"]]
        verdict = ("reached" if ratio >= goal else "missed") + (" in few steps" if len(steps) < NUM_STEPS else "")
        shown = " | ".join(f"{speed:,.0f}" for speed in speeds)
        lines.append(f"{head} {len(steps)} | {shown} | {words} | {by_clock:.2f} | {goal}: {verdict} |")
    return lines


def alone_table(key: str, form: str, rows: list[dict]) -> list[str]:
    """One quantity of the runs alone."""
    names = ["ours", *BASELINES]
    lines = [
        f"| model | precision | {' | '.join(NAMES[name] for name in names)} |",
        "|---|---" + "|---" * len(names) + "|",
    ]
    for model, precision in dict.fromkeys((row["model"], row["precision"]) for row in rows):
        found = {row["baseline"]: row for row in rows if (row["model"], row["precision"]) == (model, precision)}
        cells = [f"{found[name][key]:{form}}" if found[name].get(key) else "no result" for name in names]
        lines.append(f"| {model} | {PRECISIONS[precision]} | {' | '.join(cells)} |")
    return lines


def launched_table(rows: list[dict]) -> list[str]:
    """Of two processes: a step of one launch with the same step of the next."""
    lines = [
        "| strategy | steps | ours, s | TRL, s | times as fast | of the sums |",
        "|---|---|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        failed = [row["failed"] for row in mine if "failed" in row]
        if failed:
            lines.append(f"| `{strategy}` | - | did not run: {failed[0]} | | | |")
            continue
        ours, theirs = (
            [seconds for row in mine if row["baseline"] == name for seconds in row["seconds"][NUM_WARMUP_STEPS:]]
            for name in ("ours", "trl")
        )
        medians = " | ".join(f"{statistics.median(side):.2f}" for side in (ours, theirs))
        lines.append(f"| `{strategy}` | {len(ours)} | {medians} | {compare(ours, theirs)[1]} |")
    return lines


def profile_table(rows: list[dict]) -> list[str]:
    """Shares of the time of a step. Ours on the samples of TRL's step."""
    lines = [f"| model | | {' | '.join(PARTS)} |", "|---|---" + "|---" * len(PARTS) + "|"]
    for row in rows:
        if "failed" in row:
            lines.append(f"| {row['model']} | {NAMES[row['baseline']]} | did not run: {row['failed']} |")
            continue
        sides = [("ours", row["ours"])] if row["baseline"] == "trl" else []
        for name, seconds in [*sides, (NAMES[row["baseline"]], row["theirs"])]:
            shares = " | ".join(f"{value / sum(seconds.values()):.0%}" for value in seconds.values())
            lines.append(f"| {row['model']} | {name} | {shares} |")
    return lines


def render(results: dict[str, Any]) -> str:
    """The part of docs/speed.md between the marks."""
    data, hardware = results["data"], results["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"{hardware['cores']} cores of {hardware['cpu']}, **no GPU**; {versions}.",
        "",
        f"{data['chats']:,} chats from {data['source']}. Tokens of a chat: mean {data['mean_tokens']:.0f}, median"
        f" {data['median_tokens']:.0f}, at most {data['max_tokens']}; {data['label_share']:.0%} of them carry loss. Of"
        f" a batch of {MICRO_BATCH_SIZE} padded to its longest, {data['padding_efficiency']:.0%} are tokens.",
    ]
    tables: list[tuple[str, str, Callable[[list[dict]], list[str]]]] = [
        ("pairs", "One process: trained tokens a CPU second", speed_table),
        ("profiles", "Where the time of a step goes, fp32", profile_table),
        ("alone", "CPU seconds from start to the end of step 1", partial(alone_table, "first_step_seconds", ".1f")),
        ("alone", "Peak resident memory of two steps, GiB", partial(alone_table, "peak_memory_gib", ".2f")),
        ("launched", "Two processes: seconds of a step by the clock, 5 M, fp32", launched_table),
    ]
    for section, title, table in tables:
        if section in results:
            when = results["measured"][section]
            lines += ["", f"### {title}", "", *table(results[section])]
            lines += ["", f"{when['command']}; {when['date']}, load of the machine {when['load']} at the start."]
    return "\n".join(lines)


def write_page(results: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Our training beside TRL's and transformers' on this CPU.")
    parser.add_argument("--quick", action="store_true", help="the small model in fp32, few steps; writes nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs of one process at a time; at most one for each core")
    parser.add_argument("--only", choices=SECTIONS, help="measure this section again and keep the others")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, cell = arguments.worker
        found = {"pair": run_pair, "profile": run_profile, "theirs": run_theirs}[kind](json.loads(cell))
        if found is not None:
            Path("result.json").write_text(json.dumps(found), encoding="utf-8")
        return
    sections = [arguments.only] if arguments.only else SECTIONS
    started = time.monotonic()
    when = {
        "command": " ".join(["python benchmarks/vs_trl.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
        "load": round(os.getloadavg()[0], 1),
    }
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as base:
        shared = Path(base) / "shared"
        shared.mkdir()
        results = {**environment(), "data": make_workplace(shared)}
        rows = measure(sections, shared, quick=arguments.quick, num_jobs=arguments.jobs)
    when["minutes"] = round((time.monotonic() - started) / 60, 1)
    results |= {"measured": dict.fromkeys(sections, when), **rows}
    if arguments.only and not arguments.quick:
        results = merged(json.loads(RESULTS.read_text()), results)
    if arguments.quick:
        print(render(results))
    else:
        write_results(results)
        write_page(results)


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """`old` with the sections of `new`, which must be of the same versions, machine and data."""
    for key in ("versions", "hardware", "data"):
        assert old[key] == new[key], f"{key} is {new[key]}, and the other sections are of {old[key]}"
    return {**old, **new, "measured": old["measured"] | new["measured"]}


if __name__ == "__main__":
    main()
