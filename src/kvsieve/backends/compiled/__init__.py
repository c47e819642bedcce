"""The compiled backend: torch.compile for what a flow computes, small C++ kernels for what every step does on a CPU."""

from kvsieve.backends.compiled.backend import CompiledBackend

__all__ = ["CompiledBackend"]
