"""Our training beside TRL's SFTTrainer and transformers' Trainer on this CPU, on the same samples: speed, start, memory.

    pip install -r benchmarks/requirements-trl.txt
    python benchmarks/vs_trl.py [--quick]

Writes benchmarks/results/vs_trl.json and the tables of docs/speed.md. Speed is measured in pairs: their trainer runs,
and before or after each of its optimizer steps ours takes the samples that its collator just saw. So a loaded machine
slows both, and the ratio stands. Start and memory are measured with one of them alone in a process. No GPU is used.
"""

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

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
BASELINES = {"trl": "TRL", "trl_packing": "TRL, packing=True", "trainer": "Trainer"}
GOALS = {"trl": 2.0, "trl_packing": 2.0, "trainer": 1.5}
PRECISIONS = {"no": "fp32", "bf16": "bf16"}

SEED, MICRO_BATCH_SIZE, LEARNING_RATE, MAX_LENGTH = 0, 8, 1e-4, 512
PACKED_LENGTH = 1280
"""Tokens of TRL's packed row, one a step: as many as eight samples have. With its default of 8 rows TRL is slower."""
MIN_CHARACTERS = 200
"""Of an answer. Without shorter ones padding wastes as little as in GSM8K's chats, so that we do not gain by the data."""
NUM_WARMUP_STEPS = 2


# Data, models and a recipe, in a folder of their own.


def make_workplace(folder: Path) -> tuple[dict[str, Any], list[int]]:
    """What all runs read. Returns what is to be said of the data, and the trained tokens of each chat in our order."""
    import numpy as np

    from cookbook import models
    from cookbook.data.batches import epoch_order
    from cookbook.data.sets import read_data, tokenize_data
    from cookbook.data.stdlib import load_stdlib
    from cookbook.recipe import DataSection, ObjectiveSection, ScratchModel

    for name in ("cookbook", "train.py", "accelerate_configs", "ds_configs", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    chats = [row for row in load_stdlib("train") if len(row["messages"][-1]["content"]) >= MIN_CHARACTERS]
    write_lines(folder / "chats.jsonl", chats)
    tokenizer = models.train_tokenizer((message["content"] for row in chats for message in row["messages"]), 4096)
    for name, sizes in MODELS.items():
        model = models.new_model(
            ScratchModel(num_key_value_heads=sizes["num_attention_heads"] // 2, **sizes), tokenizer, SEED
        )
        model.save_pretrained(folder / name.replace(" ", ""))
        tokenizer.save_pretrained(folder / name.replace(" ", ""))
    data, objective = DataSection(train=str(folder / "chats.jsonl"), max_length=MAX_LENGTH), ObjectiveSection()
    rows = read_data(data, objective)
    tokens = tokenize_data(rows, tokenizer, data, objective, cache=folder / "cache").train
    order = epoch_order(tokens, SEED, 0)
    write_lines(folder / "chats_in_our_order.jsonl", [chats[i] for i in order])
    lengths = tokens.lengths[order[: len(order) // MICRO_BATCH_SIZE * MICRO_BATCH_SIZE]].reshape(-1, MICRO_BATCH_SIZE)
    description = {
        "source": f"python-stdlib, answers of at least {MIN_CHARACTERS} characters",
        "chats": len(chats),
        "mean_tokens": round(float(tokens.lengths.mean()), 1),
        "median_tokens": float(np.median(tokens.lengths)),
        "max_tokens": int(tokens.lengths.max()),
        "label_share": round(float(tokens.num_targets.sum() / tokens.lengths.sum()), 3),
        "padding_efficiency": round(float(lengths.sum() / (lengths.max(1) * MICRO_BATCH_SIZE).sum()), 3),
    }
    return description, tokens.num_targets[order].tolist()


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_recipe(cell: dict[str, Any], folder: Path) -> None:
    """The recipe of a cell, bench.yaml in the folder of its run."""
    recipe = {
        "strategy": f"accelerate_configs/{cell['strategy']}.yaml",
        "mixed_precision": cell["precision"],
        "seed": SEED,
        "model": {"name_or_path": cell["model"].replace(" ", "")},
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


def build_baseline(cell: dict[str, Any]) -> Any:
    """The trainer that a cell compares with, on CPU, with the recipe's settings and no gradient checkpointing."""
    from datasets import Dataset, disable_progress_bars, load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments
    from transformers.utils import logging

    disable_progress_bars()
    logging.disable_progress_bar()
    folder = cell["model"].replace(" ", "")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chats = load_dataset("json", data_files="chats_in_our_order.jsonl", split="train")
    is_packing = cell["baseline"] == "trl_packing"
    settings = dict(
        output_dir="outputs/theirs",
        per_device_train_batch_size=1 if is_packing else MICRO_BATCH_SIZE,
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
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        **settings,
        assistant_only_loss=True,
        packing=is_packing,
        max_length=PACKED_LENGTH if is_packing else MAX_LENGTH,
    )
    return SFTTrainer(model=model, args=arguments, train_dataset=chats, processing_class=tokenizer)


# One process: ours, made of the parts that train.py introduces to each other.


class Ours:
    """The step of train.py in a process where another trainer owns the loop."""

    def __init__(self, cell: dict[str, Any]) -> None:
        from cookbook import models
        from cookbook.data.sets import read_data, tokenize_data
        from cookbook.engine import Engine
        from cookbook.launch import World
        from cookbook.objectives import build_objective
        from cookbook.optim import build_optimizer
        from cookbook.plan import load_pair, make_plan

        write_recipe(cell, Path())
        recipe, strategy = load_pair(Path("bench.yaml"))
        name = recipe.model.name_or_path
        self.tokenizer = models.load_tokenizer(name, None)
        rows = read_data(recipe.data, recipe.objective)
        self.tokens = tokenize_data(rows, self.tokenizer, recipe.data, recipe.objective, cache=Path(".cache")).train
        self.engine = Engine(
            strategy,
            make_plan(recipe, strategy, num_processes=1, num_gpus=0, recipe_name="bench.yaml"),
            World(rank=0, local_rank=0, num_processes=1, is_launched=False),
            mixed_precision=recipe.mixed_precision,
            micro_batch_size=MICRO_BATCH_SIZE,
            max_grad_norm=recipe.optim.max_grad_norm,
            run_name="ours",
        )
        model = models.load_model(name, recipe.model, packing=True)
        self.engine.prepare(model, build_optimizer(model, recipe.optim, recipe.mixed_precision))
        self.objective = build_objective(recipe.objective)
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
        from cookbook.data.batches import collate

        started = time.perf_counter()
        batch = collate(self.tokens, samples, self.tokenizer.pad_token_id, packing=True)
        num_targets = int(self.tokens.num_targets[samples].sum())
        means = self.engine.gradients(self.objective.run, [batch], num_targets)
        self.engine.step()
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "num_targets": num_targets, "num_samples": len(samples), "loss": means["loss"]}


# What a process of its own does.


def run_pair(cell: dict[str, Any]) -> dict[str, Any]:
    """Their trainer, and ours before (even steps) or after (odd ones) each of its steps, on the same samples."""
    from transformers import TrainerCallback

    trainer = build_baseline(cell)
    ours = Ours(cell)
    collated: deque[list[dict]] = deque()  # the loader runs a batch ahead
    collator = trainer.data_collator

    def watch(examples: list[dict]) -> Any:
        collated.append(examples)
        return collator(examples)

    trainer.data_collator = watch
    steps: list[dict[str, float]] = []

    class Alternate(TrainerCallback):
        """Theirs is all time between two ends of their steps, less ours."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.mark = time.perf_counter()

        def run_ours(self) -> None:
            started = time.perf_counter()
            steps.append(ours.step(ours.samples(collated.popleft())))
            self.mark += time.perf_counter() - started

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step % 2 == 0:
                self.run_ours()

        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            seconds = time.perf_counter() - self.mark
            if state.global_step % 2 == 0:  # counted up already
                self.run_ours()
            steps[-1]["their_seconds"] = seconds
            self.mark = time.perf_counter()

    trainer.add_callback(Alternate())
    trainer.train()
    their_loss = trainer.state.log_history[0]["loss"]
    if cell["precision"] == "no":
        assert abs(steps[0]["loss"] - their_loss) < 1e-4, f"the first losses differ: {steps[0]['loss']}, {their_loss}"
    return {
        "first_loss": steps[0]["loss"],
        "their_first_loss": their_loss,
        # Our seconds, theirs, trained tokens, samples.
        "measured": [
            [round(step["seconds"], 4), round(step["their_seconds"], 4), step["num_targets"], step["num_samples"]]
            for step in steps
        ],
    }


def run_theirs(cell: dict[str, Any]) -> dict[str, Any] | None:
    """Their trainer alone, in one process or, started by accelerate, in each of several."""
    import psutil
    from transformers import TrainerCallback

    if cell["strategy"].startswith("zero"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled at first use; gloo serves
    trainer = build_baseline(cell)
    seconds: list[float] = []
    first: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.mark = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds.append(time.perf_counter() - self.mark)
            first.append(time.time() - psutil.Process().create_time())

    trainer.add_callback(Clock())
    trainer.train()
    if not trainer.is_world_process_zero():
        return None
    return {
        "processes": trainer.accelerator.num_processes,
        "engine": type(trainer.model_wrapped).__name__,
        "seconds": seconds,
        "first_loss": trainer.state.log_history[0]["loss"],
        "first_step_seconds": first[0],
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


def start(folder: Path, cell: dict[str, Any], command: list[str]) -> subprocess.Popen:
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


def worker(shared: Path, kind: str, cell: dict[str, Any]) -> dict[str, Any]:
    """What `run_pair` or `run_theirs` returns from processes of their own."""
    folder = fresh(shared)
    finish(folder, start(folder, cell, [__file__, "--worker", kind, json.dumps(cell)]))
    return json.loads((folder / "result.json").read_text())


def run_ours(shared: Path, cell: dict[str, Any]) -> dict[str, Any]:
    """train.py alone, in as many processes as the cell says. Its own metrics tell all but the start."""
    folder = fresh(shared)
    write_recipe(cell, folder)
    metrics = folder / "outputs" / "ours" / "metrics.jsonl"
    started = time.time()
    process = start(folder, cell, ["train.py", "bench.yaml"])
    while process.poll() is None and not (metrics.is_file() and metrics.stat().st_size):
        time.sleep(0.02)
    first = time.time() - started
    finish(folder, process)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {
        "seconds": [line["step_seconds"] for line in lines],
        "first_loss": lines[0]["loss"],
        "first_step_seconds": first,
        "peak_memory_gib": lines[-1]["peak_memory_gib"],
    }


def attempt(what: str, cell: dict[str, Any], run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The cell with its results, or with the reason why there are none."""
    started = time.monotonic()
    try:
        found = run()
    except Failed as error:
        found = {"failed": str(error)}
    print(f"{what} {cell}: {found.get('failed', 'done')}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    return {**cell, **found}


def measure(shared: Path, num_targets: list[int], *, num_steps: int, quick: bool) -> dict[str, list[dict]]:
    """All rows. In a quick run the small model in fp32 only."""
    kinds = [(model, precision) for model in MODELS for precision in PRECISIONS]
    kinds = kinds[:1] if quick else kinds
    one = {"strategy": "single", "processes": 1}
    pairs = []
    for model, precision in kinds:
        for baseline in BASELINES:
            cell = {"model": model, "precision": precision, "baseline": baseline, "steps": num_steps, **one}
            pairs.append(attempt("pair", cell, partial(worker, shared, "pair", cell)))
    alone = []
    for model, precision in kinds:
        for baseline in ["ours", *BASELINES]:
            cell = {"model": model, "precision": precision, "baseline": baseline, "steps": 3, **one}
            run = partial(run_ours, shared, cell) if baseline == "ours" else partial(worker, shared, "theirs", cell)
            alone.append(attempt("alone", cell, run))
    launched = []
    for strategy in ("ddp", "zero2"):
        for launch_round in range(1 if quick else 2):
            for baseline in ("ours", "trl"):
                cell = {"model": "5 M", "precision": "no", "baseline": baseline, "steps": num_steps // 2 + 1}
                cell |= {"strategy": strategy, "processes": 2, "round": launch_round}
                run = partial(run_ours, shared, cell) if baseline == "ours" else partial(worker, shared, "theirs", cell)
                row = attempt("launched", cell, run)
                size = MICRO_BATCH_SIZE * 2
                row["num_targets"] = [sum(num_targets[i * size : (i + 1) * size]) for i in range(cell["steps"])]
                launched.append(row)
    return {"pairs": pairs, "alone": alone, "launched": launched}


def environment() -> dict[str, Any]:
    names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {
        "command": shlex.join(["python", "benchmarks/vs_trl.py", *sys.argv[1:]]),
        "date": date.today().isoformat(),
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


def paired(ours: list[float], theirs: list[float]) -> str:
    """How many times as fast ours is: median of the ratios, their quartiles, and the ratio of the sums."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"**{middle:.2f}** [{low:.2f}..{high:.2f}] | {sum(theirs) / sum(ours):.2f}"


def speed_table(rows: list[dict]) -> list[str]:
    lines = [
        "| model | precision | beside | ours, trained tokens/s | theirs | times as fast: median [quartiles] | by total time | goal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        start = f"| {row['model']} | {PRECISIONS[row['precision']]} | {BASELINES[row['baseline']]} |"
        if "failed" in row:
            lines.append(f"{start} did not run: {row['failed']} | | | | |")
            continue
        steps = row["measured"][NUM_WARMUP_STEPS:]
        ours, theirs, targets = ([step[i] for step in steps] for i in range(3))
        speeds = [statistics.median(n / s for n, s in zip(targets, side, strict=True)) for side in (ours, theirs)]
        goal = GOALS[row["baseline"]]
        middle = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
        verdict = f"{goal}: {'reached' if middle >= goal else 'missed'}"
        lines.append(f"{start} {speeds[0]:,.0f} | {speeds[1]:,.0f} | {paired(ours, theirs)} | {verdict} |")
    return lines


def alone_table(rows: list[dict]) -> list[str]:
    names = {"ours": "ours"} | BASELINES
    heads = [f"{name}: {what}" for what in ("start to end of step 1, s", "peak memory, GiB") for name in names.values()]
    lines = [f"| model | precision | {' | '.join(heads)} |", "|---|---" + "|---" * len(heads) + "|"]
    for model, precision in dict.fromkeys((row["model"], row["precision"]) for row in rows):
        found = {row["baseline"]: row for row in rows if (row["model"], row["precision"]) == (model, precision)}
        cells = [
            f"{found[name][key]:{form}}" if key in found[name] else "did not run"
            for key, form in (("first_step_seconds", ".1f"), ("peak_memory_gib", ".2f"))
            for name in names
        ]
        lines.append(f"| {model} | {PRECISIONS[precision]} | {' | '.join(cells)} |")
    return lines


def launched_table(rows: list[dict]) -> list[str]:
    lines = [
        "| two processes | ours, trained tokens/s | TRL | times as fast: median [quartiles] | by total time |",
        "|---|---|---|---|---|",
    ]
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        failed = [row["failed"] for row in mine if "failed" in row]
        if failed:
            lines.append(f"| `{strategy}` | did not run: {failed[0]} | | | |")
            continue
        seconds, speeds = {}, {}
        for name in ("ours", "trl"):
            steps = [
                pair
                for row in mine
                if row["baseline"] == name
                for pair in list(zip(row["seconds"], row["num_targets"], strict=True))[NUM_WARMUP_STEPS:]
            ]
            seconds[name] = [s for s, _ in steps]
            speeds[name] = statistics.median(n / s for s, n in steps)
        lines.append(
            f"| `{strategy}` | {speeds['ours']:,.0f} | {speeds['trl']:,.0f} | {paired(seconds['ours'], seconds['trl'])} |"
        )
    return lines


def render(results: dict[str, Any]) -> str:
    """The part of docs/speed.md between the marks."""
    data, hardware = results["data"], results["hardware"]
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join(
        [
            f"`{results['command']}`, {results['date']}, {hardware['cores']} cores of {hardware['cpu']}, **no GPU**;"
            f" {versions}.",
            f"Data: {data['chats']:,} chats of {data['source']}; tokens a chat: mean {data['mean_tokens']}, median"
            f" {data['median_tokens']:.0f}, at most {data['max_tokens']}; {data['label_share']:.0%} carry loss; padded to"
            f" the longest of {MICRO_BATCH_SIZE}, {data['padding_efficiency']:.0%} of a batch are tokens.",
            "",
            *speed_table(results["pairs"]),
            "",
            *alone_table(results["alone"]),
            "",
            *launched_table(results["launched"]),
        ]
    )


def write_page(results: dict[str, Any]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{rest.split(END)[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Our training beside TRL's and transformers' on this CPU.")
    parser.add_argument("--quick", action="store_true", help="the small model in fp32 and few steps; writes nothing")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        kind, cell = arguments.worker
        found = {"pair": run_pair, "theirs": run_theirs}[kind](json.loads(cell))
        if found is not None:
            Path("result.json").write_text(json.dumps(found), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="vs_trl-") as base:
        shared = Path(base) / "shared"
        shared.mkdir()
        data, num_targets = make_workplace(shared)
        started, load = time.monotonic(), os.getloadavg()[0]
        rows = measure(
            shared, num_targets, num_steps=NUM_WARMUP_STEPS + (4 if arguments.quick else 14), quick=arguments.quick
        )
    minutes = (time.monotonic() - started) / 60
    results = {**environment(), "minutes": round(minutes, 1), "load_at_start": round(load, 1), "data": data, **rows}
    if arguments.quick:
        print(render(results))
    else:
        write_results(results)
        write_page(results)


if __name__ == "__main__":
    main()
