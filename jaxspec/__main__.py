"""`python -m jaxspec COMMAND`: the console command without an installation."""

from jaxspec.cli.main import main

if __name__ == "__main__":
    main()
