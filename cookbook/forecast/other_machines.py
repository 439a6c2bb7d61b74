"""Machines with fewer, more or larger GPUs than those that were asked about."""

import re
from collections.abc import Iterator
from dataclasses import replace

from cookbook.system.hardware import GPUS, USUAL_GPUS, Machines, parse_machines

MORE_GPUS = 256
"""The most that are tried where fewer do not suffice."""


def fewer_gpus(machines: Machines, most: int) -> Iterator[Machines]:
    """At most so many of the GPUs, powers of two, the most first."""
    count = 1 << most.bit_length() - 1
    while count >= 1:
        each = min(count, 1 << machines.gpus_each.bit_length() - 1)
        yield _with_gpus(machines, count // each, each)
        count //= 2


def more_gpus(machines: Machines) -> Iterator[Machines]:
    """List the same GPUs, twice as many each time, powers of two: of a machine up to 8, then such machines."""
    each, count = machines.gpus_each, machines.num_machines
    while 2 * each * count <= MORE_GPUS:
        if each & (each - 1):
            each = 1 << each.bit_length()
        else:
            each, count = (2 * each, count) if 2 * each <= USUAL_GPUS and count == 1 else (each, 2 * count)
        yield _with_gpus(machines, count, each)


def larger_gpus(machines: Machines) -> Iterator[Machines]:
    """As many GPUs with more memory, as they are sold, the smallest first."""
    for gb in sorted({gpu.sold_gb for gpu in GPUS}):
        size = parse_machines(f"{gb}GB")
        if machines.usable_gib and size.usable_gib and size.usable_gib > machines.usable_gib:
            larger = replace(machines, text=size.text, gpu=None, usable_gib=size.usable_gib, note="")
            yield _with_gpus(larger, machines.num_machines, machines.gpus_each)


def more_and_larger_gpus(machines: Machines) -> Iterator[Machines]:
    """More GPUs with more memory, the least memory in all first, in machines of which nothing else is known."""
    bare = Machines(**{name: getattr(machines, name) for name in ("text", "num_machines", "gpus_each", "usable_gib")})
    both = [more for larger in larger_gpus(bare) for more in more_gpus(larger)]
    yield from sorted(both, key=lambda more: (more.num_gpus * (more.usable_gib or 0), more.num_gpus))


def _with_gpus(machines: Machines, count: int, each: int) -> Machines:
    """So many machines with so many of the GPUs."""
    kind = re.sub(r"^(\d+x)*", "", machines.text)
    text = f"{count}x" * (count > 1 or each > USUAL_GPUS) + f"{each}x{kind}"  # 12xH100 alone is not understood
    return replace(machines, text=text, gpus_each=each, num_machines=count)
