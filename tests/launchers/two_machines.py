"""How are two machines made out of this one?

By two network namespaces with a link between them: each has its own interfaces and addresses,
and its own loopback. Host names do not resolve in them, as on many clusters. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class TwoMachines:
    """Two namespaces, until :meth:`stop`."""

    def __init__(self) -> None:
        self.names = tuple(f"ddp{os.getpid()}{end}" for end in "ab")
        self.links = tuple(f"v{os.getpid()}{end}" for end in "ab")

    def start(self) -> None:
        """Make the namespaces and join them."""
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, ADDRESSES, strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def on(self, machine: int, *command: str) -> list[str]:
        """Return the command that runs ``command`` on one of the machines."""
        return ["ip", "netns", "exec", self.names[machine], *command]

    @contextmanager
    def hosts(self, *lines: str) -> Iterator[None]:
        """Give each machine an ``/etc/hosts`` of its own."""
        folders = [Path("/etc/netns", name) for name in self.names]
        try:
            for folder, text in zip(folders, lines, strict=True):
                folder.mkdir(parents=True)
                (folder / "hosts").write_text(f"127.0.0.1 localhost\n{text}")
            yield
        finally:
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)

    def unplug(self) -> None:
        """Take the link down, as if the second machine had lost its power."""
        _ip("-n", self.names[1], "link", "set", self.links[1], "down")

    def stop(self) -> None:
        """Remove the namespaces; the link goes with them."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
