"""Screen of a run's main process on stderr: lines that stay and, on a terminal, one below them that changes."""

import sys
import time
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, TextIO

from tqdm import tqdm

from cookbook.system.console import colour, console, page, printable


class Screen:
    """Lines for people. From any thread; only `step` belongs to the thread of the loop."""

    def __init__(self, *, max_steps: int, first_step: int, every: int, file: TextIO | None = None) -> None:
        """
        Args:
            first_step: the step that the run resumes from.
            every: a line stays every so many steps, of the first and of the last one.
            file: default: stderr.
        """
        self.file = sys.stderr if file is None else file
        self.max_steps, self.first_step, self.every = max_steps, first_step, every
        self._began: float | None = None
        self._bar = tqdm(
            total=max_steps,
            initial=first_step,
            disable=None,  # no terminal, no bar: a file would get one line of carriage returns
            dynamic_ncols=True,
            mininterval=0.5,
            bar_format="{bar:12} {desc}",
            leave=False,
            file=self.file,
        )

    def header(self, title: str, rows: Iterable[tuple[str, str]]) -> None:
        """Show the run's settings, as names and values."""
        cells = [(colour(name, "cyan"), value) for name, value in rows]
        self.say(title, "bold")
        tqdm.write(page(*cells, file=self.file), file=self.file)

    def say(self, text: str, style: str = "") -> None:
        """Print a line that stays.

        Args:
            style: of rich, for a terminal.
        """
        tqdm.write(_draw([(text, style)], self.file) if style else printable(text), file=self.file)

    def step(self, line: dict[str, Any], *, hardware: Callable[[], str] = str) -> None:
        """Show a training line of metrics.jsonl.

        Args:
            hardware: what the GPU does, for the line that changes.
        """
        number = line["step"]
        self._began = self._began or time.monotonic()  # after the first step, which compiles and warms up
        is_due = number % self.every == 0 or number in (self.first_step + 1, self.max_steps)
        if self._bar.disable and not is_due:
            return
        width = len(str(self.max_steps))
        parts = [(f"step {number:>{width}}/{self.max_steps}", "cyan"), *step_words(line), (self._end(number), "dim")]
        if is_due:
            tqdm.write(_draw(parts, self.file), file=self.file)
        if self._bar.disable:
            return
        self._bar.set_description_str(_draw([*parts[:-1], (hardware(), "dim"), parts[-1]], self.file), refresh=False)
        self._bar.update(number - self._bar.n)

    def _end(self, number: int) -> str:
        """When the run ends if it continues as since its first step, with its evaluations and saves."""
        done, left = number - self.first_step - 1, self.max_steps - number
        if not done or not left or self._began is None:
            return ""
        seconds = round((time.monotonic() - self._began) / done * left)
        end = datetime.now() + timedelta(seconds=seconds)
        day = "" if end.date() == datetime.now().date() else f"{end:%a %d %b} "
        return f"{timedelta(seconds=seconds)} left, ends {day}{end:%H:%M}"

    def close(self) -> None:
        self._bar.close()


def step_words(line: dict[str, Any]) -> list[tuple[str, str]]:
    """The numbers of a training line, each with its style; those that were not measured are left out."""
    formats = (
        ("loss", "loss {:.4f}", "bold"),
        ("learning_rate", "rate {:.2e}", ""),
        ("grad_norm", "norm {:<5.3g}", ""),
        ("tokens_per_second", "{:>7,.0f} tokens/s", "green"),
        ("peak_memory_gib", "{:.2f} GiB", ""),
        ("mfu", "{:.1%} MFU", "green"),
        ("price", "price {:.2f}", ""),
    )
    return [(form.format(line[key]), style) for key, form, style in formats if line.get(key) is not None]


def _draw(parts: Iterable[tuple[str, str]], file: TextIO) -> str:
    """Words in their styles, in one line; plain where `file` is no terminal."""
    from rich.text import Text

    to = console(file)
    with to.capture() as capture:
        to.print(Text("  ").join(colour(words, style) for words, style in parts if words), end="", soft_wrap=True)
    return capture.get()
