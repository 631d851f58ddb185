"""`python -m piecework.server`: the `piecework` command where its script is not on the path."""

import sys

from .main import main

if __name__ == "__main__":
    sys.exit(main())
