"""Templates of all habits, whatever is said: what is appended is what they would put there, or they are refused."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocols.fields import Template
from rollout.chat.conversation import Conversation
from rollout.chat.errors import ChatError
from tests.rollout.chat.test_conversation import END, turn
from tests.rollout.chat.tiny import chat, ids, tokenizer

ENDS = {
    "end and newline": "{{ '<|im_end|>\\n' }}",
    "end": "{{ '<|im_end|>' }}",
    "newline and end": "{{ '\\n<|im_end|>\\n' }}",
    "the next message": "{{ '\\n' }}",
    "of assistants alone": "{% if m.role == 'assistant' %}{{ '<|im_end|>' }}{% endif %}",
}
PLACES = {
    "nothing": "",
    "its number": "{{ loop.index ~ '. ' }}",
    "is it the last": "{% if loop.last %}{{ '(last)' }}{% endif %}",
    "how long the turn was": "{% if loop.index0 and messages[loop.index0 - 1].role == 'assistant' %}"
    "{{ messages[loop.index0 - 1].content | length }}{% endif %}",
    "has the turn reasoned": "{% if loop.index0 and '</think>' in messages[loop.index0 - 1].content %}"
    "{{ '!' }}{% endif %}",
    "is it long": "{% if m.content | length > 8 %}{{ '(long)' }}{% endif %}",
    "the rules again": "{% if loop.index0 and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}",
}
"""What is written before a content."""
TELLING = ("its number", "how long the turn was", "has the turn reasoned", "the rules again")
"""Those that depend on what was before: where a conversation shows that, nothing may be appended to it."""
TEXTS = ("hello", "  spaced  ", "", "\n", "a <|im_end|> b", "<|im_start|>user", "a<|im", "_end|>", "Orléans 😀")
SAID = ("ok", "<think>\nhm\n</think>\n\n21", "", " sp ", "x\n", '<tool_call>{"name": "f", "arguments": {}}</tool_call>')


@dataclass(frozen=True)
class Habits:
    trims: bool
    begins: bool
    dated: bool
    merges: bool
    drops_reasoning: bool
    one_system: bool
    end: str
    place: str
    opening: str

    @property
    def source(self) -> str:
        content = "(m.content | trim)" if self.trims else "m.content"
        if self.drops_reasoning:
            content = f"({content}.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else {content})"
        parts = [
            "{{ '<|endoftext|>' }}" if self.begins else "",
            "{{ strftime_now('%d %B %Y') + '\\n' }}" if self.dated else "",
            "{% for m in messages %}",
            "{% if m.role == 'system' and not loop.first %}{{ raise_exception('one') }}{% endif %}" * self.one_system,
            "{% set new = loop.first or messages[loop.index0 - 1].role != m.role or MERGES %}",
            "{% if new %}{{ '<|im_start|>' + m.role + '\\n' }}{% else %}{{ '\\n\\n' }}{% endif %}",
            PLACES[self.place],
            f"{{{{ {content} }}}}",
            "{% if loop.last or messages[loop.index0 + 1].role != m.role or MERGES %}" + ENDS[self.end] + "{% endif %}",
            "{% endfor %}{% if add_generation_prompt %}",
            f"{{{{ '<|im_start|>assistant\\n{self.opening}' }}}}",
            "{% endif %}",
        ]
        return "".join(parts).replace("MERGES", "false" if self.merges else "true")


flag = st.booleans()
HABITS = st.builds(
    Habits, flag, flag, flag, flag, flag, flag, st.sampled_from([*ENDS]), st.sampled_from([*PLACES]),
    st.sampled_from(["", "<think>\\n"]),
)  # fmt: skip
NEW = st.one_of(
    st.sampled_from(TEXTS).map(lambda text: [{"role": "user", "content": text}]),
    st.lists(st.sampled_from(TEXTS).map(lambda text: {"role": "tool", "content": text}), min_size=1, max_size=2),
)
TURNS = st.lists(st.tuples(st.sampled_from(SAID), flag, NEW), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(habits=HABITS, rules=flag, turns=TURNS, drop=flag, branch=flag)
def test_a_conversation_is_extended_by_what_the_template_puts_there_or_branches_to_its_rendering(
    habits: Habits, rules: bool, turns: list[Any], drop: bool, branch: bool
) -> None:
    form = chat(habits.source).form()
    system = [{"role": "system", "content": "rules"}] if rules else []
    how = Template(on_user_turn="drop" if drop else "keep", on_unstable="branch" if branch else "refuse")
    talk = Conversation(form, [*system, {"role": "user", "content": "hello"}], how)
    held = form.prompt(talk.messages)
    for text, ended, new in turns:
        sampled = turn([*ids(text), *([END] if ended else [])], "stop" if ended else "length")
        try:
            step = asyncio.run(talk.follow(replace(sampled, before=held), *new))
        except ChatError:
            assert not branch
            assert habits.place in TELLING
            return
        parts = [np.asarray(part) for part in (step.glue, step.observation, step.opening) if part is not None]
        past = np.concatenate([held, sampled.token_ids]) if step.branch is None else np.asarray(step.branch)
        held = np.concatenate([past, *parts])
        anew = form.prompt(talk.messages)
        if step.branch is not None or (drop and new[0]["role"] == "user"):
            np.testing.assert_array_equal(held, anew)
        elif ended:
            assert tokenizer().decode(anew).endswith(tokenizer().decode(held[len(past) :]))


@pytest.mark.parametrize("place", TELLING)
def test_what_depends_on_a_turn_is_never_appended(place: str) -> None:
    habits = Habits(
        trims=False, begins=False, dated=False, merges=False, drops_reasoning=False, one_system=False,
        end="end", place=place, opening="",
    )  # fmt: skip
    with pytest.raises(ChatError, match="depends on the turn"):
        chat(habits.source).form().prove(["user"])
