"""`python -m zeroshard`, the same as the command `zeroshard`."""

import sys

from zeroshard.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
