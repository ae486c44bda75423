"""How much faster, and is it the same? python bench.py compare --run ppd --data FILE; or report | latency | device."""

from jaxspec.cli.bench import main
from jaxspec.cli.program import run_main

if __name__ == "__main__":
    run_main(main)
