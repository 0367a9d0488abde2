"""Who gets which position: the pure part, at any size."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_utils.data.permutation import Permutation
from ddp_utils.data.shares import batches_are_uneven, dealt_end, per_rank_batch_size, share

lengths = st.integers(1, 200)
worlds = st.integers(1, 20)
modes = st.sampled_from([(True, False), (False, False), (False, True)])


@given(lengths, worlds, st.integers(0, 220), modes)
def test_the_ranks_together_have_every_position_once(
    length: int, world_size: int, start: int, mode: tuple[bool, bool]
) -> None:
    pad, drop_last = mode
    shares = [
        share(rank, world_size, length, start, pad=pad, drop_last=drop_last)
        for rank in range(world_size)
    ]
    dealt = sorted(position for one in shares for position in one)
    end = dealt_end(length, world_size, start, pad=pad, drop_last=drop_last)
    assert dealt == list(range(start, end))
    if pad or drop_last:
        assert len({len(one) for one in shares}) == 1
    if pad:
        assert max(start, length) <= end < max(start, length) + world_size
    elif drop_last:
        assert max(start, length) - world_size < end <= max(start, length)
    else:
        assert end == max(start, length)


@given(lengths, worlds, st.integers(1, 8))
def test_one_global_batch_holds_the_same_positions_in_every_world(
    length: int, world_size: int, per_rank: int
) -> None:
    size = world_size * per_rank
    shares = [share(r, world_size, length, pad=False, drop_last=False) for r in range(world_size)]
    for step in range(-(-length // size)):
        batch = [p for one in shares for p in one[step * per_rank : (step + 1) * per_rank]]
        assert sorted(batch) == list(range(step * size, min((step + 1) * size, length)))


@given(st.integers(1, 500), worlds, st.integers(1, 9), st.booleans())
def test_unevenness_is_that_of_the_batches(
    length: int, world_size: int, size: int, drop_last: bool
) -> None:
    counts = [
        len(share(rank, world_size, length, pad=False, drop_last=False))
        for rank in range(world_size)
    ]
    batches = {count // size if drop_last else -(-count // size) for count in counts}
    assert batches_are_uneven(length, world_size, size, drop_last) == (len(batches) > 1)


def test_a_global_batch_is_divided_or_refused_with_the_nearest() -> None:
    assert per_rank_batch_size(64, 4) == 16
    with pytest.raises(ValueError, match=r"=10 cannot .* over 4 ranks\. .*: 8 and 12"):
        per_rank_batch_size(10, 4)
    with pytest.raises(ValueError, match="can: 4"):
        per_rank_batch_size(3, 4)
    with pytest.raises(ValueError, match="at least 1"):
        per_rank_batch_size(0, 4)


SAMPLES, RANKS = 10**12, 16_384


def test_a_trillion_samples_over_16384_ranks() -> None:
    """On paper: two ranks' ranges have one step and different remainders, so they never meet.

    Spot checks: the ends, and that chosen ranks' samples are all different; then a resume.
    """
    order = Permutation(SAMPLES, seed=1, epoch=2)
    draw = random.Random(0)
    some = [0, 1, RANKS - 1, *draw.sample(range(RANKS), 20)]
    shares = {rank: share(rank, RANKS, SAMPLES, pad=True, drop_last=False) for rank in some}
    for rank, positions in shares.items():
        assert positions[0] == rank
        assert len(positions) == -(-SAMPLES // RANKS)
        assert SAMPLES - RANKS < positions[-1] < SAMPLES + RANKS
        assert positions.step == RANKS
    seen = np.concatenate([order(np.array(one[:2000])) for one in shares.values()])
    assert len(np.unique(seen)) == len(seen)
    assert seen.max() < SAMPLES

    fewer, steps, size = 12_288, 1_000_003, 32
    position = steps * size * RANKS
    left = [share(r, fewer, SAMPLES, position, pad=False, drop_last=False) for r in (0, fewer - 1)]
    assert left[0][0] == position
    assert left[1][0] == position + fewer - 1
    handed_out = shares[some[-1]][: steps * size]
    assert handed_out[-1] < position <= shares[some[-1]][steps * size]
    sizes = [
        len(share(r, fewer, SAMPLES, position, pad=False, drop_last=False)) for r in range(fewer)
    ]
    assert sum(sizes) == SAMPLES - position
