"""The one exception users see: a sentence that says what was wrong and what to do about it."""


class UserError(Exception):
    """Bad input. Entry points print the message on one line of stderr and exit with code 2."""
