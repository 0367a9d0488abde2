"""What does one rank's sampler cost? Prints time, rate and memory of one pass as JSON.

Usage: ``python sampler.py ddp_utils|torch SAMPLES``. A process of its own, because the peak of its
memory is what is measured.
"""

import json
import resource
import sys
import time
from collections import deque
from itertools import islice

from torch.utils.data import DistributedSampler

from ddp_utils import make_sampler
from ddp_utils.world.world import SIMULATED, World

RANKS, MOST = 8, 20_000_000
name, samples = sys.argv[1], int(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin = time.perf_counter()
if name == "torch":
    sampler = DistributedSampler(range(samples), RANKS, rank=1)
else:
    token = SIMULATED.set(World(rank=1, world_size=RANKS))
    sampler = make_sampler(samples, seed=0)
    SIMULATED.reset(token)
indices = iter(sampler)
next(indices)
first = time.perf_counter() - begin
deque(islice(indices, MOST), maxlen=0)
whole = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
rate = min(len(sampler), MOST) / whole
print(json.dumps({"first": first, "rate": rate / 1e6, "memory": peak / 1024}))
