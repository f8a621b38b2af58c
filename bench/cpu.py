"""CPU speed against the transformers library's `generate`, side by side in one run.

    python -m bench.cpu [--runs 3] [--threads N] [--json-dir DIR]

A random Qwen3 in float32 (4 layers, hidden 256, 8,192 ids), greedy, lengths forced. Two workloads: `cpu-1`, one
request, of which only decode counts; and `cpu-16`, sixteen requests of mixed lengths, all there at the start, against
`generate` one after the other and against one padded batch of all. The engines take turns within each round, so that a
machine that slows down slows down all of them. The exit code is 1 where a length is wrong or a target is missed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from bench import report_fields
from bench.measure import record, save
from bench.workloads import Workload
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.config import ModelConfig, read_model_config
from engine.request import Request, SamplingParams
from engine.start.build import load_engine

Ids = npt.NDArray[np.int32]
VOCAB = 8192
PAD = 0
OURS, ONE_BY_ONE, PADDED = "rollout-worker", "transformers-one-by-one", "transformers-padded"
TARGETS = {("cpu-1", ONE_BY_ONE): 1.0, ("cpu-16", ONE_BY_ONE): 4.0, ("cpu-16", PADDED): 1.0}
"""How many times as fast as the peer we have to be."""


@dataclass(frozen=True)
class Ask:
    prompt: Ids
    count: int
    """Tokens to sample, exactly."""


@dataclass(frozen=True)
class Pass:
    """One engine's answer to all asks of one pass. lengths_ok: every ask got exactly its count."""

    seconds: float
    outputs: list[list[int]]
    lengths_ok: bool


Generate = Callable[[Sequence[Ask]], list[list[int]]]


def one(seed: int, count: int) -> list[Ask]:
    return [Ask(random_ids(np.random.default_rng(seed), 128), count)]


def mixed(seed: int) -> list[Ask]:
    """Prompts of 16 to 496 tokens, outputs of 16 to 196, not sorted by either; only the ids depend on the seed."""
    lengths = np.random.default_rng(0)
    prompts, counts = lengths.permutation(np.arange(16, 512, 32)), lengths.permutation(np.arange(16, 208, 12))
    ids = np.random.default_rng(seed)
    return [Ask(random_ids(ids, int(n)), int(count)) for n, count in zip(prompts, counts, strict=True)]


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(1, VOCAB, count, np.int32)


def write_model(folder: Path) -> Path:
    """A checkpoint without an end-of-sequence token, so that nothing ends before its length."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        # Wide enough apart that the likeliest id does not hang on the order of a sum.
        initializer_range=0.1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def with_engine(engine: Engine) -> Generate:
    def run(asks: Sequence[Ask]) -> list[list[int]]:
        greedy = SamplingParams(temperature=0.0)
        for i, ask in enumerate(asks):
            engine.add(Request(str(i), ask.prompt, ask.count, greedy))
        ended: dict[str, list[int]] = {}
        while engine.has_work:
            ended |= {completion.request_id: completion.token_ids.tolist() for completion in engine.step()}
        return [ended[str(i)] for i in range(len(asks))]

    return run


def one_by_one(model: PreTrainedModel) -> Generate:
    def run(asks: Sequence[Ask]) -> list[list[int]]:
        return [generate(model, [ask], ask.count)[0] for ask in asks]

    return run


def padded(model: PreTrainedModel) -> Generate:
    """Every row runs to the longest output; what a row has over its own is thrown away, and not counted."""

    def run(asks: Sequence[Ask]) -> list[list[int]]:
        rows = generate(model, asks, max(ask.count for ask in asks))
        return [row[: ask.count] for row, ask in zip(rows, asks, strict=True)]

    return run


@torch.inference_mode()
def generate(model: PreTrainedModel, asks: Sequence[Ask], count: int) -> list[list[int]]:
    longest = max(len(ask.prompt) for ask in asks)
    ids = torch.full((len(asks), longest), PAD)
    mask = torch.zeros_like(ids)
    for row, ask in enumerate(asks):
        ids[row, longest - len(ask.prompt) :] = torch.from_numpy(ask.prompt)
        mask[row, longest - len(ask.prompt) :] = 1
    out = model.generate(
        ids, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count, pad_token_id=PAD
    )
    rows: list[list[int]] = out[:, longest:].tolist()
    return rows


def timed(run: Generate, asks: Sequence[Ask]) -> Pass:
    start = time.perf_counter()
    outputs = run(asks)
    seconds = time.perf_counter() - start
    return Pass(seconds, outputs, [len(output) for output in outputs] == [ask.count for ask in asks])


def measure_one(engines: dict[str, Generate], runs: int) -> dict[str, dict[str, Any]]:
    """Decode alone: the time of 144 tokens less that of 16, over 128."""
    long, short = 144, 16
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    ok = dict.fromkeys(engines, True)
    for number in range(runs + 1):
        for name, run in engines.items():
            both = [timed(run, one(number, count)) for count in (long, short)]
            ok[name] &= all(p.lengths_ok for p in both)
            if number:
                seconds[name].append((both[0].seconds - both[1].seconds) / (long - short))
    return {
        name: {
            "forced_length_ok": ok[name],
            "metrics": {
                "output_tok_s": report_fields.measured(1 / s for s in seconds[name]),
                "tpot_ms": report_fields.measured(1e3 * s for s in seconds[name]),
            },
        }
        for name in engines
    }


def measure_mixed(engines: dict[str, Generate], runs: int) -> dict[str, dict[str, Any]]:
    """Tokens that were asked for over the time to the last of them; and how many outputs are our ids exactly."""
    passes: dict[str, list[Pass]] = {name: [] for name in engines}
    for number in range(runs + 1):
        for name, run in engines.items():
            done = timed(run, mixed(number))
            if number:
                passes[name].append(done)
    tokens = sum(ask.count for ask in mixed(0))
    found = {}
    for name, taken in passes.items():
        pairs = [(p.outputs, ours.outputs) for p, ours in zip(taken, passes[OURS], strict=True)]
        alike = [a == b for outputs, ours in pairs for a, b in zip(outputs, ours, strict=True)]
        found[name] = {
            "forced_length_ok": all(p.lengths_ok for p in taken),
            "metrics": {"output_tok_s": report_fields.measured(tokens / p.seconds for p in taken)},
            "outputs_like_ours": f"{sum(alike)} of {len(alike)}",
        }
    return found


def results(found: dict[str, dict[str, Any]], workload: str, model: ModelConfig, threads: int) -> list[dict[str, Any]]:
    """Result files' contents, in the order of the engines."""
    made = []
    for engine, figures in found.items():
        settings = {"threads": threads, "prefix_cache": False}
        fields = record(engine, "bare", Workload(workload, ()), model, "cpu", "float32", settings)
        made.append(fields | figures)
    return made


def table(made: Sequence[dict[str, Any]]) -> str:
    """A line a result, with how many times as fast we are."""
    ours = {
        result["workload"]: result["metrics"]["output_tok_s"]["median"] for result in made if result["engine"] == OURS
    }
    lines = [f"{'workload':10}{'engine':26}{'tokens/s':>10}{'runs':>34}{'we are':>9}{'target':>8}  lengths"]
    for result in made:
        workload, engine, rate = result["workload"], result["engine"], result["metrics"]["output_tok_s"]
        target = TARGETS.get((workload, engine))
        cells = [f"{ours[workload] / rate['median']:.2f} x", f"{target:g} x"] if target else ["", ""]
        runs = ", ".join(f"{run:,.0f}" for run in rate["runs"])
        ok = "ok" if result["forced_length_ok"] else "WRONG"
        lines.append(f"{workload:10}{engine:26}{rate['median']:>10,.0f}{runs:>34}{cells[0]:>9}{cells[1]:>8}  {ok}")
    return "\n".join(lines)


def missed(made: Sequence[dict[str, Any]]) -> list[str]:
    rates = {(result["workload"], result["engine"]): result["metrics"]["output_tok_s"]["median"] for result in made}
    wrong = [f"{r['workload']}, {r['engine']}: lengths are wrong" for r in made if not r["forced_length_ok"]]
    slow = [
        f"{workload}: {rates[workload, OURS] / rates[workload, peer]:.2f} times {peer}, target {target:g}"
        for (workload, peer), target in TARGETS.items()
        if rates[workload, OURS] < target * rates[workload, peer]
    ]
    return wrong + slow


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3, help="timed runs after the warm-up")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch, for all engines alike")
    parser.add_argument("--json-dir", type=Path, help="write result files there, in the form of bench/results")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="bench-cpu-") as folder:
        path = write_model(Path(folder))
        config = EngineConfig(max_running=16, max_step_tokens=2048, max_context=768, prefix_cache=False)
        engine = load_engine(path, config).engine
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        shape = read_model_config(path)
    gc.collect()
    gc.freeze()  # what is loaded stays: no collection in a timed pass has to look at it
    ours, peer = with_engine(engine), one_by_one(model)
    found = {
        "cpu-1": measure_one({OURS: ours, ONE_BY_ONE: peer}, args.runs),
        "cpu-16": measure_mixed({OURS: ours, ONE_BY_ONE: peer, PADDED: padded(model)}, args.runs),
    }
    made = [result for workload, figures in found.items() for result in results(figures, workload, shape, args.threads)]
    print(table(made))
    for name, figures in found["cpu-16"].items():
        if name != OURS:
            print(f"cpu-16: {figures['outputs_like_ours']} outputs of {name} are ours, id for id")
    if args.json_dir:
        for result in made:
            print(save(result, args.json_dir))
    for line in missed(made):
        print(f"MISSED: {line}", file=sys.stderr)
    return 1 if missed(made) else 0


if __name__ == "__main__":
    sys.exit(main())
