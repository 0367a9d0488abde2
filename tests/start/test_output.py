"""Whose lines appear where, whole, and without a deadlock."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

TALK = """
    import ctypes, os, sys
    import ddp_utils

    @ddp_utils.distributed_main
    def main():
        rank = ddp_utils.get_rank()
        print("python", rank)
        print("stderr", rank, file=sys.stderr)
        os.write(1, b"native " + str(rank).encode())  # no end of line
        ddp_utils.barrier()
        if rank == 1 and "fail" in sys.argv:
            raise ValueError("rank one")

    if __name__ == "__main__":
        main()
    """


def test_prefix_gives_whole_lines_of_every_kind(script: Callable[..., Any]) -> None:
    done = script(TALK).run()
    lines = done.stdout.replace("native 0", "native 0\n").split("\n")
    assert sorted(line for line in lines if line) == [
        "[rank 1] native 1",
        "[rank 1] python 1",
        "native 0",
        "python 0",
    ]
    assert sorted(done.stderr.splitlines()) == ["[rank 1] stderr 1", "stderr 0"]


def test_rank_zero_writes_the_others_to_files(script: Callable[..., Any], tmp_path: Path) -> None:
    done = script(TALK).run(
        "fail", DDP_UTILS_OUTPUT="rank_zero", DDP_UTILS_LOG_DIR=str(tmp_path / "logs")
    )
    assert done.stdout == "python 0\nnative 0"
    assert (tmp_path / "logs" / "rank1.log").read_text() == "python 1\nstderr 1\nnative 1"
    assert str(tmp_path / "logs") in done.stderr
    assert done.stderr.rstrip().endswith("ValueError: rank one")


def test_rank_zero_shows_the_tail_of_a_killed_rank(
    script: Callable[..., Any], tmp_path: Path
) -> None:
    done = script("""
        import os, signal
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            print("last words of", ddp_utils.get_rank())
            if ddp_utils.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            main()
        """).run(DDP_UTILS_OUTPUT="rank_zero", DDP_UTILS_LOG_DIR=str(tmp_path))
    assert done.stderr.rstrip().endswith("last words of 1")


def test_all_leaves_the_output_alone(script: Callable[..., Any]) -> None:
    done = script(TALK).run(DDP_UTILS_OUTPUT="all")
    assert "[rank" not in done.stdout + done.stderr
    assert done.stdout.count("python") == 2


def test_fifty_megabytes_do_not_deadlock(script: Callable[..., Any]) -> None:
    done = script("""
        import sys
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            for _ in range(50):
                sys.stdout.write(("x" * 99 + chr(10)) * 10_000)
                sys.stderr.write("y" * 10)

        if __name__ == "__main__":
            main()
        """).run()
    assert done.returncode == 0
    # Rank zero writes straight to the pipe, in pieces; the other's lines are whole all the same.
    assert done.stdout.count("[rank 1] " + "x" * 99 + "\n") == 500_000
    assert done.stdout.count("x") == 2 * 99 * 500_000
    assert "[rank 1] " + "y" * 500 in done.stderr


def test_a_grandchild_that_keeps_the_pipe_open_is_not_waited_for(
    script: Callable[..., Any],
) -> None:
    done = script("""
        import subprocess
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            subprocess.Popen(["sleep", "1000"])
            print("started", ddp_utils.get_rank())

        if __name__ == "__main__":
            main()
        """).run(DDP_UTILS_GRACE="0.2")
    assert sorted(done.stdout.splitlines()) == ["[rank 1] started 1", "started 0"]


def test_rank_zeros_terminal_stays_a_terminal(script: Callable[..., Any]) -> None:
    """G02: one progress bar, and it is drawn as on a terminal."""
    text = """
        import sys
        from tqdm import tqdm
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            if ddp_utils.is_rank_zero():
                assert sys.stdin.isatty() and sys.stdout.isatty() and sys.stderr.isatty()
                for _ in tqdm(range(3), ncols=60):
                    pass
                print("answer", input("? "))

        if __name__ == "__main__":
            main()
        """
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, str(script(text).path)],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        start_new_session=True,
        env=os.environ | {"DDP_UTILS_NPROC": "2", "DDP_UTILS_QUIET": "1"},
    )
    os.close(inner)
    os.write(outer, b"typed\n")
    seen = b""
    while True:
        try:
            data = os.read(outer, 4096)
        except OSError:
            break
        if not data:
            break
        seen += data
    os.close(outer)
    assert process.wait(timeout=60) == 0, seen.decode()
    assert b"100%" in seen
    assert b"answer typed" in seen
