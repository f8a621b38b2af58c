"""Prefill attention through FlashInfer's paged wrappers. The only file that imports FlashInfer.

Wrappers take turns: `plan()` writes a pinned buffer of the wrapper's own and starts a copy from it, and by the time a
wrapper is planned again, the step that used it was waited for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from engine.attention.prefill_backend import Backend, choose_backend
from engine.config import BLOCK_SIZE
from engine.memory.memory import Memory
from engine.model.config import ModelConfig
from engine.request import IntArray

WORKSPACE_BYTES = 256 * 2**20
FA3_HEAD_DIM = 128


class PagedPrefill:
    """Causal attention of prefill chunks over their paged context. On Hopper for head_dim 128 the faster of FA3 and
    FA2, else FA2."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, memory: Memory, turns: int) -> None:
        """turns: steps that may be launched and not yet waited for. Compiles what is not compiled."""
        hopper = torch.cuda.get_device_capability(memory.device)[0] == 9
        backends: tuple[Backend, ...] = ("fa2", "fa3") if hopper and config.head_dim == FA3_HEAD_DIM else ("fa2",)
        workspace = memory.allocate(WORKSPACE_BYTES, "attention workspace")
        workspace.zero_()
        self._wrappers = {
            backend: [BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend) for _ in range(turns)]
            for backend in backends
        }
        self._shape: dict[str, Any] = {
            "num_qo_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim_qk": config.head_dim,
            "page_size": BLOCK_SIZE,
            "causal": True,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        self._turn = 0
        one, block = np.ones(1, np.int32), torch.zeros(1, dtype=torch.int32, device=memory.device)
        for backend in backends:
            self._plan(backend, one, one, np.array([0, 1], np.int32), block)

    def plan(
        self, query_lens: IntArray, kv_lens: IntArray, block_indptr: IntArray, block_ids: Tensor
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        """query_lens, kv_lens: int32[P], of the prefill rows; block_indptr: int32[P + 1], from 0; block_ids: int32[N]
        on the device. Returns the wrapper to `run(q, (keys, values), out=...)` with in every layer."""
        heads = self._shape["num_qo_heads"], self._shape["num_kv_heads"]
        backend = choose_backend(query_lens, kv_lens, *heads) if "fa3" in self._wrappers else "fa2"
        return self._plan(backend, query_lens, kv_lens, block_indptr, block_ids)

    def _plan(
        self, backend: Backend, query_lens: IntArray, kv_lens: IntArray, block_indptr: IntArray, block_ids: Tensor
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        wrapper = self._wrappers[backend][self._turn]
        self._turn = (self._turn + 1) % len(self._wrappers[backend])
        query_indptr = np.zeros(len(query_lens) + 1, np.int32)
        np.cumsum(query_lens, out=query_indptr[1:])
        last_page = (kv_lens - 1) % BLOCK_SIZE + 1
        host = [torch.from_numpy(array) for array in (query_indptr, block_indptr, last_page)]
        wrapper.plan(host[0], host[1], block_ids, host[2], **self._shape)
        return wrapper
