"""What can be asked from the command line: ``python -m ddp_utils explain`` and ``doctor``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from ddp_utils.ground.saying import say

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the process's exit code: 0 if all is well."""
    parser = argparse.ArgumentParser(prog="python -m ddp_utils", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    about = {
        "explain": "which launcher, rank and device this process has, and why",
        "doctor": "what on this machine would keep ranks from starting or talking",
    }
    for name, text in about.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="for machines")
    chosen = parser.parse_args(arguments)
    return _explain(chosen.json) if chosen.command == "explain" else _doctor(chosen.json)


def _explain(as_json: bool) -> int:
    from ddp_utils import explain

    report = explain.explain(os.environ)
    if as_json:
        say(json.dumps(report, indent=2), sys.stdout)
    else:
        explain.show(report)
    return 0 if report["error"] is None else 1


def _doctor(as_json: bool) -> int:
    from ddp_utils import doctor
    from ddp_utils.world.world import is_rank_zero

    findings = doctor.examine(os.environ)
    well = all(each.ok for each in findings)
    if well and not is_rank_zero():
        return 0
    if as_json:
        say(json.dumps(doctor.as_data(findings), indent=2), sys.stdout)
    else:
        doctor.show(findings)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
