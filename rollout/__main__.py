"""`rollout-worker`, or python -m rollout."""

import sys

from rollout.command.advice import advice


def main() -> int:
    """The exit code of the command; 130, as of shells, where Ctrl-C ends what minds no signals (or not yet)."""
    try:
        # What it imports takes a second, which is long enough for Ctrl-C.
        try:
            from rollout.command.cli import main as command
        except ModuleNotFoundError as error:
            print(f"rollout-worker: {advice(error)}", file=sys.stderr)
            return 1
        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
