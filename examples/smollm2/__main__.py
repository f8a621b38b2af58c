"""Hold a chat with SmolLM2-135M-Instruct through a rollout worker, and show what a trainer would get of it."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from examples.smollm2.fetch import FetchError, smollm2
from rollout.chat.format import ChatFormat, Form
from rollout.chat.tokenizer import Tokenizer
from rollout.client import RolloutClient, Trajectory, TurnDone
from rollout.local import local_worker

MESSAGES = ("What is the capital of France?", "And of Italy? Answer in one short sentence.")
SOURCES = ("prompt", "sampled", "glue", "observation", "prefix")
"""Names of the values of `Trajectory.source`."""


def main() -> int:
    options = parse()
    console = Console(highlight=False)
    try:
        with console.status("looking for SmolLM2 (the first time it is downloaded and converted: about 20 s)"):
            checkpoint = options.checkpoint or smollm2(options.cache)
    except FetchError as error:
        print(f"{error}", file=sys.stderr)
        return 1
    chat_format = ChatFormat.load(checkpoint, Tokenizer.load(checkpoint))
    if chat_format is None:
        print(f"{checkpoint} has no tokenizer.json or no chat template", file=sys.stderr)
        return 1
    form = chat_format.form()
    with (
        local_worker(checkpoint, device="cpu", max_running=1, max_context=2048, log_level="warning") as worker,
        RolloutClient(worker.address) as client,
    ):
        trajectory = chat(client, form, options, console)
    show_record(trajectory, form, console)
    return 0 if trajectory.ok else 1


def chat(client: RolloutClient, form: Form, options: argparse.Namespace, console: Console) -> Trajectory:
    """One trajectory in the environment "remote": this program answers each turn, knowing what the model said."""
    group = client.group(
        form.prompt([{"role": "user", "content": options.messages[0]}]),
        environment="remote",
        temperature=options.temperature,
        max_tokens=options.max_tokens,
        on_length="continue",  # an answer that is cut does not end the chat
    )
    say(console, "user", options.messages[0])
    for event in client.submit(group).events():
        if isinstance(event, Trajectory):
            return event
        said = event.token_ids[~np.isin(event.token_ids, list(form.control))]
        say(console, "model", form.decode(said), about(event))
        following = event.turn.index + 1
        if following == len(options.messages):
            client.continue_(event, done=True)
        else:
            say(console, "user", options.messages[following])
            suffix = form.suffix([{"role": "user", "content": options.messages[following]}])
            observation = np.concatenate([suffix.observation, suffix.opening])
            client.continue_(event, glue=suffix.after(event.token_ids), observation=observation)
    raise RuntimeError("the batch ended without its trajectory")


def say(console: Console, who: str, text: str, note: str = "") -> None:
    style = "bold cyan" if who == "user" else "bold green"
    console.print(Text.assemble((f"{who:>5}  ", style), text, (f"  {note}" if note else "", "dim")))


def about(event: TurnDone) -> str:
    turn = event.turn
    context = f"{turn.prompt_len} tokens of context, {turn.cached_tokens} from the prefix cache"
    return f"[{turn.length} tokens, {turn.finish_reason}; {context}; mean logprob {event.logprobs.mean():.3f}]"


def show_record(trajectory: Trajectory, form: Form, console: Console) -> None:
    """The one sequence that a trainer trains on, by where its tokens came from."""
    table = Table(
        "tokens", "source", "mask", "mean logprob", "text", title="what the trainer gets", title_justify="left"
    )
    for start, stop in runs(trajectory.source):
        source, mask = SOURCES[trajectory.source[start]], trajectory.loss_mask[start:stop]
        logprob = f"{trajectory.logprobs[start:stop].mean():.3f}" if source == "sampled" else ""
        text = form.decode(trajectory.token_ids[start:stop])
        table.add_row(f"{start}..{stop - 1}", source, str(mask[0]), logprob, Text(repr(text)))
    console.print(table)
    console.print(f"loss mask  {''.join(map(str, trajectory.loss_mask))}")
    console.print(
        f"{trajectory.status} ({trajectory.finish_reason}): {len(trajectory.token_ids)} tokens, "
        f"{int(trajectory.loss_mask.sum())} of them to train on, weights version {trajectory.weight_version_max}"
    )


def runs(values: np.ndarray) -> list[tuple[int, int]]:
    """(start, stop) of each stretch of equal values."""
    cuts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    return list(itertools.pairwise(cuts))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2", description=__doc__)
    parser.add_argument("messages", nargs="*", default=list(MESSAGES), help="what to say, one turn each")
    parser.add_argument("--max-tokens", type=int, default=64, help="of one answer (default 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    parser.add_argument("--cache", type=Path, help="where the checkpoint is kept (default: the user's cache folder)")
    parser.add_argument("--checkpoint", type=Path, help="a chat model's checkpoint directory to use instead")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
