"""The program `offbeat`, also run as `python -m offbeat`."""

import signal
import sys


def main() -> int:
    """Runs the command line; Ctrl-C while it is being loaded ends the program without a traceback."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from offbeat.cli import main as run

    signal.signal(signal.SIGINT, usual)
    return run()


if __name__ == "__main__":
    sys.exit(main())
