"""Slurm's own command expands node lists as this package does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import environment, need
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddp_utils.world import slurm

NUMBER = st.integers(0, 120)
WORD = st.from_regex(r"[a-z]([a-z-]{0,4}[a-z])?", fullmatch=True)


@st.composite
def bracket(draw: st.DrawFn) -> str:
    """A bracketed group as Slurm writes them, one width a group."""
    width = draw(st.integers(1, 4))
    items = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(NUMBER)
        last = first + draw(st.integers(0, 5))
        text = f"{first:0{width}d}"
        items.append(text if last == first else f"{text}-{last:0{width}d}")
    return f"[{','.join(items)}]"


@st.composite
def node_list(draw: st.DrawFn) -> str:
    """A node list: names with up to two bracketed groups, the last at the end (Slurm's rule).

    Steps and groups within groups its command refuses, so that there is nothing to compare.
    """
    names = []
    for _ in range(draw(st.integers(1, 3))):
        parts = [draw(WORD)]
        for _ in range(draw(st.integers(0, 2))):
            parts += [draw(st.sampled_from(["", "-", "x"])), draw(bracket())]
        names.append("".join(parts))
    return ",".join(names)


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    """The least configuration with which the command runs, without any daemon."""
    need("scontrol")
    path = tmp_path / "slurm.conf"
    path.write_text("ClusterName=none\nSlurmctldHost=localhost\n")
    return path


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(node_list())
def test_slurm_itself_expands_lists_alike(conf: Path, text: str) -> None:
    done = subprocess.run(
        ["scontrol", "show", "hostnames", text],
        env=environment(SLURM_CONF=str(conf)),
        capture_output=True,
        text=True,
        check=True,
    )
    assert slurm.expand_hosts(text) == done.stdout.split()
