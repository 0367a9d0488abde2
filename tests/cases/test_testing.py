"""Public reports about tests of distributed code: rows L17 and L25 of the list of cases.

Each test's docstring begins with its row and names where it was reported.
"""

from __future__ import annotations

import pytest

# pytester forgets what is first imported inside of a suite; these have to stay what they are.
import ddp_utils.launching
import ddp_utils.testing.combine
import ddp_utils.testing.in_rank
import ddp_utils.testing.run  # noqa: F401
from ddp_utils.ground._torch_private import load_what_ddp_loads

pytest_plugins = ["pytester"]

load_what_ddp_loads()


def test_l17_a_test_fails_when_the_ranks_do(pytester: pytest.Pytester) -> None:
    """L17. pytorch/pytorch#30461, NVIDIA/TensorRT-LLM#11614: "1 passed", all children dead."""
    pytester.makepyfile(
        """
        import pytest
        from ddp_utils import distributed_main, get_rank, launch
        from ddp_utils.testing import run_distributed

        @distributed_main(nproc=2)
        def main():
            assert False, "in main"

        def wrong():
            assert get_rank() == 0, "in a function"

        def test_main():
            main()

        def test_launch():
            launch(wrong, nproc=2)

        def test_function():
            run_distributed(wrong)

        @pytest.mark.distributed(world_size=2)
        def test_body():
            wrong()
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["*AssertionError: in main*", "*AssertionError: in a function*"])


def test_l25_one_test_passes_one_fails_one_hangs(pytester: pytest.Pytester) -> None:
    """L25. pytorch/pytorch#50408, MIT-PSFC/disruption-py#560, facebookresearch/multimodal#17,
    pytest-dev/pytest#11174: workers that are nested, or collected as tests, and hanging suites.
    """
    pytester.makepyfile(
        """
        import threading
        import pytest
        import torch.distributed as dist
        from ddp_utils import get_rank
        from ddp_utils.testing import run_distributed

        def waits_for_ever():
            threading.Event().wait()

        @pytest.mark.distributed(world_size=2)
        class TestMarked:
            def test_passes(self):
                dist.barrier()

            def test_fails(self):
                assert get_rank() == 0
                dist.barrier()

            @pytest.mark.distributed(world_size=2, timeout=2)
            def test_hangs(self):
                waits_for_ever()

        def test_nested_functions_pass():
            wanted = [0, 10]

            def test_worker(factor):
                return factor * get_rank()

            assert run_distributed(test_worker, 10) == wanted

        def test_functions_fail():
            run_distributed(lambda: 1 / 0)

        def test_functions_hang():
            run_distributed(waits_for_ever, timeout=2)
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, failed=4)
    assert str(result.stdout).count("in waits_for_ever") >= 4
