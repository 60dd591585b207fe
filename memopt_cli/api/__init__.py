"""Functions for scripts: each command of the shell as a function of Python."""
