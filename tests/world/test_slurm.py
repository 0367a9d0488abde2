"""Slurm's lists, by hand, by random, and against Slurm itself."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_utils import LauncherError
from ddp_utils.world import slurm

LISTS = {
    "n1": ["n1"],
    "alpha,beta,gamma": ["alpha", "beta", "gamma"],
    "linux[1,2]": ["linux1", "linux2"],
    "host[001,003-004,006]": ["host001", "host003", "host004", "host006"],
    "gpu-compute-on-demand-dy-g4dnxlarge-[1-2]": [
        "gpu-compute-on-demand-dy-g4dnxlarge-1",
        "gpu-compute-on-demand-dy-g4dnxlarge-2",
    ],
    "jean-zay-ia810": ["jean-zay-ia810"],
    "c1009a-s17,c1010a-s11": ["c1009a-s17", "c1010a-s11"],
    "a[1-2],b,c[3]": ["a1", "a2", "b", "c3"],
    "n[08-10]": ["n08", "n09", "n10"],
    "n[8-10]": ["n8", "n9", "n10"],
    "n[098-101]": ["n098", "n099", "n100", "n101"],
    "r[0-1]n[1-2]": ["r0n1", "r0n2", "r1n1", "r1n2"],
    "r[0,2]-x[01-02]-ib": ["r0-x01-ib", "r0-x02-ib", "r2-x01-ib", "r2-x02-ib"],
    "n[0-8:4]": ["n0", "n4", "n8"],
    "n[1,[3-4],5]": ["n1", "n3", "n4", "n5"],
    "r[a[1-2],b]": ["ra1", "ra2", "rb"],
    "n[1-2].cluster.example": ["n1.cluster.example", "n2.cluster.example"],
    "[1-2]": ["1", "2"],
}


@pytest.mark.parametrize("text", LISTS)
def test_node_lists(text: str) -> None:
    assert slurm.expand_hosts(text) == LISTS[text]
    assert slurm.first_host(text) == LISTS[text][0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "a,,b",
        "n[1-2",
        "n1-2]",
        "n[]",
        "n[2-1]",
        "n[1-2:0]",
        "n[0-99999999999]",
        "[" * 2000 + "]" * 2000,
    ],
)
def test_what_is_no_node_list_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(LauncherError) as caught:
        slurm.expand_hosts(text)
    assert repr(text[:200])[:-1] in str(caught.value)


COUNTS = {"2(x3),1": [2, 2, 2, 1], "4": [4], "1(x2)": [1, 1], "8(x2),4(x1),2": [8, 8, 4, 2]}


@pytest.mark.parametrize("text", COUNTS)
def test_counts(text: str) -> None:
    assert slurm.expand_counts(text) == COUNTS[text]


@pytest.mark.parametrize("text", ["", "2(x3", "x", "2(3)", "1(x99999999999)", "-1"])
def test_what_is_no_list_of_counts_is_an_error(text: str) -> None:
    with pytest.raises(LauncherError):
        slurm.expand_counts(text)


def test_hostfile() -> None:
    assert slurm.first_of_hostfile("\n# tasks\n n2 \nn1\n") == "n2"
    assert slurm.first_of_hostfile("n[3-4]\n") == "n3"
    assert slurm.first_of_hostfile("\n# nothing\n") is None


def test_neighbouring_steps_and_jobs_have_ports_of_their_own() -> None:
    steps = [slurm.step_port(job, step) for job in range(4711, 4811) for step in range(100)]
    assert len(set(steps)) == len(steps)
    assert min(steps) >= 1024
    assert max(steps) < 32768


def test_ten_thousand_nodes_expand_as_fast_as_they_can_be_formatted() -> None:
    """Within a small factor of making the same strings in a plain loop, in the same run."""

    def fastest(work: object) -> float:
        return min(_seconds(work) for _ in range(5))

    def plain() -> list[str]:
        return [f"rack{i:02d}-node{j:03d}" for i in range(10) for j in range(1000)]

    assert slurm.expand_hosts("rack[00-09]-node[000-999]") == plain()
    ours = fastest(lambda: slurm.expand_hosts("rack[00-09]-node[000-999]"))
    assert ours < 20 * fastest(plain)  # a plain loop takes 2 ms: far below 50 ms


def _seconds(work: object) -> float:
    start = time.perf_counter()
    work()  # type: ignore[operator]
    return time.perf_counter() - start


NUMBER = st.integers(0, 120)


WORD = st.from_regex(r"[a-z]([a-z-]{0,4}[a-z])?", fullmatch=True)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(WORD, st.sets(NUMBER, min_size=1, max_size=5)), min_size=1, max_size=4))
def test_written_lists_read_back(groups: list[tuple[str, set[int]]]) -> None:
    text = ",".join(f"{word}[{','.join(map(str, sorted(ns)))}]" for word, ns in groups)
    names = [f"{word}{n}" for word, ns in groups for n in sorted(ns)]
    assert slurm.expand_hosts(text) == names
    assert slurm.first_host(text) == names[0]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_written_counts_read_back(counts: list[int]) -> None:
    runs = [(value, len(list(run))) for value, run in itertools.groupby(counts)]
    text = ",".join(f"{value}(x{n})" if n > 1 else str(value) for value, n in runs)
    assert slurm.expand_counts(text) == counts
