from __future__ import annotations

import re

from protocols.fields import STATUS_OF
from rollout.command.config import WorkerConfig
from rollout.metrics.names import NAMES
from tests.rollout.metrics import names_table


def test_the_documents_table_is_the_code() -> None:
    assert names_table.parts()[1] == names_table.table(), "run python -m tests.rollout.metrics.names_table"


def test_the_document_names_no_number_or_option_that_there_is_not() -> None:
    before, _, after = names_table.parts()
    text = before + after
    for name in re.findall(r"`((?:rollout|engine|weights|mem|wire)/[\w/]+)`", text):
        reason = name.removeprefix("rollout/finish/")
        assert name in NAMES or reason in STATUS_OF or name == "rollout/step", name
    for option in re.findall(r"`--((?:no-)?[a-z-]+)", text):
        assert option.removeprefix("no-").replace("-", "_") in WorkerConfig.model_fields, option
