"""Formats, tensors, and the bases of contexts and ops."""

from kvsieve.compat.vortex.abs.context_base import ContextBase
from kvsieve.compat.vortex.abs.op import vOp
from kvsieve.compat.vortex.abs.tensor import FORMAT, as_vtensor, vTensor

__all__ = ["ContextBase", "FORMAT", "as_vtensor", "vOp", "vTensor"]
