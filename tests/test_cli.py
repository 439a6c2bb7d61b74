"""The commands people type: what they print, what they refuse, and that they answer in a moment.

pytest -q tests/test_cli.py
"""

import errno
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from cookbook.commands import launch
from cookbook.commands.cli import main
from cookbook.config.recipe import recipe_schema
from cookbook.system import versions

ROOT = Path(__file__).parent.parent
QUICKSTART = "recipes/quickstart.yaml"
GROUPS = {
    "Before a run": "library init convert check explain preview plan tune rehearse doctor",
    "Run": "launch sweep rounds submit watch next",
    "After a run": "report why-slow chat evaluate export checkpoint",
}
OF_MAINTAINERS = ["combinations", "schema"]
OF_THE_REPOSITORY = [["schema"], ["library", "--page"], ["combinations"]]
VERBS = [*" ".join(GROUPS.values()).split(), *OF_MAINTAINERS]
WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": ""}

# A command that finds the pinned versions: under others, `check` tries packed rows on a small model, and notes them.
AS_PINNED = f"""
import sys
from cookbook.system import versions
versions.installed_version = {versions.tested_versions()[0]}.get
from cookbook.commands.cli import main
"""
# Runs it in a process that cannot import torch.
NO_TORCH = f"import sys; sys.modules['torch'] = None{AS_PINNED}sys.exit(main(sys.argv[1:]))"


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in the project's folder, on a machine that seems to have no GPU."""
    environment = {**os.environ, **WITHOUT_GPUS, **environment}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def cookbook(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "cookbook", *arguments, **environment)


def cookbook_without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-c", NO_TORCH, *arguments)


def make_targets() -> list[str]:
    """The targets of the Makefile."""
    return re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


@pytest.fixture
def in_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_help_lists_the_commands_of_users_by_group_in_plain_text_of_80_columns():
    answer = cookbook("--help", COLUMNS="80", FORCE_COLOR="1")
    assert answer.returncode == 0
    titles = "|".join(GROUPS)
    _, *parts = re.split(rf"^({titles}):$", answer.stdout, flags=re.MULTILINE)
    groups = dict(zip(parts[::2], parts[1::2], strict=True))
    rows = [row for part in groups.values() for row in re.findall(r"(?m)^  ([a-z-]+)  +(\S.*)$", part)]
    assert {title: re.findall(r"(?m)^  ([a-z-]+)  ", part) for title, part in groups.items()} == {
        title: verbs.split() for title, verbs in GROUPS.items()
    }
    assert not [text for _, text in rows if text.endswith("...")], "cut off"
    assert answer.stdout.isascii() and "\x1b" not in answer.stdout and widest(answer.stdout) <= 80


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_explains_itself_in_80_columns(verb, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([verb, "--help"]) == 0
    printed = capsys.readouterr().out
    assert verb in printed and 40 < widest(printed) <= 80
    assert main([verb, "-h"]) == 0 and capsys.readouterr().out == printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lanch"], "No such command 'lanch'. Did you mean 'launch'"),
        (["launch", "--fast"], "No such option: --fast"),
        (["launch", "--processes", "two"], "--processes is 'two': write a valid integer"),
        (["plan", "a.yaml", "--host-gib", "1TB"], "--host-gib is '1TB': write a valid number"),
        (["rehearse"], "RECIPE is missing; write cookbook rehearse RECIPE"),
        (["launch"], "RECIPE is missing; write cookbook launch RECIPE (recipes/quickstart.yaml trains a small model"),
        (["launch", "--strategy", "zero3"], "RECIPE is missing"),
        (["init", "a"], "DATA is missing; write cookbook init MODEL DATA"),
        (["submit", "a.yaml"], "--to is missing; write --to slurm|sky|k8s|trainjob"),
        (["check", ""], "RECIPE is empty; write a path"),
        (["export", "outputs/none", "--dtype", "fp8"], "--dtype: 'fp8' is not one of 'fp32'"),
        (["launch", "--dry-run=1"], "--dry-run"),
        ([], "Usage: cookbook"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_what_is_no_command_line_ends_with_2_and_a_message(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.out + printed.err and "Traceback" not in printed.err
    assert not arguments or len(printed.err.splitlines()) == 1


def test_a_key_that_is_given_as_an_option_is_answered_by_each_command_with_settings(capsys):
    """By what its own help has: a list of such commands was without `sweep`."""
    told = {True: set(), False: set()}
    for verb in VERBS:
        assert main([verb, "-h"]) == 0
        takes_settings = "--set section.key=value" in capsys.readouterr().out
        assert main([verb, "--learning_rate=1e-4"]) == 2
        said = capsys.readouterr().err
        assert ("write --set optim.learning_rate=VALUE" in said) == takes_settings, (verb, said)
        told[takes_settings].add(verb)
    assert {"launch", "sweep"} <= told[True] and {"init", "report"} <= told[False]


def test_version_names_the_project_and_its_libraries_without_torch():
    answer = cookbook_without_torch("--version")
    assert answer.returncode == 0, answer.stderr
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    answers = dict(line.split(" ", 1) for line in answer.stdout.splitlines())
    libraries = ("torch", "accelerate", "deepspeed", "transformers")
    assert answers == {
        "cookbook": citation["version"],
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in libraries},
    }


# Completion, by what a shell runs when somebody presses Tab.


def complete(line: str, folder: Path, shell: str = "bash") -> list[str]:
    words = line.split(" ")
    environment = {"_COOKBOOK_COMPLETE": f"complete_{shell}", "PYTHONPATH": str(ROOT)}
    if shell == "bash":
        environment |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    else:
        environment |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    command = [sys.executable, "-c", NO_TORCH]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.stderr == "", done.stderr
    return [line.split("\t")[0] for line in done.stdout.split()]


@pytest.fixture
def folder(tmp_path):
    for name in ("recipes/quickstart.yaml", "recipes/small/dpo.yaml", "recipes/small/sft.yaml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "accelerate_configs").mkdir()
    for name in ("ddp", "zebra"):
        (tmp_path / f"accelerate_configs/{name}.yaml").touch()
    for name in ("a", "b", "no_run"):
        (tmp_path / "outputs" / name).mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "outputs" / name / "run.json").touch()
    return tmp_path


SHIPPED = [path.stem for path in (ROOT / "accelerate_configs").glob("*.yaml")]
RECIPES = [str(path.relative_to(ROOT)) for path in (ROOT / "recipes").rglob("*.yaml")]
Z_NAMES = sorted(["zebra", *(name for name in SHIPPED if name.startswith("z"))])


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("cookbook che", ["check", "checkpoint"]),
        ("cookbook s", ["sweep", "submit"]),
        ("cookbook launch rec", sorted(["recipes/small/dpo.yaml", "recipes/small/sft.yaml", *RECIPES])),
        ("cookbook check recipes/quickstart.yaml recipes/small/d", ["recipes/small/dpo.yaml"]),
        ("cookbook launch recipes/quickstart.yaml --strategy ", sorted(["zebra", *SHIPPED])),
        ("cookbook plan --strategy ddp --strategy z", Z_NAMES),
        ("cookbook explain recipes/quickstart.yaml z", Z_NAMES),
        ("cookbook report ", ["outputs/a", "outputs/b"]),
        ("cookbook export outputs/a --dtype f", ["fp32", "fp16"]),
        ("cookbook rehearse --on ", ["gpus", "cpu"]),
        ("cookbook doctor --st", ["--strategy"]),
        ("cookbook launch elsewhere/", []),  # then bash completes files
    ],
)
def test_tab_completes_commands_files_runs_and_flags(folder, line, offered):
    assert complete(line, folder) == offered


def test_completion_speaks_with_other_shells(folder):
    assert complete("cookbook export outputs/", folder, "fish") == ["outputs/a", "outputs/b"]


def test_bash_completes_with_the_script_that_is_shown(folder, tmp_path):
    """The command itself, as make setup writes it beside accelerate, and bash's own completion function."""
    program = tmp_path / "bin/cookbook"
    program.parent.mkdir()
    rule = re.search(r"printf '(.*)' > \.venv/bin/cookbook", (ROOT / "Makefile").read_text())
    assert rule is not None
    text = rule[1].replace("\\n", "\n").replace("$(CURDIR)/.venv/bin/python", sys.executable)
    text = text.replace("$(CURDIR)", str(ROOT)).replace("$$", "$")
    program.write_text(text)
    program.chmod(0o755)
    script = """
    eval "$(_COOKBOOK_COMPLETE=source_bash cookbook)"
    COMP_WORDS=(cookbook export outputs/) COMP_CWORD=2
    $(complete -p cookbook | sed 's/.*-F \\([^ ]*\\) .*/\\1/') cookbook
    echo "${COMPREPLY[@]}"
    """
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("outputs/a outputs/b\n", "")


def test_a_run_that_is_not_there_is_answered_with_those_that_are(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    for name, said in (("outputs/aa", "did you mean outputs/a?"), ("outputs/mine", "here are outputs/a, outputs/b")):
        assert main(["report", name]) == 2
        assert said in capsys.readouterr().err


def test_a_python_without_the_libraries_names_the_place_of_them():
    answer = run(sys.executable, "-S", "-m", "cookbook", "--help")
    assert (answer.returncode, answer.stdout) == (2, "")
    assert re.search(r" has no \w+; first: source \.venv/bin/activate", answer.stderr)


USERS = ["help", "setup", "quickstart", "finetune-7b", "test", "clean"]


def listed(target: str) -> list[str]:
    """The targets that a list of make explains."""
    answer = run("make", "--no-print-directory", *target.split())
    assert answer.returncode == 0 and widest(answer.stdout) <= 79 and len(answer.stdout.splitlines()) <= 15
    return re.findall(r"(?m)^([a-z0-9-]+) {2,}\S.*$", answer.stdout)


def test_make_alone_lists_what_users_need_and_help_dev_the_rest():
    assert listed("") == listed("help") == USERS
    assert set(listed("help-dev")) == set(make_targets()) - set(USERS) and len(listed("help-dev")) >= 10


def told(*words: str) -> list[str]:
    """The words after `cookbook` in the lines that a target would run."""
    answer = run("make", "-n", *words)
    assert answer.returncode == 0, answer.stderr
    return re.findall(r"(?m)^\.venv/bin/python -m cookbook (.*?) *$", re.sub(" +", " ", answer.stdout))


def test_quickstart_and_finetune_7b_take_a_strategy_and_flags_of_launch():
    assert told("finetune-7b") == ["launch recipes/qwen25_7b/sft.yaml"]
    given = ("STRATEGY=fsdp2", "ARGS=--processes 4 --dry-run")
    assert told("finetune-7b", *given) == ["launch recipes/qwen25_7b/sft.yaml --strategy fsdp2 --processes 4 --dry-run"]
    assert told("quickstart", *given) == ["launch recipes/quickstart.yaml --strategy fsdp2 --processes 4 --dry-run"]


ASKED = " --prompt 'Write `def get_name(self)`: Return the name.' --max-new-tokens 100"


@pytest.mark.parametrize("written", ["--set run.output_dir=outputs/mine", "--set=run.output_dir=outputs/mine"])
def test_make_quickstart_shows_the_run_that_it_made(written):
    shown = ["report RUN", f"chat RUN{ASKED}"]
    for folder, words in (("outputs/mine", [f"ARGS=--set seed=7 {written}"]), ("outputs/quickstart", [])):
        assert told("quickstart", *words)[1:] == [line.replace("RUN", folder) for line in shown]


def test_what_the_help_of_a_target_names_is_what_its_rule_reads():
    makefile = (ROOT / "Makefile").read_text()
    values = dict(re.findall(r"^(\w+) [:?]?= (.*)$", makefile, flags=re.MULTILINE))

    def read(text):
        words = set()
        for name in re.findall(r"\$\(([A-Z_]+)\)|if \$\(([A-Z_]+)\)", text):
            word = "".join(name)
            words |= read(values[word]) if word in values else {word}
        return words

    rules = re.findall(r"^([a-z0-9-]+):.*?##-? (.*)\n((?:(?:\t|ifeq|endif).*\n)*)", makefile, flags=re.MULTILINE)
    assert [target for target, *_ in rules] == make_targets()
    for target, explained, rule in rules:
        named = set(re.findall(r"\b([A-Z]+)=", explained))
        assert read(rule) - {"PYTHON", "CURDIR"} == named - {"PYTHON"}, target


def test_a_target_that_make_has_not_is_answered_before_anything_is_installed():
    answer = run("make", "quickstrat")
    assert (answer.returncode, answer.stdout) == (2, "") and "No rule to make target 'quickstrat'" in answer.stderr


MODEL_IS_HERE = tuple(
    f"recipes/{name}.yaml" for name in ("calculator/grpo", "programs/grpo", "sums/distill", "sums/grpo")
)


def test_check_finds_every_shipped_file_fine_and_needs_no_torch_but_for_the_one_whose_model_is_here():
    paths = [*sorted((ROOT / "recipes").rglob("*.yaml")), *sorted((ROOT / "accelerate_configs").glob("*.yaml"))]
    shipped = [str(path.relative_to(ROOT)) for path in paths]
    assert len(shipped) >= 15
    others = [name for name in shipped if name.startswith("recipes/") and name not in MODEL_IS_HERE]
    for answer, named in (
        (cookbook_without_torch("check", *others), others),
        (run(sys.executable, "-c", f"{AS_PINNED}sys.exit(main(sys.argv[1:]))", "check"), shipped),
    ):
        assert answer.returncode == 0, answer.stderr
        assert [line.split(":")[0] for line in answer.stdout.splitlines()] == named


def test_check_tells_how_the_batch_splits(in_root, capsys):
    assert main(["check", "recipes/quickstart.yaml", "--strategy", "tp"]) == 0
    # Tensor parallel over two processes: both see the same samples, so one data-parallel process.
    line = capsys.readouterr().out
    assert "fine under accelerate_configs/tp.yaml" in line
    size, ranks, micro, accumulation = map(int, re.findall(r"\b\d+\b", line.split(";")[1]))
    assert ranks == 1
    assert size == ranks * micro * accumulation


@pytest.mark.parametrize("num_processes", [1, 2, 4, 8])
def test_quickstart_splits_without_editing(num_processes, in_root, monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "run_child", lambda command, environment, output_dir: launched.append(command))
    strategy = "ddp" if num_processes > 1 else "single"
    main(["launch", QUICKSTART, "--processes", str(num_processes), "--strategy", strategy])
    (command,) = launched
    assert command[command.index("--num_processes") + 1] == str(num_processes)


def test_check_reports_the_mistakes_of_all_recipes_together(tmp_path, in_root, capsys):
    text = (ROOT / "recipes/quickstart.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text.replace("learning_rate:", "learnig_rate:"))
    (tmp_path / "b.yaml").write_text(text.replace("seed: 42", "seed: many"))
    assert main(["check", str(tmp_path / "a.yaml"), "recipes/quickstart.yaml", str(tmp_path / "b.yaml")]) == 2
    printed = capsys.readouterr()
    assert "optim.learnig_rate: unknown key; did you mean learning_rate?" in printed.err
    assert "seed is 'many'" in printed.err
    assert printed.out.startswith("recipes/quickstart.yaml: fine")


@pytest.mark.parametrize("command", ["check", "launch"])
def test_a_value_that_is_no_value_hides_no_batch_that_cannot_be_split(command, in_root, capsys):
    batch, other = "batch.micro_batch_size=3", "data.max_length=-4"
    words = [command, "recipes/quickstart.yaml", "--strategy", "ddp", "--processes", "2", "--set", batch]
    assert main([*words, "--set", other]) == 2
    value, split = capsys.readouterr().err.splitlines()
    assert value.startswith("--set data.max_length is -4;")
    assert split.startswith(f"--set {batch}: batch.global_batch_size is 16, but 2 processes x micro_batch_size 3 = 6 ")
    assert main([*words, "--set", "batch.global_batch_size=many"]) == 2  # a batch without a size splits in no way
    assert "per forward" not in capsys.readouterr().err


def test_launch_refuses_a_bad_recipe_in_a_moment_and_without_torch(tmp_path):
    recipe = tmp_path / "bad.yaml"
    recipe.write_text((ROOT / "recipes/quickstart.yaml").read_text().replace("learning_rate:", "learnig_rate:"))
    started = time.monotonic()
    answer = cookbook_without_torch("launch", str(recipe))
    seconds = time.monotonic() - started
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "optim.learnig_rate: unknown key; did you mean learning_rate?" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert seconds < 10  # 0.4 s on a quiet machine; importing torch alone takes longer than that


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["launch", QUICKSTART, "--strategy", "zero33"], "did you mean zero3?"),
        (
            ["launch", QUICKSTART, "--strategy", "single", "--rank-logs"],
            "--rank-logs: one process runs, and its output",
        ),
        (["launch", QUICKSTART, "--processes", "0"], "--processes is 0; write a number above 0"),
        (["launch", QUICKSTART, "--processes", "5"], "recipes/quickstart.yaml:29: batch.global_batch_size is"),
        (["launch", QUICKSTART, "--set", "run.max_steps=soon"], "--set run.max_steps is 'soon'"),
        (["check", "--strategy", "nothing"], "strategy 'nothing': no file accelerate_configs/nothing.yaml"),
        (["report", "nowhere"], "nowhere/metrics.jsonl: no such file"),
        (["chat", "nowhere"], "nowhere: no model there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_user_can_fix_ends_with_2_and_a_message(arguments, message, in_root, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("written", "instead"),
    [
        ("train a.yaml --set seed=1", "launch a.yaml --set seed=1"),
        ("summary outputs/mine", "report outputs/mine"),
        ("sample run --prompt 'a b' --max-new-tokens 5", "chat run --prompt 'a b' --max-new-tokens 5"),
        ("sample outputs/mine --from-eval=3", "chat outputs/mine --from-run=3 --max-new-tokens 100"),
        ("sample outputs/mine", f"chat outputs/mine{ASKED}"),
        ("merge outputs/mine --dtype bfloat16", "export outputs/mine --dtype bf16 --merged"),
        ("merge --dtype=float32 outputs/mine", "export --dtype=fp32 outputs/mine --merged"),
    ],
)
def test_a_command_that_became_part_of_another_is_answered_with_the_line_to_write(written, instead, capsys):
    assert main(shlex.split(written)) == 2
    assert capsys.readouterr().err == f"cookbook {written.split()[0]}: write cookbook {instead}\n"
    command, *words = shlex.split(instead)
    main([command, "--help"])
    explained = capsys.readouterr().out
    assert all(word.partition("=")[0] in explained for word in words if word.startswith("--"))


@pytest.mark.parametrize(("exported", "words"), [(4, " --step 4"), (8, "")], ids=["an earlier one", "the newest"])
def test_the_answer_to_merge_is_of_the_checkpoint_that_the_run_exported(exported, words, tmp_path, capsys):
    """With run.export: best that may not be the newest, which `export --merged` would take."""
    for step in (4, 8):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    (tmp_path / "export").mkdir()
    (tmp_path / "export/export.json").write_text(json.dumps({"step": exported}))
    assert main(["merge", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"cookbook merge: write cookbook export {tmp_path} --merged{words}\n"


def test_launch_prints_the_accelerate_line_and_runs_it_without_an_activated_environment(tmp_path):
    # PATH as in a fresh shell: accelerate is found beside the interpreter only.
    answer = cookbook(
        *("launch", "recipes/quickstart.yaml", "--strategy", "zero2", "--processes", "2"),
        *("--set", "seed=7", "--set", f"run.output_dir={tmp_path / 'out'}", "--dry-run", "--rank-logs"),
        PATH="/usr/local/bin:/usr/bin:/bin",
    )
    assert answer.returncode == 0, answer.stderr
    lines = answer.stdout.splitlines()
    (start,) = (tmp_path / "out.logs").iterdir()
    assert lines[0].startswith(f"the output of each process: {start}/") and lines[1] == (
        "accelerate launch --config_file accelerate_configs/zero2.yaml --num_processes 2 --main_process_port 0 --tee 3"
        f" --log_dir {start} train.py recipes/quickstart.yaml --set seed=7 --set run.output_dir={tmp_path / 'out'}"
        " --dry-run"
    )
    # train.py's own line: the files reached it. Only rank 0 prints it, here and into its own file.
    fine = "recipes/quickstart.yaml: fine under accelerate_configs/zero2.yaml"
    assert any(line.startswith(f"[0] {fine}") for line in lines[2:])
    written = {path.parent.name: path.read_text() for path in start.glob("*/attempt_0/*/stdout.log")}
    assert written.keys() == {"0", "1"} and written["0"].startswith(fine) and not written["1"]


def test_launch_takes_the_accelerate_of_its_python_and_forwards_its_exit_code(tmp_path):
    package, programs = tmp_path / "accelerate" / "commands", tmp_path / "bin"
    package.mkdir(parents=True)
    programs.mkdir()
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    for path, code in ((package / "accelerate_cli.py", 75), (programs / "accelerate", 1)):
        path.write_text(f"#!{sys.executable}\nimport sys\nprint('stand-in', *sys.argv[1:])\nsys.exit({code})\n")
        path.chmod(0o755)
    variables = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(tmp_path)}
    answer = run(sys.executable, "-m", "cookbook", "launch", QUICKSTART, "--strategy", "single", **variables)
    assert answer.returncode == 75, answer.stderr
    printed, received = answer.stdout.splitlines()
    assert received.split()[1:] == printed.split()[1:]


def test_launch_gives_each_cpu_process_its_share_of_the_cores(in_root, monkeypatch):
    launched = []
    monkeypatch.setattr(launch, "run_child", lambda command, environment, output_dir: launched.append(environment))
    monkeypatch.setattr("cookbook.commands.launch.num_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    main(["launch", QUICKSTART, "--processes", "2"])
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    main(["launch", QUICKSTART, "--processes", "2"])
    assert [environment["OMP_NUM_THREADS"] for environment in launched] == ["4", "3"]


def test_report_shows_losses_speed_memory_and_the_model(tmp_path, in_root, capsys):
    def step(number: int, loss: float) -> dict[str, float]:
        return {
            "step": number,
            "epoch": number / 2,
            "loss": loss,
            "step_seconds": 2.0,
            "tokens_per_second": 1000.0 * number,
            "peak_memory_gib": 0.5 + number / 4,
        }

    lines = [{"step": 0, "eval_loss": 7.5}, step(1, 7.0), step(2, 5.0), step(3, 3.0), {"step": 3, "eval_loss": 4.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.json").write_text(
        json.dumps({"hardware": {"cores": 4, "device": "cpu"}, "strategy": {"file": "ddp.yaml", "processes": 2}})
    )
    (tmp_path / "export").mkdir()
    assert main(["report", str(tmp_path)]) == 0
    title, *lines, path = capsys.readouterr().out.splitlines()
    assert (title, path) == (f"SUMMARY of {tmp_path}", str(tmp_path / "report.html"))
    rows = dict(re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines)
    assert rows == {
        "loss": "7.000 at step 1, 5.000 at the end (mean of its 3 steps)",
        "held-out loss": "7.500 at step 0, 4.250 at step 3",
        "training": "steps 1 to 3 in 6 s, 1.50 epochs",
        "tokens/s": "2,000 (median step, all processes)",
        "peak memory": "1.25 GiB (largest process)",
        "strategy": "ddp.yaml, 2 processes on 4 CPU cores",
        "model": str(tmp_path / "export"),
    }


@pytest.mark.parametrize(
    ("num_steps", "loss", "training"),
    [
        (1, "1.000 at step 1", "step 1 in"),
        (10, "1.000 at step 1, 5.500 at the end (mean of its 10 steps)", "steps 1 to 10 in"),
        (11, "1.000 at step 1, 6.500 at the end (mean of the last 10 steps)", "steps 1 to 11 in"),
    ],
)
def test_report_says_last_only_of_a_part_of_the_steps(num_steps, loss, training, tmp_path, in_root, capsys):
    lines = [
        {"step": step, "epoch": 0.1, "loss": step, "step_seconds": 2.0, "tokens_per_second": 1000.0}
        for step in range(1, num_steps + 1)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split(maxsplit=1)[1] == loss and rows[2].split(maxsplit=1)[1].startswith(training)


def test_chat_continues_a_prompt_with_the_saved_model(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<end>", "def", "return"]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<end>")),
        eos_token="<end>",
        pad_token="<end>",
    )
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=3, eos_token_id=0, pad_token_id=0, bos_token_id=None, **sizes))
    # A model by hand: the layer adds nothing, so the head sees the last token alone; def -> return -> <end>.
    weights = model.state_dict()
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name or "embed" in name or "lm_head" in name:
            weight.zero_()
    for direction, (token, following) in enumerate([(1, 2), (2, 0)]):
        weights["model.embed_tokens.weight"][token, direction] = 1.0
        weights["lm_head.weight"][following, direction] = 1.0
    tokenizer.save_pretrained(tmp_path / "export")
    model.save_pretrained(tmp_path / "export")
    answer = cookbook("chat", str(tmp_path), "--prompt", "def")
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "--- prompt\ndef\n--- answer\nreturn\n"


def test_schema_on_disk_is_the_one_of_the_models():
    written = (ROOT / "recipes/schema.json").read_text()
    assert written == json.dumps(recipe_schema(), indent=2) + "\n", "run cookbook schema"


def test_every_key_is_described_in_the_schema():
    """An editor shows it over the key, and the site on the key's page."""
    schema = json.loads((ROOT / "recipes/schema.json").read_text())
    silent = [
        f"{part.get('title')}.{key}"
        for part in (schema, *schema["$defs"].values())
        for key, value in part.get("properties", {}).items()
        if not value.get("description") and "const" not in value
    ]
    assert silent == []


@pytest.mark.parametrize("command", OF_THE_REPOSITORY, ids=" ".join)
def test_a_page_of_the_repository_is_written_in_no_other_folder(command, tmp_path, monkeypatch, capsys):
    for name in ("recipes", "docs"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert re.fullmatch(r"\S+ is a page of the repository, .*; write the command there\n", capsys.readouterr().err)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_launch_tells_broken_rows_before_any_process_starts(tmp_path: Path) -> None:
    data = tmp_path / "mine.jsonl"
    data.write_text('{"text": "fine"}\n{"text": ""}\n')
    answer = cookbook_without_torch("launch", "recipes/quickstart.yaml", "--set", f"data.train={data}")
    assert answer.returncode == 2
    assert f"{data}:2: empty text" in answer.stderr and "Traceback" not in answer.stderr
    assert "accelerate launch" not in answer.stdout


def test_a_recipe_for_gpus_on_a_machine_without_says_what_it_takes_and_what_to_do() -> None:
    done = cookbook_without_torch("launch", "recipes/qwen25_7b/sft.yaml")
    assert done.returncode == 2 and not done.stdout
    assert "needs 4 GPUs of 80 GB" in done.stderr
    assert "cookbook rehearse recipes/qwen25_7b/sft.yaml" in done.stderr
    assert "accelerate launch --config_file accelerate_configs/zero3.yaml" in done.stderr


def test_preview_shows_samples_of_the_quickstart() -> None:
    done = cookbook("preview", "--samples", "1")
    assert done.returncode == 0, done.stderr
    assert "--- sample" in done.stdout and "\u27e6" in done.stdout and "steps per epoch" in done.stdout


@pytest.mark.parametrize("command", OF_THE_REPOSITORY, ids=" ".join)
def test_a_file_that_cannot_be_written_is_named_without_a_traceback(command, monkeypatch, in_root, capsys):
    def refuse(path: Path, *_, **__) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(os, "replace", refuse)
    assert main(command) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"\S+: cannot be written \(Read-only file system\); use a folder that you can write to\n", said)


def test_a_full_disk_behind_a_file_is_not_taken_for_the_output(monkeypatch, in_root, capfd):
    def refuse(*_, **__) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # as of a write to a file that is open

    monkeypatch.setattr(os, "replace", refuse)
    assert main(["schema"]) == 2
    assert capfd.readouterr().err.startswith("a file: cannot be written (No space left on device); make room")


@pytest.mark.parametrize("command", [["--version"], ["check", "--help"]], ids=" ".join)
def test_a_full_disk_behind_stdout_is_an_error_of_one_line(command):
    with open("/dev/full", "w") as full:
        answer = subprocess.run(
            [sys.executable, "-m", "cookbook", *command], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert answer.returncode == 2
    assert (
        answer.stderr
        == "the output: cannot be written (No space left on device); make room, or write it to another disk\n"
    )


def test_ctrl_c_while_a_command_is_imported_ends_it_quietly():
    interrupted = """
import runpy, sys
class Interrupt:
    def find_spec(name, *_):
        if name == "cookbook.commands.cli":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt)
runpy.run_module("cookbook", run_name="__main__", alter_sys=True)
"""
    answer = run(sys.executable, "-c", interrupted)
    assert (answer.returncode, answer.stdout, answer.stderr) == (130, "", "")


def test_letters_that_the_locale_lacks_end_no_command(tmp_path):
    recipe = tmp_path / "große.yaml"
    recipe.write_text((ROOT / "recipes/quickstart.yaml").read_text())
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    answer = cookbook("check", str(recipe), **plain)
    assert answer.returncode == 0 and ".yaml: fine under" in answer.stdout, answer.stderr


@pytest.mark.parametrize(("folder", "why"), [("/nope", "no such folder"), ("docs", "no manifest.json in it")])
@pytest.mark.parametrize("command", ["check", "launch"])
def test_a_checkpoint_to_resume_from_that_is_not_there_is_a_mistake(command, folder, why, in_root, capsys, monkeypatch):
    monkeypatch.setattr(launch, "run_child", None)
    assert main([command, "recipes/quickstart.yaml", "--set", f"run.resume={folder}"]) == 2
    assert f"run.resume is '{folder}': {why}; write never, auto, or the folder of a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--processes", "3"], "which has 2 GPUs"),
        (["--machines", "2", "--first", "x"], "--machine is missing"),
        (["--set", "seed=x"], "seed is 'x'"),
    ],
    ids=["processes", "machines", "recipe"],
)
def test_mistakes_are_reported_before_simulated_gpus_are_compiled(arguments, expected, in_root, monkeypatch, capsys):
    monkeypatch.setattr(launch.simulated_gpus, "build", None)
    monkeypatch.setattr(launch.simulated_gpus, "problem", lambda: None)
    assert main(["launch", QUICKSTART, "--simulate-gpus", "2", *arguments]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["export", "x", "--dtype", "fp99"], "--dtype: 'fp99' is not one of 'fp32', 'bf16', 'fp16', 'as-is'\n"),
        (["rehearse", "recipes/quickstart.yaml", "--on", "tpu"], "--on: 'tpu' is not one of 'gpus', 'cpu'\n"),
    ],
    ids=["dtype", "on"],
)
def test_a_choice_that_there_is_not_is_one_line(command, expected, in_root, capsys):
    assert main(command) == 2
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("command", [["train.py"], ["-m", "cookbook", "check"]], ids=["train.py", "cookbook"])
def test_a_python_without_the_libraries_is_answered_with_what_to_do_first(command):
    without = [sys.executable, "-S"]  # no site-packages
    done = subprocess.run([*without, *command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"\S+ has no \w+; first: source .venv/bin/activate \(docs/install.md\)\n", done.stderr)
