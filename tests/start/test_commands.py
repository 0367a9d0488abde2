"""``python train.py`` as users type it, rightly and wrongly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

MAIN = """
    import ddp_utils

    @ddp_utils.distributed_main
    def main():
        print("rank", ddp_utils.get_rank(), "of", ddp_utils.get_world_size())
        return "value of rank zero"
    """
GUARD = """
    if __name__ == "__main__":
        print(main())
    """


def test_without_the_guard_there_is_one_short_error(script: Callable[..., Any]) -> None:
    done = script(MAIN + "\n    main()\n").run()
    assert done.returncode != 0
    assert done.stderr.count('if __name__ == "__main__":') == 1
    assert "main()" in done.stderr
    assert done.stderr.count("Traceback") == 1  # of this process's own call
    assert done.stdout == ""


@pytest.mark.slow
def test_a_decorator_that_runs_the_function_at_decoration(script: Callable[..., Any]) -> None:
    """L02 (AnswerDotAI/fsdp_qlora#28): a guard does not help where a decorator calls at once."""
    done = script("""
        import ddp_utils

        def run_now(function):
            function()
            return function

        @run_now
        @ddp_utils.distributed_main
        def main():
            print("ran")

        if __name__ == "__main__":
            main()
        """).run()
    assert done.returncode != 0
    assert done.stderr.count('if __name__ == "__main__":') == 1
    assert "ran" not in done.stdout


def test_decorators_above_and_below(script: Callable[..., Any]) -> None:
    """L04 (pytorch/pytorch#22585): the name of the function then means the wrapper."""
    done = script("""
        import functools
        import ddp_utils

        def say(word):
            def decorate(function):
                @functools.wraps(function)
                def call(*args):
                    print(word, ddp_utils.get_rank(), flush=True)
                    return function(*args)
                return call
            return decorate

        @say("above")
        @ddp_utils.distributed_main
        @say("below")
        def main(x):
            return x + 1

        if __name__ == "__main__":
            print("value", main(1))
        """).run()
    assert sorted(done.stdout.splitlines()) == [
        "[rank 1] below 1",
        "above 0",
        "below 0",
        "value 2",
    ], done.stderr


def test_python_m_with_relative_imports(script: Callable[..., Any], tmp_path: Path) -> None:
    """L24 (pytorch/pytorch#50277)."""
    script("", "package/__init__.py")
    script("WORD = 'from a sibling'", "package/sibling.py")
    module = script(
        """
        import ddp_utils
        from .sibling import WORD

        @ddp_utils.distributed_main
        def main():
            return WORD, __package__

        if __name__ == "__main__":
            print(main())
        """,
        "package/train.py",
    )
    module.path = tmp_path / "train.py"  # started from the folder that holds the package
    done = module.run(python=("-m", "package.train"))
    assert done.stdout == "('from a sibling', 'package')\n", done.stderr


def test_what_changed_since_the_import_reaches_the_ranks(
    script: Callable[..., Any], tmp_path: Path
) -> None:
    """L11, L12, L13, L14: folder, sys.path, variables and arguments are those at the call."""
    script("WORD = 'helped'", "lib/helper.py")
    (tmp_path / "elsewhere").mkdir()
    done = script("""
        import os, sys
        import ddp_utils

        RANK_AT_IMPORT = ddp_utils.get_rank()

        @ddp_utils.distributed_main
        def main(x):
            import helper
            assert RANK_AT_IMPORT == ddp_utils.get_rank() == int(os.environ["RANK"])
            folder = os.path.basename(os.getcwd())
            print(helper.WORD, folder, os.environ["CHANGED"], sys.argv[1:], x)

        if __name__ == "__main__":
            sys.path.insert(0, os.path.abspath("lib"))
            os.chdir("elsewhere")
            os.environ["CHANGED"] = "yes"
            before = dict(os.environ)
            main({"a": 1})
            assert dict(os.environ) == before
        """).run("--gpus", "2,3")
    line = "helped elsewhere yes ['--gpus', '2,3'] {'a': 1}"
    assert sorted(done.stdout.splitlines()) == [f"[rank 1] {line}", line], done.stderr


def test_help_is_success_and_a_failed_import_is_told_once(script: Callable[..., Any]) -> None:
    both = script("""
        import argparse, os
        import ddp_utils

        if "RANK" in os.environ and "--break" in __import__("sys").argv:
            import there_is_no_such_module

        @ddp_utils.distributed_main
        def main():
            parser = argparse.ArgumentParser()
            parser.add_argument("--break", action="store_true")
            parser.parse_args()

        if __name__ == "__main__":
            main()
        """)
    helped = both.run("--help")
    assert helped.returncode == 0, helped.stderr
    assert "usage: train.py" in helped.stdout
    broken = both.run("--break")
    assert broken.returncode == 1
    assert broken.stderr.rstrip().endswith(
        "ModuleNotFoundError: No module named 'there_is_no_such_module'"
    )
    wrong = both.run("--unknown")
    assert wrong.returncode == 2


def test_the_command_ends_with_the_ranks_code_and_cause(script: Callable[..., Any]) -> None:
    """L20 (facebookresearch/moco#54)."""
    failing = script("""
        import sys
        import ddp_utils

        @ddp_utils.distributed_main
        def main(how):
            if ddp_utils.get_rank() == 1:
                if how == "exit":
                    sys.exit(3)
                raise ValueError("the true cause")
            ddp_utils.barrier()

        if __name__ == "__main__":
            main(sys.argv[1])
        """)
    assert failing.run("exit").returncode == 3
    raised = failing.run("raise")
    assert raised.returncode == 1
    assert raised.stderr.rstrip().endswith("ValueError: the true cause")
    assert raised.stderr.count('raise ValueError("the true cause")') == 1


BUSY = """
    import os, sys, time
    import torch
    import ddp_utils
    from torch.utils.data import DataLoader

    class Slow(torch.utils.data.Dataset):
        def __len__(self): return 10**6
        def __getitem__(self, i):
            time.sleep(0.02)
            return i

    @ddp_utils.distributed_main
    def main():
        for i, batch in enumerate(DataLoader(Slow(), batch_size=4, num_workers=1)):
            if i == 1:
                print("busy", flush=True)

    if __name__ == "__main__":
        main()
    """


def wait_until_busy(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Wait until both ranks work, and return all processes of the job but the parent."""
    assert process.stdout is not None
    assert {process.stdout.readline() for _ in range(2)} == {"busy\n", "[rank 1] busy\n"}
    job = psutil.Process(process.pid).children(recursive=True)
    assert len(job) >= 5  # the server, two ranks, two workers
    return job


@pytest.mark.parametrize(
    ("number", "whole_group", "code"),
    [
        (signal.SIGINT, False, -signal.SIGINT),
        (signal.SIGINT, True, -signal.SIGINT),
        (signal.SIGTERM, False, -signal.SIGTERM),
    ],
)
def test_a_signal_ends_ranks_and_workers(
    script: Callable[..., Any], number: int, whole_group: bool, code: int
) -> None:
    """T06 (pytorch/pytorch#129477): Ctrl-C in a terminal, and a signal to the parent alone."""
    process = script(BUSY).start()
    job = wait_until_busy(process)
    if whole_group:
        group = os.getpgid(process.pid)
        for member in [process.pid, *(p.pid for p in job)]:
            if os.getpgid(member) == group:
                os.kill(member, number)
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == code
    assert err.count("Traceback") <= 1, err
    assert [p for p in job if p.is_running()] == []


@pytest.mark.parametrize("ignored", [False, True])
def test_the_parents_death_ends_the_ranks(script: Callable[..., Any], ignored: bool) -> None:
    """T07 (pytorch/pytorch#14394): also where SIGINT is ignored, as under ``nohup`` or ``&``."""
    before = signal.getsignal(signal.SIGINT)
    if ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = script(BUSY).start()
    finally:
        signal.signal(signal.SIGINT, before)
    job = wait_until_busy(process)
    process.kill()
    process.communicate()
    gone, alive = psutil.wait_procs(job, timeout=10)
    assert alive == []
    assert len(gone) == len(job)


def test_stdin_atexit_threads_and_random_state(script: Callable[..., Any]) -> None:
    """Rank zero has the terminal's stdin; what a script leaves for its end is done."""
    text = """
        import atexit, random, sys, threading, time
        import numpy, torch
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            if ddp_utils.is_rank_zero():
                print("read", sys.stdin.readline().strip())
                atexit.register(print, "at exit")
                threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
            drawn = random.random(), numpy.random.rand(), torch.rand(1).item()
            return ddp_utils.all_gather(drawn)

        if __name__ == "__main__":
            random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
            torch.set_default_dtype(torch.float64)
            values = main()
            print("different", [a != b for a, b in zip(*values)])
        """
    path = script(text).path
    done = subprocess.run(
        [sys.executable, str(path)],
        input="a line\n",
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"DDP_UTILS_NPROC": "2", "DDP_UTILS_QUIET": "1"},
        check=False,
    )
    assert done.stdout.splitlines() == [
        "read a line",
        "thread",
        "at exit",
        "different [True, True, True]",
    ], done.stderr


def test_open_files_are_not_inherited_and_sockets_listen_on_loopback(
    script: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "open.txt").write_text("x")
    done = script("""
        import os, socket
        import psutil
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            ddp_utils.barrier()
            own = psutil.Process()
            files = [file.path for file in own.open_files() if "open.txt" in file.path]
            sockets = [c for p in [own, *own.parents()[:2]] for c in p.net_connections()]
            return files, {c.laddr.ip for c in sockets if c.status == "LISTEN"}

        if __name__ == "__main__":
            file = open("open.txt")
            held = socket.socket()
            held.bind(("127.0.0.1", 0))
            held.listen()
            with socket.socket() as standard:
                standard.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                standard.bind(("", 29500))
                print(main())
        """).run()
    assert done.stdout.strip() == "([], {'127.0.0.1'})", done.stderr


@pytest.mark.slow
def test_from_another_thread_and_two_jobs_at_once(script: Callable[..., Any]) -> None:
    done = script("""
        import threading
        import ddp_utils

        def work(x):
            return x + ddp_utils.all_reduce_sum(ddp_utils.get_rank())

        if __name__ == "__main__":
            results = {}
            def start(x):
                results[x] = ddp_utils.launch(work, (x,), nproc=2)
            threads = [threading.Thread(target=start, args=(x,)) for x in (10, 20)]
            for thread in threads: thread.start()
            for thread in threads: thread.join()
            print(results[10], results[20])
        """).run()
    assert done.stdout == "[11, 11] [21, 21]\n", done.stderr


@pytest.mark.slow
def test_slow_imports_are_paid_once(script: Callable[..., Any], tmp_path: Path) -> None:
    """Each import of the slow module leaves a line in a file: no clock is needed to count them."""
    script("open('imports.txt', 'a').write('imported\\n')", "slow_module.py")
    for how in ("forked", "fresh"):
        (tmp_path / "imports.txt").unlink(missing_ok=True)
        done = script(f"""
            import threading
            import slow_module
            import ddp_utils

            @ddp_utils.distributed_main
            def main():
                return ddp_utils.all_reduce_sum(1)

            if __name__ == "__main__":
                if {how!r} == "fresh":
                    threading.Thread(target=threading.Event().wait, daemon=True).start()
                print(main())
            """).run(DDP_UTILS_NPROC="4")
        assert done.stdout == "4\n", done.stderr
        expected = {"forked": 1, "fresh": 2}[how]
        assert len((tmp_path / "imports.txt").read_text().split()) == expected


@pytest.mark.parametrize("python", [("-c",), pytest.param(("-",), marks=pytest.mark.slow)])
def test_without_a_file_the_function_travels_by_value(python: tuple[str, ...]) -> None:
    """L07: ``python -c``, ``python -`` and a shell have no file that a rank could import."""
    text = "import ddp_utils\ndef f(x): return x + ddp_utils.get_rank()\n"
    text += "print(ddp_utils.launch(f, (1,), nproc=2))\n"
    arguments = [*python, text] if python == ("-c",) else [*python]
    done = subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"DDP_UTILS_QUIET": "1"},
        check=False,
    )
    assert done.stdout == "[1, 2]\n", done.stderr


@pytest.mark.slow
def test_a_function_under_the_guard(script: Callable[..., Any]) -> None:
    """L06 (tczhangzhi/pytorch-distributed#20)."""
    done = script("""
        import ddp_utils

        if __name__ == "__main__":
            def work():
                return 1
            ddp_utils.launch(work, nproc=2)
        """).run()
    assert done.returncode != 0
    assert "top level of the module" in done.stderr
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(script: Callable[..., Any]) -> None:
    process = script("""
        import signal, time
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            print("busy", flush=True)
            while True:
                time.sleep(1)

        if __name__ == "__main__":
            main()
        """).start(DDP_UTILS_GRACE="1000")
    assert process.stdout is not None
    for _ in range(2):
        process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)  # two signals of one kind at once would be one
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT


def test_ctrl_c_does_not_wait_for_what_the_ranks_have_left_running(
    script: Callable[..., Any],
) -> None:
    process = script("""
        import subprocess, sys
        import ddp_utils

        DEAF = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"

        @ddp_utils.distributed_main
        def main():
            if ddp_utils.is_rank_zero():
                subprocess.Popen(
                    [sys.executable, "-uc", DEAF + "print('left', os.getpid()); time.sleep(10**6)"]
                )

        if __name__ == "__main__":
            main()
        """).start(DDP_UTILS_GRACE="1000")
    assert process.stdout is not None
    left = int(process.stdout.readline().removeprefix("left "))
    (server,) = psutil.Process(process.pid).children()
    job = server.children(recursive=True)
    assert left in {p.pid for p in job}
    _, ranks = psutil.wait_procs([p for p in job if p.pid != left], timeout=30)
    assert ranks == []
    process.send_signal(signal.SIGINT)
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:  # it was before the parent had heard of the ranks' end
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGINT
    assert [p for p in [server, *job] if p.is_running()] == []


def test_a_child_that_is_forked_during_a_job_does_not_keep_it_alive(
    script: Callable[..., Any],
) -> None:
    """The server sees its parent's end although a fork of the parent has its sockets too."""
    process = script("""
        import multiprocessing, os, threading, time
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            open("busy" + str(ddp_utils.get_rank()), "w").close()
            time.sleep(10**6)

        if __name__ == "__main__":
            threading.Thread(target=main, daemon=True).start()
            while not (os.path.exists("busy0") and os.path.exists("busy1")):
                time.sleep(0.05)
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            child.start()
            print("child", child.pid, flush=True)
            time.sleep(10**6)
        """).start()
    assert process.stdout is not None
    child = int(process.stdout.readline().removeprefix("child "))
    job = psutil.Process(process.pid).children(recursive=True)
    assert child in {p.pid for p in job}
    process.kill()
    deadline = time.monotonic() + 10
    while running := [p for p in job if p.pid != child and is_at_work(p)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)
    psutil.Process(child).kill()
    process.communicate(timeout=30)


def is_at_work(process: psutil.Process) -> bool:
    """Whether a process has not ended; who reaps the orphans of a killed parent is not ours."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_plain_script(script: Callable[..., Any]) -> None:
    done = script(MAIN + GUARD).run()
    assert sorted(done.stdout.splitlines()) == [
        "[rank 1] rank 1 of 2",
        "rank 0 of 2",
        "value of rank zero",
    ]
    assert done.stderr == ""


def test_what_wrapping_a_model_imports_is_imported_once(script: Callable[..., Any]) -> None:
    done = script("""
        import sys
        import torch
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            inherited = "torch._dynamo" in sys.modules
            ddp_utils.wrap_ddp(torch.nn.Linear(1, 1))
            return inherited

        if __name__ == "__main__":
            print(main(), "torch._dynamo" in sys.modules)
        """).run()
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.parametrize("how", ["os._exit(7)", "raise ValueError('at import')"])
def test_a_rank_that_ends_while_others_are_still_started(
    script: Callable[..., Any], how: str
) -> None:
    done = script(f"""
        import os
        import ddp_utils

        if os.environ.get("RANK") == "0":
            {how}

        @ddp_utils.distributed_main
        def main():
            ddp_utils.barrier()

        if __name__ == "__main__":
            main()
        """).run(DDP_UTILS_NPROC="16", DDP_UTILS_GRACE="60")
    assert done.returncode in (1, 7)
    assert "rank 0 of 16" in done.stderr


@pytest.mark.slow
def test_nohup_holds_for_ranks_too(script: Callable[..., Any]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = script("""
            import ddp_utils

            @ddp_utils.distributed_main
            def main():
                print("busy", flush=True)
                ddp_utils.barrier()
                while not os.path.exists("go on"):
                    time.sleep(0.05)

            import os, time
            if __name__ == "__main__":
                main()
            """).start()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert {process.stdout.readline() for _ in range(2)} == {"busy\n", "[rank 1] busy\n"}
    for rank in psutil.Process(process.pid).children(recursive=True):
        rank.send_signal(signal.SIGHUP)
    (Path(process.args[-1]).parent / "go on").touch()
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err


@pytest.mark.parametrize("method", ["auto", pytest.param("spawn", marks=pytest.mark.slow)])
def test_logging_that_the_script_sets_up(
    script: Callable[..., Any], tmp_path: Path, method: str
) -> None:
    done = script("""
        import logging, sys
        import ddp_utils

        logging.basicConfig(filename="train.log", level=logging.INFO)
        log = logging.getLogger("train")
        log.addHandler(logging.StreamHandler(sys.stdout))

        @ddp_utils.distributed_main
        def main():
            log.info("once, by %d", ddp_utils.get_rank())

        if __name__ == "__main__":
            main()
        """).run(DDP_UTILS_START_METHOD=method)
    assert sorted(done.stdout.splitlines()) == ["[rank 1] once, by 1", "once, by 0"], done.stderr
    assert (tmp_path / "train.log").read_text().count("once, by") == 2


@pytest.mark.slow
def test_options_that_a_module_reads_at_import(script: Callable[..., Any]) -> None:
    script(
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", required=True)
        args = parser.parse_args()
        """,
        "config.py",
    )
    done = script("""
        import threading
        from config import args
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            return ddp_utils.all_gather(args.lr)

        if __name__ == "__main__":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            print(main())
        """).run("--lr", "5")
    assert done.stdout == "['5', '5']\n", done.stderr


def test_a_misspelt_variable_is_told_before_anything_runs(script: Callable[..., Any]) -> None:
    done = script(MAIN + GUARD).run(DDP_UTILS_GRACE="5s")
    assert "DDP_UTILS_GRACE='5s' cannot be read" in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_output_that_the_terminal_cannot_show(script: Callable[..., Any]) -> None:
    done = script("""
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            if ddp_utils.get_rank() == 1:
                print("first\\n\\u4f60 second\\nthird")

        if __name__ == "__main__":
            main()
        """).run(PYTHONIOENCODING="latin-1", PYTHONUTF8="1")
    assert done.stdout.splitlines() == [
        "[rank 1] first",
        "[rank 1] \\u4f60 second",
        "[rank 1] third",
    ]


@pytest.mark.slow
def test_sys_exit_256_is_a_failure(script: Callable[..., Any]) -> None:
    done = script("""
        import sys
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            sys.exit(256)

        if __name__ == "__main__":
            main()
        """).run()
    assert done.returncode == 1


@pytest.mark.slow
def test_all_standard_streams_closed(script: Callable[..., Any]) -> None:
    path = script("""
        import threading
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            open(f"done{ddp_utils.get_rank()}", "w").close()

        if __name__ == "__main__":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
            main()
        """).path
    command = f'"{sys.executable}" "{path}" <&- >&- 2>&-'
    done = subprocess.run(
        command,
        shell=True,
        cwd=path.parent,
        timeout=60,
        env=os.environ | {"DDP_UTILS_NPROC": "2", "DDP_UTILS_QUIET": "1"},
        check=False,
    )
    assert done.returncode == 0
    assert (path.parent / "done0").exists()
    assert (path.parent / "done1").exists()


@pytest.mark.slow
def test_a_script_that_a_rank_starts(script: Callable[..., Any]) -> None:
    """It inherits the rank's variables: an error, or on its own where that is asked for."""
    done = script("""
        import os, subprocess, sys
        import ddp_utils

        @ddp_utils.distributed_main
        def main():
            if len(sys.argv) > 1:
                print("ran on", ddp_utils.get_world_size())
            elif ddp_utils.is_rank_zero():
                for launcher in ("", "none"):
                    environ = os.environ | {"DDP_UTILS_LAUNCHER": launcher, "DDP_UTILS_NPROC": "1"}
                    command = [sys.executable, __file__, "inner"]
                    inner = subprocess.run(command, env=environ, capture_output=True, text=True)
                    print(inner.returncode, inner.stdout, "is rank 0 already" in inner.stderr)

        if __name__ == "__main__":
            main()
        """).run()
    assert done.stdout.split() == ["1", "True", "0", "ran", "on", "1", "False"], done.stderr


def test_a_file_above_a_limit_that_was_lowered_does_not_slow_the_start(
    script: Callable[..., Any],
) -> None:
    """A shell keeps one as number 255, and ``ulimit -n 200`` leaves it open."""
    run = script(
        """
        import os, resource
        import ddp_utils

        def command(process):
            return open(f"/proc/{process}/cmdline").read()

        @ddp_utils.distributed_main
        def main():
            assert not os.path.exists("/proc/self/fd/300")
            return command(os.getppid())

        if __name__ == "__main__":
            os.dup2(1, 300)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
            assert main() == command("self")  # the server is a fork, not a new interpreter
        """
    ).run()
    assert run.returncode == 0, run.stderr
