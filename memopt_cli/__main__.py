"""``memopt``, and ``python -m memopt_cli``: answers Ctrl-C before anything else is imported."""

import os
import sys

if __name__ == "__main__" and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # python -m puts it there: a file in this folder may have the name of a library

import signal
import warnings

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # PyTorch's, here and in every spawned subprocess


def _quit_at_once(*_: object) -> None:
    """Nothing has been started or written yet, and an exception could be swallowed by the import that it meets."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    for wanted in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(wanted) is not signal.SIG_IGN:  # as a shell sets it for a job in the background
            signal.signal(wanted, _quit_at_once)
    from memopt_cli.cli.app import main as run

    return run()


if __name__ == "__main__":  # a spawned subprocess imports this module too
    sys.exit(main())
