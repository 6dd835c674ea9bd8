"""Clusters: nodes, devices, links and measured collectives, from YAML, JSON or a preset's name."""

from offbeat.cluster.devices import DeviceKind, find_device
from offbeat.cluster.parts import Collective, CollectiveTable, Link, Node
from offbeat.cluster.spec import ClusterSpec

__all__ = ["ClusterSpec", "Collective", "CollectiveTable", "DeviceKind", "Link", "Node", "find_device"]
