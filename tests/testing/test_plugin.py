"""The plugin, as its users meet it: sample suites are run, and their outcomes counted."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable

import pytest

# pytester forgets what is first imported inside of a suite; these have to stay what they are.
import ddp_utils.launching
import ddp_utils.testing.combine
import ddp_utils.testing.in_rank  # noqa: F401
from ddp_utils.ground._torch_private import load_what_ddp_loads

pytest_plugins = ["pytester"]

load_what_ddp_loads()

HEADER = """
import os, pathlib, signal, sys, time, warnings
import pytest, torch
import torch.distributed as dist
from ddp_utils import get_rank, get_world_size

pytestmark = pytest.mark.distributed(world_size=2)
"""

SLOW = ("-p", "no:hypothesispytest", "-p", "no:unraisableexception")
"""Plugins that take seconds at the end: imports, and collections of torch's garbage."""

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Write a suite and run it: ``run('''def test_it(): ...''', "-x")``."""

    def write_and_run(text: str, *args: str, fresh: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_suite=HEADER + textwrap.dedent(text))
        start = pytester.runpytest_subprocess if fresh else pytester.runpytest_inprocess
        return start("-p", "no:cacheprovider", *SLOW, *args)

    return write_and_run


def lines(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


def test_the_body_runs_on_every_rank(run: Run) -> None:
    result = run(
        """
        def test_sum():
            assert (get_world_size(), dist.get_backend()) == (2, "gloo")
            total = torch.tensor([get_rank() + 1.0])
            dist.all_reduce(total)
            assert total.item() == 3

        @pytest.mark.distributed(world_size=3)
        def test_three():
            assert get_world_size() == 3
        """
    )
    result.assert_outcomes(passed=2)


def test_a_failure_shows_the_first_cause_and_folds_the_other_ranks(run: Run) -> None:
    result = run(
        """
        def test_it():
            print("said by", get_rank())
            print("cried by", get_rank(), file=sys.stderr)
            if get_rank() == 1:
                assert [1, 2, 3] == [1, 2, 4]
            dist.barrier()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "E   *assert [[]1, 2, 3] == [[]1, 2, 4]",
            "E   *At index 2 diff: 3 != 4",
            "test_suite.py:*: AssertionError",
            "*rank 1 of 2 failed*",
            "rank 0: lost a peer at test_suite.py:*",
            "*Captured stdout call (rank 0)*",
            "said by 0",
            "*Captured stderr call (rank 0)*",
            "cried by 0",
            "*Captured stdout call (rank 1)*",
            "said by 1",
            "FAILED test_suite.py::test_it - rank 1: *assert*",
        ]
    )


def test_equal_failures_are_told_once_and_for_rank_zero(run: Run) -> None:
    result = run(
        """
        @pytest.mark.distributed(world_size=3)
        def test_it():
            assert get_world_size() == 4
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*rank 0 of 3 failed*", "ranks 1, 2: failed at *: assert 3 == 4"])


def test_skips(run: Run) -> None:
    result = run(
        """
        @pytest.mark.skip(reason="always")
        def test_mark(): ...

        @pytest.mark.skipif(get_world_size() == 1, reason="by the parent, which is no rank")
        def test_condition(): ...

        def test_inside():
            pytest.skip("on all")

        def test_import():
            pytest.importorskip("no_such_module")

        @pytest.fixture
        def needs():
            pytest.skip("in a fixture")

        def test_fixture(needs): ...
        """,
        "-rs",
    )
    result.assert_outcomes(skipped=5)
    assert "on all" in lines(result)


@pytest.mark.parametrize("rest", ["", "dist.barrier()"])
def test_a_skip_on_one_rank_only_is_an_error(run: Run, rest: str) -> None:
    result = run(
        f"""
        def test_it():
            if get_rank() == 1:
                pytest.skip("only here")
            {rest}
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1 of 2 skipped this test, and not all ranks did.*"])
    assert "only here" in lines(result)


def test_expected_failures(run: Run) -> None:
    result = run(
        """
        @pytest.mark.xfail
        def test_on_all():
            assert False

        @pytest.mark.xfail(raises=ValueError, strict=True)
        def test_on_one_while_the_other_waits():
            if get_rank() == 1:
                raise ValueError
            dist.barrier()

        @pytest.mark.xfail(strict=True)
        def test_on_one_while_the_other_passes():
            assert get_rank() == 0

        def test_called():
            pytest.xfail("known")

        @pytest.mark.xfail(raises=ValueError)
        def test_another_error():
            raise KeyError

        @pytest.mark.xfail
        def test_passes():
            ...

        @pytest.mark.xfail(strict=True)
        def test_passes_where_that_is_wrong():
            ...
        """
    )
    result.assert_outcomes(xfailed=4, failed=2, xpassed=1)
    assert "[XPASS(strict)]" in lines(result)


def test_a_crash_or_a_hang_fails_that_test_and_the_next_one_runs(run: Run) -> None:
    result = run(
        """
        def test_crashes():
            print("before the crash")
            if get_rank() == 1:
                os.kill(os.getpid(), signal.SIGSEGV)
            dist.barrier()

        @pytest.mark.distributed(world_size=2, timeout=2)
        def test_hangs():
            print("before the hang")
            if get_rank() == 1:
                time.sleep(1000)
            dist.barrier()

        @pytest.mark.timeout(2)
        def test_hangs_for_another_plugin():
            time.sleep(1000)

        def test_exits():
            os._exit(3)

        def test_passes():
            dist.barrier()
        """
    )
    result.assert_outcomes(failed=4, passed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2*was killed by SIGSEGV*",
            "*Captured stdout call (rank 1)*",
            "before the crash",
            "*in test_crashes",
            "the ranks did not end within 2 s",
            "Stacks of rank 0:",
            "*in test_hangs",
            "Stacks of rank 1:",
            "*in test_hangs",
            "*Captured stdout call (rank 0)*",
            "before the hang",
            "the ranks did not end within 2 s",
            "*in test_hangs_for_another_plugin",
            "rank * of 2*exited with code 3*",
        ]
    )
    assert "_pytest" not in lines(result)


def test_a_rank_that_waits_where_nothing_notices_is_ended(run: Run) -> None:
    result = run(
        """
        def test_it():
            if get_rank() == 1:
                raise ValueError("the cause")
            signal.pause()

        def test_next(): ...
        """
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        ["E *ValueError: the cause", "rank 0: did not end: it was in its call at test_suite.py:*"]
    )


def test_setup_and_teardown_that_fail_are_errors(run: Run) -> None:
    result = run(
        """
        @pytest.fixture
        def breaks_before():
            assert get_rank() == 0

        @pytest.fixture
        def breaks_after():
            yield
            assert get_rank() == 0

        def test_before(breaks_before):
            dist.barrier()

        def test_after(breaks_after): ...
        """
    )
    result.assert_outcomes(errors=2, passed=1)
    result.stdout.fnmatch_lines(["*ERROR at setup of*", "*ERROR at teardown of*"])


def test_fixtures_are_made_in_the_ranks(run: Run) -> None:
    result = run(
        """
        @pytest.fixture
        def model():
            return torch.nn.Linear(2, 1), get_rank(), os.getpid()

        @pytest.fixture(scope="module")
        def wide():
            return os.getpid()

        def test_function(model, wide):
            assert model[1:] == (get_rank(), os.getpid())
            assert wide == os.getpid()

        def test_tmp_path(tmp_path, tmp_path_factory):
            folders = [None, None]
            more = tmp_path_factory.mktemp("more"), tmp_path_factory.mktemp("more")
            dist.all_gather_object(folders, (tmp_path, *more))
            assert folders[0] == folders[1]
            assert len(set(folders[0])) == 3
            (tmp_path / str(get_rank())).touch()
            dist.barrier()
            assert len(list(tmp_path.iterdir())) == 2

        def test_monkeypatch(monkeypatch, tmp_path):
            monkeypatch.setenv("SET_BY_A_RANK", str(get_rank()))
            monkeypatch.chdir(tmp_path)
            assert pathlib.Path.cwd() == tmp_path

        def test_nothing_is_left_of_that():
            assert "SET_BY_A_RANK" not in os.environ

        def test_capsys(capsys, capfd):
            ...

        def test_captured(capsys):
            print("rank", get_rank())
            assert capsys.readouterr().out == f"rank {get_rank()}\\n"

        def test_captured_files(capfd):
            os.system("echo hello")
            assert capfd.readouterr().out == "hello\\n"

        def test_logged(caplog):
            import logging
            logging.getLogger("x").warning("careful")
            assert "careful" in caplog.text

        class TestInClass:
            @pytest.fixture(autouse=True)
            def prepare(self):
                self.prepared = get_rank()

            def setup_method(self):
                self.set_up = get_rank()

            def test_method(self):
                assert self.prepared == self.set_up == get_rank()
        """
    )
    result.assert_outcomes(passed=8, errors=1)  # capsys and capfd exclude each other


def test_conftests_options_and_settings_reach_the_ranks(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nmarkers = mine\naddopts = --color-of-ranks=red --strict-markers")
    pytester.makeconftest(
        """
        import pytest
        def pytest_addoption(parser):
            parser.addoption("--color-of-ranks")
        @pytest.fixture
        def color(request):
            return request.config.getoption("--color-of-ranks")
        """
    )
    result = run(
        """
        @pytest.mark.mine
        def test_it(color, request):
            assert color == "blue"
            assert request.node.get_closest_marker("mine")
        """,
        "--color-of-ranks=blue",
        "-m",
        "mine",
    )
    result.assert_outcomes(passed=1)


def test_world_sizes_and_parameters_are_cases_of_their_own(run: Run) -> None:
    text = """
        @pytest.mark.distributed(world_size=[1, 3])
        @pytest.mark.parametrize("x", ["a[b]", "c::d"])
        def test_it(x):
            assert len(x) == 4
            assert get_world_size() == 3 or x == "c::d"
        """
    result = run(text, "-v")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*test_it[[]1rank-a[[]b]] FAILED*", "*test_it[[]3ranks-c::d]*"])
    run(text, "-k", "3ranks").assert_outcomes(passed=2, deselected=2)


@pytest.mark.parametrize(
    ("mark", "said"),
    [
        ("world_size=0", "world_size=0"),
        ("world_size='two'", "world_size='two'"),
        ("size=2", "pytest.mark.distributed() got an unexpected keyword argument 'size'"),
        ("timeout=-1", "timeout=-1"),
        ("world_size=[]", r"world_size=[[]]"),
    ],
)
def test_a_wrong_mark_is_told_before_anything_starts(run: Run, mark: str, said: str) -> None:
    result = run(f"@pytest.mark.distributed({mark})\ndef test_it(): ...")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"*test_suite.py::test_it: *{said}*"])


def test_a_backend_that_is_missing_is_told(run: Run) -> None:
    result = run("@pytest.mark.distributed(backend='no_such')\ndef test_it(): ...")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no_such*"])


def test_unittest_and_subtests(run: Run) -> None:
    result = run(
        """
        import unittest

        class TestCase(unittest.TestCase):
            def setUp(self):
                self.rank = get_rank()

            def test_it(self):
                self.assertEqual(self.rank, get_rank())
                dist.barrier()

            @pytest.mark.distributed(world_size=[1, 2])
            def test_sizes(self): ...
        """
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*a list of world sizes works where tests can be parametrized*"])


def test_subtests_are_reported_for_the_ranks_where_they_fail(run: Run) -> None:
    result = run(
        """
        def test_it(subtests):
            for i in range(3):
                with subtests.test(number=i):
                    assert i != get_rank()
        """
    )
    result.assert_outcomes(failed=2 + 1)  # one subtest on each rank, and the test
    result.stdout.fnmatch_lines_random(["*SUBFAILED*0*", "*SUBFAILED*1*"])


def test_what_follows_from_a_failure_is_no_second_failure(run: Run) -> None:
    result = run(
        """
        @pytest.fixture
        def meets():
            yield
            dist.barrier()

        def test_it(meets):
            assert get_rank() == 0

        def test_crash_beside_a_failure():
            if get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                dist.barrier()
            except RuntimeError:
                raise ValueError("an effect that does not look like one") from None
        """
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["rank 1 of 2*was killed by SIGKILL*"])


@pytest.mark.slow
def test_stop_at_the_first_failure(run: Run) -> None:
    text = """
        def test_a(): assert get_rank() == 5
        def test_b(): ...
        def test_c(): ...
        """
    run(text, "-x").assert_outcomes(failed=1)
    run(text, "-k", "test_b or test_c").assert_outcomes(passed=2, deselected=1)


def test_leaving_the_session(run: Run) -> None:
    result = run(
        """
        def test_a(): pytest.exit("enough", returncode=7)
        def test_b(): ...
        """
    )
    result.stdout.fnmatch_lines(["*Exit: enough*"])
    assert result.ret == 7


def test_warnings_of_the_ranks_are_in_the_summary_once(run: Run) -> None:
    text = """
        def test_it(): warnings.warn("mind the gap", DeprecationWarning)
        """
    result = run(text)
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*DeprecationWarning: mind the gap"])
    run(text, "-W", "error").assert_outcomes(failed=1)


def test_what_the_parent_has_warned_of_the_ranks_do_not_repeat(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeini("[pytest]\nno_such_setting = 1")
    text = """
        warnings.warn("while it is imported")
        def test_it(): ...
        """
    result = run(text)
    result.assert_outcomes(passed=1, warnings=2)
    assert lines(result).count("Unknown config option: no_such_setting") == 1
    assert lines(result).count("UserWarning: while it is imported") == 1


@pytest.mark.slow
def test_ranks_that_are_not_forked_from_pytest_do_not_warn_of_that(run: Run) -> None:
    threads = """
        import threading
        import pytest

        @pytest.hookimpl(tryfirst=True)
        def pytest_configure():
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        """
    pathlib.Path("with_threads.py").write_text(textwrap.dedent(threads))
    result = run("def test_it(): ...", "-W", "error", "-p", "with_threads", fresh=True)
    result.assert_outcomes(passed=1)
    assert "warning" not in lines(result)


def test_a_rank_that_is_silent_has_not_passed(run: Run) -> None:
    result = run(
        """
        def test_interrupted():
            raise KeyboardInterrupt

        def test_next(): ...
        """
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(["rank 0, 1 told nothing of its call"])


def test_ranks_may_skip_at_different_times(run: Run) -> None:
    result = run(
        """
        from ddp_utils.process_group import shared_store
        from ddp_utils.testing import in_rank

        def test_it():
            in_rank.PATIENCE = 0
            if get_rank() == 1:
                shared_store().wait(["left/0"])
            pytest.skip("late")
        """
    )
    result.assert_outcomes(skipped=1)


@pytest.mark.slow
def test_junit(run: Run, pytester: pytest.Pytester) -> None:
    result = run(
        """
        def test_fails(record_property):
            record_property("rank", get_rank())
            print("from", get_rank())
            if get_rank() == 1:
                raise ValueError("the cause")
            dist.barrier()

        def test_skips(): pytest.skip("no")

        def test_crashes(): os.kill(os.getpid(), signal.SIGKILL)

        def test_passes(): ...
        """,
        "--junitxml=out.xml",
        "-o",
        "junit_logging=all",
    )
    result.assert_outcomes(failed=2, skipped=1, passed=1)
    suite = next(ElementTree.parse(pytester.path / "out.xml").getroot().iter("testsuite"))
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["4", "2", "0", "1"]
    failure = next(suite.iter("failure"))
    assert failure.get("message") == "rank 1: ValueError: the cause"
    case = next(suite.iter("testcase"))
    assert [(p.get("name"), p.get("value")) for p in case.iter("property")] == [("rank", "0")]
    assert "from 1" in str(next(case.iter("system-out")).text)


@pytest.mark.slow
def test_output_goes_through_where_nothing_is_captured(run: Run) -> None:
    result = run("def test_it(): print('said by', get_rank())", "-s", fresh=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines_random(["*said by 0*", "*[[]rank 1] said by 1"])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("options", ["--cov=covered", "--cov", "--cov=covered -n 1"])
def test_coverage_is_combined_over_the_ranks(
    run: Run, pytester: pytest.Pytester, options: str
) -> None:
    pytester.makepyfile(
        covered="""
        def f(rank):
            if rank == 0:
                return "zero"
            return "one"

        def never():
            return "none"
        """
    )
    pytester.makefile(".ini", setup="[run]\nbranch = true")
    text = """
        import covered

        def test_it(): assert covered.f(get_rank())
        """
    result = run(text, "--cov-report=term-missing", *options.split(), fresh=True)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["covered.py * 7"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_xdist(run: Run) -> None:
    result = run(
        """
        @pytest.mark.parametrize("i", range(4))
        def test_it(i, worker_id, tmp_path):
            folders = [None, None]
            dist.all_gather_object(folders, (worker_id, tmp_path))
            assert folders[0] == folders[1]
            assert worker_id in ("gw0", "gw1")

        def test_fails():
            assert get_rank() == 0
        """,
        "-n",
        "2",
        fresh=True,
    )
    result.assert_outcomes(passed=4, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 of 2 failed*", "rank 0: passed"])


@pytest.mark.slow
def test_debugger_on_rank_zero(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_suite=HEADER
        + textwrap.dedent(
            """
            def test_it():
                mine = get_rank() + 40
                assert mine == 2

            def test_next(): ...
            """
        )
    )
    child = pytester.spawn_pytest("--pdb -p no:cacheprovider test_suite.py", expect_timeout=100)
    child.expect("AssertionError")
    child.expect("Pdb")
    child.sendline("p 'mine is', mine")
    child.expect("mine is', 40")
    child.sendline("c")
    child.expect("1 failed, 1 passed")
    child.wait()


def test_loading_the_plugin_costs_next_to_nothing() -> None:
    code = """
        import sys, pytest
        before = set(sys.modules)
        import ddp_utils.testing.plugin
        new = set(sys.modules) - before
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        assert new <= {"ddp_utils", "ddp_utils.testing", "ddp_utils.testing.plugin"}, new
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_suite_without_the_mark_does_not_load_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_it():\n    import sys\n    assert 'torch' not in sys.modules")
    pytester.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize("method", ["auto", "spawn"])
def test_ranks_have_the_plugins_of_their_parent(
    run: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """By their names; a plugin that the ini file requires counts as there; children look anew."""
    monkeypatch.setenv("DDP_UTILS_START_METHOD", method)
    pytester.makeini("[pytest]\nrequired_plugins = pytest-timeout\ntimeout = 50")
    result = run(
        """
        def test_plugins(pytestconfig):
            assert pytestconfig.pluginmanager.hasplugin("timeout")
            assert pytestconfig.pluginmanager.hasplugin("xdist")
            assert not pytestconfig.pluginmanager.hasplugin("anyio")
            assert pytestconfig.getini("timeout") == "50"
            assert "PYTEST_DISABLE_PLUGIN_AUTOLOAD" not in os.environ
        """,
        *("-p", "no:anyio"),
        fresh=True,
    )
    result.assert_outcomes(passed=1)
