"""A page about a run, or about several: one HTML file with curves as SVG, without scripts and without a network."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from itertools import pairwise
from typing import Any

from cookbook.commands.report import hardware_problems
from cookbook.commands.report.summary import with_earlier
from cookbook.commands.shared import html_page
from cookbook.commands.shared.history import History
from cookbook.commands.shared.html_page import Line, beginning, figure, grid, legend, page_text, table
from cookbook.config.effects import effect_of
from cookbook.system.files import flatten
from cookbook.system.hardware import GIB
from cookbook.system.record_files import SAMPLES

TITLES = {
    "reward": "Mean reward of a round",
    "kl_sampler_trainer": "Divergence of the trained weights from the sampler",
    "loss": "Loss",
    "learning_rate": "Learning rate",
    "grad_norm": "Gradient norm",
    "tokens_per_second": "Tokens per second, all processes",
    "step_seconds": "Seconds a step",
    "data_seconds": "Seconds that a step waited for its batch",
    "eval_seconds": "Seconds of evaluation before a step",
    "save_seconds": "Seconds that a save took before a step",
    "mfu": "Model FLOPs utilization",
    "peak_memory_gib": "Peak memory, GiB, largest process",
}
"""Titles of the curves of every run, in their order on the page; the metrics of an objective follow by their names."""
HARDWARE = {
    "busy_percent": "Busy, percent of the time",
    "memory_gib": "Memory in use, GiB",
    "celsius": "Temperature, degrees Celsius",
    "watts": "Power, watts",
    "clock_mhz": "Clock, MHz",
    "nvlink_mb_s": "Sent over NVLink, MB/s",
    "pcie_sent_mb_s": "Sent over PCIe by the GPU, MB/s",
    "pcie_received_mb_s": "Received over PCIe by the GPU, MB/s",
    "disk_read_mb_s": "Read from disks, MB/s",
    "disk_write_mb_s": "Written to disks, MB/s",
    "network_mb_s": "Sent over the network, MB/s",
}
"""Titles of the curves where monitor.jsonl is."""
POSITIONS = ("step", "epoch", "num_tokens", "round")
MOST_SAMPLES = 12
"""Continuations of one prompt."""


def run_page(run: History, summary: Iterable[tuple[str, str]]) -> str:
    """The page of one run.

    Args:
        summary: rows of name and value for its head.
    """
    marks = [event["step"] for event in run.events if event.get("event") in ("skip", "gradient")]
    starts = [event["step"] for event in run.events if event.get("event") == "start" and event["step"]]
    charts = []
    for i, key in enumerate(_keys([run])):
        lines = _lines_of(run, key, _steps)
        charts.append(_chart(key, lines, has_legend=len(lines) > 1, marks=marks, starts=starts, number=i))
    body = [table(("", ""), [("state", run.state.words), *summary]), "<h2>Curves</h2>", grid(charts)]
    if starts or marks:
        red = "Red: a step was skipped, or its gradient was unusual; see the events."
        body.append(f'<p class="soft">Dotted: the run was started again. {red}</p>')
    if run.monitor:
        body += ["<h2>Hardware</h2>", *_hardware(run)]
    if memory := list(_memory(run)):
        body += ["<h2>Memory</h2>", grid(memory)]
    if run.samples:
        of_rounds = [line for line in run.samples if line.get("round") is not None]
        body += ["<h2>Samples</h2>", _samples_of_rounds(of_rounds) if of_rounds else _samples(run.samples)]
    body += ["<h2>Events</h2>", table(("time", "step", "event", ""), _event_rows(run))]
    rows = [(key, _shown(value), _source(run, key)) for key, value in run.settings.items()]
    body += ["<h2>Settings</h2>", table(("key", "value", "from"), rows)]
    return page_text("report", f"Run {run.folder}", body)


def _samples(lines: Sequence[dict[str, Any]]) -> str:
    """Each prompt with its continuations: the first, and the newest."""
    by_prompt: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        by_prompt.setdefault(str(line.get("prompt")), []).append(line)
    rows = []
    for prompt, of_prompt in by_prompt.items():
        shown = of_prompt if len(of_prompt) <= MOST_SAMPLES else [of_prompt[0], *of_prompt[1 - MOST_SAMPLES :]]
        rows += [(prompt, str(line["step"]), str(line.get("completion"))) for line in shown]
    left_out = "" if len(rows) == len(lines) else f'<p class="soft">{SAMPLES} has {len(lines) - len(rows)} more.</p>'
    return table(("prompt", "step", "continuation"), rows) + left_out


def _samples_of_rounds(lines: Sequence[dict[str, Any]]) -> str:
    """Answers by round: those of the first, and of the newest."""
    numbers = sorted({line["round"] for line in lines})
    shown = numbers if len(numbers) <= MOST_SAMPLES else [numbers[0], *numbers[1 - MOST_SAMPLES :]]
    rows = [
        (str(line["round"]), str(line["prompt"]), str(line["completion"]), _reward_words(line))
        for line in lines
        if line["round"] in shown
    ]
    where = '<p class="soft">The folder rounds has all answers, each with its tokens.</p>'
    return table(("round", "prompt", "answer", "reward"), rows) + where


def _reward_words(line: dict[str, Any]) -> str:
    return f"{line['reward']:g}" if line.get("reward") is not None else ""


def _hardware(run: History) -> Iterator[str]:
    """Yield the list of hardware problems, and the monitor's curves by minutes."""
    problems = hardware_problems.findings(run) or ["Nothing to complain of."]
    yield f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in problems)}</ul>"
    measured, charts = hardware_problems.series(run), []
    for i, (key, title) in enumerate(HARDWARE.items()):
        lines = [Line(name=who, points=of, ink=j) for j, (who, of) in enumerate(measured.get(key, {}).items())]
        if lines:
            charts.append(_chart(f"{title}, by minutes", lines, has_legend=True, number=f"h{i}"))
    yield grid(charts)


def _memory(run: History) -> Iterator[str]:
    """Yield a chart of the measured GPU memory over the parts of the forecast."""
    parts = {name: size / GIB for name, size in run.record.get("forecast", {}).get("parts", {}).items() if size}
    measured = {who: of for who, of in hardware_problems.series(run).get("memory_gib", {}).items() if who != "CPU"}
    if parts and measured:
        who = max(measured, key=lambda rank: max(value for _, value in measured[rank]))
        ends = [measured[who][0][0], measured[who][-1][0]]
        areas = _stacked({f"forecast: {name}": [size, size] for name, size in parts.items()}, ends)
        line = Line(name=f"measured, {who}, which has most", points=measured[who], ink=len(areas))
        moment = run.record["forecast"].get("moment", "a step")
        title = f"GPU memory in use, GiB, by minutes, over the forecast of {moment}"
        yield _chart(title, [*areas, line], has_legend=True, number="m")


def _stacked(sizes: dict[str, list[float]], places: Sequence[float]) -> list[Line]:
    """Areas, each on those before it."""
    floor, areas = [0.0] * len(places), []
    for ink, (name, of) in enumerate(sizes.items()):
        top = [low + size for low, size in zip(floor, of, strict=True)]
        areas.append(Line(name=name, points=list(zip(places, top, strict=True)), ink=ink, floor=floor))
        floor = top
    return areas


def compare_page(runs: Sequence[History], loss_difference: str | None) -> str:
    """The page that lays runs over one another.

    Args:
        loss_difference: the largest one, in words.
    """
    names = [str(run.folder) for run in runs]
    rows = differences(runs)
    body = [
        legend(enumerate(names)),
        "<h2>What differs</h2>",
        table(("key", *names, "affects"), rows) if rows else "<p>Nothing differs.</p>",
        f"<p>{escape(loss_difference)}</p>" if loss_difference else "",
    ]
    for letter, title, places in (("s", "By step", _steps), ("t", "By tokens trained on", _tokens)):
        groups: dict[tuple[str, str], list[Line]] = {}
        for key in _keys(runs):
            for ink, run in enumerate(runs):
                for line in _lines_of(run, key, places):
                    of_set = line.name if line.has_dots else ""
                    groups.setdefault((key, of_set), []).append(replace(line, ink=ink, is_dashed=ink > 0))
        charts = [
            _chart(key, lines, of_set, number=f"{letter}{i}") for i, ((key, of_set), lines) in enumerate(groups.items())
        ]
        body += [f"<h2>{title}</h2>", grid(charts)]
    return page_text("report", f"{len(runs)} runs", body)


def differences(runs: Sequence[History]) -> list[tuple[str, ...]]:
    """Rows of what differs: key, the value of each run, and what it affects."""
    facts = [_facts(run) for run in runs]
    rows: list[tuple[str, ...]] = []
    for key in dict.fromkeys(key for of_run in facts for key in of_run):
        values = [_shown(of_run.get(key)) for of_run in facts]
        if len(set(values)) > 1:
            is_machine = key == "device" or key.startswith("versions.")
            effect = "speed" if key == "processes" else "rounding" if is_machine else effect_of(key)
            rows.append((key, *values, effect))
    return rows


def _facts(run: History) -> dict[str, Any]:
    """The settings with the strategy in effect, number of processes, device and versions."""
    strategy, hardware = run.record.get("strategy", {}), run.record.get("hardware", {})
    facts = {key: value for key, value in run.settings.items() if key != "run.output_dir"}
    facts |= {"strategy": with_earlier(strategy.get("file"), run), "processes": strategy.get("processes")}
    return facts | {"device": hardware.get("gpu", "CPU")} | flatten({"versions": run.record.get("versions", {})})


def _keys(runs: Iterable[History]) -> list[str]:
    """Keys that have a curve: the numbers of training lines, and of rounds."""
    lines = (line for run in runs for line in (*run.rounds, *run.steps))
    keys = {key: None for line in lines for key in line if key not in POSITIONS}
    return [key for key in TITLES if key in keys] + [key for key in keys if key not in TITLES]


def _steps(run: History) -> Callable[[dict[str, Any]], float]:
    return lambda line: line["step"]


def _tokens(run: History) -> Callable[[dict[str, Any]], float]:
    """From a line to the tokens trained on up to its step."""
    total, tokens = 0, {}
    for line in run.lines:
        total += line.get("num_tokens", 0)
        tokens[line["step"]] = total
    return lambda line: tokens[line["step"]]


Places = Callable[[History], Callable[[dict[str, Any]], float]]


def _lines_of(run: History, key: str, places: Places) -> list[Line]:
    """The curve of a key in training, and on each evaluation set."""
    place = places(run)
    training = [(place(line), line[key]) for line in run.lines if line.get(key) is not None]
    lines = [Line(name="training", points=training)]
    for i, of_set in enumerate(dict.fromkeys(line.get("eval_set", "") for line in run.evaluations), 1):
        chosen = [line for line in run.evaluations if line.get("eval_set", "") == of_set]
        points = [(place(line), line[f"eval_{key}"]) for line in chosen if line.get(f"eval_{key}") is not None]
        if points:
            lines.append(Line(name=f"held out{of_set and f': {of_set}'}", points=points, has_dots=True, ink=i))
    forecast = run.record.get("forecast")
    if key == "peak_memory_gib" and forecast and training:
        ends = [(training[0][0], forecast["allocated"] / GIB), (training[-1][0], forecast["allocated"] / GIB)]
        lines.append(Line(name="forecast", points=ends, ink=1, is_dashed=True))
    return lines


def _chart(
    key: str,
    lines: Sequence[Line],
    of_set: str = "",
    *,
    has_legend: bool = False,
    number: int | str,
    marks: Sequence[int] = (),
    starts: Sequence[int] = (),
) -> str:
    title = TITLES.get(key, key) + (f", {of_set}" if of_set else "")
    names = legend((line.ink, line.name) for line in lines) if has_legend else ""
    return figure(title, html_page.curves(lines, f"c{number}-", marks, starts), names)


BEGINNING = beginning("report")


def _event_rows(run: History) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for event in run.events:
        details = {key: value for key, value in event.items() if key not in ("event", "step", "time") and value}
        when = datetime.fromtimestamp(event.get("time", 0)).strftime("%Y-%m-%d %H:%M:%S")
        words = ", ".join(f"{key.replace('_', ' ')} {_in_event(value)}" for key, value in details.items())
        rows.append((when, str(event["step"]), str(event.get("event")), words))
    return rows


def _in_event(value: Any) -> str:
    match value:
        case dict():  # shares by name
            return ", ".join(f"{share:.0%} {name}" for name, share in value.items())
        case list():
            return ", ".join(map(str, value))
        case float():
            return f"{value:.4g}"
    return str(value)


def _source(run: History, key: str) -> str:
    """Name the place that set a value: --set, the recipe, or the default."""
    command = run.record.get("command", [])
    assigned = [word.partition("=")[0] for flag, word in pairwise(command) if flag == "--set"]
    written = run.record.get("written_settings")
    if any(key == name or key.startswith(f"{name}.") for name in assigned):
        return "--set"
    if written is None:
        return "not recorded"
    is_written = any(key == name or key.startswith(f"{name}.") or name.startswith(f"{key}.") for name in written)
    return "recipe" if is_written else "default"


def _shown(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
