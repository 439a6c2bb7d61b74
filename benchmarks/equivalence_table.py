"""The table of docs/equivalence.md and the picture of the README, from the results of the equivalence tests.

    make matrix

`--page` writes both again from benchmarks/results/equivalence.json; `--add FOLDER` after a part of the tests puts its
cells into that file, if hardware and versions are the same.
"""

import json
import math
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "equivalence.json"
PAGE = ROOT / "docs" / "equivalence.md"
PICTURE = ROOT / "docs" / "equivalence.svg"
BEGIN, END = "<!-- equivalence:begin -->", "<!-- equivalence:end -->"
TABLES = (
    {
        "sgd": "SGD",
        "adamw": "AdamW",
        "muon": "Muon",
        "packed": "packed",
        "lora": "LoRA",
        "dora": "DoRA",
        "qlora": "QLoRA",
    },
    {
        "dpo": "DPO",
        "orpo": "ORPO",
        "cpo": "CPO",
        "simpo": "SimPO",
        "kto_zero": "KTO",
        "reward": "reward",
        "classify": "classify",
        "regress": "regress",
        "grpo": "GRPO",
        "gspo": "GSPO",
        "turns": "GRPO, turns",
        "distill": "distill",
        "smoothed": "smoothed",
    },
    {
        "lora_dropout": "LoRA, dropout",
        "lora_dropout_packed": "the same, packed",
        "dropout": "a model's dropout",
        "noise": "noise",
    },
)
"""Columns of each table of the page: of optimizers, rows and adapters, of objectives, and of what is drawn."""
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")


LIMIT = 2e-6
"""Largest error of the loss, against one process: SGD_LOSS of tests/test_equivalence.py."""
MISTAKES = {
    "mean_of_means": "mean of the micro-batches' means",
    "wrong_divisor": "gradient averaged over processes twice",
    "around_the_wrapper": "DDP's wrapper bypassed",
    "schedule_per_process": "schedule advanced by each process",
    "samples_see_each_other": "packed samples that see each other",
}


def collect(folder: Path) -> dict[str, Any]:
    """The results of one session of the tests, with versions and hardware."""
    rows: dict[str, dict[str, Any]] = {}
    curves: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("matrix-*.json")):
        row = json.loads(path.read_text())
        entry = rows.setdefault(row["strategy"], {"processes": row["processes"]})
        entry[row["column"]] = {key: row[key] for key in ("loss", "norm", "weight", "measured")}
        if row["column"] == "sgd":
            curves[row["strategy"]] = {"losses": row["losses"], "reference": row["reference"]}
    mistakes = {
        path.stem.removeprefix("mistake-"): json.loads(path.read_text()) for path in folder.glob("mistake-*.json")
    }
    return {
        "command": "make matrix",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU, gloo",
        "versions": {name: version(name) for name in PACKAGES},
        "strategies": rows,
        "curves": curves,
        "mistakes": dict(sorted(mistakes.items())),
    }


def added(results: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Results with the cells of a later session in place of theirs."""
    for key in ("hardware", "versions"):
        assert results[key] == part[key], (results[key], part[key])
    for name, row in part["strategies"].items():
        results["strategies"].setdefault(name, {}).update(row)
    results["curves"] |= part["curves"]
    return results


def render(results: dict[str, Any]) -> str:
    """The tables in Markdown."""
    lines: list[str] = []
    for columns in TABLES:
        lines += [f"| strategy | processes | {' | '.join(columns.values())} |", f"|---|---{'|---' * len(columns)}|"]
        for name, row in sorted(results["strategies"].items()):
            cells = [
                f"{row[column]['loss']:.0e}, {row[column]['norm']:.0e}" if column in row else "-" for column in columns
            ]
            lines.append(f"| `{name}` | {row['processes']} | {' | '.join(cells)} |")
        lines.append("")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines.append(f"`{results['command']}` on {results['hardware']}; {versions}. {measured(results)}")
    return "\n".join(lines)


def measured(results: dict[str, Any]) -> str:
    """The day of each column, and of the cells of one that was measured on several."""
    days: dict[str, list[str]] = {}
    for column, title in (item for columns in TABLES for item in columns.items()):
        of_column: dict[str, list[str]] = {}
        for name, row in sorted(results["strategies"].items()):
            if column in row:
                of_column.setdefault(row[column]["measured"], []).append(f"`{name}`")
        for day, names in of_column.items():
            days.setdefault(day, []).append(title if len(of_column) == 1 else f"{title} under {', '.join(names)}")
    return " ".join(f"On {day}: {'; '.join(titles)}." for day, titles in sorted(days.items()))


WIDTH, HEIGHT, TOP, BOTTOM = 420, 300, 46, 44
LEFT = (46, 560)
"""Where the two plots begin."""
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #1f2328 } .title { font-weight: 600; font-size: 14px }
.axis { stroke: #8c959f } .grid { stroke: #8c959f; stroke-opacity: .25 } .small { fill: #59636e }
.ours { fill: none; stroke: #0969da; stroke-width: 1.6 } .limit { stroke: #1a7f37; stroke-dasharray: 6 4 }
.mistake { fill: none; stroke: #cf222e; stroke-width: 1.4; stroke-dasharray: 3 3 } .wrong { fill: #cf222e }
.right { fill: #0969da } .held { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
text { fill: #f0f6fc } .small { fill: #9198a1 } .ours { stroke: #4493f8 } .right { fill: #4493f8 }
.mistake { stroke: #f85149 } .wrong { fill: #f85149 } .limit { stroke: #3fb950 } .held { fill: #3fb950 }
}"""


def plot(results: dict[str, Any]) -> str:
    """As SVG: the loss under every strategy and with each mistake, and how far each lies from one process."""
    curves, mistakes = results["curves"], results["mistakes"]
    reference = curves["ddp"]["reference"]
    # zero3_nvme trains a larger model, which DeepSpeed swaps, and has a reference of its own.
    ours = {"one process": reference}
    ours |= {name: curve["losses"] for name, curve in curves.items() if curve["reference"] == reference}
    steps = len(reference)
    every = [*ours.values(), *mistakes.values()]
    low, high = min(map(min, every)), max(map(max, every))
    floor, ceiling = -9, 0  # powers of ten

    def x(plot: int, step: int) -> float:
        return LEFT[plot] + WIDTH * step / (steps - 1)

    def path(plot: int, heights: list[float], style: str, name: str) -> str:
        points = " ".join(f"{x(plot, i):.1f},{y:.1f}" for i, y in enumerate(heights))
        return f'<polyline points="{points}" class="{style}"><title>{name}</title></polyline>'

    def words(right: float, y: float, style: str, text: str) -> str:
        return f'<text x="{right}" y="{y:.1f}" text-anchor="end" class="{style}">{text}</text>'

    def losses(curve: list[float]) -> list[float]:
        return [height(loss, low, high) for loss in curve]

    def distances(curve: list[float], reference: list[float]) -> list[float]:
        away = [abs(a - b) for a, b in zip(curve, reference, strict=True)]
        return [height(math.log10(max(value, 10**floor)), floor, ceiling) for value in away]

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT[1] + WIDTH + 20} {TOP + HEIGHT + BOTTOM}"'
        f' role="img" aria-label="{len(curves)} strategies have the curve of one process">',
        f"<style>{STYLE}</style>",
        f'<text x="{LEFT[0]}" y="22" class="title">Training loss</text>',
        f'<text x="{LEFT[1]}" y="22" class="title">Its distance from one process</text>',
    ]
    scales: tuple[tuple[float, float, list[tuple[float, str]]], ...] = (
        (low, high, [(value / 2, f"{value / 2:.1f}") for value in range(math.ceil(2 * low), math.floor(2 * high) + 1)]),
        (floor, ceiling, [(power, f"1e{power}") for power in range(floor, ceiling + 1, 3)]),
    )
    for number, (bottom, top, ticks) in enumerate(scales):
        left, right = LEFT[number], LEFT[number] + WIDTH
        for value, word in ticks:
            at = height(value, bottom, top)
            lines.append(f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>')
            lines.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end" class="small">{word}</text>')
        for step in (1, *range(steps // 4, steps + 1, steps // 4)):
            place = f'x="{x(number, step - 1):.1f}" y="{TOP + HEIGHT + 18}"'
            lines.append(f'<text {place} text-anchor="middle" class="small">{step}</text>')
        middle = f'x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 36}"'
        lines.append(f'<text {middle} text-anchor="middle" class="small">optimizer step</text>')
    for name, curve in mistakes.items():
        lines.append(path(0, losses(curve), "mistake", MISTAKES[name]))
        lines.append(path(1, distances(curve, reference), "mistake", MISTAKES[name]))
    lines += [path(0, losses(curve), "ours", name) for name, curve in ours.items()]
    lines += [path(1, distances(c["losses"], c["reference"]), "ours", name) for name, c in curves.items()]
    limit = height(math.log10(LIMIT), floor, ceiling)
    right = LEFT[1] + WIDTH
    lines += [
        f'<line x1="{LEFT[1]}" x2="{right}" y1="{limit:.1f}" y2="{limit:.1f}" class="limit"/>',
        words(right, limit - 34, "wrong", f"above: {len(mistakes)} planted mistakes"),
        words(right, limit - 6, "held", f"limit of the tests, {LIMIT:.0e}"),
        words(right, limit + 15, "right", f"below: {len(curves)} strategies"),
        words(LEFT[0] + WIDTH, TOP + 14, "right", f"one process and {len(ours) - 1} strategies, on one another"),
        words(LEFT[0] + WIDTH, TOP + 34, "wrong", "with a planted mistake:"),
    ]
    lines += [words(LEFT[0] + WIDTH, TOP + 52 + 16 * i, "wrong", MISTAKES[name]) for i, name in enumerate(mistakes)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def height(value: float, bottom: float, top: float) -> float:
    """Where a value stands between two others."""
    return TOP + HEIGHT * (1 - (value - bottom) / (top - bottom))


def main() -> None:
    if sys.argv[1] == "--add":
        whole = added(json.loads(RESULTS.read_text()), collect(Path(sys.argv[2])))
        RESULTS.write_text(json.dumps(whole, indent=2) + "\n")
    elif sys.argv[1] != "--page":
        RESULTS.write_text(json.dumps(collect(Path(sys.argv[1])), indent=2) + "\n")
    results = json.loads(RESULTS.read_text())
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{rest.split(END)[1]}")
    PICTURE.write_text(plot(results))


if __name__ == "__main__":
    main()
