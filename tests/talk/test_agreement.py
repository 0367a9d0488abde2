"""What ranks that differ are told."""

from __future__ import annotations

from ddp_utils.talk.agreement import Came, difference, digest_of, named_ranks


def test_ranks_are_named_in_short() -> None:
    assert named_ranks([0]) == "rank 0"
    assert named_ranks([3, 1]) == "ranks 1, 3"
    assert named_ranks([2, 1, 0]) == "ranks 0-2"
    assert named_ranks([0, 1, 5, 6, 7, 9]) == "ranks 0, 1, 5-7, 9"


def test_ranks_that_agree_are_told_nothing() -> None:
    came = [Came("all_gather", f"train.py:{i}", {"['a']": "x"}) for i in range(3)]
    assert difference(came, [0, 1, 2]) is None


def test_the_operation_comes_before_what_was_brought() -> None:
    came = [Came("all_gather", "a.py:1", {"": "x"}), Came("barrier", "a.py:2", {})]
    assert difference(came, [4, 7]) == (
        "the ranks came to different collectives:\n"
        "  rank 4: all_gather at a.py:1\n"
        "  rank 7: barrier at a.py:2"
    )


def test_the_first_path_that_differs_is_told_with_every_ranks_line() -> None:
    same, other = {"['a']": "x", "['b']": "y"}, {"['a']": "x", "['b']": "z"}
    lacking = {"['a']": "x"}
    came = [Came("f", f"t.py:{i}", terms) for i, terms in enumerate([same, other, lacking, same])]
    assert difference(came, range(4)) == (
        "f: the ranks differ at ['b']:\n"
        "  rank 0: y (t.py:0)\n"
        "  rank 1: z (t.py:1)\n"
        "  rank 2: nothing (t.py:2)\n"
        "  rank 3: y (t.py:3)"
    )


def test_ranks_that_say_the_same_share_a_line() -> None:
    came = [Came("f", "t.py:1", {"": "x"})] * 3 + [Came("f", "t.py:1", {"": "y"})]
    assert "\n  ranks 0-2: x (t.py:1)\n  rank 3: y" in str(difference(came, range(4)))


def test_digests_tell_lines_apart() -> None:
    assert len({digest_of("a", "b"), digest_of("ab"), digest_of("b", "a"), digest_of("a")}) == 4
    assert len(digest_of("x")) == 16
