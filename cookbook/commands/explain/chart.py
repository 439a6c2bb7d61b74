"""A curve drawn in a terminal, in braille dots or plain letters."""

from collections.abc import Sequence

LETTERS = "⠿┤└─"
"""Letters that `draw` needs without `plain`."""
WIDTH, HEIGHT = 60, 6
"""In characters; one has 2 x 4 dots."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character's dots, by column and row from the top (Unicode 17.0, chapter 21.1)."""


def draw(values: Sequence[float], *, bottom: str, top: str, ticks: Sequence[str], plain: bool = False) -> list[str]:
    """The lines of a chart of `values`, evenly spaced from left to right, over an axis that begins at 0.

    Args:
        bottom: text at the height of 0.
        top: text at the height of the largest value.
        ticks: texts under the axis, spread evenly from its left end to its right end.
        plain: ASCII only.
    """
    columns, rows = (WIDTH, HEIGHT) if plain else (2 * WIDTH, 4 * HEIGHT)
    heights = _heights(values, columns, rows)
    cells = [[0] * WIDTH for _ in range(HEIGHT)]
    for column, height in enumerate(heights):
        before = heights[max(0, column - 1)]
        # From the height before, so that a steep part is a line and not two dots.
        low, high = (min(height, before + 1), height) if height > before else (height, max(height, before - 1))
        for at in range(low, high + 1):
            row = rows - 1 - at
            if plain:
                cells[row][column] = ord("*")
            else:
                cells[row // 4][column // 2] |= 0x2800 | _DOTS[column % 2][row % 4]
    margin = max(len(bottom), len(top))
    side, corner, line = ("|", "+", "-") if plain else ("┤", "└", "─")
    labels = [top, *[""] * (HEIGHT - 2), bottom]
    lines = [
        f"{label:>{margin}} {side}" + "".join(chr(cell) if cell else " " for cell in row).rstrip()
        for label, row in zip(labels, cells, strict=True)
    ]
    return [*lines, " " * (margin + 1) + corner + line * WIDTH, " " * (margin + 2) + _spread(ticks)]


def _heights(values: Sequence[float], columns: int, rows: int) -> list[int]:
    """For each column the row of the value there, counted from the bottom."""
    largest = max(values) or 1.0
    places = (round(column * (len(values) - 1) / (columns - 1)) for column in range(columns))
    return [round(values[place] / largest * (rows - 1)) for place in places]


def _spread(ticks: Sequence[str]) -> str:
    line = [" "] * WIDTH
    for i, tick in enumerate(ticks):
        middle = round(i * (WIDTH - 1) / max(1, len(ticks) - 1))
        start = min(max(0, middle - len(tick) // 2), WIDTH - len(tick))
        line[start : start + len(tick)] = tick
    return "".join(line).rstrip()
