"""The local rank as a flag, as old launchers pass it."""

from __future__ import annotations

import argparse

import pytest

from ddp_utils import add_local_rank_argument


def parse(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_local_rank_argument(parser)
    return int(parser.parse_args(arguments).local_rank)


def test_both_spellings_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert parse("--local-rank=2") == parse("--local_rank=2") == parse("--local_rank", "2") == 2
    assert parse() == 0


def test_the_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert parse() == 3
    monkeypatch.setenv("LOCAL_RANK", "")
    assert parse() == 0
