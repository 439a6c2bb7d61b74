"""Recipe + strategy + machine -> what will run: batch arithmetic, conflicts, the launch command. No torch.

A file becomes a run in the steps of `RUN`, each of which takes a `Pair` and returns it.
"""

import glob
import shlex
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cookbook.config.mesh import Mesh
from cookbook.config.recipe import Draft, Recipe, Step, draft_recipe
from cookbook.config.schedule import short_run
from cookbook.config.sections import Auto, BatchSection, Checkpointing
from cookbook.config.strategy import Strategy, explain_contradictions, known_strategies, read_strategy
from cookbook.config.strategy_keys import Claim
from cookbook.facts.meshes import buffer_problem, mesh_problem, units_problem
from cookbook.facts.packing import known_config
from cookbook.start import launchers
from cookbook.start.claims import claimed_values
from cookbook.start.hosts import Hosts
from cookbook.start.launchers import Launcher, World
from cookbook.start.refusals import refusals
from cookbook.system import machine, versions
from cookbook.system.console import several
from cookbook.system.files import gather_mistakes, refuse
from cookbook.system.machine import CPU_PROCESSES, num_cores
from cookbook.system.shipped import program


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The derived quantities of a run."""

    num_processes: int
    num_local: int
    """Processes of this machine."""
    num_gpus: int
    """GPUs of this machine; 0: the run uses the CPU."""
    mesh: Mesh
    gradient_accumulation_steps: int
    """Forwards per process in an optimizer step; an upper bound under batch.micro_batch_tokens."""

    @property
    def data_parallel_size(self) -> int:
        return self.mesh.data_parallel_size


MICRO_BATCH, CHECKPOINTING = "batch.micro_batch_size", "model.gradient_checkpointing"


def autos(recipe: Recipe) -> list[str]:
    """The keys with `auto`, for which a start finds values (`cookbook.run.auto_settings`)."""
    values = {MICRO_BATCH: recipe.batch.micro_batch_size, CHECKPOINTING: recipe.model.gradient_checkpointing}
    return [key for key, value in values.items() if isinstance(value, Auto)]


KINDS: tuple[Checkpointing, ...] = (False, "selective", True)
"""Kinds of checkpointing that `auto` tries, the one that computes least first."""


MOST_SAMPLES = 2**16
"""More samples than any GPU holds at once."""


def even(share: int) -> list[int]:
    """Micro-batches that split a process's share of the global batch, up to `MOST_SAMPLES`."""
    return [size for size in range(1, min(share, MOST_SAMPLES) + 1) if share % size == 0]


def refuse_rounds(recipe: Recipe, name: str) -> list[str]:
    """The mistake of whoever starts a single run of a recipe with rounds."""
    if recipe.rounds is None or recipe.rounds.round is not None:
        return []
    return [f"{name}: has rounds, whose rows are prompts without answers; start it with cookbook rounds {name}"]


def describe_batch(recipe: Recipe, plan: Plan) -> str:
    """The batch arithmetic in one line."""
    processes = several(plan.data_parallel_size, "data-parallel process")
    start = f"{recipe.batch.global_batch_size} {recipe.objective.sample}s a step"
    if recipe.batch.micro_batch_tokens is not None:
        return f"{start}, split over {processes} in forwards of at most {recipe.batch.micro_batch_tokens} tokens"
    size = recipe.batch.micro_batch_size
    micro = f"{size:d} (auto: that or more)" if isinstance(size, Auto) else size
    return f"{start} = {processes} x micro-batch {micro} x accumulation {plan.gradient_accumulation_steps}"


@dataclass
class Pair(Draft):
    """A recipe's document with a strategy, on its way to a run."""

    strategy: Strategy | None = None
    """None: it has mistakes."""
    claims: tuple[Claim, ...] = ()
    """Claims of the strategy's files about the recipe, even if the files have mistakes."""
    launcher: Launcher = field(default_factory=Launcher)
    world: World | None = None
    """The processes that started; None: none did yet."""
    plan: Plan | None = None


def _read_strategy(pair: Pair) -> Pair:
    """Read the files of the strategy, and compare with the recipe what they claim of it."""
    mistakes = pair.mistakes + pair.strategy_mistakes
    if pair.strategy_file is not None:
        with gather_mistakes(mistakes):
            pair.strategy, pair.claims, of_strategy = read_strategy(pair.strategy_file)
            mistakes += of_strategy
        contradictions = explain_contradictions(pair.strategy_file, pair.claims, claimed_values(pair.valid))
        mistakes = [*(mistake for mistake in mistakes if mistake not in contradictions), *contradictions]
    pair.mistakes = mistakes
    return pair


def _check_versions(pair: Pair) -> Pair:
    """Refuse versions that were not tested, if the recipe says so."""
    if pair.recipe is not None and pair.recipe.run.strict_versions:
        pair.mistakes = pair.mistakes + versions.mistakes()
    return pair


def _fill_in_width(pair: Pair) -> Pair:
    """Fill in the strategy's sizes that follow from the model's width, where its files tell that."""
    if pair.mistakes or pair.recipe is None or pair.strategy is None:
        return pair
    hidden = getattr(known_config(pair.recipe.model), "hidden_size", None)
    if hidden is not None:
        pair.strategy = pair.strategy.of_width(hidden)
    return pair


def _fit_to_machine(pair: Pair) -> Pair:
    """Plan the run on the processes that started, and add what launcher, environment and machine have against it."""
    recipe, strategy, launcher, world = pair.recipe, pair.strategy, pair.launcher, pair.world
    assert world is not None
    mistakes = [] if recipe is None or pair.mistakes else refuse_rounds(recipe, pair.name)
    mistakes += launchers.check_environment(strategy, launcher, None if recipe is None else recipe.mixed_precision)
    launchers.clear_environment()
    num_gpus = machine.num_gpus()
    if num_gpus:
        # Here and not in `launch`: accelerate, torchrun and srun start runs as well.
        machine.expand_segments()
    if strategy is not None:
        world = launchers.trim_world(world, strategy, launcher, num_gpus)
        mistakes += launchers.check_shares(strategy, world)
    mistakes += launchers.check_count(world, launcher) + launchers.check_cpu(launcher, num_gpus)
    mistakes += launchers.choose_network(world)
    sizes = launchers.elastic_sizes(world)
    if recipe is not None:
        mistakes += launchers.check_elastic(sizes, recipe.run.resume)
        mistakes += launchers.check_machine(
            strategy, num_gpus, deterministic=recipe.run.deterministic, mixed_precision=recipe.mixed_precision
        )
    plans = []
    for count in (world.num_processes, *sizes):
        plan, problems = try_plan(pair, num_processes=count, num_local=world.num_local, num_gpus=num_gpus)
        plans.append(plan)
        mistakes += problems
    pair.world, pair.plan, pair.mistakes = world, plans[0], pair.mistakes + mistakes
    return pair


def _refuse_mistakes(pair: Pair) -> Pair:
    refuse(pair.mistakes)
    return pair


def _settle_sizes(pair: Pair) -> Pair:
    """Fill in the sizes of the mesh that are left open."""
    assert pair.strategy is not None and pair.world is not None
    pair.strategy = pair.strategy.for_processes(pair.world.num_processes, pair.world.num_local)
    return pair


def _add_notes(pair: Pair) -> Pair:
    recipe, strategy = pair.recipe, pair.strategy
    assert recipe is not None and strategy is not None
    max_steps = recipe.run.max_steps and recipe.in_schedule(0, recipe.run.max_steps)[1]
    pair.notes += [
        *versions.notes(),
        *launchers.strategy_note(pair.launcher, strategy.path, recipe.strategy),
        *launchers.shortage_note(recipe.run.on_out_of_memory),
        *strategy.notes,
        *short_run(recipe.schedule, max_steps),
        *find_runs_elsewhere(pair.default_folder, recipe, strategy.name),
    ]
    return pair


PAIR: tuple[Step, ...] = (draft_recipe, _read_strategy, _check_versions, _fill_in_width)
"""The way of a file to a recipe with its strategy."""
RUN: tuple[Step, ...] = (*PAIR, _fit_to_machine, _refuse_mistakes, _add_notes, _settle_sizes)
"""The way of a file to a run, in a process that a launcher has started."""


def _follow(steps: tuple[Step, ...], pair: Pair) -> Pair:
    for step in steps:
        pair = step(pair)
    return pair


def check(recipe_name: str, assignments: list[str]) -> tuple[Recipe, Strategy, Plan, World, list[str], dict[str, str]]:
    """Check everything that needs no torch: files, launcher, environment, batch, GPUs.

    Returns:
        What the run consists of, notes for the user, and the SHA-256 of the recipe's file and of its base.

    Raises:
        RecipeError: all mistakes together.
    """
    launcher, world = launchers.find_launcher(), launchers.read_world()
    in_force = partial(launchers.strategy_in_force, launcher, world)
    pair = Pair(recipe_name, assignments=assignments, choose_strategy=in_force, launcher=launcher, world=world)
    pair = _follow(RUN, pair)
    assert pair.recipe and pair.strategy and pair.plan and pair.world
    return pair.recipe, pair.strategy, pair.plan, pair.world, pair.notes, pair.digests


def read_pair(recipe_path: Path, assignments: list[str] | None = None, strategy: Path | None = None) -> Pair:
    """A recipe and its strategy as far as their files can be read, with all mistakes of the recipe, the YAML and the
    JSON.

    Args:
        strategy: instead of the one that the recipe names, which then need not name one.
    """
    pair = Pair(str(recipe_path), assignments=assignments or (), choose_strategy=lambda named: strategy or named)
    return _follow(PAIR, pair)


def load_pair(
    recipe_path: Path, assignments: list[str] | None = None, strategy: Path | None = None
) -> tuple[Recipe, Strategy]:
    """A validated recipe and its strategy; arguments as `read_pair`.

    Raises:
        RecipeError: its mistakes.
    """
    pair = read_pair(recipe_path, assignments, strategy)
    refuse(pair.mistakes)
    assert pair.recipe is not None and pair.strategy is not None
    return pair.recipe, pair.strategy


def load_single(recipe_path: Path, assignments: list[str], strategy: Path | None) -> tuple[Recipe, Strategy]:
    """`load_pair` for a command that runs a recipe's rows once.

    Raises:
        RecipeError: as `load_pair`, or a recipe with rounds.
    """
    recipe, loaded = load_pair(recipe_path, assignments, strategy)
    refuse(refuse_rounds(recipe, str(recipe_path)))
    return recipe, loaded


def find_runs_elsewhere(folder: str, recipe: Recipe, strategy: str) -> list[str]:
    """Notes for a run with nothing to resume in its default folder while that of another strategy has checkpoints."""
    if recipe.run.resume != "auto" or recipe.run.output_dir != folder or any(Path(folder).glob("checkpoints/step-*")):
        return []
    stem = Path(folder).name.removesuffix(strategy)
    others = {path.parents[1] for path in Path("outputs").glob(f"{glob.escape(stem)}*/checkpoints/step-*")}
    begun = sorted(str(path) for path in others if path.name.removeprefix(stem) in known_strategies())
    return [
        f"nothing to resume in {folder}; {other} has checkpoints of this recipe, and --set run.output_dir={other}"
        " resumes it"
        for other in begun
    ]


def default_num_processes(strategy: Strategy, num_gpus: int) -> int:
    """The strategy file's number of processes; for `auto` one per GPU, or without a GPU a few or those of the mesh."""
    if strategy.num_processes is not None:
        return strategy.num_processes
    return num_gpus or max(min(CPU_PROCESSES, num_cores()), strategy.written_mesh.num_processes)


def machine_problems(strategy: Strategy, *, num_processes: int, num_local: int, num_gpus: int) -> list[str]:
    """Mistakes of a strategy with so many processes, whatever the recipe; arguments as `make_plan`."""
    strategy = strategy.for_processes(num_processes, num_local)
    written, mistakes = strategy.written_mesh.num_processes, []
    if strategy.kind == "single" and num_processes != 1:
        mistakes.append(f"{strategy.path}: runs one process, but {num_processes} were requested; use ddp")
    if num_processes % written or (strategy.num_processes is not None and written not in (1, num_processes)):
        multiple = " or a multiple" if strategy.num_processes is None else ""
        mistakes.append(
            f"{strategy.path}: parallelism_config is a mesh of {written} processes, but {num_processes} were requested;"
            f" change its sizes, or run {written}{multiple}"
        )
    group = strategy.secondary_group_size(num_local)
    if num_processes % group:
        mistakes.append(
            f"{strategy.path}: zero_hpz_partition_size is {group}, which does not divide {num_processes} processes, so"
            " DeepSpeed would use another size; write the number of GPUs of a machine"
        )
    if num_gpus and num_local > num_gpus:
        mistakes.append(
            f"{strategy.path}: {num_local} processes on this machine, which has {several(num_gpus, 'GPU')};"
            f" ask for at most {num_gpus} (or hide them with CUDA_VISIBLE_DEVICES=)"
        )
    if num_gpus and strategy.use_cpu:
        way = "take it out, or hide them with CUDA_VISIBLE_DEVICES="
        mistakes.append(f"{strategy.path}: use_cpu is true, but a run uses the {several(num_gpus, 'GPU')} here; {way}")
    return mistakes


def try_plan(pair: Pair, *, num_processes: int, num_local: int, num_gpus: int) -> tuple[Plan | None, list[str]]:
    """The plan of a pair, None if it cannot be made, and what a machine has against it, as far as the pair's own
    mistakes let that be told; arguments as `make_plan`.
    """
    plan: Plan | None = None
    mistakes: list[str] = []
    counts = {"num_processes": num_processes, "num_local": num_local, "num_gpus": num_gpus}
    with gather_mistakes(mistakes):
        if pair.recipe is not None and pair.strategy is not None:
            plan = make_plan(pair.recipe, pair.strategy, **counts, recipe_name=pair.name)
        elif pair.strategy is not None:
            mistakes += machine_problems(pair.strategy, **counts)
            if (batch := pair.valid.get("batch")) is not None:
                mesh = pair.strategy.for_processes(num_processes, num_local).mesh(num_processes)
                mistakes += split_problems(batch, mesh, num_processes, pair.name)
    return plan, mistakes


def make_plan(
    recipe: Recipe,
    strategy: Strategy,
    *,
    num_processes: int,
    num_gpus: int,
    recipe_name: str,
    num_local: int | None = None,
) -> Plan:
    """The plan of a run.

    Args:
        num_processes: of all machines.
        num_local: of this machine; None: an equal share on each machine that the strategy file counts.
        num_gpus: on this machine; 0 means that the run uses the CPU.

    Raises:
        RecipeError: all conflicts between recipe, strategy and machine.
    """
    num_local = num_local or strategy.num_local(num_processes)
    strategy = strategy.for_processes(num_processes, num_local)
    mesh, objective = strategy.mesh(num_processes), recipe.objective
    mistakes = []
    if strategy.sp_size > 1 and objective.mean_over == "samples" and not objective.shares_samples:
        why = f"processes that share the tokens of samples would each see a part of the sums of {objective.name}"
        way = "take them from sums_by_sequence and declare shares_samples, or use a strategy without sequence parallel"
        mistakes.append(f"{strategy.path}: {why}; {way}")
    mistakes += machine_problems(strategy, num_processes=num_processes, num_local=num_local, num_gpus=num_gpus)
    mistakes += [f"{recipe_name} under {strategy.path}: {text}" for text in refusals(recipe, strategy, num_gpus)]
    if recipe.rounds is not None:
        from cookbook.start.in_rounds import misfits

        mistakes += [f"{recipe_name}: {problem}" for problem in misfits(recipe, strategy)]
    config = known_config(recipe.model)
    problems = () if config is None else (mesh_problem(config, mesh), units_problem(config, strategy))
    mistakes += [f"{strategy.path}: {problem}" for problem in problems if problem]
    bytes_each = 4 if recipe.compute_precision == "no" else 2
    if config is not None and (problem := buffer_problem(config, strategy, num_processes, bytes_each)):
        mistakes.append(f"{strategy.deepspeed_file or strategy.path}: {problem}")
    if recipe.run.profile is not None and max(recipe.run.profile.ranks) >= num_processes:
        ranks = f"{recipe_name}: run.profile.ranks is {recipe.run.profile.ranks}"
        mistakes.append(f"{ranks}, but there are {num_processes} processes; the last is {num_processes - 1}")
    mistakes += split_problems(recipe.batch, mesh, num_processes, recipe_name)
    # Under a token budget the number of forwards depends on the lengths: at most one per sequence.
    per_forward = (recipe.batch.micro_batch_size or 1) * mesh.data_parallel_size
    accumulation = -(-recipe.batch.global_batch_size // per_forward)  # exact at any size
    mistakes += explain_contradictions(strategy.path, strategy.claims, {"~accumulation": accumulation})
    refuse(mistakes)
    return Plan(
        num_processes=num_processes,
        num_local=num_local,
        num_gpus=num_gpus,
        mesh=mesh,
        gradient_accumulation_steps=accumulation,
    )


def split_problems(batch: BatchSection, mesh: Mesh, num_processes: int, recipe_name: str) -> list[str]:
    """The mistake of a batch that the processes cannot share evenly in micro-batches."""
    size, parts = batch.micro_batch_size, mesh.data_parallel_size
    if size is None or batch.global_batch_size % (size * parts) == 0 or mesh.num_processes != num_processes:
        return []  # a mesh that does not fit has no batch arithmetic
    return [f"{recipe_name}: {_explain_split(batch, parts, num_processes)}"]


def _explain_split(batch: BatchSection, data_parallel_size: int, num_processes: int) -> str:
    assert batch.micro_batch_size is not None
    per_forward = batch.micro_batch_size * data_parallel_size
    size = f"{int(batch.micro_batch_size)}{' (auto)' if isinstance(batch.micro_batch_size, Auto) else ''}"
    ways = [max(1, batch.global_batch_size // per_forward) * per_forward]
    if batch.global_batch_size > per_forward:
        ways.append(-(-batch.global_batch_size // per_forward) * per_forward)
    fitting = [
        size
        for size in range(min(batch.micro_batch_size, batch.global_batch_size // data_parallel_size), 0, -1)
        if batch.global_batch_size % (size * data_parallel_size) == 0
    ]
    who = several(data_parallel_size, "process" if data_parallel_size == num_processes else "data-parallel process")
    text = (
        f"batch.global_batch_size is {batch.global_batch_size}, but {who} x micro_batch_size {size} = {per_forward}"
        f" sequences per forward. Use global_batch_size {' or '.join(map(str, ways))}"
    )
    if fitting:
        text += f", or micro_batch_size {fitting[0]}"
    most = min(num_processes - 1, batch.global_batch_size // batch.micro_batch_size)
    fewer = [n for n in range(most, 0, -1) if batch.global_batch_size % (n * batch.micro_batch_size) == 0]
    if fewer and data_parallel_size == num_processes:
        text += f", or {several(fewer[0], 'process')}"
    return f"{text}."


def launch_command(
    recipe: str,
    strategy: Strategy,
    *,
    num_processes: int,
    assignments: list[str],
    hosts: Hosts | None = None,
    logs: Path | None = None,
) -> list[str]:
    """The `accelerate launch` line of a run, as an argument list.

    Args:
        hosts: None: those of the strategy file.
        logs: folder in which torchrun writes the output of each process to files of its own.
    """
    command = ["accelerate", "launch", "--config_file", strategy.path, "--num_processes", str(num_processes)]
    if hosts is not None and hosts.count > 1:
        command += ["--num_machines", str(hosts.count), "--machine_rank", str(hosts.index)]
        command += ["--main_process_ip", hosts.first, "--main_process_port", str(hosts.port)]
        if strategy.kind == "zero":  # else, by pdsh
            command += ["--deepspeed_multinode_launcher", "standard"]
    elif num_processes > 1 and strategy.num_machines == 1:  # so that several runs share a machine
        command += ["--main_process_port", "0"] * (strategy.main_process_port is None)  # a free one
        command += ["--rdzv_backend", "static"] * (strategy.rdzv_backend == "c10d")  # whose own is 29400 for all
    if logs is not None:
        command += ["--tee", "3", "--log_dir", str(logs)]  # 3: stdout and stderr
    command += [program(), recipe]
    for assignment in assignments:
        command += ["--set", assignment]
    return command


def show_command(command: list[str]) -> str:
    """A command as one types it."""
    return shlex.join(command)
