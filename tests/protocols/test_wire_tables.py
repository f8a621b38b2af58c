"""docs/wire.md says what the models say."""

from __future__ import annotations

import re

import pytest

from protocols.codec import REPLIES, REQUESTS
from tests.protocols.wire_tables import DOCUMENT, PARTS, explain, rewritten


def test_the_document_is_up_to_date() -> None:
    text = DOCUMENT.read_text()
    assert rewritten(text) == text, "run python -m tests.protocols.wire_tables"


@pytest.mark.parametrize("name", sorted(REQUESTS | REPLIES))
def test_every_message_has_a_section(name: str) -> None:
    assert f"\n### `{name}`\n" in DOCUMENT.read_text()


def test_every_field_has_a_row() -> None:
    text = DOCUMENT.read_text()
    for model in (*REQUESTS.values(), *REPLIES.values(), *PARTS):
        for name in model.model_fields:
            assert f"\n| `{name}` |" in text, f"{model.__name__}.{name}"


def test_a_docstring_explains_only_fields_that_exist() -> None:
    for model in (*REQUESTS.values(), *REPLIES.values(), *PARTS):
        text, meanings = explain(model)
        assert text
        assert set(meanings) <= set(model.model_fields)
        assert not re.search(r"^\w+: ", text, re.MULTILINE), f"{model.__name__} explains a field that it lacks"


def test_links_inside_the_document_lead_somewhere() -> None:
    text = DOCUMENT.read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}
    for target in re.findall(r"\]\(#([^)]*)\)", text):
        assert target in anchors, target
