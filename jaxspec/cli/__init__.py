"""The commands: what each does, its options, and how results and errors are shown."""
