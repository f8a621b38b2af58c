"""`rollout-worker`, or python -m rollout."""

import sys


def main() -> int:
    """The exit code of the command; 130, as of shells, where Ctrl-C ends what minds no signals (or not yet)."""
    try:
        # What it imports takes a second, which is long enough for Ctrl-C.
        from rollout.command.cli import main as command

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
