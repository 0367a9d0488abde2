"""How does a unit test look at code as any rank would run it, without any process?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ddp_utils.world.world import SIMULATED, World

__all__ = ["simulated_world"]


@contextmanager
def simulated_world(
    rank: int = 0, world_size: int = 1, *, num_nodes: int = 1, launcher: str = "spawn"
) -> Iterator[World]:
    """Let this package believe, in this thread, that the process is one of several ranks.

    For unit tests of code that asks for ranks and sizes: which shard a rank reads, who writes a
    file. There is no process group, so that nothing can be sent: collectives answer as for one
    process. For those run the test on real ranks, with ``@pytest.mark.distributed``. Code that
    asks ``torch.distributed`` or the environment directly sees no difference. As a decorator
    it does the same for a whole function.

    Args:
        rank: In ``range(world_size)``.
        world_size: Ranks on all machines together.
        num_nodes: Machines, each with the same number of ranks.
        launcher: As in :class:`ddp_utils.World`.

    Yields:
        The world as the code inside sees it.

    Raises:
        ValueError: There is no such rank, or the ranks do not divide into the machines.

    Example:
        >>> from ddp_utils import get_local_rank, is_rank_zero
        >>> with simulated_world(rank=5, world_size=8, num_nodes=2):
        ...     get_local_rank(), is_rank_zero(), is_rank_zero(local=True)
        (1, False, False)
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank}: with world_size={world_size} it is from 0 to world_size-1")
    if num_nodes < 1 or world_size % num_nodes:
        raise ValueError(
            f"num_nodes={num_nodes}: the {world_size} ranks do not divide into so many machines"
        )
    local_world_size = world_size // num_nodes
    world = World(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        num_nodes=num_nodes,
        launcher=launcher,
        evidence=("simulated_world()",),
    )
    token = SIMULATED.set(world)
    try:
        yield world
    finally:
        SIMULATED.reset(token)
