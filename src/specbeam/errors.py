"""The one exception that is for people."""


class SpecbeamError(ValueError):
    """Something the caller can put right: the message says what was wrong, with which value, and what to do.

    The command line prints the message in one line and exits with status 2.
    """
