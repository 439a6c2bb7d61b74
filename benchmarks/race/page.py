"""The tables of docs/speed.md, from benchmarks/results/vs_peers.json."""

import statistics
from typing import Any

from benchmarks.race.cells import GOALS, MICRO_BATCH_SIZES, PEERS, Cell, all_cells, cell_of
from benchmarks.race.gate import PARTS

DEVICES = {"cpu": "On CPU", "cuda": "On a GPU"}
JUDGED_BY = {"cpu": "cpu", "cuda": "clock"}
"""The time that a goal is for: on CPU what other work on the machine does not change."""


def ratios(row: dict[str, Any], key: str) -> list[float]:
    """How many times as fast ours is, step by step: by tokens where the batches differ."""
    ours, theirs = row["ours"], row["theirs"]
    ratios = [b / a for a, b in zip(ours[key], theirs[key], strict=True)]
    if row["packed_rows"]:
        ratios = [ratio * a / b for ratio, a, b in zip(ratios, ours["tokens"], theirs["tokens"], strict=True)]
    return ratios


def compare(ratios: list[float]) -> tuple[float, str]:
    """The median, and a cell with the quartiles."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return middle, f"{middle:.2f} [{low:.2f}..{high:.2f}]"


def of_the_sums(row: dict[str, Any], key: str) -> float:
    """Seconds a token of theirs over ours."""
    ours, theirs = (
        sum(side[key]) / (sum(side["tokens"]) if row["packed_rows"] else 1) for side in (row["theirs"], row["ours"])
    )
    return ours / theirs


def loss_difference(row: dict[str, Any]) -> str:
    """The largest, over all steps; of the first, where LoRA's matrices are drawn; none where batches differ."""
    if row["packed_rows"]:
        return "other batches"
    pairs = list(zip(row["ours"]["losses"], row["theirs"]["losses"], strict=True))
    distance = max(abs(a - b) for a, b in (pairs[:1] if row["lora"] else pairs))
    return f"{distance:.0e}" + (", first step" if row["lora"] else "")


def speed_table(rows: list[dict[str, Any]], device: str) -> list[str]:
    lines = [
        "| beside | strategy | model | precision | | pairs | by CPU time | of the sums | by the clock | losses differ"
        " by | goal |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        head = f"| {cell_of(row).words()} |"
        if "failed" in row:
            lines.append(f"{head} - | did not run: {row['failed']} | | | | |")
            continue
        middle, _ = compare(ratios(row, JUDGED_BY[device]))
        goal = GOALS.get(row["peer"])
        verdict = "none" if goal is None else f"{goal}: {'reached' if middle >= goal else 'missed'}"
        cells = [str(len(row["ours"]["cpu"])), compare(ratios(row, "cpu"))[1], f"{of_the_sums(row, 'cpu'):.2f}"]
        cells += [compare(ratios(row, "clock"))[1], loss_difference(row), verdict]
        lines.append(f"{head} {' | '.join(cells)} |")
    return lines


def start_table(rows: list[dict[str, Any]]) -> list[str]:
    """Start and memory of each cell that ran."""
    lines = [
        "| beside | strategy | model | precision | | CPU s to the end of step 1 | theirs | peak memory, GiB | theirs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        sides = row["ours"], row["theirs"]
        cells = [f"{side['first_cpu']:.1f}" for side in sides] + [f"{side['memory'] / 2**30:.2f}" for side in sides]
        lines.append(f"| {cell_of(row).words()} | {' | '.join(cells)} |")
    return lines


def parts_table(rows: list[dict[str, Any]]) -> list[str]:
    """Shares of the time of a step in plain cells in fp32, ours once for each model."""
    lines = [f"| model | | {' | '.join(PARTS)} |", "|---|---|" + "---|" * len(PARTS)]
    seen = set()
    for row in rows:
        cell = cell_of(row)
        plain = Cell(cell.peer, model=cell.model, packing=cell.packing, packed_rows=cell.packed_rows)
        if cell != plain or cell.packed_rows > 1 or not row["ours"]["parts"]:
            continue
        ours = "ours" if cell.packing else "ours, padded"
        rows_said = ", 1 packed row" if cell.packed_rows else ""
        sides = [(ours, row["ours"]), (PEERS[cell.peer] + rows_said, row["theirs"])]
        for name, side in sides:
            if (cell.model, name) not in seen:
                seen.add((cell.model, name))
                whole = sum(side["parts"].values())
                shown = " | ".join(f"{side['parts'][part] / whole:.0%}" for part in PARTS)
                lines.append(f"| {cell.model} | {name} | {shown} |")
    return lines


def render_device(name: str, results: dict[str, Any]) -> list[str]:
    lines = [f"### {DEVICES[name]}", ""]
    if name not in results:
        return [*lines, "Not measured.", ""]
    record = results[name]
    hardware, data, rows = record["hardware"], record["data"], record["rows"]
    ran = [row for row in rows if "failed" not in row]
    days, loads = sorted({row["date"] for row in rows}), [row["load"] for row in rows]
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    commands = ", ".join(f"`{command}`" for command in record["commands"])
    missing = [
        cell.words().replace(" | ", ", ").rstrip(", ") for cell in all_cells(name) if cell not in map(cell_of, rows)
    ]
    lines += [
        f"{hardware['cores']} cores of {hardware['cpu']}, {hardware['gpu'] or '**no GPU**'}; {versions}. {commands};"
        f" {' and '.join(days)}; load of the machine when a cell began: {min(loads)} to {max(loads)}.",
        "",
        f"{data['chats']:,} chats from {data['source']}. Tokens of a chat: mean {data['mean_tokens']:.0f}, median"
        f" {data['median_tokens']:.0f}, at most {data['max_tokens']}; {data['label_share']:.0%} of them carry loss. Of"
        f" a batch of {MICRO_BATCH_SIZES[name]} padded to its longest, {data['padding_efficiency']:.0%} are tokens.",
        "",
        *speed_table(rows, name),
        "",
        *([f"Not measured: {'; '.join(missing)}.", ""] if missing else []),
        *start_table(ran),
        "",
    ]
    if name == "cpu":
        lines += ["Where the time of one profiled step goes, fp32:", "", *parts_table(ran), ""]
    return lines


def render(results: dict[str, Any]) -> str:
    """The part of docs/speed.md between the marks."""
    return "\n".join(line for name in DEVICES for line in render_device(name, results)).strip()
