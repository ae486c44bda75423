"""Write a base where other software can read it: python export.py --model M [--method space] --output DIR."""

from jaxspec.cli.export import main
from jaxspec.cli.program import run_main

if __name__ == "__main__":
    run_main(main)
