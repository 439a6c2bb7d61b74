"""`launch`: trains a recipe by `accelerate launch`, and starts it again after a shortage of memory, if it says so."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from socket import gethostname
from typing import Annotated

from typer import Option

import simulated_gpus
from cookbook.commands.shared.arguments import (
    QUICKSTART,
    Assignments,
    StrategyFile,
    positive,
    process_count,
    recipe_argument,
)
from cookbook.commands.shared.find_model import CACHE
from cookbook.commands.shared.labels import gpus_needed, read_label, what_it_takes
from cookbook.commands.shared.mistakes import lacks_checkpoint, lacks_for_fp8, place_mistakes
from cookbook.commands.shared.simulation import as_mistakes
from cookbook.config.recipe import Recipe
from cookbook.config.strategy import Strategy
from cookbook.run import auto_settings, shortage
from cookbook.run.next_start import Start, next_start, suggestion
from cookbook.start import hosts, run_plan
from cookbook.start.launchers import NOTE_FILE
from cookbook.system import signals, status
from cookbook.system.child import ACCELERATE_CLI, run_child, was_signalled
from cookbook.system.console import say
from cookbook.system.files import RecipeError, gather_mistakes, refuse
from cookbook.system.machine import num_cores, num_gpus
from cookbook.training.checkpoint.resume import changed_settings
from cookbook.training.data.rows import read_rows

ONE_MACHINE = hosts.Hosts()
RunChild = Callable[[list[str], dict[str, str], Path], int]
"""From a command, its environment and the run's folder to the exit code of the run, see `child.run_child`."""


def launch(
    path: Annotated[Path, recipe_argument(f"{QUICKSTART} trains a small model on any machine")],
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
    run_hosts, mistakes = hosts.read_hosts(machines, machine, first, port)
    start = prepare(
        path,
        strategy=strategy,
        processes=processes,
        assignments=assignments,
        dry_run=dry_run,
        simulate_gpus=simulate_gpus,
        run_hosts=run_hosts,
        rank_logs=rank_logs,
        mistakes=mistakes,
    )
    return start()


def prepare(
    path: Path,
    *,
    strategy: Path | None,
    processes: int | None,
    assignments: list[str],
    dry_run: bool,
    simulate_gpus: int | None = None,
    run_hosts: hosts.Hosts = ONE_MACHINE,
    rank_logs: bool = False,
    mistakes: Sequence[str] = (),
) -> Callable[[], int]:
    """Check a run. Returns what starts it, which returns its exit code; arguments as `launch`.

    Args:
        mistakes: those of the command line, reported with the others.

    Raises:
        RecipeError: all mistakes of recipe, strategy and machine.
    """
    if simulate_gpus is not None:
        with as_mistakes():
            simulated_gpus.check(simulate_gpus)
    gpus = num_gpus() if simulate_gpus is None else simulate_gpus
    mistakes = [*mistakes]
    recipe, loaded = _load_pair(path, assignments, strategy, run_hosts, mistakes, processes, gpus)
    gpus = min(gpus, len(loaded.gpu_ids) or gpus)
    num_machines = max(run_hosts.count, loaded.num_machines)
    count, num_local = _processes(loaded, processes, gpus, run_hosts.count)
    environment = dict(os.environ)
    mistakes += _no_address(run_hosts, loaded) + _misfits(run_hosts, recipe, loaded, count)
    mistakes += run_plan.refuse_rounds(recipe, str(path)) + _interfaces(run_hosts, loaded, count, environment)
    if rank_logs and count == 1:
        mistakes.append("--rank-logs: one process runs, and its output is that of this command; take it out")
    mistakes += lacks_checkpoint(recipe) + changed_settings(recipe)
    if simulate_gpus is None:
        mistakes += lacks_for_fp8(path, recipe, gpus)
    with gather_mistakes(mistakes):
        planned = run_plan.make_plan(
            recipe, loaded, num_processes=count, num_local=num_local, num_gpus=gpus, recipe_name=str(path)
        )
    refuse(place_mistakes(mistakes, path, assignments))
    if simulate_gpus is not None:  # after the checks: the first use compiles
        environment |= _simulate(simulate_gpus, path, recipe)
    folder = Path(recipe.run.output_dir)
    logs = _log_folder(folder) if rank_logs else None

    def line(assignments: list[str]) -> list[str]:
        return run_plan.launch_command(
            str(path), loaded, num_processes=count, assignments=assignments, hosts=run_hosts, logs=logs
        )

    if not dry_run and simulate_gpus is None and gpus * num_machines < gpus_needed(read_label(path), loaded.name):
        all_the_same = run_plan.show_command(line(assignments))
        raise RecipeError([what_it_takes(path), f"To run it here all the same: {all_the_same}"])
    if run_plan.autos(recipe):
        assignments = _replace_autos(path, assignments, recipe, loaded, planned)
        recipe, loaded = run_plan.load_pair(path, assignments, strategy)
        planned = run_plan.make_plan(
            recipe, loaded, num_processes=count, num_local=num_local, num_gpus=gpus, recipe_name=str(path)
        )
    command = line(assignments)
    _check_rows(recipe)

    def start() -> int:
        if dry_run:
            command.append("--dry-run")
        if logs is not None:
            environment.setdefault("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}] ")
            say(f"the output of each process: {logs}/*/attempt_*/RANK/stdout.log and stderr.log", flush=True)
        if warning := hosts.address_warning(run_hosts):
            say(warning, flush=True)
        if simulate_gpus is None:
            gain = auto_settings.larger_micro_batch(path, recipe, loaded, planned, cache=CACHE)
            if gain is not None:
                say(gain, flush=True)
        say(run_plan.show_command(command), flush=True)
        # torchrun would give each process one thread, whatever the machine has: too few on CPU, and for offloaded
        # updates.
        environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_local)))
        if not gpus:
            environment.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns from accelerate's process
        if dry_run or recipe.run.on_out_of_memory == "stop":
            return run_command(command, environment, folder)
        first_start = Start(
            recipe_name=str(path), assignments=assignments, recipe=recipe, strategy=loaded, plan=planned, logs=logs
        )
        return run_and_restart(first_start, run_command, environment)

    return start


def _load_pair(
    path: Path,
    assignments: list[str],
    strategy: Path | None,
    run_hosts: hosts.Hosts,
    mistakes: list[str],
    processes: int | None,
    gpus: int,
) -> tuple[Recipe, Strategy]:
    """A recipe and its strategy.

    Args:
        mistakes: those of the command line, reported with the files'.

    Raises:
        RecipeError: all mistakes of a broken pair, those of what is readable in it included.
    """
    pair = run_plan.read_pair(path, assignments, strategy)
    if pair.recipe is not None and pair.strategy is not None and not pair.mistakes:
        return pair.recipe, pair.strategy
    if pair.strategy is not None:
        mistakes += _no_address(run_hosts, pair.strategy)
        count, num_local = _processes(pair.strategy, processes, gpus, run_hosts.count)
        mistakes += run_plan.try_plan(pair, num_processes=count, num_local=num_local, num_gpus=gpus)[1]
    raise RecipeError([*pair.mistakes, *place_mistakes(mistakes, path, assignments)])


def _interfaces(run_hosts: hosts.Hosts, strategy: Strategy, count: int, environment: dict[str, str]) -> list[str]:
    """Mistakes about network interfaces; writes those of several machines into the environment."""
    if first := run_hosts.first or strategy.main_process_ip:
        return hosts.set_interfaces(first, environment)
    return hosts.interface_problems(environment) if count > 1 else []


def _log_folder(folder: Path) -> Path:
    """Beside the folder of the run, which is renamed when another run begins there."""
    return folder.with_name(f"{folder.name}.logs") / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{gethostname()}"


def _replace_autos(
    path: Path, assignments: list[str], recipe: Recipe, strategy: Strategy, plan: run_plan.Plan
) -> list[str]:
    """The assignments with a value for each `auto`, which is printed with its reason."""
    for key, (value, why) in auto_settings.choose(path, recipe, strategy, plan, cache=CACHE).items():
        say(auto_settings.in_words(key, value, why), flush=True)
        assignments = [assignment for assignment in assignments if assignment.partition("=")[0].strip() != key] + [
            f"{key}={str(value).lower()}"
        ]
    return assignments


def _processes(strategy: Strategy, asked: int | None, gpus: int, machines: int) -> tuple[int, int]:
    """Processes of the run and of this machine."""
    machines = max(machines, strategy.num_machines)
    count = asked or strategy.num_processes or run_plan.default_num_processes(strategy, gpus) * machines
    return count, max(1, count // machines)


def run_and_restart(start: Start, run_child: RunChild, environment: dict[str, str]) -> int:
    """Run on this machine, and start again after a shortage of memory as run.on_out_of_memory says.

    Returns the exit code of the last start.
    """
    folder, first, tried = Path(start.recipe.run.output_dir), start, {start.strategy.path}
    steps: list[dict[str, str]] = []
    while True:
        before = status.read(folder)
        with tempfile.TemporaryDirectory(prefix="cookbook-") as temporary:
            note = Path(temporary) / "shortage"
            variables = {NOTE_FILE: str(note), shortage.HISTORY: json.dumps(steps)}
            code = run_child(start.command, environment | variables, folder)
            ran_out = json.loads(note.read_text()) if note.is_file() else None
        # A run that ended, or was asked to stop, does not start again, even if it noted a shortage before.
        if ran_out is None or code in (0, signals.EXIT_CODE) or was_signalled():
            return code
        # Checkpoints may be an earlier run's: they count only if the failed start wrote its own state.
        has_begun = status.read(folder) != before
        following = next_start(start, first, tried, resumes=has_begun and any(folder.glob("checkpoints/step-*")))
        if following is None:
            advice = suggestion(start.recipe, start.strategy, start.plan, start.recipe_name)
            _say(f"out of memory under {start.words}, and nothing is left to try. Next: {advice}.")
            return code
        if has_begun:
            status.mark_stopped(folder, f"out of memory under {start.words}")
        steps = [*steps, {"from": start.words, "to": following.words, "reason": ran_out["reason"]}]
        _say(
            f"out of memory under {start.words}: starts again under {following.words}, from the newest checkpoint or"
            f" the beginning; still {start.recipe.batch.global_batch_size} {start.recipe.objective.sample}s a step"
        )
        start = following
        tried.add(start.strategy.path)


def _say(text: str) -> None:
    say(f"\n{text}\n", file=sys.stderr, flush=True)


def _simulate(count: int, path: Path, recipe: Recipe) -> dict[str, str]:
    """The variables that make GPUs of this process and of those that it starts."""
    with as_mistakes():
        environment = simulated_gpus.environment(count)
    os.environ |= environment
    say(f"{count} simulated GPUs: no time or speed of this run is a measurement", flush=True)
    refuse(lacks_for_fp8(path, recipe, count))  # asks the simulated driver
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

        known_rows(data, recipe.objective, cache=CACHE)  # which the processes then need not read
        return
    for source in here:
        read_rows(source, data.on_bad_row, recipe.objective)


def _no_address(run_hosts: hosts.Hosts, strategy: Strategy) -> list[str]:
    return [strategy.address_problem] if strategy.address_problem and run_hosts.count == 1 else []


def _misfits(run_hosts: hosts.Hosts, recipe: Recipe, strategy: Strategy, num_processes: int) -> list[str]:
    """List what keeps the machines of the command line from running a strategy."""
    mistakes = []
    if max(run_hosts.count, strategy.num_machines) > 1 and recipe.run.on_out_of_memory != "stop":
        what = "each machine has a launcher of its own, and they do not agree on the next start"
        mistakes.append(f"run.on_out_of_memory is {recipe.run.on_out_of_memory}: {what}; write stop")
    if run_hosts.count == 1:
        return mistakes
    if strategy.num_machines not in (1, run_hosts.count):
        mistakes.append(
            f"--machines is {run_hosts.count}, but {strategy.path} has num_machines {strategy.num_machines}"
        )
    if num_processes % run_hosts.count:
        advice = "write a multiple with --processes, which counts those of all"
        mistakes.append(f"{num_processes} processes, which {run_hosts.count} machines cannot split evenly; {advice}")
    return mistakes
