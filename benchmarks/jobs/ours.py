"""Ranks started by ddp_utils: ``python ours.py WORK NPROC``."""

import work

import ddp_utils


def main():
    ddp_utils.launch(work.run, nproc=work.NPROC)


if __name__ == "__main__":
    work.start_with(main)
