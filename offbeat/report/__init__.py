"""The self-contained HTML report and the live what-if page."""

from offbeat.report.contents import Report, make_report
from offbeat.report.page import render, write_report

__all__ = ["Report", "make_report", "render", "write_report"]
