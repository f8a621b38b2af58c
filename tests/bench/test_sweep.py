from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.report import report
from bench.sweep import attention, profile

WHERE = {"device": "NVIDIA H200", "commit": "0123456789abcdef", "clean": True}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    rows = [
        {"batch": batch, "context": context, "skew": skew, "floor": 10.0, "eager": 40.0}
        | {"split": 30.0, "one_chunk": 20.0 + batch, "tiles": 25.0, "tiles_error": 1e-3}
        for batch in (1, 64)
        for context in (512, 2048)
        for skew in (False, True)
    ]
    group = {"groups": 64, "samples": 8, "prefix": 1024, "suffix": 128}
    groups = [group | {"floor": 126.0, "eager": 380.0, "split": 350.0, "tiles": 367.0, "runs": 174.1}]
    path = tmp_path / "results" / "attention.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"kind": "attention"} | WHERE | {"rows": rows, "groups": groups}))
    return path


def test_the_fastest_way_of_each_shape_stands_out(sweep: Path, tmp_path: Path) -> None:
    text = attention(sweep, tmp_path / "figures")
    assert "NVIDIA H200, 0123456789" in text
    assert "| 1 x 512 | 10.0 | 30.0 | **21.0** | 40.0 | 25.0 |" in text
    assert "| 64 x 2,048, one row 32,768 | 10.0 | 30.0 | 84.0 | 40.0 | **25.0** |" in text
    assert "| 64 x 8, 1,024 + 128 | 126.0 | 350.0 | 367.0 | **174.1** |" in text
    assert (tmp_path / "figures" / "attention.png").read_bytes().startswith(b"\x89PNG")


def test_a_profile_names_the_parts_it_has(tmp_path: Path) -> None:
    point = {"kind": "decode", "rows": 64, "context": 768, "step_ms": 5.274, "attention": 2.007, "gaps": 0.225}
    mixed = {"kind": "mixed", "rows": 64, "context": 768, "prompt": 128, "step_ms": 6.5, "gaps": 1.25}
    path = tmp_path / "profile.json"
    path.write_text(
        json.dumps({"kind": "profile", "model": "qwen3-4b", "points": [point, mixed]} | WHERE | {"clean": False})
    )
    text = profile(path)
    assert "qwen3-4b on NVIDIA H200, 0123456789, not clean" in text
    assert "| step | whole | attention | gaps |" in text
    assert "| decode 64 x 768 | 5.274 | 2.007 | 0.225 |" in text
    assert "| mixed 64 x 768 + 128 | 6.500 |  | 1.250 |" in text


def test_the_report_puts_it_between_its_own_marks(sweep: Path, tmp_path: Path) -> None:
    page = tmp_path / "docs" / "performance.md"
    page.parent.mkdir()
    page.write_text(
        "a\n<!-- attention:begin -->\nold\n<!-- attention:end -->\n"
        "b\n<!-- profile:begin -->\nkept\n<!-- profile:end -->\n"
    )
    assert report(sweep.parent, tmp_path) == []
    text = page.read_text()
    assert "old" not in text
    assert "| 1 x 512 |" in text
    assert text.startswith("a\n")
    assert "\nb\n" in text
    assert "kept" in text
