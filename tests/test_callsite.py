"""Lines of the user's, and sections that not all ranks run."""

from __future__ import annotations

import inspect
import threading
from typing import Any

import pytest

from ddp_utils import OneRankSectionError, callsite
from ddp_utils.callsite import Section, call_site, one_rank_section, refuse_in_section

ONLY = Section("the rank_zero_only save", "train.py:3", excludes=True)
FIRST = Section("rank_zero_first", "train.py:9", excludes=False)


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_call_site_is_the_line_that_called() -> None:
    assert (call_site(), here()) == (f"{__file__}:{here()}", here())


def test_the_packages_own_frames_and_contextlibs_are_passed_over() -> None:
    # A generator of this package, called by contextlib, called from here.
    own = compile(
        "from contextlib import contextmanager\n"
        "@contextmanager\n"
        "def context():\n"
        "    yield call_site()",
        callsite.OURS + "agree/made_up.py",
        "exec",
    )
    names: dict[str, Any] = {"call_site": call_site}
    exec(own, names)
    with names["context"]() as site:
        assert site == f"{__file__}:{here() - 1}"


def test_collectives_are_refused_in_every_section() -> None:
    for section in (ONLY, FIRST):
        with one_rank_section(section), pytest.raises(OneRankSectionError) as error:
            refuse_in_section("all_gather")
        text = str(error.value)
        assert "rank 0 called all_gather at " + __file__ in text
        assert f"inside {section.name} ({section.site})" in text
    refuse_in_section("all_gather")


def test_what_goes_in_turns_is_refused_only_where_the_others_never_come() -> None:
    with one_rank_section(FIRST):
        refuse_in_section("rank_zero_first", in_turn=True)
        with one_rank_section(ONLY), pytest.raises(OneRankSectionError, match="rank_zero_only"):
            refuse_in_section("rank_zero_first", in_turn=True)
        refuse_in_section("rank_zero_first", in_turn=True)


def test_a_section_ends_with_its_block_also_by_an_exception() -> None:
    with pytest.raises(KeyError), one_rank_section(ONLY):
        raise KeyError
    refuse_in_section("all_gather")


def test_other_threads_are_not_in_the_section() -> None:
    refused: list[Exception] = []

    def elsewhere() -> None:
        try:
            refuse_in_section("all_gather")
        except OneRankSectionError as error:
            refused.append(error)

    with one_rank_section(ONLY):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert refused == []
