"""A frontier and points to compare with → SVG text, or a file: memory across, time upwards, time split in its parts.

As figure 6 of TensorOpt: the frontier as a solid line, its compute and network time as dotted ones, the turning point
and the other systems marked. Written by hand, so that no plotting library is needed.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from html import escape
from os import PathLike

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.search.frontier.model import Frontier, FrontierPoint
from offbeat.strategy import describe
from offbeat.units import format_bytes, format_seconds

MOST_TICKS = 8
WIDTH, HEIGHT = 760, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 168, 36, 56
_LINES = (
    ("time_seconds", "frontier", "#1b6ca8", ""),
    ("compute_seconds", "of it compute", "#3a9d5d", ' stroke-dasharray="2 4"'),
    ("network_seconds", "of it network", "#c8553d", ' stroke-dasharray="2 4"'),
)
_MARKS = ("#7a4fa3", "#b8860b", "#444444", "#c2185b", "#00838f", "#5d4037")


def draw(frontier: Frontier, path: str | PathLike[str], marked: Mapping[str, FrontierPoint] | None = None) -> None:
    """Writes the picture; the name must end in .svg or .html."""
    kind = str(path).lower().rpartition(".")[2]
    if kind not in ("svg", "html"):
        raise OffbeatError(f"{path}: the frontier is drawn as SVG or HTML, so its file must end in .svg or .html")
    drawn, title = svg(frontier, marked), escape(frontier.title)
    if kind == "html":
        drawn = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>{drawn}</html>\n'
    files.write_atomic(path, drawn.encode(), "picture")


def svg(frontier: Frontier, marked: Mapping[str, FrontierPoint] | None = None) -> str:
    """The picture as text."""
    if not frontier.points:
        raise OffbeatError("the frontier has no points to draw")
    shown = {"turning point": frontier.turning_point, **(marked or {})}
    every = [*frontier.points, *shown.values()]
    across, memory_ends = _scale([point.memory_bytes for point in every], LEFT, WIDTH - RIGHT)
    longest = max(point.time_seconds for point in every)
    least = min(min(p.time_seconds, p.compute_seconds, p.network_seconds) for p in frontier.points)
    up, time_ends = _scale([longest, max(least, longest / 1e4)], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(frontier.title)}</text>',
        *_axes(
            {across(value): format_bytes(value) for value in _round_ticks(*memory_ends, 2.0)},
            {up(value): format_seconds(value) for value in _round_ticks(*time_ends, 10.0)},
        ),
    ]
    for row, (name, label, colour, dashed) in enumerate(_LINES):
        places = [(across(p.memory_bytes), up(max(getattr(p, name), longest / 1e4))) for p in frontier.points]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>')
        parts += _entry(row, label, f'<path d="M0 0h18" stroke="{colour}" stroke-width="2"{dashed}/>')
    parts += [
        f'<circle cx="{across(p.memory_bytes):.1f}" cy="{up(p.time_seconds):.1f}" r="4" fill="#1b6ca8" '
        f'fill-opacity="0.5"><title>{escape(_about(p))}</title></circle>'
        for p in frontier.points
    ]
    for row, (label, point) in enumerate(shown.items()):
        colour = _MARKS[row % len(_MARKS)]
        x, y = across(point.memory_bytes), up(point.time_seconds)
        about = f"{label}: {_about(point)}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{escape(about)}</title></circle>')
        parts += _entry(len(_LINES) + row, label, f'<circle cx="9" cy="0" r="5" fill="{colour}"/>')
    return "\n".join([*parts, "</svg>", ""])


def _entry(row: int, label: str, sign: str) -> list[str]:
    """One line of the legend."""
    x, y = WIDTH - RIGHT + 16, TOP + 8 + 20 * row
    return [f'<g transform="translate({x} {y})">{sign}</g>', f'<text x="{x + 26}" y="{y + 4}">{escape(label)}</text>']


def _axes(across: dict[float, str], up: dict[float, str]) -> list[str]:
    """Both axes with the labels of their ticks, by place."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="black"/>']
    for x, label in across.items():
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="black"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>')
    for y, label in up.items():
        parts.append(f'<path d="M{LEFT} {y:.1f}h-5" stroke="black"/>')
        parts.append(f'<text x="{LEFT - 9}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    below, beside = f'x="{(LEFT + right) / 2}" y="{HEIGHT - 14}"', f"translate(16 {(TOP + bottom) / 2}) rotate(-90)"
    parts.append(f'<text {below} text-anchor="middle">memory of each device (log)</text>')
    return [*parts, f'<text transform="{beside}" text-anchor="middle">time per step (log)</text>']


def _about(point: FrontierPoint) -> str:
    """A point in words, for who rests the pointer on it."""
    words = f"{format_bytes(point.memory_bytes)}, {format_seconds(point.time_seconds)} a step"
    if point.strategy is None:
        return words
    meshes = Counter("x".join(map(str, each.mesh)) for each in point.strategy.operators.values())
    split = [f"{count} operators on a mesh of {mesh}" for mesh, count in meshes.most_common(3)]
    return "\n".join([words, *split, *describe(point.strategy)])


def _round_ticks(first: float, last: float, base: float) -> list[float]:
    """Round values between two ends: powers of `base`, with 2 and 5 times those of ten; the ends if there is none."""
    if first == last:
        return [first]
    factors = (1.0, 2.0, 5.0) if base == 10 else (1.0,)
    powers = range(math.floor(math.log(first, base)), math.ceil(math.log(last, base)) + 1)
    ticks = [factor * base**power for power in powers for factor in factors]
    inside = [tick for tick in ticks if first * (1 - 1e-9) <= tick <= last * (1 + 1e-9)]
    return inside[:: math.ceil(len(inside) / MOST_TICKS)] if len(inside) > 1 else [first, last]


def _scale(values: list[float], low: float, high: float) -> tuple[Callable[[float], float], tuple[float, float]]:
    """Logarithmic, and its ends; a single value lies in the middle."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = min(positive), max(positive)
    if first == last:
        return lambda _: (low + high) / 2, (first, last)
    width = (high - low) / math.log(last / first)
    return lambda value: low + math.log(max(value, first) / first) * width, (first, last)
