"""A recipe and its strategy are checked, explained, and trained by `accelerate launch`."""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from socket import gethostname
from typing import Annotated

from typer import Argument, Option

from cookbook.commands import escalation
from cookbook.commands.arguments import QUICKSTART, RECIPE, AsJson, Assignments, StrategyFile, positive, process_count
from cookbook.commands.doubts import doubts, read_all
from cookbook.config.recipe import OWNED_ELSEWHERE, Recipe, read_recipe
from cookbook.config.strategy import Strategy, find_strategy, known_strategies, load_strategy, strategy_path
from cookbook.planning import plan, simulated_gpus
from cookbook.planning.child import ACCELERATE_CLI, run_child
from cookbook.planning.explain import as_dict, compare, in_words
from cookbook.planning.explain import explain as explain_run
from cookbook.planning.explain.chart import LETTERS
from cookbook.planning.library import gpus_needed, read_label, read_needs, recipe_files, what_it_takes
from cookbook.system import hosts
from cookbook.system.console import can_show
from cookbook.system.files import RecipeError, gathered, read_document, refuse
from cookbook.system.machine import fp8_problems, num_cores, num_gpus
from cookbook.system.shipped import short
from cookbook.system.validation import validate
from cookbook.training.data.rows import read_rows


def launch(
    path: Annotated[Path, RECIPE] = QUICKSTART,
    *,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("one per GPU, or two without a GPU")] = None,
    assignments: Assignments,
    dry_run: Annotated[
        bool, Option("--dry-run", help="start the processes, check files and machine, train nothing")
    ] = False,
    simulate_gpus: Annotated[int | None, Option(help="on a machine without: real numbers by GPU code paths")] = None,
    machines: Annotated[int | None, Option(callback=positive, help="of the run; this command runs on each")] = None,
    machine: Annotated[int | None, Option(help="number of this one, from 0")] = None,
    first: Annotated[str | None, Option(metavar="ADDRESS", help="of machine 0, as the others reach it")] = None,
    port: Annotated[int | None, Option(help=f"free on machine 0; default: {hosts.PORT}")] = None,
    rank_logs: Annotated[
        bool, Option("--rank-logs", help="write each process's output to a file of its own too")
    ] = False,
) -> int:
    """Train a recipe: check it, print the accelerate line, run it."""
    if simulate_gpus is not None:
        simulated_gpus.check(simulate_gpus)
    recipe, loaded = plan.load_pair(path, assignments, strategy)
    gpus = num_gpus() if simulate_gpus is None else simulate_gpus
    found, mistakes = hosts.read_hosts(machines, machine, first, port)
    num_machines = max(found.count, loaded.num_machines)
    count = processes or loaded.num_processes or plan.default_num_processes(loaded, gpus) * num_machines
    environment = dict(os.environ)
    mistakes += _misfits(found, recipe, loaded, count)
    mistakes += hosts.set_interfaces(found.first, environment) if found.first else []
    if rank_logs and count == 1:
        mistakes.append("--rank-logs: one process runs, and its output is that of this command; take it out")
    num_local = max(1, count // num_machines)
    mistakes += _lacks_checkpoint(recipe)
    if simulate_gpus is None:
        mistakes += _lacks_for_fp8(path, recipe, gpus)
    with gathered(mistakes):
        planned = plan.make_plan(
            recipe, loaded, num_processes=count, num_local=num_local, num_gpus=gpus, recipe_name=str(path)
        )
    refuse(_placed(mistakes, path, assignments))
    if simulate_gpus is not None:  # after the checks: the first use compiles
        environment |= _simulate(simulate_gpus, path, recipe)
    folder, logs = Path(recipe.run.output_dir), None
    if rank_logs:  # beside the folder of the run, which is renamed when another run begins there
        logs = folder.with_name(f"{folder.name}.logs") / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{gethostname()}"
    command = plan.launch_command(
        str(path), loaded, num_processes=count, assignments=assignments, hosts=found, logs=logs
    )
    if not dry_run and simulate_gpus is None and gpus * num_machines < gpus_needed(read_label(path), loaded.name):
        raise RecipeError([what_it_takes(path), f"To run it here all the same: {plan.show_command(command)}"])
    _check_rows(recipe)
    if dry_run:
        command.append("--dry-run")
    if logs is not None:
        environment.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
        print(f"the output of each process: {logs}/*/attempt_*/RANK/stdout.log and stderr.log", flush=True)
    if warning := hosts.address_warning(found):
        print(warning, flush=True)
    print(plan.show_command(command), flush=True)
    # torchrun would give each process one thread, whatever the machine has: too few on CPU, and for offloaded updates.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_local)))
    if not gpus:
        environment.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns from accelerate's process
    if dry_run or recipe.run.on_out_of_memory == "stop":
        return run_command(command, environment, folder)
    start = escalation.Start(
        recipe_name=str(path), assignments=assignments, recipe=recipe, strategy=loaded, plan=planned, logs=logs
    )
    return escalation.run(start, run_command, environment)


def _simulate(count: int, path: Path, recipe: Recipe) -> dict[str, str]:
    """The variables that make GPUs of this process and of those that it starts."""
    environment = simulated_gpus.environment(count)
    os.environ |= environment
    print(f"{count} simulated GPUs: no time or speed of this run is a measurement", flush=True)
    refuse(_lacks_for_fp8(path, recipe, count))  # asks the simulated driver
    return environment


def run_command(command: list[str], environment: dict[str, str], output_dir: Path) -> int:
    """`run_child` of an `accelerate launch`, that of this Python: on PATH there may be another one's, or none."""
    # The compilers' ninja is beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    program = [sys.executable, "-P", str(ACCELERATE_CLI)]
    return run_child([*program, *command[1:]], environment | {"PATH": path}, output_dir)


def _check_rows(recipe: Recipe) -> None:
    """Report broken rows of local files here, without torchrun's own report behind them."""
    data = recipe.data
    if data.streaming:
        return
    sources = [source for _, source in data.sources]
    here = [source for source in sources if Path(source.path).exists()]
    if here == sources:
        from cookbook.training.data.known import known_rows

        known_rows(data, recipe.objective, cache=Path(".cache"))  # which the processes then need not read
        return
    for source in here:
        read_rows(source, data.on_bad_row, recipe.objective)


def _misfits(found: hosts.Hosts, recipe: Recipe, strategy: Strategy, num_processes: int) -> list[str]:
    """What keeps the machines of the command line from running a strategy."""
    mistakes = []
    if max(found.count, strategy.num_machines) > 1 and recipe.run.on_out_of_memory != "stop":
        what = "each machine has a launcher of its own, and they do not agree on the next start"
        mistakes.append(f"run.on_out_of_memory is {recipe.run.on_out_of_memory}: {what}; write stop")
    if found.count == 1:
        return mistakes
    if strategy.num_machines not in (1, found.count):
        mistakes.append(f"--machines is {found.count}, but {strategy.path} has num_machines {strategy.num_machines}")
    if num_processes % found.count:
        advice = "write a multiple with --processes, which counts those of all"
        mistakes.append(f"{num_processes} processes, which {found.count} machines cannot split evenly; {advice}")
    return mistakes


def check(
    paths: Annotated[list[Path] | None, RECIPE] = None,
    *,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("as many as GPUs are on the recipe's label")] = None,
    assignments: Assignments,
    data: Annotated[bool, Option("--data", help="read every row as well, without a model")] = False,
) -> int:
    """Check recipes with their strategies; or all that are here."""
    mistakes: list[str] = []
    found = paths or recipe_files()
    if not found:
        raise RecipeError([f"recipes/: no recipe there (looked in {Path.cwd()})"])
    for path in found:
        with gathered(mistakes):
            for line in _check_recipe(path, strategy, assignments, processes, data=data, is_named=bool(paths)):
                print(short(line))
    for path in () if paths else map(strategy_path, known_strategies()):
        with gathered(mistakes):
            load_strategy(path)
            print(short(f"{path}: fine"))
    if mistakes:
        sys.stdout.flush()
        raise RecipeError(mistakes)
    return 0


def _check_recipe(
    path: Path, override: Path | None, assignments: list[str], processes: int | None, *, data: bool, is_named: bool
) -> Iterator[str]:
    try:
        recipe, strategy = plan.load_pair(path, assignments, strategy_path=override)
    except RecipeError as error:
        raise RecipeError([*error.mistakes, *_placed(_clashes_behind(path, override), path, assignments)]) from None
    if not is_named and strategy.num_processes:  # another number is a mistake only for a recipe that somebody chose
        processes = None
    mistakes = [f"{path}: {mistake}" for mistake in _lacks_checkpoint(recipe)]
    if not mistakes:
        with gathered(mistakes):
            batch = plan.describe_batch(recipe, _plan_of_label(path, recipe, strategy, processes))
    refuse(_placed(mistakes, path, assignments))
    yield f"{path}: fine under {strategy.path}; {batch}"
    for doubt in _placed([f"{path}: {doubt}" for doubt in doubts(recipe)], path, assignments):
        yield f"warning: {doubt}"
    if data:
        yield from read_all(recipe)


def _plan_of_label(path: Path, recipe: Recipe, strategy: Strategy, processes: int | None = None) -> plan.Plan:
    """The plan for `processes`, or as many as the recipe's label names GPUs, whatever this machine has; a recipe that
    names none is for this machine.
    """
    needs = read_needs(read_label(path))
    named, here = needs.num_gpus, 0 if needs.num_gpus else num_gpus()
    count = processes or strategy.num_processes or named or plan.default_num_processes(strategy, here)
    gpus = count if named or here else 0
    refuse(_lacks_for_fp8(path, recipe, here))
    return plan.make_plan(
        recipe, strategy, num_processes=count, num_local=needs.num_local(count), num_gpus=gpus, recipe_name=str(path)
    )


def _lacks_checkpoint(recipe: Recipe) -> list[str]:
    """What is wrong with a checkpoint that the recipe names."""
    if recipe.run.resume in ("never", "auto"):
        return []
    from cookbook.training.checkpoint.folder import BrokenCheckpoint, open_checkpoint

    try:
        open_checkpoint(Path(recipe.run.resume))
    except (BrokenCheckpoint, OSError) as error:
        advice = "write never, auto, or the folder of a checkpoint, as outputs/mine/checkpoints/step-00000100"
        return [f"run.resume is {recipe.run.resume!r}: {error}; {advice}"]
    return []


def _lacks_for_fp8(path: Path, recipe: Recipe, num_gpus: int) -> list[str]:
    if not num_gpus or recipe.mixed_precision != "fp8":
        return []
    return [f"{path}: {what}; {remedy}" for what, remedy in fp8_problems()]


def _clashes_behind(path: Path, override: Path | None) -> list[str]:
    """What would clash if every misspelt key of the recipe had its nearest name; nothing if more than that is wrong."""
    mistakes: list[str] = []
    with gathered(mistakes):
        recipe, _ = validate(read_recipe(path), Recipe, OWNED_ELSEWHERE)
        if recipe is not None and (override or Path(recipe.strategy)).is_file():
            _plan_of_label(path, recipe, load_strategy(override or Path(recipe.strategy)))
    return mistakes


def _placed(mistakes: list[str], path: Path, assignments: list[str]) -> list[str]:
    """`file: section.key ...` with the place of the values in it: each --set that gave one, or the key's line."""
    try:
        lines = read_document(path).lines
    except RecipeError:  # of which the mistakes are
        return mistakes
    found = []
    for mistake in mistakes:
        named = re.match(rf"{re.escape(str(path))}(?: under \S+)?: (\w+(?:\.\w+)*)(.*)", mistake, re.DOTALL)
        if named is None:
            found.append(mistake)
            continue
        key, words = named[1], set(re.findall(r"\w+(?:\.\w+)*", named[2]))
        line = lines.get(tuple(key.split(".")))
        causes = [f"--set {one}" for one in assignments if _is_named(one.partition("=")[0].strip(), key, words)]
        place = " ".join(causes) or (f"{path}:{line}" if line else str(path))
        found.append(f"{place}{mistake[len(str(path)) :]}")
    return found


def _is_named(given: str, key: str, words: set[str]) -> bool:
    """Whether a mistake in `key` names the key that was given; by its last part too, where that is no common word."""
    last = given.rpartition(".")[2]
    return f"{key}.".startswith(f"{given}.") or ("." in given and given in words) or ("_" in last and last in words)


def explain(
    path: Annotated[Path, RECIPE] = QUICKSTART,
    other: Annotated[
        str | None, Argument(metavar="OTHER", autocompletion=known_strategies, help="to compare with")
    ] = None,
    *,
    strategy: StrategyFile = None,
    processes: Annotated[int | None, process_count("one per GPU, here or of the recipe's label")] = None,
    assignments: Assignments,
    as_json: AsJson = False,
) -> int:
    """Show what will run and where it is from, or compare two."""
    plain = not can_show(LETTERS, sys.stdout.encoding)
    if other is not None:
        found = compare.compare(str(path), other, override=strategy, assignments=assignments, processes=processes)
        print(json.dumps(compare.as_dict(found), indent=1) if as_json else short(compare.in_words(found)))
        return 0
    if compare.is_strategy(str(path)):
        find_strategy(str(path))
        raise RecipeError([f"{path}: a strategy; write a recipe before it, or another strategy after it"])
    run = explain_run(path, strategy_path=strategy, assignments=assignments, processes=processes)
    print(json.dumps(as_dict(run), indent=1) if as_json else in_words(run, plain=plain))
    return 0
