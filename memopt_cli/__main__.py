"""``python -m memopt_cli``."""

import sys

from memopt_cli.cli.app import main

if __name__ == "__main__":  # a spawned subprocess imports this module too
    sys.exit(main())
