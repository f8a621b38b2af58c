"""The runner driven by plans made by hand, eager and lazy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.model.ops import TorchOps
from engine.runner.ring import RING
from engine.runner.torch_runner import StepDevice, TorchRunner
from engine.sampling.prompt_scores import SCORE_ROWS
from engine.step import NONFINITE, StepOutput, StepPlan
from tests.engine.plans import Row, load_device, plan, runner_on, start
from tests.engine.serve import ids
from tests.rigs import Reference, script, write_rand, write_table

PROMPT = ids(1, 20).tolist()


class CountingOps(TorchOps):
    """Remembers how many rows each call of the head had."""

    def __init__(self) -> None:
        self.head_rows: list[int] = []

    def head_fp32(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        self.head_rows.append(len(x))
        return super().head_fp32(x, weight, out)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("runner") / "m")


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


@pytest.fixture
def device(path: Path) -> StepDevice:
    return load_device(path)


@pytest.fixture
def runner(device: StepDevice, lazy: bool) -> TorchRunner:
    return runner_on(device, lazy=lazy)


def run(runner: TorchRunner, plans: Sequence[StepPlan], ahead: int = 1) -> list[StepOutput]:
    """Launch with `ahead` further steps under way before a result is read."""
    tickets, outputs = [], []
    for asked in plans:
        tickets.append(runner.launch(asked))
        if len(tickets) > ahead:
            outputs.append(tickets.pop(0).wait())
    return outputs + [ticket.wait() for ticket in tickets]


def decodes(slot: int, context: int, blocks: Sequence[int], count: int) -> list[StepPlan]:
    return [plan(Row(slot, context + i, blocks)) for i in range(count)]


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_token_feeds_the_next_step_on_the_device(runner: TorchRunner, reference: Reference, ahead: int) -> None:
    """The plans are all made before any token is known."""
    plans = [plan(Row(3, 0, [5, 2], PROMPT), starts=[start(3)]), *decodes(3, 20, [5, 2], 12)]
    outputs = run(runner, plans, ahead)
    assert [int(output.token_ids[0]) for output in outputs] == reference.greedy(PROMPT, 13)


def test_chunks_before_the_last_leave_last_token_alone(runner: TorchRunner, reference: Reference) -> None:
    """Slot 1 is between two of its chunks when slot 0 samples; only the last chunk of slot 1 writes its token."""
    other = ids(2, 24).tolist()
    plans = [
        plan(Row(0, 0, [5, 2], PROMPT), Row(1, 0, [7, 8], other[:10], samples=False), starts=[start(0), start(1)]),
        plan(Row(0, 20, [5, 2]), Row(1, 10, [7, 8], other[10:20], samples=False)),
        plan(Row(0, 21, [5, 2]), Row(1, 20, [7, 8], other[20:])),
        plan(Row(1, 24, [7, 8]), Row(0, 22, [5, 2])),
    ]
    outputs = run(runner, plans)
    assert [len(output.token_ids) for output in outputs] == [1, 1, 2, 2]
    first, second = reference.greedy(PROMPT, 4), reference.greedy(other, 2)
    assert [output.token_ids.tolist() for output in outputs] == [
        [first[0]],
        [first[1]],
        [first[2], second[0]],
        [second[1], first[3]],
    ]


def test_a_step_that_samples_nothing_has_empty_results(runner: TorchRunner) -> None:
    output = run(runner, [plan(Row(0, 0, [5], PROMPT[:10], samples=False), starts=[start(0)])])[0]
    assert output.token_ids.shape == output.flags.shape == (0,)
    assert output.logprobs.shape == (3, 0)
    assert output.scores == ()
    assert output.top_ids is None


def test_results_are_arrays_of_their_own(runner: TorchRunner) -> None:
    asked = [plan(Row(0, 0, [5, 2], PROMPT, targets=[*PROMPT[1:], -1]), starts=[start(0, PROMPT, top_logprobs=3)])]
    output = run(runner, asked)[0]
    assert output.top_ids is not None
    assert output.top_logprobs is not None
    arrays = [output.token_ids, output.logprobs, output.flags, output.top_ids, output.top_logprobs, *output.scores]
    copies = [array.copy() for array in arrays]
    run(runner, decodes(0, 20, [5, 2], 2 * RING))
    for array, copy in zip(arrays, copies, strict=True):
        assert array.base is None
        np.testing.assert_array_equal(array, copy)
    assert [output.token_ids.dtype, output.logprobs.dtype, output.flags.dtype] == [np.int32, np.float32, np.uint8]
    assert [output.top_ids.dtype, output.top_logprobs.dtype] == [np.int32, np.float32]


def test_alternatives_of_a_step_are_as_wide_as_the_widest_row(runner: TorchRunner, reference: Reference) -> None:
    other = ids(2, 9).tolist()
    starts = [start(0, top_logprobs=2), start(1, top_logprobs=64)]
    output = run(runner, [plan(Row(0, 0, [5, 2], PROMPT), Row(1, 0, [3], other), starts=starts)])[0]
    assert output.top_ids is not None
    assert output.top_ids.shape == (2, 64)
    for row, (count, prompt) in enumerate([(2, PROMPT), (64, other)]):
        expected = np.argsort(-reference.logits(prompt)[-1], kind="stable")[:count]
        assert output.top_ids[row, :count].tolist() == expected.tolist()


def test_no_more_steps_than_buffers(runner: TorchRunner) -> None:
    tickets = [runner.launch(plan(Row(0, 0, [5, 2], PROMPT), starts=[start(0)]))]
    tickets += [runner.launch(asked) for asked in decodes(0, 20, [5, 2], RING - 1)]
    with pytest.raises(RuntimeError, match="not waited for"):
        runner.launch(decodes(0, 23, [5, 2], 1)[0])
    with pytest.raises(RuntimeError, match="0 is next"):
        tickets[1].wait()
    tokens = [int(ticket.wait().token_ids[0]) for ticket in tickets]
    with pytest.raises(RuntimeError):
        tickets[-1].wait()
    assert len(tokens) == RING


def test_eager_steps_run_at_launch_and_lazy_ones_when_waited_for(device: StepDevice) -> None:
    eager, lazy = runner_on(device), runner_on(device, lazy=True)
    asked = plan(Row(0, 0, [5, 2], PROMPT), starts=[start(0)])
    ticket = lazy.launch(asked)
    assert device.kv.data.isnan().all()
    ticket.wait()
    assert device.kv.keys[0][5].isfinite().all()
    device.kv.data.fill_(float("nan"))
    ticket = eager.launch(asked)
    assert device.kv.keys[0][5].isfinite().all()
    ticket.wait()


def test_a_lazy_step_reads_its_input_buffer_when_it_runs(device: StepDevice, reference: Reference) -> None:
    """Else the overlap of host and device would be tested by nothing."""
    runner = runner_on(device, lazy=True)
    ticket = runner.launch(plan(Row(0, 0, [5, 2], PROMPT), starts=[start(0)]))
    other = ids(2, 20).tolist()
    runner._inputs[0].pack(plan(Row(0, 0, [5, 2], other)))
    assert ticket.wait().token_ids[0] == reference.greedy(other, 1)[0]


def test_rows_that_do_not_sample_skip_the_head(path: Path) -> None:
    ops = CountingOps()
    runner = runner_on(load_device(path, ops))
    starts = [start(0), start(1)]
    run(runner, [plan(Row(0, 0, [5, 2], PROMPT, samples=False), starts=starts)])
    assert ops.head_rows == []
    run(runner, [plan(Row(0, 20, [5, 2], [1, 2, 3]), Row(1, 0, [6, 7], PROMPT, samples=False))])
    assert ops.head_rows == [1]
    run(runner, [plan(Row(0, 23, [5, 2]), Row(1, 20, [6, 7], [4, 5]))])
    assert ops.head_rows == [1, 2]


def test_scores_are_the_references_whatever_the_chunks(runner: TorchRunner, reference: Reference) -> None:
    """The first logprob of a chunk comes from the last row of the chunk before."""
    targets = [*PROMPT[1:], -1]
    expected = reference.logprobs(PROMPT)[1:]
    for sizes in ([20], [7, 13], [1] * 20, [16, 4]):
        plans, done = [], 0
        for size in sizes:
            span = slice(done, done + size)
            row = Row(2, done, [5, 2], PROMPT[span], samples=done + size == 20, targets=targets[span])
            plans.append(plan(row, starts=[] if done else [start(2, PROMPT)]))
            done += size
        found = np.concatenate([output.scores[0] for output in run(runner, plans)], axis=1)
        assert found.shape == (3, 20)
        for mode in found:
            np.testing.assert_allclose(mode[:-1], expected, rtol=0, atol=1e-4)
            assert np.isnan(mode[-1])


def test_two_scored_rows_beside_others(runner: TorchRunner, reference: Reference) -> None:
    other = ids(2, 9).tolist()
    rows = (
        Row(0, 0, [5, 2], PROMPT, targets=[*PROMPT[1:], -1]),
        Row(3, 0, [6, 7], ids(3, 25).tolist()),
        Row(1, 0, [3], other, samples=False, targets=[*other[1:], 8]),
    )
    starts = [start(0, PROMPT), start(3), start(1, [*other, 8])]
    output = run(runner, [plan(*rows, starts=starts)])[0]
    assert [scores.shape for scores in output.scores] == [(3, 20), (3, 9)]
    np.testing.assert_allclose(output.scores[0][0][:-1], reference.logprobs(PROMPT)[1:], rtol=0, atol=1e-4)
    np.testing.assert_allclose(output.scores[1][0], reference.logprobs([*other, 8])[1:], rtol=0, atol=1e-4)
    assert output.token_ids.tolist() == [reference.greedy(PROMPT, 1)[0], reference.greedy(ids(3, 25).tolist(), 1)[0]]


def test_the_head_scores_at_most_512_rows_at_a_time(path: Path, reference: Reference) -> None:
    ops = CountingOps()
    runner = runner_on(load_device(path, ops))
    long = ids(4, 700).tolist()
    row = Row(0, 0, list(range(1, 45)), long, targets=[*long[1:], -1])
    output = run(runner, [plan(row, starts=[start(0, long)])])[0]
    assert ops.head_rows == [SCORE_ROWS, 700 - SCORE_ROWS, 1]
    np.testing.assert_allclose(output.scores[0][0][:-1], reference.logprobs(long)[1:], rtol=0, atol=2e-4)


def test_a_row_that_is_not_finite_is_flagged_and_the_next_step_is_safe(tmp_path: Path, lazy: bool) -> None:
    """Its id is 0, inside the vocabulary; neighbours keep theirs."""
    rows, state_of = script(40, [(3, 1), (4, 5), (5, 6), (6, 7)])
    rows = rows.astype(np.float64)
    rows[1, 9] = 1e39  # after token 3: an infinite logit of finite weights
    runner = runner_on(load_device(write_table(tmp_path / "m", rows, state_of)), lazy=lazy)
    plans = [
        plan(Row(0, 0, [5], [2, 3]), Row(1, 0, [6], [2, 4]), starts=[start(0), start(1)]),
        *(plan(Row(0, 2 + i, [5]), Row(1, 2 + i, [6])) for i in range(2)),
    ]
    outputs = run(runner, plans)
    assert [output.token_ids[1] for output in outputs] == [5, 6, 7]
    assert [output.flags[1] for output in outputs] == [0, 0, 0]
    assert outputs[0].flags[0] == NONFINITE
    assert outputs[0].token_ids[0] == 0
    assert 0 <= outputs[1].token_ids[0] < 40


def test_a_plan_beyond_the_limits_is_refused_and_costs_no_buffer(runner: TorchRunner, reference: Reference) -> None:
    with pytest.raises(ValueError, match="too large"):
        runner.launch(plan(Row(0, 0, [1] * 251, [1] * 4000)))
    output = run(runner, [plan(Row(0, 0, [5, 2], PROMPT), starts=[start(0)])])[0]
    assert output.token_ids.tolist() == reference.greedy(PROMPT, 1)
    assert runner.num_blocks == 60
    assert runner.vocab_size == 512
