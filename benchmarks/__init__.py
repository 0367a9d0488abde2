"""How much faster, smaller or slower than its peers is ddp_utils, on this machine?

``python -m benchmarks`` runs every module of this folder that has a ``main()``, and
``python -m benchmarks startup`` one of them. A module's ``main()`` takes nothing and returns
nothing; it calls :func:`compare` (one row per contender) and :func:`sweep` (one curve per
contender), which measure, print and record::

    from benchmarks import Skip, Target, compare, seconds, sweep

    def main() -> None:
        compare(
            "mean of 50 metrics over 2 ranks",          # names the JSON entry and the plot
            {
                "bare all_reduce": lambda: seconds(bare),  # each returns ONE number, in `unit`
                "ddp_utils": lambda: seconds(ours),
                "accelerate": Skip("not installed"),       # says why it is left out
            },
            floor="bare all_reduce",                    # ratios are to this contender
            targets=[Target("ddp_utils", 1.25)],        # at most 1.25 x the floor
        )
        sweep(
            "time to the first index",
            "samples",
            [10**6, 10**7, 10**8],
            {"ddp_utils": first_index, "DistributedSampler": theirs},  # each called with x
        )

Whatever is ours has ``ddp_utils`` in its name: the plots colour it. Contenders are interleaved:
each round measures every one of them once, in turning order, so that a noisy minute hits all
alike. Work that all rounds share (ranks that are started once, a model) belongs before the
call. A number that must be measured inside ranks is measured by a function run there, for
example through ``ddp_utils.testing.run_distributed``, and returned.
"""

from benchmarks.measure import Skip, Target, command, compare, installed, needs_gpu, seconds, sweep

__all__ = [
    "Skip",
    "Target",
    "command",
    "compare",
    "installed",
    "needs_gpu",
    "seconds",
    "sweep",
]
