"""A chat format as Qwen3's, in miniature: a tokenizer made here, a template written here, with the same quirks."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer

from rollout.chat.format import ChatFormat
from rollout.chat.template import ChatTemplate
from rollout.chat.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Added tokens that are not marked special, as in Qwen's tokenizer."""

THINKING = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
    {{- 'Tools:' }}
    {%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
    {{- '\\nCall one as <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for message in messages %}
    {%- set wrapped = message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not wrapped %}{% set last.query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set thought = message.reasoning_content or '' %}
        {%- set content = message.content %}
        {%- if not thought and '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > last.query and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{ '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""Like Qwen3's: earlier reasoning goes when a user speaks, an empty block comes and goes, results share a turn."""

PLAIN = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a small model<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Like SmolLM2's: a system message of its own, every role alike."""

COUNTING = (
    "{% for message in messages %}{{ message.role + ' ' ~ loop.index ~ ': ' + message.content + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' ~ (messages | length + 1) ~ ': ' }}{% endif %}"
)
"""Numbers the messages: what follows a turn depends on how many came before."""

TEXT = [
    "hello world, the weather in Orléans is 21 degrees. user assistant system tool",
    '{"name": "lookup", "arguments": {"key": 4}} {"celsius": 9} answer\n\n question.\n</result>',
] * 50


@cache
def tokenizer() -> Tokenizer:
    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False))
    fast.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    fast.add_tokens([AddedToken(token, special=False, normalized=False) for token in WORDS])
    return Tokenizer(fast.to_str().encode())


@cache
def ordinary() -> FastTokenizer:
    """The same, as a library uses it: any text can spell a control token."""
    source = tokenizer()
    return source._whole


def chat(template: str = THINKING) -> ChatFormat:
    return ChatFormat(ChatTemplate({"default": template}), tokenizer())


def ids(text: str) -> list[int]:
    """The ordinary encoding of a whole rendered text."""
    encoded: list[int] = ordinary().encode(text, add_special_tokens=False).ids
    return encoded
