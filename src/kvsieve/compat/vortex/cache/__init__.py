"""The cache side's ops and context: what happens when a page is complete."""

from kvsieve.compat.vortex.cache.context import Context
from kvsieve.compat.vortex.cache.elementwise import Abs, Add_Mul, Exp, Log, Relu, Sigmoid, Silu
from kvsieve.compat.vortex.cache.elementwise_binary import (
    Add,
    Maximum,
    Minimum,
    Multiply,
    WhereEqual,
    WhereGreater,
    WhereGreaterEqual,
    WhereLess,
    WhereLessEqual,
    WhereNotEqual,
)
from kvsieve.compat.vortex.cache.fill import Fill
from kvsieve.compat.vortex.cache.mask import MaskSlice
from kvsieve.compat.vortex.cache.matmul import GeMM
from kvsieve.compat.vortex.cache.reduce import L2Norm, Max, Mean, Min, Sum
from kvsieve.compat.vortex.cache.reduce_interleave import (
    L2NormInterleave,
    MaxInterleave,
    MeanInterleave,
    MinInterleave,
)
from kvsieve.compat.vortex.cache.reshape import Reshape
from kvsieve.compat.vortex.cache.triton_kernels.set_kv import set_kv_buffer_launcher

__all__ = [
    "Abs",
    "Add",
    "Add_Mul",
    "Context",
    "Exp",
    "Fill",
    "GeMM",
    "L2Norm",
    "L2NormInterleave",
    "Log",
    "MaskSlice",
    "Max",
    "MaxInterleave",
    "Maximum",
    "Mean",
    "MeanInterleave",
    "Min",
    "MinInterleave",
    "Minimum",
    "Multiply",
    "Relu",
    "Reshape",
    "Sigmoid",
    "Silu",
    "Sum",
    "WhereEqual",
    "WhereGreater",
    "WhereGreaterEqual",
    "WhereLess",
    "WhereLessEqual",
    "WhereNotEqual",
    "set_kv_buffer_launcher",
]
