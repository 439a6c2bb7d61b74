"""Builds a site that says which GPUs a fine-tuning fits on: models x methods x lengths x GPUs, from `plan --json`.

    python benchmarks/fit_site/build.py                                          # all of recipes/offline_facts.json
    python benchmarks/fit_site/build.py --models Qwen/Qwen3-8B --lengths 8192    # a part of it

The folder outputs/fit_site has one page, its script and its figures: it needs no server, and loads nothing else. Each
cell is the least number of a GPU with the command that says more, and the nearest published measurement with the error
of its forecast. An answer is kept in --cache by a digest of its question, of cookbook's code and of the versions, so
that a second build asks only what is new; `--seconds` ends asking, and the page then has what there is.
"""

import argparse
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.forecast_accuracy import memory_rows  # noqa: E402

HERE = Path(__file__).resolve().parent
ACCURACY = ROOT / "benchmarks" / "forecast_accuracy"
OUT = ROOT / "outputs" / "fit_site"
METHODS = ("full", "lora", "qlora")
LENGTHS = (2048, 8192, 32768)
PACKAGES = ("torch", "transformers", "peft", "accelerate")
SIZE = re.compile(r"(\d+(?:\.\d+)?)B\b", re.IGNORECASE)


@dataclass(frozen=True)
class Question:
    model: str
    method: str
    length: int

    @property
    def words(self) -> list[str]:
        """The command's, without the GPUs."""
        return ["plan", self.model, "--method", self.method, "--length", str(self.length)]


@dataclass(frozen=True)
class Measurement:
    """A published run beside its forecast."""

    id: str
    run: str
    """The run in words."""
    method: str
    billions: float
    length: int
    published: str
    error: float
    kind: str = ""
    """The GPU's, of a measured speed."""
    source: str = ""

    def distance(self, billions: float, length: int) -> float:
        """Doublings between the two in size and in length."""
        return abs(math.log2(self.billions / billions)) + abs(math.log2(self.length / length))


def questions(models: Iterable[str], lengths: Iterable[int]) -> list[Question]:
    return [Question(*each) for each in product(models, METHODS, lengths)]


def all_models() -> list[str]:
    """Names in recipes/offline_facts.json, of those with one structure the first."""
    facts = json.loads((ROOT / "recipes" / "offline_facts.json").read_text(encoding="utf-8"))["models"]
    names: dict[str, str] = {}
    for name, of_model in facts.items():
        names.setdefault(json.dumps(of_model["config"], sort_keys=True), name)
    return [*names.values()]


def state_of_code() -> str:
    """A digest of what an answer depends on besides its question."""
    digest = hashlib.sha256()
    files = sorted(path for path in (ROOT / "cookbook").rglob("*") if path.suffix in (".py", ".json", ".yaml"))
    files += sorted([*(ROOT / "recipes").rglob("*.yaml"), *(ROOT / "accelerate_configs").glob("*.yaml")])
    for path in [*files, ROOT / "recipes" / "offline_facts.json"]:
        if not path.is_relative_to(ROOT / "cookbook" / "training" / "checkpoint"):
            digest.update(path.read_bytes())
    digest.update(" ".join(version(name) for name in PACKAGES).encode())
    return digest.hexdigest()


def answer_of(question: Question) -> dict[str, Any]:
    """Answer of `plan --json` on any GPU."""
    from cookbook.commands.cli import main

    words = [*question.words, "--gpus", "any", "--json"]
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as complained:
        code = main(words)
    if code == 2:
        problems = said.getvalue() or complained.getvalue()
        return {"problem": problems.strip().splitlines()[-1][:500]}
    return json.loads(said.getvalue())


def ask(asked: list[Question], cache: Path, most_seconds: float) -> Iterator[tuple[Question, dict[str, Any]]]:
    """Each question with its answer, from the cache or asked now until so many seconds of the processor are used."""
    from cookbook.forecast import verdict

    cache.mkdir(parents=True, exist_ok=True)
    state, begin, model = state_of_code(), time.process_time(), None
    for question in asked:
        key = hashlib.sha256(f"{state} {shlex.join(question.words)}".encode()).hexdigest()
        path = cache / f"{key[:32]}.json"
        if path.is_file():
            yield question, json.loads(path.read_text(encoding="utf-8"))
            continue
        if time.process_time() - begin > most_seconds:
            continue
        if question.model != model:
            verdict.TRACES.clear()  # of the model before, which none will ask for again
            model = question.model
        before = time.process_time()
        answer = answer_of(question)
        answer["cpu_seconds"] = round(time.process_time() - before, 1)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(answer), encoding="utf-8")
        part.replace(path)
        print(f"{answer['cpu_seconds']:6.1f} s  {shlex.join(question.words)}", flush=True)
        yield question, answer


def memory_measurements() -> list[Measurement]:
    """Published memory of runs like ours, with the error of its forecast."""
    results = json.loads((ACCURACY / "results" / "published.json").read_text(encoding="utf-8"))["compared"]
    facts = {row["id"]: row for row in memory_rows.read_facts()}
    runs = []
    for row in results:
        fact, size = facts[row["id"]], SIZE.search(facts[row["id"]]["model"])
        if size is None or row["kind"] == "weights":
            continue
        method = "full" if not fact["lora_rank"] else "qlora" if fact["quantization"] else "lora"
        words = f"{row['published']:g} GiB {row['kind']}"
        of_run = (method, float(size[1]), int(fact["seq_len"]), words, row["error"])
        runs.append(Measurement(row["id"], row["setup"], *of_run, source=row["source"]))
    return runs


def speed_measurements() -> list[Measurement]:
    """Published speeds, with the error of the middle of their forecast."""
    results = json.loads((ACCURACY / "results" / "frameworks.json").read_text(encoding="utf-8"))["rows"]
    with (ACCURACY / "frameworks_published.csv").open(newline="") as file:
        facts = {row["id"]: row for row in csv.DictReader(file)}
    runs = []
    for row in results:
        fact, size = facts[row["id"]], SIZE.search(row["model"])
        if size is None:
            continue
        run, words = f"{row['program']}, {row['model']}, {row['setup']}", f"{row['published']:,.0f} tokens/s a GPU"
        of_run = ("lora" if fact["rank"] else "full", float(size[1]), int(fact["length"]), words, row["speed_error"])
        runs.append(Measurement(row["id"], run, *of_run, kind=row["kind"], source=fact["url"]))
    return runs


def nearest(measured: list[Measurement], question: Question, billions: float, kind: str = "") -> int | None:
    """The place of the measurement of the same method, and kind of GPU if any is named, that is nearest in size and
    length; of QLoRA's speed, of LoRA's.
    """
    methods = [question.method] + ["lora"] * (question.method == "qlora" and bool(kind))
    for method in methods:
        places = [i for i, run in enumerate(measured) if run.method == method and run.kind == kind]
        if places:
            return min(places, key=lambda i: measured[i].distance(billions, question.length))
    return None


def site(answers: Iterable[tuple[Question, dict[str, Any]]]) -> dict[str, Any]:
    """The figures of the page."""
    from cookbook.forecast.step_time import kind_of
    from cookbook.system.hardware import GIB, find_gpu

    memory, speed = memory_measurements(), speed_measurements()
    cells: list[dict[str, Any]] = []
    no_answers: list[list[Any]] = []
    models: dict[str, float] = {}
    gpus: dict[str, int] = {}
    prices_from = ""
    for question, answer in answers:
        if "problem" in answer:
            no_answers.append([question.model, question.method, question.length, answer["problem"]])
            continue
        billions = answer["model"]["parameters"] / 1e9
        models[question.model] = min(round(billions, 3), models.get(question.model, math.inf))  # without adapters
        prices_from = answer["prices_from"] or prices_from
        of_memory = nearest(memory, question, billions)
        for card in answer["cards"]:
            gpu = find_gpu(card["gpu"])
            assert gpu is not None
            gpus[card["gpu"]] = gpu.sold_gb
            low, high = (round(size / GIB, 1) for size in card["needed"])
            cells.append(
                {
                    "model": question.model,
                    "method": question.method,
                    "length": question.length,
                    "gpu": card["gpu"],
                    "count": card["gpus"],
                    "machines": card["machines"],
                    "strategy": Path(card["strategy"]).stem,
                    "verdict": card["verdict"],
                    "settings": f"micro-batch {card['micro_batch_size']}, checkpointing"
                    f" {str(card['gradient_checkpointing']).lower()}, {card['mixed_precision']}",
                    "batch": card["global_batch_size"],
                    "gib": [low, high, round(card["usable_gib"], 1)],
                    "step": _rounded(card["step_seconds"]),
                    "speed": _rounded(card["tokens_per_second_a_gpu"]),
                    "hours": _rounded(card["hours"]),
                    "price": _rounded(card["price"]),
                    "memory": of_memory,
                    "time": nearest(speed, question, billions, kind_of(gpu)),
                }
            )
        for reason, names in answer["refused"].items():
            for name in names:
                gpu = find_gpu(name)
                assert gpu is not None
                gpus[name] = gpu.sold_gb
                no_answers.append([question.model, question.method, question.length, name, reason])
    by_size = sorted(models, key=lambda name: (models[name], name))
    return {
        "models": [[name, models[name]] for name in by_size],
        "gpus": sorted(gpus.items(), key=lambda each: (each[1], each[0])),
        "methods": METHODS,
        "lengths": sorted({cell["length"] for cell in cells}),
        "cells": cells,
        "refused": no_answers,
        "memory": [_measured(run) for run in memory],
        "speed": [_measured(run) for run in speed],
        "versions": {name: version(name) for name in PACKAGES},
        "prices": prices_from,
    }


def _rounded(ends: list[float] | None) -> list[float] | None:
    return None if ends is None else [float(f"{end:.3g}") for end in ends]


def _measured(run: Measurement) -> dict[str, Any]:
    return {"id": run.id, "run": run.run, "published": run.published, "error": run.error, "source": run.source}


def write(folder: Path, figures: dict[str, Any]) -> None:
    """The page with its figures, and its script."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")
    page = (HERE / "index.html").read_text(encoding="utf-8")
    assert page.count("FIGURES") == 1
    (folder / "index.html").write_text(page.replace("FIGURES", text), encoding="utf-8")
    shutil.copyfile(HERE / "fit.js", folder / "fit.js")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="default: all of recipes/offline_facts.json")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="TOKENS")
    parser.add_argument("--out", type=Path, default=OUT / "site", help="folder of the site")
    parser.add_argument("--cache", type=Path, default=OUT / "cache", help="folder of answers")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of the processor, after which none is asked")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    asked = questions(arguments.models or all_models(), arguments.lengths)
    answers = list(ask(asked, arguments.cache, arguments.seconds))
    write(arguments.out, site(answers))
    print(f"{len(answers)} of {len(asked)} questions are answered in {arguments.out / 'index.html'}")


if __name__ == "__main__":
    main()
