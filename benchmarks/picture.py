"""Step times of DDP's default, the best DDP and Offbeat, and the bound → docs/images/step_times.svg, as text.

Every case of a results file is drawn, in one scale: times over the case's bound, so that all bounds stand in one line.
"""

import textwrap
from dataclasses import dataclass
from html import escape

from tables import Lines, Result, gpu_cases, gpu_decided, gpu_failed, gpu_setting, listed

WIDTH, MARGIN, GAP = 800, 16, 24
LABEL, RATIO = 176, 40
"""Width of a case's name, and of the ratio on its right."""
BAR, CASE, HEAD, LINE = 7, 28, 40, 16
"""Heights: a bar, a case, what stands above a group, a line of text."""
ONE_COLUMN = 12
"""The most cases that stand in one column."""
COLOURS = {"DDP, default buckets": "#9aa3ad", "DDP, best buckets": "#4c86c6", "Offbeat, auto": "#e08a2c"}
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#1f2328}.big{font-size:15px;font-weight:600}.head{font-weight:600}"
    ".soft{fill:#59636e}.page{fill:#fff}.grid{stroke:#d1d9e0}.bound{stroke:#1f2328;stroke-width:2}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.page{fill:#0d1117}.grid{stroke:#3d444d}"
    ".bound{stroke:#e6edf3}}"
)


@dataclass(frozen=True)
class Case:
    """The bars of one case."""

    name: str
    default_ms: float
    best_ms: float
    auto_ms: float
    bound_ms: float
    decided: bool
    """Whether Offbeat's blocks and the best DDP's lie apart."""


@dataclass(frozen=True)
class Panel:
    """What one results file contributes."""

    about: str
    """The machine and the command."""
    groups: dict[str, list[Case]]


def auto_panel(result: Result, command: str) -> Panel:
    groups: dict[str, list[Case]] = {}
    for row in result["rows"]:
        group = f"CPU: {row['hosts']} hosts, {row['compute']} compute{', clipped' if row['clip'] else ''}"
        groups.setdefault(group, []).append(_case(row, row["decided"]))
    made = result.get("made", {})
    processor = f"{made['machine']['processor']}, " if made else ""
    about = f"CPU hosts: emulated on {processor}{result['machine']['cores']} cores; {made.get('command', command)}"
    return Panel(about, groups)


def gpu_panel(result: Result, command: str) -> Panel:
    groups: dict[str, list[Case]] = {}
    cases = gpu_cases(result)
    for row in cases:
        group = f"GPU: {row['ranks']} ranks, {row['gbit']} Gbit/s{gpu_setting(row)}"
        groups.setdefault(group, []).append(_case(row, gpu_decided(row)))
    devices = listed(sorted({row["device"] for row in cases}))
    failed = f"; failed: {'; '.join(gpu_failed(result))}" if gpu_failed(result) else ""
    return Panel(f"GPU ranks: NCCL, emulated hosts on one {devices}; {command}{failed}", groups)


def _case(row: Result, decided: bool) -> Case:
    median = row["median_ms"]
    times = median["ddp_default"], median[row["best"]], median["auto"], row["bound_ms"]
    return Case(f"{row['model']}, {row['regime']}", *times, decided)


def draw(panels: list[Panel]) -> str:
    """The picture as SVG."""
    groups = [group for panel in panels for group in panel.groups.items()]
    cases = [case for _, of in groups for case in of]
    most = max((max(case.default_ms, case.auto_ms) / case.bound_ms for case in cases), default=1.0)
    columns = _columns(groups) if len(cases) > ONE_COLUMN else [groups]
    width = (WIDTH - 2 * MARGIN - GAP * (len(columns) - 1)) / len(columns)
    parts, top = _title(panels)
    for number, column in enumerate(columns):
        y, left = float(top), MARGIN + number * (width + GAP)
        for name, of in column:
            parts += _group(name, of, left, y, width, most)
            y += _height(of)
    height = top + max((sum(_height(of) for _, of in column) for column in columns), default=0) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'role="img" aria-label="Step times of DDP and Offbeat over the bound">',
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _columns(groups: list[tuple[str, list[Case]]]) -> list[list[tuple[str, list[Case]]]]:
    """Two columns, in order, as equal in height as may be."""
    heights = [_height(of) for _, of in groups]
    cut = min(range(len(groups) + 1), key=lambda cut: max(sum(heights[:cut]), sum(heights[cut:])))
    return [groups[:cut], groups[cut:]]


def _height(cases: list[Case]) -> int:
    return HEAD + CASE * len(cases) + LINE


def _title(panels: list[Panel]) -> tuple[Lines, int]:
    """What stands above the bars, and where they may begin."""
    parts = [_text(MARGIN, 28, "Step time over the bound, max(compute, network): shorter is better", "big")]
    y, x = 46, float(MARGIN)
    for panel in panels:
        for line in textwrap.wrap(panel.about, 120, break_on_hyphens=False):
            parts.append(_text(MARGIN, y, line, "soft"))
            y += LINE
    y += 6
    for name, colour in COLOURS.items():
        parts += [f'<rect x="{x}" y="{y - 8}" width="18" height="{BAR + 1}" fill="{colour}"/>', _text(x + 24, y, name)]
        x += 158
    parts += [f'<path class="bound" d="M{x} {y - 10}v12"/>', _text(x + 8, y, "bound")]
    parts.append(_text(WIDTH - MARGIN, y, "right: best DDP / Offbeat, ~ noisy", "soft", "end"))
    return parts, y + LINE


def _group(name: str, cases: list[Case], left: float, top: float, width: float, most: float) -> Lines:
    """A heading, the bars of its cases and the line of their bounds."""
    begin, scale = left + LABEL, (width - LABEL - RATIO) / most
    first, last = top + HEAD - 12, top + HEAD + CASE * len(cases) - 4
    parts = [_text(left, top + 20, name, "head")]
    for half in range(int(most * 2) + 1):
        x = begin + half / 2 * scale
        parts.append(f'<path class="grid" d="M{x:.1f} {first:.1f}V{last:.1f}"/>')
        parts.append(_text(x, last + 12, f"{half / 2:g}×", "soft", "middle"))
    for number, case in enumerate(cases):
        y = top + HEAD - 8 + CASE * number
        parts.append(_text(left, y + 15, case.name))
        for bar, (colour, ms) in enumerate(
            zip(COLOURS.values(), (case.default_ms, case.best_ms, case.auto_ms), strict=True)
        ):
            over = ms / case.bound_ms
            parts.append(
                f'<rect x="{begin:.1f}" y="{y + bar * BAR:.1f}" width="{over * scale:.1f}" height="{BAR - 1}" '
                f'fill="{colour}"><title>{ms:.1f} ms, {over:.2f} × bound</title></rect>'
            )
        x = begin + scale
        parts.append(f'<path class="bound" d="M{x:.1f} {y - 1:.1f}v{3 * BAR + 1}"/>')
        ratio = f"{'' if case.decided else '~'}{case.best_ms / case.auto_ms:.2f}"
        parts.append(_text(left + width, y + 15, ratio, "soft", "end"))
    return parts


def _text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    shown = f' class="{kind}"' if kind else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{shown}{placed}>{escape(words)}</text>'
