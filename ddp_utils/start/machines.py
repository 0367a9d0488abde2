"""How do the parents of one job, each on its own machine, learn of each other's trouble?

Every parent holds a connection to that of the first machine, which passes word on. A closed
connection without a goodbye is a lost machine. Lines of JSON go over it, never pickles: these
connections cross the network.
"""

from __future__ import annotations

import json
import selectors
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ddp_utils.stores import host_store, join_store, listen, notice_a_lost_machine
from ddp_utils.world.machines import Machines
from ddp_utils.world.world import World

__all__ = ["OtherMachines"]

PATIENCE = timedelta(minutes=10)
"""How long a machine waits for the first one to be there."""


class OtherMachines:
    """The other parents of this job, as seen from this one."""

    def __init__(self, machines: Machines, nproc: int) -> None:
        assert machines.master_addr is not None
        assert machines.master_port is not None
        self._count = machines.num_nodes
        self._own = machines.node_rank
        self._connections: dict[socket.socket, _Line] = {}
        self._listener: socket.socket | None = None
        self._nproc = nproc
        self._done: set[int] = set()
        self.all_done = False
        self.trouble: str | None = None
        """What ended the job on another machine."""
        if self._own == 0:
            self.store: dist.Store = host_store(machines.master_addr, machines.master_port)
            self._listener = listen(machines.master_addr, 0)
            self._listener.setblocking(False)
            self._store().set("port", str(self._listener.getsockname()[1]))
        else:
            self.store, address = join_store(_as_world(machines, nproc), PATIENCE)
            port = int(self._store().get("port"))
            first = socket.create_connection((address, port), timeout=10)
            self._add(first)
            self._connections[first].machine = 0
            self._say({"machine": self._own, "nproc": nproc})

    def _store(self) -> dist.Store:
        return dist.PrefixStore("ddp_utils_machines", self.store)

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Let a selector call this object when another machine says something."""
        self._selector = selector
        if self._listener is not None:
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
        for connection in self._connections:
            self._register(connection)

    def _register(self, connection: socket.socket) -> None:
        hear: Callable[[], None] = lambda: self._hear(connection)  # noqa: E731  # typed for select
        self._selector.register(connection, selectors.EVENT_READ, hear)

    def _accept(self) -> None:
        assert self._listener is not None
        connection, _ = self._listener.accept()
        self._add(connection)
        self._register(connection)
        if self.trouble is not None:
            self._say({"trouble": self.trouble})

    def _add(self, connection: socket.socket) -> None:
        notice_a_lost_machine(connection)
        self._connections[connection] = _Line()

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(2**16)
        except OSError:
            data = b""
        line = self._connections[connection]
        for message in line.feed(data):
            self._take(line, message)
        if not data:
            self._selector.unregister(connection)
            del self._connections[connection]
            connection.close()
            self._lost(line)

    def _take(self, line: _Line, message: dict[str, Any]) -> None:
        if "machine" in message:
            line.machine = int(message["machine"])
            if message["nproc"] != self._nproc:
                self.fail(
                    f"machine {line.machine} starts {message['nproc']} ranks and machine "
                    f"{self._own} {self._nproc}: give nproc (or DDP_UTILS_NPROC) the same value "
                    "on all machines"
                )
        elif "trouble" in message:
            self._note(str(message["trouble"]))
        elif "done" in message:
            self._done.add(line.machine)
            self._check_all_done()
        elif "all done" in message:
            self.all_done = True

    def _lost(self, line: _Line) -> None:
        if not self.all_done and line.machine not in self._done:
            name = "an unknown machine" if line.machine is None else f"machine {line.machine}"
            self._note(f"{name} is gone: its connection closed, and it had not said why")

    def _note(self, trouble: str) -> None:
        """Take the first trouble for the cause, and pass it on."""
        if self.trouble is None:
            self.trouble = trouble
            if self._own == 0:
                self._say({"trouble": trouble})

    def fail(self, report: str) -> None:
        """Tell the others what ended the job here."""
        if self.trouble is None:
            self.trouble = report
            self._say({"trouble": report})

    def finish(self) -> None:
        """Tell the others that all ranks here have ended well."""
        self._done.add(self._own)
        if self._own == 0:
            self._check_all_done()
        else:
            self._say({"done": self._own})

    def _check_all_done(self) -> None:
        if self._own == 0 and len(self._done) == self._count:
            self.all_done = True
            self._say({"all done": True})

    def _say(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        for connection in self._connections:
            try:
                connection.sendall(data)
            except OSError:
                pass  # it will be heard of when its connection is read

    def close(self) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()
        if self._listener is not None:
            self._listener.close()


class _Line:
    """What has come over one connection, up to the next end of line."""

    def __init__(self) -> None:
        self.machine: Any = None
        self._rest = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _as_world(machines: Machines, nproc: int) -> World:
    """Return this parent as its first rank, whose name the errors of the store will give."""
    return World(
        rank=machines.node_rank * nproc,
        world_size=machines.num_nodes * nproc,
        local_world_size=nproc,
        node_rank=machines.node_rank,
        num_nodes=machines.num_nodes,
        launcher="spawn",
        master_addr=machines.master_addr,
        master_port=machines.master_port,
    )
