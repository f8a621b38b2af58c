"""What the adapters ask of TRL, without TRL: arguments, a tokenizer, a trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def arguments(**changes: Any) -> SimpleNamespace:
    """TRL's defaults, where the adapters look."""
    values = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 4,
        "num_generations": 4,
        "max_inflight_tasks": 8,
        "queue_maxsize": 0,
        "chat_template_kwargs": None,
        "generation_kwargs": None,
    }
    return SimpleNamespace(**{**values, **changes})


class ByteTokenizer:
    """Text is its UTF-8 bytes; a message adds its role's first byte in front, the assistant's turn an "a"."""

    eos_token_id = 0

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> dict[str, list[int]]:
        assert options.pop("tokenize")
        assert options.pop("return_dict")
        opening = "a" if options.pop("add_generation_prompt") else ""
        text = "".join(f"{m['role'][0]}{m['content']}" for m in messages) + opening + "".join(options)
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))


class OneProcess:
    """An accelerator."""

    is_main_process = True

    def __init__(self) -> None:
        self.waits = 0

    def get_state_dict(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        return model.state_dict()

    def wait_for_everyone(self) -> None:
        self.waits += 1


class Model(torch.nn.Module):
    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.ones(4))


def trainer(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(
        args=arguments(**changes),
        processing_class=ByteTokenizer(),
        model=Model(),
        accelerator=OneProcess(),
        state=SimpleNamespace(global_step=0),
        use_vllm=False,
    )
