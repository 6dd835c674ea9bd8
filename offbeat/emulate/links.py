"""Open namespaces + one bandwidth per host → a switch with a shaped link to every host.

The switch is a bridge in the calling process's network namespace; each host gets one end of a veth pair. Both ends are
shaped by a token bucket, so the host's sending and receiving are limited separately, as on a full-duplex link. Everything
lives inside the namespaces and vanishes with them.
"""

import os
from collections.abc import Sequence
from typing import Any

from pyroute2 import IPRoute

from offbeat.emulate import linux

INTERFACE = "eth0"
MTU = int(os.environ.get("X_MTU", 65000))
_BURST_SECONDS = float(os.environ.get("X_BS", 2e-4))
_BURST_BYTES = int(os.environ.get("X_BB", 70000))
_QUEUE_BYTES = int(os.environ.get("X_QB", 4 * 2**20))
_HANDLE = 0x10000
_SYSTEM = "/proc/sys/net"


class Network:
    """The switch and the links, kept open so that shaping can change while the hosts run."""

    def __init__(self, namespaces: Sequence[int], addresses: Sequence[str], latency_seconds: float | None) -> None:
        own = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._latency_seconds = latency_seconds
        self._switch = _open_here()
        self._bridge = _bridge(self._switch)
        self._hosts: list[IPRoute] = []
        for index, (namespace, address) in enumerate(zip(namespaces, addresses, strict=True)):
            linux.setns(namespace, linux.CLONE_NEWNET)
            host = _open_here()
            linux.setns(own, linux.CLONE_NEWNET)
            self._hosts.append(host)
            _plug(self._switch, self._bridge, index, namespace)
            _configure(host, address)
        os.close(own)

    def shape(self, host: int, bytes_per_second: float | None) -> None:
        """Limits both directions of a host's link; None lifts the limit."""
        _shape(self._hosts[host], INTERFACE, bytes_per_second, self._latency_seconds)
        _shape(self._switch, _port(host), bytes_per_second, None)


def _open_here() -> IPRoute:
    _write("ipv6/conf/default/disable_ipv6", "1")
    _write("ipv4/tcp_congestion_control", os.environ.get("X_CC", "cubic"))
    return IPRoute()


def _bridge(switch: IPRoute) -> int:
    switch.link("add", ifname="switch", kind="bridge", mtu=MTU)
    bridge = switch.link_lookup(ifname="switch")[0]
    switch.link("set", index=bridge, state="up")
    return bridge


def _plug(switch: IPRoute, bridge: int, index: int, namespace: int) -> None:
    peer: dict[str, Any] = {"ifname": INTERFACE, "net_ns_fd": namespace, "mtu": MTU}
    switch.link("add", ifname=_port(index), kind="veth", mtu=MTU, peer=peer)
    port = switch.link_lookup(ifname=_port(index))[0]
    switch.link("set", index=port, master=bridge, state="up")


def _configure(host: IPRoute, address: str) -> None:
    host.link("set", index=host.link_lookup(ifname="lo")[0], state="up")
    interface = host.link_lookup(ifname=INTERFACE)[0]
    host.addr("add", index=interface, address=address, prefixlen=16)
    host.link("set", index=interface, state="up")


def _shape(route: IPRoute, interface: str, bytes_per_second: float | None, latency_seconds: float | None) -> None:
    index = route.link_lookup(ifname=interface)[0]
    if bytes_per_second:
        burst = max(_BURST_BYTES, int(bytes_per_second * _BURST_SECONDS))
        route.tc("replace", "tbf", index, _HANDLE, rate=int(bytes_per_second), burst=burst, limit=_QUEUE_BYTES + burst)


def _port(host: int) -> str:
    return f"port{host}"


def _write(name: str, value: str) -> None:
    try:
        with open(f"{_SYSTEM}/{name}", "w") as stream:
            stream.write(value)
    except OSError:
        pass
