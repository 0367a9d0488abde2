"""``explain`` and ``doctor`` on a machine that is well, and with planted faults."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from ddp_utils import doctor
from ddp_utils.__main__ import main
from ddp_utils.doctor import Finding, Outcome
from ddp_utils.explain import explain, show

ASK = (sys.executable, "-m", "ddp_utils")
LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
LAUNCHED |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "SLURM_JOB_ID": "7"}


def ask(
    *command: str, before: Callable[[], None] | None = None, **variables: str
) -> tuple[int, str]:
    """Return the exit code and what was printed."""
    done = subprocess.run(
        command,
        env=os.environ | {"DDP_UTILS_QUIET": "1"} | variables,
        preexec_fn=before,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def wrong(findings: list[Finding]) -> dict[str, Finding]:
    return {each.name: each for each in findings if not each.ok}


# explain


def test_explain_shows_a_person_who_it_is_and_why() -> None:
    text = io.StringIO()
    show(explain(LAUNCHED), text)
    lines = text.getvalue().splitlines()
    assert "launcher    torchrun" in lines
    assert "rank        1 of 2" in lines
    assert "meeting at  10.0.0.1, port 29500" in lines
    assert "decided by  RANK=1" in lines
    assert "ignored     SLURM_JOB_ID=7  the launcher inside it, which sets RANK, counts" in lines
    assert "\033" not in text.getvalue()  # colour is for terminals


def test_explain_for_machines_keeps_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() >= {
        "format",
        "launcher",
        "error",
        "world",
        "decided",
        "ignored",
        "devices",
    }
    assert report["format"] == 1
    assert report["world"].keys() >= {
        "rank",
        "world_size",
        "local_rank",
        "node_rank",
        "master_addr",
    }
    assert report["devices"].keys() >= {"type", "visible", "by_local_rank", "backend"}


def test_explain_of_half_a_launcher_is_the_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["explain"]) == 1
    assert capsys.readouterr().out.startswith("error  the environment names")


def test_a_terminal_gets_colour_unless_it_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    report = explain({"WORLD_SIZE": "2"})
    monkeypatch.delenv("NO_COLOR", raising=False)
    show(report, coloured := Terminal())
    assert coloured.getvalue().startswith("\033[31merror\033[0m  the")
    monkeypatch.setenv("NO_COLOR", "1")
    show(report, plain := Terminal())
    assert plain.getvalue().startswith("error  the")


# doctor


def test_a_machine_that_is_well() -> None:
    """Ranks are really started, in a process of its own as a user has it."""
    code, text = ask(*ASK, "doctor", "--json")
    report = json.loads(text)
    found = {each["name"]: each for each in report["findings"]}
    assert report.keys() == {"format", "ok", "findings"}
    assert report["ok"] == (code == 0)
    assert found["ranks"]["ok"], text
    assert "sum is right" in found["ranks"]["value"]
    assert found["start-up"]["value"].endswith(" s")
    rates = [each["value"] for name, each in found.items() if name.startswith("all-reduce of")]
    assert len(rates) == 3
    assert all("GB/s" in rate for rate in rates)


BLOCKERS = {
    "half a torchrun environment": (
        {"WORLD_SIZE": "2", "RANK": "0"},
        "launcher",
        "missing MASTER_ADDR, MASTER_PORT",
    ),
    "a wrong interface": (
        {"GLOO_SOCKET_IFNAME": "^lo"},
        "gloo's interface",
        "GLOO_SOCKET_IFNAME=^lo: '^lo' is the way NCCL excludes interfaces",
    ),
    "an address that does not resolve": (
        {"MASTER_ADDR": "no-such-host.invalid", "MASTER_PORT": "29500"},
        "meeting point",
        "'no-such-host.invalid' does not resolve to an address",
    ),
}


@pytest.mark.parametrize("fault", BLOCKERS)
def test_what_would_only_fail_again_with_ranks_is_found_before(fault: str) -> None:
    environ, name, text = BLOCKERS[fault]
    found = wrong(doctor.examine(environ))
    assert text in found[name].value
    assert found["ranks"].value == f"not tried, because of {name}"


@pytest.mark.slow
def test_the_command_tells_by_its_exit_code() -> None:
    code, text = ask(*ASK, "doctor", GLOO_SOCKET_IFNAME="nosuch")
    assert code == 1
    assert "WRONG  gloo's interface" in text
    assert "2 wrong" in text


@pytest.mark.slow
def test_a_low_limit_on_open_files_is_found_and_ranks_are_still_tried() -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 4096))

    code, text = ask(*ASK, "doctor", before=limit)
    assert code == 1
    assert "limit 128: with DataLoader workers" in text
    assert "-> ulimit -n 4096" in text
    assert "their sum is right" in text


def in_namespace(*flags: str) -> tuple[str, ...]:
    """Return the start of a command that runs apart from this machine, or skip."""
    apart = ("unshare", *flags, "sh", "-c")
    if shutil.which("unshare") is None or ask(*apart, "true")[0] != 0:
        if os.environ.get("DDP_UTILS_TEST_LAUNCHERS") == "required":
            pytest.fail("needs root's unshare")
        pytest.skip("needs root's unshare")
    return apart


@pytest.mark.slow
def test_a_small_shared_memory_is_found() -> None:
    apart = in_namespace("--mount")
    shrink = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    code, text = ask(*apart, f"{shrink} && {' '.join(ASK)} doctor")
    assert code == 1
    assert "only 64 MiB free: DataLoader workers" in text
    assert "docker run --shm-size" in text


@pytest.mark.slow
def test_a_host_name_that_does_not_resolve_is_found_and_ranks_still_start() -> None:
    apart = in_namespace("--uts")
    code, text = ask(*apart, f"hostname no-such-name && {' '.join(ASK)} doctor")
    assert code == 1
    assert "'no-such-name' does not resolve" in text
    assert "their sum is right" in text


def outcomes(*totals: float) -> list[Outcome]:
    return [Outcome(len(totals), 1.5, total, (1.0, 1.0, 1.0)) for total in totals]


def test_a_sum_that_is_wrong_on_any_rank_is_found() -> None:
    assert wrong([*doctor.judge_run(outcomes(3.0, 3.0), before=1.0)]) == {}
    found = wrong([*doctor.judge_run(outcomes(3.0, 2.0), before=1.0)])
    assert found.keys() == {"ranks"}
    assert "[2.0, 3.0]" in found["ranks"].value


def test_ranks_that_cannot_start_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("Too many open files")

    monkeypatch.setattr(doctor, "start_ranks", fail)
    (finding,) = doctor._start_and_reduce()
    assert (finding.ok, "Too many open files" in finding.value) == (False, True)


@pytest.mark.parametrize(("free", "ok"), [(64 * 2**20, False), (2**30, True)])
def test_shared_memory(free: int, ok: bool) -> None:
    assert doctor.check_shm(free).ok is ok


@pytest.mark.parametrize(("soft", "ok"), [(256, False), (1024, True), (-1, True)])
def test_open_files(soft: int, ok: bool) -> None:
    assert doctor.check_files(soft, 4096).ok is ok


@pytest.mark.parametrize(
    ("hard", "advice"),
    [(4096, "ulimit -n 4096 before"), (-1, "ulimit -n 65536 before"), (512, "limit (512) raised")],
)
def test_the_advice_on_open_files_can_be_followed(hard: int, advice: str) -> None:
    assert advice in doctor.check_files(256, hard).advice


@pytest.mark.parametrize("name", ["DDP_UTILS_NPROC", "DDP_UTILS_OVERSUBSCRIBE"])
def test_a_variable_that_cannot_be_read_is_a_row_of_the_report(name: str) -> None:
    report = explain({name: "?"})
    assert report.keys() == explain({"WORLD_SIZE": "2"}).keys() == explain({}).keys()
    assert report["launcher"] == "none"
    assert f"{name}='?' cannot be read" in report["error"]
