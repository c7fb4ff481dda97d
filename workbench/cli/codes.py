"""Exit codes of the command line."""

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
