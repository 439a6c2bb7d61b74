"""The commands of `python -m cookbook`; the Makefile gives each a shorter name.

A command is a function from its arguments to an exit code; its docstring is its help. All load without torch, so that
a mistake in a file is reported in a moment; what needs torch is imported when its command runs.
"""

import errno
import json
import os
import platform
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import yaml
from typer import Exit, Option, Typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from cookbook.commands.arguments import QUICKSTART, RECIPE, AsJson, Assignments, StrategyFile
from cookbook.commands.chat import chat, sample
from cookbook.commands.convert import convert
from cookbook.commands.evaluate import evaluate
from cookbook.commands.init import init
from cookbook.commands.launch import check, explain, launch
from cookbook.commands.plan import plan
from cookbook.commands.rehearse import rehearse
from cookbook.commands.results import checkpoint, compare, export, merge, report, summary
from cookbook.commands.submit import submit
from cookbook.commands.tune import tune
from cookbook.commands.watch import watch
from cookbook.commands.why_slow import why_slow
from cookbook.config.recipe import recipe_schema
from cookbook.config.strategy import load_strategy
from cookbook.planning.combinations import page as combinations_page
from cookbook.planning.library import PAGE, library_page
from cookbook.planning.plan import load_pair
from cookbook.system.console import show_all_letters
from cookbook.system.files import RecipeError, cannot_write
from cookbook.system.shipped import HOME, short

CITATION = HOME / "CITATION.cff"
UNWRITABLE = (errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a place that may not be written, or is full; the first also of one that may not be read."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command. Returns its exit code: 0, or 2 for what the user can fix in a file or on the command line."""
    code = 0
    show_all_letters()
    try:
        try:
            code = app(arguments, prog_name="cookbook")
        except SystemExit as end:  # as typer always ends
            code = int(end.code or 0)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        if error.filename is None:  # as of a write to a file that is open
            what = "a file" if _takes_output() else "the output"
            print(cannot_write(what, error, "make room, or write it to another disk"), file=sys.stderr)
        elif os.path.exists(error.filename) and not os.access(error.filename, os.R_OK):
            print(f"{error.filename}: cannot be read ({error.strerror})", file=sys.stderr)
        else:
            print(cannot_write(error.filename, error), file=sys.stderr)
        return 2
    return code


def _takes_output() -> bool:
    """Whether stdout takes an empty line; else it is closed."""
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
        if args[0] == "train":
            raise RecipeError("train is a target of make; the command is launch")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> None:
        try:
            ctx.exit(super().invoke(ctx))
        except RecipeError as error:
            print(short(str(error)), file=sys.stderr)
            ctx.exit(2)
        except TyperException as error:
            print(_in_a_line(error), file=sys.stderr)
            ctx.exit(2)
        except BrokenPipeError:  # whoever read has seen enough, as in `... | head`
            _close_stdout()
            ctx.exit(141)


def _in_a_line(error: Any) -> str:
    """A mistake on the command line, with what to write instead, where typer would print its usage."""
    context: Any = getattr(error, "ctx", None)
    param: Any = getattr(error, "param", None)
    if param is None:  # no such command or option, or an argument too many
        rest = f" ({context.command_path} -h shows what there is)" if context else ""
        return f"{error.format_message().removesuffix('.')}{rest}"
    is_option = param.param_type_name == "option"
    place = param.opts[0] if is_option else param.metavar
    if error.message:
        what = re.sub("^Value error, |, unable to parse .*", "", error.message).replace("Input should be", "write")
        return f"{place}{' ' if what.startswith('is ') else ': '}{what.rstrip('.')}"
    needed = [one.metavar for one in context.command.params if one.param_type_name == "argument" and one.required]
    words = [place, param.metavar] if is_option else [context.command_path, *needed]
    return f"{place} is missing; write {' '.join(words)}"


def _show_versions(asked: bool) -> None:
    if asked:
        print("cookbook", yaml.safe_load(CITATION.read_text(encoding="utf-8"))["version"])
        print("python", platform.python_version())
        for package in ("torch", "accelerate", "deepspeed", "transformers"):
            print(package, next((one.version for one in metadata.distributions(name=package)), "is not installed"))
        raise Exit


def cookbook(
    version: Annotated[bool, Option("--version", callback=_show_versions, is_eager=True, help="show versions")] = False,
) -> None:
    """Train a recipe under a strategy."""


def preview(path: Annotated[Path, RECIPE] = QUICKSTART, *, samples: int = 3, assignments: Assignments) -> int:
    """Show samples as the model will see them, and their lengths."""
    if samples < 0:
        raise RecipeError(f"--samples is {samples}; it must be at least 0")
    from cookbook.commands.preview import preview

    return preview(path, assignments, samples)


def doctor(
    path: Annotated[Path | None, RECIPE] = None,
    *,
    strategy: StrategyFile = None,
    as_json: AsJson = False,
    deadline: Annotated[float, Option(help="in seconds")] = 60.0,
) -> int:
    """Is this machine ready: 0 yes, 1 with warnings, 2 no."""
    from cookbook.commands.doctor import examine
    from cookbook.commands.doctor import report as print_report

    start = time.monotonic()
    recipe, loaded = None, None
    if path is not None:
        recipe, loaded = load_pair(path, strategy_path=strategy)
    elif strategy is not None:
        loaded = load_strategy(strategy)
    return print_report(examine(recipe, loaded, path, deadline), time.monotonic() - start, as_json=as_json)


def library() -> int:
    """Write recipes/README.md from the recipes."""
    return _write(PAGE, library_page())


def combinations() -> int:
    """Write docs/combinations.md: what is refused, and why."""
    return _write(Path("docs/combinations.md"), combinations_page())


def schema() -> int:
    """Write recipes/schema.json, for editors to check recipes."""
    return _write(Path("recipes/schema.json"), json.dumps(recipe_schema(), indent=2) + "\n")


def _write(path: Path, text: str) -> int:
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0


# Without markup, help is plain text, and rich is not loaded.
app = Typer(
    cls=_Commands,
    callback=cookbook,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    init,
    launch,
    submit,
    check,
    explain,
    watch,
    summary,
    report,
    compare,
    why_slow,
    chat,
    sample,
    evaluate,
    preview,
    plan,
    tune,
    rehearse,
    merge,
    export,
    checkpoint,
    doctor,
    convert,
):
    app.command()(command)
for page in (library, combinations, schema):
    app.command()(page)
