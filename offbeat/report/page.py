"""Write a report as one HTML file that works offline, with styles, scripts and packed timelines inside.

Its Content-Security-Policy allows exactly the inlined style and script, by their digests, and no request to anywhere.
Texts of a trace reach the page through the template's escaping, as JSON in which '<' is written as an escape, or packed
and in base64; the scripts only ever set them as text.
"""

import base64
import hashlib
from functools import cache
from importlib.resources import files as resources
from os import PathLike
from typing import Any

import orjson
from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from offbeat import files
from offbeat.profile.measure import Profile
from offbeat.report.contents import Report, make_report
from offbeat.report.scene import MOST_BYTES, kinds_of, pack_timeline
from offbeat.report.steps import PARTS, parts_legend, rank_rows
from offbeat.search.frontier.picture import svg, table
from offbeat.timeline import Timeline
from offbeat.timeline.diagnosis import IDLE, short_name
from offbeat.units import format_bytes, format_seconds, format_speedup

SCRIPTS = ("charts.js", "timeline.js", "report.js")
_MOST_PREDICTED_BYTES = 2**20


def write_report(path: str | PathLike[str], recording: Profile | Timeline, **options: Any) -> Report:
    """Makes the report (`offbeat.report.make_report` names the options) and writes its page."""
    report = make_report(recording, **options)
    files.write_atomic(path, render(report).encode(), "report")
    return report


def render(report: Report) -> str:
    """The whole page."""
    style, script = asset("style.css"), "\n".join(map(asset, SCRIPTS))
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    allowed = "script-src 'sha256-{}'; style-src 'sha256-{}'".format(*digests)
    # No HTML parser takes the escaped JSON for the end of its element.
    numbers = orjson.dumps(_numbers(report)).decode()
    numbers = numbers.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    measured = report.step_seconds if report.timeline.source == "measured" else None
    return _template().render(
        report=report,
        diagnosis=report.diagnosis,
        part_names=PARTS,
        idle=IDLE,
        speedup=format_speedup,
        policy=f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        script=Markup(script),
        frontier=Markup(svg(report.frontier, measured_seconds=measured) if report.frontier else ""),
        frontier_table=Markup(table(report.frontier) if report.frontier else ""),
        data=Markup(numbers),
        scenes=_scenes(report),
        other_scene=_packed(report.other.timeline, report.other.nodes, MOST_BYTES // 2) if report.other else "",
        comparison_rows=report.comparison.rows if report.comparison else [],
        strategies=[explanation.text().split("\n") for explanation in report.explanations],
    )


@cache
def asset(name: str) -> str:
    """Text of a file in this package."""
    return resources("offbeat.report").joinpath("assets", name).read_text("utf-8")


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {
        "seconds": _seconds,
        "bytes": format_bytes,
        "percent": "{:.1%}".format,
        "signed_percent": lambda share: f"{share:+.1%}".replace("-", "−"),
        "short_name": short_name,
    }
    return environment.from_string(asset("report.html.j2"))


def _seconds(seconds: float) -> str:
    """To the nanosecond, so that the rounding errors of sums are not shown."""
    rounded = round(seconds, 9)
    return format_seconds(rounded).replace(" us", " µs").replace("-", "−") if rounded else "0 s"


def _numbers(report: Report) -> dict[str, Any]:
    """The data that the scripts draw in addition to the timeline."""
    what_ifs = report.help
    return {
        "parts": parts_legend(),
        "kinds": kinds_of(report.timeline),
        "mean": report.parts,
        "steps": list(report.steps),
        "step_parts": list(report.step_parts) or None,
        "ranks": rank_rows(report.diagnosis.ranks),
        "base_seconds": what_ifs.base_seconds if what_ifs else 0.0,
        "what_ifs": what_ifs.to_dict()["rows"] if what_ifs else [],
    }


def _scenes(report: Report) -> list[tuple[str, str]]:
    """(source, packed timeline in base64); what was recorded comes first."""
    drawn: list[tuple[str, Timeline, int]] = [(report.timeline.source, report.timeline, MOST_BYTES)]
    if report.comparison is not None:
        drawn.append(("predicted", report.comparison.predicted, _MOST_PREDICTED_BYTES))
    return [(source, _packed(timeline, report.nodes, most)) for source, timeline, most in drawn]


def _packed(timeline: Timeline, nodes: dict[int, str], most_bytes: int) -> str:
    return base64.b64encode(pack_timeline(timeline, nodes, most_bytes)).decode()
