"""A frontier and points to compare with → SVG text, or a file: memory across, time upwards, time split in its parts.

As figure 6 of TensorOpt: the frontier as a solid line, its compute and network time as dotted ones, the turning point
and the other systems marked. A point's shape and colour tell its engine; it is hollow where modules are computed again
or batches in parts to save memory. Resting the pointer on a point tells its strategy in words; the page has these words
in a table as well. Written by hand, so that no plotting library is needed. A page may give the classes `paper` and
`ink` other colours.
"""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from html import escape
from os import PathLike

from offbeat import files
from offbeat.errors import OffbeatError
from offbeat.search.frontier.model import Frontier, FrontierPoint
from offbeat.strategy import describe
from offbeat.strategy.model import Engine
from offbeat.units import format_bytes, format_seconds

LEAST_TICKS, MOST_TICKS = 3, 8
WIDTH, LEFT, RIGHT = 480, 68, 448
"""Narrow, so that the letters can be read where a telephone shows all of it."""
TOP, BOTTOM = 48, 348
_LEGEND, _ENTRY = BOTTOM + 64, 20
_TITLE_LETTERS = 64
_LINES = (
    ("time_seconds", "frontier", "#1b6ca8", ""),
    ("compute_seconds", "of it compute", "#3a9d5d", ' stroke-dasharray="2 4"'),
    ("network_seconds", "of it network", "#c8553d", ' stroke-dasharray="2 4"'),
)
_STYLE = """
body { margin: 0 auto; max-width: 920px; padding: 16px; font: 15px/1.5 sans-serif; color-scheme: light dark; }
svg { width: 100%; max-width: 720px; height: auto; display: block; }
table { border-collapse: collapse; font-size: 14px; margin-top: 16px; }
th, td { text-align: left; vertical-align: top; padding: 6px 14px 6px 0; border-bottom: 1px solid #8886; }
td:not(:last-child), th { white-space: nowrap; }
@media (max-width: 640px) {
  thead { display: none; }
  tr, th, td { display: block; padding: 2px 0; border: 0; }
  tr { padding: 8px 0; border-bottom: 1px solid #8886; }
  td::before { content: attr(data-label) ": "; opacity: 0.7; }
}
@media (prefers-color-scheme: dark) {
  body { background: #14161a; color: #e8eaee; }
  .paper { fill: #14161a; } text.ink { fill: #e8eaee; } path.ink { stroke: #e8eaee; }
}
"""
_SIGNS: dict[Engine, tuple[str, str, str]] = {
    "replicated": ("replicated", "#b8860b", "M-4.5 -4.5h9v9h-9z"),
    "sharded": ("updates sharded", "#c2185b", "M0 5L-5.5 -4.5H5.5z"),
    "fsdp": ("FSDP2", "#00838f", "M0 -5.5L5.5 4.5H-5.5z"),
    "split": ("operators split", "#1b6ca8", "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z"),
}
"""By engine what the legend says, a colour and the outline of a point."""
_MARKS = ("#7a4fa3", "#b8860b", "#808080", "#c2185b", "#00838f", "#5d4037")


def draw(frontier: Frontier, path: str | PathLike[str], marked: Mapping[str, FrontierPoint] | None = None) -> None:
    """Writes the picture; the name must end in .svg or .html."""
    kind = str(path).lower().rpartition(".")[2]
    if kind not in ("svg", "html"):
        raise OffbeatError(f"{path}: the frontier is drawn as SVG or HTML, so its file must end in .svg or .html")
    drawn = svg(frontier, marked)
    if kind == "html":
        head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        head += f"<title>{escape(frontier.title)}</title><style>{_STYLE}</style>"
        drawn = f'<!doctype html><html lang="en"><head>{head}</head><body>{drawn}{table(frontier)}</body></html>\n'
    files.write_atomic(path, drawn.encode(), "picture")


def table(frontier: Frontier) -> str:
    """The points in words, as an HTML table."""
    heads, rows = ("memory", "engine", "time", "of it compute", "of it network", "what is done"), []
    for point in frontier.points:
        parts = (point.time_seconds, point.compute_seconds, point.network_seconds)
        cells = zip(heads[1:], [point.name, *map(format_seconds, parts), "; ".join(_words(point))], strict=True)
        rest = "".join(f'<td data-label="{head}"><span>{escape(cell)}</span></td>' for head, cell in cells)
        rows.append(f'<tr><th scope="row">{format_bytes(point.memory_bytes)}</th>{rest}</tr>')
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def svg(
    frontier: Frontier, marked: Mapping[str, FrontierPoint] | None = None, measured_seconds: float | None = None
) -> str:
    """The picture as text; with the time of a measured step as a line, because recordings know no memory."""
    if not frontier.points:
        raise OffbeatError("the frontier has no points to draw")
    shown = {"turning point": frontier.turning_point, **(marked or {})}
    every = [*frontier.points, *shown.values()]
    across, memory_ends = _scale([point.memory_bytes for point in every], LEFT, RIGHT)
    longest = max(*(point.time_seconds for point in every), measured_seconds or 0.0)
    least = min(min(p.time_seconds, p.compute_seconds, p.network_seconds) for p in frontier.points)
    least = min(least, measured_seconds or least)
    up, time_ends = _scale([longest, max(least, longest / 1e4)], BOTTOM, TOP)
    hollow = any(point.savings for point in frontier.points)
    entered = len(_LINES) + len(frontier.engines) + len(shown) + (measured_seconds is not None)
    rows = math.ceil(entered / 2) + hollow
    height = _LEGEND + _ENTRY * rows
    title = textwrap.wrap(frontier.title, _TITLE_LETTERS, max_lines=2, placeholder="…")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect class="paper" width="{WIDTH}" height="{height}" fill="white"/>',
        *(f'<text class="ink" x="10" y="{18 + 17 * n}" font-size="13">{escape(x)}</text>' for n, x in enumerate(title)),
        *_axes(
            _spaced({across(value): format_bytes(value) for value in _round_ticks(*memory_ends, 2.0)}, 56),
            _spaced({up(value): format_seconds(value) for value in _round_ticks(*time_ends, 10.0)}, 16),
        ),
    ]
    entries = [(label, _line("M0 0h18", colour, dashed)) for _, label, colour, dashed in _LINES]
    for name, _, colour, dashed in _LINES:
        places = [(across(p.memory_bytes), up(max(getattr(p, name), longest / 1e4))) for p in frontier.points]
        parts.append(_line("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places), colour, dashed))
    for p in frontier.points:
        _, colour, outline = _SIGNS[p.engine]
        at = f'transform="translate({across(p.memory_bytes):.1f} {up(p.time_seconds):.1f})"'
        parts.append(f'<g class="point" {at}>{_sign(outline, colour, bool(p.savings), _about(p))}</g>')
    for engine in frontier.engines:
        label, colour, outline = _SIGNS[engine]
        entries.append((label, f'<g transform="translate(9 0)">{_sign(outline, colour)}</g>'))
    if measured_seconds is not None:
        colour, dashed = _MARKS[2], ' stroke-dasharray="6 3"'
        parts.append(_line(f"M{LEFT} {up(measured_seconds):.1f}H{RIGHT}", colour, dashed))
        entries.append((f"measured, {format_seconds(measured_seconds)}", _line("M0 0h18", colour, dashed)))
    for row, (label, point) in enumerate(shown.items()):
        colour = _MARKS[row % len(_MARKS)]
        # A ring leaves the sign of the point inside to be seen.
        ring = f'r="8" fill="none" stroke="{colour}" stroke-width="2"' if not row else f'r="5" fill="{colour}"'
        x, y = across(point.memory_bytes), up(point.time_seconds)
        about = f"{label}: {_about(point)}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" {ring}><title>{escape(about)}</title></circle>')
        entries.append((label, f'<circle cx="9" cy="0" {ring}/>'))
    if hollow:
        entries += [("", "")] * (len(entries) % 2)
        around = f'<g transform="translate(9 0)">{_sign(_SIGNS["split"][2], "#808080", hollow=True)}</g>'
        entries.append(("hollow: modules are computed again, or micro-batches", around))
    for row, (label, sign) in enumerate(entries):
        parts += _entry(row, label, sign)
    return "\n".join([*parts, "</svg>", ""])


def _line(path: str, colour: str, dashed: str) -> str:
    return f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashed}/>'


def _sign(outline: str, colour: str, hollow: bool = False, about: str = "") -> str:
    """A point's mark around 0 0, with what is told to who rests the pointer on it."""
    inside = 'class="paper" fill="white"' if hollow else f'fill="{colour}" fill-opacity="0.6"'
    told = f"<title>{escape(about)}</title>" if about else ""
    return f'<path d="{outline}" {inside} stroke="{colour}" stroke-width="{1.5 if hollow else 0.5}">{told}</path>'


def _entry(number: int, label: str, sign: str) -> list[str]:
    """One entry of the legend, which stands below in two columns."""
    x, y = LEFT + (number % 2) * (RIGHT - LEFT) // 2, _LEGEND + _ENTRY * (number // 2)
    return [
        f'<g transform="translate({x} {y})">{sign}</g>',
        f'<text class="ink" x="{x + 26}" y="{y + 4}">{escape(label)}</text>',
    ]


def _axes(across: dict[float, str], up: dict[float, str]) -> list[str]:
    """Both axes with the labels of their ticks, by place."""
    parts = [f'<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="black" class="ink"/>']
    for x, label in across.items():
        parts.append(f'<path d="M{x:.1f} {BOTTOM}v5" stroke="black" class="ink"/>')
        parts.append(f'<text class="ink" x="{x:.1f}" y="{BOTTOM + 20}" text-anchor="middle">{label}</text>')
    for y, label in up.items():
        parts.append(f'<path d="M{LEFT} {y:.1f}h-5" stroke="black" class="ink"/>')
        parts.append(f'<text class="ink" x="{LEFT - 9}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    below, beside = f'x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 40}"', f"translate(14 {(TOP + BOTTOM) / 2}) rotate(-90)"
    parts.append(f'<text class="ink" {below} text-anchor="middle">memory of each device (log)</text>')
    return [*parts, f'<text class="ink" transform="{beside}" text-anchor="middle">time per step (log)</text>']


def _about(point: FrontierPoint) -> str:
    """A point in words, for who rests the pointer on it."""
    first = f"{point.name}: {format_bytes(point.memory_bytes)}, {format_seconds(point.time_seconds)} a step"
    return "\n".join([first, *_words(point)])


def _words(point: FrontierPoint) -> list[str]:
    if point.strategy is None:
        return []
    meshes = Counter("x".join(map(str, each.mesh)) for each in point.strategy.operators.values())
    return [
        *(f"{count} operator{'s' * (count > 1)} on a mesh of {mesh}" for mesh, count in meshes.most_common(3)),
        *describe(point.strategy),
    ]


def _round_ticks(first: float, last: float, base: float) -> list[float]:
    """Round values between two ends: powers of `base` where some lie between, else 1, 2 or 5 times a power of ten, in
    the unit that bytes are shown in where `base` is 2."""
    if first == last:
        return [first]
    unit = 1024.0 ** math.floor(math.log(last, 1024)) if base == 2 else 1.0
    low, high = first / unit * (1 - 1e-9), last / unit * (1 + 1e-9)
    ends = math.ceil(math.log(low, base)), math.floor(math.log(high, base))
    powers = [[base**power for power in range(ends[0], ends[1] + 1) if power % every == 0] for every in (1, 2, 5, 10)]
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = [factor * 10.0**power for power in tens for factor in (1, 2, 5)]
    largest = math.floor(math.log10(high - low))
    widths = [factor * 10.0**power for power in (largest - 1, largest) for factor in (1, 2, 5)]
    even = ([n * width for n in range(math.ceil(low / width), math.floor(high / width) + 1)] for width in widths)
    found = (
        inside
        for ticks in (*powers, few, *even)
        if LEAST_TICKS <= len(inside := [tick for tick in ticks if low <= tick <= high]) <= MOST_TICKS
    )
    return [tick * unit for tick in next(found, [low, high])]


def _spaced(labels: dict[float, str], least: float) -> dict[float, str]:
    """Labels by place, in order, without those too near to the one before."""
    kept: dict[float, str] = {}
    for place, label in labels.items():
        if all(abs(place - other) >= least for other in kept):
            kept[place] = label
    return kept


def _scale(values: list[float], low: float, high: float) -> tuple[Callable[[float], float], tuple[float, float]]:
    """Logarithmic, and its ends; a single value lies in the middle."""
    positive = [value for value in values if value > 0] or [1.0]
    first, last = min(positive), max(positive)
    if first == last:
        return lambda _: (low + high) / 2, (first, last)
    width = (high - low) / math.log(last / first)
    return lambda value: low + math.log(max(value, first) / first) * width, (first, last)
