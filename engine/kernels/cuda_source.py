"""CUDA C++ compiled at start by NVRTC, which torch brings along, and launched through NVIDIA's Python bindings.

For what Triton cannot say: tiles that are no power of two wide. What is compiled is kept on disk.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuda.bindings import driver, nvrtc

log = logging.getLogger(__name__)


class CudaError(RuntimeError):
    """The driver or the compiler refused a call; the message is theirs."""


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its status. Raises CudaError if that is not success."""
    status, *values = answer
    if int(status):
        raise CudaError(f"{type(status).__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def compiled(source: str, options: tuple[str, ...], architecture: str) -> bytes:
    """Machine code of `source`, from the cache or from the compiler. Raises CudaError with the compiler's log."""
    version = ".".join(map(str, checked(nvrtc.nvrtcVersion())))
    key = hashlib.sha256("\0".join((version, architecture, *options, source)).encode()).hexdigest()
    place = _cache() / f"{key}.cubin"
    if place.exists():
        return place.read_bytes()
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space", *options]
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], []))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if int(status):
        said = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, said))
        raise CudaError(said.decode().strip(" \0"))
    code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_suffix(f".{os.getpid()}")
        part.write_bytes(code)
        part.replace(place)  # whole or not at all: processes may start together
    except OSError as error:
        log.warning(
            "compiled kernels are not kept in %s, and will be compiled at the next start: %s", place.parent, error
        )
    return code


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-worker"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel and its launch: `threads` of a program, `shared` bytes of dynamic shared memory."""

    function: Any
    threads: int
    shared: int

    @staticmethod
    def load(code: bytes, name: str, threads: int, shared: int) -> Kernel:
        function = checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(code)), name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, attribute, shared))
        return Kernel(function, threads, shared)

    def launch(self, programs: int, stream: int, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        """A launch that may begin before the one ahead of it has ended. types: of the values, by ctypes; None for a
        structure of the bindings."""
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared, driver.CUstream(stream)
        config.attrs, config.numAttrs = [overlap], 1
        checked(driver.cuLaunchKernelEx(config, self.function, (values, types), 0))
