"""What vortex_torch's compiled extension ``vortex_torch_C`` offers, in plain torch."""

from kvsieve.compat.vortex.core.topk import topk_output
from kvsieve.compat.vortex.indexer.utils_sglang import sglang_plan_decode, sglang_plan_prefill

__all__ = ["sglang_plan_decode", "sglang_plan_prefill", "topk_output"]
