"""Digests of tensors."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_utils.ground import bits
from ddp_utils.ground.bits import digests, is_readable


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=2, max_size=30), st.data())
def test_digests_tell_order_apart_and_do_not_depend_on_chunks(numbers: Any, data: Any) -> None:
    tensor = torch.tensor(numbers, dtype=torch.float32)
    other = torch.tensor(data.draw(st.permutations(numbers)), dtype=torch.float32)
    whole, permuted = digests([tensor, other])
    assert (whole == permuted) == torch.equal(tensor, other)
    chunk, bits.CHUNK = bits.CHUNK, data.draw(st.integers(1, 5))
    try:
        assert digests([tensor, tensor.view(-1, 1).expand(-1, 2)[:, 0]]) == [whole, whole]
    finally:
        bits.CHUNK = chunk


def test_every_kind_of_tensor_has_a_digest() -> None:
    kinds = [torch.bool, torch.bfloat16, torch.float64, torch.complex64]
    plain = [torch.tensor([0, 1, 1]).to(dtype) for dtype in kinds]
    sparse = [torch.tensor([[0.0, 1.0]]).to_sparse(), torch.tensor([[1.0, 0.0]]).to_sparse()]
    empty, conjugate = torch.empty(0, 3), torch.tensor([1j]).conj()
    found = digests([*plain, *sparse, empty, conjugate, torch.tensor([complex(0, -1)])])
    assert found[-2] == found[-1]
    assert len(set(found)) == len(found) - 1
    assert [is_readable(tensor) for tensor in (*plain, *sparse)] == [True] * 4 + [False] * 2
