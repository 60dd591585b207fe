"""What scripts call: each command of the shell, as a function of Python."""
