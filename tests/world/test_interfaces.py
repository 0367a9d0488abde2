"""Through which interface gloo talks."""

from __future__ import annotations

import socket
import sys

import pytest

from ddp_utils.world import interfaces

KNOWN = {"lo": ["127.0.0.1", "::1"], "eth0": ["10.0.0.1", "fe80::1"], "ib0": ["10.1.0.1"]}


@pytest.mark.parametrize("value", ["eth0", "lo", "eth0,ib0"])
def test_names_of_interfaces_are_right(value: str) -> None:
    assert interfaces.wrong_interface(value, KNOWN) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("^lo", "the way NCCL excludes"),
        ("=eth0", "the way NCCL excludes"),
        ("10.1.0.1", "gloo wants the interface's name: 'ib0'"),
        ("nosuch", "no interface 'nosuch' on this machine, which has eth0, ib0, lo"),
        ("eth0,nosuch", "no interface 'nosuch'"),
    ],
)
def test_anything_else_is_told_with_what_to_write(value: str, text: str) -> None:
    """R06: gloo itself says no more than ``Unable to find address for: ^lo``."""
    assert text in str(interfaces.wrong_interface(value, KNOWN))


def test_the_interface_is_the_one_with_the_address_towards_rank_zero() -> None:
    assert interfaces.choose_interface("10.1.0.1", KNOWN) == "ib0"
    assert interfaces.choose_interface("fe80::1", KNOWN) == "eth0"
    assert interfaces.choose_interface("127.0.1.1", KNOWN) == "lo"
    assert interfaces.choose_interface("10.9.9.9", KNOWN) is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables")
def test_this_machine_s_interfaces_have_their_addresses() -> None:
    found = interfaces.interface_addresses()
    assert found.keys() >= {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in found["lo"]


def test_the_way_to_a_host_is_known_without_sending_anything() -> None:
    assert interfaces.source_address("127.0.0.1", 1) == "127.0.0.1"
    assert interfaces.source_address("no-such-host.invalid", 1) is None
