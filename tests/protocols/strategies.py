"""Hypothesis strategies for every message, derived from the models themselves.

A field added to a model is drawn without a change here; only the rules that tie fields together are written out.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pydantic import StringConstraints
from pydantic.fields import FieldInfo

from protocols import (
    STATUS_OF,
    Chunk,
    CommitWeightsRequest,
    Continue,
    Environment,
    Failure,
    Group,
    Partial,
    Record,
    Sampling,
    Score,
    Segment,
    SubmitBatch,
    Template,
    Turn,
    TurnDone,
    Value,
)
from protocols.base import ArraySpec
from protocols.opaque import OpaqueSpec

V = TypeVar("V", bound=Value)
Draw = Callable[[st.SearchStrategy[Any]], Any]

LONGEST = 6
FINITE = st.floats(-1e6, 1e6, width=32)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
OPAQUE = st.dictionaries(st.text(max_size=8), PLAIN, max_size=3)


def value(model: type[V]) -> st.SearchStrategy[V]:
    """Any valid instance of a model."""
    if model in _RULES:
        return _RULES[model](model)
    return st.builds(model, **_fields(model))


def _fields(model: type[Value], *without: str) -> dict[str, st.SearchStrategy[Any]]:
    return {
        name: _annotated(info.annotation, tuple(info.metadata))
        for name, info in model.model_fields.items()
        if name not in without
    }


def _annotated(annotation: Any, metadata: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _annotated(arguments[0], (*arguments[1:], *metadata))
    bounds: dict[str, Any] = {}
    for mark in metadata:
        if isinstance(mark, ArraySpec):
            return arrays(mark.dtype.str, st.integers(0, LONGEST), ndim=mark.ndim)
        if isinstance(mark, OpaqueSpec):
            return OPAQUE
        _read_bounds(mark, bounds)
    if origin in (Union, types.UnionType):
        return st.one_of([_annotated(argument, metadata) for argument in arguments])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        return st.lists(
            _annotated(arguments[0], ()),
            min_size=bounds.get("min_length", 0),
            max_size=min(bounds.get("max_length", 3), 3),
            unique=get_origin(arguments[0]) is Literal,
        ).map(tuple)
    if origin is dict:
        return st.dictionaries(_annotated(arguments[0], ()), _annotated(arguments[1], ()), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, Value):
        return value(annotation)
    return _scalar(annotation, bounds)


def _read_bounds(mark: Any, bounds: dict[str, Any]) -> None:
    if isinstance(mark, FieldInfo):
        for inner in mark.metadata:
            _read_bounds(inner, bounds)
    for kind, name in ((Ge, "ge"), (Gt, "gt"), (Le, "le"), (Lt, "lt"), (MinLen, "min_length"), (MaxLen, "max_length")):
        if isinstance(mark, kind):
            bounds[name] = getattr(mark, name)
    if isinstance(mark, StringConstraints):
        bounds |= {"min_length": mark.min_length or 0, "max_length": mark.max_length}


def _scalar(annotation: Any, bounds: dict[str, Any]) -> st.SearchStrategy[Any]:
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(bounds.get("ge", bounds.get("gt", -1) + 1), bounds.get("le", bounds.get("lt", 2**63) - 1))
    if annotation is float:
        return st.floats(
            bounds.get("ge", bounds.get("gt", -1e9)),
            bounds.get("le", 1e9),
            exclude_min="gt" in bounds,
            allow_nan=False,
        )
    if annotation is str:
        return st.text(min_size=bounds.get("min_length", 0), max_size=min(bounds.get("max_length") or 12, 12))
    if annotation is types.NoneType:
        return st.none()
    raise NotImplementedError(f"no strategy for {annotation}")


def arrays(
    dtype: str, length: st.SearchStrategy[int] | int, *, ndim: int = 1, finite: bool = False
) -> st.SearchStrategy[np.ndarray]:
    """Arrays of one dtype, NaN and infinities included unless finite."""
    lengths = st.just(length) if isinstance(length, int) else length
    elements = {"allow_nan": False, "allow_infinity": False} if finite else None
    shape = st.tuples(lengths, *[st.integers(0, 3)] * (ndim - 1))
    return shape.flatmap(lambda extents: npst.arrays(np.dtype(dtype), extents, elements=elements))


def _build(model: type[Value], *tied: str) -> Callable[[Callable[[Draw], dict[str, Any]]], None]:
    """Register how the tied fields of a model are drawn together; the others are drawn one by one."""

    def register(rule: Callable[[Draw], dict[str, Any]]) -> None:
        @st.composite
        def instance(draw: Draw) -> Value:
            chosen = rule(draw)
            for name, strategy in _fields(model, *tied).items():
                chosen.setdefault(name, draw(strategy))
            return model(**chosen)

        _RULES[model] = lambda _: instance()

    return register


_RULES: dict[type[Value], Callable[[type[Any]], st.SearchStrategy[Any]]] = {}


@_build(Sampling, "bias_ids", "bias_values")
def _sampling(draw: Draw) -> dict[str, Any]:
    if not draw(st.booleans()):
        return {}
    count = draw(st.integers(0, LONGEST))
    return {"bias_ids": draw(arrays("<i4", count)), "bias_values": draw(arrays("<f4", count, finite=True))}


@_build(Environment, "name", "script")
def _environment(draw: Draw) -> dict[str, Any]:
    script = draw(_fields(Environment)["script"])
    return {"script": script, "name": "scripted" if script else draw(st.sampled_from(["scripted", "remote", "x"]))}


@_build(Group, "prompt", "prompt_source", "messages", "tools", "template", "trajectory_ids", "sample_indices")
def _group(draw: Draw) -> dict[str, Any]:
    length = draw(st.integers(1, LONGEST))
    ids = draw(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=3, unique=True))
    indices = st.lists(st.integers(0, 2**32 - 1), min_size=len(ids), max_size=len(ids), unique=True)
    prompt = {
        "prompt": draw(arrays("<i4", length)),
        "prompt_source": draw(st.none() | npst.arrays(np.uint8, length, elements=st.integers(0, 4))),
    }
    chat = {
        "messages": draw(st.lists(OPAQUE, min_size=1, max_size=3)),
        "tools": draw(st.lists(OPAQUE, max_size=2)),
        "template": draw(value(Template)),
    }
    return (chat if draw(st.booleans()) else prompt) | {
        "trajectory_ids": ids,
        "sample_indices": draw(st.none() | indices),
    }


@_build(SubmitBatch, "groups", "groups_needed", "resume")
def _submit(draw: Draw) -> dict[str, Any]:
    groups = draw(
        st.lists(
            value(Group),
            min_size=1,
            max_size=2,
            unique_by=(lambda group: group.id, lambda group: group.trajectory_ids[0]),
        )
    )
    seen: set[str] = set()
    distinct = [g for g in groups if seen.isdisjoint(g.trajectory_ids) and not seen.update(g.trajectory_ids)]
    return {
        "groups": distinct,
        "groups_needed": draw(st.none() | st.integers(0, len(distinct))),
        "resume": draw(st.lists(st.text(min_size=1, max_size=6), max_size=2, unique=True)),
    }


@_build(Continue, "done", "glue", "observation", "max_tokens", "reward", "rewards")
def _continue(draw: Draw) -> dict[str, Any]:
    if draw(st.booleans()):
        return {"done": True} | {name: draw(_fields(Continue)[name]) for name in ("reward", "rewards")}
    return {"done": False} | {name: draw(_fields(Continue)[name]) for name in ("glue", "observation", "max_tokens")}


@_build(CommitWeightsRequest, "mode", "drain_timeout_s")
def _commit(draw: Draw) -> dict[str, Any]:
    mode = draw(_fields(CommitWeightsRequest)["mode"])
    timeout = st.floats(0.1, 1e6)
    return {"mode": mode, "drain_timeout_s": draw(timeout if mode == "drain" else st.none() | timeout)}


@_build(Score, "sequences", "sampled")
def _score(draw: Draw) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=3))
    sampled = tuple(draw(npst.arrays(np.uint8, length, elements=st.integers(0, 1))) for length in lengths)
    sequences = tuple(draw(arrays("<i4", length)) for length in lengths)
    return {"sequences": sequences, "sampled": draw(st.sampled_from([None, sampled]))}


@_build(TurnDone, "turn", "token_ids", "logprobs")
def _turn_done(draw: Draw) -> dict[str, Any]:
    length = draw(st.integers(0, LONGEST))
    turn = draw(value(Turn)).model_copy(update={"length": length})
    return {
        "turn": turn,
        "token_ids": draw(arrays("<i4", length)),
        "logprobs": draw(arrays("<f4", length, finite=True)),
    }


@_build(Segment, *Segment.model_fields)
def _segment(draw: Draw) -> dict[str, Any]:
    length = draw(st.integers(0, LONGEST))
    source = draw(npst.arrays(np.uint8, length, elements=st.integers(0, 4)))
    sampled = int((source == 1).sum())
    first = draw(st.integers(0, sampled))
    runs = np.array([[draw(st.integers(-3, 3)), first], [7, sampled - first]], np.int64)
    width = draw(st.integers(0, 3))
    top = draw(st.booleans())
    modes = draw(st.lists(st.sampled_from(["temperature", "raw"]), unique=True))
    return {
        "token_ids": draw(arrays("<i4", length)),
        "source": source,
        "logprobs": np.where(source == 1, draw(arrays("<f4", length, finite=True)), np.float32(0)),
        "loss_mask": (source == 1).astype(np.uint8) * draw(st.integers(0, 1)),
        "weight_versions": runs,
        "kv_versions": runs[::-1],
        "turns": tuple(
            draw(value(Turn)).model_copy(update={"start": start, "length": length - start})
            for start in draw(st.lists(st.integers(0, length), max_size=2))
        ),
        "more_logprobs": {mode: draw(arrays("<f4", length)) for mode in modes},
        "prompt_logprobs": draw(st.none() | arrays("<f4", st.integers(0, length))),
        "top_ids": draw(npst.arrays(np.int32, (sampled, width))) if top else None,
        "top_logprobs": draw(npst.arrays(np.float32, (sampled, width))) if top else None,
    }


@_build(Record, "status", "finish_reason", "segments", "error", "partial")
def _record(draw: Draw) -> dict[str, Any]:
    reason = draw(_fields(Record)["finish_reason"])
    segments = draw(st.lists(value(Segment), min_size=1, max_size=2))
    failed = STATUS_OF[reason] == "failed"
    if failed:
        segments = [one.model_copy(update={"loss_mask": np.zeros_like(one.loss_mask)}) for one in segments]
    return {
        "finish_reason": reason,
        "status": STATUS_OF[reason],
        "segments": segments,
        "error": draw(value(Failure) if failed else st.none()),
        "partial": draw(value(Partial)) if STATUS_OF[reason] == "aborted" else None,
    }


@_build(Chunk, "data")
def _chunk(draw: Draw) -> dict[str, Any]:
    return {"data": tuple(draw(st.lists(arrays("|u1", st.integers(0, 9)), min_size=1, max_size=3)))}
