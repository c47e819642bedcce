"""The grammar of random flows: how a user writes an op of each family.

A production takes the builder and returns an expression (a function of tensors) and its operands, or None when nothing
fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flow_tables import ALONG, BINARY, REDUCE, REDUCE_ALL, REDUCE_ONE, UNARY, WITHIN, A, F

if TYPE_CHECKING:
    from flow_builder import Builder

Production = tuple[Callable[..., Any], list[int]] | None


def unary(b: Builder) -> Production:
    return b.choice("unary", UNARY), [b.pick()]


def binary(b: Builder) -> Production:
    """Operands of equal shape, or the second made to broadcast: one number a page, or one for all pages."""
    f, x, y = b.choice("binary", BINARY), b.pick(), b.pick()
    if b.shape(x) == b.shape(y) or b.random.random() < 0.3:
        return f, [x, y]
    rest = [axis for axis in range(len(b.shape(y))) if axis != b.page(y)]
    target = [1] * (len(b.shape(x)) - 1 - (b.page(x) or 0))
    if b.page(y) is None:
        return lambda u, v: f(u, v.mean()), [x, y]
    if b.page(x) is None:
        return lambda u, v: f(u, v.mean()), [x, y]
    return lambda u, v: f(u, (v.mean(rest) if rest else v).reshape([-1, *target])), [x, y]


def reduction(b: Builder) -> Production:
    x, keep = b.pick(1), b.random.random() < 0.3
    rank = len(b.shape(x))
    kind = b.random.randrange(6)
    if kind == 0:
        return b.choice("reduce_all", REDUCE_ALL), [x]
    if kind == 1:
        one, axis = b.choice("reduce_one", REDUCE_ONE), b.axis(x)
        return lambda u: one(u, axis, keep), [x]
    f = b.choice("reduce", REDUCE)
    dims = sorted(b.random.sample(range(rank), b.random.randint(1, rank)))
    if b.random.random() < 0.3:
        dims = [axis - rank for axis in dims]
    return lambda u: f(u, dims, keep), [x]


def along(b: Builder) -> Production:
    f, x = b.choice("along", ALONG), b.pick(1)
    axis = b.axis(x)
    return lambda u: f(u, axis), [x]


def within(b: Builder) -> Production:
    x = b.pick(1)
    axis = b.axis(x, pages=False)
    if axis is None:
        return None
    f = b.choice("within", WITHIN)
    return lambda u: f(u, axis), [x]


def pool(b: Builder) -> Production:
    x = b.pick(1)
    size = b.random.choice((3, 5))
    functions = {
        "max": lambda u: F.max_pool1d(u, size, 1, size // 2),
        "avg": lambda u: F.avg_pool1d(u, size, 1, size // 2),
        "avg_inside": lambda u: F.avg_pool1d(u, size, 1, size // 2, count_include_pad=False),
    }
    if b.page(x) != len(b.shape(x)) - 1:
        functions |= {"max_stride": lambda u: F.max_pool1d(u, 2), "avg_stride": lambda u: F.avg_pool1d(u, 2, 2, 1)}
    if len(b.shape(x)) == 1 or b.page(x) != len(b.shape(x)) - 2:
        functions["conv"] = lambda u: _depthwise(u, size)
    f = b.choice("pool", functions)
    if len(b.shape(x)) == 1:
        return lambda u: f(u[None])[0], [x]
    return (f, [x]) if len(b.shape(x)) <= 3 else None


def _depthwise(u: torch.Tensor, size: int) -> torch.Tensor:
    channels = u.shape[-2]
    weight = torch.linspace(-0.5, 1.0, size, dtype=u.dtype).expand(channels, 1, size)
    return F.conv1d(u, weight, padding=size // 2, groups=channels)


def rearrange(b: Builder) -> Production:
    x = b.pick(1)
    rank, page = len(b.shape(x)), b.page(x)
    order = b.random.sample(range(rank), rank)
    i, j = b.random.randrange(rank), b.random.randrange(-rank, rank)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "permute": lambda u: u.permute(order),
        "transpose": lambda u: u.transpose(i, j),
        "swapaxes": lambda u: u.swapaxes(i, j),
        "swapdims": lambda u: u.swapdims(i, j),
        "movedim": lambda u: u.movedim(i, j),
        "moveaxis": lambda u: u.moveaxis((i, (i + 1) % rank), (0, rank - 1)) if rank > 2 else u.moveaxis(i, j),
        "unsqueeze": lambda u: u.unsqueeze(i),
        "squeeze": lambda u: u.unsqueeze(i).squeeze(i) * 0.8,
        "newaxis": lambda u: u[:, None],
        "expand": lambda u: u[None].expand(2, *[-1] * rank),
        "pad": lambda u: F.pad(u, (1, 0) if page != rank - 1 else (0, 0, 1, 1) if rank > 1 else (0, 0), value=0.3),
    }
    if rank > 1:
        functions["mT"] = lambda u: u.mT
        functions["concat"] = lambda u: torch.concat([u, 0.5 * u], (rank - 1) if page != rank - 1 else 0)
        functions["cat"] = lambda u: torch.cat([u, u.square()], 0 if page != 0 else 1)
        functions["concatenate"] = lambda u: torch.concatenate([u.abs(), u], -1 if page != rank - 1 else 0)
    if rank <= 2:
        functions["t"] = lambda u: u.t()
    if rank == 2:
        functions["T"] = lambda u: u.T
    folds = [axis for axis in range(rank - 1) if page not in (axis, axis + 1)]
    if folds:
        axis = b.random.choice(folds)
        shape = [-1 if k == page else size for k, size in enumerate(b.shape(x)) if k != axis]
        shape[axis] = b.shape(x)[axis] * b.shape(x)[axis + 1]
        functions["flatten"] = lambda u: u.flatten(axis, axis + 1)
        functions["reshape"] = lambda u: u.reshape(shape)
        functions["view"] = lambda u: u.contiguous().view(shape)
        functions["_unsafe_view"] = lambda u: A._unsafe_view(
            u.contiguous(), [u.shape[page] if size == -1 else size for size in shape]
        )
        functions["constant_pad_nd"] = lambda u: A.constant_pad_nd(u, [1, 1] if page != rank - 1 else [0, 0, 1, 0])
    return b.choice("rearrange", functions), [x]


def product(b: Builder) -> Production:
    """matmul and its relatives over the last axis: with constants, with computed operands, by their special names."""
    x = b.pick(1)
    rank = len(b.shape(x))
    if b.page(x) == rank - 1:
        return (lambda u: u.mT if rank > 1 else u[:, None]), [x]
    if rank == 1:
        return _named_product(b, x)
    return b.random.choice((_linear, _constant_product, _named_product, _computed_product, _computed_product))(b, x)


def _linear(b: Builder, x: int) -> Production:
    width = b.shape(x)[-1]
    scale = width**-0.5
    functions: dict[str, Callable[..., torch.Tensor]] = {
        "plain": lambda u, w, c: scale * F.linear(u, w),
        "bias": lambda u, w, c: F.linear(scale * u, w, c),
        "vector": lambda u, w, c: scale * F.linear(u, w[0]),
    }
    return b.choice("linear", functions), [x, b.constant(3, width), b.constant(3)]


def _constant_product(b: Builder, x: int) -> Production:
    """A constant of any rank, on the right, or on the left where the rows are no pages."""
    rank, width = len(b.shape(x)), b.shape(x)[-1]
    scale = width**-0.5
    if b.page(x) != max(rank - 2, 0) and b.random.random() < 0.3:
        length = b.shape(x)[-2] if rank > 1 else width
        weight = b.constant(*b.random.choice([(length,), (4, length)]))
        return lambda w, u: scale * torch.matmul(w, u), [weight, x]
    weight = b.constant(*b.random.choice([(width,), (width, 2), (2, width, 3), (1, 2, width, 2)]))
    return lambda u, w: scale * torch.matmul(u, w), [x, weight]


def _named_product(b: Builder, x: int) -> Production:
    rank, width = len(b.shape(x)), b.shape(x)[-1]
    scale = width**-0.5
    functions: dict[str, Callable[..., torch.Tensor]] = {"mv": lambda u, w: scale * torch.mv(u, w)}
    if rank == 1:
        functions = {"dot": lambda u, w: scale * torch.dot(u, w)}
    elif rank == 2:
        functions["mm"] = lambda u, w: scale * torch.mm(u, w[:, None] * w)
    elif rank == 3 and b.page(x) != 1:
        functions = {"bmm": lambda u, w: scale * torch.bmm(u, (u * w).mT)}
    else:
        return None
    return b.choice("named", functions), [x, b.constant(width)]


def _computed_product(b: Builder, x: int) -> Production:
    rank, width = len(b.shape(x)), b.shape(x)[-1]
    scale = width**-0.5
    partners = [y for y in b.all() if b.shape(y) and b.shape(y)[-1] == width and b.page(y) != len(b.shape(y)) - 1]
    y = b.random.choice(partners)
    ranks = rank, len(b.shape(y))
    f = {(1, 1): torch.dot, (2, 1): torch.mv, (2, 2): torch.mm, (3, 3): torch.bmm}.get(ranks, torch.matmul)
    f = f if b.random.random() < 0.7 else torch.matmul
    return (lambda u, v: scale * f(u, v)) if ranks[1] == 1 else (lambda u, v: scale * f(u, v.mT)), [x, y]


def embedded(b: Builder) -> Production:
    """A constant table looked up per page, per element, or by a computed number."""
    x = b.pick()
    table = b.constant(5, 2)
    f = b.choice(
        "table",
        {
            "index": lambda u, t: t[(4 * u.sigmoid()).long()],
            "embedding": lambda u, t: F.embedding((4 * u.sigmoid()).long(), t),
            "pair": lambda u, t: t[(4 * u.sigmoid()).long(), (u > 0.1160).long()],
            "column": lambda u, t: t[:, (u > 0.1149).long()],
        },
    )
    return f, [x, table]


def einsum(b: Builder) -> Production:
    x, y = b.pick(1), b.pick(1)
    letters = iter("abcdefgh")
    left = [next(letters) for _ in b.shape(x)]
    right = []
    free = list(range(len(left)))
    for axis, size in enumerate(b.shape(y)):
        same = [k for k in free if b.shape(x)[k] == size and (k == b.page(x)) == (axis == b.page(y))]
        if same and b.random.random() < 0.8:
            free.remove(same[0])
            right.append(left[same[0]])
        else:
            right.append(next(letters))
    pages = {left[b.page(x)] if b.page(x) is not None else "", right[b.page(y)] if b.page(y) is not None else ""}
    names = sorted(set(left + right))
    kept = [name for name in names if name in pages or b.random.random() < 0.4]
    b.random.shuffle(kept)
    equation = f"{''.join(left)},{''.join(right)}->{''.join(kept)}"
    if b.random.random() < 0.1 and b.page(x) != len(left) - 1:
        weight = b.constant(3, b.shape(x)[-1])
        return lambda u, w: 0.3 * torch.einsum("...i,ji->...j", u, w), [x, weight]
    summed = 1.0
    for name in set(names) - set(kept):
        summed *= b.shape(x)[left.index(name)] if name in left else b.shape(y)[right.index(name)]
    return lambda u, v: summed**-0.5 * torch.einsum(equation, u, v), [x, y]


def composite(b: Builder) -> Production:
    """What is no row of the table: torch takes it apart into rows."""
    x = b.pick(1)
    if b.page(x) == len(b.shape(x)) - 1:
        return None
    width = b.shape(x)[-1]
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "layer_norm": lambda u, w: F.layer_norm(u, (width,), w, 0.1 * w, eps=0.1),
        "rms_norm": lambda u, w: F.rms_norm(u, (width,), w, eps=0.1),
        "normalize": lambda u, w: F.normalize(u + 0.5 * w, dim=-1, eps=0.3),
        "cosine": lambda u, w: F.cosine_similarity(u, w, -1, 0.3),
        "logaddexp": lambda u, w: torch.logaddexp(u, w),
        "var_mean": lambda u, w: torch.var_mean(u * w, -1, correction=0)[1] + torch.std_mean(u + 2 * w, -1)[0],
        "argsort": lambda u, w: torch.gather(u, -1, u.argsort(-1)),
        "roll": lambda u, w: u.roll(1, -1) * w,
        "repeat": lambda u, w: u.repeat([1] * (u.dim() - 1) + [2]),
        "hardswish": lambda u, w: F.hardswish(u * w),
        "addmm": lambda u, w: torch.addmm(w, u, w[:, None] * w) if u.dim() == 2 else u * w,
        "tensordot": lambda u, w: torch.tensordot(u, w, dims=([-1], [0])),
        "inner": lambda u, w: torch.inner(u, w),
    }
    return b.choice("composite", functions), [x, b.constant(width)]


def separated_indices(b: Builder) -> Production:
    """Indices on both sides of another axis: torch moves the result to the front."""
    x = b.pick(3)
    shape, page = b.shape(x), b.page(x)
    if page in (0, 2):
        return lambda u: u.movedim(page, 1), [x]
    i, j = [0, shape[0] - 1], [shape[2] - 1, 0]
    return lambda u: u[i, :, j], [x]


def with_number(b: Builder) -> Production:
    """The attention scale and the layer index, plain numbers."""
    number = b.number()
    return None if number is None else (lambda u, n: u * (0.5 + n), [b.pick(), number])


PRODUCTIONS: Sequence[tuple[Callable[[Any], Production], int]] = (
    (unary, 8),
    (binary, 7),
    (reduction, 4),
    (along, 3),
    (within, 4),
    (pool, 1),
    (rearrange, 4),
    (product, 5),
    (einsum, 2),
    (embedded, 1),
    (composite, 1),
    (separated_indices, 1),
    (with_number, 1),
)


def produce(b: Builder) -> Production:
    productions, weights = zip(*PRODUCTIONS, strict=True)
    return b.random.choices(productions, weights)[0](b)
