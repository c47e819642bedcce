"""Where Triton kernels run in tests: on a GPU, or on the CPU in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from kvsieve.backends.triton.launch import INTERPRETED

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
NEEDS_GPU_OR_INTERPRETER = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)
