"""The commands: options, printing, errors in one line."""
