"""Values that are made without a check are as those that were checked."""

from __future__ import annotations

import copy
import pickle

import pytest

from protocols import encode
from protocols.fields import Environment, Times, Truncation, Value
from tests.protocols import samples

VALUES = [*samples.REQUESTS.values(), *samples.REPLIES.values(), samples.record(), samples.segment(), Times()]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_is_made_without_a_check_is_what_was_checked(value: Value) -> None:
    fields = dict(reversed(value.__dict__.items()))
    given = {name: item for name, item in fields.items() if name in value.model_fields_set}
    for made in (type(value).model_construct(**fields), type(value).model_construct(**given), value.model_copy()):
        assert made == value
        assert [bytes(frame) for frame in encode(made)] == [bytes(frame) for frame in encode(value)]
        for copied in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.model_copy(deep=True)):
            assert copied == value


def test_what_is_made_without_a_check_shares_no_map() -> None:
    one, other = (Environment.model_construct(name="x") for _ in range(2))
    assert one == other
    assert one.config is not other.config


def test_what_is_made_without_a_check_lacks_no_field_and_has_no_other() -> None:
    with pytest.raises(TypeError, match="Truncation: value missing or unknown"):
        Truncation.model_construct(limit="max_tokens")
    with pytest.raises(TypeError, match="Times: que, zzz missing or unknown"):
        Times.model_construct(que=1.0, zzz=1.0)


def test_a_changed_copy_has_its_fields_in_their_order_and_leaves_the_other_as_it_was() -> None:
    before = Times(queue=1.0)
    after = before.model_copy(update={"paused": 2.0, "prefill": 3.0})
    assert (after, before) == (Times(queue=1.0, prefill=3.0, paused=2.0), Times(queue=1.0))
    assert list(after.__dict__) == list(before.__dict__)
