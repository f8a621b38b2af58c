from __future__ import annotations

import numpy as np
import pytest

from bench.workloads import Turn, Workload, jobs, workloads

VOCAB = 151936


@pytest.mark.parametrize(
    ("name", "prompt", "sampled", "rows", "temperature"),
    [
        ("A", 512, 128, 1, 0.0),
        ("B", 256, 128, 8, 0.0),
        ("C", 256, 128, 16, 0.0),
        ("D", 2048, 128, 1, 0.0),
        ("E", 8192, 64, 1, 0.0),
        ("F", 512, 512, 64, 0.0),
        ("G", 512, 512, 256, 0.0),
        ("F_t1", 512, 512, 64, 1.0),
        ("G_t1", 512, 512, 256, 1.0),
        ("F_filtered", 512, 512, 64, 0.6),
    ],
)
def test_the_flat_ones_are_as_agreed(name: str, prompt: int, sampled: int, rows: int, temperature: float) -> None:
    workload = workloads()[name]
    assert workload.groups == rows * ((Turn(prompt, sampled),),)
    assert (workload.samples, workload.temperature, workload.prefix_cache) == (1, temperature, False)
    assert 0 < workload.short < sampled


def test_grpo() -> None:
    grpo = workloads()["grpo"]
    assert len(grpo.groups) == 64
    assert (grpo.samples, grpo.temperature, grpo.prefix_cache) == (8, 1.0, True)
    assert set(grpo.groups) == {(Turn(1024, 256), Turn(128, 256), Turn(128, 256))}
    assert grpo.sampled_tokens == 393_216


def test_code_localization_counts_what_the_peer_counted() -> None:
    work = workloads()["code_localization"]
    assert work.concurrency == 128
    assert work.sampled_tokens == 54_768
    sent = 0
    for turns in work.groups:
        lengths = np.cumsum([turn.appended + turn.sampled for turn in turns])
        sent += work.samples * int(sum(lengths - [turn.sampled for turn in turns]))
    assert sent == 5_916_392
    assert work.longest == 23_716


def test_tool_turns_are_short_and_those_of_siblings_end_apart() -> None:
    work = workloads()["tool_turns"]
    assert (work.concurrency, work.temperature, work.prefix_cache) == (128, 1.0, True)
    assert (work.sampled_tokens, work.longest) == (8 * 2502, 5099)
    assert sum(map(len, work.groups)) == 95
    first, second = jobs(work, 0)[:2]
    assert [turn.appended for turn in first.turns] == [turn.appended for turn in second.turns]
    sampled = [turn.sampled for turn in first.turns]
    assert sampled == [19, 20, 27, 19, 29, 22, 18, 27, 19, 33]
    assert [turn.sampled for turn in second.turns] == [19, 27, 19, 29, 22, 18, 27, 19, 33, 20]
    assert sum(turn.sampled for job in jobs(work, 0) for turn in job.turns) == work.sampled_tokens


def test_the_tail_is_one_long_row_among_short_ones_in_the_steps_that_are_timed() -> None:
    tail = workloads()["tail"]
    middles = [turn.appended + (tail.short + turn.sampled) / 2 for (turn,) in tail.groups]
    assert sorted(middles) == [1024] * 63 + [16384]
    assert tail.mean_context == 63 * 1024 + 16384
    assert tail.decode_only


def test_siblings_share_their_prompt_and_nothing_else() -> None:
    found = jobs(workloads()["grpo"], seed=3)
    first, sibling, other = found[0], found[1], found[8]
    assert (first.group, sibling.group, other.group) == (0, 0, 1)
    prompt = first.appended(0, VOCAB)
    assert len(prompt) == 1024
    assert prompt.dtype == np.int32
    np.testing.assert_array_equal(sibling.appended(0, VOCAB), prompt)
    assert not np.array_equal(other.appended(0, VOCAB)[:16], prompt[:16])
    assert not np.array_equal(sibling.appended(1, VOCAB)[:16], first.appended(1, VOCAB)[:16])
    assert not np.array_equal(first.appended(2, VOCAB)[:16], first.appended(1, VOCAB)[:16])


def test_runs_and_workloads_share_no_prompt_but_a_run_can_be_repeated() -> None:
    # All prompts are at least two blocks long: one block in common would be a prefix hit.
    starts: set[bytes] = set()
    count = 0
    for name in ("A", "D", "F", "grpo", "code_localization", "tool_turns"):
        for seed in (0, 1, 10):
            prompts = [job.appended(0, VOCAB) for job in jobs(workloads()[name], seed) if job.sample == 0]
            starts |= {prompt[:16].tobytes() for prompt in prompts}
            count += len(prompts)
    assert len(starts) == count
    one, again = (jobs(workloads()["A"], 5)[0] for _ in range(2))
    np.testing.assert_array_equal(one.appended(0, VOCAB), again.appended(0, VOCAB))


def test_seeds_fit_the_wire() -> None:
    assert max(job.seed for name in workloads() for job in jobs(workloads()[name], 4095)) < 2**64


def test_shrinking_keeps_the_form() -> None:
    for name, workload in workloads().items():
        small = workload.shrunk(64)
        assert small.name == f"{name}_div64"
        assert small.samples == workload.samples
        assert small.prefix_cache == workload.prefix_cache
        assert {len(turns) for turns in small.groups} <= {len(turns) for turns in workload.groups}
        assert all(turn.sampled >= 2 for turns in small.groups for turn in turns)
        assert bool(small.short) == bool(workload.short)
        assert all(small.short < turns[0].sampled for turns in small.groups)
    assert workloads()["grpo"].shrunk(1) is workloads()["grpo"]
    assert max(t.appended for (t,) in workloads()["tail"].shrunk(64).groups) > 200  # the long row stays


def test_cut_and_first_turns() -> None:
    workload = Workload("w", ((Turn(4, 8), Turn(2, 6)),), samples=2)
    assert workload.cut(1).groups == ((Turn(4, 1), Turn(2, 1)),)
    assert workload.first_turns().groups == ((Turn(4, 8),),)
    assert (workload.longest, workload.kv_tokens, workload.sampled_tokens) == (20, 40, 28)
