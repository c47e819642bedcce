"""Rows of elementwise ops: what they print, and their own rounding error (u = 2**-24)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvsieve.backends.triton.generate.call import Call, Row
from kvsieve.backends.triton.generate.ir import Op

EXACT, ONE, FEW = "none", "u", "a few u"

_UNARY = {  # float in, float out
    "exp": ("f.exp({0})", FEW),
    "exp2": ("tl.exp2({0})", FEW),
    "expm1": ("f.expm1({0})", FEW),
    "log": ("tl.log({0})", FEW),
    "log2": ("tl.log2({0})", FEW),
    "log10": ("f.log10({0})", FEW),
    "log1p": ("f.log1p({0})", FEW),
    "sqrt": ("tl.sqrt({0})", FEW),
    "rsqrt": ("(1.0 / tl.sqrt({0}))", FEW),
    "reciprocal": ("(1.0 / {0})", FEW),
    "sigmoid": ("f.sigmoid({0})", FEW),
    "log_sigmoid": ("(tl.minimum({0}, 0.0) - f.log1p(f.exp(-tl.abs({0}))))", FEW),
    "tanh": ("f.tanh({0})", FEW),
    "sin": ("tl.sin({0})", FEW),
    "cos": ("tl.cos({0})", FEW),
    "tan": ("f.tan({0})", FEW),
    "asin": ("f.asin({0})", FEW),
    "acos": ("f.acos({0})", FEW),
    "atan": ("f.atan({0})", FEW),
    "sinh": ("f.sinh({0})", FEW),
    "cosh": ("f.cosh({0})", FEW),
    "asinh": ("f.asinh({0})", FEW),
    "acosh": ("f.acosh({0})", FEW),
    "atanh": ("f.atanh({0})", FEW),
    "erf": ("tl.erf({0})", FEW),
    "erfc": ("f.erfc({0})", "u of 1 where the interpreter runs it, a few u of the result on a GPU"),
    "silu": ("({0} * f.sigmoid({0}))", FEW),
    "frac": ("({0} - f.trunc({0}))", EXACT),
}
_ANY = {  # the dtype stays
    "neg": ("(-{0})", EXACT),
    "abs": ("tl.abs({0})", EXACT),
    "square": ("({0} * {0})", ONE),
}
_ROUNDED = {"floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "round": "f.round({0})", "trunc": "f.trunc({0})"}
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL = {
    "logical_and": "({0} & {1})",
    "logical_or": "({0} | {1})",
    "logical_xor": "({0} != {1})",
    "logical_not": "(~{0})",
}
_BITS = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "__and__": "&", "__or__": "|", "__xor__": "^"}
_BINARY = {  # floats; the dtype of the result
    "atan2": ("f.atan2({0}, {1})", FEW),
    "hypot": ("f.hypot({0}, {1})", FEW),
    "copysign": ("f.copysign({0}, {1})", EXACT),
    "xlogy": ("f.xlogy({0}, {1})", FEW),
}


def _text(text: str, *names: str) -> Callable[[Call], Op]:
    """Operands cast to the dtype of the result."""

    def build(call: Call) -> Op:
        operands = [call.builder.cast(call.op(name), call.dtype) for name in names]
        return call.builder.map(text, *operands, dtype=call.dtype)

    return build


def _second(call: Call, name: str = "other") -> tuple[Op, Op]:
    return tuple(call.builder.cast(call.op(one), call.dtype) for one in ("self", name))  # type: ignore[return-value]


def _add(call: Call) -> Op:
    b = call.builder
    x, y = _second(call)
    if call.dtype is torch.bool:
        return b.map("({0} | {1})", x, y)
    if call.name == "rsub":
        x, y = y, x
    sign = "+" if call.name == "add" else "-"
    alpha = call.arguments["alpha"]
    if alpha == 1:
        return b.map(f"({{0}} {sign} {{1}})", x, y)
    return b.map(f"({{0}} {sign} {{2}} * {{1}})", x, y, b.number(alpha, call.dtype))


def _mul(call: Call) -> Op:
    x, y = _second(call)
    return call.builder.map("({0} & {1})" if call.dtype is torch.bool else "({0} * {1})", x, y)


def _div(call: Call) -> Op:
    b = call.builder
    x, y = _second(call)
    mode = "floor" if call.name == "floor_divide" else call.arguments.get("rounding_mode")
    if call.dtype.is_floating_point:
        text = {None: "({0} / {1})", "floor": "tl.floor({0} / {1})", "trunc": "f.trunc({0} / {1})"}[mode]
        return b.map(text, x, y)
    return b.map("f.floor_div({0}, {1})" if mode == "floor" else "f.trunc_div({0}, {1})", x, y)


def _remainder(call: Call) -> Op:
    function = call.name if call.dtype.is_floating_point else f"int_{call.name}"
    return call.builder.map(f"f.{function}({{0}}, {{1}})", *_second(call))


def _pow(call: Call) -> Op:
    b, exponent = call.builder, call.arguments["exponent"]
    if isinstance(exponent, (int, float)) and 0 < exponent <= 8 and exponent == int(exponent):
        x = b.cast(call.op("self"), call.dtype)
        return b.map("({0} * {0})" if exponent == 2 else f"f.int_pow({{0}}, {int(exponent)})", x)
    if not call.dtype.is_floating_point:
        raise call.refuse("an integer power with a computed or large exponent")
    if exponent == 0.5:
        return b.map("tl.sqrt({0})", b.cast(call.op("self"), call.dtype))
    base, power = (b.cast(call.op(name), call.dtype) for name in ("self", "exponent"))
    return b.map("f.pow({0}, {1})", base, power)


def _extreme(call: Call) -> Op:
    b = call.builder
    x, y = _second(call)
    kind = "max" if "max" in call.name else "min"
    if call.dtype is torch.bool:
        return b.map("({0} | {1})" if kind == "max" else "({0} & {1})", x, y)
    if not call.dtype.is_floating_point:
        return b.map(f"tl.{kind}imum({{0}}, {{1}})", x, y)
    if call.name.startswith("f"):  # NaN yields
        text = f"tl.where({{0}} != {{0}}, {{1}}, tl.where({{1}} != {{1}}, {{0}}, tl.{kind}imum({{0}}, {{1}})))"
        return b.map(text, x, y)
    return b.map(f"f.{kind}imum({{0}}, {{1}})", x, y)


def _sign(call: Call) -> Op:
    b = call.builder
    x = b.cast(call.op("self"), call.dtype)
    if call.dtype.is_floating_point:
        return b.map("f.sign({0})", x)
    return b.map(f"(({{0}} > 0).to({_int(call)}) - ({{0}} < 0).to({_int(call)}))", x)


def _int(call: Call) -> str:
    return f"tl.{str(call.dtype).removeprefix('torch.')}"


def _rounded(call: Call) -> Op:
    b = call.builder
    x = b.cast(call.op("self"), call.dtype)
    decimals = call.arguments.get("decimals", 0)
    if not call.dtype.is_floating_point:
        return x
    if decimals:
        scale = b.number(10.0**decimals)
        return b.map("(f.round({0} * {1}) / {1})", x, scale)
    return b.map(_ROUNDED[call.name], x)


def _compared(call: Call) -> Op:
    dtype = call.promoted("self", "other")
    x, y = (call.builder.cast(call.op(name), dtype) for name in ("self", "other"))
    return call.builder.map(f"({{0}} {_COMPARED[call.name]} {{1}})", x, y, dtype=torch.bool)


def _logical(call: Call) -> Op:
    names = ("self",) if call.name == "logical_not" else ("self", "other")
    operands = [call.builder.cast(call.op(name), torch.bool) for name in names]
    return call.builder.map(_LOGICAL[call.name], *operands, dtype=torch.bool)


def _bits(call: Call) -> Op:
    return call.builder.map(f"({{0}} {_BITS[call.name]} {{1}})", *_second(call))


def _tested(call: Call) -> Op:
    b, x = call.builder, call.op("self")
    if not x.dtype.is_floating_point:
        return b.expand(b.number(call.name == "isfinite", torch.bool), x.shape)
    text = {
        "isnan": "({0} != {0})",
        "isinf": '(tl.abs({0}) == float("inf"))',
        "isfinite": '(tl.abs({0}) < float("inf"))',
    }[call.name]
    return b.map(text, x, dtype=torch.bool)


def _where(call: Call) -> Op:
    b = call.builder
    x, y = (b.cast(call.op(name), call.dtype) for name in ("self", "other"))
    return b.where(b.cast(call.op("condition"), torch.bool), x, y)


def _masked_fill(call: Call) -> Op:
    b = call.builder
    x, value = (b.cast(call.op(name), call.dtype) for name in ("self", "value"))
    return b.where(b.cast(call.op("mask"), torch.bool), value, x)


def _clamp(call: Call) -> Op:
    b = call.builder
    x = b.cast(call.op("self"), call.dtype)
    low, high = {"hardtanh": ("min_val", "max_val")}.get(call.name, ("min", "max"))
    prefix = "f" if call.dtype.is_floating_point else "tl"
    for name, kind in ((low, "max"), (high, "min")):
        if call.arguments.get(name) is not None:
            x = b.map(f"{prefix}.{kind}imum({{0}}, {{1}})", x, b.cast(call.op(name), call.dtype))
    return x


def _lerp(call: Call) -> Op:
    b = call.builder
    x, end, weight = (b.cast(call.op(name), call.dtype) for name in ("self", "end", "weight"))
    text = "tl.where({2} < 0.5, {0} + {2} * ({1} - {0}), {1} - ({1} - {0}) * (1.0 - {2}))"
    if weight.kind == "number":
        text = "({0} + {2} * ({1} - {0}))" if weight.data < 0.5 else "({1} - ({1} - {0}) * (1.0 - {2}))"
    return b.map(text, x, end, weight)


def _addcmul(call: Call) -> Op:
    b = call.builder
    x, y, z = (b.cast(call.op(name), call.dtype) for name in ("self", "tensor1", "tensor2"))
    product = "{1} * {2}" if call.name == "addcmul" else "{1} / {2}"
    return b.map(f"({{0}} + {{3}} * ({product}))", x, y, z, b.number(call.arguments["value"], call.dtype))


def _activation(call: Call) -> Op:
    b = call.builder
    x = b.cast(call.op("self"), call.dtype)
    if call.name == "relu":
        return b.map("f.maximum({0}, 0.0)" if call.dtype.is_floating_point else "tl.maximum({0}, 0)", x)
    if call.name == "gelu" and call.arguments["approximate"] == "tanh":
        text = "(0.5 * {0} * (1.0 + f.tanh(0.7978845608028654 * ({0} + 0.044715 * {0} * {0} * {0}))))"
        return b.map(text, x)
    if call.name == "gelu":
        return b.map("(0.5 * {0} * (1.0 + tl.erf({0} * 0.7071067811865476)))", x)
    if call.name == "leaky_relu":
        return b.map("tl.where({0} > 0.0, {0}, {0} * {1})", x, b.number(call.arguments["negative_slope"]))
    if call.name == "softplus":
        beta, threshold = (b.number(call.arguments[name]) for name in ("beta", "threshold"))
        return b.map("tl.where({0} * {1} > {2}, {0}, f.log1p(f.exp({0} * {1})) / {1})", x, beta, threshold)
    numbers = [b.number(call.arguments[name]) for name in ("alpha", "scale", "input_scale")]
    return b.map("tl.where({0} > 0.0, {0} * {2}, f.expm1({0} * {3}) * {1} * {2})", x, *numbers)


def _nan_to_num(call: Call) -> Op:
    b, x = call.builder, call.op("self")
    if not call.dtype.is_floating_point:
        return x
    largest = torch.finfo(torch.float32).max
    defaults = {"nan": 0.0, "posinf": largest, "neginf": -largest}
    numbers = [b.number(v if call.arguments[k] is None else call.arguments[k]) for k, v in defaults.items()]
    infinity = 'tl.where({0} == float("-inf"), {3}, {0})'
    return b.map(f'tl.where({{0}} != {{0}}, {{1}}, tl.where({{0}} == float("inf"), {{2}}, {infinity}))', x, *numbers)


def _copied(call: Call) -> Op:
    return call.builder.cast(call.of(call.view.node.all_input_nodes[0]), call.dtype)


def _created(call: Call) -> Op:
    b, fills = call.builder, {"zeros": 0, "ones": 1}
    kind = call.name.removeprefix("new_").removesuffix("_like")
    number: Any = fills[kind] if kind in fills else call.arguments.get("fill_value", call.arguments.get("s"))
    if isinstance(number, torch.fx.Node):
        raise call.refuse("a computed fill value")
    return b.expand(b.regroup(b.number(number, call.dtype), (1,) * len(call.shape)), call.shape)


def _arange(call: Call) -> Op:
    b = call.builder
    start, step = call.arguments.get("start") or 0, call.arguments.get("step") or 1
    (size,) = call.shape
    if size is None:
        raise call.refuse("an arange as long as the window")
    index = b.cast(b.iota(size), call.dtype)
    return b.map("({0} * {1} + {2})", index, b.number(step, call.dtype), b.number(start, call.dtype))


def rows() -> dict[str, Row]:
    """The rows, by the names of the op table."""
    table = {name: Row(_text(text, "self"), text, error) for name, (text, error) in (_UNARY | _ANY).items()}
    table |= {name: Row(_text(text, "self", "other"), text, error) for name, (text, error) in _BINARY.items()}
    table |= {name: Row(_rounded, text, EXACT) for name, text in _ROUNDED.items()}
    table |= {name: Row(_compared, f"({{0}} {sign} {{1}})", EXACT) for name, sign in _COMPARED.items()}
    table |= {name: Row(_logical, text, EXACT) for name, text in _LOGICAL.items()}
    table |= {name: Row(_bits, f"({{0}} {sign} {{1}})", EXACT) for name, sign in _BITS.items()}
    table |= {name: Row(_tested, "a comparison", EXACT) for name in ("isnan", "isinf", "isfinite")}
    table |= {"add": Row(_add, "({0} + {1})", ONE), "sub": Row(_add, "({0} - {1})", ONE)}
    table |= {"rsub": Row(_add, "({1} - {0})", ONE), "mul": Row(_mul, "({0} * {1})", ONE)}
    table |= {name: Row(_div, "({0} / {1}), or f.floor_div", FEW) for name in ("div", "floor_divide")}
    table |= {name: Row(_remainder, f"f.{name}", "u of the dividend") for name in ("remainder", "fmod")}
    table["pow"] = Row(_pow, "products, sqrt, or f.pow", "a few u of each product; f.pow: (2 + |y log x|) u")
    extremes = ("maximum", "minimum", "max.other", "min.other")
    table |= {name: Row(_extreme, "f.maximum or f.minimum, which keep NaN", EXACT) for name in extremes}
    table |= {name: Row(_extreme, "the other operand where one is NaN", EXACT) for name in ("fmax", "fmin")}
    table |= {name: Row(_sign, "f.sign({0})", EXACT) for name in ("sign", "sgn")}
    table |= {name: Row(_clamp, "f.maximum, f.minimum", EXACT) for name in _CLAMPS}
    table |= {"where": Row(_where, "tl.where", EXACT), "masked_fill": Row(_masked_fill, "tl.where", EXACT)}
    table |= {"lerp": Row(_lerp, "({0} + {2} * ({1} - {0})); from {1} back where {2} >= 0.5", FEW)}
    table |= {"addcmul": Row(_addcmul, "({0} + {3} * ({1} * {2}))", FEW)}
    table |= {"addcdiv": Row(_addcmul, "({0} + {3} * ({1} / {2}))", FEW)}
    active = ("relu", "gelu", "leaky_relu", "softplus", "elu")
    table |= {name: Row(_activation, "its formula", FEW) for name in active}
    table["nan_to_num"] = Row(_nan_to_num, "tl.where", EXACT)
    table["bitwise_not"] = Row(_text("(~{0})", "self"), "(~{0})", EXACT)
    copies = ("to", "_to_copy", "type_as", "clone", "contiguous", "detach", "detach_", "alias", "lift_fresh_copy")
    table |= {name: Row(_copied, "a cast, or nothing", "u where an integer is cast") for name in (*copies, "dropout")}
    made: tuple[str, ...] = ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "scalar_tensor")
    made = (*made, "full_like", "zeros_like", "ones_like")
    table |= {name: Row(_created, "a number", EXACT) for name in made}
    table["arange"] = Row(_arange, "tl.arange", EXACT)
    return table


_CLAMPS = ("clamp", "clamp_min", "clamp_max", "hardtanh")
