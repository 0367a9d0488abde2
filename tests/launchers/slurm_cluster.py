"""How is a Slurm cluster of two nodes made out of this one machine?

One controller and two ``slurmd`` under their own folder and ports; munge for authentication.
Needs root, and Debian's ``slurm-wlm`` and ``munge``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

CONF = """
ClusterName=testing
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")


class SlurmCluster:
    """Two Slurm nodes, ``n1`` and ``n2``, on this machine, until :meth:`stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._munged: int | None = None

    def start(self) -> None:
        """Start the daemons and wait until both nodes are idle."""
        (self.folder / "state").mkdir(parents=True)
        self.folder.chmod(0o755)
        control, first, last = _free_ports()
        (self.folder / "slurm.conf").write_text(
            CONF.format(
                host=socket.gethostname().partition(".")[0],
                folder=self.folder,
                port=control,
                first=first,
                last=last,
            )
        )
        self._start_munge()
        self._run("slurmctld")
        for node in ("n1", "n2"):
            (self.folder / f"spool-{node}").mkdir()
            self._run("slurmd", "-N", node)
        deadline = time.monotonic() + 60
        while self._run("sinfo", "-h", "-N", "-o", "%T").split() != ["idle", "idle"]:
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text() for path in self.folder.glob("*.log"))
                raise RuntimeError(f"the Slurm nodes did not come up:\n{logs[-4000:]}")
            time.sleep(0.1)

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        names = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{option}={self.folder / name}" for option, name in names.items()]
        self._run(
            "munged",
            "--force",
            f"--key-file={key}",
            *options,
            f"--seed-file={self.folder / 'munge.seed'}",
        )

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def stop(self) -> None:
        """End all daemons, by their pid files."""
        for name in ("slurmd-n1.pid", "slurmd-n2.pid", "slurmctld.pid", "munged.pid"):
            pid_file = self.folder / name
            if pid_file.exists():
                _end(int(pid_file.read_text()))


def missing_programs() -> list[str]:
    """Return what has to be installed for a cluster, by the programs' names."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _free_ports() -> tuple[int, int, int]:
    """Return three free ports, the last two side by side, below the ephemeral range."""
    for first in range(17001, 30000, 10):
        sockets: list[socket.socket] = []
        try:
            for port in (first + 2, first, first + 1):
                sockets.append(socket.socket())
                sockets[-1].bind(("", port))
        except OSError:
            continue
        finally:
            for each in sockets:
                each.close()
        return first + 2, first, first + 1
    raise RuntimeError("no three free ports")
