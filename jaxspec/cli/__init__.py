"""The commands: their options, and how results and errors are printed."""
