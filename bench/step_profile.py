"""Where a step's time on the GPU goes: attention, linears, small kernels, sampling, copies, gaps.

    python -m bench.step_profile --weights DIR [--points 1x576 64x768 64x768+128 p1x512] [--json FILE]

A point is rows x context; `+` behind it a prompt of so many tokens that comes with every step; `p` before it the
prefill of these rows, in one step. Kernels are timed by torch's profiler over a few steps of the running engine, the
step's length by the clock over others, without it; what the kernels do not fill are the gaps.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from bench.measure import model_name
from bench.report_fields import clean, commit, device_name, versions, write
from engine.config import EngineConfig
from engine.request import Request, SamplingParams
from engine.start.build import LoadedEngine, load_engine

STEPS = 24
PARTS = {
    "attention": r"decode_kernel|tma_decode|BatchPrefill|PrefillWithKV",
    "linears": r"gate_up|dot_kernel|vector_kernel|gemm|cutlass|nvjet|cublas|splitK|xmma",
    "small": r"norm_kernel|qk_norm_rope_write_kernel|silu_mul_kernel|scale_kernel|index_select|indexSelect|gather",
    "sampling": r"sample_\w+_kernel|weigh_kernel|settle_kernel|ties_\w*kernel|index_copy|reduce|argmax",
    "copies": r"Memcpy|Memset",
}


@dataclass(frozen=True, slots=True)
class Point:
    """rows x context that decode, with a prompt of so many tokens in every step or none; or that are prefilled."""

    kind: str
    rows: int
    context: int
    prompt: int

    @staticmethod
    def of(text: str) -> Point:
        shape, _, prompt = text.removeprefix("p").partition("+")
        rows, context = map(int, shape.split("x"))
        kind = "prefill" if text[0] == "p" else "mixed" if prompt else "decode"
        return Point(kind, rows, context, int(prompt or 0))


def part(name: str) -> str:
    return next((part for part, pattern in PARTS.items() if re.search(pattern, name)), "other")


def submit(loaded: LoadedEngine, rows: int, context: int, name: str, tokens: int) -> None:
    """Requests of `context` random ids that sample so many tokens."""
    for row in range(rows):
        ids = np.random.default_rng((len(name), row)).integers(0, loaded.model_config.vocab_size, context, np.int32)
        params = SamplingParams(seed=row)
        loaded.engine.add(Request(f"{name}.{row}", ids, tokens, params))


def finish(loaded: LoadedEngine) -> None:
    for request in loaded.engine.live_requests():
        loaded.engine.abort(request.id, "abort_client")
    while loaded.engine.has_work:
        loaded.engine.step()


def decode(loaded: LoadedEngine, rows: int, context: int) -> Callable[[], None]:
    """Steps that only decode: called again and again, each call is one more of them."""
    engine = loaded.engine
    computed = engine.stats().computed_prompt_tokens_total
    submit(loaded, rows, context, "decode", 4 * STEPS)  # every step that is measured, and some
    while engine.stats().computed_prompt_tokens_total < computed + rows * context:
        engine.step()
    for _ in range(4):
        engine.step()

    def once() -> None:
        engine.step()

    return once


def mixed(loaded: LoadedEngine, rows: int, context: int, prompt: int) -> Callable[[], None]:
    """Steps that decode `rows` rows and prefill a prompt."""
    step, number = decode(loaded, rows, context), count()

    def once() -> None:
        submit(loaded, 1, prompt, f"prompt {next(number)}", 1)
        step()

    return once


def prefill(loaded: LoadedEngine, rows: int, context: int) -> Callable[[], None]:
    """A call is one step that prefills all rows."""

    def once() -> None:
        submit(loaded, rows, context, "prefill", 1)
        while loaded.engine.has_work:
            loaded.engine.step()

    once()
    return once


def measure(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Milliseconds of a step: the whole, by part, and the gaps."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    step_ms = (time.perf_counter() - start) * 1e3 / steps
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for event in recorded.events():
        if event.device_type == DeviceType.CUDA:
            times[part(event.name)] += event.device_time_total / 1e3 / steps
            names[event.name] += event.device_time_total / 1e3 / steps
    for name, ms in names.most_common(12):
        print(f"    {ms:7.3f} ms {part(name):10} {name[:90]}")
    # Of one row, launches overlap and wait inside each other: their times add up to more than the step.
    return {"step_ms": step_ms} | dict(times) | {"gaps": step_ms - sum(times.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument(
        "--points",
        nargs="+",
        default=["1x576", "8x320", "64x768", "256x768", "64x768+128", "64x768+1024", "p1x512", "p16x1024"],
        metavar="[p]ROWSxCONTEXT[+PROMPT]",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    points = [Point.of(text) for text in args.points]
    config = EngineConfig(
        max_running=max(point.rows for point in points) + 2,  # a prompt, and the one before it
        max_step_tokens=16384,
        max_context=max(max(point.context, point.prompt) for point in points) + 8 * STEPS,
        prefix_cache=False,
    )
    loaded = load_engine(args.weights, config, dtype="bfloat16", device="cuda")
    found = []
    for point in points:
        if point.kind == "prefill":
            row = measure(prefill(loaded, point.rows, point.context), 3)
        elif point.kind == "mixed":
            row = measure(mixed(loaded, point.rows, point.context, point.prompt), STEPS)
        else:
            row = measure(decode(loaded, point.rows, point.context), STEPS)
        finish(loaded)
        print(
            f"{point.kind} {point.rows} x {point.context} + {point.prompt}: "
            + ", ".join(f"{name} {ms:.3f}" for name, ms in row.items()),
            flush=True,
        )
        found.append(asdict(point) | row)
    if args.json:
        where = {"device": device_name("cuda"), "commit": commit(), "clean": clean(), "versions": versions()}
        write({"kind": "profile"} | where | {"model": model_name(loaded.model_config), "points": found}, args.json)


if __name__ == "__main__":
    main()
