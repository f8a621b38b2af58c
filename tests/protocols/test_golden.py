"""The committed bytes are what is sent, and mean what they say."""

from __future__ import annotations

import json

import pytest

from protocols import Assembler, BadRequest, Limits, decode_reply, decode_request
from protocols.codec import REPLIES, REQUESTS
from tests.protocols import samples
from tests.protocols.golden_vectors import FOLDER, files, meaning

LIMITS = Limits()
MESSAGES = sorted(set(files()) - {"chunked.json", "refused.json"})


def load(name: str):
    return json.loads((FOLDER / name).read_text())


def frames_of(hexed: list[str]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in hexed]


def test_every_message_has_its_vector() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(files())
    assert {f"{kind}.json" for kind in REQUESTS | REPLIES} <= set(files())
    assert samples.REQUESTS.keys() == REQUESTS.keys()
    assert samples.REPLIES.keys() == REPLIES.keys()


@pytest.mark.parametrize("name", sorted(files()))
def test_committed_vectors_are_what_this_code_sends(name: str) -> None:
    assert (FOLDER / name).read_text() == files()[name], "run python -m tests.protocols.golden_vectors, if meant"


@pytest.mark.parametrize("name", MESSAGES)
def test_vectors_decode_to_their_meaning(name: str) -> None:
    vector = load(name)
    decode = {"request": decode_request, "reply": decode_reply}[vector["side"]]
    assert meaning(decode(frames_of(vector["frames"]), LIMITS)) == vector["meaning"]


@pytest.mark.parametrize("case", load("refused.json"), ids=lambda case: case["wrong"])
def test_refused_vectors_are_refused_with_their_field_and_id(case: dict) -> None:
    with pytest.raises(BadRequest) as refusal:
        decode_request(frames_of(case["frames"]), LIMITS)
    assert (refusal.value.code, refusal.value.field, refusal.value.request_id) == (
        case["code"],
        case["field"],
        case["id"],
    )


def test_chunked_vector_is_put_together() -> None:
    vector = load("chunked.json")
    assembler = Assembler(LIMITS)
    *partial, whole = [assembler.feed(frames_of(packet)) for packet in vector["packets"]]
    assert partial == [None] * len(partial)
    assert whole == decode_reply(frames_of(vector["whole"]), LIMITS)
