"""Timelines: spans of every rank and link on one clock; Chrome and Perfetto files, critical path, diagnosis."""

from offbeat.timeline.model import COMPUTE, KINDS, NETWORK, Builder, Kind, Span, Timeline

__all__ = ["COMPUTE", "KINDS", "NETWORK", "Builder", "Kind", "Span", "Timeline"]
