"""Connect every host to a switch by a link of limited bandwidth.

The switch is a bridge in the calling process's own network namespace; each host gets one end of a veth pair. Both ends
are shaped by a token bucket, so that sending and receiving are limited separately, as on a full-duplex link. Everything
lives inside the namespaces and vanishes with them.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from offbeat.emulate import linux

INTERFACE = "eth0"
PREFIX_LENGTH = 16
_BRIDGE, _PORT = "switch", "port"
# One segment as large as TCP offload builds it: fewest packets, so that few cores can drive several links.
_MTU = 65_000
# The bucket must hold one whole packet with its headers, else it is cut up in software or dropped. Above 2.8 Gbit/s it
# also spans the time by which a busy processor may serve the queue late.
_BURST_BYTES = 70_000
_BURST_SECONDS = 2e-4
# Room for several senders that meet at one receiver, without a long queue on a slow link.
_QUEUE_BYTES = 2 * 2**20
_QUEUE_SECONDS = 0.02
_DELAY_PACKETS = 100_000
_ROOT = 0xFFFFFFFF
_TBF_HANDLE = 0x10000
_NETEM_HANDLE = 0x20000
_ABSENT = (errno.ENOENT, errno.ESRCH, errno.EINVAL)


class Network:
    """The switch and the links, kept open so that shaping can change while the hosts run."""

    def __init__(self, pids: Sequence[int], addresses: Sequence[str], latency_seconds: float | None) -> None:
        self._latency_seconds = latency_seconds
        self._switch = _open()
        self._switch.link("add", ifname=_BRIDGE, kind="bridge", mtu=_MTU)
        bridge = _index(self._switch, _BRIDGE)
        self._switch.link("set", index=bridge, state="up")
        home = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._hosts: list[IPRoute] = []
        for position, (pid, address) in enumerate(zip(pids, addresses, strict=True)):
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            linux.call("setns", namespace, linux.CLONE_NEWNET)
            host, port = _open(), f"{_PORT}{position}"
            linux.call("setns", home, linux.CLONE_NEWNET)
            self._hosts.append(host)
            peer: dict[str, Any] = {"ifname": INTERFACE, "net_ns_fd": namespace, "mtu": _MTU}
            self._switch.link("add", ifname=port, kind="veth", mtu=_MTU, peer=peer)
            self._switch.link("set", index=_index(self._switch, port), master=bridge, state="up")
            host.link("set", index=_index(host, "lo"), state="up")
            interface = _index(host, INTERFACE)
            host.addr("add", index=interface, address=address, prefixlen=PREFIX_LENGTH)
            host.link("set", index=interface, state="up")
            os.close(namespace)
        os.close(home)

    def shape(self, host: int, bytes_per_second: float | None) -> None:
        """Limits both directions of a host's link; None lifts the limit. The latency is added where the host sends."""
        _shape(self._hosts[host], INTERFACE, bytes_per_second, self._latency_seconds)
        _shape(self._switch, f"{_PORT}{host}", bytes_per_second, None)


def _open() -> IPRoute:
    # The same transport on every machine: only IPv4, and the congestion control that filled shaped links best (bbr, the
    # default on some systems, lost 2 to 10% of a link and took three times as long for small messages).
    for name, value in (("ipv6/conf/default/disable_ipv6", "1"), ("ipv4/tcp_congestion_control", "cubic")):
        with contextlib.suppress(OSError), open(f"/proc/sys/net/{name}", "w") as stream:
            stream.write(value)
    return IPRoute()


def _shape(route: IPRoute, interface: str, bytes_per_second: float | None, latency_seconds: float | None) -> None:
    index = _index(route, interface)
    parent = _ROOT
    if latency_seconds:
        microseconds = round(latency_seconds * 1e6)
        try:
            route.tc("replace", "netem", index, _NETEM_HANDLE, delay=microseconds, limit=_DELAY_PACKETS)
        except NetlinkError as error:
            raise OSError(error.code, "this kernel lacks the netem qdisc") from error
        parent = _NETEM_HANDLE + 1
    if bytes_per_second is None:
        try:
            route.tc("del", index=index, handle=_TBF_HANDLE, parent=parent)
        except NetlinkError as error:
            if error.code not in _ABSENT:
                raise
        return
    burst = max(_BURST_BYTES, round(bytes_per_second * _BURST_SECONDS))
    queue = max(_QUEUE_BYTES, round(bytes_per_second * _QUEUE_SECONDS))
    bucket = {"rate": round(bytes_per_second), "burst": burst, "limit": queue + burst}
    route.tc("replace", "tbf", index, _TBF_HANDLE, parent=parent, **bucket)


def _index(route: IPRoute, interface: str) -> int:
    return next(iter(route.link_lookup(ifname=interface)))
