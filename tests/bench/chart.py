"""Tables in Markdown and pictures in SVG, written by hand: no library for two kinds of drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

INK, MUTED, GRID, PAPER = "#1f2430", "#6b7280", "#e3e6eb", "#ffffff"
COLOURS = ("#c2410c", "#1d4ed8", "#047857", "#7c3aed", "#b45309", "#0e7490")
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def text(x: float, y: float, words: str, size: int = 12, anchor: str = "start",
         colour: str = INK, weight: str = "normal") -> str:  # fmt: skip
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' fill='{colour}' "
        f"text-anchor='{anchor}' font-weight='{weight}'>{escape(words)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, more: str = "") -> str:
    return (
        f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{colour}' {more}/>"
    )


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' "
        f"width='{width:.0f}' height='{height:.0f}'>"
        f"<rect width='100%' height='100%' fill='{PAPER}'/>"
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers between two."""
    span = (high - low) or 1.0
    step = 10.0 ** math.floor(math.log10(span / most))
    step = next(step * k for k in (1, 2, 5, 10) if span / (step * k) <= most)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


def short(value: float) -> str:
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Lines over one axis."""

    title: str
    lines: Sequence[tuple[str, Points]]
    limit: tuple[str, float] | None = None


def panels(title: str, x_title: str, of: Sequence[Panel]) -> str:
    """Small multiples, two in a row."""
    wide, high, columns = 460.0, 210.0, 2
    rows = math.ceil(len(of) / columns)
    width, height = columns * wide + 20, rows * high + 90
    parts = [text(20, 28, title, 17, weight="bold")]
    names = [name for name, _ in of[0].lines] if of else []
    at = 20.0
    for name, colour in zip(names, COLOURS, strict=False):
        parts.append(_line(at, 45, at + 22, 45, colour, "stroke-width='3'"))
        parts.append(text(at + 28, 49, name, 12))
        at += 48 + 8 * len(name)
    for number, panel in enumerate(of):
        left = 20 + (number % columns) * wide
        top = 62 + (number // columns) * high
        parts += _panel(panel, left, top, wide - 20, high - 16)
    parts.append(text(width / 2, height - 10, x_title, 12, "middle", MUTED))
    return _document(width, height, parts)


def _panel(panel: Panel, left: float, top: float, wide: float, high: float) -> list[str]:
    inner_left, inner_top = left + 44, top + 24
    inner_wide, inner_high = wide - 52, high - 48
    points = [point for _, line in panel.lines for point in line] or [(0.0, 0.0)]
    low_x, high_x = min(x for x, _ in points), max(x for x, _ in points)
    top_y = max([y for _, y in points] + [panel.limit[1] if panel.limit else 0.0, 1e-9]) * 1.08

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1)
        return inner_left + across * inner_wide, inner_top + inner_high * (1 - y / top_y)

    parts = [text(left + 4, top + 14, panel.title, 11, weight="bold")]
    for y in ticks(0, top_y, 4):
        _, py = place(low_x, y)
        parts.append(_line(inner_left, py, inner_left + inner_wide, py, GRID))
        parts.append(text(inner_left - 5, py + 4, short(y), 10, "end", MUTED))
    for x in ticks(low_x, high_x, 7):
        px, _ = place(x, 0)
        parts.append(text(px, inner_top + inner_high + 14, short(x), 10, "middle", MUTED))
    if low_x < 0 < high_x:
        px, _ = place(0, 0)
        dash = "stroke-dasharray='2 3'"
        parts.append(_line(px, inner_top, px, inner_top + inner_high, MUTED, dash))
    if panel.limit:
        _, py = place(0, panel.limit[1])
        parts.append(_line(inner_left, py, inner_left + inner_wide, py, MUTED,
                           "stroke-dasharray='6 4'"))  # fmt: skip
        parts.append(text(inner_left + inner_wide, py - 4, panel.limit[0], 10, "end", MUTED))
    for (_, line), colour in zip(panel.lines, COLOURS, strict=False):
        path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line)
        parts.append(
            f"<polyline points='{path}' fill='none' stroke='{colour}' stroke-width='1.6'/>"
        )
    return parts


@dataclass(frozen=True)
class Bars:
    """A group of bars: what it compares, and each one's value with the words beside it."""

    title: str
    bars: Sequence[tuple[str, float, str]]


def bars(title: str, subtitle: str, groups: Sequence[Bars], ours: str = "serversync") -> str:
    """Groups of horizontal bars; ours in another colour."""
    row, head, left, wide = 22.0, 34.0, 250.0, 430.0
    width = left + wide + 230
    parts = [text(20, 30, title, 17, weight="bold"), text(20, 50, subtitle, 11, colour=MUTED)]
    y = 72.0
    for group in groups:
        parts.append(text(20, y + 14, group.title, 13, weight="bold"))
        y += head - 8
        most = max([value for _, value, _ in group.bars if value < math.inf] + [1e-12])
        for name, value, words in group.bars:
            length = max(1.0, wide * value / most)
            colour = COLOURS[1] if name.startswith(ours) else "#9aa3b2"
            parts.append(text(left - 8, y + 14, name, 12, "end"))
            parts.append(
                f"<rect x='{left:.1f}' y='{y + 3:.1f}' width='{length:.1f}' height='{row - 7:.1f}' "
                f"fill='{colour}' rx='2'/>"
            )
            parts.append(text(left + length + 6, y + 14, words, 11, colour=MUTED))
            y += row
        y += 18
    return _document(width, y + 10, parts)
