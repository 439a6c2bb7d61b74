"""Writes the pictures of docs/watching.md: the screen of a run, its report, two runs on one another, a profiled step.

Trains recipes/quickstart.yaml twice for some steps, in minutes on two cores. Needs chromium.
"""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.trace_picture import draw  # noqa: E402

DOCS = ROOT / "docs"
RUNS = Path("outputs/pictures")
STEPS, SHOWN = 120, 70
"""Steps of a run, and the one at which its screen is drawn."""
PROFILED, PROFILED_STEPS = 5, 6
"""The step that is drawn, and the steps of its run."""
COLUMNS = 108
COOKBOOK = [sys.executable, "-m", "cookbook"]


def train(strategy: str, **others: str | int) -> tuple[Path, str]:
    """A run on a terminal: its folder, and what it wrote there.

    Args:
        others: of its settings, by key with __ for a dot.
    """
    folder = RUNS / strategy
    settings = {
        "run.output_dir": folder,
        "run.max_steps": STEPS,
        "run.eval_every_steps": 40,
        "run.save_every_steps": 60,
        **{key.replace("__", "."): value for key, value in others.items()},
    }
    words = [*COOKBOOK, "launch", "recipes/quickstart.yaml", "--strategy", strategy]
    words += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, COLUMNS))
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    run = subprocess.Popen(words, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(ours)
    if run.wait():
        sys.exit(written.decode(errors="replace"))
    return folder, written.decode(errors="replace").replace("\r\n", "\n")


def screen(written: str) -> str:
    """Text on the terminal at step `SHOWN`: the lines that stay, and below them the one that changes."""
    before = re.split(rf"(?=step +{SHOWN}/{STEPS})", written)[0]
    lines = [line.split("\r")[-1] for line in before.split("\n")[:-1]]
    changing = [part for part in before.split("\r") if "step " in part and "\n" not in part]
    begin = next(i for i, line in enumerate(lines) if "RUN" in line)
    return "\n".join(line for line in [*lines[begin:], *changing[-1:]] if line.strip())


def drawn(text: str) -> str:
    """The picture of a terminal with this text, as SVG."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text))
    svg = console.export_svg(title="make quickstart")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # of another host
    return re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)


def photograph(page: Path, name: str, height: int) -> None:
    flags = ["--headless", "--hide-scrollbars", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    flags += [f"--window-size=1200,{height}", f"--screenshot={DOCS / name}"]
    subprocess.run(["chromium", *flags, page.resolve().as_uri()], check=True, capture_output=True)


def main() -> None:
    (ddp, written), (zero3, _) = train("ddp"), train("zero3")
    (DOCS / "screen.svg").write_text(drawn(screen(written)), encoding="utf-8")
    subprocess.run([*COOKBOOK, "report", str(ddp)], cwd=ROOT, check=True)
    subprocess.run([*COOKBOOK, "report", str(ddp), str(zero3)], cwd=ROOT, check=True)
    of_ranks, warmup = f"{{steps: [{PROFILED}, {PROFILED}], ranks: [0, 1]}}", PROFILED_STEPS // 2
    fsdp2, _ = train("fsdp2", run__max_steps=PROFILED_STEPS, schedule__warmup_steps=warmup, run__profile=of_ranks)
    traces = sorted((ROOT / fsdp2 / "profile").glob("rank_*.pt.trace.json.gz"))
    title = f"Step {PROFILED} of the quickstart under fsdp2, two processes on 2 CPU cores"
    (DOCS / "trace.svg").write_text(draw(traces, title), encoding="utf-8")
    photograph(ROOT / ddp / "report.html", "report.png", 1500)
    photograph(next((ROOT / RUNS).glob("**/compare*.html")), "compare.png", 1300)


if __name__ == "__main__":
    main()
