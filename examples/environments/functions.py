"""Two of BFCL's multi-turn tool tasks: python -m examples.environments.functions

SmolLM2's chat template does not print tools, so they are told in a system message here; a template that does (Qwen's)
needs none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from examples.environments.play import play
from rollout.environments.adapters import bfcl

SYSTEM = """You may call functions. Write each call as
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>
and nothing else. These exist:
"""


def messages(config: Mapping[str, Any]) -> list[dict[str, str]]:
    tools = "\n".join(json.dumps(tool["function"]) for tool in bfcl.tools(config))
    return [{"role": "system", "content": SYSTEM + tools}, *bfcl.messages(config)]


if __name__ == "__main__":
    sys.exit(
        play(
            "rollout.environments.adapters.bfcl:Bfcl",
            messages,
            [{"category": "multi_turn_base", "index": index} for index in (1, 60)],
            "BFCL multi-turn",
            max_tokens=48,
            max_turns=6,
        )
    )
