"""Through which network interface does a rank talk to the others?

gloo binds what its own host name resolves to, which on many machines is loopback. Across
machines it has to be the interface that routes to rank zero's machine.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping, Sequence

__all__ = ["GLOO", "choose_interface", "interface_addresses", "source_address", "wrong_interface"]

GLOO = "GLOO_SOCKET_IFNAME"
SIOCGIFCONF = 0x8912
"""Linux's request for all interfaces with an IPv4 address, from ``linux/sockios.h``."""


def wrong_interface(value: str, addresses: Mapping[str, Sequence[str]]) -> str | None:
    """Return what is wrong with a value of ``GLOO_SOCKET_IFNAME``, None if nothing is.

    ``addresses`` are those of this machine's interfaces, by name.

    >>> wrong_interface("eth0", {"eth0": ["10.0.0.1"]})
    >>> wrong_interface("10.0.0.1", {"eth0": ["10.0.0.1"]})
    "'10.0.0.1' is an address, and gloo wants the interface's name: 'eth0'"
    >>> wrong_interface("ifb0", {"eth0": ["10.0.0.1"], "ifb0": []})
    "the interface 'ifb0' has no address"
    """
    known = ", ".join(sorted(addresses))
    for name in value.split(","):
        if name in addresses:
            # Where none has any, as outside of Linux, this machine does not tell them.
            if addresses[name] or not any(addresses.values()):
                continue
            return f"the interface {name!r} has no address"
        if name.startswith(("^", "=")):
            return (
                f"{name!r} is the way NCCL excludes interfaces; gloo wants the name of one to "
                f"use: {known}"
            )
        owner = next((each for each, own in addresses.items() if name in own), None)
        if owner is not None:
            return f"{name!r} is an address, and gloo wants the interface's name: {owner!r}"
        return f"there is no interface {name!r} on this machine, which has {known}"
    return None


def choose_interface(own_address: str, addresses: Mapping[str, Sequence[str]]) -> str | None:
    """Return the interface that has an address of this machine, None if none has.

    >>> choose_interface("10.0.0.1", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]})
    'eth0'
    """
    for name, own in addresses.items():
        if own_address in own:
            return name
    loopback = ipaddress.ip_address(own_address).is_loopback  # 127.0.1.1 is on no interface's list
    return next((name for name in addresses if loopback and name in ("lo", "lo0")), None)


def source_address(host: str, port: int) -> str | None:
    """Return this machine's own address on the way to a host; nothing is sent.

    None where there is no way there, and where the name does not resolve.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]  # without the scope of fe80::
    return None


def interface_addresses() -> dict[str, list[str]]:
    """Return the addresses of this machine's interfaces, by name; the lists are empty off Linux."""
    addresses: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    if sys.platform != "linux":
        return addresses
    for name, address in [*_ipv4_addresses(), *_ipv6_addresses()]:
        addresses.setdefault(name, []).append(address)
    return addresses


def _ipv4_addresses() -> list[tuple[str, str]]:
    import array
    import fcntl

    size = 40 if struct.calcsize("P") == 8 else 32  # of one struct ifreq
    room = array.array("B", bytes(256 * size))
    start, length = room.buffer_info()
    request = struct.pack("iP", length, start)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFCONF, request)
    filled = struct.unpack("iP", answer)[0]
    entries = [room[i : i + size].tobytes() for i in range(0, filled, size)]
    return [
        (entry[:16].split(b"\0", 1)[0].decode().partition(":")[0], socket.inet_ntoa(entry[20:24]))
        for entry in entries
    ]


def _ipv6_addresses() -> list[tuple[str, str]]:
    try:
        with open("/proc/net/if_inet6") as table:
            rows = [line.split() for line in table]
    except OSError:
        return []
    return [(row[5], str(ipaddress.ip_address(bytes.fromhex(row[0])))) for row in rows]
