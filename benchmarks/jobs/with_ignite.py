"""Ranks started by ignite: ``python with_ignite.py WORK NPROC``."""

import ignite.distributed as idist
import work


def rank_main(local_rank):
    work.run()


def main():
    idist.spawn("gloo", rank_main, (), nproc_per_node=work.NPROC)


if __name__ == "__main__":
    work.start_with(main)
