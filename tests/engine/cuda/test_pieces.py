from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from engine.cuda.pieces import Pieces

LAYERS, TOKENS, HEADS, DIM = 3, 8, 2, 4


class Events:
    """Stands for graphs and for attention, and notes what comes when."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def graph(self, place: int) -> SimpleNamespace:
        return SimpleNamespace(replay=lambda: self.seen.append(("piece", place)))

    def write(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        self.seen.append(("attention", int(keys)))
        out.copy_(q + values)


@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
def test_every_layer_attends_between_its_pieces_and_padding_does_not(tokens: int) -> None:
    events = Events()
    queries = tuple(torch.full((TOKENS, HEADS, DIM), 10.0 * layer) for layer in range(LAYERS))
    attended, residual = torch.full((TOKENS, HEADS * DIM), -1.0), torch.arange(2 * TOKENS).view(TOKENS, 2)
    graphs = tuple(events.graph(place) for place in range(LAYERS + 1))
    pieces = Pieces(graphs, queries, attended, residual)  # type: ignore[arg-type]
    kv = SimpleNamespace(keys=torch.arange(LAYERS), values=torch.arange(LAYERS) + 0.5)
    found = pieces.run(tokens, events, kv)  # type: ignore[arg-type]
    between = [event for layer in range(LAYERS) for event in (("piece", layer), ("attention", layer))]
    assert events.seen == [*between, ("piece", LAYERS)]
    assert found.tolist() == residual[:tokens].tolist()
    assert (attended[:tokens] == 10 * (LAYERS - 1) + LAYERS - 0.5).all()  # the last layer's
    assert (attended[tokens:] == -1).all()
