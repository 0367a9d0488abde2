"""Do all ranks stop at one step, whoever is asked, however fast each of them is?"""

from __future__ import annotations

import functools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ddp_utils import (
    OneRankSectionError,
    RandomStates,
    RankFailedError,
    get_rank,
    load_checkpoint,
    make_loader,
    rank_zero_only,
    save_checkpoint,
    stop_requested,
)
from ddp_utils.models import stop_signals
from ddp_utils.process_group import shared_store
from ddp_utils.testing import run_distributed

LIMIT = 100_000


@pytest.fixture
def disarmed() -> Iterator[None]:
    """Leave this process as it was: its signals are those of the whole test run."""
    before = {number: signal.getsignal(number) for number in stop_signals.STOP_SIGNALS}
    yield
    stop_signals.disarm()
    assert {n: signal.getsignal(n) for n in before} == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.usefixtures("disarmed")
class TestAlone:
    @pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS)
    def test_a_signal_is_a_request_and_stays_one(self, number: int) -> None:
        assert not stop_requested()
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop_requested()
        assert stop_requested()

    def test_a_request_before_the_first_question_counts(self) -> None:
        stop_signals.arm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop_requested()

    def test_disarming_forgets(self) -> None:
        stop_signals.arm()
        os.kill(os.getpid(), signal.SIGTERM)
        stop_signals.disarm()
        assert stop_signals.first_signal() is None
        assert not stop_requested()

    def test_only_the_wanted_signals_are_armed(self) -> None:
        stop_signals.arm([signal.SIGUSR2])
        assert not stop_requested()
        assert stop_signals.armed() == (signal.SIGUSR2,)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGUSR2)
        assert stop_requested()

    def test_whoever_asks_learns_that_signals_are_armed(self) -> None:
        heard: list[tuple[int, ...]] = []
        stop_signals.when_armed(heard.append)
        try:
            stop_signals.arm()
            stop_signals.arm()
            stop_signals.when_armed(heard.append)
        finally:
            del stop_signals._callbacks[:]
        assert heard == [stop_signals.STOP_SIGNALS] * 2

    def test_off_the_main_thread_no_handler_is_installed(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        stop_signals._warned = False
        answers: list[bool] = []
        for _ in range(2):
            thread = threading.Thread(target=lambda: answers.append(stop_requested()))
            thread.start()
            thread.join()
        assert answers == [False, False]
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert [record.message for record in caplog.records] == [
            "stop signals to this rank are not caught: not on the main thread"
        ]

    def test_an_event_loop_keeps_its_descriptor(self) -> None:
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write)
        try:
            assert not stop_requested()
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop_requested()
            stop_signals.disarm()
        finally:
            assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)

    def test_a_fork_ends_by_sigterm_as_ever(self) -> None:
        stop_signals.arm()
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        child.terminate()
        child.join()
        assert child.exitcode == -signal.SIGTERM
        assert not stop_requested()


F = TypeVar("F", bound=Callable[..., Any])


def returns_values(fn: F) -> F:
    """Disarm the rank at the end: a job that was stopped ends by exit code 143, without values."""

    @functools.wraps(fn)
    def wrapper(*args: Any) -> Any:
        try:
            return fn(*args)
        finally:
            stop_signals.disarm()

    return wrapper  # type: ignore[return-value]


@returns_values
def walk_at_own_pace(victim: int, number: int, at: int) -> tuple[int, int]:
    """Return the step at which the signal came (on its victim), and that of the stop."""
    rank = get_rank()
    pace = random.Random(rank)
    came = -1
    for step in range(LIMIT):
        time.sleep(pace.random() * 0.002 * (1 + 3 * (rank == 0)))
        if step == at and rank == victim:
            came = step
            os.kill(os.getpid(), number)
        if stop_requested():
            assert stop_requested()  # also an outer loop asks
            return came, step
    raise AssertionError("never stopped")


@pytest.mark.parametrize(
    ("world_size", "victim", "number"),
    [(2, 0, signal.SIGTERM), (2, 1, signal.SIGUSR1), (3, 2, signal.SIGTERM)],
)
def test_all_ranks_stop_at_the_same_step(world_size: int, victim: int, number: int) -> None:
    results = run_distributed(walk_at_own_pace, victim, number, 25, world_size=world_size)
    steps = {step for _, step in results}
    came = results[victim][0]
    assert len(steps) == 1
    assert steps <= {came, came + 1}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_stop_at_the_same_step_whenever_it_comes(seed: int) -> None:
    chance = random.Random(seed)
    world_size = chance.choice([2, 3, 4])
    victim, at = chance.randrange(world_size), chance.randrange(60)
    results = run_distributed(
        walk_at_own_pace, victim, signal.SIGTERM, at, world_size=world_size, timeout=100
    )
    assert {step for _, step in results} <= {at, at + 1}
    assert len({step for _, step in results}) == 1


@returns_values
def signalled_from_all_sides() -> int:
    """A scheduler signals every process, some of them twice; then it takes a while to save."""
    for step in range(LIMIT):
        if step == 10:
            for _ in range(1 + get_rank()):
                os.kill(os.getpid(), signal.SIGTERM)
        if stop_requested():
            break
    moment = time.monotonic() + stop_signals.REPEAT + 0.3
    while time.monotonic() < moment:  # a repeat counted late would end this rank
        time.sleep(0.05)
    return step


def test_signals_to_the_whole_group_count_once() -> None:
    assert len(set(run_distributed(signalled_from_all_sides))) == 1


def ends_in_c_by_a_second_signal() -> None:
    stop_requested()
    if get_rank() == 0:
        shared_store().wait(["the second signal was sent"])
        time.sleep(60)
    os.kill(os.getpid(), signal.SIGTERM)

    def second() -> None:
        time.sleep(stop_signals.REPEAT + 0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=second, daemon=True).start()
    dist.barrier()  # never comes back


def test_a_later_second_signal_ends_a_rank_at_once_also_in_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DDP_UTILS_GRACE", "0.2")
    with pytest.raises(RankFailedError) as caught:
        run_distributed(ends_in_c_by_a_second_signal)
    assert caught.value.rank == 1
    assert caught.value.failures[1].signal == "SIGTERM"


def fails_beside_others(folder: str, how: str) -> None:
    for step in range(LIMIT):
        if step == 5 and get_rank() == 1:
            if how == "raises":
                raise ArithmeticError("this is no request to stop")
            os.kill(os.getpid(), signal.SIGKILL)
        if stop_requested():
            open(f"{folder}/stopped-{get_rank()}", "w").close()
            break


@pytest.mark.parametrize("how", ["raises", "is killed"])
def test_a_failure_is_never_taken_for_a_request(
    how: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDP_UTILS_GRACE", "0.5")
    with pytest.raises(RankFailedError) as caught:
        run_distributed(fails_beside_others, str(tmp_path), how, world_size=3)
    assert caught.value.rank == 1
    assert list(tmp_path.iterdir()) == []


def leaves_early() -> None:
    for step in range(LIMIT):
        if (get_rank() == 1 and step == 5) or stop_requested():
            return


def test_a_rank_that_no_longer_asks_is_an_error_and_no_hang() -> None:
    with pytest.raises(RankFailedError, match=r"rank 1 .* while other ranks still waited"):
        run_distributed(leaves_early)


@pytest.mark.distributed(world_size=2, timeout=30)
def test_no_rank_waits_for_the_others_present_step() -> None:
    # Rank zero takes its second step before rank one does: it must not wait for it there.
    answers = [stop_requested()]
    if get_rank() == 1:
        shared_store().wait(["second step"])
    answers.append(stop_requested())
    if get_rank() == 0:
        shared_store().set("second step", "")
    assert answers == [False, False]


def slower_than_the_timeout() -> bool:
    stop_requested()
    if get_rank() == 0:
        time.sleep(2.5)
    return stop_requested() or stop_requested()


def test_a_long_step_outlasts_the_timeout_of_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_UTILS_TIMEOUT", "1")
    assert run_distributed(slower_than_the_timeout) == [False, False]


@pytest.mark.distributed(world_size=2)
def test_a_default_device_is_not_for_the_flags(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    torch.set_default_device("meta")  # as scripts do with "cuda": ours has to stay on the CPU
    stops = [stop_requested() for _ in range(3)]
    save_checkpoint(path, random=RandomStates(), epoch=1)
    held = load_checkpoint(path, broadcast=True, random=RandomStates())
    assert stops == [False, False, False]
    assert held == {"epoch": 1}


@rank_zero_only
def asks_alone() -> bool:
    return stop_requested()


@pytest.mark.distributed(world_size=2)
def test_asking_where_one_rank_runs_is_an_error() -> None:
    stop_requested()
    if get_rank() == 0:
        with pytest.raises(OneRankSectionError, match="stop_requested"):
            asks_alone()
    else:
        assert asks_alone() is None


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LIMIT

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


KILL_GROUP = "import os, sys; os.killpg(int(sys.argv[1]), int(sys.argv[2]))"


@returns_values
def trains_with_workers(number: int, armed_before: bool) -> tuple[int, list[int | None]]:
    if armed_before:
        stop_requested()
        loader = DataLoader(Numbers(), batch_size=2, num_workers=2)
    else:
        loader = make_loader(Numbers(), batch_size=2, num_workers=2)
    batches = iter(loader)
    for step, _ in enumerate(batches):
        if step == 5 and get_rank() == 1:  # rank zero shares its process group with the tests
            arguments = [str(os.getpgid(0)), str(int(number))]
            command = [sys.executable, "-S", "-c", KILL_GROUP, *arguments]
            subprocess.run(command, check=True, start_new_session=True)
        if stop_requested():
            break
    workers = multiprocessing.active_children()
    assert all(worker.is_alive() for worker in workers)
    for worker in workers:
        while worker.is_alive():
            # Of their own rank they do take it; beside the group's, still pending, it is lost.
            worker.terminate()
            worker.join(0.1)
    return step, [worker.exitcode for worker in workers]


@pytest.mark.parametrize("number", stop_signals.STOP_SIGNALS)
@pytest.mark.parametrize("armed_before", [True, False])
def test_loader_workers_outlive_a_signal_to_the_whole_process_group(
    number: int, armed_before: bool
) -> None:
    results = run_distributed(trains_with_workers, number, armed_before)
    assert results[0] == results[1]
    assert results[0][1] == [0, 0]


STOPPABLE = """
    import os, sys, time
    from ddp_utils import distributed_main, get_rank, load_checkpoint, save_checkpoint
    from ddp_utils import stop_requested

    @distributed_main
    def main(path):
        first = load_checkpoint(path, missing_ok=True).get("step", 0)
        for step in range(first, 100_000):
            time.sleep(0.005 * (1 + get_rank()))
            if stop_requested():
                break
            if step == first:
                os.write(1, f"pid {os.getpid()}\\n".encode())  # one write: ranks share the pipe
        time.sleep(0.8)  # longer than the grace that a failed job has
        save_checkpoint(path, step=step, first=first)

    if __name__ == "__main__":
        main(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["parent", "one rank", "group"])
def test_the_command_saves_and_ends_with_143(to: str, script: Any, tmp_path: Any) -> None:
    path = tmp_path / "last.pt"
    process = script(STOPPABLE).start(str(path), DDP_UTILS_GRACE="0.3")
    pids = [int(process.stdout.readline().rpartition("pid")[2]) for _ in range(2)]
    targets = {"parent": [process.pid], "one rank": pids[1:], "group": [process.pid, *pids]}[to]
    for pid in targets:
        os.kill(pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    held = torch.load(path)
    assert held["first"] == 0
    assert held["step"] > 0


@pytest.mark.slow
def test_a_second_signal_to_the_command_ends_it_at_once(script: Any, tmp_path: Any) -> None:
    slow = STOPPABLE.replace("0.8", "600")
    process = script(slow).start(str(tmp_path / "last.pt"))
    for _ in range(2):
        assert "pid" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    time.sleep(stop_signals.REPEAT + 0.3)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode in (143, -signal.SIGTERM)
    assert list(tmp_path.glob("*.pt")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("to", "code"), [("agent", 1), ("one rank", 0)])
def test_under_torchrun_the_ranks_save_too(to: str, code: int, script: Any, tmp_path: Any) -> None:
    """torchrun ends its ranks by SIGTERM when it gets one, waits 30 s, and ends with 1."""
    train = script(STOPPABLE)
    path = tmp_path / "last.pt"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    process = train.start(str(path), python=(*torchrun, str(train.path)))
    pids: list[int] = []
    while len(pids) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if line.startswith("pid"):
            pids.append(int(line.split()[1]))
    os.kill(process.pid if to == "agent" else pids[1], signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert torch.load(path)["step"] > 0
