"""Protects the files of `cookbook submit`: what each system reads in them, and that their commands train.

python -m pytest -q tests/test_submit.py
python -m pytest -q -m slow tests/test_submit.py    as root, with iproute2: two network namespaces are the machines
"""

import ast
import importlib
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT, clean_environment
from curves import Curve, distance

from cookbook.commands.cli import main
from cookbook.config.strategy import strategy_path
from tests.two_machines import ADDRESSES, two_machines

RECIPE = "recipes/qwen25_7b/sft.yaml"
NAME = "qwen25-7b-sft-zero3"
FLAGS = {
    "slurm": [],
    "sky": ["--volume", "runs"],
    "k8s": ["--image", "me/cookbook:1", "--volume", "runs"],
    "trainjob": ["--image", "me/cookbook:1", "--volume", "runs"],
    "dstack": ["--image", "me/cookbook:1", "--volume", "runs"],
    "hf": ["--image", "me/cookbook:1", "--volume", "me/runs"],
    "modal": ["--volume", "runs"],
}
KINDS = {"Service": "IoK8sApiCoreV1Service", "Job": "IoK8sApiBatchV1Job", "TrainJob": "TrainerV1alpha1TrainJob"}
SKY_KEYS = {
    "name": str,
    "num_nodes": int,
    "resources": {"accelerators": str, "job_recovery": {"recover_on_exit_codes": list}},
    "workdir": str,
    "setup": str,
    "run": str,
    "volumes": {"/outputs": str},
}
"""The part used here of what SkyPilot 0.14.1 reads (sky/utils/schemas.py, get_task_schema, get_resources_schema)."""
DSTACK_KEYS = {
    "type": str,
    "name": str,
    "nodes": int,
    "image": str,
    "commands": list,
    "resources": {"shm_size": str, "gpu": {"name": str, "memory": str, "count": int}},
    "volumes": list,
    "retry": {"on_events": list},
    "stop_duration": int,
}
"""The part used here of what dstack 0.22.5 reads (core/models/configurations.py, TaskConfiguration)."""

MODAL_CALLS = {
    "modal.App": ["image"],
    "modal.Image.debian_slim": ["python_version"],
    "apt_install": [],
    "workdir": [],
    "add_local_file": ["copy"],
    "run_commands": [],
    "add_local_dir": ["copy", "ignore"],
    "app.function": ["gpu", "volumes", "secrets", "timeout", "retries"],
    "modal.Volume.from_name": ["create_if_missing"],
    "modal.Secret.from_dict": [],
    "modal.Retries": ["max_retries", "initial_delay"],
    "app.local_entrypoint": [],
    "train.remote": [],
}
"""The part used here of what Modal's client 1.6.4 has: methods, those of an image by their own name, and keywords."""


def submit(capsys, to, recipe=RECIPE, gpus="2x8xH100", *words):
    """The file that `cookbook submit` prints."""
    code = main(["submit", recipe, "--to", to, "--gpus", gpus, *FLAGS[to], *words])
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out


def unknown_keys(values, read, place=""):
    """Keys of a document that its schema, which drops them, did not read."""
    if isinstance(values, dict):
        if not isinstance(read, dict):
            return [place]
        return [lost for key, value in values.items() for lost in unknown_keys(value, read.get(key), f"{place}.{key}")]
    if isinstance(values, list):
        pairs = zip(values, read or [None] * len(values), strict=True)
        return [lost for i, (value, other) in enumerate(pairs) for lost in unknown_keys(value, other, f"{place}[{i}]")]
    return [] if values == read else [place]


def model_of(kind: str) -> Any:
    return getattr(importlib.import_module("kubeflow_trainer_api.models"), KINDS[kind])  # takes seconds


@pytest.mark.parametrize(("to", "kinds"), [("k8s", ["Service", "Job"]), ("trainjob", ["TrainJob"])])
def test_kubernetes_reads_every_key_and_kubeflow_too(capsys, to, kinds):
    """By the models of kubeflow-trainer-api, which are made from both projects' schemas."""
    documents = list(yaml.safe_load_all(submit(capsys, to)))
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        assert unknown_keys(document, model_of(document["kind"]).from_dict(document).to_dict()) == []
        assert document["metadata"]["name"] == NAME
    spec = documents[-1]["spec"]
    trainer, pod = spec.get("trainer"), spec.get("template", {}).get("spec")
    asked = trainer["resourcesPerNode"] if trainer else pod["containers"][0]["resources"]
    assert asked == {"limits": {"nvidia.com/gpu": 8}}
    assert (trainer["numNodes"] if trainer else spec["completions"]) == 2


def test_a_job_of_kubernetes_ends_at_a_mistake_and_has_memory_for_its_processes(capsys):
    """Exit codes of docs/several_machines.md; a volume of no medium would lie on the disk of the machine."""
    spec = list(yaml.safe_load_all(submit(capsys, "k8s")))[-1]["spec"]
    actions = {rule["onExitCodes"]["values"][0]: rule["action"] for rule in spec["podFailurePolicy"]["rules"]}
    assert actions == {2: "FailJob", 75: "Ignore"}
    assert spec["completions"] == spec["parallelism"] == 2
    volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
    mounts = {
        mount["mountPath"]: volumes[mount["name"]]
        for mount in spec["template"]["spec"]["containers"][0]["volumeMounts"]
    }
    assert mounts["/dev/shm"]["emptyDir"] == {"medium": "Memory"}


def test_a_misspelt_or_mistyped_key_of_kubernetes_would_be_found(capsys):
    (document,) = yaml.safe_load_all(submit(capsys, "trainjob"))
    document["spec"]["trainer"]["numNods"] = document["spec"]["trainer"].pop("numNodes")
    assert unknown_keys(document, model_of("TrainJob").from_dict(document).to_dict()) == [".spec.trainer.numNods"]
    document["spec"]["trainer"] |= {"numNodes": "two"}
    with pytest.raises(ValueError, match="valid integer"):
        model_of("TrainJob").from_dict(document)


def check(values, expected):
    assert values.keys() == expected.keys()
    for key, kind in expected.items():
        if isinstance(kind, dict):
            check(values[key], kind)
        else:
            assert isinstance(values[key], kind), key


def test_a_dstack_task_has_keys_that_dstack_reads(capsys):
    task = yaml.safe_load(submit(capsys, "dstack"))
    check(task, DSTACK_KEYS)
    assert task["nodes"] == 2 and task["resources"]["gpu"] == {"name": "H100", "memory": "72GB..", "count": 8}
    (volume,) = task["volumes"]
    assert volume == {"name": "runs", "path": "/outputs"} and task["stop_duration"] == 120
    card = yaml.safe_load(submit(capsys, "dstack", RECIPE, "8xRTX-PRO-6000"))["resources"]["gpu"]
    assert card["name"] == "RTXPRO6000"
    assert yaml.safe_load(submit(capsys, "dstack", RECIPE, "8x80GB"))["resources"]["gpu"].keys() == {"memory", "count"}


@pytest.mark.parametrize(
    ("gpus", "flavor"), [("8xH200", "h200x8"), ("8xA100", "a100x8"), ("8xL40S", "l40sx8"), ("8xRTX-PRO-6000", "x8")]
)
def test_hugging_faces_own_program_reads_the_line(capsys, tmp_path, gpus, flavor):
    """With --dry-run, which sends nothing: image, machine, time, bucket and each word of the command."""
    setting = "run.output_dir=outputs/it's $(echo 1) `id`"
    *_, line = submit(capsys, "hf", RECIPE, gpus, "--set", setting).splitlines()
    assert line.startswith("hf jobs run --detach ")
    script = tmp_path / "job.sh"
    script.write_text(line.replace("--detach", "--dry-run", 1))
    environment = clean_environment(HF_HUB_OFFLINE="1", HF_TOKEN="hf_none", COLUMNS="1000")
    environment["PATH"] = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = dict(re.findall(r"(?m)^  (\w+) +(.*)$", done.stdout))
    assert read["image"] == "me/cookbook:1" and read["flavor"].endswith(flavor) and read["timeout"] == "24h"
    assert read["volumes"] == "hf://buckets/me/runs:/outputs" and read["secrets"].startswith("HF_TOKEN")
    shell, flag, command = shlex.split(read["command"])
    assert (shell, flag) == ("bash", "-c")
    words = [".venv/bin/python", "-m", "cookbook", "launch", RECIPE, "--processes", "8", "--set", setting]
    words += ["--set", "run.output_dir=/outputs/it's $(echo 1) `id`", "--set", "run.resume=auto"]
    assert shlex.split(command) == words


def test_a_sky_task_has_keys_that_skypilot_reads(capsys):
    task = yaml.safe_load(submit(capsys, "sky"))
    check(task, SKY_KEYS)
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:8")


def test_the_slurm_script_is_job_sh_with_the_size_of_the_job(capsys):
    script = submit(capsys, "slurm").splitlines()
    own = (ROOT / "slurm/job.sh").read_text().splitlines()
    directives = [line for line in own if line.startswith("#SBATCH")]
    asked = [f"#SBATCH --job-name={NAME}", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8"]
    assert script[0] == "#!/bin/bash" and [line for line in script if line.startswith("#SBATCH")] == asked + directives
    words = f"set -- {RECIPE} --processes 16"
    assert script[script.index("") + 1 :] == [words, *own[own.index("") + 1 :]]


def test_bash_gives_launch_the_words_of_a_slurm_script_as_they_were_written(capsys):
    settings = ["--set", "data.eval={path: 'python-stdlib', split: test}"]
    settings += ["--set", """run.output_dir=outputs/it's "$(echo 1)" `echo 2` *;"""]
    script = submit(capsys, "slurm", RECIPE, "2x8xH100", *settings)
    (line,) = [line for line in script.splitlines() if line.startswith("set --")]
    read = ["bash", "-c", f"{line}\nprintf '%s\\0' \"$@\""]
    words = subprocess.run(read, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    assert words == [RECIPE, "--processes", "16", *settings, ""]


def test_a_file_says_what_a_save_takes_and_has_the_time_for_it(capsys):
    words = ["--strategy", "zero3_offload", "--seconds-to-save", "600"]
    head = [line for line in submit(capsys, "slurm", RECIPE, "2x8xH100", *words).splitlines() if line[:2] == "# "]
    assert any("host memory unknown, needs " in line for line in head), head
    assert any("have 600 seconds after the signal to stop" in line for line in head), head
    assert "#SBATCH --signal=B:USR1@600" in submit(capsys, "slurm", RECIPE, "2x8xH100", *words)
    pod = yaml.safe_load(submit(capsys, "trainjob", RECIPE, "2x8xH100", *words))["spec"]["runtimePatches"][0]
    (job,) = pod["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 600
    roomy = submit(capsys, "slurm", RECIPE, "2x8xH100", *words, "--host-gib", "2000")
    assert "host memory" not in roomy


def calls_of_modal(text):
    """The methods of Modal's client that a program calls, with the keywords that it gives them."""
    calls = {}
    for call in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if isinstance(call.func, ast.Attribute) and name.startswith(("modal.Image", "image.")):
            name = name if name == "modal.Image.debian_slim" else call.func.attr
        if name.startswith(("modal.", "app.", "train.")) or name in MODAL_CALLS:
            calls[name] = [keyword.arg for keyword in call.keywords]
    return calls


def test_the_program_for_modal_calls_what_its_client_has(capsys):
    text = submit(capsys, "modal", RECIPE, "8xH100")
    assert calls_of_modal(text) == MODAL_CALLS
    assert calls_of_modal(text.replace("gpu=", "gpus=")) != MODAL_CALLS
    assert "FROM ${BASE}" in (dockerfile := (ROOT / "Dockerfile").read_text())
    assert re.findall(r'python_version="([\d.]+)"', text) == re.findall(r"python:([\d.]+)-slim", dockerfile)


class Modal:
    """A stand-in of Modal's client, of which every part is itself, and which keeps the function and its options."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **options):
        return self

    def function(self, **options):
        self.options = options
        return lambda function: function


@pytest.mark.parametrize("code", [0, 2, 75, 1])
def test_a_call_of_modal_trains_with_the_words_and_is_made_again_unless_it_is_done_or_a_mistake(
    capsys, tmp_path, monkeypatch, code
):
    setting = """run.output_dir=outputs/it's "$gpu" ${words} {x} run"""
    text = submit(capsys, "modal", RECIPE, "8xH100", "--set", setting)
    client = Modal()
    monkeypatch.setitem(sys.modules, "modal", client)
    module = {}
    exec(text.replace('"/cookbook"', repr(str(tmp_path))), module)
    assert client.options["gpu"] == "H100:8" and client.options["volumes"] == {"/outputs": client}
    assert (client.options["timeout"], set(client.options)) == (24 * 3600, set(MODAL_CALLS["app.function"]))
    program = tmp_path / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > words\nexit {code}\n')
    program.chmod(0o755)
    if code in (0, 2):
        assert module["train"]() == code
    else:
        with pytest.raises(RuntimeError, match=f"exit code {code}"):
            module["train"]()
    words = ["-m", "cookbook", "launch", RECIPE, "--processes", "8", "--set", setting]
    words += ["--set", """run.output_dir=/outputs/it's "$gpu" ${words} {x} run""", "--set", "run.resume=auto"]
    assert (tmp_path / "words").read_text().splitlines() == words


def test_a_call_of_modal_that_is_interrupted_lets_the_run_save(capsys, tmp_path):
    """The client raises KeyboardInterrupt in the function when Modal takes a machine back."""
    text = submit(capsys, "modal", RECIPE, "8xH100").replace('"/cookbook"', repr(str(tmp_path)))
    (tmp_path / "job.py").write_text(text)
    stand_in = "import sys\nfrom unittest.mock import MagicMock\nsys.modules['modal'] = MagicMock()\n"
    stand_in += "sys.modules['modal'].App.return_value.function = lambda **options: lambda function: function\n"
    (tmp_path / "modal.py").write_text(stand_in)
    program = tmp_path / ".venv/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/bash\ntrap 'echo saved; exit 75' TERM\necho begun\nwhile :; do sleep 0.1; done\n")
    program.chmod(0o755)
    line = [sys.executable, "-c", "import job; job.train()"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=tmp_path, start_new_session=True, **pipes) as call:
        assert call.stdout is not None and call.stdout.readline() == "begun\n"
        call.send_signal(signal.SIGINT)
        printed, error = call.communicate(timeout=60)
    assert printed == "saved\n" and error.endswith("KeyboardInterrupt\n"), error


def command_of(to, text):
    """The line of bash in a file of SkyPilot or Kubernetes."""
    document = list(yaml.safe_load_all(text))[-1]
    if to == "sky":
        return document["run"]
    if to == "dstack":
        return document["commands"][0]
    place = document["spec"]["trainer"] if to == "trainjob" else document["spec"]["template"]["spec"]["containers"][0]
    shell, flag, command = place["command"]
    assert (shell, flag) == ("bash", "-c")
    return command


def variables_of(to, machine, name):
    """Variables that a system gives to a machine of two, and its name for the first one. `name`: of the job."""
    if to == "sky":  # sky/backends/task_codegen.py, 0.14.1: a line for each machine
        addresses = "\n".join(ADDRESSES)
        variables = {"NUM_NODES": "2", "NODE_RANK": str(machine), "NODE_IPS": addresses, "NUM_GPUS_PER_NODE": "0"}
        return {f"SKYPILOT_{key}": value for key, value in variables.items()}, ADDRESSES[0]
    if to == "dstack":  # dstack.ai, docs/concepts/tasks, Distributed tasks
        variables = {"NODES_NUM": "2", "NODE_RANK": str(machine), "MASTER_NODE_IP": ADDRESSES[0]}
        return {f"DSTACK_{key}": value for key, value in variables.items()}, ADDRESSES[0]
    if to == "k8s":  # kubernetes.io, Job with Pod-to-Pod Communication
        return {"JOB_COMPLETION_INDEX": str(machine)}, f"{name}-0.{name}"
    # Kubeflow Trainer, pkg/runtime/framework/plugins/torch/torch.go
    first = f"{name}-node-0-0.{name}"
    variables = {"NNODES": "2", "NPROC_PER_NODE": "auto", "NODE_RANK": str(machine), "MASTER_PORT": "29500"}
    return {f"PET_{key}": value for key, value in (variables | {"MASTER_ADDR": first}).items()}, first


@pytest.mark.parametrize("to", ["sky", "dstack", "k8s", "trainjob"])
def test_each_machine_starts_launch_with_the_numbers_that_its_system_gives_it(capsys, tmp_path, to):
    """Also a setting with blanks and quotes; names are resolved by a `getent` of the test's."""
    setting = "data.eval={path: 'python-stdlib', split: test}"
    text = submit(capsys, to, "recipes/quickstart.yaml", "2x1xH100", "--set", setting, "--strategy", "ddp")
    command = command_of(to, text)
    for path, script in {".venv/bin/python": 'printf "%s\\n" "$@"', "getent": "true"}.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{script}\n")
        file.chmod(0o755)
    for machine in range(2):
        variables, first = variables_of(to, machine, "quickstart")
        environment = variables | {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        words = ["-m", "cookbook", "launch", "recipes/quickstart.yaml", "--strategy", "accelerate_configs/ddp.yaml"]
        words += ["--processes", "2", "--set", setting, "--set", "run.output_dir=/outputs/quickstart"]
        words += ["--set", "run.resume=auto", "--machines", "2", "--machine", str(machine), "--first", first]
        assert done.stdout.splitlines() == words + (["--port", "29500"] if to == "trainjob" else [])


def expanded(text):
    """A word of a container's command as Kubernetes expands it, by the rules of its documentation."""
    return re.sub(r"\$(\$|\((\w+)\))", lambda match: "$" if match[1] == "$" else "EXPANDED", text)


@pytest.mark.parametrize("to", ["k8s", "trainjob"])
@pytest.mark.parametrize("name", ["$(KUBERNETES_PORT)", "$$(HOME)", "a$$b", "$$$(X)"])
def test_kubernetes_expands_no_word_of_a_user(capsys, to, name):
    assert expanded("x$(HOME)y$$(HOME)") == "xEXPANDEDy$(HOME)"
    text = submit(capsys, to, RECIPE, "2x8xH100", "--set", f"run.output_dir=outputs/{name}/x")
    documents = list(yaml.safe_load_all(text))
    commands = list(walk(documents, "command"))
    assert len(commands) == 1 and f"'run.output_dir=outputs/{name}/x'" in expanded(commands[0][-1])


def walk(value, key):
    """Values under a key, at any depth."""
    if isinstance(value, dict):
        yield from (item for name, inner in value.items() for item in ([inner] if name == key else walk(inner, key)))
    if isinstance(value, list):
        yield from (node for inner in value for node in walk(inner, key))


@pytest.mark.parametrize("name", ["y", "n", "null", "true"])
def test_the_name_of_a_job_is_text_to_every_reader_of_yaml(capsys, name):
    """Kubernetes' reads y and n as true and false (yaml.v2, resolve.go), PyYAML as text."""
    text = submit(capsys, "k8s", RECIPE, "2x8xH100", "--set", f"run.output_dir='outputs/{name}'")
    assert f"name: '{name}'\n" in text and not re.search(f": {name}$", text, re.MULTILINE)


@pytest.mark.parametrize("which", ["recipe", "strategy"])
def test_a_file_whose_name_would_be_a_line_of_the_script_is_refused(capsys, tmp_path, which):
    odd = tmp_path / "d" / "x\ntouch PWN #.yaml"
    odd.parent.mkdir()
    odd.write_text(Path(RECIPE).read_text() if which == "recipe" else strategy_path("zero3").read_text())
    words = [str(odd)] if which == "recipe" else [RECIPE, "--strategy", str(odd)]
    assert main(["submit", *words, "--to", "slurm", "--gpus", "2xcpu"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "a character that no path should have; rename the file" in output.err
    assert "\ntouch" not in output.err


def test_one_machine_needs_no_numbers(capsys):
    task = yaml.safe_load(submit(capsys, "sky", RECIPE, "8xH100"))
    assert task["num_nodes"] == 1 and "--machine" not in task["run"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--to slurm --gpus 2x8xH100 --volume runs", ["--volume: would be ignored by --to slurm; leave it out"]),
        ("--to sky --gpus 2x8x80GB", ["--volume is missing", "SkyPilot asks for a GPU by its name; write one"]),
        ("--to sky --gpus 8xH100 --image x", ["--image: would be ignored by --to sky"]),
        ("--to k8s --gpus 8xH100", ["--image is missing: --to k8s needs it", "--volume is missing"]),
        (
            "--to k8s --gpus 8xH100 --image x --volume V_V",
            ["--volume is 'V_V'; write the name of a claim"],
        ),
        ("--to hf --gpus 2x8xH200 --image x --volume o/b", ["a job of Hugging Face is one machine"]),
        ("--to hf --gpus 8xH100 --image x --volume o/b", ["which Hugging Face has not; write one of 1xT4, "]),
        ("--to hf --gpus 8xH200 --image x --volume b", ["--volume is 'b'; write a bucket as OWNER/NAME"]),
        ("--to hf --gpus 8xH200 --image x --volume o/b --seconds-to-save 9", ["would be ignored by --to hf"]),
        ("--to modal --gpus 2x8xH100 --volume runs", ["a call of Modal is one machine; --to sky starts several"]),
        ("--to modal --gpus 8x80GB --image x", ["--volume is missing", "would be ignored", "for a GPU by its name"]),
        ("--to modal --gpus 8xH100 --volume a/b --seconds-to-save 9", ["name of a volume", "ignored by --to modal"]),
        ("--to dstack --gpus 8xH100 --volume a/b", ["--image is missing", "write the name of a volume"]),
        ("--to sky --gpus 8xH100 --seconds-to-save 600", ["--seconds-to-save: would be ignored by --to sky"]),
        ("--to slurm --gpus 8xH9000 --set seed=x", ["H9000", "seed"]),
        ("--to slurm --gpus 2x3xH100", ["but 6 processes x micro_batch_size 1 (auto)"]),
        ("--to slurm --gpus 8xH100 --strategy ddp", ["does not fit on 8xH100; cookbook plan"]),
        ("--to cloud --gpus 8xH100", ["'cloud' is not one of"]),
        ("--to k8s --gpus 8xH100 --image=-x --volume runs", ["--image is '-x'; write one as in registry/name:tag"]),
        ("--to trainjob --gpus 8xH100 --image $(X) --volume runs", ["--image is '$(X)'; write one as in"]),
        ("--to k8s --gpus 8xH100 --image \x1b]0; --volume runs", ["--image is '\\x1b]0;'; write one as in"]),
        ("--to sky --gpus 8xH100 --volume ~/runs", ["--volume is '~/runs'; write the name of a volume"]),
    ],
)
def test_mistakes_are_answered_together(capsys, words, expected):
    assert main(["submit", RECIPE, *words.split()]) == 2
    answer = capsys.readouterr().err
    assert [text for text in expected if text not in answer] == [], answer


def test_a_recipe_that_the_machines_would_not_get_is_refused(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text((ROOT / RECIPE).read_text())
    assert main(["submit", str(path), "--to", "sky", "--gpus", "8xH100"]) == 2
    assert "not in this folder, which is all that the machines get" in capsys.readouterr().err


def test_all_that_the_machines_would_not_get_is_named(capsys, tmp_path, monkeypatch):
    """Programs are refused; rows and models, which a volume may have there, are named in the file."""
    (tmp_path / "out side").mkdir()
    rows, plugin, own = (tmp_path / "out side" / name for name in ("rows.jsonl", "mine.py", "own.yaml"))
    rows.write_text((ROOT / "recipes/sums/answers.jsonl").read_text())
    plugin.write_text(
        "from cookbook.config.metric_functions import metric\n\n\n@metric\ndef hits(logits, labels): ...\n"
    )
    own.write_text((ROOT / "accelerate_configs/fsdp2.yaml").read_text())
    words = ["submit", str(ROOT / RECIPE), "--to", "sky", "--gpus", "8xH100"]
    assert main([*words, "--strategy", str(own), "--set", f"plugins=[{plugin}]", "--set", f"data.train={rows}"]) == 2
    error = capsys.readouterr().err
    assert (
        all(f"/out side/{file.name}: not in this folder" in error for file in (plugin, own))
        and "rows.jsonl" not in error
    )
    assert main([*words, "--set", f"data.train={rows}", "--set", "data.eval=null", "--set", "data.holdout=0.1"]) == 0
    text = capsys.readouterr().out
    assert (
        f"# data.train.0.path is {rows}, not in this folder: it must be there on the machines" in text
        or rows.name in text
    )
    assert f"launch {RECIPE} " in text and str(ROOT) not in text


THOROUGH = [pytest.param(to, marks=pytest.mark.thorough) for to in ("sky", "dstack", "k8s")]


@pytest.mark.slow
@pytest.mark.parametrize("to", ["trainjob", *THOROUGH])
def test_two_machines_of_a_system_have_the_curve_of_one_process(capsys, lab, tmp_path, monkeypatch, to):
    """The file's own command, unchanged but for /outputs, with the system's variables and names."""
    for name in ("Makefile", "cookbook", "simulated_gpus", "train.py", "accelerate_configs", "ds_configs", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    (tmp_path / "recipe.yaml").write_text((lab.folder / "recipe.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    command = command_of(to, submit(capsys, to, "recipe.yaml", "2xcpu", "--strategy", "ddp"))
    command = command.replace("/outputs", str(tmp_path / "outputs"))
    with two_machines() as machines, ThreadPoolExecutor() as pool:

        def train(machine):
            variables, first = variables_of(to, machine, "out")
            own = Path("/etc/netns") / machines[machine] / "hosts"  # `ip netns exec` puts it over /etc/hosts
            own.parent.mkdir(parents=True)
            own.write_text(f"127.0.0.1 localhost\n{ADDRESSES[0]} {first}\n")
            environment = clean_environment(**variables, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
            line = ["ip", "netns", "exec", machines[machine], "bash", "-c", command]
            try:
                return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
            finally:
                own.unlink()
                own.parent.rmdir()

        ends = list(pool.map(train, range(2)))
    assert [end.returncode for end in ends] == [0, 0], "".join(end.stdout[-2000:] + end.stderr[-2000:] for end in ends)
    apart = distance(Curve(tmp_path / "outputs/out"), lab.run("single"))
    assert apart.loss < 2e-6 and apart.norm < 1e-6 and apart.weight < 1e-6, apart
