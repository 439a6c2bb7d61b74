"""Ranks at fault in a hang, from the records and heartbeats that `watch` has collected."""

from dataclasses import dataclass
from typing import Any

MAX_RANKS_SHOWN = 8
"""Faulty ranks that the report describes one by one."""
PHASES = (
    "reading the rows",
    "importing the libraries",
    "preparing model folder and tokens",
    "joining the process group",
    "taking digests",
    "choosing the checkpoint",
    "loading the model",
    "restoring",
    "opening the logs",
    "training",
    "exporting",
    "leaving",
)
"""Phases of a run, in order."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Collective:
    """A collective that only some of its ranks have entered."""

    group: str
    """Process group, without the backend."""
    number: int
    op: str
    inside: list[int]
    missing: list[int]


def find_unequal(stuck: dict[int, Record], num_ranks: int) -> list[Collective]:
    """The collectives that some ranks have entered and others have not.

    A rank without a file counts as missing only from collectives in which another rank waits now.
    """
    last = {rank: _last_group(record) for rank, record in stuck.items()}
    unequal = []
    for group in sorted({name for record in stuck.values() for name in record["collectives"]}):
        known = {rank: record["collectives"][group] for rank, record in stuck.items() if group in record["collectives"]}
        number = max(state["number"] for state in known.values())
        inside = [rank for rank, state in sorted(known.items()) if state["number"] == number]
        members = next((state["ranks"] for state in known.values() if state["ranks"]), range(num_ranks))
        missing = [rank for rank in members if rank in stuck and rank not in inside]
        if any(last[rank] == group for rank in inside):
            missing = sorted([*missing, *(rank for rank in members if rank not in stuck)])
        if number and missing:
            waiting = [rank for rank in inside if last[rank] == group] or inside
            unequal.append(Collective(group.split()[0], number, known[inside[0]]["op"], waiting, missing))
    return unequal


def _last_group(record: Record) -> str | None:
    """The group whose collective a rank entered last in this phase, and may be waiting in."""
    groups = {
        name: group for name, group in record["collectives"].items() if group["entered_ns"] >= record["phase_began_ns"]
    }
    return max(groups, key=lambda name: groups[name]["entered_ns"], default=None)


def hang_report(stuck: dict[int, Record], beats: dict[int, Record], *, num_ranks: int, timeout_seconds: float) -> str:
    """The text of report.txt.

    Args:
        stuck: records of the ranks that timed out and could still write, by rank.
        beats: the last heartbeat of each rank.
    """
    silent = {rank for rank in range(num_ranks) if rank not in stuck}
    unequal = find_unequal(stuck, num_ranks)
    missing = {rank for collective in unequal for rank in collective.missing}
    # A rank that is missing in one group because it waits in another is not at fault.
    waiting = {rank for collective in unequal for rank in collective.inside}
    faulty = sorted((missing - waiting) | silent) or sorted(missing) or _behind(stuck, num_ranks)
    lines = [f"HANG: no progress for {timeout_seconds:g} s; aborting the run."]
    machines: dict[str, list[int]] = {}  # the ranks of each one that gave a sign
    for rank, record in sorted((beats | stuck).items()):
        machines.setdefault(record["host"], []).append(rank)
    if len(machines) > 1:
        dead = {host: ranks for host, ranks in machines.items() if silent.issuperset(ranks)}
        lines += [f"machine {host} is silent, with all its processes: {_ranks(ranks)}." for host, ranks in dead.items()]
    for rank in faulty[:MAX_RANKS_SHOWN]:
        lines += _describe_fault(rank, stuck, beats, unequal)
    if len(faulty) > MAX_RANKS_SHOWN:
        lines.append(f"and {len(faulty) - MAX_RANKS_SHOWN} more: ranks {_ranks(faulty[MAX_RANKS_SHOWN:])}")
    if not faulty and not all(record["waits_for"] for record in stuck.values()):
        lines.append("No rank stands out: all have entered the same collectives.")
        hosts = " and ".join(f"{host} ({_ranks(ranks)})" for host, ranks in machines.items())
        between = f"between {hosts}" if len(machines) > 1 else "between them"
        lines.append(f"Either the network {between} failed, or they wait for something else; see below.")
    places: dict[str, list[int]] = {}
    for rank in sorted(set(stuck) - set(faulty)):
        held = stuck[rank]["waits_for"]
        for_what = f", for {held['path']}, held{held['owner']}, which makes no progress" if held else ""
        places.setdefault(stuck[rank]["waits_at"] + for_what, []).append(rank)
    for place, ranks in places.items():
        lines.append(f"{_ranks(ranks, 'waits', 'wait')} at {place}")
    return "\n".join(lines)


def _behind(stuck: dict[int, Record], num_ranks: int) -> list[int]:
    """The ranks, among those that wait for no lock, that are least far in `PHASES`; none if that is all of them."""
    came_to = {
        rank: (record["phase"], record["doing"] != PHASES[record["phase"]])  # the second: past the phase's beginning
        for rank, record in stuck.items()
        if not record["waits_for"]
    }
    behind = [rank for rank, place in sorted(came_to.items()) if place == min(came_to.values())]
    return behind if len(behind) < num_ranks or num_ranks == 1 else []


def moment(record: Record) -> str:
    """Describe what a rank did last."""
    return f"{record['doing']} of step {record['step']}" if record["step"] else record["doing"]


def _describe_fault(
    rank: int, stuck: dict[int, Record], beats: dict[int, Record], unequal: list[Collective]
) -> list[str]:
    record = stuck.get(rank) or beats.get(rank)
    who = f"rank {rank}" + (f" (process {record['pid']} on {record['host']})" if record else "")
    did = f"Last heartbeat: {moment(record)}." if record else "It never sent a heartbeat."
    where = [
        f"{collective.op} number {collective.number}"
        + ("" if collective.group == "0" else f" of group {collective.group}")
        + f", in which {_ranks(collective.inside, 'waits', 'wait')}"
        for collective in unequal
        if rank in collective.missing
    ]
    what = f"never entered {'; nor '.join(where)}" if where else "makes no progress" if rank in stuck else "is silent"
    lines = [f"{who} {what}. {did}"]
    if rank not in stuck:
        lines.append("  It wrote nothing: it is stopped or dead, or in C code that holds the GIL.")
    else:
        lines.append(f"  It is at {stuck[rank]['waits_at']}; its main thread:")
        lines += [f"    {line}" for line in stuck[rank]["stacks"].get("main", [])]
    return lines


def _ranks(ranks: list[int], singular: str = "", many: str = "") -> str:
    text = f"rank {ranks[0]} {singular}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} {many}"
    return text.rstrip()
