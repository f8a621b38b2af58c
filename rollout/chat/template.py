"""A checkpoint's chat template: messages in, text out. Rendered as the transformers library renders it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rollout.chat.errors import ChatError
from rollout.chat.messages import Message
from rollout.chat.sandbox import Sandbox

CONFIG = "tokenizer_config.json"
FILE = "chat_template.jinja"
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
"""Names of `tokenizer_config.json` that templates use as variables."""
RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


class ChatTemplate:
    """source: by name, as a checkpoint may have several; `tool_use` goes before `default` where tools are given.

    variables: the checkpoint's special tokens by name.
    """

    def __init__(self, source: Mapping[str, str], variables: Mapping[str, str] | None = None) -> None:
        self._source = dict(source)
        self._variables = dict(variables or {})

    def __reduce__(self) -> tuple[type[ChatTemplate], tuple[dict[str, str], dict[str, str]]]:
        return ChatTemplate, (self._source, self._variables)

    @classmethod
    def load(cls, checkpoint: str | Path) -> ChatTemplate | None:
        """Of a checkpoint directory; None where it has none. Raises ValueError, naming the file."""
        path = Path(checkpoint) / CONFIG
        try:
            config = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            config = {}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if not isinstance(config, dict):
            raise ValueError(f"{path}: must hold an object")
        file = Path(checkpoint) / FILE
        try:
            written = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        if written is None:
            return None
        if isinstance(written, str):
            source = {"default": written}
        else:
            try:
                source = {str(entry["name"]): str(entry["template"]) for entry in written}
            except (TypeError, KeyError) as error:
                raise ValueError(f"{path}: chat_template is neither a string nor a list of named ones") from error
        named = {name: config.get(name) for name in SPECIAL}
        texts = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
        return cls(source, {name: text for name, text in texts.items() if isinstance(text, str)})

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Raises ChatError: what the template itself raises, and what goes wrong inside it."""
        name = "tool_use" if tools and "tool_use" in self._source else "default"
        options = options or {}
        if taken := next((key for key in RESERVED if key in options), None):
            raise ChatError(f"{taken!r} is no option of a template", f"template.options.{taken}")
        try:
            compiled = self._compiled[name]
        except KeyError:
            raise ChatError(f"the checkpoint has chat templates, but none called {name!r}") from None
        variables = {**self._variables, **options}
        given = {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        try:
            text: str = compiled.render(**{**variables, **given, "add_generation_prompt": add_generation_prompt})
            return text
        except Exception as error:  # a template is a program, and may fail as one
            raise ChatError(f"the chat template does not take these messages: {error}") from error

    @cached_property
    def _compiled(self) -> dict[str, Any]:
        """On first use: a checkpoint whose template is broken still serves whoever sends ids."""
        environment = Sandbox()
        try:
            return {name: environment.from_string(source) for name, source in self._source.items()}
        except Exception as error:
            raise ChatError(f"the checkpoint's chat template does not compile: {error}") from error
