"""The exceptions that are for people."""


class SpecbeamError(ValueError):
    """Something the caller can put right: the message says what was wrong, with which value, and what to do.

    The command line prints the message in one line and exits with status 2.
    """


class Unsupported(SpecbeamError):
    """A sound checkpoint of a model that is none of our architectures, or has something they have not."""
