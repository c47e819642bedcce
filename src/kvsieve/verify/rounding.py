"""How far rounding may carry a result: bounds derived from the data, by Monte Carlo arithmetic.

A computation in a format with unit roundoff ``u`` is repeated in float64 while every operation's result is multiplied
by ``1 + u * xi``, ``xi`` normal (D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997). The spread of the
repetitions is the standard deviation of the rounding error for these very data: condition and length are in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from kvsieve.dtypes import default_dtype
from kvsieve.ops import op_name
from kvsieve.segment import SegmentGraph

F64 = torch.float64
SAMPLES = 32
SIGMAS = 8.0
"""A bound is so many standard deviations: with 32 samples the deviation itself is known to an eighth."""
FLAT = 168.0
"""``FLAT * 2**-24`` is 1e-5: what an implementation may err by, relative to the largest value, without derivation."""
UNDERFLOW = 2.0**-106
"""What float32 may lose below its smallest normal number, 2**-126, times a large factor met on the way."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops that pick or move values and round nothing.
EXACT = _names(
    "reshape view _unsafe_view flatten unflatten squeeze unsqueeze permute transpose swapaxes swapdims movedim "
    "moveaxis t numpy_T mT expand expand_as broadcast_to slice select narrow index_select index gather cat "
    "concat concatenate stack split split_with_sizes chunk unbind maximum minimum fmax fmin neg abs amax amin "
    "max min sort topk median flip where masked_fill relu clamp clamp_min clamp_max sign sgn clone contiguous "
    "detach alias lift_fresh_copy full zeros ones new_full new_zeros new_ones full_like zeros_like ones_like "
    "scalar_tensor arange max_pool1d_same floor ceil round trunc frac pad constant_pad_nd"
)
# Ops that add up many products or terms: their operands are perturbed too, so that a cancelling sum keeps its error.
SUMS = _names(
    "sum mean var std cumsum cumprod prod softmax _softmax log_softmax _log_softmax logsumexp linalg_vector_norm "
    "matmul mm bmm mv dot linear einsum conv1d avg_pool1d layer_norm"
)
# Of these, what kernels may add up on tensor cores; ``sum``, for it may be one of products.
CONTRACTIONS = _names("sum matmul mm bmm mv dot linear einsum")
LOGS = frozenset(("logsumexp", "log_softmax", "_log_softmax"))


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the spacing of numbers at 1: the largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


class NoisyArithmetic:
    """Multiplies values by ``1 + u * xi``; with ``u = 0`` it is exact arithmetic.

    ``tensor_cores``: products may be added up there. They cut each one off at the last bit of the largest partial sum
    where others round (M. Fasi et al., Numerical behavior of NVIDIA tensor cores, PeerJ Computer Science 7:e330, 2021):
    errors of one sign, so that they grow with the number of terms instead of its root.
    """

    def __init__(self, u: float, tensor_cores: bool = False) -> None:
        self.u, self.tensor_cores = u, tensor_cores

    def __call__(self, x: torch.Tensor, times: float = 1.0) -> torch.Tensor:
        if not self.u or not x.is_floating_point():
            return x
        return x * (1 + times * self.u * torch.randn(x.shape, dtype=F64))

    def cut_off(self, x: torch.Tensor, terms: int, size: torch.Tensor) -> torch.Tensor:
        """A sum of so many products on tensor cores; ``size``: that of their absolute values."""
        if not self.u or not self.tensor_cores:
            return x
        return x + self.u * terms / SIGMAS * size * torch.randn(x.shape, dtype=F64)

    def known_to(self, x: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor:
        """A value that is known up to an absolute deviation."""
        return x + deviation * torch.randn(x.shape, dtype=F64) if self.u else x

    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        """The error of a logarithm whose argument was rounded: absolute, not relative."""
        return x + self.u * torch.randn(x.shape, dtype=F64) if self.u else x


def spread(
    compute: Callable[[NoisyArithmetic], dict[str, torch.Tensor]], u: float, sharp: bool = True
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Exact values and rounding bounds of a computation's named results.

    Args:
        compute: runs in float64 with the given arithmetic.
        u: unit roundoff of the format that is judged.
        sharp: derive the bound from the data; else ``FLAT * u`` of the largest value, ten times as fast.

    Returns:
        values and bounds by name; a bound is ``SIGMAS`` deviations plus one rounding of the value.
    """
    exact = compute(NoisyArithmetic(0.0))
    if not sharp:
        return exact, {name: _flat(value, u) for name, value in exact.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a bound is the same in every run
        noisy = _repeated(lambda: compute(NoisyArithmetic(u)))
    bounds = {}
    for name, value in exact.items():
        error = torch.nan_to_num((noisy[name] - value).to(F64), nan=0.0, posinf=0.0, neginf=0.0)
        rounding = UNDERFLOW + u * torch.nan_to_num(value.to(F64).abs(), posinf=0.0)
        bounds[name] = SIGMAS * torch.sqrt((error**2).mean(0)) + rounding
    return exact, bounds


def _flat(value: torch.Tensor, u: float) -> torch.Tensor:
    largest = torch.nan_to_num(value.to(F64).abs(), nan=0.0, posinf=0.0).amax() if value.numel() else 0.0
    return torch.full(value.shape, float(largest), dtype=F64) * FLAT * u + UNDERFLOW


def growth(terms: int) -> float:
    """How many times a single rounding's error a term of a sum may carry: partial sums of many terms grow."""
    return 2 + math.log2(max(16, terms) / 16) / 4


def _repeated(run: Callable[[], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """``SAMPLES`` noisy runs side by side: ``[SAMPLES, *shape]`` a name."""
    anchor = torch.zeros(SAMPLES, dtype=F64)
    try:
        # Adding the anchor makes every result depend on the mapped axis, constants included.
        mapped = torch.func.vmap(
            lambda zero: {name: value.to(F64) + zero for name, value in run().items()}, randomness="different"
        )
        return dict(mapped(anchor))
    except RuntimeError:  # an op without a batching rule
        runs = [run() for _ in range(SAMPLES)]
        return {name: torch.stack([one[name] for one in runs]) for name in runs[0]}


def graph_spread(
    graph: SegmentGraph,
    inputs: Mapping[str, torch.Tensor],
    u: float = 2.0**-24,
    sharp: bool = True,
    deviations: Mapping[str, torch.Tensor] | None = None,
    tensor_cores: bool = False,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values and rounding bounds of a traced flow method on float64 inputs of one segment.

    ``deviations``: standard deviations of inputs that are themselves known up to rounding only. ``tensor_cores``: as
    in :class:`NoisyArithmetic`.
    """

    def run(arithmetic: NoisyArithmetic) -> dict[str, torch.Tensor]:
        uncertain = {name: arithmetic.known_to(inputs[name], sigma) for name, sigma in (deviations or {}).items()}
        return run_graph(graph, {**inputs, **uncertain}, NoisyArithmetic(arithmetic.u, tensor_cores))

    return spread(run, u, sharp)


def run_graph(
    graph: SegmentGraph, inputs: Mapping[str, torch.Tensor], arithmetic: NoisyArithmetic
) -> dict[str, torch.Tensor]:
    """Run a one-segment graph in float64, each op's result passed through ``arithmetic``."""
    values: dict[fx.Node, Any] = {node: inputs[name] for name, node in graph.trace.inputs.items() if name in inputs}
    for node, constant in graph.trace.constants.items():
        values[node] = constant.to(F64) if constant.is_floating_point() else constant
    with default_dtype(F64):  # what the graph makes, and what it promotes integers to, is exact like all else
        for node in graph.nodes:
            if node.op == "call_function":
                values[node] = _run_node(node, values, arithmetic)
    return {name: values[node] for name, node in graph.outputs.items()}


def _run_node(node: fx.Node, values: Mapping[fx.Node, Any], arithmetic: NoisyArithmetic) -> Any:
    """An op's result: operands of sums err as much as partial sums may, then the result once more."""
    name = op_name(node.target)
    noisy = name in SUMS

    def swap(argument: Any) -> Any:
        value = values[argument] if isinstance(argument, fx.Node) else _widen(argument)
        if noisy and isinstance(value, torch.Tensor):
            return arithmetic(value, growth(max(value.shape, default=1)))
        return value

    args, kwargs = fx.node.map_aggregate(node.args, swap), fx.node.map_aggregate(node.kwargs, swap)
    result = node.target(*args, **kwargs)  # type: ignore[operator]
    if name in CONTRACTIONS and arithmetic.tensor_cores and result.is_floating_point():
        result = _cut_off(node, args, kwargs, result, arithmetic)
    if name is None or name in EXACT or not isinstance(result, torch.Tensor):
        return result
    return arithmetic.shifted(arithmetic(result)) if name in LOGS else arithmetic(result)


def _cut_off(node: fx.Node, args: Any, kwargs: Any, result: torch.Tensor, arithmetic: NoisyArithmetic) -> torch.Tensor:
    """A contraction's result as tensor cores may have it; of absolute values it tells the size of its terms."""
    operands: list[torch.Tensor] = []

    def absolute(argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        operands.append(argument.abs())
        return operands[-1]

    size = node.target(*fx.node.map_aggregate(args, absolute), **fx.node.map_aggregate(kwargs, absolute))  # type: ignore[operator]
    return arithmetic.cut_off(result, _terms(op_name(node.target), operands, result), size)


def _terms(name: str | None, operands: list[torch.Tensor], result: torch.Tensor) -> int:
    """Terms that a contraction adds up for each value of its result, at most."""
    if name == "sum":
        return operands[0].numel() // max(1, result.numel())
    if name == "einsum":
        return max(max(operand.shape, default=1) for operand in operands)
    return operands[0].shape[-1]


def _widen(argument: Any) -> Any:
    """float32 asked for by the graph is float64 here."""
    return F64 if argument is torch.float32 else argument


def noisy_logits(
    arithmetic: NoisyArithmetic, q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None
) -> torch.Tensor:
    """Logits [..., T] of q [..., D] over k [T, D]: scaled, soft-capped.

    Partial sums of a large product grow to it: D roundings of them, each with a deviation of ``u / sqrt(3)`` of its
    partial sum, have one of ``sqrt(D) / 3 * u`` of the product.
    """
    partial_sums = max(1.0, math.sqrt(q.shape[-1]) / 3)
    logits = arithmetic(arithmetic(q, 2.0) @ arithmetic(k, 2.0).T * scale, partial_sums)
    return logits if softcap is None else arithmetic(softcap * arithmetic(torch.tanh(logits / softcap)))


def attention_spread(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    u: float = 2.0**-24,
    sharp: bool = True,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Values and rounding bounds of ``out [n, G, Dv]`` and ``lse [n, G]``.

    Float64 q [n, G, D] over k [T, D], v [T, Dv], row ``i`` seeing the tokens of ``mask [n, T]``.
    """
    tokens = growth(k.shape[0])
    hidden = torch.where(mask, 0.0, -torch.inf)[:, None]

    def attend(arithmetic: NoisyArithmetic) -> dict[str, torch.Tensor]:
        logits = noisy_logits(arithmetic, q, k, scale, softcap) + hidden
        lse = torch.logsumexp(logits, -1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks)
        lse = arithmetic.shifted(arithmetic(lse))
        weights = arithmetic(torch.exp(logits - lse[..., None]), 2.0)  # vectorised exp is good to an ulp or two
        return {"out": arithmetic(weights @ arithmetic(v, tokens)), "lse": lse}

    exact, bounds = spread(attend, u, sharp)
    # The columns of V err alike: their common deviation steadies what few samples say of each.
    common = torch.sqrt((bounds["out"] ** 2).mean(-1, keepdim=True))
    return exact, {**bounds, "out": torch.maximum(bounds["out"], 0.7 * common)}
