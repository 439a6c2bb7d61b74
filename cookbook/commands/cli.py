"""The commands of `cookbook`, which is also `python -m cookbook`.

A command is a function from its arguments to an exit code; its docstring is its help. All load without torch, so that
a mistake in a file is reported in a moment; what needs torch is imported when its command runs.
"""

import errno
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import yaml
from pydantic import ValidationError
from typer import Exit, Option, Typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from cookbook.commands.chat import chat
from cookbook.commands.check.recipe_checks import check
from cookbook.commands.checkpoint import checkpoint
from cookbook.commands.combinations import combinations
from cookbook.commands.convert.conversion import convert
from cookbook.commands.doctor import doctor
from cookbook.commands.evaluate import evaluate
from cookbook.commands.explain import explain
from cookbook.commands.export import export
from cookbook.commands.init import init
from cookbook.commands.launch import launch
from cookbook.commands.library import library
from cookbook.commands.next import next as next_command
from cookbook.commands.plan.planning import plan
from cookbook.commands.preview import preview
from cookbook.commands.rehearse.rehearsal import rehearse
from cookbook.commands.report import report
from cookbook.commands.rounds.loop import rounds
from cookbook.commands.schema import schema
from cookbook.commands.shared.for_programs import answer_program, report_mistakes
from cookbook.commands.shared.former_names import ANSWERS
from cookbook.commands.submit import submit
from cookbook.commands.sweep import sweep
from cookbook.commands.tune import tune
from cookbook.commands.watch import watch
from cookbook.commands.why_slow import why_slow
from cookbook.config.foreign import as_assignment
from cookbook.system import signals
from cookbook.system.console import printable, say, show_all_letters
from cookbook.system.files import RecipeError, cannot_write
from cookbook.system.shipped import HOME, short

CITATION = HOME / "CITATION.cff"
UNWRITABLE = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a place that may not be written, or is full; the first also of one that may not be read."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0; 2 for what the user can fix in a file or on the command line; 75 if
    a scheduler's signal ended it.
    """
    show_all_letters()
    try:
        with answer_program(sys.argv[1:] if arguments is None else arguments):
            return _run(arguments)
    except BrokenPipeError:  # whoever reads JSON has seen enough
        _close_stdout()
        return 141


def _run(arguments: list[str] | None) -> int:
    code = 0
    try:
        try:
            with signals.end_command():
                code = app(arguments, prog_name="cookbook")
        except signals.SignalExit:
            report_mistakes([f"{signals.requested_stop()}: ended; write the command again"])
            return signals.EXIT_CODE
        except SystemExit as end:  # as typer always ends
            code = int(end.code or 0)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        if error.filename is None:  # as of a write to a file that is open
            what = "a file" if _takes_output() else "the output"
            report_mistakes([cannot_write(what, error, "make room, or write it to another disk")])
        elif os.path.exists(error.filename) and not os.access(error.filename, os.R_OK):
            report_mistakes([f"{error.filename}: cannot be read ({error.strerror})"])
        else:
            report_mistakes([cannot_write(error.filename, error)])
        return 2
    return code


def _takes_output() -> bool:
    """Return whether an empty line can be written to stdout; if not, close it."""
    try:
        os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        _close_stdout()
        return False
    return True


def _close_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes


class _Commands(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, *words = args
        if name in ANSWERS:
            raise RecipeError(f"cookbook {name}: write {shlex.join(['cookbook', *ANSWERS[name](words)])}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the groups of commands; typer itself does so only with rich, which `--help` does not load."""
        every: dict[str, Any] = {**self.commands}
        width = max(map(len, every))
        for title in GROUPS:
            rows = [
                (name.ljust(width), command.get_short_help_str(formatter.width - 6 - width))
                for name, command in every.items()
                if command.rich_help_panel == title
            ]
            with formatter.section(title):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> None:
        try:
            with signals.no_exit():
                code = super().invoke(ctx)
            ctx.exit(code)
        except RecipeError as error:
            report_mistakes([printable(short(mistake)) for mistake in error.mistakes])
            ctx.exit(2)
        except TyperException as error:
            report_mistakes(list(map(printable, _in_lines(error))))
            ctx.exit(2)
        except BrokenPipeError:  # whoever read has seen enough, as in `... | head`
            _close_stdout()
            ctx.exit(141)


def _in_lines(error: Any) -> list[str]:
    """Mistakes on the command line, each with what to write instead, where typer would print its usage."""
    context: Any = getattr(error, "ctx", None)
    param: Any = getattr(error, "param", None)
    if param is None:  # no such command or option, or an argument too many
        unknown = re.search(r"extra argument\S* \((.*)\)|No such option: (\S+)", error.format_message())
        words = (unknown[1] or unknown[2]).split() if unknown else []
        answers = list(filter(None, map(as_assignment, words)))
        if answers and context and any("--set" in option.opts for option in context.command.params):
            return answers
        hint = f" ({context.command_path} -h shows what there is)" if context else ""
        return [f"{error.format_message().removesuffix('.')}{hint}"]
    is_option = param.param_type_name == "option"
    place = param.opts[0] if is_option else param.metavar
    if error.message:
        what = re.sub("^Value error, |, unable to parse .*", "", error.message).replace("Input should be", "write")
        if isinstance(error.__cause__, ValidationError):  # whose message has the value for some types alone
            value = repr(error.__cause__.errors()[0]["input"])
            place += f" is {value}" if value not in what else ""
        return [f"{place}{' ' if what.startswith('is ') else ': '}{what.rstrip('.')}"]
    arguments = [param for param in context.command.params if param.param_type_name == "argument" and param.required]
    words = (
        [place, param.metavar] if is_option else [context.command_path, *(argument.metavar for argument in arguments)]
    )
    explained = f" ({param.help})" if param.help else ""
    return [f"{place} is missing; write {' '.join(words)}{explained}"]


def _show_versions(asked: bool) -> None:
    if asked:
        say("cookbook", yaml.safe_load(CITATION.read_text(encoding="utf-8"))["version"])
        say("python", platform.python_version())
        for package in ("torch", "accelerate", "deepspeed", "transformers"):
            say(
                package,
                next((installed.version for installed in metadata.distributions(name=package)), "is not installed"),
            )
        raise Exit


def cookbook(
    version: Annotated[bool, Option("--version", callback=_show_versions, is_eager=True, help="show versions")] = False,
) -> None:
    """Train a recipe under a strategy."""


GROUPS: dict[str, tuple[Callable[..., int], ...]] = {
    "Before a run": (
        library,
        init,
        convert,
        check,
        explain,
        preview,
        plan,
        tune,
        rehearse,
        doctor,
    ),
    "Run": (
        launch,
        sweep,
        rounds,
        submit,
        watch,
        next_command,
    ),
    "After a run": (
        report,
        why_slow,
        chat,
        evaluate,
        export,
        checkpoint,
    ),
}
"""The commands of users, as `cookbook --help` lists them."""

# Without markup, help is plain text, and rich is not loaded.
app = Typer(
    cls=_Commands,
    callback=cookbook,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for title, functions in GROUPS.items():
    for function in functions:
        app.command(rich_help_panel=title)(function)
for function in (combinations, schema):  # write pages of the repository, for maintainers
    app.command(hidden=True)(function)
