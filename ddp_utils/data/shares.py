"""Which positions of an epoch's order does a rank visit?

An epoch is one order of all samples, the same on every rank. Ranks take its positions in turn,
like cards that are dealt out, so that the first ``world_size * batch_size`` positions are the
first global batch at every world size.
"""

from __future__ import annotations

__all__ = ["batches_are_uneven", "dealt_end", "per_rank_batch_size", "share"]


def dealt_end(length: int, world_size: int, start: int, *, pad: bool, drop_last: bool) -> int:
    """Return the position that dealing from ``start`` ends before.

    Beyond ``length`` where padded: position ``length + i`` stands for position ``i``.

    >>> [dealt_end(10, 4, 0, pad=pad, drop_last=cut)
    ...  for pad, cut in ((True, False), (False, False), (False, True))]
    [12, 10, 8]
    """
    left = max(0, length - start)
    if drop_last:
        left -= left % world_size
    elif pad:
        left += -left % world_size
    return start + left


def share(
    rank: int, world_size: int, length: int, start: int = 0, *, pad: bool, drop_last: bool
) -> range:
    """Return the positions that a rank visits in an epoch, from ``start`` on.

    Every position from ``start`` on is in exactly one rank's share, as ``p`` belongs to the
    rank ``(p - start) % world_size``: of any two ranges with one step and different remainders
    none meet.

    >>> [list(share(rank, 4, 10, pad=False, drop_last=False)) for rank in range(4)]
    [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    >>> list(share(0, 2, 10, start=8, pad=False, drop_last=False))  # resumed, on 2 ranks
    [8]
    """
    end = dealt_end(length, world_size, start, pad=pad, drop_last=drop_last)
    return range(start + rank, end, world_size)


def per_rank_batch_size(global_batch_size: int, world_size: int) -> int:
    """Return each rank's part of a global batch.

    Raises:
        ValueError: It does not divide; the message names the nearest sizes that do.

    >>> per_rank_batch_size(64, 4)
    16
    """
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size} is no batch; give at least 1")
    if global_batch_size % world_size:
        lower = global_batch_size // world_size * world_size
        nearest = [str(size) for size in (lower, lower + world_size) if size]
        raise ValueError(
            f"global_batch_size={global_batch_size} cannot be divided evenly over {world_size} "
            f"ranks. Nearest that can: {' and '.join(nearest)}."
        )
    return global_batch_size // world_size


def batches_are_uneven(positions: int, world_size: int, batch_size: int, drop_last: bool) -> bool:
    """Whether some ranks get more batches than others when ``positions`` are dealt out.

    >>> batches_are_uneven(10, 4, 1, False), batches_are_uneven(10, 4, 4, False)
    (True, False)
    """
    fewest, most = positions // world_size, -(-positions // world_size)
    if drop_last:
        return fewest // batch_size != most // batch_size
    return -(-fewest // batch_size) != -(-most // batch_size)
