"""The indexer's ops and context."""

from kvsieve.compat.vortex.indexer.context import Context, ctx, get_ctx
from kvsieve.compat.vortex.indexer.elementwise import Abs, Add_Mul, Exp, Log, Relu, Sigmoid, Silu
from kvsieve.compat.vortex.indexer.elementwise_binary import (
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
from kvsieve.compat.vortex.indexer.kron import Kron
from kvsieve.compat.vortex.indexer.mask import MaskSlice
from kvsieve.compat.vortex.indexer.matmul import GeMM, GeMV
from kvsieve.compat.vortex.indexer.output_func import approxTopK, topK
from kvsieve.compat.vortex.indexer.reduce import L2Norm, Max, Mean, Min, Sum
from kvsieve.compat.vortex.indexer.reshape import Reshape
from kvsieve.compat.vortex.indexer.save_load import Load, Save
from kvsieve.compat.vortex.indexer.scan import Conv1d, Normalize, Softmax
from kvsieve.compat.vortex.indexer.transpose import Transpose

__all__ = [
    "Abs",
    "Add",
    "Add_Mul",
    "Context",
    "Conv1d",
    "Exp",
    "GeMM",
    "GeMV",
    "Kron",
    "L2Norm",
    "Load",
    "Log",
    "MaskSlice",
    "Max",
    "Maximum",
    "Mean",
    "Min",
    "Minimum",
    "Multiply",
    "Normalize",
    "Relu",
    "Reshape",
    "Save",
    "Sigmoid",
    "Silu",
    "Softmax",
    "Sum",
    "Transpose",
    "WhereEqual",
    "WhereGreater",
    "WhereGreaterEqual",
    "WhereLess",
    "WhereLessEqual",
    "WhereNotEqual",
    "approxTopK",
    "ctx",
    "get_ctx",
    "topK",
]
