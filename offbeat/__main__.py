"""`python -m offbeat`: the command line, where the `offbeat` program is not on the path."""

import sys

from offbeat.cli import main

if __name__ == "__main__":
    sys.exit(main())
