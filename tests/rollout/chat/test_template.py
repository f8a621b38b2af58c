"""Chat templates are rendered as the transformers library renders them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from rollout.chat.errors import ChatError
from rollout.chat.template import ChatTemplate
from tests.rollout.chat.tiny import PLAIN, THINKING, ordinary

USER = {"role": "user", "content": 'a <b> & "c" é'}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": "<é>"}}}]
MARKED = (
    "{{ bos_token }}{% for message in messages %}\n    {% generation %}\n{{ message.content }}\n"
    "    {% endgeneration %}\n"
    "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}{{ messages | tojson(indent=2) }} {{ tools is none }}"
)


@pytest.mark.parametrize("template", [THINKING, PLAIN, MARKED], ids=["thinking", "plain", "marked"])
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_the_text_is_the_librarys(template: str, opened: bool, tools: Any, options: dict[str, Any]) -> None:
    library = PreTrainedTokenizerFast(tokenizer_object=ordinary(), bos_token="<|im_start|>", chat_template=template)
    messages = [{"role": "system", "content": " rules "}, USER, {"role": "assistant", "content": "x"}, USER]
    expected = library.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=opened, **options
    )
    ours = ChatTemplate({"default": template}, {"bos_token": "<|im_start|>"})
    assert ours.render(messages, tools=tools or (), options=options, add_generation_prompt=opened) == expected


def checkpoint(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_where_a_checkpoint_keeps_its_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(checkpoint(tmp_path, bos_token="<s>")) is None
    loaded = ChatTemplate.load(checkpoint(tmp_path, chat_template="a{{ bos_token }}", bos_token={"content": "<s>"}))
    assert loaded is not None
    assert loaded.render([USER]) == "a<s>"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    of_file = ChatTemplate.load(tmp_path)
    assert of_file is not None
    assert of_file.render([USER]) == "file <s>"


def test_several_templates_of_one_checkpoint(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    loaded = ChatTemplate.load(checkpoint(tmp_path, chat_template=named))
    assert loaded is not None
    assert (loaded.render([USER]), loaded.render([USER], tools=TOOLS)) == ("plain", "tools")
    with pytest.raises(ChatError, match="none called 'default'"):
        ChatTemplate({"rag": "x"}).render([USER])


@pytest.mark.parametrize("config", ["{", json.dumps({"chat_template": [5]})])
def test_a_broken_file_is_named(tmp_path: Path, config: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)


def test_a_file_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes("ä".encode("latin-1"))
    with pytest.raises(ValueError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes("ä".encode())
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render([USER]) == "ä"


@pytest.mark.parametrize("source", ["{% for %}", "{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}"])
def test_a_template_that_does_not_compile_costs_only_who_uses_it(source: str) -> None:
    broken = ChatTemplate({"default": source})
    with pytest.raises(ChatError, match="does not compile"):
        broken.render([USER])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content.upper() }}", "no element 7"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_goes_wrong_in_a_template_is_a_refusal(template: str, said: str) -> None:
    with pytest.raises(ChatError, match="does not take these messages") as refused:
        ChatTemplate({"default": template}).render([USER])
    assert said in refused.value.message


def test_options_do_not_replace_what_is_rendered() -> None:
    with pytest.raises(ChatError) as refused:
        ChatTemplate({"default": "x"}).render([USER], options={"messages": []})
    assert refused.value.field == "template.options.messages"
