"""Four questions of reasoning-gym, answered and scored: python -m examples.environments.reasoning"""

from __future__ import annotations

import sys

from examples.environments.play import play
from rollout.environments.adapters.reasoning_gym import messages

TASKS = ("leg_counting", "spell_backward", "basic_arithmetic", "countdown")

if __name__ == "__main__":
    sys.exit(
        play(
            "rollout.environments.adapters.reasoning_gym:ReasoningGym",
            messages,
            [{"task": task, "index": 0} for task in TASKS],
            "reasoning-gym",
            max_tokens=96,
        )
    )
