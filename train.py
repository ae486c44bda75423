"""Train an adapter: python train.py --config ppd_smollm2 [--output DIR] [--resume] [--train.steps 500 ...]."""

from jaxspec.cli.program import run_main
from jaxspec.cli.train import main

if __name__ == "__main__":
    run_main(main)
