"""The GPU: whether there is one, whether the engine's kernels run on it, and how much of it is free."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from rollout.command import gpu
from rollout.command.config import WorkerConfig
from rollout.command.doctor.finding import Finding, gigabytes
from rollout.command.versions import driver

CAPABILITY = (8, 0)
"""bfloat16 in tensor cores."""
BUSY = 0.9
"""Share of a GPU that should be free: what others hold is missing from the KV cache."""
PINNED = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. Bytes; cuda: what torch was built for; driver_cuda: the newest that the driver serves, as (12, 8)."""

    name: str
    capability: tuple[int, int]
    free: int
    total: int
    cuda: tuple[int, int]
    driver_cuda: tuple[int, int]
    driver: str | None


def check(config: WorkerConfig) -> Iterator[Finding]:
    if config.place == "cpu":
        yield from on_cpu(config.device, gpu.visible(), gpu.lacking())
        return
    import torch

    if torch.version.cuda is None:
        yield Finding("fail", "GPU", f"torch {torch.__version__} is built without CUDA", "install a build with it")
    elif not torch.cuda.is_available():
        yield Finding(
            "fail",
            "GPU",
            f"torch finds none, driver {driver() or 'not loaded'}",
            "look at nvidia-smi, CUDA_VISIBLE_DEVICES and whether the container is given GPUs",
        )
    else:
        yield from judge(look())
        yield pinned()


def on_cpu(asked: str, visible: bool, lacking: str | None) -> Iterator[Finding]:
    """Where the model is to run on the CPU."""
    if visible and asked == "auto":
        found, _, advice = (lacking or "").partition(": ")
        yield Finding("warn", "GPU", f"there is one, but {found}, so that the model runs on the CPU", advice)
    elif visible:
        yield Finding("ok", "GPU", "there is one, and --device cpu leaves it alone")
    else:
        yield Finding("ok", "GPU", "none to be seen, so that the model runs on the CPU")


def look() -> Gpu:
    import torch

    free, total = torch.cuda.mem_get_info()
    major, minor = (int(part) for part in str(torch.version.cuda).split(".")[:2])
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return Gpu(
        torch.cuda.get_device_name(),
        torch.cuda.get_device_capability(),
        free,
        total,
        (major, minor),
        (version.value // 1000, version.value % 1000 // 10),
        driver(),
    )


def judge(found: Gpu) -> Iterator[Finding]:
    text = f"{found.name}, compute capability {found.capability[0]}.{found.capability[1]}"
    if found.capability < CAPABILITY:
        yield Finding("fail", "GPU", text, "8.0 (Ampere) or later is needed")
    else:
        yield Finding("ok", "GPU", text)
    built, serves = (".".join(map(str, version)) for version in (found.cuda, found.driver_cuda))
    text = f"{found.driver or 'unknown'}, serves CUDA {serves}; torch is built for {built}"
    # Within one major version a driver serves later builds as well.
    if found.driver_cuda[0] < found.cuda[0]:
        yield Finding("fail", "driver", text, "update the driver, or install a torch built for its CUDA")
    else:
        yield Finding("ok", "driver", text)
    text = f"{gigabytes(found.free)} free of {gigabytes(found.total)}"
    if found.free < BUSY * found.total:
        yield Finding("warn", "GPU memory", text, "others hold the rest, as nvidia-smi shows; the KV cache gets less")
    else:
        yield Finding("ok", "GPU memory", text)


def pinned() -> Finding:
    import torch

    try:
        torch.empty(PINNED, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        return Finding(
            "fail",
            "pinned memory",
            f"{gigabytes(PINNED)} are refused, {str(error).splitlines()[0]}",
            "raise the limits of locked memory (ulimit -l) and of the container's memory",
        )
    return Finding("ok", "pinned memory", f"{gigabytes(PINNED)} taken and given back")
