"""SmolLM2-135M with two tools, through a rollout worker: three turns, shown as what a trainer gets of them."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from examples.agent.tools import TEMPERATURES, fahrenheit
from examples.smollm2.fetch import FetchError, smollm2
from rollout.chat.tokenizer import Tokenizer
from rollout.client import RolloutClient, Trajectory
from rollout.local import local_worker

SYSTEM = """You answer questions about the weather with the help of two tools. You call a tool like this:
<tool_call>
{"name": "temperature", "arguments": {"city": "Oslo"}}
</tool_call>
Tools:
temperature(city): the temperature in a city now, in degrees Celsius.
fahrenheit(celsius): convert a temperature to Fahrenheit."""
"""In words: SmolLM2's template prints no tools, as Qwen's do."""
SHOWN = {"Oslo": 7, "Berlin": 10, "Madrid": 30}
"""Examples before the question: a model of this size needs them."""
STYLES = ("bright_black", "bold green", "yellow", "cyan", "magenta")
"""Of prompt, sampled, glue, observation and prefix, the values of `Trajectory.source`."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with console.status("looking for SmolLM2 (the first time it is downloaded and converted: about 20 s)"):
            checkpoint = options.checkpoint or smollm2(options.cache)
    except FetchError as error:
        print(f"{error}", file=sys.stderr)
        return 1
    tokenizer = Tokenizer.load(checkpoint)
    if tokenizer is None:
        print(f"{checkpoint} has no tokenizer.json", file=sys.stderr)
        return 1
    with (
        local_worker(
            checkpoint, max_context=2048, max_running=2, tools=["examples.agent.tools"], log_level="warning"
        ) as worker,
        RolloutClient(worker.address) as client,
    ):
        group = client.group(
            messages=messages(options.city),
            environment="tools",
            temperature=options.temperature,
            max_tokens=64,
            max_turns=6,
            metadata={"answer": str(fahrenheit(TEMPERATURES[options.city.lower()]))},
        )
        (trajectory,) = client.submit(group)
    console.print(transcript(trajectory, tokenizer))
    report(trajectory, console)
    return 0 if trajectory.ok else 1


def messages(city: str) -> list[dict[str, Any]]:
    shown = [message for name, celsius in SHOWN.items() for message in example(name, celsius)]
    return [{"role": "system", "content": SYSTEM}, *shown, question(city)]


def example(city: str, celsius: int) -> Iterator[dict[str, Any]]:
    yield question(city)
    yield {"role": "assistant", "content": call("temperature", city=city)}
    yield {"role": "tool", "content": json.dumps({"city": city, "celsius": celsius})}
    yield {"role": "assistant", "content": call("fahrenheit", celsius=celsius)}
    yield {"role": "tool", "content": json.dumps(fahrenheit(celsius))}
    yield {"role": "assistant", "content": f"It is {fahrenheit(celsius)} degrees Fahrenheit in {city}."}


def question(city: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is the temperature in {city}, in Fahrenheit?"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def transcript(trajectory: Trajectory, tokenizer: Tokenizer, *, tail: int = 24) -> Text:
    """The ids as text, coloured by where they came from; of the prompt its last `tail` tokens."""
    text = Text("...")
    start = max(0, trajectory.prompt_len - tail)
    cuts = np.flatnonzero(np.diff(trajectory.source)) + 1
    edges = [start, *(int(cut) for cut in cuts if cut > start), len(trajectory.token_ids)]
    for begin, end in itertools.pairwise(edges):
        text.append(tokenizer.decode(trajectory.token_ids[begin:end]), STYLES[trajectory.source[begin]])
    return text


def report(trajectory: Trajectory, console: Console) -> None:
    legend = Text("\n")
    for name, style, mask in (("sampled", 1, 1), ("glue", 2, 0), ("observation", 3, 0)):
        legend.append(f"{name} (mask {mask})  ", STYLES[style])
    console.print(legend)
    for turn in trajectory.turns:
        console.print(
            f"turn {turn.index}: {turn.length} sampled, {turn.finish_reason}; {turn.prompt_len} tokens before it, "
            f"{turn.cached_tokens} of them from the prefix cache; tools took {turn.times.tool_wait:.3f} s"
        )
    console.print(
        f"{trajectory.status} ({trajectory.finish_reason}), reward {trajectory.reward} {trajectory.rewards}: "
        f"{int(trajectory.loss_mask.sum())} of {len(trajectory.token_ids)} tokens to train on"
    )
    if trajectory.error is not None:
        console.print(trajectory.error.message)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.agent", description=__doc__)
    parser.add_argument("city", nargs="?", default="Rome", choices=[name.title() for name in TEMPERATURES])
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--cache", type=Path, help="where the checkpoint is kept (default: the user's cache folder)")
    parser.add_argument("--checkpoint", type=Path, help="a chat model's checkpoint directory to use instead")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
