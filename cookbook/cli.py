"""The commands of `python -m cookbook`; the Makefile gives each a shorter name.

A command is a function from its arguments to an exit code, and `main` lists them all. Everything before a run starts
works without torch, so that a mistake in a file is told in a moment; only `sample` imports it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from statistics import mean, median
from typing import Any

from cookbook import simulated_gpus
from cookbook.checkpoint.listing import in_words, is_run, list_checkpoints
from cookbook.child import run_child
from cookbook.combinations import page as combinations_page
from cookbook.data.rows import read_rows
from cookbook.explain import as_dict, compare, explain
from cookbook.explain import in_words as words_of
from cookbook.explain.chart import can_draw
from cookbook.files import KeyPath, RecipeError, read_document, validate
from cookbook.hardware import GIB, Machines, parse_machines, this_machine, with_room
from cookbook.library import PAGE, gpus_needed, library_page, read_label, read_needs, what_it_takes
from cookbook.machine import num_cores, num_gpus
from cookbook.plan import (
    Plan,
    default_num_processes,
    describe_batch,
    launch_command,
    load_pair,
    make_plan,
    show_command,
)
from cookbook.recipe import OWNED_ELSEWHERE, Recipe, read_recipe, recipe_schema
from cookbook.strategy import Strategy, find_strategy, load_strategy

QUICKSTART = Path("recipes/quickstart.yaml")
SCHEMA = Path("recipes/schema.json")
COMBINATIONS_PAGE = Path("docs/combinations.md")
PROMPT = "Write `def get_name(self)`: Return the name."  # as cookbook/data/stdlib.py words a request


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0, or 2 for what the user can fix in a file or on the command line."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.command(parsed)
    except RecipeError as error:
        print(error, file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read has seen enough, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cookbook", description="Train a recipe under a strategy.")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    launch = verbs.add_parser("launch", help="train a recipe: check it, print the accelerate line, run it")
    launch.set_defaults(command=launch_run)
    launch.add_argument("recipe", nargs="?", type=Path, default=QUICKSTART, help="default: %(default)s")
    _add_strategy(launch)
    launch.add_argument("--processes", type=int, metavar="N", help="default: one per GPU, or two without a GPU")
    _add_assignments(launch)
    launch.add_argument("--dry-run", action="store_true", help="start the processes, check everything, train nothing")
    launch.add_argument(
        "--simulate-gpus", type=int, metavar="N", help="on a machine without GPUs: real numbers by the GPU's code paths"
    )

    check = verbs.add_parser("check", help="check recipes with their strategies; without a recipe, all that are here")
    check.set_defaults(command=check_files)
    check.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE")
    _add_strategy(check)
    check.add_argument("--processes", type=int, metavar="N", help="default: as many as GPUs are on the recipe's label")
    _add_assignments(check)

    explain = verbs.add_parser("explain", help="what a recipe will run, and where each value is from; how two differ")
    explain.set_defaults(command=explain_run)
    explain.add_argument("first", nargs="?", default=str(QUICKSTART), metavar="RECIPE", help="default: %(default)s")
    explain.add_argument(
        "second", nargs="?", metavar="OTHER", help="compare with: a recipe, or a strategy's name or file"
    )
    _add_strategy(explain)
    explain.add_argument(
        "--processes", type=int, metavar="N", help="default: one per GPU, here or of the recipe's label"
    )
    _add_assignments(explain)
    explain.add_argument("--json", action="store_true", help="everything that is known, for programs")

    summary = verbs.add_parser("summary", help="what a run did: losses, speed, memory, where the model lies")
    summary.set_defaults(command=summarize)
    summary.add_argument("folder", type=Path, help="the run.output_dir of a recipe")

    sample = verbs.add_parser("sample", help="let a trained model answer a prompt")
    sample.set_defaults(command=sample_model)
    sample.add_argument("folder", type=Path, help="the run.output_dir of a recipe, or a model's own folder")
    sample.add_argument("--prompt", default=PROMPT, help="default: %(default)s")
    sample.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="default: %(default)s")

    preview = verbs.add_parser("preview", help="show samples as the model will see them, and how long they are")
    preview.set_defaults(command=preview_data)
    preview.add_argument("recipe", nargs="?", type=Path, default=QUICKSTART, help="default: %(default)s")
    preview.add_argument("--samples", type=int, default=3, metavar="N", help="default: %(default)s")
    _add_assignments(preview)

    plan = verbs.add_parser("plan", help="forecast memory, speed and price under every strategy, and rank them")
    plan.set_defaults(command=plan_recipe)
    plan.add_argument("recipe", nargs="?", type=Path, default=QUICKSTART, help="default: %(default)s")
    plan.add_argument(
        "--gpus", metavar="8xH100", help="or 8x80GB, 2x8xH100, cpu; default: this machine's, or the recipe's Needs line"
    )
    plan.add_argument("--strategy", action="append", metavar="NAME|PATH", help="only this one; may be repeated")
    plan.add_argument("--host-gib", type=float, metavar="N", help="memory of each machine, for what is offloaded")
    plan.add_argument("--nvme-gib", type=float, metavar="N", help="free on the disk for offloading, of each machine")
    plan.add_argument(
        "--fabric", type=float, metavar="GBITS", help="of the network card of each GPU; default: 100 to 400"
    )
    plan.add_argument("--samples", type=int, metavar="N", help="rows of data.train, for how long the run takes")
    plan.add_argument("--price", type=float, metavar="N", help="of a GPU for an hour, in any currency")
    plan.add_argument("--json", action="store_true", help="everything, in bytes and seconds")
    _add_assignments(plan)

    rehearse = verbs.add_parser("rehearse", help="run a recipe with a tiny model of its kind on simulated GPUs")
    rehearse.set_defaults(command=rehearse_recipe)
    rehearse.add_argument("recipe", type=Path)
    _add_strategy(rehearse)
    rehearse.add_argument(
        "--on", choices=("gpus", "cpu"), help="default: GPUs, simulated where there are none, if that can be done here"
    )
    rehearse.add_argument("--processes", type=int, metavar="N", help="default: two, or what the strategy's mesh needs")
    _add_assignments(rehearse)

    merge = verbs.add_parser("merge", help="write a trained adapter and its base model as one model")
    merge.set_defaults(command=merge_run)
    merge.add_argument("folder", type=Path, help="the run.output_dir of a recipe with an adapter")
    merge.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: the base model's")

    export = verbs.add_parser("export", help="write a checkpoint as a Hugging Face folder, reopened and described")
    export.set_defaults(command=export_run)
    export.add_argument("folder", type=Path, metavar="RUN", help="the run.output_dir of a recipe")
    export.add_argument("--step", type=int, metavar="N", help="default: the newest checkpoint")
    export.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16", "as-is"), default="as-is", help="default: the base model's"
    )
    export.add_argument("--merged", action="store_true", help="adapter and base model as one model")
    export.add_argument("--out", type=Path, metavar="FOLDER", help="default: RUN/export, or RUN/merged")
    export.add_argument("--push", metavar="OWNER/NAME", help="then upload it to the Hub, with the token in HF_TOKEN")
    export.add_argument("--public", action="store_true", help="a new repository on the Hub can be read by everybody")

    checkpoint = verbs.add_parser("checkpoint", help="list checkpoints: whole or broken, and how to go on from them")
    checkpoint.set_defaults(command=show_checkpoints)
    checkpoint.add_argument("path", type=Path, metavar="PATH", help="a run, its checkpoints/, or one checkpoint")
    checkpoint.add_argument("--json", action="store_true", help="everything that is known, for programs")

    doctor = verbs.add_parser("doctor", help="is this machine ready: 0 yes, 1 with warnings, 2 no")
    doctor.set_defaults(command=examine_machine)
    doctor.add_argument("recipe", nargs="?", type=Path, help="what to get ready for; default: the machine alone")
    _add_strategy(doctor)
    doctor.add_argument("--json", action="store_true", help="the findings, for programs")
    doctor.add_argument("--deadline", type=float, default=60.0, metavar="SECONDS", help="default: %(default)g")

    library = verbs.add_parser("library", help=f"write {PAGE} from the recipes")
    library.set_defaults(command=write_library)

    combinations = verbs.add_parser("combinations", help=f"write {COMBINATIONS_PAGE}, what is refused and why")
    combinations.set_defaults(command=write_combinations)

    schema = verbs.add_parser("schema", help=f"write {SCHEMA}, by which an editor checks recipes")
    schema.set_defaults(command=write_schema)
    return parser


def _add_assignments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="assignments", action="append", default=[], metavar="section.key=value", help="may be repeated"
    )


def _add_strategy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strategy", metavar="NAME|PATH", help="instead of the recipe's: ddp, fsdp2, zero3, ...")


def launch_run(arguments: argparse.Namespace) -> int:
    """Runs the `accelerate launch` of the recipe: see `cookbook.child`."""
    if arguments.simulate_gpus is not None:
        os.environ |= simulated_gpus.environment(arguments.simulate_gpus)
        print(f"{arguments.simulate_gpus} simulated GPUs: no time or speed of this run is a measurement", flush=True)
    override = find_strategy(arguments.strategy) if arguments.strategy else None
    recipe, strategy = load_pair(arguments.recipe, arguments.assignments, override)
    gpus = num_gpus()
    count = arguments.processes if arguments.processes is not None else default_num_processes(strategy, gpus)
    if count < 1:
        raise RecipeError([f"--processes is {count}; it must be at least 1"])
    make_plan(recipe, strategy, num_processes=count, num_gpus=gpus, recipe_name=str(arguments.recipe))
    command = launch_command(str(arguments.recipe), strategy, num_processes=count, assignments=arguments.assignments)
    is_free = arguments.dry_run or arguments.simulate_gpus is not None
    if not is_free and gpus < gpus_needed(read_label(arguments.recipe), strategy.name):
        raise RecipeError([what_it_takes(arguments.recipe), f"To run it here all the same: {show_command(command)}"])
    for source in () if recipe.data.streaming else (*recipe.data.train, *recipe.data.eval.values()):
        if Path(source.path).exists():
            # The processes read them again; told here, broken rows come without torchrun's own report behind them.
            read_rows(source, recipe.data.on_bad_row, recipe.objective)
    command += ["--dry-run"] if arguments.dry_run else []
    print(show_command(command), flush=True)
    # The accelerate beside this Python, and the compilers' ninja, also when the virtual environment is not activated.
    folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": os.pathsep.join([folder, os.environ.get("PATH", "")])}
    # torchrun would give each process one thread, whatever the machine has: too few on CPU, and for offloaded updates.
    per_machine = max(1, count // strategy.num_machines)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // per_machine)))
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        raise RecipeError([f"accelerate is not installed beside {sys.executable}; run make setup"])
    return run_child([program, *command[1:]], environment, Path(recipe.run.output_dir))


def check_files(arguments: argparse.Namespace) -> int:
    """Checks files, not the machine: a recipe for eight GPUs is fine on a laptop."""
    override = find_strategy(arguments.strategy) if arguments.strategy else None
    recipes = arguments.recipes or sorted(Path("recipes").rglob("*.yaml"))
    strategies = [] if arguments.recipes else sorted(Path("accelerate_configs").glob("*.yaml"))
    if not recipes:
        raise RecipeError([f"recipes/: no recipe there (looked in {Path.cwd()})"])
    if arguments.processes is not None and arguments.processes < 1:
        raise RecipeError([f"--processes is {arguments.processes}; it must be at least 1"])
    mistakes: list[str] = []
    for path in recipes:
        try:
            print(_check_recipe(path, override, arguments.assignments, arguments.processes))
        except RecipeError as error:
            mistakes += error.mistakes
    for path in strategies:
        try:
            load_strategy(path)
            print(f"{path}: fine")
        except RecipeError as error:
            mistakes += error.mistakes
    if mistakes:
        sys.stdout.flush()
        raise RecipeError(list(dict.fromkeys(mistakes)))
    return 0


def _check_recipe(path: Path, override: Path | None, assignments: list[str], processes: int | None) -> str:
    try:
        recipe, strategy = load_pair(path, assignments, strategy_path=override)
    except RecipeError as error:
        raise RecipeError([*error.mistakes, *_clashes_behind(path, override)]) from None
    plan = _plan_of_label(path, recipe, strategy, processes)
    return f"{path}: fine under {strategy.path}; {describe_batch(recipe, plan)}"


def _plan_of_label(path: Path, recipe: Recipe, strategy: Strategy, processes: int | None = None) -> Plan:
    """The plan for `processes`, or as many as the recipe's label names GPUs, whatever this machine has; a recipe that
    names none is for this machine.
    """
    named = read_needs(read_label(path)).num_gpus
    here = 0 if named else num_gpus()
    count = processes or strategy.num_processes or named or default_num_processes(strategy, here)
    gpus = count if named or here else 0
    try:
        return make_plan(recipe, strategy, num_processes=count, num_gpus=gpus, recipe_name=str(path))
    except RecipeError as error:
        lines = read_document(path).lines
        raise RecipeError([_with_line(mistake, path, lines) for mistake in error.mistakes]) from None


def _clashes_behind(path: Path, override: Path | None) -> list[str]:
    """What would clash if every misspelt key of the recipe had its nearest name; nothing if more than that is wrong."""
    try:
        recipe, _ = validate(read_recipe(path), Recipe, OWNED_ELSEWHERE)
        if recipe is not None and (override or Path(recipe.strategy)).is_file():
            _plan_of_label(path, recipe, load_strategy(override or Path(recipe.strategy)))
    except RecipeError as error:
        return error.mistakes
    return []


def _with_line(mistake: str, path: Path, lines: Mapping[KeyPath, int]) -> str:
    """`file: section.key ...` -> `file:12: section.key ...`, where the file has that key."""
    named = re.match(rf"{re.escape(str(path))}(?: under \S+)?: (\w+(?:\.\w+)*)", mistake)
    line = lines.get(tuple(named[1].split("."))) if named else None
    return mistake if line is None else f"{path}:{line}{mistake[len(str(path)) :]}"


def explain_run(arguments: argparse.Namespace) -> int:
    """Prints what will run, or what differs between two."""
    override = find_strategy(arguments.strategy) if arguments.strategy else None
    plain = not can_draw(sys.stdout.encoding)
    if plain and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may have letters that this terminal has not
    if arguments.second is not None:
        found = compare.compare(
            arguments.first,
            arguments.second,
            override=override,
            assignments=arguments.assignments,
            processes=arguments.processes,
        )
        print(json.dumps(compare.as_dict(found), indent=1) if arguments.json else compare.in_words(found))
        return 0
    if compare.is_strategy(arguments.first):
        find_strategy(arguments.first)
        raise RecipeError([f"{arguments.first}: a strategy; write a recipe before it, or another strategy after it"])
    explanation = explain(
        Path(arguments.first),
        strategy_path=override,
        assignments=arguments.assignments,
        processes=arguments.processes,
    )
    print(json.dumps(as_dict(explanation), indent=1) if arguments.json else words_of(explanation, plain=plain))
    return 0


def summarize(arguments: argparse.Namespace) -> int:
    """Prints what metrics.jsonl and run.json say."""
    lines = _read_metrics(arguments.folder)
    rows = _summary(lines, arguments.folder)
    width = max(map(len, rows))
    print(f"SUMMARY of {arguments.folder}")
    for name, text in rows.items():
        print(f"  {name:{width}}  {text}")
    return 0


def _read_metrics(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise RecipeError([f"{path}: no such file; name the run.output_dir of a run, for example outputs/quickstart"])
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not any("loss" in line for line in lines):
        raise RecipeError([f"{path}: no training step in it; the run ended before its first"])
    return lines


def _summary(lines: list[dict[str, Any]], folder: Path) -> dict[str, str]:
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    first, last = steps[0], steps[-1]
    tail = steps[-10:]
    is_measured = "step_seconds" in first  # on simulated GPUs there is nothing to measure
    rows = {
        "loss": f"{first['loss']:.3f} at step {first['step']}, {mean(line['loss'] for line in tail):.3f} at the end"
        f" (mean of the last {len(tail)} steps)"
    }
    for name in dict.fromkeys(line.get("eval_set", "") for line in evaluations):
        of_set = [line for line in evaluations if line.get("eval_set", "") == name]
        shown = [f"{line['eval_loss']:.3f} at step {line['step']}" for line in (of_set[0], of_set[-1])]
        rows[f"held-out loss{name and f' of {name}'}"] = ", ".join(dict.fromkeys(shown))
    if "reward_accuracy" in last:
        accuracy = mean(line["reward_accuracy"] for line in tail)
        rows["reward accuracy"] = f"{accuracy:.2f} (mean of the last {len(tail)} steps)"
    time_taken = f" in {sum(line['step_seconds'] for line in steps):.0f} s" if is_measured else ""
    rows["training"] = f"steps {first['step']} to {last['step']}{time_taken}, {last['epoch']:.2f} epochs"
    if is_measured:
        rows["tokens/s"] = f"{median(line['tokens_per_second'] for line in steps):,.0f} (median step, all processes)"
    rows["peak memory"] = f"{max(line['peak_memory_gib'] for line in steps):.2f} GiB (largest process)"
    rows |= _where(folder)
    export = folder / "export"
    rows["model"] = str(export) if export.is_dir() else "none: the run was not finished"
    return rows


def _where(folder: Path) -> dict[str, str]:
    path = folder / "run.json"
    if not path.is_file():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    strategy, hardware = record["strategy"], record["hardware"]
    device = hardware.get("gpu") or f"{hardware['cores']} CPU cores"
    return {"strategy": f"{strategy['file']}, {strategy['processes']} processes on {device}"}


def sample_model(arguments: argparse.Namespace) -> int:
    """Prints what the saved model makes of the prompt, taking the likeliest token each time."""
    export = arguments.folder / "export"
    folder = export if export.is_dir() else arguments.folder
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RecipeError([f"{folder}: no model there; name a run's folder, for example outputs/quickstart"])

    if not num_gpus():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, imported by generate, warns on stdout
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    opener: Any = AutoModelForCausalLM
    if (folder / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM as opener  # takes the base model's revision from the adapter
    model = opener.from_pretrained(folder, dtype="auto", trust_remote_code=False, use_safetensors=True)
    model = model.to("cuda" if num_gpus() else "cpu").eval()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": arguments.prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    else:
        inputs = tokenizer(arguments.prompt, return_tensors="pt")
    inputs = inputs.to(model.device)
    with torch.no_grad():
        ids = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=arguments.max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
        )
    answer = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"SAMPLE from {folder}\n\n{arguments.prompt}\n\n{answer}")
    return 0


def preview_data(arguments: argparse.Namespace) -> int:
    """Prints samples of the training set, trained and untrained tokens told apart."""
    if arguments.samples < 0:
        raise RecipeError([f"--samples is {arguments.samples}; it must be at least 0"])
    from cookbook.preview import preview

    return preview(arguments.recipe, arguments.assignments, arguments.samples)


def plan_recipe(arguments: argparse.Namespace) -> int:
    """Forecasts a recipe under every shipped strategy. Returns 1 if nothing fits."""
    mistakes = []
    for name in ("samples", "price"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < 1e15:
            mistakes.append(f"--{name} is {value}; write a number above 0")
    if mistakes:
        raise RecipeError(mistakes)
    names = arguments.strategy
    paths = [find_strategy(name) for name in names] if names else sorted(Path("accelerate_configs").glob("*.yaml"))
    recipe, _ = load_pair(arguments.recipe, arguments.assignments, paths[0] if names else None)
    options = {"fabric_gbits": arguments.fabric, "host_gib": arguments.host_gib, "nvme_gib": arguments.nvme_gib}
    machines = _machines_for(arguments.recipe, arguments.gpus, options)
    strategies = [load_strategy(path) for path in paths]

    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, which transformers may import, warns on stdout
    from cookbook.forecast import MAY_RUN, forecast_all
    from cookbook.forecast.show import as_record, in_words

    others = [load_strategy(path) for path in sorted(Path("accelerate_configs").glob("*.yaml"))] if names else []
    outlook = forecast_all(recipe, strategies, machines, str(arguments.recipe), others)
    known = {"num_samples": arguments.samples, "price": arguments.price}
    if arguments.json:
        print(json.dumps(as_record(outlook, str(arguments.recipe), **known), indent=1))
    else:
        print(in_words(outlook, str(arguments.recipe), **known))
    return 0 if outlook.forecasts[0].verdict in MAY_RUN else 1


def _machines_for(recipe: Path, text: str | None, options: dict[str, float | None]) -> Machines:
    """What was asked for, else what is here, else what the recipe's label needs."""
    if text is None:
        here = this_machine()
        needs = read_needs(read_label(recipe))
        if here.num_gpus or needs.num_gpus is None or needs.gpu_gb is None:
            return with_room(here, **options)
        text = f"{needs.num_gpus}x{needs.gpu_gb}GB"
        asked = {"host_gib": needs.host_gb, "nvme_gib": needs.nvme_gb}
        options |= {name: gb * 1e9 / GIB for name, gb in asked.items() if gb is not None and options[name] is None}
    return parse_machines(text, **options)


def rehearse_recipe(arguments: argparse.Namespace) -> int:
    """Runs the recipe with everything that is its own but the size."""
    from cookbook.rehearse import rehearse

    return rehearse(
        arguments.recipe,
        assignments=arguments.assignments,
        strategy=arguments.strategy,
        processes=arguments.processes,
        on=arguments.on,
    )


def merge_run(arguments: argparse.Namespace) -> int:
    """Writes `merged/` beside the run's `export/`."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, which transformers imports, warns on stdout
    from cookbook.merge import merge

    return merge(arguments.folder, arguments.dtype)


def export_run(arguments: argparse.Namespace) -> int:
    """Writes a checkpoint as a Hugging Face folder. Returns 1 if what was written is not what the checkpoint holds."""
    if arguments.public and not arguments.push:
        raise RecipeError(["--public would be ignored without --push; take it out"])
    if not is_run(arguments.folder):  # told before seconds go into imports
        raise RecipeError([f"{arguments.folder}: not a run's folder; name its run.output_dir, as outputs/quickstart"])
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, which transformers imports, warns on stdout
    from transformers.utils import logging

    from cookbook import publish
    from cookbook.publish.push import check_push, push

    logging.disable_progress_bar()
    if arguments.push:
        check_push(arguments.push)
    checkpoint = publish.find_checkpoint(arguments.folder, arguments.step)
    try:
        folder = publish.export(
            arguments.folder, checkpoint, target=arguments.out, dtype=arguments.dtype, merged=arguments.merged
        )
    except publish.BrokenExport as error:
        print(error, file=sys.stderr)
        return 1
    if arguments.push:
        print(f"pushed: {push(folder, arguments.push, public=arguments.public)}")
    return 0


def show_checkpoints(arguments: argparse.Namespace) -> int:
    """Lists checkpoints, every digest compared. Returns 1 if one of them is broken."""
    found = list_checkpoints(arguments.path)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        print(in_words(found))
    return 1 if any(one["broken"] for one in found) else 0


def examine_machine(arguments: argparse.Namespace) -> int:
    """Looks at what a run would need. Returns 0 if all is well, 1 with warnings, 2 if something is in the way."""
    from cookbook.doctor import examine, report

    start = time.monotonic()
    override = find_strategy(arguments.strategy) if arguments.strategy else None
    recipe, strategy = None, None
    if arguments.recipe is not None:
        recipe, strategy = load_pair(arguments.recipe, strategy_path=override)
    elif override is not None:
        strategy = load_strategy(override)
    try:
        findings = examine(recipe, strategy, arguments.recipe, arguments.deadline)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return report(findings, time.monotonic() - start, as_json=arguments.json)


def write_library(arguments: argparse.Namespace) -> int:
    """Writes the page of the recipe library."""
    return _write_page(PAGE, library_page())


def write_combinations(arguments: argparse.Namespace) -> int:
    """Writes the page of refused combinations."""
    return _write_page(COMBINATIONS_PAGE, combinations_page())


def _write_page(path: Path, text: str) -> int:
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0


def write_schema(arguments: argparse.Namespace) -> int:
    """Writes the JSON schema of a recipe."""
    return _write_page(SCHEMA, json.dumps(recipe_schema(), indent=2) + "\n")
