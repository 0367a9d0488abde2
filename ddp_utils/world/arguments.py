"""How does a script accept the local rank that old launchers pass as a flag?"""

from __future__ import annotations

import argparse
import os

__all__ = ["add_local_rank_argument"]


def add_local_rank_argument(parser: argparse.ArgumentParser) -> None:
    """Let ``parser`` accept ``--local_rank`` and ``--local-rank``, as old launchers pass them.

    The value is kept for scripts that read ``args.local_rank``; its default is ``LOCAL_RANK``
    from the environment, else 0. This package itself never reads the flag.

    Example:
        >>> parser = argparse.ArgumentParser()
        >>> add_local_rank_argument(parser)
        >>> parser.parse_args(["--local-rank=1"]).local_rank
        1
    """
    parser.add_argument(
        "--local_rank",
        "--local-rank",
        type=int,
        default=int(os.environ.get("LOCAL_RANK") or 0),
        help="set by torch.distributed.launch; not needed otherwise",
    )
