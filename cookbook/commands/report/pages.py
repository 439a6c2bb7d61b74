"""A page about a run, or about several: one HTML file that needs no network."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from cookbook.commands.report import hardware_problems
from cookbook.commands.report.summary import with_earlier
from cookbook.commands.shared.charts import MARKS, SMOOTHING, Chart, Line, chart, script
from cookbook.commands.shared.history import History
from cookbook.commands.shared.html_page import beginning, grid, legend, page_text, side_by_side, table
from cookbook.config.effects import effect_of
from cookbook.system.files import flatten
from cookbook.system.hardware import GIB
from cookbook.system.record_files import SAMPLES


class Quantity(NamedTuple):
    """Title, unit and kind of a curve."""

    title: str
    word: str
    """At its axis."""
    from_zero: bool = True
    """True if its axis has the zero, where there is nothing of it."""


QUANTITIES = {
    "reward": Quantity("Mean reward of a round", "reward", False),
    "kl_sampler_trainer": Quantity("Divergence of the trained weights from the sampler", "nats a token"),
    "loss": Quantity("Loss", "loss", False),
    "learning_rate": Quantity("Learning rate", "learning rate"),
    "grad_norm": Quantity("Gradient norm", "norm"),
    "tokens_per_second": Quantity("Speed, all processes", "tokens/s"),
    "step_seconds": Quantity("Time of a step", "seconds"),
    "data_seconds": Quantity("Time that a step waited for its batch", "seconds"),
    "eval_seconds": Quantity("Time of an evaluation before a step", "seconds"),
    "save_seconds": Quantity("Time that a save took before a step", "seconds"),
    "mfu": Quantity("Model FLOPs utilization", "share"),
    "peak_memory_gib": Quantity("Peak memory, largest process", "GiB"),
    "price": Quantity("Price so far", "price"),
}
"""Curves of every run, in their order on the page; the metrics of an objective follow by their names."""
HARDWARE = {
    "busy_percent": Quantity("Busy", "percent of the time"),
    "memory_gib": Quantity("Memory in use", "GiB"),
    "celsius": Quantity("Temperature", "degrees Celsius"),
    "watts": Quantity("Power", "watts"),
    "clock_mhz": Quantity("Clock", "MHz"),
    "nvlink_mb_s": Quantity("Sent over NVLink", "MB/s"),
    "pcie_sent_mb_s": Quantity("Sent over PCIe by the GPU", "MB/s"),
    "pcie_received_mb_s": Quantity("Received over PCIe by the GPU", "MB/s"),
    "disk_read_mb_s": Quantity("Read from disks", "MB/s"),
    "disk_write_mb_s": Quantity("Written to disks", "MB/s"),
    "network_mb_s": Quantity("Sent over the network", "MB/s"),
}
"""Curves where monitor.jsonl is."""
POSITIONS = ("step", "epoch", "num_tokens", "round")
HELD_OUT = "held out"
"""Beginning of the names of held-out rows' curves."""
MOST_SAMPLES = 12
"""Continuations of one prompt."""


def run_page(run: History, summary: Iterable[tuple[str, str]]) -> str:
    """The page of one run.

    Args:
        summary: rows of name and value for its head.
    """
    marks = {"evaluation": _evaluation_steps(run), "save": _checkpoint_steps(run)}
    unusual = [event["step"] for event in run.events if event.get("event") in ("skip", "gradient")]
    starts = [event["step"] for event in run.events if event.get("event") == "start" and event["step"]]
    charts = []
    for i, key in enumerate(_keys([run])):
        if lines := _lines_of(run, key, _steps):
            events = {"ends": _ends([run], _steps), "marks": marks, "unusual": unusual, "starts": starts}
            charts.append(_chart(_quantity(key), lines, "step", number=i, **events))
    signs = [f"{MARKS[name][1]} {name}" for name, places in marks.items() if places]
    signs += ["dotted: the run was started again"] * bool(starts)
    signs += ["red: a step was skipped, or its gradient was unusual; see the events"] * bool(unusual)
    body = [
        side_by_side(table(("", ""), [("state", run.state.words), *summary]) + SMOOTHING, charts[0]),
        f'<p class="soft">{"; ".join(signs)}</p>' if signs else "",
        grid(charts[1:]),
    ]
    if run.monitor:
        body += ["<h2>Hardware</h2>", *_hardware(run)]
    if memory := list(_memory(run)):
        body += ["<h2>Memory</h2>", grid(memory)]
    if run.samples:
        of_rounds = [line for line in run.samples if line.get("round") is not None]
        body += ["<h2>Samples</h2>", _samples_of_rounds(of_rounds) if of_rounds else _samples(run.samples)]
    body += ["<h2>Events</h2>", table(("time", "step", "event", ""), _event_rows(run))]
    rows = [(key, _describe(value), _source(run, key)) for key, value in run.settings.items()]
    body += ["<h2>Settings</h2>", table(("key", "value", "from"), rows)]
    return page_text("report", f"Run {run.folder}", body, script())


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
    for i, (key, quantity) in enumerate(HARDWARE.items()):
        lines = [Line(name=who, points=of, ink=j) for j, (who, of) in enumerate(measured.get(key, {}).items())]
        if lines:
            charts.append(_chart(quantity, lines, "minutes", number=f"h{i}"))
    yield grid(charts)


def _memory(run: History) -> Iterator[str]:
    """Yield a chart of the measured GPU memory over the parts of the forecast."""
    parts = {name: size / GIB for name, size in run.record.get("forecast", {}).get("parts", {}).items() if size}
    measured = {who: of for who, of in hardware_problems.series(run).get("memory_gib", {}).items() if who != "CPU"}
    if parts and measured:
        who = max(measured, key=lambda rank: max(value for _, value in measured[rank]))
        ends = [measured[who][0][0], measured[who][-1][0]]
        areas = _stack({f"forecast: {name}": [size, size] for name, size in parts.items()}, ends)
        line = Line(name=f"measured, {who}, which has most", points=measured[who], ink=len(areas))
        moment = run.record["forecast"].get("moment", "a step")
        quantity = Quantity(f"GPU memory in use, over the forecast of {moment}", "GiB")
        yield _chart(quantity, [*areas, line], "minutes", number="m")


def _stack(sizes: dict[str, list[float]], places: Sequence[float]) -> list[Line]:
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
    folders, rows, names = [str(run.folder) for run in runs], differences(runs), _short_names(runs)
    sections = []
    for letter, title, across, places in (
        ("s", "By step", "step", _steps),
        ("t", "By tokens trained on", "tokens", _tokens),
    ):
        groups: dict[tuple[str, str], list[Line]] = {}
        for key in _keys(runs):
            for ink, run in enumerate(runs):
                for line in _lines_of(run, key, places):
                    of_set = line.name if line.name.startswith(HELD_OUT) else ""
                    of_run = replace(line, name=names[ink], ink=ink, is_dashed=ink > 0)
                    groups.setdefault((key, of_set), []).append(of_run)
        charts = [
            _chart(_quantity(key, of_set), lines, across, number=f"{letter}{i}", ends=_ends(runs, places))
            for i, ((key, of_set), lines) in enumerate(groups.items())
        ]
        sections.append((title, charts))
    (first, *by_step) = sections[0][1]
    head = [
        legend(enumerate(folders)),
        f"<p><strong>{escape(loss_difference)}</strong></p>" if loss_difference else "",
        "<h2>What differs</h2>",
        table(("key", *folders, "affects"), rows) if rows else "<p>Nothing differs.</p>",
        SMOOTHING,
    ]
    body = [side_by_side("".join(head), first)]
    for title, charts in ((sections[0][0], by_step), *sections[1:]):
        body += [f"<h2>{title}</h2>", grid(charts)]
    return page_text("report", f"{len(runs)} runs", body, script())


def _short_names(runs: Sequence[History]) -> list[str]:
    """The last parts of the folders, or the whole paths if two of them are the same."""
    names = [run.folder.resolve().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def differences(runs: Sequence[History]) -> list[tuple[str, ...]]:
    """Rows of what differs: key, the value of each run, and what it affects."""
    facts = [_facts(run) for run in runs]
    rows: list[tuple[str, ...]] = []
    for key in dict.fromkeys(key for of_run in facts for key in of_run):
        values = [_describe(of_run.get(key)) for of_run in facts]
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
    return [key for key in QUANTITIES if key in keys] + [key for key in keys if key not in QUANTITIES]


def _quantity(key: str, of_set: str = "") -> Quantity:
    quantity = QUANTITIES.get(key, Quantity(key, key, False))
    return quantity._replace(title=f"{quantity.title}, {of_set}") if of_set else quantity


def _evaluation_steps(run: History) -> list[int]:
    """The steps after which the run evaluated."""
    return list(dict.fromkeys(line["step"] for line in run.evaluations))


def _checkpoint_steps(run: History) -> list[int]:
    """The steps of its complete checkpoints."""
    return [event["step"] for event in run.events if event.get("event") == "save"]


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


def _ends(runs: Iterable[History], places: Places) -> tuple[float, float]:
    """The first and the last place of runs."""
    at = [place(line) for run in runs for place in [places(run)] for line in run.lines]
    return min(at), max(at)


def _lines_of(run: History, key: str, places: Places) -> list[Line]:
    """The curve of a key in training, and on each evaluation set. Of the time of a pause, only the steps after one."""
    place = places(run)
    pauses = {"eval_seconds": ("evaluation", _evaluation_steps), "save_seconds": ("save", _checkpoint_steps)}
    name, steps_of = pauses.get(key, ("training", None))
    after = {step + 1 for step in steps_of(run)} if steps_of else None
    training = [
        (place(line), line[key])
        for line in run.lines
        if line.get(key) is not None and (after is None or line["step"] in after)
    ]
    lines = [Line(name=name, points=training, has_dots=after is not None)] if training else []
    for i, of_set in enumerate(dict.fromkeys(line.get("eval_set", "") for line in run.evaluations), 1):
        chosen = [line for line in run.evaluations if line.get("eval_set", "") == of_set]
        points = [(place(line), line[f"eval_{key}"]) for line in chosen if line.get(f"eval_{key}") is not None]
        if points:
            lines.append(Line(name=f"{HELD_OUT}{of_set and f': {of_set}'}", points=points, has_dots=True, ink=i))
    forecast = run.record.get("forecast")
    if key == "peak_memory_gib" and forecast and training:
        ends = [(training[0][0], forecast["allocated"] / GIB), (training[-1][0], forecast["allocated"] / GIB)]
        lines.append(Line(name="forecast", points=ends, ink=1, is_dashed=True))
    return lines


def _chart(quantity: Quantity, lines: Sequence[Line], across: str, *, number: int | str, **events: Any) -> str:
    """A chart by steps, tokens or minutes.

    Args:
        events: ends of the axis, marks, unusual steps and starts.
    """
    title, word, from_zero = quantity
    return chart(
        Chart(
            title=title,
            lines=lines,
            prefix=f"c{number}-",
            across=across,
            along=word,
            from_zero=from_zero,
            **events,
        )
    )


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


def _describe(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
