"""docs/architectures.md, from the record of architectures.py and the table of model types."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cookbook.facts.model_types import TYPES, ModelType

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "architectures.md"
LIMIT = 2e-6
"""Largest error of a loss: SGD_LOSS of tests/test_equivalence.py."""
GRADIENT_LIMIT = 1e-5
"""Largest distance of all gradients, relative to their norm, with sums of float32 in another order."""

WAYS = ("packed", "tp", "sp", "pp", "ep")
"""Columns that are facts of the table too."""
HEADINGS = {
    "plain": "one process",
    "ddp": "`ddp`",
    "fsdp2": "`fsdp2`",
    "zero3": "`zero3`",
    "packed": "packed",
    "tp": "`tp`",
    "sp": "`ddp_sp`",
    "pp": "`pp`",
    "ep": "`fsdp2_ep`",
    "lora": "LoRA",
    "qlora": "QLoRA",
    "compiled": "compiled",
    "export": "export",
    "plan": "plan",
}
TEXT = """\
# Architectures

What each architecture was seen to do, and what is refused: the table of the package, `cookbook/facts/model_types.json`,
with the figures behind it, `benchmarks/results/architectures.json`. `{command}` writes all three, in parts (`--types`,
`--columns`); tests compare them, and try a twentieth of the rows by turn. A run of a model type that is not in the
tables notes that at its start.

{counts}

## How they were compared

Each model type is a tiny random model with all its kinds of layers, trained by `train.py` for a few steps with SGD on
padded rows of uneven length, without dropout. A number is the largest error of a loss, in natural units; the limit is
{limit}.

- One process: the held-out loss before training against transformers' own, one sample at a time. LoRA and QLoRA: that
  loss, and the one after training.
- Packed rows and strategies: each step and evaluation against the curve of one process. `fsdp2_ep` ran as four
  processes, all other strategies as two.
- Compiled: the mean losses of two batches of padded rows, of two lengths, against those of layers that are not
  compiled; gradients lie within {gradient_limit} of their norm. Layers are recomputed, so that each has to be one
  graph. The graphs are inductor's, decomposed and divided as it does, and run without its code: a GPU has others.
- Export: what each of these runs wrote, loaded and evaluated by transformers, against the run's last held-out loss; the
  largest error of all.
- Plan: `yes` if `cookbook plan` forecasts the model under `fsdp2` in bf16, from its traced layers.

Windows and the tokens that sparse attention selects are fewer than a row's. Cells were filled at different times, some
by older code.

## Trained

{columns}

{table}
{footnote}
{dash}`no`: the run is refused at its start, with exit code 2, for the reason of this number. `kept`: compiled with
`model.gradient_checkpointing: false` alone. `in part`: at this operation, in torch's words, a layer leaves its graph,
and is compiled in parts. A run says after its first steps what is not compiled.

{reasons}

## Layers, logits and adapters

| model type | what its code does |
|---|---|
{notes}

## Towers

Model types with an image or audio tower, of which [the language part](recipes.md#a-model-with-an-image-or-audio-tower)
is trained, if the logits of text are its own alone.

| model type | its language part |
|---|---|
{towers}

## Refused

| why | how many | model types |
|---|---|---|
{refused}

{versions}; {machine}.{apart}
"""
FOOTNOTE = """
`*`: with `adapter.targets` as the note on `all-linear` names them: experts are one tensor each, and get adapters too.
Under QLoRA they are in 4 bits; cells of older code had them in full precision.
"""
DASH = """\
`-`: no result on record.

"""


def is_served(row: dict[str, Any]) -> bool:
    """True if a row has columns, of a model type that is trained."""
    return "plain" in row


def faults(row: dict[str, Any]) -> list[str]:
    """Cells of a row that are neither equal nor refused."""
    if not is_served(row):
        return [str(row)] if "failed" in row else []
    return [f"{column}: {cell}" for column, cell in row.items() if is_wrong(cell)]


def is_wrong(cell: dict[str, Any]) -> bool:
    """True if a cell is neither equal nor refused."""
    return "failed" in cell or "exports" in cell or is_distant(cell)


def is_distant(cell: dict[str, Any]) -> bool:
    """True if a cell's error is no rounding."""
    return cell.get("loss", 0.0) > LIMIT or cell.get("gradient", 0.0) > GRADIENT_LIMIT


def page(record: dict[str, Any]) -> str:
    """docs/architectures.md."""
    rows, reasons = record["rows"], dict[str, int]()
    served = {name: row for name, row in rows.items() if is_served(row)}
    cells = {name: [cell(name, row.get(column, {}), reasons) for column in HEADINGS] for name, row in served.items()}
    lines = [f"| `{name}` | {' | '.join(words)} |" for name, words in cells.items()]
    by_reason: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "refused" not in row and "failed" not in row:
            continue
        reason = row.get("refused") or f"fails: {row['failed']}"
        by_reason.setdefault(without_name(name, reason), []).append(f"`{name}`")
    refused = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    versions = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    return TEXT.format(
        command=record["command"],
        machine=record["machine"],
        versions=versions,
        apart=apart(record),
        limit=f"{LIMIT:.0e}",
        gradient_limit=f"{GRADIENT_LIMIT:.0e}",
        counts=counts(record, served),
        columns=columns(served.values()),
        table="\n".join(
            [f"| model type | {' | '.join(HEADINGS.values())} |", "|---" * (1 + len(HEADINGS)) + "|", *lines]
        ),
        dash=DASH if any("-" in words for words in cells.values()) else "",
        footnote=FOOTNOTE if any(" *" in word for words in cells.values() for word in words) else "",
        reasons="\n".join(f"{number}. {reason}" for reason, number in reasons.items()),
        notes="\n".join(f"| `{name}` | {words} |" for name, facts in sorted(TYPES.items()) if (words := notes(facts))),
        towers="\n".join(f"| `{name}` | {words} |" for name, facts in sorted(TYPES.items()) if (words := part(facts))),
        refused="\n".join(f"| {why} | {len(names)} | {', '.join(sorted(names))} |" for why, names in refused),
    )


def apart(record: dict[str, Any]) -> str:
    """Rows with another machine or other versions than those of the record."""
    groups: dict[str, list[str]] = {}
    for name, own in record.get("apart", {}).items():
        others = [f"{of} {number}" for of, number in own["versions"].items() if number != record["versions"].get(of)]
        words = "; ".join(filter(None, [", ".join(others), own["machine"]]))
        groups.setdefault(words, []).append(f"`{name}`")
    return "".join(f"\n\nThe rows of {', '.join(names)}: {words}." for words, names in groups.items())


def notes(facts: ModelType) -> str:
    """Further words of a line of the table on a type that is trained."""
    words = {
        "layers that carry a state": facts.has_state,
        "a loop over tokens without kernels": facts.loops_over_tokens,
        "sinks in its attention": facts.has_sinks,
        "layers that share weights": facts.shares_layers,
        f"logits: {', '.join(f'{how} `{key}`' for key, how in facts.logits.items())}": facts.logits,
        f"no adapter on {', '.join(f'`{name}`' for name in facts.reads_weights)}": facts.reads_weights,
        "whose layers are called in 4 bits": facts.calls_in_4_bits,
    }
    return "" if facts.language_part else "; ".join(word for word, is_so in words.items() if is_so)


def part(facts: ModelType) -> str:
    """Words of a line on a type with a tower, or on a language part alone."""
    if facts.computes_as:
        return f"trained as `{facts.computes_as}`"
    needs = f", where `{facts.needs}` is installed" if facts.needs else ""
    caps = f"; logits: {', '.join(f'{how} `{key}`' for key, how in facts.logits.items())}" if facts.logits else ""
    if facts.language_part is None:
        return ""
    return f"trained{needs}{caps}" if facts.language_part is True else f"refused: {facts.language_part}"


def counts(record: dict[str, Any], served: dict[str, Any]) -> str:
    """How many types are trained, and how many are not."""
    rows = record["rows"]
    parts = {name: row["part"] for name, row in rows.items() if "part" in row}
    refused = [name for name, row in rows.items() if "refused" in row]
    untried = [name for name, row in rows.items() if not row]
    faulty = [name for name, row in rows.items() if faults(row)]
    every = [record, *record.get("apart", {}).values()]
    newest = max((of["versions"]["transformers"] for of in every), key=lambda version: [*map(int, version.split("."))])
    words = [
        f"transformers {newest} has {len(rows)} causal model types: **{len(served)} are"
        f" trained, {len(parts)} by their language part, and {len(refused)} refused** at the start of a run."
    ]
    listed = ", ".join(f"`{name}` (`{part}`)" for name, part in parts.items())
    words.append(f"\n\n[By their language part](recipes.md#a-model-with-an-image-or-audio-tower): {listed}.")
    others = [
        f"`{name}` ({facts.transformers}: {', '.join(way for way in WAYS if getattr(facts, way) is True) or 'refused'})"
        for name, facts in sorted(TYPES.items())
        if facts.transformers != record["versions"]["transformers"]
    ]
    words += [f"\n\nMeasured with another version of transformers: {', '.join(others)}."] if others else []
    for what, names in (
        ("Not tried, since a run of transformers' own code for its layers takes minutes at this size", untried),
        ("Differ or fail", faulty),
    ):
        words += [f"\n\n{what}: {', '.join(f'`{name}`' for name in names)}."] if names else []
    return "".join(words)


def columns(rows: Iterable[dict[str, Any]]) -> str:
    """How many of the trained types each column serves."""
    told = Counter(column for row in rows for column in HEADINGS if {"loss", "forecast"} & row.get(column, {}).keys())
    words = [f"{heading} {told[column]}" for column, heading in HEADINGS.items()]
    return f"How many model types are served: {', '.join(words)}."


def without_name(model_type: str, reason: str) -> str:
    """A reason that several architectures share."""
    reason = re.sub(rf"\b{re.escape(model_type)}\b", "it", reason)
    reason = re.sub(r"\w+ForCausalLM\b", "it", reason)
    reason = re.sub(r"(DDP waits for them): [^;]+", r"\1", reason)
    reason = re.sub(r"^\S+\.yaml: \d+ ", "", reason)
    return re.sub(r"leaves \d+ of it whole: [^;]+", "leaves some of its matrices whole", reason)


def cell(model_type: str, content: dict[str, Any], reasons: dict[str, int]) -> str:
    """One cell: how far the losses lie apart, or the number of a reason."""
    if not content:
        return "-"
    if "forecast" in content:
        return str(content["forecast"])
    if "loss" in content:
        words = f"{'differs: ' * is_distant(content)}{content['loss']:.0e}{' *' * ('targets' in content)}"
        if "kept" in content:
            words += f" kept ({number_of(without_name(model_type, content['kept']), reasons)})"
        if "uncompiled" in content:
            words += f" in part ({number_of('; '.join(content['uncompiled']), reasons)})"
        return words
    reason = without_name(model_type, content.get("refused") or f"fails: {content['failed']}")
    return f"no ({number_of(reason, reasons)})"


def number_of(reason: str, reasons: dict[str, int]) -> int:
    """Its number below the table, where `reasons` has all so far."""
    return reasons.setdefault(reason, len(reasons) + 1)
