"""CUDA C++ compiled at start by NVRTC, which comes with torch or the toolkit, and launched through NVIDIA's bindings.

For what Triton cannot say: tiles that are no power of two wide, a warp that does nothing but load. What is compiled is
kept on disk. The bindings are imported where they are called: a machine without a GPU has none.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

HEADERS = sorted(Path(__file__).parent.glob("*.cuh"))
"""What kernels may include."""
DIGEST_BYTES = hashlib.sha256().digest_size


class CudaError(RuntimeError):
    """The driver or the compiler refused a call."""


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its status. Raises CudaError if that is not success."""
    status, *values = answer
    if int(status):
        raise CudaError(f"{type(status).__name__}: {status.name}")
    return values[0] if len(values) == 1 else tuple(values)


def compiled(source: str, options: tuple[str, ...], architecture: str) -> bytes:
    """Machine code of `source`, from the cache or from the compiler. Raises CudaError with the compiler's log."""
    from cuda.bindings import nvrtc

    version = ".".join(map(str, checked(nvrtc.nvrtcVersion())))
    flags = [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space", *options]
    headers = [header.read_bytes() for header in HEADERS]
    key = hashlib.sha256(b"\0".join(["\0".join((version, *flags, source)).encode(), *headers])).hexdigest()
    if (code := _kept(key)) is not None:
        return code
    names = [header.name.encode() for header in HEADERS]
    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", len(headers), headers, names))
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    if int(status):
        said = bytes(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, said))
        raise CudaError(said.decode().strip(" \0"))
    code = bytes(checked(nvrtc.nvrtcGetCUBINSize(program)))
    checked(nvrtc.nvrtcGetCUBIN(program, code))
    checked(nvrtc.nvrtcDestroyProgram(program))
    _keep(key, code)
    return code


def _cache() -> Path:
    """Raises RuntimeError without a home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-worker"


def _kept(key: str) -> bytes | None:
    """What `_keep` wrote, if it is there, whole, and may be read."""
    try:
        kept = (_cache() / f"{key}.cubin").read_bytes()
    except (OSError, RuntimeError):
        return None
    digest, code = kept[:DIGEST_BYTES], kept[DIGEST_BYTES:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(key: str, code: bytes) -> None:
    """Whole or not at all: processes may start together, and share the directory with other machines."""
    try:
        place = _cache() / f"{key}.cubin"
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, part = tempfile.mkstemp(dir=place.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(code).digest() + code)
            os.replace(part, place)
        except OSError:
            os.unlink(part)
            raise
    except (OSError, RuntimeError) as error:
        log.warning("a compiled kernel is not kept, and will be compiled again at the next start: %s", error)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel and its launch: `threads` of a program, `shared` bytes of dynamic shared memory."""

    function: Any
    threads: int
    shared: int

    @staticmethod
    def load(code: bytes, name: str, threads: int, shared: int) -> Kernel:
        from cuda.bindings import driver

        function = checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(code)), name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        checked(driver.cuFuncSetAttribute(function, attribute, shared))
        return Kernel(function, threads, shared)

    def launch(self, programs: int, stream: int, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        """A launch that may begin before the one ahead of it has ended. types: of the values, by ctypes; None for a
        structure, of the bindings or of ctypes. Raises CudaError."""
        from cuda.bindings import driver

        config = _config(programs, self.threads, self.shared, stream)
        checked(driver.cuLaunchKernelEx(config, self.function, (values, types), 0))


@lru_cache(maxsize=1024)
def _config(programs: int, threads: int, shared: int, stream: int) -> Any:
    """Of a launch. Kept: to make one takes longer than to launch."""
    from cuda.bindings import driver

    overlap = driver.CUlaunchAttribute()
    overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = programs, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes, config.hStream = shared, driver.CUstream(stream)
    config.attrs, config.numAttrs = [overlap], 1
    return config
