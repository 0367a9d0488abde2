"""What does this package make of the environment: ``python -m ddp_utils explain``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, TextIO

from ddp_utils.ground import settings
from ddp_utils.ground.errors import LauncherError
from ddp_utils.ground.saying import say
from ddp_utils.world import devices
from ddp_utils.world.detection import Detection, detect
from ddp_utils.world.machines import ranks_on_a_machine
from ddp_utils.world.world import from_detection

__all__ = ["GREEN", "RED", "explain", "show", "table"]

FORMAT = 1
"""Of the JSON: keys are only ever added while this number stays."""

RED, GREEN = "31", "32"
ESCAPE = "\033"


def explain(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return who this process is and why, as plain data.

    Example:
        >>> report = explain({"OMPI_COMM_WORLD_RANK": "1"})
        >>> report["launcher"], "OMPI_COMM_WORLD_SIZE" in report["error"]
        (None, True)
    """
    report: dict[str, Any] = {
        "format": FORMAT,
        "launcher": None,
        "error": None,
        "world": None,
        "decided": {},
        "assumed": [],
        "ignored": [],
        "devices": None,
    }
    try:
        found = detect(environ)
    except (LauncherError, ValueError) as error:
        return report | {"error": str(error)}
    report |= {"launcher": found.launcher, "world": _world(found)}
    report |= {"decided": found.decided, "assumed": found.notes}
    report["ignored"] = [asdict(each) for each in found.ignored]
    try:
        report["devices"] = _devices(found, environ)
    except (LauncherError, ValueError) as error:
        report["error"] = str(error)
    return report


def _world(found: Detection) -> dict[str, Any]:
    world = asdict(from_detection(found))
    return {name: world[name] for name in world if name not in ("evidence", "launcher")}


def _devices(found: Detection, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the device of every local rank, as the rank itself would choose it."""
    kind = devices.accelerator_type()
    visible = devices.visible_devices(kind)
    here = found.facts.get("local_world_size", 1)
    if found.launcher == "none":
        here = ranks_on_a_machine(environ, visible)
    chosen = [
        devices.choose_device(
            local_rank,
            here,
            device_type=kind,
            visible=visible,
            bound=devices.has_devices_of_its_own(found.launcher, local_rank, environ),
            oversubscribe=settings.OVERSUBSCRIBE.get(environ),
        )
        for local_rank in range(here)
    ]
    return {
        "type": kind,
        "visible": visible,
        "by_local_rank": [str(device) for device in chosen],
        "backend": devices.backend_for(kind),
    }


def show(report: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print a report for a person, on stdout by default."""
    rows = [(name, text, "") for name, text in _lines(report)]
    if report["error"] is not None:
        rows.append(("error", report["error"], RED))
    stream = stream or sys.stdout
    say("\n".join(table(rows, stream)), stream)


def _lines(report: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    world = report["world"]
    if world is None:
        return
    starts = report["launcher"] == "none"
    yield "launcher", "none: this process starts the ranks" if starts else report["launcher"]
    if starts:
        yield "machine", f"{world['node_rank']} of {world['num_nodes']}"
    else:
        yield "rank", f"{world['rank']} of {world['world_size']}"
        yield "local rank", f"{world['local_rank']} of {world['local_world_size']}"
        yield "node", f"{world['node_rank']} of {world['num_nodes']}"
    if world["master_addr"] is not None and world["master_port"] is not None:
        yield "meeting at", f"{world['master_addr']}, port {world['master_port']}"
    if report["devices"] is not None:
        used = report["devices"]
        yield "visible", f"{used['visible']} accelerators" if used["visible"] else "the CPU only"
        ranks = ", ".join(f"{i}: {name}" for i, name in enumerate(used["by_local_rank"]))
        yield "devices", f"by local rank {ranks}"
        yield "backend", used["backend"]
    for i, (name, value) in enumerate(report["decided"].items()):
        yield "" if i else "decided by", f"{name}={value}"
    for i, note in enumerate(report["assumed"]):
        yield "" if i else "assumed", note
    width = max((len(f"{each['name']}={each['value']}") for each in report["ignored"]), default=0)
    for i, each in enumerate(report["ignored"]):
        seen = f"{each['name']}={each['value']}"
        yield "" if i else "ignored", f"{seen:{min(width, 40)}}  {each['why']}"


def table(rows: Iterable[tuple[str, str, str]], stream: TextIO) -> list[str]:
    """Return names, texts and the names' colours as aligned lines.

    The colours, given by their ANSI codes, are for a terminal only, and only if it wants them.

    >>> table([("rank", "0 of 2", ""), ("meeting at", "n1", RED)], open(os.devnull))
    ['rank        0 of 2', 'meeting at  n1']
    """
    known = list(rows)
    width = max((len(name) for name, _, _ in known), default=0)
    plain = not stream.isatty() or bool(os.environ.get("NO_COLOR"))
    return [
        f"{name if plain or not colour else f'{ESCAPE}[{colour}m{name}{ESCAPE}[0m'}"
        f"{' ' * (width - len(name))}  {text}"
        for name, text, colour in known
    ]
