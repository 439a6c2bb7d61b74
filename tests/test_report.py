"""Protects `report` and `watch`: every number of metrics.jsonl is drawn, nothing is fetched, one script is executed.

python -m pytest -q tests/test_report.py -m "slow or not slow"
"""

import base64
import hashlib
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cookbook.commands.cli import main
from cookbook.commands.report.summary import best_run, why_no_best
from cookbook.commands.shared.answer_forms import BestBy, HeldOut, RunSummary
from cookbook.commands.shared.charts import _limits
from cookbook.commands.shared.history import read_history
from tests.needs import need_chromium

HOSTILE = """<script>alert("1")</script> & $x_1$ '"><img src=x>"""
VOID = {"meta", "br", "img", "link", "input"}


def write_run(folder: Path, *, num_steps: int = 40, rate: float = 2e-5) -> Path:
    """A run that was resumed at step 20 under another strategy, with a skipped step and two evaluation sets."""
    folder.mkdir(parents=True)
    lines: list[dict[str, Any]] = []
    for step in range(num_steps + 1):
        if step:
            loss = None if step == 9 else 4.0 / step
            numbers = {"loss": loss, "grad_norm": loss, "learning_rate": rate, "peak_memory_gib": 41.5}
            speed = {"step_seconds": 2.0, "tokens_per_second": 500.0, "signed_reward": 0.5}
            lines.append({"step": step, "epoch": step / 8, **numbers, "num_tokens": 1000, **speed})
        if step % 10 == 0:
            for name in ("chats", HOSTILE):
                lines.append({"step": step, "eval_set": name, "eval_loss": 5.0 / (step + 1), "eval_num_tokens": 7})
    events = [
        {"event": "start", "step": 0, "time": 1.0, "strategy": "zero3", "processes": 8, "resumed_from": None},
        {"event": "skip", "step": 9, "time": 2.0},
        {"event": "save", "step": 20, "time": 3.0},
        {"event": "start", "step": 20, "time": 4.0, "strategy": "fsdp2", "processes": 4, "resumed_from": HOSTILE},
    ]
    record = {
        "command": ["train.py", "recipes/x.yaml", "--set", f"optim.learning_rate={rate}"],
        "strategy": {"file": "accelerate_configs/fsdp2.yaml", "processes": 4},
        "hardware": {"gpu": "Some GPU", "cores": 8, "device": "cuda"},
        "versions": {"torch": "2.13.0"},
        "forecast": {"allocated": 43 * 2**30},
        "max_steps": num_steps,
        "written_settings": ["model.name_or_path", "optim.learning_rate"],
    }
    status = {"state": "failed", "reason": HOSTILE, "step": num_steps, "pid": 1, "host": "elsewhere"}
    recipe = {"model": {"name_or_path": HOSTILE}, "optim": {"learning_rate": rate, "eps": 1e-8}}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 41, "lo')
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    samples = [{"step": step, "sample": 0, "prompt": HOSTILE, "completion": f"{step} of it"} for step in range(20)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


class Page(HTMLParser):
    """A page whose tags must be closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def charts(self) -> dict[str, dict[str, Any]]:
        """Data that the script reads of each chart, by its title, with the words of the drawing."""
        charts = {}
        for text in re.findall(r"<figure data-chart.*?</figure>", self.text, re.DOTALL):
            figure = re.search(r'data-chart="(.*?)"><h3>(.*?)</h3>', text)
            assert figure is not None
            words = [unescape(word) for word in re.findall(r"<text[^>]*>(.*?)</text>", text)]
            charts[unescape(figure[2])] = json.loads(unescape(figure[1])) | {"words": words, "text": text}
        return charts

    def curves(self) -> list[int]:
        """The number of points of each line."""
        groups = re.findall(r'<g id="c\w+-curve-\d+">\s*<path d="([^"]*)"', self.text)
        return [len(re.findall("[ML]", path)) for path in groups]


def digest(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def offences(page: Page) -> list[str]:
    """Parts that would fetch something, or execute anything but the one script that the page's policy allows."""
    parts = [tag for tag in page.tags if tag in {"img", "link", "iframe", "object", "embed", "base", "form"}]
    for name, value in page.attributes:
        is_reference = name in {"href", "src", "xlink:href", "action"} and not value.startswith("#")
        if is_reference or name.startswith("on") or "://" in value or re.search(r"url\((?!#)", value):
            parts.append(f"{name}={value}")
    scripts = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    allowed = " ".join(map(digest, scripts)) or "'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"
    if page.tags["script"] != len(scripts) or len(scripts) > 1:
        parts.append("scripts of others")
    if policy not in [value for name, value in page.attributes if name == "content"]:
        parts.append("no policy that forbids the rest")
    if any(word in script for script in scripts for word in ("fetch(", "XMLHttp", "import(", "eval(", "innerHTML")):
        parts.append("a script that fetches, or executes texts")
    return parts + re.findall(r"@import|url\([^#]", page.text)


def test_the_page_of_a_run_has_every_number_and_loads_nothing(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run <b>1")
    assert main(["report", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"SUMMARY of {folder}\n") and printed.endswith(f"\n{folder / 'report.html'}\n")
    page = Page(folder / "report.html")
    assert offences(page) == []
    # Loss with its two sets; rate, norm, tokens/s, seconds, memory with its forecast, and the objective's own metric.
    assert page.curves() == [39, 5, 5, 40, 39, 40, 40, 40, 2, 40]
    assert page.tags["svg"] == page.tags["figure"] == 7
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids)) > 50
    text = "".join(page.words)
    assert text.count(HOSTILE) >= 5, "the name of a set, of a model, and of a checkpoint, and why it failed; as text"
    for words in ("strategy zero3, processes 8", "strategy fsdp2, processes 4", "skip", "save"):
        assert words in text
    shown = [int(step) for step in re.findall(r"<td>(\d+) of it</td>", page.text)]
    assert shown == [0, *range(9, 20)] and "samples.jsonl has 8 more" in text, "the first and the newest"
    assert re.findall(r"<td>((?:optim|model)\.[^<]+)</td><td>[^<]*</td><td>([^<]*)</td>", page.text) == [
        ("model.name_or_path", "recipe"),
        ("optim.learning_rate", "--set"),
        ("optim.eps", "default"),
    ]


def test_the_page_has_the_memory_over_the_forecast(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    gpus = [[{"rank": rank, "memory_gib": minute + rank} for rank in (0, 1)] for minute in range(5)]
    lines = [{"time": 60.0 * minute, "gpus": of, "cpu": {}} for minute, of in enumerate(gpus)]
    (folder / "monitor.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(folder)]) == 0
    assert "<h2>Memory</h2>" not in (folder / "report.html").read_text(), "a forecast without parts"
    record = json.loads((folder / "run.json").read_text())
    record["forecast"] |= {"moment": "the update", "parts": {"weights": 2**30, "gradients": 0, "optimizer": 2**31}}
    (folder / "run.json").write_text(json.dumps(record))
    assert main(["report", str(folder)]) == 0
    page = Page(folder / "report.html")
    assert offences(page) == [] and page.curves()[-3:] == [2, 2, 5] and "over the forecast of the update" in page.text
    assert "measured, rank 1, which has most" in page.text and "forecast: gradients" not in page.text
    assert page.text.count("fill-opacity: 0.35") == 2, "an area for each part"


@pytest.mark.parametrize(
    "evil",
    ["<script>1</script>", '<a href="http://a.b">x</a>', '<p onclick="x">x</p>', "<style>@import 'a'</style>"],
)
def test_a_page_that_would_load_or_execute_something_is_found(evil: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    whole = (folder / "report.html").read_text()
    path.write_text(whole.replace("</body>", f"{evil}</body>"))
    assert offences(Page(path)) and not offences(Page(folder / "report.html"))
    path.write_text(re.sub("<meta http-equiv.*?>", "", whole))
    assert offences(Page(path)) == ["no policy that forbids the rest"]


def test_what_is_under_the_pointer_is_what_was_measured_and_lies_where_it_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    measured = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()[:-1]]
    pauses = {0: 1.5, 10: 2.5}  # evaluations after these steps take so long
    for line in measured:
        if "loss" in line:
            line |= {"eval_seconds": pauses.get(line["step"] - 1, 2e-5), "save_seconds": 0.5 * (line["step"] == 21)}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in measured))
    assert main(["report", str(folder)]) == 0
    charts = Page(folder / "report.html").charts()
    training = [line for line in measured if line.get("loss") is not None]
    held_out = [line for line in measured if line.get("eval_set") == "chats"]
    points = [line["points"] for line in charts["Loss"]["lines"]]
    assert points[0] == [[line["step"], line["loss"]] for line in training]
    assert points[1] == [[line["step"], line["eval_loss"]] for line in held_out] and len(points) == 3
    shown = charts["Time of an evaluation before a step"]["lines"][0]["points"]
    assert shown == [[1, 1.5], [11, 2.5], [21, 2e-5], [31, 2e-5]], "marks, and no line of zeros between them"
    assert charts["Time that a save took before a step"]["lines"][0]["points"] == [[21, 0.5]]
    for chart in charts.values():
        assert chart["marks"] == {"evaluation": [0, 10, 20, 30, 40], "save": [20]} and chart["across"] == "step"
        left, top, right, bottom = chart["box"]
        for line in chart["lines"]:
            drawn = re.search(rf'<g id="{line["id"]}">\s*<path d="([^"]*)"', chart["text"])
            assert drawn is not None
            places = [tuple(map(float, place)) for place in re.findall(r"[ML] ([\d.-]+) ([\d.-]+)", drawn[1])]
            for (x, y), (across, up) in zip(line["points"], places, strict=True):
                (x0, x1), (y0, y1) = chart["x"], chart["y"]
                assert left + (x - x0) / (x1 - x0) * (right - left) == pytest.approx(across, abs=1e-3)
                assert bottom - (y - y0) / (y1 - y0) * (bottom - top) == pytest.approx(up, abs=1e-3)
        for name, places in chart["marks"].items():
            marks = re.search(rf'<g id="c\d+-mark-{name}">.*?(?=<g id="c)', chart["text"], re.DOTALL)
            assert marks is not None
            at = [float(x) for x in re.findall(r'<use [^>]*x="([\d.]+)"', marks[0])]
            assert at == pytest.approx([left + (x - x0) / (x1 - x0) * (right - left) for x in places], abs=1e-3)
    last = re.findall(r"</i>([^<]*) <b>([^<]*)</b>", charts["Loss"]["text"])
    assert [value for _, value in last] == ["0.1", "0.12195", "0.12195"], "without the script it says the last values"


def test_axes_have_words_and_begin_where_there_is_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", rate=3e-5)
    assert main(["report", str(folder)]) == 0
    charts = Page(folder / "report.html").charts()
    words = {title: chart["words"][-1] for title, chart in charts.items()}
    assert words == {
        "Loss": "loss",
        "Learning rate": "learning rate",
        "Gradient norm": "norm",
        "Speed, all processes": "tokens/s",
        "Time of a step": "seconds",
        "Peak memory, largest process": "GiB",
        "signed_reward": "signed_reward",
    }
    assert all("step" in chart["words"] for chart in charts.values())
    for title in ("Learning rate", "Speed, all processes", "Time of a step", "Peak memory, largest process"):
        assert charts[title]["y"][0] == 0, title
    low, high = charts["signed_reward"]["y"]  # always 0.5
    assert low < 0.5 < high and high - low == pytest.approx(0.02 * 0.5 * 1.1)


def test_noise_does_not_fill_a_chart() -> None:
    assert _limits([7.0, 7.0 + 1e-9], from_zero=False) == pytest.approx((7.0 - 0.077, 7.0 + 0.077))
    assert _limits([3.0, 5.0], from_zero=False) == pytest.approx((2.9, 5.1)), "what varies fills it"
    assert _limits([3.0, 5.0], from_zero=True) == pytest.approx((0.0, 5.25))
    assert _limits([0.0], from_zero=False) == pytest.approx((-0.55, 0.55)) and _limits([], from_zero=True) is None


def test_runs_lie_over_one_another_by_step_and_by_tokens(tmp_path: Path, capsys) -> None:
    folders = [write_run(tmp_path / f"run {i}", num_steps=steps, rate=rate) for i, (steps, rate) in enumerate(
        [(40, 2e-5), (30, 1e-5), (20, 2e-5)]
    )]  # fmt: skip
    record = json.loads((folders[2] / "run.json").read_text())
    record["strategy"]["processes"], record["versions"] = 2, {"torch": "2.12.0"}
    (folders[2] / "run.json").write_text(json.dumps(record))
    assert main(["report", *map(str, folders), "--out", str(tmp_path / "all.html")]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"optim.learning_rate +2e-05 +1e-05 +2e-05 +curve", printed) and "eps" not in printed
    assert re.search(r"processes +4 +4 +2 +speed", printed) and re.search(
        r"versions.torch +2.13.0 +2.13.0 +2.12.0", printed
    )
    page = Page(tmp_path / "all.html")
    assert offences(page) == []
    losses = [39, 29, 19, 5, 4, 3, 5, 4, 3]
    assert page.curves()[: len(losses)] == losses
    half = len(page.curves()) // 2
    assert page.curves()[:half] == page.curves()[half:] and half > 20
    assert page.tags["svg"] == 18


def test_runs_say_how_far_their_losses_lie_apart_and_which_strategies_they_had(tmp_path: Path, capsys) -> None:
    folders = [write_run(tmp_path / name, num_steps=steps) for name, steps in (("a", 30), ("b", 20), ("c", 20))]
    for folder, change in zip(folders[1:], (0.25, -0.5), strict=True):
        path = folder / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
        (line,) = [line for line in lines if line["step"] == 7 and "loss" in line]
        line["loss"] += change
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", *map(str, folders), "--out", str(tmp_path / "all.html")]) == 0
    said = f"largest difference of the loss of {folders[2]}: 0.5, at step 7"
    assert said in capsys.readouterr().out and said in (tmp_path / "all.html").read_text()
    assert main(["report", *map(str, folders[:2]), "--out", str(tmp_path / "all.html"), "--json"]) == 0
    farthest = json.loads(capsys.readouterr().out)["loss_difference"]
    assert farthest == {"runs": [*map(str, folders[:2])], "step": 7, "difference": pytest.approx(0.25)}
    assert main(["report", str(folders[0])]) == 0
    assert "fsdp2.yaml, 4 processes on Some GPU; zero3 to step 20" in " ".join(capsys.readouterr().out.split())


def test_a_compared_run_stands_where_its_tokens_are(tmp_path: Path) -> None:
    from cookbook.commands.report.pages import _tokens

    run = read_history(write_run(tmp_path / "run", num_steps=20))
    assert [_tokens(run)(line) for line in run.evaluations] == [0, 0, 10_000, 10_000, 20_000, 20_000]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], "nowhere/metrics.jsonl: no such file"),
        (["report", "run", "./run"], "run run: a run is named twice"),
        (["watch", "nowhere"], "nowhere: no such folder"),
        (["watch", "run", "--every", "0"], "--every is 0"),
        (["report", "run", "--out", "nowhere/page.html"], "nowhere/page.html: cannot be written"),
    ],
)
def test_what_cannot_be_shown_ends_with_2_and_a_message(arguments, message, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"))
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_real_run_records_its_events_and_has_a_page(lab) -> None:
    run = lab.run("ddp", {"run.trackers": "[tensorboard]"})  # as tests/test_trackers.py
    history = read_history(run.folder)
    assert [(event["event"], event["step"]) for event in history.events] == [("start", 0), ("save", 20), ("finish", 20)]
    assert history.events[0]["strategy"] == "ddp" and history.record["max_steps"] == 20
    assert history.state.name == "finished"
    assert main(["report", str(run.folder)]) == 0
    page = Page(run.folder / "report.html")
    assert offences(page) == [] and page.curves()[:2] == [20, 2]
    assert re.search(r"<td>optim.learning_rate</td><td>0.1</td><td>recipe</td>", page.text)
    assert re.search(r"<td>run.keep_last</td><td>2</td><td>default</td>", page.text)


def write_status(folder: Path, **record: Any) -> None:
    build = folder / "status.tmp"
    build.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "reason": None} | record))
    build.replace(folder / "status.json")


def test_watch_prints_a_line_for_each_step_until_all_runs_have_ended(tmp_path: Path, capsys) -> None:
    ended, other = write_run(tmp_path / "ended"), write_run(tmp_path / "other", num_steps=5)
    write_status(other, state="running")
    end = threading.Timer(1.0, write_status, (other,), {"state": "finished"})
    started = time.monotonic()
    end.start()
    assert main(["watch", str(ended), str(other), "--every", "0.05"]) == 0
    assert time.monotonic() - started >= 1.0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith(f"run {ended}, state failed: <script>") and "step 40 of 40, mean loss 0.11" in first
    numbers = "mean loss 1.8267, held out 5.0000, tokens/s 500, left 0:00:00"
    assert second == f"run {other}, state running, step 5 of 5, {numbers}"
    assert third.startswith(f"run {other}, state finished, step 5 of 5, mean loss 1.8267")


def test_watch_ends_with_a_run_that_was_killed(tmp_path: Path, capsys) -> None:
    folder = write_run(tmp_path / "run")
    process = subprocess.Popen(["true"])
    process.wait()
    write_status(folder, state="running", pid=process.pid)
    assert main(["watch", str(folder)]) == 0
    assert "state killed" in capsys.readouterr().out


def test_watch_draws_a_table_on_a_terminal(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    folder = write_run(tmp_path / "run")
    write_status(folder, state="finished")
    assert main(["watch", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "40 of 40" in printed and "\x1b[" in printed


SCRIPT = """parent.postMessage(JSON.stringify([innerWidth, document.documentElement.scrollWidth,
getComputedStyle(document.body).backgroundColor, getComputedStyle(document.querySelector('[id$=curve-0] path')).stroke,
[...document.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().height > 100).length]), '*')"""
POINT = """
const figure = document.querySelector("figure"), svg = figure.querySelector("svg"), said = [];
const read = () => said.push([...figure.querySelectorAll(".legend li")].map(item => item.textContent.trim()));
const {box, x: [x0, x1]} = JSON.parse(figure.dataset.chart);
function point(step) {
  const at = new DOMPoint(box[0] + (step - x0) / (x1 - x0) * (box[2] - box[0]), (box[1] + box[3]) / 2);
  const {x, y} = at.matrixTransform(svg.getScreenCTM());
  svg.dispatchEvent(new PointerEvent("pointermove", {clientX: x, clientY: y, bubbles: true}));
  read();
}
function slide(share) {
  const slider = document.querySelector(".smoothing input");
  slider.value = share;
  slider.dispatchEvent(new Event("input"));
}
read();
point(20);
point(23.2);
svg.dispatchEvent(new PointerEvent("pointerleave"));
read();
slide(0.5);
point(3);
slide(0);
point(3);
said.push(document.querySelector(".smoothing").hidden, window.evil === undefined);
parent.postMessage(JSON.stringify(said), "*");
"""
FRAME = """<!DOCTYPE html><script>onmessage = event => document.title = event.data</script>
<iframe src="PAGE" width="WIDTH" height="2000" style="border: 0"></iframe>"""
"""A browser without a display has no window narrower than 500 pixels."""


def in_browser(path: Path, script: str, folder: Path, *, width: int, is_dark: bool, extra: str = "") -> Any:
    """Message of a script that runs at the end of a page whose policy allows it beside the page's own.

    Args:
        extra: HTML before it.
    """
    measured, frame = path.with_suffix(".measured.html"), path.with_suffix(".frame.html")
    allowed = path.read_text().replace("script-src ", f"script-src {digest(script)} ", 1)
    measured.write_text(allowed.replace("</body>", f"{extra}<script>{script}</script></body>"))
    frame.write_text(FRAME.replace("PAGE", measured.as_uri()).replace("WIDTH", str(width)))
    flags = ["--headless", "--hide-scrollbars", "--virtual-time-budget=10000", "--no-sandbox", "--disable-gpu"]
    flags += ["--enable-logging=stderr", f"--blink-settings=preferredColorScheme={int(not is_dark)}"]
    flags += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", frame.as_uri()]
    done = subprocess.run([need_chromium(), *flags], capture_output=True, text=True, timeout=300)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert done.returncode == 0 and title is not None, done.stderr
    is_refused = bool(extra) and "Content-Security-Policy" in allowed
    assert ("CONSOLE" in done.stderr) == is_refused, done.stderr
    return json.loads(unescape(title[1]))


@pytest.mark.slow
def test_a_browser_shows_what_is_under_the_pointer_and_smooths_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    evil = '<script>window.evil = 1</script><img src="x" onerror="window.evil = 1">'
    end, at_mark, between, left, smooth, raw, is_hidden, is_safe = in_browser(
        folder / "report.html", POINT, tmp_path, width=1280, is_dark=False, extra=evil
    )
    held_out = [f"held out: {name}" for name in ("chats", HOSTILE)]
    assert end == left == ["at the end", "training 0.1", *(f"{name} 0.12195" for name in held_out)]
    assert at_mark == ["step 20, evaluation, save", "training 0.2", *(f"{name} 0.2381" for name in held_out)]
    assert between == ["step 23", "training 0.17391", *(f"{name} 0.2381 at 20" for name in held_out)]
    # The losses 4, 2 and 4/3, of which each counts half as much as the next.
    assert smooth[:2] == ["step 3", f"training {(4 / 4 + 2 / 2 + 4 / 3) / (1 / 4 + 1 / 2 + 1):.5g}"]
    assert raw[:2] == ["step 3", "training 1.3333"] and smooth[2:] == raw[2:], "evaluations are not smoothed"
    assert not is_hidden and is_safe, "what a page's policy does not allow is not executed"
    lax = tmp_path / "lax.html"
    lax.write_text(re.sub("<meta http-equiv.*?>", "", (folder / "report.html").read_text()))
    assert in_browser(lax, POINT, tmp_path, width=1280, is_dark=False, extra=evil)[-1] is False, "without it, it is"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "is_dark"),
    [
        (390, True),
        (1280, False),
        pytest.param(390, False, marks=pytest.mark.thorough),
        pytest.param(1280, True, marks=pytest.mark.thorough),
    ],
)
def test_a_browser_shows_the_pages_in_both_themes_and_widths(width: int, is_dark: bool, tmp_path: Path) -> None:
    folders = [str(write_run(tmp_path / name)) for name in ("a", "b")]
    assert main(["report", folders[0]]) == main(["report", *folders]) == 0
    for path, num_charts in ((tmp_path / "a/report.html", 7), (tmp_path / "compare.html", 18)):
        shown = in_browser(path, SCRIPT, tmp_path, width=width, is_dark=is_dark)
        inner, scrolled, background, stroke, drawn = shown
        assert (inner, scrolled) == (width, width), "something stands out to the side"
        assert background == ("rgb(13, 17, 23)" if is_dark else "rgb(255, 255, 255)")
        assert stroke == ("rgb(68, 147, 248)" if is_dark else "rgb(9, 105, 218)")
        assert drawn == num_charts


def evaluated(loss: float, rows: str | None = None, **metrics: float) -> HeldOut:
    steps = {"first_step": 0, "step": 9}
    return HeldOut(set="", first_loss=3, last_loss=loss, **steps, rows=rows, metrics={"loss": loss} | metrics)


LOSS_OF_BETA = "no run is the best: a loss under another objective.beta is another loss"


@pytest.mark.parametrize(
    ("ours", "theirs", "by", "why"),
    [
        ({"beta": 0.1, "rows": "1"}, {"beta": 0.1, "rows": "1"}, None, None),
        ({"beta": 0.1, "rows": "1"}, {"beta": 0.5, "rows": "1"}, None, LOSS_OF_BETA),
        ({"beta": 0.1}, {}, None, LOSS_OF_BETA),
        ({"beta": 0.1, "rows": "1"}, {"beta": 0.5, "rows": "1"}, "hits", None),  # a metric is of the model alone
        ({"rows": "1"}, {"rows": "2"}, None, "no run is the best: the held-out rows are not the same in all"),
        ({"rows": "1"}, {"rows": "2"}, "hits", "no run is the best: the held-out rows are not the same in all"),
        ({"rows": "1"}, {}, None, None),  # of a run before it was recorded
        ({"num_tokens": 40}, {"num_tokens": 41}, None, "no run is the best: the held-out rows are not the same in all"),
    ],
)
def test_no_run_is_the_best_by_losses_of_two_things(ours: dict, theirs: dict, by: str | None, why: str | None):
    """The second has the lower loss, which says nothing where it is another loss, or that of other rows."""
    best_by = by and BestBy(metric=by, greater_is_better=True)
    runs = []
    for run, loss, values in (("a", 2.0, {**ours}), ("b", 1.0, {**theirs})):
        objective = {"objective.beta": values.pop("beta")} if "beta" in values else {}
        held_out = [evaluated(loss, **values, hits=1 / loss)]
        runs.append(
            RunSummary.model_construct(run=run, best_by=best_by, objective=objective, rows=None, held_out=held_out)
        )
    best = best_run(runs)
    assert why_no_best(runs) == why and (best is None) == (why is not None)
    assert best is None or (best.run, best.what) == ("b", by or "loss")


@pytest.mark.parametrize(("greater", "first"), [(True, "b"), (False, "a"), (None, "b")])
def test_the_best_of_runs_is_by_the_metric_that_their_recipes_name(greater: bool | None, first: str):
    """`a` has the larger loss and the smaller metric. Runs that compare otherwise are compared by the loss."""
    by = None if greater is None else BestBy(metric="hits", greater_is_better=greater)
    runs = [
        RunSummary.model_construct(
            run=run,
            best_by=by,
            objective={},
            rows=None,
            held_out=[evaluated(loss, hits=hits)],
        )
        for run, loss, hits in (("a", 2.0, 0.1), ("b", 1.0, 0.4))
    ]
    best = best_run(runs)
    assert best is not None and best.run == first
    hits = {"a": "0.1000", "b": "0.4000"}[first]
    assert best.words() == f"best held-out {'loss: 1.0000' if by is None else f'hits: {hits}'}, at the end of {first}"
    runs[1].best_by = BestBy(metric="hits", greater_is_better=not greater)
    best = best_run(runs)
    assert best is not None and (best.run, best.what) == ("b", "loss")
