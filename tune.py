"""Choose the fastest draft tree for this machine: python tune.py --method ppd [--batch-size B] [--cache-length S]."""

from jaxspec.cli.program import run_main
from jaxspec.cli.tune import main

if __name__ == "__main__":
    run_main(main)
