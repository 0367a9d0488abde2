"""What do starting, failing and waiting ranks cost, beside everybody else's way to start them?

The jobs are the scripts in ``benchmarks/jobs``, the same work started in each way, and every
figure is of the whole command, from the shell's prompt to the next one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Skip, Target, command, compare, installed, sweep

JOBS = Path(__file__).parent / "jobs"
RANKS = 8
TRUE_CAUSE = "TrueCauseError: rank 1 found a broken sample"
LAST_LINES = 5

Measure = Callable[..., float]
Contenders = dict[str, Measure | Skip]


def main() -> None:
    """Measure all of it."""
    whole_command()
    against_number_of_ranks()
    second_start()
    failure()
    memory()
    cost_of_import()


def whole_command() -> None:
    """A trivial job of 8 ranks, from prompt to prompt."""
    compare(
        f"whole command, trivial job, {RANKS} ranks",
        {
            "the same script, 1 process": lambda: command(*_job("ours", "reduce", 1)),
            **_starters(lambda *words, **variables: command(*words, **variables), "reduce", RANKS),
        },
        floor="the same script, 1 process",
        targets=[Target("ddp_utils", 1.25)],
    )


def against_number_of_ranks() -> None:
    """The same command for 1 to 8 ranks."""
    sweep(
        "start-up against number of ranks",
        "ranks",
        [1, 2, 4, 8],
        {
            "ddp_utils": lambda n: command(*_job("ours", "reduce", int(n))),
            "mp.spawn": lambda n: command(*_job("spawn", "reduce", int(n))),
            "torchrun": lambda n: command(*_torchrun("env", "reduce", int(n))),
        },
    )


def second_start() -> None:
    """Two ranks once more in a process that has started some before, group included."""
    jobs = {"bare fork": "fork", "ddp_utils": "ours", "mp.spawn": "spawn"}
    contenders: Contenders = {name: _again(job) for name, job in jobs.items()}
    contenders["ignite"] = installed("ignite", _again("with_ignite"))
    compare(
        "second start of 2 ranks in the same process",
        contenders,
        floor="bare fork",
        targets=[Target("ddp_utils", at_most=0.15, absolute=True)],
    )


def failure() -> None:
    """Rank 1 raises while the others wait: how long until the prompt, and what does it say?

    Most of it is the end of any interpreter that has imported torch, hence the floor.
    """
    told: dict[str, list[bool]] = defaultdict(list)

    def measured(name: str) -> Measure:
        def measure(*words: str, **variables: str) -> float:
            took, last_lines = _end_after_raise(words, variables)
            told[name].append(TRUE_CAUSE in last_lines)
            return took

        return measure

    def ways(measure: Measure) -> Contenders:
        return {
            "bare fork and kill": _bound(measure, _job("fork", "fail", 2)),
            **_starters(measure, "fail", 2),
            "torchrun and @record": _bound(measure, _torchrun("env_record", "fail", 2)),
        }

    contenders = {name: ways(measured(name))[name] for name in ways(command)}
    compare(
        "rank 1 raises while rank 0 waits, until the command has ended",
        contenders,
        floor="bare fork and kill",
        targets=[Target("ddp_utils", 1.25)],
    )
    compare(
        f"failed runs with the true cause in the last {LAST_LINES} lines",
        {name: _share(told[name]) for name in told},
        unit="%",
        rounds=1,
        targets=[Target("ddp_utils", at_least=100, absolute=True)],
    )


def memory() -> None:
    """Host memory of 8 idle ranks, each shared page counted in parts (PSS)."""
    if sys.platform != "linux":
        return
    jobs = {"bare fork": "fork", "ddp_utils": "ours", "mp.spawn": "spawn"}
    compare(
        f"memory of {RANKS} idle ranks, sum of PSS",
        {name: _idle_memory(job) for name, job in jobs.items()},
        unit="MB",
        floor="bare fork",
        rounds=2,
        targets=[Target("ddp_utils", 1.2)],
    )


def cost_of_import() -> None:
    """What the package costs a script that has imported torch already."""
    compare(
        "import on top of torch",
        {
            "import ddp_utils": lambda: _import_time("import ddp_utils"),
            "every name of ddp_utils": lambda: _import_time("from ddp_utils import *"),
            "accelerate": installed("accelerate", lambda: _import_time("import accelerate")),
            "lightning_fabric": installed(
                "lightning_fabric", lambda: _import_time("import lightning_fabric")
            ),
            "ignite": installed("ignite", lambda: _import_time("import ignite.distributed")),
        },
        unit="ms",
        targets=[Target("import ddp_utils", at_most=20, absolute=True)],
    )


def _starters(measure: Measure, work: str, nproc: int) -> Contenders:
    """Return every way to start ranks, ours and the peers', each run by ``measure``."""
    return {
        "ddp_utils": _bound(measure, _job("ours", work, nproc)),
        "mp.spawn": _bound(measure, _job("spawn", work, nproc)),
        "torchrun": _bound(measure, _torchrun("env", work, nproc)),
        "accelerate (torchrun)": installed(
            "accelerate",
            _bound(measure, _torchrun("with_accelerate", work, nproc), ACCELERATE_USE_CPU="true"),
        ),
        "lightning-fabric": installed(
            "lightning_fabric", _bound(measure, _job("with_fabric", work, nproc))
        ),
        "ignite": installed("ignite", _bound(measure, _job("with_ignite", work, nproc))),
    }


def _bound(measure: Measure, words: list[str], **variables: str) -> Measure:
    return lambda: measure(*words, **variables)


def _job(job: str, work: str, nproc: int, *more: str) -> list[str]:
    return ["python", str(JOBS / f"{job}.py"), work, str(nproc), *more]


def _torchrun(job: str, work: str, nproc: int) -> list[str]:
    run = ["python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    return [*run, *_job(job, work, nproc)[1:]]


def _again(job: str) -> Measure:
    def measure() -> float:
        return _printed_number(_job(job, "reduce", 2, ".", "again"), "seconds")

    return measure


def _import_time(statement: str) -> float:
    script = (
        "import time, torch\nbegin = time.perf_counter()\n"
        f"{statement}\nprint('ms', 1000 * (time.perf_counter() - begin))"
    )
    return _printed_number(["python", "-c", script], "ms")


def _printed_number(words: list[str], label: str) -> float:
    done = subprocess.run(
        [sys.executable, *words[1:]],
        env={**os.environ, "DDP_UTILS_QUIET": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(rf"^{label} (\S+)$", done.stdout, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{' '.join(words)} printed no {label}:\n{done.stderr[-2000:]}")
    return float(found[1])


def _end_after_raise(words: tuple[str, ...], variables: dict[str, str]) -> tuple[float, str]:
    """Return the seconds from the exception to the command's end, and the last lines it left."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *words[1:], folder],
            env={**os.environ, "DDP_UTILS_QUIET": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        ended = time.time()
        if done.returncode == 0:
            raise RuntimeError(f"{' '.join(words)} failed on rank 1, and ended with 0")
        raised = float((Path(folder) / "raised").read_text())
    return ended - raised, "\n".join(done.stdout.rstrip().splitlines()[-LAST_LINES:])


def _share(told: list[bool]) -> Measure:
    return lambda: 100 * sum(told) / len(told)


def _idle_memory(job: str) -> Measure:
    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = _job(job, "idle", RANKS, folder)
            process = subprocess.Popen(
                [sys.executable, *words[1:]], env={**os.environ, "DDP_UTILS_QUIET": "1"}
            )
            try:
                ranks = _wait_for_ranks(Path(folder) / "ranks", process)
                return sum(_pss(rank) for rank in ranks) / 1e6
            finally:
                (Path(folder) / "end").touch()
                process.wait(60)

    return measure


def _wait_for_ranks(folder: Path, process: subprocess.Popen[bytes]) -> list[int]:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        ranks = [int(path.name) for path in folder.glob("*")]
        if len(ranks) == RANKS:
            time.sleep(0.2)  # their last pages
            return ranks
        time.sleep(0.02)
    raise RuntimeError(f"{process.args!r} did not bring up {RANKS} ranks")


def _pss(pid: int) -> float:
    """Return a process's share of memory in bytes."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return 1024 * float(found[1])
