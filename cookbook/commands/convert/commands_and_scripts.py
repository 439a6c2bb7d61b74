"""Input in the place of a file of settings: a command, a program, pickled arguments, a folder."""

import ast
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile, islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from cookbook.system.files import Document, KeyPath, RecipeError, read_document, value_of_word

SETTINGS = (".yaml", ".yml", ".json")
SHELL = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".pbs", ".lsf")
ARGUMENTS = (
    "a program is not run, and a pickle never opened: put `print(args.to_json_string())` before `trainer.train()`, run"
    " it, and convert what it prints, as a .json file"
)
OF_MACHINE, MACHINES = ("nproc_per_node", "num_gpus"), ("nnodes", "num_nodes")
"""Flags of torchrun's and DeepSpeed's launchers; accelerate's `num_processes` are those of all machines."""
CONFIGS = ("config", "config_file")
MAX_FILES = 8
"""Files of a folder that are named."""


@dataclass
class Command:
    """A command line that trains, in settings."""

    document: Document
    """The flags behind the script's name."""
    launcher: dict[str, Any]
    """The flags before it."""
    program: str
    """The script, as `train.py`, or the command, as `trl sft`."""
    others: list[tuple[int, str]]
    """Further commands with flags, each with its line."""
    open: list[str] = field(default_factory=list)
    """Variables behind the script's name that are no flag's value, and that nobody has set."""


class Settings(NamedTuple):
    """The settings in a file that people have."""

    documents: list[Document]
    processes: int | None = None
    """Their number in a command."""
    notes: Sequence[str] = ()
    """Parts of a script that are not carried over."""
    program: str = ""
    """The program that a command runs."""
    launched_with: Document | None = None
    """Flags of accelerate's launcher that mean what a key of its configuration file does."""


def read_settings(path: Path, is_known: Callable[[Path], bool]) -> Settings:
    """The settings in a file that people have.

    Args:
        is_known: whether a file of a folder can be converted.

    Raises:
        RecipeError: it has no settings; the message says where they are.
    """
    if path.is_dir():
        raise RecipeError(f"{path}: a folder; convert one of its files at a time: {_settings_in(path, is_known)}")
    if path.suffix in SETTINGS or not path.is_file():
        return Settings([read_document(path, takes_last=True)])
    start = path.read_bytes()[:4096]
    if path.suffix in (".py", ".ipynb") or b"\0" in start or start[:1] == b"\x80":
        raise RecipeError(f"{path}: {ARGUMENTS}")
    command = read_command(str(path), path.read_text(encoding="utf-8-sig", errors="replace"))
    if command is None and (path.suffix in SHELL or start[:2] == b"#!"):
        raise RecipeError(
            f"{path}: no command that gives a program flags; convert the file that it reads, or its flags"
        )
    if command is None:
        return Settings([read_document(path, takes_last=True)])
    documents, notes = [command.document], []
    if (config := command.launcher.get("config_file")) is not None:
        if (beside := _beside(path, str(config))).is_file():
            documents.append(read_document(beside, takes_last=True))
        else:
            notes.append(f"--config_file {config} of the launcher: no such file; give it to `convert` beside this one")
    processes, read = _count_processes(command.launcher)
    launched_with = None
    if (precision := command.launcher.get("mixed_precision")) is not None:
        line = command.document.lines[()]
        launched_with = Document(f"{path} (launcher)", {"mixed_precision": precision}, {("mixed_precision",): line})
        read.append("mixed_precision")
    if unread := [f"--{flag}" for flag in command.launcher if flag not in (*read, "config_file")]:
        notes.append(
            f"{', '.join(unread)} of the launcher: not read; what is a strategy's belongs into its file, and a command"
            " of docs/several_machines.md has machines and addresses"
        )
    notes += [f"{path}: {word}: what it has is not in the script" for word in command.open]
    notes += [f"{path}:{line}: {other}: another command, not read" for line, other in command.others]
    return Settings(documents, processes, notes, command.program, launched_with)


def _count_processes(launcher: dict[str, Any]) -> tuple[int | None, list[str]]:
    """The processes on all machines that a launcher's flags start, and the flags that tell; None if they leave it open,
    as a variable does."""
    if type(total := launcher.get("num_processes")) is int:
        return total, ["num_processes"]
    of_machine = next((flag for flag in OF_MACHINE if flag in launcher), None)
    if of_machine is None and "include" in launcher:
        slots = [host.partition(":")[2] for host in str(launcher["include"]).split("@")]  # `host:0,1@other:0,1`
        known = all(re.fullmatch(r"\d+(,\d+)*", places) for places in slots)
        return (sum(len(places.split(",")) for places in slots), ["include"]) if known else (None, [])
    machines = next((flag for flag in MACHINES if flag in launcher), None)
    counts = [launcher[flag] for flag in (of_machine, machines) if flag is not None]
    if of_machine is None or any(type(count) is not int for count in counts):
        return None, [flag for flag in (of_machine,) if flag is not None]
    return math.prod(counts), [flag for flag in (of_machine, machines) if flag is not None]


def read_command(name: str, text: str) -> Command | None:
    """The longest command of a script of a shell that has flags behind the name of a program; None if there is none."""
    variables: dict[str, str] = {}
    commands: list[tuple[list[str], int]] = []
    line_number = 1
    for whole in joined_lines(SEVERAL_LINES.sub(_in_one_line, text)):
        plain = ALL_OF_ARRAY.sub(r"\1", whole.replace("\\\n", " "))
        plain = VARIABLE.sub(lambda match: _value_of(match, variables), plain)
        plain = ARITHMETIC.sub(lambda match: _compute(match[1], match[0], variables), plain)
        is_assignment = _assign(plain, variables)
        try:
            words = shlex.split(re.sub(r"\$\([^)]*\)+", OF_ANOTHER, re.sub(WHICH, r"\1", plain)), comments=True)
            words = list(dropwhile(re.compile(r"\w+=").match, words))
        except ValueError:  # an open quotation
            words = []
        commands += [] if is_assignment else [(part, line_number) for part in _parts(words)]
        line_number += whole.count("\n") + 1
    candidates = [(words, line) for words, line in commands if _has_settings(words, Path(name))]
    if not candidates:
        return None
    words, line = max(candidates, key=lambda candidate: len(candidate[0]))
    others = [
        (place, " ".join(command[: 2 if (end := _script_in(command)) is None else end + 1]))
        for command, place in candidates
        if command is not words
    ]
    script = _script_in(words)
    if script is None:
        return None
    launcher = {key: value[0] if isinstance(value, list) else value for key, value in _flags(words[:script]).items()}
    start = script - (words[script - 1].endswith("trl") and script > 0)  # `trl sft`
    program = " ".join(takewhile(lambda word: not word.startswith("-"), words[start:]))
    behind, unset = _without_unset(words[script + 1 :])
    assigned, behind = _assignments(behind)
    values = _flags(behind)
    config = next((values.pop(flag) for flag in CONFIGS if str(values.get(flag, "")).endswith(SETTINGS)), None)
    positional = takewhile(lambda word: not word.startswith("-"), behind)
    config = config or next((word for word in positional if word.endswith(SETTINGS)), None)
    if config is None and assigned:
        key, text = next(iter(assigned.items()))
        raise RecipeError(
            f"{name}:{line}: {words[script]} takes settings as {key}={text}, which no project of docs/convert.md does"
            " without a file; convert the file that has them all"
        )
    lines: dict[KeyPath, int] = {(key,): line for key in values} | {(): line}
    if config is None:
        return Command(Document(name, values, lines), launcher, program, others, unset) if values or unset else None
    document = read_document(_beside(Path(name), str(config)), takes_last=True)
    for path, value in [*(((key,), value) for key, value in values.items()), *_paths(assigned)]:
        _set(document, path, value)
        document.lines[path], document.inherited[path] = line, name
    return Command(document, launcher, program, others, unset)


def _has_settings(words: list[str], script: Path) -> bool:
    """Return whether a command gives a program flags, assignments, or a file of settings that is there."""
    if any(word.startswith("--") for word in words):
        return True
    if (program := _script_in(words)) is None:
        return False
    assigned, behind = _assignments(words[program + 1 :])
    return bool(assigned) or any(word.endswith(SETTINGS) and _beside(script, word).is_file() for word in behind)


ASSIGNMENT = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)*)=(.*)", re.DOTALL)
"""A word that sets a key in a file: `optimizer.lr=2e-5`, as torchtune's and LLaMA-Factory's commands read them."""


def _assignments(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """The keys that words behind a program set, which no flag takes for its value, and the other words."""
    assigned: dict[str, str] = {}
    others: list[str] = []
    before = ""
    for word in words:
        is_of_flag = before.startswith("--") and "=" not in before
        if not is_of_flag and (assignment := ASSIGNMENT.fullmatch(word)):
            assigned[assignment[1]] = assignment[2]
        else:
            others.append(word)
        before = word
    return assigned, others


def _paths(assigned: dict[str, str]) -> Iterator[tuple[KeyPath, Any]]:
    return ((tuple(dotted.split(".")), value_of_word(text)) for dotted, text in assigned.items())


def _set(document: Document, path: KeyPath, value: Any) -> None:
    section = document.values
    for name in path[:-1]:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section[path[-1]] = value


ARITHMETIC = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
REDIRECTION = re.compile(r"(?:\d|&)?[<>]+&?")
WHICH = r"\$\((?:which|command -v) (\w+)\)"
OF_ANOTHER = "${command}"
"""The output of another command, as a reference that is open."""
COMMENT_IN_QUOTES = re.compile(r"`\s*#[^`]*`")
"""A comment between the lines of one command."""
OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}


def joined_lines(text: str) -> Iterator[str]:
    """The lines of a script, each with those that a backslash adds to it. A comment ends its line and the command, with
    a backslash at its end too."""
    line = ""
    for physical in COMMENT_IN_QUOTES.sub("", text).split("\n"):
        line += (bare := _without_comment(physical))
        if bare.endswith("\\"):
            line += "\n"
        else:
            yield line
            line = ""
    yield line


def _parts(words: list[str]) -> Iterator[list[str]]:
    """The commands in one line, each without where its output goes."""
    part: list[str] = []
    before = ""
    for word in words:
        if word in ("|", "||", "&&", ";", "&"):
            yield part
            part = []
        elif re.fullmatch("<.*>", word) or not (REDIRECTION.match(word) or REDIRECTION.fullmatch(before)):
            part.append(word)  # `<model>` is to be replaced
        before = word
    yield part


def _without_comment(line: str) -> str:
    quote = ""
    for i, letter in enumerate(line):
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "#" and not quote and (i == 0 or line[i - 1].isspace()):
            return line[:i]
    return line


def _compute(text: str, written: str, variables: dict[str, str]) -> str:
    """A sum or product of whole numbers in a shell; as written if it is more than that."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name):
            return int(variables[node.id])
        if isinstance(node, ast.BinOp):
            return int(OPERATIONS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError

    try:
        return str(value(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
        return written


DECLARATION = r"[ \t]*(?:(?:export|local|readonly|declare(?:[ \t]+-\w+)?)[ \t]+)?"
SEVERAL_LINES = re.compile(
    rf'^({DECLARATION}\w+\+?=)("(?:[^"\\]|\\.)*"|\((?:[^()]|\$\([^()]*\))*\))[ \t]*(?:#[^\n]*)?$',
    re.MULTILINE | re.DOTALL,
)
"""A text or an array that a script gives a variable, in one line or in several."""
ALL_OF_ARRAY = re.compile(r'"(\$\{\w+\[@\]\})"')
ASSIGNED = re.compile(rf"{DECLARATION}(\w+)(\+?)=(.*)", re.DOTALL)


def _in_one_line(assignment: re.Match[str]) -> str:
    """An assignment without its line breaks and comments, which stand behind it, so that lines keep their numbers."""
    value = assignment[2]
    lines = value.split("\n") if value[0] == '"' else map(_without_comment, value.split("\n"))
    return assignment[1] + " ".join(line.removesuffix("\\") for line in lines) + "\n" * value.count("\n")


def _assign(line: str, variables: dict[str, str]) -> bool:
    """Keep what a line gives a variable: a word, a text, or an array. What has an open quotation is not known. Return
    whether the line does nothing else."""
    if (assignment := ASSIGNED.fullmatch(line)) is None:
        return False
    name, adds, value = assignment[1], assignment[2], assignment[3].strip()
    is_array = value.startswith("(") and value.endswith(")")
    try:
        words = [value[1:-1]] if is_array else shlex.split(value, comments=True)
        shlex.split(" ".join(words))
    except ValueError:
        variables.pop(name, None)
        return True
    if len(words) > 1:
        return False
    before = f"{variables.get(name, '')}{' ' * is_array}" if adds else ""
    variables[name] = before + "".join(words)
    return True


UNSET = re.compile(r"\$(?:\{\w+\}|[@*])")


def _without_unset(words: list[str]) -> tuple[list[str], list[str]]:
    """The words without variables that are no flag's value, and these."""
    kept: list[str] = []
    unset: list[str] = []
    for word, before in zip(words, ["", *words], strict=False):
        is_value = before.startswith("--") and "=" not in before
        (unset if UNSET.fullmatch(word) and not is_value else kept).append(word)
    return kept, unset


VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-((?:[^{}]|\$\{[^{}]*\})*))?\})")
"""A variable of a shell, with what it is if nobody has set it."""


def _value_of(reference: re.Match[str], variables: dict[str, str]) -> str:
    """The value; of one that the script does not set, the usual one or `${NAME}`, which `references` knows."""
    name, usual = reference[1] or reference[2], reference[3]
    value = variables.get(name)
    if usual is not None and (not value or UNSET.fullmatch(value)):
        return VARIABLE.sub(lambda match: _value_of(match, variables), usual)
    return f"${{{name}}}" if value is None else value


def _script_in(words: list[str]) -> int | None:
    """The place of the program in a command whose flags are a training's: `train.py`, or the last word before them."""
    scripts = [i for i, word in enumerate(words) if word.endswith(".py")]
    if scripts:
        return scripts[0]
    if "-m" in words[:-1]:
        modules = [i + 1 for i, word in enumerate(words[:-1]) if word == "-m"]
        return modules[-1]
    before = words.index("--config") - 1 if "--config" in words else 0  # `tune run --nnodes 1 full_finetune`
    if before > 0 and _is_plain(words[before]) and not words[before - 1].startswith("-"):
        return before
    flag = next((i for i, word in enumerate(words) if word.startswith("--") or word.endswith(SETTINGS)), None)
    plain = [i for i in range(2, len(words)) if _is_plain(words[i]) and _is_plain(words[i - 1])]
    if flag is not None and flag >= 2 and words[0] not in ("accelerate", "torchrun", "deepspeed"):
        return flag - 1
    # `trl sft` behind a launcher's flags
    return next((i for i in plain if words[i + 1 : i + 2] and words[i + 1].startswith("--")), None)


def _is_plain(word: str) -> bool:
    return re.fullmatch(r"[A-Za-z]\w*", word) is not None


def _flags(words: list[str]) -> dict[str, Any]:
    """`--key value`, `--key=value`, `--key a b` and `--key`, by key."""
    values: dict[str, Any] = {}
    key = None
    for word in words:
        if word.startswith("--"):
            key, has_value, text = word[2:].partition("=")
            key = key.replace("-", "_")
            values[key] = value_of_word(text) if has_value else True
        elif key is not None:
            known = values[key]
            values[key] = (
                value_of_word(word)
                if known is True
                else [*(known if isinstance(known, list) else [known]), value_of_word(word)]
            )
    return values


def _beside(path: Path, name: str) -> Path:
    """A path that a command names, from the folder in which it is or one around it, if it is there."""
    folders = (path.parent, *path.resolve().parent.parents)
    return next((folder / name for folder in folders if (folder / name).is_file()), Path(name))


def _settings_in(folder: Path, is_known: Callable[[Path], bool]) -> str:
    """The first files of a folder that can be converted."""
    files = (file for file in sorted(folder.rglob("*")) if file.suffix in SETTINGS and ".git" not in file.parts)
    known = list(islice(filter(is_known, files), MAX_FILES + 1))
    named = ", ".join(map(str, known[:MAX_FILES]))
    return named + ", ..." * (len(known) > MAX_FILES) if known else f"it has none; {ARGUMENTS}"
