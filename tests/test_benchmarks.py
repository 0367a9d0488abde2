"""Does the frame of the benchmarks measure in turns, judge rightly, and write what it measured?"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

pytest.importorskip("tqdm", reason="the bench extra is not installed")

from benchmarks import Skip, Target, command, compare, installed, measure, sweep
from benchmarks.__main__ import benchmark_names, main


@pytest.fixture(autouse=True)
def _own_page():
    measure.results.start_over(None)
    yield
    measure.results.start_over(None)


def test_contenders_take_turns_and_each_round_begins_with_another(capsys) -> None:
    order: list[str] = []

    def contender(name: str, value: float):
        return lambda: order.append(name) or value

    found = compare(
        "task",
        {
            "floor": contender("floor", 2.0),
            "ours": contender("ours", 3.0),
            "peer": Skip("not installed"),
        },
        floor="floor",
        rounds=2,
        targets=[Target("ours", 1.5), Target("floor", at_least=3, absolute=True)],
    )
    assert order == ["floor", "ours", "ours", "floor"]
    assert found.rows["ours"].ratio == 1.5
    assert found.rows["ours"].verdict.startswith("reached")
    assert found.rows["floor"].verdict.startswith("MISSED")
    assert found.skipped == {"peer": "not installed"}
    assert "peer: skipped, not installed" in capsys.readouterr().out


def test_ratios_are_taken_round_by_round() -> None:
    floor, ours = iter([1.0, 10.0, 1.0]), iter([2.0, 20.0, 2.0])
    found = compare(
        "t", {"floor": lambda: next(floor), "ours": lambda: next(ours)}, floor="floor", rounds=3
    )
    assert found.rows["ours"].ratio == 2.0
    assert (found.rows["ours"].low, found.rows["ours"].high) == (2.0, 20.0)


def test_a_curve_leaves_out_what_would_take_too_long() -> None:
    curve = sweep("t", "n", [1, 10], {"a": float, "b": float}, rounds=1, limits={"b": 1})
    assert [x for x, _ in curve.points["a"]] == [1, 10]
    assert [x for x, _ in curve.points["b"]] == [1]


def test_a_command_that_ends_otherwise_is_an_error_with_its_output() -> None:
    assert command("python", "-c", "pass") > 0
    with pytest.raises(RuntimeError, match="ended with 3:\nwhy"):
        command("python", "-c", "print('why', flush=True); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="ended with 0"):
        command("python", "-c", "pass", exit_code=None)


def test_what_is_not_installed_is_skipped_with_the_reason() -> None:
    assert installed("json", float) is float
    assert installed("no_such_package", float) == Skip("no_such_package is not installed")


def test_one_benchmark_by_name_writes_json_and_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib", reason="the bench extra is not installed")
    from benchmarks import startup

    def work() -> None:
        compare("A task!", {"ddp_utils": lambda: 1.0, "other": lambda: 2.0}, floor="other")
        sweep("a curve", "n", [1, 1000], {"ddp_utils": float, "other": lambda n: 2.0 * n})

    monkeypatch.setattr(startup, "main", work)
    monkeypatch.setenv("DDP_UTILS_QUIET", "1")
    assert main(["startup", "--rounds", "1", "--out", str(tmp_path)]) == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"startup.json", "a-task.svg", "a-task.png", "a-curve.svg", "a-curve.png"}
    record = json.loads((tmp_path / "startup.json").read_text())
    assert record["comparisons"][0]["rows"]["ddp_utils"]["ratio"] == 0.5
    assert record["machine"]["versions"]["torch"]


def test_a_benchmark_that_fails_fails_the_command_and_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import startup

    def work() -> None:
        raise RuntimeError("no ranks today")

    monkeypatch.setattr(startup, "main", work)
    monkeypatch.setenv("DDP_UTILS_QUIET", "1")
    assert main(["startup", "--out", str(tmp_path)]) == 1
    assert "no ranks today" in capsys.readouterr().err


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["no_such_benchmark"])


@pytest.mark.parametrize("name", benchmark_names())
def test_every_benchmark_has_a_main_that_takes_nothing(name: str) -> None:
    path = Path(measure.__file__).with_name(f"{name}.py")
    mains = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    assert len(mains) == 1
    assert not mains[0].args.args
