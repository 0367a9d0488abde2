"""Do lines stay whole where several processes write to one pipe?"""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from ddp_utils.ground.saying import say

WRITES = """
import sys
from ddp_utils.ground.saying import say
say("to stderr\\nin two lines")
say("to stdout", sys.stdout)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_line_is_one_write_also_unbuffered(stream: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours, theirs:  # which keep each write apart
        command = [sys.executable, "-u", "-c", WRITES]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: theirs}
        subprocess.run(command, check=True, **streams)  # type: ignore[call-overload]
        expected = {"stdout": b"to stdout\n", "stderr": b"to stderr\nin two lines\n"}
        assert ours.recv(1000) == expected[stream]


def test_without_a_console_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdout", None)
    say("to nobody")
