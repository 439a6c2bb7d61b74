"""Runs as they go, read from their files in another terminal."""

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

from typer import Option

from cookbook.commands.rounds.rounds_folder import Round, read_answers, summary_of
from cookbook.commands.rounds.shown import answer_words, prompt_words, three_answers
from cookbook.commands.shared.answer_forms import ShownAnswer, WatchAnswer, WatchedRound, WatchedRun
from cookbook.commands.shared.arguments import holds_no_run, positive, run_folder, which_run
from cookbook.commands.shared.for_programs import answer
from cookbook.commands.shared.history import RunState, state_of
from cookbook.system import status
from cookbook.system.console import console, page, printable, say
from cookbook.system.files import RecipeError, refuse
from cookbook.system.record_files import EVENTS, METRICS, ROUNDS, RUN, parse_lines, read_json, read_lines
from cookbook.system.record_forms import Event, Line, Record, damage, read_form
from cookbook.system.screen import step_words

TAIL_BYTES = 65536
"""Bytes at the end of metrics.jsonl that are read each time."""
HEAD = ("run", "state", "step", "mean loss", "held out", "tokens/s", "left")
OF_ROUNDS = ("run", "state", "step", "mean loss", "round", "reward", "tokens/s", "left")
LAST_ROUNDS = 10
"""Rounds whose median time is taken for those that are left."""


def watch(
    folders: Annotated[list[Path], run_folder("run.output_dir of one or more runs")],
    *,
    every: Annotated[float, Option(callback=positive, help="seconds between two looks")] = 2.0,
    as_json: Annotated[bool, Option("--json", help="one look, for programs")] = False,
) -> int:
    """Watch runs live from their files, until all have ended."""
    if missing := [folder for folder in folders if not folder.is_dir()]:
        raise RecipeError([f"{folder}: no such folder; {which_run(folder)}" for folder in missing])
    # Else it would be waited for, as a run that has not begun.
    waiting = [folder for folder in folders if state_of(folder).name == "starting"]
    refuse([mistake for folder in waiting for mistake in holds_no_run(folder)])
    if as_json:
        answer(WatchAnswer(runs=[look(folder) for folder in folders]))
        return 0
    with contextlib.suppress(KeyboardInterrupt):  # ends the watching, not the run
        (_watch_live if console().is_terminal else _watch_plain)(folders, every)
    return 0


def _watch_live(folders: Sequence[Path], every: float) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(console=console(), auto_refresh=False) as live:
        for looks in _looks(folders, every):
            text = page(*_table(looks), indent=0)
            if len(folders) == 1:
                text = f"{_details(folders[0], looks[0])}\n{text}"
            live.update(Text(text), refresh=True)


def _watch_plain(folders: Sequence[Path], every: float) -> None:
    """Print a line for each run whose step or state has changed, and of each new round three answers."""
    shown_rows: dict[Path, tuple[str, ...]] = {}
    shown_rounds: dict[Path, int] = {}
    for looks in _looks(folders, every):
        head, *rows = _table(looks)
        for folder, seen, row in zip(folders, looks, rows, strict=True):
            if shown_rows.get(folder) != row[:4]:
                shown_rows[folder] = row[:4]
                words = ", ".join(f"{name} {cell}" for name, cell in zip(head, row, strict=True) if cell)
                say(printable(words), flush=True)
            if seen.round is not None and seen.round.answers and shown_rounds.get(folder) != seen.round.round:
                shown_rounds[folder] = seen.round.round
                say(page(*_round_rows(seen.round), indent=2), flush=True)


def _looks(folders: Sequence[Path], every: float) -> Iterator[list[WatchedRun]]:
    """The state of all runs, again and again until all have ended."""
    while True:
        looks = [look(folder) for folder in folders]
        yield looks
        if all(seen.has_ended for seen in looks):
            return
        time.sleep(every)


def look(folder: Path) -> WatchedRun:
    """The state and the last numbers of a run."""
    state = state_of(folder)  # before its last lines are read
    of_rounds, lines = _look_at_rounds(folder), _last_lines(folder / METRICS)
    run = folder
    if of_rounds is not None:
        run = Round(folder, of_rounds.round).run
        lines = _with_those_of(run, of_rounds.round, lines)
    steps = [line for line in lines if line.get("loss") is not None]
    evaluations = [line["eval_loss"] for line in lines if line.get("eval_loss") is not None]
    step, last_step = lines[-1]["step"] if lines else 0, read_form(run / RUN, Record)[0].get("max_steps")
    last_step = last_step * of_rounds.num_rounds if last_step and of_rounds is not None else last_step
    speed = [line["tokens_per_second"] for line in steps[-10:] if "tokens_per_second" in line]
    seconds = [line["step_seconds"] for line in steps[-10:] if "step_seconds" in line]
    left = mean(seconds) * (last_step - step) if seconds and last_step else None
    if of_rounds is not None:  # whose sampling is in no step
        left = _seconds_of_rounds(folder, of_rounds)
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
        seconds_left=None if state.has_ended else left,
        price=status.price_so_far(folder, steps),
        round=of_rounds,
    )


def _look_at_rounds(folder: Path) -> WatchedRound | None:
    """The round that trains or, between two, that trained; None: the folder has no rounds."""
    recipe = (read_json(folder / ROUNDS) or {}).get("recipe")
    section = recipe.get("rounds") if isinstance(recipe, dict) else None
    count = section.get("num_rounds") if isinstance(section, dict) else None
    if not isinstance(count, int):
        return None
    started = (number for number in range(count, 0, -1) if Round(folder, number).run.is_dir())
    current = Round(folder, next(started, 0))
    numbers, answers = _read_round(current.samples, current.number, _stamp(current.samples))
    return WatchedRound(
        round=current.number,
        num_rounds=count,
        is_training=current.number > 0 and not current.is_over,
        reward=numbers.get("reward"),
        completion_tokens=numbers.get("completion_tokens"),
        ended=numbers.get("ended"),
        turns=numbers.get("turns"),
        staleness=numbers.get("staleness"),
        kl_sampler_trainer=numbers.get("kl_sampler_trainer"),
        num_answers=numbers.get("num_answers"),
        answers=answers,
    )


def _seconds_of_rounds(folder: Path, seen: WatchedRound) -> float | None:
    """The time for the rounds that are not over, by the median of the last ones, less what the current one has taken.

    A round that was interrupted counts only where there is no other, and then from the start that ended it.
    """
    done = seen.round - seen.is_training
    started = (status.read(folder) or {}).get("started")
    if not done or started is None:
        return None
    numbers = range(max(1, done - LAST_ROUNDS), done + 1)
    ends = [end for number in numbers if (end := _end_of(Round(folder, number).run / EVENTS)) is not None]
    taken = [after - before for before, after in pairwise(ends) if not before < started < after]
    taken = taken or [end - started for end in ends if end > started][:1]
    if not taken:
        return None
    since = max(started, ends[-1])
    return max(0.0, median(taken) * (seen.num_rounds - done) - (time.time() - since))


def _end_of(path: Path) -> float | None:
    """The time at which a run finished; None if its events do not have it."""
    events = [event for event in read_lines(path) if damage(event, Event) is None]
    return next((event["time"] for event in reversed(events) if event["event"] == "finish"), None)


def _stamp(path: Path) -> tuple[int, int] | None:
    """The time and the size of a file, which tell whether it has changed."""
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size


@functools.lru_cache(maxsize=16)
def _read_round(path: Path, number: int, stamp: tuple[int, int] | None) -> tuple[dict[str, Any], list[ShownAnswer]]:
    """The numbers of a round's samples, and three of its answers; none of a file that is not there, or damaged.

    Args:
        stamp: the file is read again when this changes: it may have many megabytes.
    """
    if stamp is None:
        return {}, []
    try:
        lines = read_answers(path)
        answers = [
            ShownAnswer(
                prompt=prompt_words(line),
                answer=answer_words(line, place),
                reward=line["rewards"][place] if "rewards" in line else None,
            )
            for line, place in three_answers(lines)
        ]
        return summary_of(number, lines), answers
    except (RecipeError, KeyError, IndexError, TypeError, ValueError):
        return {}, []


def _with_those_of(run: Path, number: int, lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last lines of all rounds, with those of the run of one, which are written there first."""
    before = next((line["step"] for line in reversed(lines) if line.get("round") == number), None)
    if before is None:
        return lines
    own = [line | {"step": before + line["step"]} for line in _last_lines(run / METRICS)]
    return [line for line in lines if line["step"] <= before] + own


def _table(looks: Sequence[WatchedRun]) -> list[tuple[str, ...]]:
    """The head and the cells of all runs; rounds have columns of their own, where all runs are rounds."""
    if not all(seen.round is not None for seen in looks):
        rows = [_cells(seen) for seen in looks]
        if all(seen.price is None for seen in looks):
            return [HEAD, *rows]
        prices = ["" if seen.price is None else f"{seen.price:.2f}" for seen in looks]
        return [(*HEAD, "price"), *((*row, price) for row, price in zip(rows, prices, strict=True))]
    rows = []
    for seen in looks:
        assert seen.round is not None
        run, state, step, loss, _, speed, left = _cells(seen)
        reward = "" if seen.round.reward is None else f"{seen.round.reward:.3f}"
        rows.append((run, state, step, loss, f"{seen.round.round} of {seen.round.num_rounds}", reward, speed, left))
    return [OF_ROUNDS, *rows]


def _round_rows(seen: WatchedRound) -> list[tuple[str, str]]:
    """The numbers of a round, and its three answers."""
    numbers = [
        "" if seen.reward is None else f"reward {seen.reward:.3f}",
        "" if seen.completion_tokens is None else f"{seen.completion_tokens:.0f} tokens an answer",
        "" if seen.turns is None else f"{seen.turns:.1f} turns",
        "" if seen.ended is None else f"{seen.ended:.0%} ended",
        "" if seen.staleness is None else f"staleness {seen.staleness}",
        "" if seen.kl_sampler_trainer is None else f"kl_sampler_trainer {seen.kl_sampler_trainer:.1g}",
    ]
    doing = "trains" if seen.is_training else "is over" if seen.round else "the first is sampled"
    rows = [(f"round {seen.round} of {seen.num_rounds}", "  ".join([doing, *filter(None, numbers)]))]
    for sample in seen.answers:
        name = "answer" if sample.reward is None else f"reward {sample.reward:g}"
        lines = f"{sample.prompt}\n{sample.answer}".splitlines()
        rows += [(name if i == 0 else "", line[:WIDTH]) for i, line in enumerate(lines[:MOST_LINES])]
        rows += [("", f"... {len(lines) - MOST_LINES} more lines")] if len(lines) > MOST_LINES else []
    return rows


MOST_LINES, WIDTH = 12, 160
"""The lines and columns that a terminal shows of an answer with its prompt."""


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


def _details(folder: Path, seen: WatchedRun) -> str:
    """The header of a run, and the numbers of its last step; of rounds, those of the newest, and three answers."""
    run = folder if seen.round is None else Round(folder, seen.round.round).run
    header, lines = read_form(run / RUN, Record)[0].get("header", {}), _last_lines(run / METRICS)
    last: dict[str, Any] = next((line for line in reversed(lines) if line.get("loss") is not None), {})
    numbers = "  ".join(words for words, _ in step_words(last))
    of_round = [] if seen.round is None else _round_rows(seen.round)
    return page(*((name, str(value)) for name, value in header.items()), ("now", numbers), *of_round, indent=0)


def _last_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        # A long run's file has hundreds of megabytes, and the table needs the last steps only.
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().splitlines()
    return [line for line in parse_lines(lines) if damage(line, Line) is None]  # the first may be cut, too
