"""Emulate a cluster on one machine with network namespaces and shaped links."""

from offbeat.emulate.emulation import Emulation, Host, RankError

__all__ = ["Emulation", "Host", "RankError"]
