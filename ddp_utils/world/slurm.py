"""What do Slurm's compressed lists say?

Pure functions over the texts that Slurm puts into variables: which nodes, how many tasks on
each, and which port a job step can call its own. Formats: ``man srun``, ``man scontrol``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ddp_utils.ground.errors import LauncherError

__all__ = ["expand_counts", "expand_hosts", "first_host", "first_of_hostfile", "step_port"]

MOST_HOSTS = 2**20
"""More than any cluster has: a list that asks for more is garbage, and would fill the memory."""

DEEPEST = 8
"""Brackets inside brackets: Slurm itself writes one."""

RANGE = re.compile(r"(\d+)-(\d+)(?::(\d+))?$")
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?$")


def expand_hosts(hosts: str) -> list[str]:
    """Return the node names of a Slurm node list, in its order.

    Any number of bracketed groups in one name, ranges with zero padding and steps, lists and
    groups inside groups, and dashes and dots anywhere in names.

    Raises:
        LauncherError: the text is not such a list.

    >>> expand_hosts("gpu-a[1,3-4]-ib,login")
    ['gpu-a1-ib', 'gpu-a3-ib', 'gpu-a4-ib', 'login']
    >>> expand_hosts("r[0-1]n[08-10:2]")
    ['r0n08', 'r0n10', 'r1n08', 'r1n10']
    """
    names: list[str] = []
    for name in _hosts(hosts):
        names.append(name)
        if len(names) > MOST_HOSTS:
            raise _not_a_list(hosts, f"it names more than {MOST_HOSTS} nodes")
    return names


def first_host(hosts: str) -> str:
    """Return the first name of a Slurm node list, without expanding the others.

    >>> first_host("n[001-999],login")
    'n001'
    """
    return next(_hosts(hosts))


def _hosts(text: str) -> Iterator[str]:
    for item in _split(text, text):
        yield from _expand_name(item, text)


def _split(text: str, whole: str) -> list[str]:
    """Split at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character == "[":
            depth += 1
        elif character == "]":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
        if not 0 <= depth <= DEEPEST:
            why = "a bracket closes that was not opened" if depth < 0 else "it nests too deep"
            raise _not_a_list(whole, why)
    if depth:
        raise _not_a_list(whole, "a bracket is not closed")
    parts = [part.strip() for part in [*parts, text[start:]]]
    if not all(parts):
        raise _not_a_list(whole, "a name is empty")
    return parts


def _expand_name(name: str, whole: str) -> Iterator[str]:
    """Yield all names that one name with bracketed groups stands for, the last group fastest."""
    start = name.find("[")
    if start < 0:
        yield name
        return
    end = _closing(name, start)
    prefix, rest = name[:start], name[end + 1 :]
    tails = list(_expand_name(rest, whole)) if rest else [""]
    for item in _split(name[start + 1 : end], whole):
        for middle in _expand_item(item, whole):
            yield from (prefix + middle + tail for tail in tails)


def _closing(name: str, start: int) -> int:
    depth = 0
    for i in range(start, len(name)):
        depth += (name[i] == "[") - (name[i] == "]")
        if depth == 0:
            return i
    raise AssertionError("brackets were checked to be balanced")


def _expand_item(item: str, whole: str) -> Iterator[str]:
    """Yield what one item between brackets stands for: a range, or a name of its own."""
    found = RANGE.match(item)
    if found is None:
        yield from _expand_name(item, whole)
        return
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if last < first or step < 1:
        raise _not_a_list(whole, f"the range {item!r} is empty")
    width = len(found[1])
    yield from (f"{number:0{width}d}" for number in range(first, last + 1, step))


def _not_a_list(text: str, why: str) -> LauncherError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return LauncherError(f"{shown!r} is not a list that Slurm writes: {why}")


def expand_counts(counts: str) -> list[int]:
    """Return the numbers of a Slurm list of counts by node, such as tasks per node.

    Raises:
        LauncherError: the text is not such a list.

    >>> expand_counts("2(x3),1")
    [2, 2, 2, 1]
    """
    numbers: list[int] = []
    for item in counts.split(","):
        found = COUNT.match(item.strip())
        if found is None or len(numbers) + int(found[2] or 1) > MOST_HOSTS:
            raise _not_a_list(counts, f"{item!r} is not a count such as '4' or '4(x2)'")
        numbers += [int(found[1])] * int(found[2] or 1)
    return numbers


def first_of_hostfile(text: str) -> str | None:
    """Return the node of task 0 from the text of a ``SLURM_HOSTFILE``, None if it names none.

    Such a file has one node a task, in the order of tasks, each optionally with ``*count``.

    >>> first_of_hostfile("# by hand\\n\\nn2*2\\nn1\\n")
    'n2'
    """
    for line in text.splitlines():
        content = line.partition("#")[0].strip()
        if content:
            return first_host(content).partition("*")[0]
    return None


def step_port(job_id: int, step_id: int) -> int:
    """Return a port for a job step: the same on all its ranks, another for its neighbours.

    It lies in 10000 to 30010, below the ports that Linux hands out by itself (from 32768), and
    steps of one job, as jobs with numbers side by side, get different ones.

    >>> step_port(4711, 0) == step_port(4711, 0) != step_port(4711, 1)
    True
    """
    return 10000 + (job_id * 131 + step_id) % 20011
