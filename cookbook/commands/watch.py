"""Runs as they go, read from their files in another terminal."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

from typer import Option

from cookbook.commands.shared.answer_forms import Watched, WatchedRun
from cookbook.commands.shared.arguments import positive, run_folder, which_run
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.history import RunState, state_of
from cookbook.system.console import console, page, say, shown
from cookbook.system.files import RecipeError
from cookbook.system.record_files import METRICS, RUN, parse_lines
from cookbook.system.record_forms import Line, Record, damage, read_form
from cookbook.system.screen import step_words

TAIL_BYTES = 65536
"""Bytes at the end of metrics.jsonl that are read each time."""
HEAD = ("run", "state", "step", "loss", "held out", "tokens/s", "left")


def watch(
    folders: Annotated[list[Path], run_folder("run.output_dir of one or more runs")],
    *,
    every: Annotated[float, Option(callback=positive, help="seconds between two looks")] = 2.0,
    as_json: Annotated[bool, Option("--json", help="one look, for programs")] = False,
) -> int:
    """Watch runs live from their files, until all have ended."""
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise RecipeError([f"{folder}: no such folder; {which_run(folder)}" for folder in missing])
    if as_json:
        answer(Watched(runs=[look(folder) for folder in folders]))
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # ends the watching, not the run
        (_watch_live if console().is_terminal else _watch_plain)(folders, every)
    return 0


def _watch_live(folders: Sequence[Path], every: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(), auto_refresh=False) as live:
        for rows in _looks(folders, every):
            shown = page(HEAD, *rows, indent=0)
            if len(folders) == 1:
                shown = f"{_details(folders[0])}\n{shown}"
            live.update(Text(shown), refresh=True)


def _watch_plain(folders: Sequence[Path], every: float) -> None:
    """Print a line for each run whose step or state has changed."""
    shown_rows: dict[Path, tuple[str, ...]] = {}
    for rows in _looks(folders, every):
        for folder, row in zip(folders, rows, strict=True):
            if shown_rows.get(folder) != row[:4]:
                shown_rows[folder] = row[:4]
                words = ", ".join(f"{name} {cell}" for name, cell in zip(HEAD, row, strict=True) if cell)
                say(shown(words), flush=True)


def _looks(folders: Sequence[Path], every: float) -> Iterator[list[tuple[str, ...]]]:
    """The cells of all runs, again and again until all have ended."""
    while True:
        looks = [look(folder) for folder in folders]
        yield [_cells(seen) for seen in looks]
        if all(seen.has_ended for seen in looks):
            return
        time.sleep(every)


def look(folder: Path) -> WatchedRun:
    """The state and the last numbers of a run."""
    state = state_of(folder)  # before its last lines are read
    lines = _last_lines(folder / METRICS)
    steps = [line for line in lines if line.get("loss") is not None]
    evaluations = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    step, last_step = lines[-1]["step"] if lines else 0, read_form(folder / RUN, Record)[0].get("max_steps")
    speed = [line["tokens_per_second"] for line in steps[-10:] if "tokens_per_second" in line]
    seconds = [line["step_seconds"] for line in steps[-10:] if "step_seconds" in line]
    return WatchedRun(
        run=str(folder),
        state=state.name,
        reason=state.reason,
        has_ended=state.has_ended,
        step=step,
        max_steps=last_step,
        loss=mean(line["loss"] for line in steps[-10:]) if steps else None,
        eval_loss=evaluations[-1] if evaluations else None,
        tokens_per_second=median(speed) if speed else None,
        seconds_left=mean(seconds) * (last_step - step) if seconds and last_step and not state.has_ended else None,
    )


def _cells(seen: WatchedRun) -> tuple[str, ...]:
    """The cells of a run in `HEAD`'s order."""
    left = ""
    if seen.seconds_left is not None:
        minutes, seconds = divmod(round(seen.seconds_left), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
    return (
        seen.run,
        RunState(name=seen.state, reason=seen.reason).words,
        f"{seen.step} of {seen.max_steps}" if seen.max_steps else str(seen.step),
        "" if seen.loss is None else f"{seen.loss:.4f}",
        "" if seen.eval_loss is None else f"{seen.eval_loss:.4f}",
        "" if seen.tokens_per_second is None else f"{seen.tokens_per_second:,.0f}",
        left,
    )


def _details(folder: Path) -> str:
    """The header of a run, and the numbers of its last step."""
    header, lines = read_form(folder / RUN, Record)[0].get("header", {}), _last_lines(folder / METRICS)
    last: dict[str, Any] = next((line for line in reversed(lines) if line.get("loss") is not None), {})
    numbers = "  ".join(words for words, _ in step_words(last))
    return page(*((name, str(value)) for name, value in header.items()), ("now", numbers), indent=0)


def _last_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        # A long run's file has hundreds of megabytes, and the table needs the last steps only.
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().splitlines()
    return [line for line in parse_lines(lines) if damage(line, Line) is None]  # the first may be cut, too
