"""Tables of rules as text: a row is a rule, and a cell adds up products of amounts that code has computed."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, reduce
from operator import add
from typing import TypeVar

Number = TypeVar("Number", int, float)


def read_table(text: str) -> tuple[list[str], list[list[str]]]:
    """Names of the columns, and the cells of each row; two spaces or more separate them."""
    names, *rows = (re.split("  +", line) for line in text.strip().splitlines())
    assert all(len(row) == len(names) for row in rows), "a row has more or fewer cells than there are columns"
    return names, rows


def evaluate(cell: str, amounts: Mapping[str, Number]) -> Number:
    """The value of a cell such as `4*trained + frozen`; `-` is 0."""
    products = (math.prod(factor if isinstance(factor, int) else amounts[factor] for factor in t) for t in _terms(cell))
    return reduce(add, products, 0)  # not `sum`, which rounds floats in another way from Python 3.12 on


def add_up(names: Iterable[str], rows: Sequence[Sequence[str]], amounts: Mapping[str, Number]) -> dict[str, Number]:
    """The sum of each column of some rows, by its name; empty without rows."""
    return {
        name: evaluate(" + ".join(column), amounts)
        for name, column in zip(names, zip(*rows, strict=True), strict=bool(rows))
    }


@cache
def _terms(cell: str) -> list[list[str | int]]:
    terms = [term for term in cell.split(" + ") if term != "-"]
    return [[int(factor) if factor.isdigit() else factor for factor in term.split("*")] for term in terms]
