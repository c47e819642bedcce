"""A layer over vLLM's cache for CUDA kernels, read and summarized in place. Nothing here needs vLLM."""

from __future__ import annotations

import torch

from kvsieve.errors import ConfigError
from kvsieve.integrations.vllm.cache import PagePool, token_major_pages
from kvsieve.integrations.vllm.flowlayer import FlowLayer
from kvsieve.integrations.vllm.plan import Decoding
from kvsieve.integrations.vllm.planner import Step


class TokenMajorLayer(FlowLayer):
    """Runs the flow's part of a step; vLLM has stored the step's tokens, and attends the other rows."""

    def _new_pool(self, kv_cache: torch.Tensor) -> PagePool:
        page_size = self.engine.settings.page_size
        try:
            k, v = token_major_pages(kv_cache, page_size)
        except (ValueError, RuntimeError):
            raise ConfigError(
                f"kvsieve: expected blocks whose pages of {page_size} tokens follow each other in memory, received a "
                f"KV cache {list(kv_cache.shape)} with strides {list(kv_cache.stride())}; set VLLM_KV_CACHE_LAYOUT=NHD "
                f"or --block-size {page_size}"
            ) from None
        with torch.inference_mode(False):
            self._nothing = torch.zeros((), dtype=kv_cache.dtype, device=kv_cache.device)
        return PagePool(k, v, self.graphs.summary_fields, self.graphs.state_fields, self.state_rows)

    def prepare_step(self, kv_cache: torch.Tensor, step: Step, q: torch.Tensor) -> PagePool:
        """What comes before attention: summaries of pages that are full now, state, prompt queries q [T, Hq, D]."""
        pool = self.pool(kv_cache)
        self.begin(pool, step.filled, step.entered)
        if step.mass is not None:
            self.count_prompts(pool, step.mass, q.unflatten(1, (self.num_kv_heads, -1)))
        return pool

    def decode_step(self, pool: PagePool, step: Step, name: str, q: torch.Tensor, out: torch.Tensor) -> None:
        """Attend the rows that the flow decides: q, out [T, Hq, D]; rows that are not there become 0."""
        rows = step.decoding
        if rows is None:
            return
        asked = (q if rows.tokens is None else q[rows.tokens]).unflatten(1, (self.num_kv_heads, -1))
        values = self.decode(pool, rows, asked, step.mass, step.audited == name)
        if rows.tokens is not None:
            out[rows.tokens] = values
        elif isinstance(rows, Decoding):
            out.copy_(values)
        else:
            torch.where(rows.there[:, None, None], values, self._nothing, out=out)
