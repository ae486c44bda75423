"""Serve a model behind the OpenAI interface: python serve.py --method hidden_transfer+prompt_lookup --port 8000."""

from jaxspec.cli.program import run_main
from jaxspec.cli.serve import main

if __name__ == "__main__":
    run_main(main)
