"""Is a file always the old or the new one, whole, whatever happens to its writer?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_utils.models.atomic_file import replacing


def write(path: Path, content: bytes) -> None:
    with replacing(path) as file:
        file.write(content)


def test_the_content_takes_the_name(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write(path, b"old")
    write(path, b"new")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["last.pt"]


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    write(path, b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.write("no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["last.pt"]


def test_nobody_sees_the_new_file_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert not path.exists()
    assert path.exists()


def test_content_name_and_folder_reach_the_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"
        happened.append(f"{kind} of {os.fstat(descriptor).st_size if kind == 'file' else 0} bytes")
        real_sync(descriptor)

    def replace(source: Path, target: Path) -> None:
        happened.append("rename")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    write(tmp_path / "last.pt", b"12345")
    assert happened == ["file of 5 bytes", "rename", "folder of 0 bytes"]


def test_permissions_are_those_of_any_file_and_of_the_old_one(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain", tmp_path / "last.pt"
    plain.write_bytes(b"")
    write(path, b"1")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    write(path, b"2")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_stays(tmp_path: Path) -> None:
    path, link = tmp_path / "epoch-3.pt", tmp_path / "last.pt"
    link.symlink_to(path)
    write(link, b"new")
    assert link.is_symlink()
    assert path.read_bytes() == b"new"


def test_only_a_file_is_replaced(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        write(tmp_path, b"")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="device or a pipe"):
        write(tmp_path / "pipe", b"")
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no such folder.*runs/3"):
        write(tmp_path / "runs" / "3" / "last.pt", b"")
    assert os.listdir(tmp_path) == []


def test_the_longest_name_that_a_folder_takes(tmp_path: Path) -> None:
    path = tmp_path / ("ä" * 126 + ".pt")
    write(path, b"1")
    assert path.read_bytes() == b"1"


def test_what_a_killed_writer_left_goes_and_what_is_in_use_stays(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    dead = tmp_path / ".last.pt-0123abcd.tmp"
    dead.write_bytes(b"half")
    other = tmp_path / ".other.pt-0123abcd.tmp"
    other.write_bytes(b"half")
    with replacing(path) as file:
        file.write(b"slow")
        write(path, b"fast")
        assert len(os.listdir(tmp_path)) == 3
    assert path.read_bytes() == b"slow"
    assert set(os.listdir(tmp_path)) == {"last.pt", other.name}


# Forks of one interpreter write versions of a state in a loop, and are killed at random times.
KILL_LOOP = """
import os, random, signal, sys, time
import torch
from ddp_utils import load_checkpoint, save_checkpoint

torch.set_num_threads(1)
path, times = sys.argv[1], int(sys.argv[2])
chance = random.Random(0)
version = 0

def state(version):
    return {f"w{i}": torch.full((50_000,), float(version)) for i in range(8)}

def write_for_ever(version):
    while True:
        version += 1
        save_checkpoint(path, **state(version), version=version)

save_checkpoint(path, **state(0), version=0)
seen, left = set(), 0
for _ in range(times):
    pid = os.fork()
    if pid == 0:
        write_for_ever(version)
    time.sleep(chance.uniform(0.0, 0.12))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    left += len(os.listdir(os.path.dirname(path))) > 1
    held = load_checkpoint(path)
    assert held["version"] >= version, "an older file has come back"
    version = held.pop("version")
    assert all(bool((tensor == version).all()) for tensor in held.values()), "mixed versions"
    seen.add(version)
save_checkpoint(path, done=True)
print(len(seen), left, os.listdir(os.path.dirname(path)))
"""


@pytest.mark.slow
def test_killed_at_50_random_moments_the_file_is_always_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILL_LOOP, str(tmp_path / "last.pt"), "50"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen, left, names = done.stdout.split(maxsplit=2)
    assert int(seen) > 10  # versions did get written,
    assert int(left) > 10  # writers did die while they wrote,
    assert names.strip() == "['last.pt']"  # and the next one cleared up after them


DISK_FULL = """
import os, resource, sys
import torch
from ddp_utils import load_checkpoint, save_checkpoint

path = sys.argv[1]
save_checkpoint(path, weight=torch.ones(10))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(path, weight=torch.zeros(1_000_000))
except OSError as error:
    print(error)
assert load_checkpoint(path)["weight"].sum() == 10
assert os.listdir(os.path.dirname(path)) == ["last.pt"]
"""


def test_a_disk_that_takes_no_more_leaves_the_old_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(tmp_path / "last.pt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"[Errno 27] File too large: '{tmp_path / 'last.pt'}'"


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "last.pt"):
        signal.raise_signal(signal.SIGINT)
    assert os.listdir(tmp_path) == []
