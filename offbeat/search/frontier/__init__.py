"""Costs of configurations → the non-dominated (memory, time) points and the choices behind each."""

from offbeat.search.frontier.track import track

__all__ = ["track"]
