"""From a checkpoint's path to an engine that is ready to serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from engine.attention.torch_paged import TorchPagedAttention
from engine.config import BLOCK_SIZE, EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, OutOfMemory
from engine.handle import EngineInfo
from engine.memory.free_memory import host_bytes
from engine.memory.kv_size import kv_blocks_in, kv_bytes_per_block
from engine.memory.memory import KVPool, Memory, within_memory
from engine.model.config import ModelConfig, read_model_config
from engine.model.model import build_model
from engine.model.ops import TorchOps
from engine.runner.torch_runner import Limits, StepDevice, TorchRunner
from engine.sampling.sampler import Sampler
from engine.start.progress import Progress, silent
from engine.start.warm_up import warm_up
from engine.weights.arena import parameters
from engine.weights.update import Weights

if TYPE_CHECKING:
    from engine.cuda.runner import CudaRunner

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what else its owner needs: the weight store, the checkpoint's config, the memory plan."""

    engine: Engine
    weights: Weights
    model_config: ModelConfig
    memory: Memory
    kv: KVPool

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model=self.model_config,
            weight_version=self.engine.weight_version,
            weight_digest=self.weights.digest,
            kv_tokens=(self.kv.num_blocks - 1) * BLOCK_SIZE,
            memory=tuple((item.device, item.tag, item.nbytes) for item in self.memory.allocations),
            torch=str(torch.__version__),
            rest=tuple((item.device, item.tag, item.nbytes) for item in self.memory.rest()),
            gpu=torch.cuda.get_device_name() if self.memory.device.type == "cuda" else "",
        )


@within_memory
def load_engine(
    path: str | Path,
    config: EngineConfig | None = None,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    num_blocks: int | None = None,
    kv_bytes: int | None = None,
    token_bytes: Sequence[bytes] | None = None,
    weight_version: int = 0,
    decode_path: Literal["auto", "graph", "eager"] = "auto",
    lazy: bool = False,
    progress: Progress = silent,
) -> LoadedEngine:
    """Load a checkpoint directory and build an engine over it.

    dtype: "float32" or "bfloat16", of weights and KV. num_blocks: blocks of the KV pool, block 0 (the dummy)
    included, or kv_bytes: a budget for it; by default every slot can hold the longest context, as far as the rest of
    a GPU's memory goes, or half of what the host has left. decode_path: see `CudaRunner`; auto: graph. lazy: see
    `TorchRunner`. progress: told of the long steps.

    Raises `WeightsError` for a checkpoint that is refused, `OutOfMemory` when the plan does not fit, `EngineError` for
    a device, a dtype or a context that cannot be.
    """
    config = config or EngineConfig()
    check_device(device, dtype)
    kind, place = DTYPES[dtype], torch.device(device)
    model_config = read_model_config(Path(path))
    if config.max_context > model_config.max_positions:
        raise EngineError(
            f"max_context {config.max_context} is above the checkpoint's {model_config.max_positions} positions",
            field="max_context",
        )
    if num_blocks is None and kv_bytes is not None:
        num_blocks = kv_blocks_in(kv_bytes, model_config, kind.itemsize)
    check_host_memory(model_config, kind.itemsize, copies=1 if device == "cuda" else 2)
    memory = Memory(place)
    weights = Weights(model_config, kind, memory)
    weights.prepare(str(path), weight_version, progress=progress)
    weights.commit()
    limits = Limits(config.max_running, config.max_step_tokens, config.max_blocks_per_request)
    if num_blocks is None:
        whole = config.max_running * config.max_blocks_per_request + 1
        left = kv_bytes_left(model_config, limits) if device == "cuda" else host_bytes() // 2
        whole_bytes = whole * kv_bytes_per_block(model_config, kind.itemsize)
        num_blocks = kv_blocks_in(min(left, whole_bytes), model_config, kind.itemsize)
    kv = KVPool(model_config, num_blocks, kind, memory)
    runner: TorchRunner | CudaRunner
    if device == "cuda":
        from engine.cuda.ops import CudaOps
        from engine.cuda.runner import CudaRunner
        from engine.cuda.sampler import CudaSampler

        model = build_model(model_config, weights.arena, CudaOps(model_config), config.max_context)
        sampler = CudaSampler(model_config.vocab_size, config.max_running, place)
        runner = CudaRunner(
            model, kv, sampler, limits, memory, "graph" if decode_path == "auto" else decode_path, progress
        )
        warm_up(runner, limits, config.max_context, progress)
    else:
        model = build_model(model_config, weights.arena, TorchOps(), config.max_context)
        attention = TorchPagedAttention(model_config, kind, place)
        draws = Sampler(model_config.vocab_size, config.max_running, place)
        runner = TorchRunner(StepDevice(model, kv, attention, draws, config.max_running), limits, memory, lazy=lazy)
    engine = Engine(runner, config, token_bytes, weight_version=weight_version)
    return LoadedEngine(engine, weights, model_config, memory, kv)


def check_device(device: str, dtype: str) -> None:
    """Raises `EngineError` for what is not served at all, and for what this machine or this torch lacks."""
    if dtype not in DTYPES:
        raise EngineError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}", field="dtype")
    if device not in ("cpu", "cuda"):
        raise EngineError(f"device {device!r} is neither cpu nor cuda", field="device")
    if device == "cuda" and torch.version.cuda is None:
        raise EngineError(
            f"device is cuda, but torch {torch.__version__} is built without CUDA: install a build with it, "
            "or choose device cpu",
            field="device",
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            "device is cuda, but torch finds no GPU: look at nvidia-smi, at CUDA_VISIBLE_DEVICES and, in a container, "
            "at whether GPUs are passed into it; or choose device cpu",
            field="device",
        )
    if device == "cuda" and dtype != "bfloat16":
        raise EngineError(f"dtype {dtype!r} is not supported on cuda; bfloat16 is", field="dtype")


def check_host_memory(config: ModelConfig, itemsize: int, *, copies: int) -> None:
    """Refuse at once what the kernel would end, without a word, in the middle of reading. copies: of the weights, those
    that serve and those that are being prepared. Raises `OutOfMemory`."""
    need = copies * itemsize * sum(parameter.numel for parameter in parameters(config))
    if need > (free := host_bytes()):
        raise OutOfMemory(
            f"the weights need {need / 1e6:,.1f} MB of memory on the host, which has {free / 1e6:,.1f} MB left",
            field="weights",
        )


def kv_bytes_left(config: ModelConfig, limits: Limits) -> int:
    """Bytes of GPU memory that the KV pool may take: what is free now, less what steps and graphs will need.

    A token of the largest step holds about three times its widest activation; a row its logits three times over;
    graphs and the attention workspace have been seen to stay under 3 GiB.
    """
    free, _ = torch.cuda.mem_get_info()
    widest = max(2 * config.intermediate_size, config.q_size + 2 * config.kv_size) + 2 * config.hidden_size
    steps = 3 * 2 * limits.max_tokens * widest + 3 * 4 * limits.max_rows * config.vocab_size
    return max(0, free - steps - 3 * 2**30)
