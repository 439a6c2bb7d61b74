"""Writes the README's equivalence table from the results of the equivalence tests (make matrix).

make matrix
"""

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "equivalence.json"
BEGIN, END = "<!-- equivalence:begin -->", "<!-- equivalence:end -->"
COLUMNS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "packed": "packed",
    "lora": "LoRA",
    "dora": "DoRA",
    "qlora": "QLoRA",
    "dpo": "DPO",
    "muon": "Muon",
}
PACKAGES = ("torch", "accelerate", "deepspeed", "transformers", "peft", "bitsandbytes")


def collect(folder: Path) -> dict:
    """The results of one session of the tests, with versions and hardware."""
    rows: dict[str, dict] = {}
    for path in sorted(folder.glob("matrix-*.json")):
        row = json.loads(path.read_text())
        entry = rows.setdefault(row["strategy"], {"processes": row["processes"]})
        entry[row["column"]] = {key: row[key] for key in ("loss", "norm", "weight")}
    return {
        "command": "make matrix",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, no GPU, gloo",
        "versions": {name: version(name) for name in PACKAGES},
        "strategies": rows,
    }


def render(results: dict) -> str:
    """The table in Markdown."""
    lines = [
        f"| strategy | processes | {' | '.join(COLUMNS.values())} |",
        f"|---|---{'|---' * len(COLUMNS)}|",
    ]
    for name, row in sorted(results["strategies"].items()):
        cells = [
            f"{row[column]['loss']:.0e}, {row[column]['norm']:.0e}" if column in row else "-" for column in COLUMNS
        ]
        lines.append(f"| `{name}` | {row['processes']} | {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    note = f" ({results['note']})" if "note" in results else ""
    lines += ["", f"`{results['command']}`{note} on {results['hardware']}; {versions}."]
    return "\n".join(lines)


def main() -> None:
    results = collect(Path(sys.argv[1]))
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    readme.write_text(f"{before}{BEGIN}\n{render(results)}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
