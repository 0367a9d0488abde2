"""Does a rank end well while a thread of gloo's is not through with Python?"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_utils import get_rank
from ddp_utils.ground import gloo_threads
from ddp_utils.process_group import shared_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells")

SLOWLY_FREED = """
    import sys, time
    import torch
    import torch.distributed as dist
    import ddp_utils as ddp

    class Slow:
        def __del__(self):
            end = time.monotonic() + 0.7
            while time.monotonic() < end:
                pass
            print("freed", flush=True)

    groups = []

    @ddp.distributed_main
    def main():
        groups.append(dist.group.WORLD)  # as a model at the top level of a script keeps it
        store = dist.distributed_c10d._get_default_store()
        tensor = torch.ones(4)
        if ddp.get_rank() == 0:
            tensor.slow = Slow()
            dist.all_reduce(tensor, async_op=True)
            del tensor  # the thread is the last to have it
            store.wait(["over"])
            time.sleep(0.05)
        else:
            time.sleep(0.2)
            dist.all_reduce(tensor)
            store.set("over", "")

    if __name__ == "__main__":
        main()
"""


def as_under_torchrun(rank: int, port: int) -> dict[str, str]:
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    values = ("2", "2", str(rank), str(rank), "127.0.0.1", str(port))
    return dict(zip(names, values, strict=True)) | {"DDP_UTILS_LAUNCHER": "torchrun"}


def test_a_rank_of_a_launcher_lets_the_thread_finish(script: Any, free_port: int) -> None:
    train = script(SLOWLY_FREED)
    ranks = [train.start(**as_under_torchrun(rank, free_port)) for rank in range(2)]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert outputs[0][0] == "freed\n"


def test_so_does_one_that_we_started_in_an_interpreter_of_its_own(script: Any) -> None:
    done = script(SLOWLY_FREED).run(DDP_UTILS_START_METHOD="spawn")
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr


@pytest.mark.distributed(world_size=2)
def test_a_thread_that_waits_for_peers_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "PATIENCE", float("inf"))
    tensor = torch.ones(1)
    if get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        gloo_threads.let_them_rest()
        assert not work.is_completed()
        shared_store().set("rested", "")
        work.wait()
    else:
        shared_store().wait(["rested"])
        dist.all_reduce(tensor)
    assert tensor.item() == 2
    assert gloo_threads._turns()  # torch still calls them so
