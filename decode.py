"""Answer prompts: python decode.py --method ppd --prompt "Why is the sky blue?" [--compare] [--json].

python decode.py --dry-run --config bita_7b --mesh.tensor 4 says what that would need, without weights or devices.
"""

from jaxspec.cli.decode import main
from jaxspec.cli.program import run_main

if __name__ == "__main__":
    run_main(main)
