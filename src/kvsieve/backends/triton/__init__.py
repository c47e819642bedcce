"""The Triton backend: decode steps on a CUDA GPU, near the speed of its memory."""

from kvsieve.backends.triton.backend import TritonBackend

__all__ = ["TritonBackend"]
