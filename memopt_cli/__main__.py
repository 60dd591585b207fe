"""``memopt``, and ``python -m memopt_cli``: answers Ctrl-C before anything else is imported."""

import os
import sys


def _is_current(folder: str) -> bool:
    try:
        return os.path.samefile(folder or os.curdir, os.curdir)
    except OSError:
        return False


if __name__ != "__mp_main__" and not _is_current(os.path.dirname(os.path.dirname(__file__))):
    # ``python -m`` and an empty entry of PYTHONPATH put it there: a file in it may have the name of a library.
    sys.path[:] = [entry for entry in sys.path if not _is_current(entry)]

import signal  # noqa: E402
import warnings  # noqa: E402

warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # PyTorch's, here and in every spawned subprocess


def _quit_at_once(number: int, _: object) -> None:
    """Exit at once: nothing was started or written yet, and the import that is under way might swallow an exception.

    Only the first rank prints this, after Ctrl-C.  If a launcher ends the ranks, one has failed and prints the reason.
    """
    if "RANK" not in os.environ or (number == signal.SIGINT and os.environ["RANK"] == "0"):
        os.write(2, b"error: interrupted\n")
    os._exit(130)


def main() -> int:
    """Run the command line of this process and return its exit code."""
    for wanted in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(wanted) is not signal.SIG_IGN:  # as a shell sets it for a job in the background
            signal.signal(wanted, _quit_at_once)
    from memopt_cli.cli.app import main as run

    return run()


if __name__ == "__main__":  # a spawned subprocess imports this module too
    sys.exit(main())
