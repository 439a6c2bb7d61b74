"""`cookbook submit`: a file with which Slurm, Kubernetes or a cloud's own program starts a recipe on its machines.

Each starts `cookbook launch` once on every machine, with the numbers that it gives that machine.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Annotated, Any, cast

from typer import Option

from cookbook.commands.shared.arguments import RECIPE, Assignments, StrategyFile, positive
from cookbook.config.recipe import Recipe, read_recipe
from cookbook.config.strategy import Strategy
from cookbook.start.run_plan import default_num_processes, describe_batch, load_single, make_plan
from cookbook.system.files import RecipeError, dump_yaml, flatten, gather_mistakes, refuse
from cookbook.system.hardware import Machines, find_gpu, in_gib, parse_machines
from cookbook.system.imports import quiet_deepspeed
from cookbook.system.shipped import IS_INSTALLED
from cookbook.system.signals import EXIT_CODE

JOB_SCRIPT = Path("slurm/job.sh")
OUTPUTS = "/outputs"
"""Where the volume is in a machine of SkyPilot or Kubernetes."""
SECONDS_TO_SAVE = 120
"""Between the signal that asks a run to stop and the end of its time, where nobody writes another number."""
MISTAKE = 2
IN_A_CLONE = "--to: its jobs run the project in its folder; type it in a clone"
HOURS = 24
"""Until Hugging Face ends a job, in the place of its own half an hour, our choice; and the most that a call of Modal
may take. A word of the file."""
ATTEMPTS = 10
"""Number of times that Modal makes a call again that it ended, or that failed; our choice."""
CLAIM_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
"""Names of Kubernetes' volume claims (RFC 1123, a subdomain)."""
IMAGE = re.compile(r"[a-zA-Z0-9][\w./:@-]*", re.ASCII)
"""A text that may be a reference to an image (distribution/reference, reference.go)."""
VOLUME = re.compile(r"[a-zA-Z0-9][\w.-]*", re.ASCII)
"""Names of SkyPilot's, dstack's and Modal's volumes."""
SHARED_MEMORY = "16GB"
"""Shared memory of a container of dstack, through which NCCL's processes of a machine talk; our choice."""
BUCKET = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
FLAVOR = re.compile(r"(?P<gpu>.+?)(?:-(?:small|medium|large))?(?:x(?P<count>\d+))?")
"""Hugging Face's name of a machine, as in l4x4, a10g-largex2 and h200."""
Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job that a system is to start."""

    name: str
    """Letters, digits and hyphens, as Kubernetes wants of its names."""
    machines: Machines
    words: list[str]
    """Arguments of `cookbook launch`, without those that differ between machines."""
    seconds_to_save: int
    image: str
    volume: str
    """Both empty where the system takes none."""
    array: Sequence[list[str]] = ()
    """Words in the place of `words`, for each job of an array of Slurm."""

    @property
    def line(self) -> list[str]:
        """The words that train on one machine."""
        return [".venv/bin/python", "-m", "cookbook", "launch", *self.words]

    def command(self, where: str) -> str:
        """The line of bash that trains on one machine. `where`: the flags of several, from the system's variables."""
        line = shlex.join(self.line)
        return f"{line} {where}" if self.machines.num_machines > 1 else line


def slurm(task: Task) -> str:
    """slurm/job.sh with the size of the job and the words of `launch` in it."""
    comments, _, body = JOB_SCRIPT.read_text(encoding="utf-8").partition("\n\n")
    asked = [f"--job-name={task.name}", f"--nodes={task.machines.num_machines}"]
    asked += [f"--gpus-per-node={task.machines.gpus_each}"] if task.machines.gpus_each else []
    asked += [f"--array=1-{len(task.array)}"] if task.array else []
    options = [f"#SBATCH {words}" for words in asked]
    options += [
        re.sub(r"(--signal=B:USR1@)\d+", rf"\g<1>{task.seconds_to_save}", line)
        for line in comments.splitlines()
        if line.startswith("#SBATCH")
    ]
    lines = [f"set -- {shlex.join(task.words)}"]
    if task.array:
        cases = [f"  {number}) set -- {shlex.join(words)} ;;" for number, words in enumerate(task.array, start=1)]
        lines = ["case $SLURM_ARRAY_TASK_ID in", *cases, "esac", "SWEEP=- # its words are above"]
    return "\n".join([*options, "", *lines, body])


def sky(task: Task) -> str:
    """A SkyPilot task, for `sky jobs launch`."""
    where = '--machines "$SKYPILOT_NUM_NODES" --machine "$SKYPILOT_NODE_RANK"'
    where += ' --first "$(echo "$SKYPILOT_NODE_IPS" | head -n1)"'
    values: Values = {"name": task.name, "num_nodes": task.machines.num_machines}
    values["resources"] = {"job_recovery": {"recover_on_exit_codes": [EXIT_CODE]}}
    if task.machines.gpu:
        values["resources"]["accelerators"] = f"{task.machines.gpu.name}:{task.machines.gpus_each}"
    values |= {"workdir": ".", "setup": "make setup", "run": task.command(where)}
    return dump_yaml(values | ({"volumes": {OUTPUTS: task.volume}} if task.volume else {}))


def _for_a_pod(command: str) -> list[str]:
    """A line of bash as a container's command. Kubernetes writes a variable's value for $(NAME), and $ for $$:
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#entrypoint
    """
    return ["bash", "-c", re.sub(r"\$(?=[$(])", "$$", command)]


def k8s(task: Task) -> str:
    """An indexed Job, and the service that gives its pods names."""
    first = f"{task.name}-0.{task.name}"
    where = f'--machines {task.machines.num_machines} --machine "$JOB_COMPLETION_INDEX" --first {first}'
    # A pod has a name only once it runs, which the first may do last.
    command = f"until getent hosts {first}; do sleep 1; done; exec {task.command(where)}"
    pod, mounts = _pod(task)
    container = {
        "name": "node",
        "image": task.image,
        "command": _for_a_pod(command),
        **_resources("resources", task),
    }
    # A mistake fails at each start alike, so it ends the job; a run that was asked to stop is no failure.
    rules = [
        {"action": action, "onExitCodes": {"operator": "In", "values": [code]}}
        for action, code in (("FailJob", MISTAKE), ("Ignore", EXIT_CODE))
    ]
    job = {
        "completions": task.machines.num_machines,
        "parallelism": task.machines.num_machines,
        "completionMode": "Indexed",
        "podFailurePolicy": {"rules": rules},
        "template": {
            "spec": {"subdomain": task.name, "restartPolicy": "Never", "containers": [container | mounts], **pod}
        },
    }
    service = {"clusterIP": "None", "selector": {"batch.kubernetes.io/job-name": task.name}}
    return f"{_object('v1', 'Service', task, service)}---\n{_object('batch/v1', 'Job', task, job)}"


def trainjob(task: Task) -> str:
    """A TrainJob of Kubeflow Trainer, whose runtime for torch has a job and a container of the name `node`."""
    variables = {"machines": "NNODES", "machine": "NODE_RANK", "first": "MASTER_ADDR", "port": "MASTER_PORT"}
    where = " ".join(f'--{flag} "$PET_{name}"' for flag, name in variables.items())
    command = f'until getent hosts "$PET_MASTER_ADDR"; do sleep 1; done; exec {task.command(where)}'
    pod, mounts = _pod(task)
    pod["containers"] = [{"name": "node", **mounts}]
    node = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    spec = {
        "runtimeRef": {"name": "torch-distributed"},
        "trainer": {
            "image": task.image,
            "command": _for_a_pod(command),
            "numNodes": task.machines.num_machines,
            **_resources("resourcesPerNode", task),
        },
        "runtimePatches": [
            {
                "manager": "cookbook",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [node]}}},
            }
        ],
    }
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", task, spec)


def _object(version: str, kind: str, task: Task, spec: Values) -> str:
    return dump_yaml({"apiVersion": version, "kind": kind, "metadata": {"name": task.name}, "spec": spec})


def _resources(key: str, task: Task) -> Values:
    vendor = "amd" if task.machines.gpu and task.machines.gpu.is_amd else "nvidia"
    return {key: {"limits": {f"{vendor}.com/gpu": task.machines.gpus_each}}} if task.machines.gpus_each else {}


def _pod(task: Task) -> tuple[Values, Values]:
    """Values of a pod and of its container: time to save, the volume, and shared memory, through which NCCL's
    processes of a machine talk; a container has 64 MiB of it otherwise."""
    volumes = {
        "outputs": {"persistentVolumeClaim": {"claimName": task.volume}},
        "shm": {"emptyDir": {"medium": "Memory"}},
    }
    places = {"outputs": OUTPUTS, "shm": "/dev/shm"}  # noqa: S108  the pod's own
    mounts = [{"name": name, "mountPath": path} for name, path in places.items()]
    pod = {"terminationGracePeriodSeconds": task.seconds_to_save}
    return pod | {"volumes": [{"name": name, **source} for name, source in volumes.items()]}, {"volumeMounts": mounts}


def dstack(task: Task) -> str:
    """A task of dstack, whose machines are a cluster if there are several."""
    variables = {"machines": "NODES_NUM", "machine": "NODE_RANK", "first": "MASTER_NODE_IP"}
    where = " ".join(f'--{flag} "$DSTACK_{name}"' for flag, name in variables.items())
    values: Values = {"type": "task", "name": task.name, "nodes": task.machines.num_machines, "image": task.image}
    resources: Values = {"shm_size": SHARED_MEMORY}
    if gpu := task.machines.gpu:
        # Its names have neither hyphens nor sizes, and its sizes are not always those of the table of GPUs.
        name = re.sub(r"-PCIe|-\d+GB|-", "", gpu.name)
        resources["gpu"] = {"name": name, "memory": f"{gpu.sold_gb * 9 // 10}GB..", "count": task.machines.gpus_each}
    elif task.machines.gpus_each:
        least = int(cast(float, task.machines.usable_gib))
        resources["gpu"] = {"memory": f"{least}GB..", "count": task.machines.gpus_each}
    values |= {"commands": [task.command(where)], "resources": resources}
    values |= {"volumes": [{"name": task.volume, "path": OUTPUTS}], "retry": {"on_events": ["interruption"]}}
    return dump_yaml(values | {"stop_duration": task.seconds_to_save})


def hf(task: Task) -> str:
    """A call of `hf jobs run`, Hugging Face's own program: one machine, and a bucket for the run's folder."""
    line = ["hf", "jobs", "run", "--detach", "--name", task.name, "--flavor", _flavor(task.machines)]
    line += ["--timeout", f"{HOURS}h", "--secrets", "HF_TOKEN", "--volume", f"hf://buckets/{task.volume}:{OUTPUTS}"]
    return shlex.join([*line, task.image, "bash", "-c", task.command("")]) + "\n"


def _flavors() -> dict[tuple[str, int], str]:
    """Hugging Face's machines by GPU and number; of several with the same the last, which has most host memory."""
    from huggingface_hub import JobHardware

    flavors = {}
    for flavor in JobHardware:
        parts = FLAVOR.fullmatch(flavor.value)
        if parts is not None and (gpu := find_gpu(parts["gpu"])) is not None:
            flavors[gpu.name, int(parts["count"] or 1)] = flavor.value
    return flavors


def _flavor(machines: Machines) -> str:
    assert machines.gpu is not None
    return _flavors()[machines.gpu.name, machines.gpus_each]


MODAL = """import os
import signal
import subprocess
import sys

import modal

FOLDER = "/cookbook"
image = modal.Image.debian_slim(python_version="3.11").apt_install("make").workdir(FOLDER)
for name in ("Makefile", "requirements.txt", "system.sh"):
    image = image.add_local_file(name, f"{FOLDER}/{name}", copy=True)
image = image.run_commands("make setup", "sh system.sh .venv/bin/python build")
image = image.add_local_dir(".", FOLDER, copy=True, ignore=[".git", ".venv", ".cache", "outputs", "**/__pycache__"])
app = modal.App($name, image=image)


@app.function(
    gpu=$gpu,
    volumes={$outputs: modal.Volume.from_name($volume, create_if_missing=True)},
    secrets=[modal.Secret.from_dict({"HF_TOKEN": os.environ.get("HF_TOKEN")})],
    timeout=$hours * 3600,
    retries=modal.Retries(max_retries=$attempts, initial_delay=0.0),
)
def train():
    run = subprocess.Popen($words, cwd=FOLDER)
    try:
        code = run.wait()
    except KeyboardInterrupt:  # Modal takes the machine back, and makes the call again
        run.send_signal(signal.SIGTERM)
        run.wait()
        raise
    if code not in (0, $mistake):  # a mistake would be one in the next attempt too
        raise RuntimeError(f"exit code {code}: see the lines before")
    return code


@app.local_entrypoint()
def main():
    sys.exit(train.remote())
"""
"""With the parts of Modal's client 1.6.4."""


def modal(task: Task) -> str:
    """A program for Modal's client: an image of this folder, and a call of one machine."""
    gpu = task.machines.gpu
    assert gpu is not None
    values = {
        "name": task.name,
        "gpu": f"{gpu.name}:{task.machines.gpus_each}",
        "outputs": OUTPUTS,
        "volume": task.volume,
        "hours": HOURS,
        "attempts": ATTEMPTS,
        "words": task.line,
        "mistake": MISTAKE,
    }
    return Template(MODAL).substitute({key: repr(value) for key, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class System:
    """A program or a service that starts jobs on machines."""

    write: Callable[[Task], str]
    """Writes its file."""
    start: str
    """The command that takes the file."""
    needs: tuple[str, ...] = ("--image", "--volume")
    """Flags that it requires; SkyPilot only for several machines."""
    tells: bool = True
    """True if its file says how long a run has between the signal to stop and its end."""
    is_script: bool = False


SYSTEMS = {
    "slurm": System(write=slurm, start="sbatch FILE", needs=(), is_script=True),
    "sky": System(write=sky, start="sky jobs launch FILE", needs=("--volume",), tells=False),
    "k8s": System(write=k8s, start="kubectl apply -f FILE"),
    "trainjob": System(write=trainjob, start="kubectl apply -f FILE"),
    "dstack": System(write=dstack, start="dstack apply -f FILE"),
    "hf": System(write=hf, start="bash FILE", tells=False, is_script=True),
    "modal": System(write=modal, start="modal run --detach FILE", needs=("--volume",), tells=False),
}


def _check_system(to: str) -> str:
    if to not in SYSTEMS:
        raise RecipeError(f"--to {to!r} is not one of {', '.join(SYSTEMS)}")
    return to


def submit(
    path: Annotated[Path, RECIPE],
    *,
    to: Annotated[
        str,
        Option(
            callback=_check_system,
            autocompletion=lambda: list(SYSTEMS),
            metavar="|".join(SYSTEMS),
            help="k8s: an indexed Job; trainjob: Kubeflow's; hf: a Job",
        ),
    ],
    gpus: Annotated[str, Option(metavar="2x8xH100", help="machines x GPUs x GPU")],
    strategy: StrategyFile = None,
    image: Annotated[str | None, Option(help="this project and its .venv as working directory")] = None,
    volume: Annotated[str | None, Option(help="for the run's folder, which all machines can write")] = None,
    host_gib: Annotated[float | None, Option(help="memory of each machine, for offloading")] = None,
    nvme_gib: Annotated[float | None, Option(help="free on the disk of each machine, for offloading")] = None,
    seconds_to_save: Annotated[
        int | None,
        Option(callback=positive, help=f"for a step and a save after the signal to stop; {SECONDS_TO_SAVE}"),
    ] = None,
    assignments: Assignments,
) -> int:
    """Print a file for Slurm, Kubernetes or a cloud."""
    if to != "slurm":  # the machines have this folder under another name
        path = Path(os.path.relpath(path))
        strategy = strategy and Path(os.path.relpath(strategy))
    mistakes = [IN_A_CLONE] if IS_INSTALLED else []
    with gather_mistakes(mistakes):
        machines = parse_machines(gpus, host_gib=host_gib, nvme_gib=nvme_gib)
        flags = {"--image": image, "--volume": volume, "--seconds-to-save": seconds_to_save}
        mistakes += _misfits(to, machines, path, flags)
    with gather_mistakes(mistakes):
        recipe, loaded = load_single(path, assignments, strategy)
        if to != "slurm":
            mistakes += [_outside(file) for file in _programs(recipe, loaded) if _is_outside(file)]
    refuse(mistakes)
    seconds = seconds_to_save or SECONDS_TO_SAVE
    facts, count = _plan(recipe, loaded, machines, path)
    if to != "slurm":
        facts += [
            f"{key} is {name}, not in this folder: the machines must have it" for key, name in _read_there(recipe)
        ]
    if to == "hf":
        facts.append(
            f"the job ends after {HOURS} hours (--timeout); with run.save_every_minutes another goes on from there"
        )
    elif to == "modal":
        facts.append(
            f"Modal ends a call after {HOURS} hours, may take its machine back earlier, and makes it again up to"
            f" {ATTEMPTS} times; with run.save_every_minutes that goes on from there"
        )
    elif SYSTEMS[to].tells:
        facts.append(f"a step and a save have {seconds} seconds after the signal to stop (--seconds-to-save)")
    run = Path(recipe.run.output_dir).name
    settings = [*assignments, *([f"run.output_dir={OUTPUTS}/{run}"] if volume else [])]
    settings += ["run.resume=auto"] if to != "slurm" else []  # its script has that, from the second start on
    task = Task(
        name=_name(run),
        machines=machines,
        words=_words(path, strategy, count, settings),
        seconds_to_save=seconds,
        image=image or "",
        volume=volume or "",
    )
    print(_file(to, facts, task), end="")
    return 0


def slurm_array(path: Path, runs: Sequence[list[str]], gpus: str, strategy: Path | None, name: str) -> str:
    """A script of Slurm whose job N trains a recipe with the Nth of several lists of assignments.

    Raises:
        RecipeError: all mistakes of all jobs.
    """
    mistakes = [IN_A_CLONE] if IS_INSTALLED else []
    with gather_mistakes(mistakes):
        machines = parse_machines(gpus, host_gib=None, nvme_gib=None)
    refuse(mistakes)
    facts: list[str] = []
    words = []
    for settings in runs:
        with gather_mistakes(mistakes):
            facts_of_run, count = _plan(*load_single(path, settings, strategy), machines, path)
            facts += facts_of_run
            words.append(_words(path, strategy, count, settings))
    refuse(list(dict.fromkeys(mistakes)))
    facts.append(f"a step and a save have {SECONDS_TO_SAVE} seconds after the signal to stop")
    task = Task(
        name=_name(name),
        machines=machines,
        words=[],
        seconds_to_save=SECONDS_TO_SAVE,
        image="",
        volume="",
        array=words,
    )
    return _file("slurm", [*dict.fromkeys(facts)], task)


def _words(path: Path, strategy: Path | None, count: int, settings: Sequence[str]) -> list[str]:
    words = [str(path), *(["--strategy", str(strategy)] if strategy else []), "--processes", str(count)]
    return words + [word for setting in settings for word in ("--set", setting)]


def _file(to: str, facts: Sequence[str], task: Task) -> str:
    system = SYSTEMS[to]
    head = ["#!/bin/bash"] if system.is_script else []
    return "\n".join([*head, *(f"# {line}" for line in (*facts, system.start)), system.write(task)])


def _misfits(to: str, machines: Machines, path: Path, flags: dict[str, Any]) -> list[str]:
    """List what keeps a system from running a recipe on machines. `flags`: those that only some systems read."""
    system = SYSTEMS[to]
    needed = system.needs if to != "sky" or machines.num_machines > 1 else ()
    taken = (*system.needs, "--seconds-to-save") if system.tells else system.needs
    mistakes = [f"{flag} is missing: --to {to} needs it" for flag in needed if not flags[flag]]
    mistakes += [
        f"{flag}: would be ignored by --to {to}; leave it out" for flag in flags if flags[flag] and flag not in taken
    ]
    volume, image = flags["--volume"], flags["--image"]
    if volume and to in ("k8s", "trainjob") and not CLAIM_NAME.fullmatch(volume):
        mistakes.append(f"--volume is {volume!r}; write the name of a claim: lower case, digits, hyphens and dots")
    if volume and to in ("sky", "dstack", "modal") and not VOLUME.fullmatch(volume):
        mistakes.append(f"--volume is {volume!r}; write the name of a volume: letters, digits, hyphens and dots")
    if image and not IMAGE.fullmatch(image):
        mistakes.append(f"--image is {image!r}; write one as in registry/name:tag")
    if to == "sky" and machines.gpus_each and machines.gpu is None:
        mistakes.append(f"--gpus is {machines.text}: SkyPilot asks for a GPU by its name; write one, as in 2x8xH100")
    if to == "modal" and machines.num_machines > 1:
        mistakes.append(f"--gpus is {machines.text}: a call of Modal is one machine; --to sky starts several")
    if to == "modal" and machines.gpu is None:
        mistakes.append(f"--gpus is {machines.text}: Modal asks for a GPU by its name; write one, as in 8xH100")
    if to == "hf":
        mistakes += _misfits_of_hugging_face(machines, volume)
    mistakes += [_outside(file) for file in (_files(path) if to != "slurm" else ()) if _is_outside(file)]
    return mistakes


def _is_outside(file: str) -> bool:
    places = Path(os.path.abspath(file)), Path(file).resolve()  # a folder of links to a clone is this folder too
    return not any(place.is_relative_to(Path.cwd()) for place in places)


def _outside(file: str) -> str:
    return f"{file}: not in this folder, which is all that the machines get; copy it to recipes/"


def _programs(recipe: Recipe, strategy: Strategy) -> list[str]:
    """The plugins of a run and the files of its strategy."""
    return [*recipe.plugins, strategy.path, *([strategy.deepspeed_file] if strategy.deepspeed_file else [])]


def _read_there(recipe: Recipe) -> list[tuple[str, str]]:
    """Each key of a recipe that names a file or folder which is here and not in the current folder."""
    values = flatten(recipe.model_dump(mode="json", exclude_none=True, exclude={"plugins"}))
    texts = ((key, text) for key, value in values.items() for text in _texts(value))
    return [(key, text) for key, text in texts if os.sep in text and Path(text).exists() and _is_outside(text)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _misfits_of_hugging_face(machines: Machines, bucket: str | None) -> list[str]:
    mistakes = []
    if bucket and not BUCKET.fullmatch(bucket):
        mistakes.append(f"--volume is {bucket!r}; write a bucket as OWNER/NAME: `hf buckets create` makes one")
    if machines.num_machines > 1:
        mistakes.append(f"--gpus is {machines.text}: a job of Hugging Face is one machine; --to sky starts several")
    elif machines.gpu is None or (machines.gpu.name, machines.gpus_each) not in _flavors():
        there = ", ".join(f"{count}x{gpu}" for gpu, count in _flavors())
        mistakes.append(f"--gpus is {machines.text}, which Hugging Face has not; write one of {there}")
    return mistakes


def _files(path: Path) -> list[str]:
    """A recipe's file, and that of its base; mistakes in them are found when it is loaded."""
    try:
        return [*read_recipe(path).digests]
    except RecipeError:
        return [str(path)]


def _plan(recipe: Recipe, strategy: Strategy, machines: Machines, path: Path) -> tuple[list[str], int]:
    """Describe the job in words, and count its processes.

    Raises:
        RecipeError: the recipe, the strategy and the machines do not fit together, or the memory does not suffice.
    """
    each = default_num_processes(strategy, machines.gpus_each)
    count = each * machines.num_machines
    plan = make_plan(
        recipe, strategy, num_processes=count, num_local=each, num_gpus=machines.gpus_each, recipe_name=str(path)
    )
    quiet_deepspeed()
    from cookbook.forecast.ranking import forecast_all
    from cookbook.forecast.verdict import MAY_RUN

    (forecast,) = forecast_all(recipe, [strategy], machines, str(path), limits=False).forecasts
    if forecast.verdict not in (*MAY_RUN, "no forecast"):
        advice = f"cookbook plan {path} --gpus {machines.text} has what would"
        raise RecipeError(
            [f"{path} under {strategy.path} {forecast.verdict} on {machines.text}; {advice}", *forecast.why]
        )
    facts = [f"{path} under {strategy.path} on {machines.text}", describe_batch(recipe, plan)]
    if forecast.memory and machines.gpus_each:
        needed = f"forecast: {in_gib(*forecast.memory.needed)} GiB a GPU"
        facts.append("; ".join([needed, *(forecast.why or [forecast.verdict])]))
    elif forecast.verdict == "no forecast":
        facts.append(f"no forecast: {forecast.why[0]}")
    facts.append(f"a checkpoint has {in_gib(forecast.checkpoint)} GiB")
    return facts, count


def _name(run: str) -> str:
    """The name of a run's folder as Kubernetes takes it for a service: lower case, a letter first, and short."""
    return re.sub(r"[^a-z0-9]+", "-", run.lower()).lstrip("0123456789-")[:40].strip("-") or "run"
