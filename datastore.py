"""Build from earlier answers, or any text, what rest drafts from: python datastore.py --answers FILE --output DIR."""

from jaxspec.cli.datastore import main
from jaxspec.cli.program import run_main

if __name__ == "__main__":
    run_main(main)
