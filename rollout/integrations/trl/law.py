"""From TRL's arguments and prompts to what a group of the client takes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from protocols.fields import Sampling

log = logging.getLogger(__name__)

FILTERS = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
RESTRICTIONS = ("allowed_ids", "bias_ids")


def law(args: Any) -> dict[str, Any]:
    """Arguments for `client.group` that sample as a `GRPOConfig` or an `AsyncGRPOConfig` says.

    TRL scores completions by `log_softmax(logits / temperature)`. Without filters and penalties (its defaults) that
    is what the worker returns, to rounding; with them it returns the law really sampled from, and TRL's importance
    ratio says by how much the two differ.
    """
    if getattr(args, "generation_kwargs", None):
        raise ValueError(
            f"generation_kwargs {sorted(args.generation_kwargs)} are for TRL's own generation and would be ignored:"
            " give what the worker should do as arguments of client.group"
        )
    return {
        "temperature": args.temperature,
        "top_k": max(args.top_k or 0, 0),
        "top_p": args.top_p,
        "min_p": args.min_p or 0.0,
        "repetition_penalty": args.repetition_penalty,
        "max_tokens": args.max_completion_length,
    }


def encode_prompt(tokenizer: Any, prompt: Any, **template: Any) -> list[int]:
    """Token ids of a prompt of TRL's: a text, or messages, which the tokenizer's template (with its arguments
    `template`) renders up to where the assistant speaks."""
    if isinstance(prompt, str):
        encoded = tokenizer(prompt)
    else:
        encoded = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template
        )
    ids: list[int] = encoded["input_ids"]
    return ids


def options_of(options: Mapping[str, Any], task: Any) -> dict[str, Any]:
    """Options of one group: those that are functions are called with its task."""
    return {name: value(task) if callable(value) else value for name, value in options.items()}


def warn_of_filters(sampling: Sampling) -> None:
    """Say in the log when a law has logprobs that TRL's, which know temperature alone, cannot agree with."""
    neutral = Sampling()
    found = [name for name in FILTERS if getattr(sampling, name) != getattr(neutral, name)]
    found += [name for name in RESTRICTIONS if getattr(sampling, name) is not None]
    if found and sampling.logprobs[0] == "processed":
        log.warning(
            "%s: TRL scores without; its importance ratios will be below 1, and gradients small where the filters drop"
            " much. With logprobs='temperature' the worker's logprobs are without, too",
            ", ".join(found),
        )
