"""The engine on the GPU in bf16: against float32, against transformers' own bf16, and against itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.shared import Runs, no_runs
from engine.config import EngineConfig
from engine.cuda.input import CudaInput
from engine.request import Completion, Request, SamplingParams
from engine.start.build import LoadedEngine, load_engine
from engine.step import StepPlan
from tests.engine.serve import ask, ids, serve
from tests.rigs import HF_CLASS, RandModel, Reference, write_rand

SHAPE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "intermediate": 512, "dtype": torch.bfloat16}
MODELS = {
    "qwen3": RandModel("qwen3", std=0.1, **SHAPE),
    "qwen2": RandModel("qwen2", std=0.1, qk_std=0.05, **SHAPE),
    "llama": RandModel("llama", std=0.1, qk_std=0.05, **SHAPE),
}


@pytest.fixture(scope="module", params=list(MODELS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("gpu") / request.param, MODELS[request.param])


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rand(tmp_path_factory.mktemp("gpu") / "qwen3", MODELS["qwen3"])


def load(
    path: Path, *, decode_path: str = "graph", num_blocks: int | None = None, **options: int | bool
) -> LoadedEngine:
    config = EngineConfig(**{"max_running": 16, "max_step_tokens": 256, "max_context": 1024} | options)
    return load_engine(path, config, dtype="bfloat16", device="cuda", num_blocks=num_blocks, decode_path=decode_path)


def logprobs(completion: Completion) -> np.ndarray:
    return completion.logprobs["processed"]


def score(loaded: LoadedEngine, token_ids: np.ndarray) -> np.ndarray:
    """Teacher-forced logprobs of token_ids[1:]."""
    request = Request("score", token_ids, 0, prompt_logprobs=True)
    found = serve(loaded, request)["score"].prompt_logprobs
    assert found is not None
    return found["processed"][1:]


def bf16_error(path: Path, token_ids: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """How far transformers' own bf16 is from float32 on the same ids."""
    import transformers

    name = next(HF_CLASS[kind] for kind in HF_CLASS if kind in path.name)
    model = getattr(transformers, name).from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
    batch = torch.from_numpy(token_ids.astype(np.int64))[None].cuda()
    with torch.inference_mode():
        logits = model(batch).logits[0, :-1].float()
    found = logits.log_softmax(-1).gather(1, batch[0, 1:, None])[:, 0].cpu().numpy()
    return np.abs(found - exact)


def test_teacher_forced_logprobs_are_as_near_to_float32_as_transformers_bf16(path: Path) -> None:
    token_ids = ids(7, 700)
    exact = Reference(path).logprobs(token_ids)[1:]
    theirs = bf16_error(path, token_ids, exact)
    ours = np.abs(score(load(path), token_ids) - exact)
    print(f"{path.name}: mean {ours.mean():.4f} theirs {theirs.mean():.4f} max {ours.max():.3f} {theirs.max():.3f}")
    assert ours.mean() <= 1.25 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()


@pytest.mark.parametrize("decode_path", ["graph", "eager"])
def test_decoded_logprobs_are_those_of_a_teacher_forced_pass(path: Path, decode_path: str) -> None:
    loaded = load(path, decode_path=decode_path)
    prompts = [ids(n, n) for n in (1, 15, 16, 17, 100, 300)]
    requests = [ask(str(i), prompt, 60, params=SamplingParams(seed=i)) for i, prompt in enumerate(prompts)]
    ended = serve(loaded, *requests)
    reference = Reference(path)
    for i, prompt in enumerate(prompts):
        whole = np.concatenate((prompt, ended[str(i)].token_ids))
        exact = reference.logprobs(whole)[len(prompt) :]
        theirs = bf16_error(path, whole, reference.logprobs(whole)[1:])[len(prompt) - 1 :]
        assert np.abs(logprobs(ended[str(i)]) - exact).mean() <= 1.25 * theirs.mean() + 1e-3
        assert np.abs(logprobs(ended[str(i)]) - exact).max() <= 2 * theirs.max() + 1e-2


def test_the_same_bucket_gives_the_same_bits_whatever_the_neighbours_tokens(qwen3: Path) -> None:
    loaded = load(qwen3, prefix_cache=False)
    request = ask("a", ids(1, 40), 50, params=SamplingParams(seed=5))
    others = [
        [ask(f"{k}{i}", ids(k + i, 40), 50, params=SamplingParams(seed=k + i)) for i in range(3)] for k in (100, 200)
    ]
    first = serve(loaded, request, *others[0])["a"]
    second = serve(loaded, request, *others[1])["a"]
    assert np.array_equal(first.token_ids, second.token_ids)
    assert np.array_equal(logprobs(first), logprobs(second))


@pytest.mark.parametrize("count", range(1, 9))
def test_graph_equals_eager_for_every_batch_size(qwen3: Path, count: int) -> None:
    """Padding rows write to the dummy block and slot alone; every other block of the pool is in use."""
    found = {}
    for decode_path in ("graph", "eager"):
        loaded = load(qwen3, decode_path=decode_path, num_blocks=1 + 8 * count, max_running=8, prefix_cache=False)
        requests = [ask(str(i), ids(i, 20 + i), 64) for i in range(count)]
        found[decode_path] = serve(loaded, *requests)
    for name, graph in found["graph"].items():
        eager = found["eager"][name]
        assert_near(graph, eager)


@pytest.mark.parametrize("tokens", [1, 16, 48, 224, 512, 2048, 3000])
def test_a_prompt_in_pieces_has_the_bits_of_one_launched_kernel_by_kernel(qwen3: Path, tokens: int) -> None:
    """Without padding; above 2,048 tokens a step is no graph anyway."""
    token_ids, sizes = ids(tokens, tokens), {"max_step_tokens": 4096, "max_context": 4096}
    pieces, eager = (load(qwen3, decode_path=how, **sizes) for how in ("graph", "eager"))
    requests = [Request("score", token_ids, 2, prompt_logprobs=True)]
    found, expected = (serve(loaded, *requests)["score"] for loaded in (pieces, eager))
    assert (pieces.engine.stats().graph_steps_total, eager.engine.stats().graph_steps_total) == (
        1 + (tokens <= 2048),
        0,
    )
    assert pieces.engine.stats().padding_tokens_total == (7 if tokens == 1 else 0)
    if tokens > 1:
        assert found.prompt_logprobs is not None
        assert expected.prompt_logprobs is not None
        np.testing.assert_array_equal(found.prompt_logprobs["processed"], expected.prompt_logprobs["processed"])
        assert found.token_ids[0] == expected.token_ids[0]


def test_prompts_by_either_prefill_kernel_are_near_each_other(qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for backend in ("fa2", "fa3"):
        monkeypatch.setattr("engine.attention.flashinfer_paged.choose_backend", lambda *_, chosen=backend: chosen)
        found[backend] = score(load(qwen3, max_step_tokens=200), ids(9, 1000))
    assert np.abs(found["fa2"] - found["fa3"]).mean() < 1e-2
    if torch.cuda.get_device_capability()[0] == 9:
        assert not np.array_equal(found["fa2"], found["fa3"])


def test_what_lies_in_the_padding_of_a_step_in_pieces_reaches_no_token(qwen3: Path) -> None:
    loaded = load(qwen3)
    token_ids = ids(3, 100)
    first = score(loaded, token_ids)
    runner = loaded.engine._runner
    runner.mixed.of(runner.mixed.bucket(100)).attended.fill_(float("nan"))
    np.testing.assert_array_equal(score(load(qwen3), token_ids), first)
    loaded.engine.commit(lambda: None, 1)  # forgets the prefix
    np.testing.assert_array_equal(score(loaded, token_ids), first)
    assert loaded.engine.stats().nonfinite_total == 0


def test_turns_that_come_while_others_decode_are_near_the_same_turns_alone(qwen3: Path) -> None:
    """Decode rows and prompts of all lengths in the same steps, which are padded; shapes differ, so bf16 does."""
    requests = [ask(str(i), ids(i, 5 + 23 * i), 24) for i in range(10)]
    alone = {name: done for request in requests for name, done in serve(load(qwen3), request).items()}
    loaded = load(qwen3)
    ended: dict[str, Completion] = {}
    for request in requests:
        loaded.engine.add(request)
        for _ in range(3):
            ended |= {completion.request_id: completion for completion in loaded.engine.step()}
    while loaded.engine.has_work:
        ended |= {completion.request_id: completion for completion in loaded.engine.step()}
    stats = loaded.engine.stats()
    assert stats.graph_steps_total == stats.steps_total
    for name, completion in ended.items():
        assert_near(completion, alone[name])


def assert_near(found: Completion, expected: Completion) -> None:
    """The same ids up to the first near tie, and logprobs within bf16 there."""
    assert len(found.token_ids) == len(expected.token_ids)
    same = np.argmin(np.append(found.token_ids == expected.token_ids, False))
    assert same > 0
    assert np.abs(logprobs(found)[:same] - logprobs(expected)[:same]).mean() < 1e-2


def test_preempted_rows_are_near_a_cold_run(qwen3: Path) -> None:
    requests = [ask(str(i), ids(i, 64), 96) for i in range(4)]
    alone = serve(load(qwen3, prefix_cache=False), *requests)
    tight = load(qwen3, num_blocks=1 + 24)
    pressed = serve(tight, *requests)
    assert tight.engine.stats().preemptions_total > 0
    for name, completion in pressed.items():
        assert_near(completion, alone[name])


def test_a_prefix_hit_is_near_a_cold_run(qwen3: Path) -> None:
    loaded = load(qwen3)
    cold = serve(loaded, ask("cold", ids(5, 200), 60))["cold"]
    again = serve(loaded, ask("again", ids(5, 200), 60))["again"]
    assert again.cached_tokens == 192
    assert_near(again, cold)


@pytest.mark.parametrize("filters", [{}, {"top_k": 20, "top_p": 0.9}])
def test_launching_a_step_never_waits_for_the_device(qwen3: Path, filters: dict[str, float]) -> None:
    loaded = load(qwen3)
    for i in range(12):
        loaded.engine.add(ask(str(i), ids(i, 30), 40, params=SamplingParams(seed=i, **filters)))
    loaded.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ended = []
        while loaded.engine.has_work:
            ended += loaded.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(ended) == 12
    assert loaded.engine.stats().steps_total > 40


def test_filters_penalties_and_alternatives_of_some_rows_leave_the_others_alone(qwen3: Path) -> None:
    loaded = load(qwen3, prefix_cache=False)
    plain = ask("plain", ids(3, 40), 30, params=SamplingParams(seed=1))
    special = SamplingParams(seed=2, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, logit_bias={5: 1.0})
    alone = serve(loaded, plain, ask("other", ids(4, 40), 30))["plain"]
    ended = serve(loaded, plain, ask("other", ids(4, 40), 30, params=special, top_logprobs=3))
    assert np.array_equal(ended["plain"].token_ids, alone.token_ids)
    np.testing.assert_allclose(logprobs(ended["plain"]), logprobs(alone), atol=1e-4)
    top = ended["other"].top_ids
    assert top is not None
    assert top.shape == (30, 3)


def test_a_commit_changes_what_graphs_compute_and_no_address(qwen3: Path, tmp_path: Path) -> None:
    other = write_rand(tmp_path / "qwen3", RandModel("qwen3", seed=9, std=0.1, **SHAPE))
    loaded = load(qwen3)
    request = ask("a", ids(1, 40), 30)
    before = serve(loaded, request)["a"]
    addresses = {name: view.data_ptr() for name, view in loaded.weights.arena.parameters.items()}
    loaded.weights.prepare(str(other), 1, None)
    loaded.engine.commit(loaded.weights.commit, 1)
    after = serve(loaded, request)["a"]
    assert addresses == {name: view.data_ptr() for name, view in loaded.weights.arena.parameters.items()}
    fresh = serve(load(other), request)["a"]
    assert np.array_equal(after.token_ids, fresh.token_ids)
    assert np.array_equal(logprobs(after), logprobs(fresh))
    assert not np.array_equal(after.token_ids, before.token_ids)


@pytest.mark.parametrize("decode_path", ["graph", "eager"])
def test_rows_that_read_their_prompt_together_are_near_rows_that_read_it_alone(
    qwen3: Path, decode_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups and three rows of their own, in the same batches: only who reads the shared blocks differs."""
    monkeypatch.setattr("engine.cuda.input.LEAST_SAVED", 0)
    prompts = {f"{group}{i}": ids(group, 250) for group in range(2) for i in range(9)}
    prompts |= {f"own{i}": ids(50 + i, 100) for i in range(3)}
    requests = [
        ask(name, prompt, 40, group=name[0] if len(name) == 2 else "", params=SamplingParams(seed=7, sample_index=i))
        for i, (name, prompt) in enumerate(prompts.items())
    ]
    together = serve(load(qwen3, max_running=24, decode_path=decode_path), *requests)
    apart_engine = load(qwen3, max_running=24, decode_path=decode_path)
    runs: list[int] = []
    find = CudaInput._runs

    def none(self: CudaInput, plan: StepPlan, most: int) -> Runs:
        runs.append(len(find(self, plan, most).lengths))
        return no_runs(plan.num_decode)

    monkeypatch.setattr(CudaInput, "_runs", none)
    apart = serve(apart_engine, *requests)
    assert max(runs) == 2
    whole = np.concatenate((prompts["00"], apart["00"].token_ids))
    noise = bf16_error(qwen3, whole, Reference(qwen3).logprobs(whole)[1:]).mean()
    distances = []
    for name, completion in together.items():
        same = np.argmin(np.append(completion.token_ids == apart[name].token_ids, False))
        assert same > 0
        distances.append(np.abs(logprobs(completion)[:same] - logprobs(apart[name])[:same]).mean())
    print(f"together and apart: {np.mean(distances):.4f}, transformers bf16 to float32: {noise:.4f}")
    assert np.mean(distances) <= 1.25 * noise / 2
