"""Generate, score and label: the calls of Python."""
