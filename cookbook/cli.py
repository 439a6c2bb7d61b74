"""The commands of `python -m cookbook`; the Makefile gives each a shorter name.

A command is a function from its arguments to an exit code, and `main` lists them all. Everything before a run starts
works without torch, so that a mistake in a file is told in a moment; only `sample` imports it.
"""

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

from cookbook.checkpoint.listing import in_words, is_run, list_checkpoints
from cookbook.child import run_child
from cookbook.combinations import page as combinations_page
from cookbook.data.rows import read_rows
from cookbook.files import RecipeError
from cookbook.library import PAGE, library_page, read_label, read_needs, what_it_takes
from cookbook.machine import num_cores, num_gpus
from cookbook.plan import default_num_processes, describe_batch, launch_command, load_pair, make_plan, show_command
from cookbook.recipe import recipe_schema
from cookbook.strategy import find_strategy, load_strategy

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

    check = verbs.add_parser("check", help="check recipes with their strategies; without a recipe, all that are here")
    check.set_defaults(command=check_files)
    check.add_argument("recipes", nargs="*", type=Path, metavar="RECIPE")
    _add_strategy(check)

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

    rehearse = verbs.add_parser("rehearse", help="run a recipe with a tiny model of its kind on CPU")
    rehearse.set_defaults(command=rehearse_recipe)
    rehearse.add_argument("recipe", type=Path)
    _add_strategy(rehearse)
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
    override = find_strategy(arguments.strategy) if arguments.strategy else None
    recipe, strategy = load_pair(arguments.recipe, arguments.assignments, override)
    gpus = num_gpus()
    count = arguments.processes if arguments.processes is not None else default_num_processes(strategy, gpus)
    if count < 1:
        raise RecipeError([f"--processes is {count}; it must be at least 1"])
    make_plan(recipe, strategy, num_processes=count, num_gpus=gpus, recipe_name=str(arguments.recipe))
    command = launch_command(str(arguments.recipe), strategy, num_processes=count, assignments=arguments.assignments)
    if not arguments.dry_run and gpus < (read_needs(read_label(arguments.recipe)).num_gpus or 0):
        raise RecipeError([what_it_takes(arguments.recipe), f"To run it here all the same: {show_command(command)}"])
    for source in () if recipe.data.streaming else (*recipe.data.train, *recipe.data.eval.values()):
        if Path(source.path).exists():
            # The processes read them again; told here, broken rows come without torchrun's own report behind them.
            read_rows(source, recipe.data.on_bad_row, recipe.objective.name)
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
    mistakes: list[str] = []
    for path in recipes:
        try:
            print(_check_recipe(path, override))
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


def _check_recipe(path: Path, override: Path | None) -> str:
    recipe, strategy = load_pair(path, strategy_path=override)
    count = default_num_processes(strategy, num_gpus())
    plan = make_plan(recipe, strategy, num_processes=count, num_gpus=count, recipe_name=str(path))
    return f"{path}: fine under {strategy.path}; {describe_batch(recipe, plan)}"


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
    seconds = sum(line["step_seconds"] for line in steps)
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
    rows["training"] = f"steps {first['step']} to {last['step']} in {seconds:.0f} s, {last['epoch']:.2f} epochs"
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


def rehearse_recipe(arguments: argparse.Namespace) -> int:
    """Runs the recipe with everything that is its own but the size."""
    from cookbook.rehearse import rehearse

    return rehearse(
        arguments.recipe,
        assignments=arguments.assignments,
        strategy=arguments.strategy,
        processes=arguments.processes,
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
