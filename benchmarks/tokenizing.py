"""Cost of tokenizing chats here, compared with the package of another commit, in one run.

    python benchmarks/tokenizing.py COMMIT [--rows 20000] [--rounds 5]

Both packages tokenize the same rows with the same tokenizer and template, in turn, each time in a new process of one
thread; a second start then finds the tokens in the cache. Seconds are CPU time, so other work on the machine counts
little. Writes benchmarks/results/tokenizing.json and the table of docs/overhead.md; with --quick, which takes few rows
once, nothing.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "tokenizing.json"
PAGE = ROOT / "docs" / "overhead.md"
BEGIN, END = "<!-- tokenizing:begin -->", "<!-- tokenizing:end -->"
PACKAGES = ("transformers", "tokenizers")
TEMPLATES = ("chatml", "chatml_tools")
MEASURED = {
    "first": "first start: read and tokenize",
    "tokenize": "of it tokenizing",
    "cached": "a start from the cache",
}
Row = dict[str, Any]


def some_rows(count: int) -> list[Row]:
    """Chats of one to four turns; every fourth has a system message, every tenth tools, calls and reasoning."""
    chance = random.Random(0)
    words = ["".join(chance.choice("aeioubcdlmnrst") for _ in range(chance.randint(2, 9))) for _ in range(2000)]

    def text(low: int, high: int) -> str:
        return " ".join(chance.choice(words) for _ in range(chance.randint(low, high))) + "."

    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    rows = []
    for i in range(count):
        messages: list[Row] = [{"role": "system", "content": text(5, 20)}] if i % 4 == 0 else []
        for _ in range(chance.randint(1, 4)):
            messages += [{"role": "user", "content": text(5, 40)}, {"role": "assistant", "content": text(5, 80)}]
        row: Row = {"messages": messages}
        if i % 10 == 0:
            call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": text(1, 3)}}}
            messages[-1:-1] = [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": text(3, 20)},
            ]
            messages[-1]["reasoning_content"] = text(5, 40)
            row["tools"] = [tool]
        rows.append(row)
    return rows


def work(root: str, folder: str, template: str) -> None:
    """Prints the CPU seconds of a start whose rows and tokens are not in the cache, and of the next one."""
    sys.path.insert(0, root)
    import cookbook

    assert Path(cookbook.__file__).is_relative_to(root), f"another package than that of {root}"
    from cookbook.config.objectives import Objective
    from cookbook.config.sections import DataSection
    from cookbook.training.data import sets, tokens
    from cookbook.training.data.known import known_rows

    # The package of bb88a76d, before whose guards and comparisons nothing is measured, has no file tokenizer_files.
    apart = importlib.util.find_spec("cookbook.training.models.tokenizer_files")
    loading = importlib.import_module(f"cookbook.training.models{'.tokenizer_files' if apart else ''}")
    base = Path(folder)
    tokenizer = loading.load_tokenizer(str(base / "tokenizer"), str(base / f"{template}.jinja"))
    rows = base / ("plain.jsonl" if template == "chatml" else "rows.jsonl")
    data, objective = DataSection.model_validate({"train": str(rows)}), Objective.of(name="sft")
    tokens.MIN_ROWS_FOR_POOL = 10**9  # seconds of one process are what is compared
    cached, seconds, spent = tokens.cached_tokens, {}, {"tokenize": 0.0}

    def timed(*given: Any, **options: Any) -> Any:
        began = time.process_time()
        result = cached(*given, **options)
        spent["tokenize"] = time.process_time() - began
        return result

    sets.cached_tokens = timed
    with tempfile.TemporaryDirectory(dir=base) as cache:
        for name in ("first", "cached"):
            began = time.process_time()
            read = known_rows(data, objective, cache=Path(cache))
            made = sets.tokenize_data(read, tokenizer, data, objective, cache=Path(cache))
            seconds[name] = time.process_time() - began
            if name == "first":
                seconds |= spent
    assert not isinstance(made.train, sets.Stream)
    print(json.dumps({**seconds, "samples": len(made.train), "tokens": int(made.train.offsets[-1])}))


def measure(root: Path, folder: Path, template: str) -> dict[str, float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--work", str(root), str(folder), template]
    done = subprocess.run(command, cwd=folder, env=environment | {"PYTHONPATH": ""}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{root}: {(done.stdout + done.stderr)[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def prepare(folder: Path, num_rows: int) -> None:
    """The rows, and a tokenizer of 4,000 tokens that is trained on them."""
    sys.path.insert(0, str(ROOT))
    from cookbook.training.models.tokenizer_files import train_tokenizer

    rows = some_rows(num_rows)
    texts = [message["content"] for row in rows[:2000] for message in row["messages"]]
    train_tokenizer(texts, 4000).save_pretrained(folder / "tokenizer")
    for name in TEMPLATES:
        text = (ROOT / "recipes" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        (folder / f"{name}.jinja").write_text(text, encoding="utf-8")
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines))
    (folder / "plain.jsonl").write_text(
        "".join(line for line, row in zip(lines, rows, strict=True) if "tools" not in row)
    )


def compare(there: Path, num_rows: int, rounds: int) -> dict[str, Any]:
    """Medians of both packages and their ratio, by template; the rounds alternate."""
    templates: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="tokenizing-") as made:
        folder = Path(made)
        prepare(folder, num_rows)
        for template in TEMPLATES:
            spent: dict[str, list[dict[str, float]]] = {"there": [], "here": []}
            for i in range(rounds):
                places = [("there", there), ("here", ROOT)]
                for name, root in places if i % 2 == 0 else places[::-1]:
                    spent[name].append(measure(root, folder, template))
            counts = {name: {(run["samples"], run["tokens"]) for run in spent[name]} for name in spent}
            templates[template] = {
                "samples": spent["here"][0]["samples"],
                "same_tokens": counts["there"] == counts["here"],
                **{
                    key: {name: statistics.median(run[key] for run in spent[name]) for name in spent}
                    | {"ratio": statistics.median(h[key] / t[key] for t, h in zip(*spent.values(), strict=True))}
                    for key in MEASURED
                },
            }
            print(template, json.dumps(templates[template]), flush=True)
    return templates


def render(results: dict[str, Any]) -> str:
    """The table of docs/overhead.md."""
    packages = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [
        f"{results['hardware']}; {packages}; {results['date']}; `{results['command']}`: medians of {results['rounds']}"
        " rounds, and of the ratio within each.",
        "",
        "| template, rows | | CPU s there | CPU s here | ratio |",
        "|---|---|---|---|---|",
    ]
    for template, row in results["found"].items():
        for key, words in MEASURED.items():
            cost = row[key]
            form = ".2f" if cost["there"] > 0.1 else ".4f"
            name = f"`{template}`, {row['samples']:,}"
            lines.append(f"| {name} | {words} | {cost['there']:{form}} | {cost['here']:{form}} | {cost['ratio']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Tokenizing, compared with another commit.")
    parser.add_argument("commit", nargs="?", default="HEAD", help="whose package is compared")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rows, once; writes nothing")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*arguments.work)
        return
    num_rows, rounds = (400, 1) if arguments.quick else (arguments.rows, arguments.rounds)
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.check_output([*git, "rev-parse", "--short", arguments.commit], text=True).strip()
    with tempfile.TemporaryDirectory(prefix="package-") as made:
        archive = subprocess.check_output([*git, "archive", commit])
        subprocess.run(["tar", "-x", "-C", made], input=archive, check=True)
        templates = compare(Path(made), num_rows, rounds)
    if arguments.quick:
        return
    from benchmarks.overhead import processor

    results = {
        "command": f"python benchmarks/tokenizing.py {commit}",
        "date": date.today().isoformat(),
        "versions": {name: version(name) for name in PACKAGES},
        "hardware": f"{os.cpu_count()} cores of {processor()}, no GPU",
        "rounds": rounds,
        "found": templates,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(f"{text.split(BEGIN)[0]}{BEGIN}\n{render(results)}\n{END}{text.split(END)[1]}")


if __name__ == "__main__":
    main()
