"""Protects the border to the launcher: which strategy is in force, and that nothing from outside changes it.

python -m pytest -q tests/test_launch.py
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import LAUNCHER_VARIABLES, RECIPE, ROOT, clean_environment

from cookbook.config.strategy import load_strategy, strategy_path
from cookbook.start import launchers
from cookbook.start.launchers import (
    Launcher,
    World,
    check_cpu,
    check_environment,
    read_world,
    strategy_in_force,
    strategy_note,
    trim_world,
)
from cookbook.system import gpus, machine
from cookbook.system.files import RecipeError
from tests import simulated_driver
from tests.curves import processes_of

STRATEGIES = sorted(path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml"))
NUM_PROCESSES = {name: processes_of(name) for name in STRATEGIES}

# What `accelerate launch` would start a process with: its own parser and preparation, the start itself left out.
RECORDER = """
import json, os, subprocess, sys
from accelerate.commands import launch

recorded = {}

def record(*args, **kwargs):
    environment = kwargs.get("env") or os.environ
    recorded.update({name: value for name, value in environment.items() if name.startswith(PREFIXES)})
    class Done:
        returncode = 0
        def wait(self):
            return 0
    return Done()

PREFIXES = tuple(json.loads(sys.argv[1]))
import torch.distributed.run
torch.distributed.run.run = record
launch.subprocess.Popen = record
answers = []
for arguments in json.loads(sys.argv[2]):
    recorded.clear()
    before = dict(os.environ)
    try:
        launch.launch_command(launch.launch_command_parser().parse_args(arguments))
    finally:
        os.environ.clear()
        os.environ.update(before)
    answers.append(dict(recorded))
print("ANSWERS" + json.dumps(answers))
"""

OVERRIDES = {
    "offload": ("fsdp2", ["--fsdp_offload_params", "true"], "FSDP_OFFLOAD_PARAMS"),
    "no resharding": ("fsdp2", ["--fsdp_reshard_after_forward", "false"], "FSDP_RESHARD_AFTER_FORWARD"),
    "FSDP 1": ("fsdp2", ["--fsdp_version", "1"], "FSDP_VERSION"),
    "checkpointing": ("fsdp2", ["--fsdp_activation_checkpointing", "true"], "FSDP_ACTIVATION_CHECKPOINTING"),
    "state dict": ("fsdp2", ["--fsdp_state_dict_type", "SHARDED_STATE_DICT"], "FSDP_STATE_DICT_TYPE"),
    "precision": ("ddp", ["--mixed_precision", "fp16"], "--mixed_precision fp16"),
    "CPU": ("ddp", ["--cpu"], "ACCELERATE_USE_CPU"),
    "compiler": ("ddp", ["--dynamo_backend", "inductor"], "ACCELERATE_DYNAMO_BACKEND"),
    "accumulation": ("zero3", ["--gradient_accumulation_steps", "4"], "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
    "clipping": ("zero3", ["--gradient_clipping", "0.5"], "ACCELERATE_GRADIENT_CLIPPING"),
    "another JSON": ("zero3", ["--deepspeed_config_file", "ds_configs/zero1.json"], "ACCELERATE_DEEPSPEED_CONFIG_FILE"),
    "mesh": ("hsdp", ["--parallelism_config_cp_size", "2"], "PARALLELISM_CONFIG_CP_SIZE"),
}


def launch_arguments(name, *extra):
    count = str(NUM_PROCESSES.get(name, 2))
    start = ["--config_file", f"accelerate_configs/{name}.yaml", "--num_processes", count, "--main_process_port", "0"]
    return [*start, *extra, "train.py"]


@pytest.fixture(scope="session")
def launched():
    """The variables of each strategy as it is, and under each override: one process asks accelerate for them all."""
    commands = {name: launch_arguments(name) for name in STRATEGIES}
    commands |= {(name, *flags): launch_arguments(name, *flags) for name, flags, _ in OVERRIDES.values()}
    done = subprocess.run(
        [sys.executable, "-c", RECORDER, json.dumps(LAUNCHER_VARIABLES), json.dumps(list(commands.values()))],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.split("ANSWERS")[1])
    return dict(zip(commands, answers, strict=True))


def check_under(monkeypatch, variables, name, *, mixed_precision="bf16", is_accelerate=True):
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    path = f"accelerate_configs/{name}.yaml"
    launcher = Launcher(is_accelerate=is_accelerate, config_file=path if is_accelerate else None)
    return check_environment(load_strategy(Path(path)), launcher, mixed_precision)


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_accelerate_launch_sets_for_a_shipped_strategy_is_expected(book, monkeypatch, launched, name):
    assert "ACCELERATE_MIXED_PRECISION" in launched[name]  # negative control: the recorder did record
    assert check_under(monkeypatch, launched[name], name) == []


def test_every_shipped_strategy_was_launched(launched):
    assert len(STRATEGIES) >= 14
    assert {"zero1", "zero2", "zero3"} <= {name for name in STRATEGIES if "ACCELERATE_USE_DEEPSPEED" in launched[name]}
    assert {"fsdp1", "fsdp2", "hsdp"} <= {name for name in STRATEGIES if "ACCELERATE_USE_FSDP" in launched[name]}


@pytest.mark.parametrize(("name", "flags", "named"), OVERRIDES.values(), ids=OVERRIDES)
def test_a_flag_that_contradicts_the_files_is_refused_and_named(book, monkeypatch, launched, name, flags, named):
    mistakes = check_under(monkeypatch, launched[(name, *flags)], name)
    assert [line for line in mistakes if line.startswith(named)], mistakes
    assert len(mistakes) == (2 if name == "hsdp" else 1)  # a context-parallel size brings its method along


DROPPED = {
    "precision no": (["--mixed_precision", "no"], "--mixed_precision no: the recipe has bf16; change it there"),
    "accumulation": (["--gradient_accumulation_steps=3"], "it is derived: global_batch_size / (micro_batch_size x"),
    "clipping": (["--gradient_clipping", "5"], "the recipe owns it (optim.max_grad_norm); take the flag out"),
    "stage": (["--zero-stage", "2"], "write zero_optimization.stage in the JSON; take the flag out"),
    "compiler": (
        ["--dynamo_mode", "max-autotune"],
        "write model.compile: true, which takes torch's default; take the flag out",
    ),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_flag_that_accelerate_drops_under_ddp_is_refused(book, monkeypatch, launched, name):
    """It leaves no trace in the variables."""
    flags, expected = DROPPED[name]
    for variable, value in launched["ddp"].items():
        monkeypatch.setenv(variable, value)
    words = launch_arguments("ddp", *flags)
    launcher = launchers._read_flags([*words, "--mixed_precision", "of train.py"])
    strategy = load_strategy(Path("accelerate_configs/ddp.yaml"))
    (mistake,) = check_environment(strategy, launcher, "bf16")
    assert expected in mistake
    without = launchers._read_flags([*launch_arguments("ddp", "--max_restarts", "2", "--mixed_precision", "bf16")])
    assert check_environment(strategy, without, "bf16") == []
    module = launchers._read_flags(["--config_file", "a.yaml", "-m", "train", "--set", "seed=1"])
    assert (module.config_file, module.flags) == ("a.yaml", ())


@pytest.mark.parametrize("other", ["zero3", "fsdp1"])
def test_variables_of_another_strategy_are_refused(book, monkeypatch, launched, other):
    assert check_under(monkeypatch, launched[other], "fsdp2") != []


def test_the_precision_of_the_recipe_may_be_repeated_on_the_command_line(book, monkeypatch):
    assert check_under(monkeypatch, {"ACCELERATE_MIXED_PRECISION": "bf16"}, "ddp") == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("FSDP_OFFLOAD_PARAMS", "true"),
        ("ACCELERATE_USE_CPU", "true"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("PARALLELISM_CONFIG_TP_SIZE", "2"),
        ("MEGATRON_LM_TP_DEGREE", "2"),
        ("ACCELERATE_SOMETHING_NEW", "1"),
    ],
)
def test_a_stray_variable_under_plain_python_is_refused_with_the_cure(book, monkeypatch, variable, value):
    (mistake,) = check_under(monkeypatch, {variable: value}, "single", is_accelerate=False)
    assert mistake == f"{variable}={value} (environment): it would override the files; take it out"


def test_variables_without_a_say_are_let_through_and_a_clean_environment_is_fine(book, monkeypatch):
    assert check_under(monkeypatch, {}, "single", is_accelerate=False) == []
    harmless = {"ACCELERATE_LOG_LEVEL": "debug", "ACCELERATE_DEBUG_MODE": "true"}
    assert check_under(monkeypatch, harmless, "single", is_accelerate=False) == []


def test_stray_variables_end_train_py_with_a_message(book):
    done = book.train(RECIPE, "--dry-run", ACCELERATE_GRADIENT_ACCUMULATION_STEPS="4", ACCELERATE_USE_CPU="true")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert [line.split("=")[0] for line in lines] == [
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "ACCELERATE_USE_CPU",
    ]


def test_clearing_leaves_nothing_that_accelerate_would_obey(monkeypatch, launched):
    monkeypatch.setattr(os, "environ", {**launched["zero3"], **launched["hsdp"], "HOME": "/x"})
    launchers.clear_environment()
    assert os.environ == {"HOME": "/x"}


# The real thing, once: a script that prints who started it.
PROBE = """
import json, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from cookbook.start import launchers
from cookbook.config.strategy import load_strategy
found = launchers.find_launcher()
path = Path(found.config_file or "accelerate_configs/single.yaml")
mistakes = launchers.check_environment(load_strategy(path), found, "bf16")
world = launchers.read_world()
answer = [found.is_accelerate, found.config_file, found.num_processes, world.num_processes, mistakes]
print("PROBE" + json.dumps(answer))
"""

STARTS = {
    "accelerate launch": (
        [str(Path(sys.executable).parent / "accelerate"), "launch", "--config_file", "accelerate_configs/zero2.yaml",
         "--num_processes", "2", "--main_process_port", "0"],
        [True, "accelerate_configs/zero2.yaml", 2, 2, []],
    ),
    "module, flags with hyphens and =": (
        ["-m", "accelerate.commands.launch", "--config_file=accelerate_configs/single.yaml", "--num-processes=1"],
        [True, "accelerate_configs/single.yaml", 1, 1, []],
    ),
    "torchrun": (["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"], [False, None, None, 2, []]),
    "python": ([], [False, None, None, 1, []]),
}  # fmt: skip


@pytest.mark.parametrize(("start", "expected"), STARTS.values(), ids=STARTS)
def test_a_process_knows_who_started_it(book, start, expected):
    book.write("probe.py", PROBE.format(root=str(ROOT)))
    done = subprocess.run(
        [sys.executable, *start, "probe.py", "--config_file", "not/ours.yaml"],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    answers = [json.loads(part.splitlines()[0]) for part in done.stdout.split("PROBE")[1:]]
    assert answers == [expected] * expected[3], done.stderr


CONFIG = ["--config_file", "a.yaml", "--num_processes", "3", "train.py", "--config_file", "b.yaml"]
FROM_ACCELERATE = Launcher(is_accelerate=True, config_file="a.yaml", num_processes=3)


@pytest.mark.parametrize(
    ("ancestors", "expected"),
    [
        ([["/x/bin/python", "/x/bin/accelerate", "launch", *CONFIG]], FROM_ACCELERATE),
        ([["/x/bin/python", "/x/bin/accelerate-launch", *CONFIG]], FROM_ACCELERATE),
        ([["python", "-m", "accelerate.commands.launch", *CONFIG]], FROM_ACCELERATE),
        ([["python", "-m", "accelerate.commands.accelerate_cli", "launch", *CONFIG]], FROM_ACCELERATE),
        ([["python", "-P", "/x/cookbook/system/accelerate_cli.py", "launch", *CONFIG]], FROM_ACCELERATE),
        ([["python", "/x/accelerate/commands/launch.py", *CONFIG]], FROM_ACCELERATE),
        ([["bash"], ["timeout", "60", "accelerate", "launch", *CONFIG]], FROM_ACCELERATE),
        ([["accelerate", "launch", "train.py", "--num_processes", "3"]], Launcher(is_accelerate=True)),
        ([["accelerate", "launch", "--config_file"]], Launcher(is_accelerate=True, config_file="")),
        ([["torchrun", "--nproc_per_node", "2", "train.py"], ["bash"]], Launcher()),
        ([["bash", "-c", "accelerate launch --config_file a.yaml train.py"]], Launcher()),
        ([["accelerate", "config"], ["vim", "launch"]], Launcher()),
        ([], Launcher()),
    ],
)
def test_accelerate_launch_is_recognised_by_the_words_of_an_ancestor(monkeypatch, ancestors, expected):
    processes = [SimpleNamespace(cmdline=lambda words=words: words) for words in ancestors]
    monkeypatch.setattr(launchers.psutil, "Process", lambda: SimpleNamespace(parents=lambda: processes))
    assert launchers.find_launcher() == expected


ALONE = World(rank=0, local_rank=0, num_processes=1, num_local=1, is_launched=False)
LAUNCHED = World(rank=0, local_rank=0, num_processes=2, num_local=2, is_launched=True)
ZERO3 = "accelerate_configs/zero3.yaml"


@pytest.mark.parametrize(
    ("launcher", "world", "path", "note"),
    [
        (Launcher(is_accelerate=True, config_file=ZERO3), LAUNCHED, ZERO3, None),
        (Launcher(is_accelerate=True, config_file=f"./{ZERO3}"), LAUNCHED, ZERO3, None),
        (
            Launcher(is_accelerate=True, config_file="accelerate_configs/ddp.yaml"),
            LAUNCHED,
            "accelerate_configs/ddp.yaml",
            "from the command line",
        ),
        (Launcher(), LAUNCHED, ZERO3, None),
        (Launcher(), ALONE, "accelerate_configs/single.yaml", "one process"),
    ],
    ids=["the recipe's", "the recipe's, written otherwise", "another", "torchrun", "plain python"],
)
def test_the_strategy_in_force_and_what_is_said_about_it(launcher, world, path, note):
    assert strategy_in_force(launcher, world, Path(ZERO3)) == Path(path)
    notes = strategy_note(launcher, path, ZERO3)
    assert notes == [] if note is None else len(notes) == 1 and note in notes[0]


ON_CPU = Launcher(is_accelerate=True, config_file=ZERO3, flags=(("cpu", ""),))


def test_the_flag_cpu_runs_one_process_whatever_the_file_has(book, monkeypatch):
    """accelerate 1.15 takes its launcher for one process, and leaves DeepSpeed and FSDP out."""
    assert strategy_in_force(ON_CPU, ALONE, Path(ZERO3)) == Path("accelerate_configs/single.yaml")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    single = load_strategy(Path("accelerate_configs/single.yaml"))
    assert check_environment(single, ON_CPU, "bf16") == []
    (refused,) = check_environment(single, Launcher(is_accelerate=True, config_file=ZERO3), "bf16")
    assert "ACCELERATE_USE_CPU=True" in refused
    assert check_cpu(ON_CPU, 0) == [] and "hide them" in check_cpu(ON_CPU, 2)[0]


def test_accelerate_launch_without_a_file_is_refused():
    with pytest.raises(RecipeError, match="Write --config_file accelerate_configs/<name>"):
        strategy_in_force(Launcher(is_accelerate=True), LAUNCHED, Path(ZERO3))


def trim(monkeypatch, *, rank=0, size=12, name="ddp", launcher=None, num_gpus=0):
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    strategy = load_strategy(Path(f"accelerate_configs/{name}.yaml"))
    return trim_world(read_world(), strategy, launcher or Launcher(is_accelerate=True), num_gpus)


def test_twelve_cpu_processes_under_auto_become_two(book, monkeypatch):
    assert trim(monkeypatch, rank=1) == World(rank=1, local_rank=1, num_processes=2, num_local=2, is_launched=True)
    assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "2"
    with pytest.raises(SystemExit) as ended:
        trim(monkeypatch, rank=2)
    assert ended.value.code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"launcher": Launcher(is_accelerate=True, num_processes=12)},
        {"launcher": Launcher()},
        {"num_gpus": 12},
        {"name": "single", "size": 4},
        {"name": "hsdp", "size": 4},
        {"size": 2},
        {"size": 1},
    ],
    ids=["count on the command line", "torchrun", "GPUs", "count in the file", "those of the mesh", "two", "one"],
)
def test_a_count_that_somebody_wrote_is_kept(book, monkeypatch, arguments):
    assert trim(monkeypatch, **arguments).num_processes == arguments.get("size", 12)


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "two"},
        {"WORLD_SIZE": "0"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "1"},
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"},
    ],
    ids=["text", "zero", "rank too high", "rank below zero", "rank without a world", "more here than in all"],
)
def test_a_world_that_no_launcher_sets_is_refused(variables):
    with pytest.raises(RecipeError, match="do not fit together"):
        read_world(variables)


@pytest.mark.parametrize("size", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"])
def test_processes_of_a_launcher_that_torch_does_not_know_are_refused(size, monkeypatch):
    """By the count that accelerate has: on a CPU it ended in a traceback, and on a GPU each would train alone."""
    from cookbook.training.engine.start import check_launcher

    monkeypatch.setenv(size, "1")
    check_launcher()
    monkeypatch.setenv(size, "2")
    with pytest.raises(
        RecipeError, match="says that there are 2 processes, and this run has 1; start `cookbook launch`"
    ):
        check_launcher()
    monkeypatch.setenv("WORLD_SIZE", "4")  # of torchrun, started by srun
    check_launcher()


def bf16(numbers):
    return numbers.bfloat16().float()


def of_two_bf16(numbers):
    return bf16(numbers) + bf16(numbers - bf16(numbers))


def of_tf32(numbers):
    return (numbers.view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("rounded", [bf16, of_two_bf16, of_tf32])
def test_a_device_that_multiplies_float32_in_fewer_bits_is_refused(rounded):
    """As NVIDIA_TF32_OVERRIDE=1 on a GPU, or ONEDNN_DEFAULT_FPMATH_MODE=BF16 on a CPU that has bf16: losses would be
    others, and nothing would tell. Products of two parts of 16 bits are torch's "high" on a CPU."""
    from torch.overrides import TorchFunctionMode

    from cookbook.training.engine.start import check_products

    class Rounding(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
                args = tuple(map(rounded, args))
            return func(*args, **(kwargs or {}))

    check_products(torch.device("cpu"))
    with Rounding(), pytest.raises(RecipeError, match=r"float32 products on cpu .* unset NVIDIA_TF32_OVERRIDE"):
        check_products(torch.device("cpu"))


@pytest.mark.parametrize("plan", ["xx", "{}", "[1]", '[{"at": "step.loss"}]'])
def test_what_a_later_step_could_not_read_of_the_environment_is_refused_by_name_and_value(plan):
    variables = {"TORCHELASTIC_RESTART_COUNT": "x", "COOKBOOK_FAULTS": plan}
    with pytest.raises(RecipeError) as error:
        read_world(variables)
    restarts, faults = error.value.mistakes
    assert restarts.startswith("environment: TORCHELASTIC_RESTART_COUNT is 'x', ")
    assert faults.startswith(f"environment: COOKBOOK_FAULTS is {plan!r}, ")
    assert read_world({"TORCHELASTIC_RESTART_COUNT": "3", "COOKBOOK_FAULTS": "[]"}).num_processes == 1


@pytest.mark.parametrize(
    ("listing", "visible", "expected"),
    [
        (4, None, 4),
        (4, "0,2", 2),
        (4, "0,", 1),
        (4, "", 0),
        (4, "-1", 0),
        (2, "0,1,2,3", 2),
        (0, None, 0),
    ],
)
def test_gpus_are_those_that_cuda_leaves_visible(book, monkeypatch, listing, visible, expected):
    for name, value in simulated_driver.variables(book.root, f"count {listing}").items():
        monkeypatch.setenv(name, value)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.num_gpus() == expected


@pytest.mark.parametrize("facts", ["init error 9", "init error 12", "count 0"])
def test_a_machine_without_a_driver_or_without_gpus_has_none(book, monkeypatch, facts):
    monkeypatch.setattr(gpus, "unnamed_gpus", list)
    monkeypatch.setattr(gpus, "_searched_in_vain", set())
    for name, value in simulated_driver.variables(book.root, facts).items():
        monkeypatch.setenv(name, value)
    assert machine.num_gpus() == 0


def test_a_driver_library_that_is_not_there_is_looked_for_once(monkeypatch):
    asked = []

    def ask(*_, **__):
        asked.append(1)
        answer = ('{"error": "NVML Shared Library Not Found", "code": 12}', "")
        return SimpleNamespace(communicate=lambda timeout: answer, returncode=0, kill=lambda: None)

    monkeypatch.setattr(gpus, "_searched_in_vain", set())
    monkeypatch.setattr(gpus, "unnamed_gpus", list)
    monkeypatch.setattr(gpus.subprocess, "Popen", ask)
    monkeypatch.setenv("LD_LIBRARY_PATH", "a")
    assert [gpus.read_driver().gpus for _ in range(3)] == [[], [], []] and len(asked) == 1
    monkeypatch.setenv("LD_LIBRARY_PATH", "b")
    gpus.read_driver()
    assert len(asked) == 2


def test_machines_with_other_numbers_of_processes_would_fill_an_open_mesh_in_other_ways():
    """On 8 + 4 + 4 processes both numbers divide 16, and each machine would have another mesh."""
    hsdp, ddp = (load_strategy(strategy_path(name)) for name in ("hsdp", "ddp"))
    for num_local in (8, 4):
        world = replace(LAUNCHED, num_processes=16, num_local=num_local)
        (finding,) = launchers.check_shares(hsdp, world, {"GROUP_WORLD_SIZE": "3"})
        assert "needs as many on each machine" in finding
        assert not launchers.check_shares(ddp, world, {"GROUP_WORLD_SIZE": "3"})
        assert not launchers.check_shares(hsdp, world, {"GROUP_WORLD_SIZE": str(16 // num_local)})
