import sys

from rollout.command.cli import main

sys.exit(main())
