"""JSON on disk."""

import json


def write_jsonl(file, rows):
    """A line per row; the file's name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def read_jsonl(file):
    """The rows of such a file."""
    return [json.loads(line) for line in file.open()]


def change_json(file, **changes):
    """Other values in a JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
