"""What is compiled is kept, and a cache that is of no use costs time alone; the compiler itself needs no GPU, but is
installed only where there is one."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from engine.kernels import cuda_source
from engine.kernels.cuda_source import CudaError, checked, compiled


class Status(int):
    name = "CUDA_ERROR_INVALID_VALUE"


def nvrtc(found: Compiler) -> SimpleNamespace:
    """In the place of the bindings: what holds "wrong" does not compile."""
    ok = Status(0)

    def create_program(
        source: bytes, _: bytes, count: int, headers: list[bytes], names: list[bytes]
    ) -> tuple[object, ...]:
        assert count == len(headers) == len(names)
        found.headers.append((headers, names))
        return ok, source

    def compile_program(source: bytes, count: int, options: list[bytes]) -> tuple[Status]:
        assert len(options) == count
        found.sources.append(source)
        found.flags.append(options)
        return (Status(6 if b"wrong" in source else 0),)

    return SimpleNamespace(
        nvrtcVersion=lambda: (ok, 13, 0),
        nvrtcCreateProgram=create_program,
        nvrtcCompileProgram=compile_program,
        nvrtcGetProgramLogSize=lambda _: (ok, 32),
        nvrtcGetProgramLog=lambda *_: (ok,),
        nvrtcGetCUBINSize=lambda source: (ok, len(source)),
        nvrtcGetCUBIN=lambda *_: (ok,),
        nvrtcDestroyProgram=lambda _: (ok,),
    )


class Compiler:
    """What was given to it, of every compilation."""

    def __init__(self) -> None:
        self.headers: list[tuple[list[bytes], list[bytes]]] = []
        self.sources: list[bytes] = []
        self.flags: list[list[bytes]] = []


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiler:
    found = Compiler()
    bindings = ModuleType("cuda.bindings")
    bindings.nvrtc = nvrtc(found)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "rollout-worker").iterdir())


def test_the_same_source_and_options_are_compiled_once(compiler: Compiler, tmp_path: Path) -> None:
    codes = [compiled("a kernel", options, "sm_90a") for options in (("-DA=1",), ("-DA=1",), ("-DA=2",))]
    assert len(compiler.sources) == 2
    assert codes[0] == codes[1]
    assert compiler.flags[0][0] == b"--gpu-architecture=sm_90a"
    assert compiler.flags[0][-1] == b"-DA=1"
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 200])
def test_a_broken_file_is_compiled_again_and_mended(compiler: Compiler, tmp_path: Path, content: bytes) -> None:
    code = compiled("a kernel", (), "sm_90a")
    (place,) = kept(tmp_path)
    place.write_bytes(content)
    assert compiled("a kernel", (), "sm_90a") == code
    assert compiled("a kernel", (), "sm_90a") == code
    assert len(compiler.sources) == 2


def test_what_a_kernel_includes_is_part_of_it(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {header.name for header in cuda_source.HEADERS} == {"attention.cuh", "hopper.cuh"}
    header = tmp_path / "some.cuh"
    monkeypatch.setattr(cuda_source, "HEADERS", [header])
    for content in ("int x = 1;", "int x = 1;", "int x = 2;"):
        header.write_text(content)
        compiled("a kernel", (), "sm_90a")
    assert compiler.headers == [([b"int x = 1;"], [b"some.cuh"]), ([b"int x = 2;"], [b"some.cuh"])]


def test_without_a_directory_to_keep_it_in_it_is_compiled_and_said(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where a directory should be")
    with caplog.at_level(logging.WARNING):
        compiled("a kernel", (), "sm_90a")
    assert "is not kept" in caplog.text
    monkeypatch.setattr(cuda_source, "_cache", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    compiled("a kernel", (), "sm_90a")
    assert "no home directory" in caplog.text
    assert len(compiler.sources) == 2


def test_what_does_not_compile_is_not_kept(compiler: Compiler, tmp_path: Path) -> None:
    with pytest.raises(CudaError):
        compiled("a wrong kernel", (), "sm_90a")
    assert compiler.sources == [b"a wrong kernel"]
    assert not (tmp_path / "cache").exists()


def test_a_refused_call_names_the_status() -> None:
    assert checked((Status(0), 1, 2)) == (1, 2)
    assert checked((Status(0), 1)) == 1
    with pytest.raises(CudaError, match="Status: CUDA_ERROR_INVALID_VALUE"):
        checked((Status(1),))
