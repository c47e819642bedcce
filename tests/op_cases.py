"""One line a use of an op: the row of the table, and an expression that uses it. Add a line with every new row.

Names: ``x [W, 2, 3]``, ``y [W, 3]``, ``s [W]``, ``i [W]`` int64, ``b [W]`` bool vary over pages; ``q [2, 3]`` varies
over segments only; ``c [2, 3]`` and ``k [3]`` (int64) are constants. All hold small integers, so that sums are exact.
The padding holds NaN, True and 9223372036854775766.
"""

from __future__ import annotations

_ELEMENTWISE = """
add            | x + y[:, None]
add            | q + x
sub            | c - x
rsub           | torch.rsub(s, 2)
mul            | y * s[:, None] * q[0]
div            | x / (q.abs() + 1)
div            | torch.div(i, i.abs() + 1, rounding_mode="floor")
floor_divide   | i // (i.abs() + 4)
floor_divide   | i // (i.abs() - 9223372036854775766)
floor_divide   | x // 2
remainder      | x % 3
remainder      | i % (i.abs() + 1)
fmod           | torch.fmod(y, 2)
pow            | s**2 + 2**s
square         | x.square()
maximum        | torch.maximum(x, c)
minimum        | torch.minimum(y, q[0])
max.other      | torch.max(x, q)
min.other      | torch.min(s, y[:, 0])
fmax           | torch.fmax(x, c)
fmin           | torch.fmin(x, c)
neg            | -i
abs            | x.abs()
sign           | x.sign()
sgn            | torch.sgn(y)
copysign       | torch.copysign(x, c + 0.5)
exp            | x.exp()
exp2           | x.exp2()
expm1          | x.expm1()
log            | (x.abs() + 1).log()
log2           | (x.abs() + 1).log2()
log10          | (x.abs() + 1).log10()
log1p          | x.abs().log1p()
sqrt           | x.abs().sqrt()
rsqrt          | (x.abs() + 1).rsqrt()
reciprocal     | torch.reciprocal(x + 0.5)
sigmoid        | x.sigmoid()
log_sigmoid    | F.logsigmoid(x)
tanh           | x.tanh()
sin            | x.sin()
cos            | x.cos()
tan            | x.tan()
asin           | torch.asin(x / 8)
acos           | torch.acos(x / 8)
atan           | torch.atan(x)
atan2          | torch.atan2(x, c + 0.5)
sinh           | torch.sinh(x)
cosh           | torch.cosh(x)
asinh          | torch.asinh(x)
acosh          | torch.acosh(x.abs() + 1)
atanh          | torch.atanh(x / 8)
erf            | torch.erf(x)
erfc           | torch.erfc(x)
relu           | F.relu(x)
gelu           | F.gelu(x, approximate="tanh")
silu           | F.silu(x)
softplus       | F.softplus(x)
leaky_relu     | F.leaky_relu(x, 0.2)
elu            | F.elu(x)
hardtanh       | F.hardtanh(x)
clamp          | x.clamp(-1, 2)
clamp          | x.clamp(min=q, max=q + 1)
clamp_min      | torch.clamp_min(x, 0)
clamp_max      | torch.clamp_max(x, 0)
lerp           | torch.lerp(x, x + c, 0.5)
addcmul        | torch.addcmul(x, c, q, value=2)
addcdiv        | torch.addcdiv(x, c, q.abs() + 1)
where          | torch.where(b[:, None], y, q[0])
where          | torch.where(s > 0, s, 0.0)
masked_fill    | x.masked_fill(b[:, None, None], -1.0)
eq             | (x == q).float()
ne             | i != 1
lt             | s < 1
le             | (x <= c)
gt             | y > q[1]
ge             | x >= 0
logical_and    | torch.logical_and(s, b)
logical_or     | torch.logical_or(s, b)
logical_not    | torch.logical_not(x)
logical_xor    | torch.logical_xor(s, b)
__and__        | b & (s > 0)
bitwise_or     | torch.bitwise_or(i.abs(), 1)
__or__         | i.abs() | 1
bitwise_not    | ~b
bitwise_xor    | torch.bitwise_xor(b, i > 0)
__xor__        | b ^ (i > 0)
bitwise_and    | torch.bitwise_and(i.abs(), 1)
__and__        | A.__and__(b, s > 0)
__or__         | A.__or__(b, s > 0)
__xor__        | A.__xor__(b, s > 0)
floor          | (x / 2).floor()
ceil           | (x / 2).ceil()
round          | (x / 4).round()
trunc          | (x / 2).trunc()
frac           | (x / 2).frac()
isnan          | (x / x).isnan()
isinf          | (1 / x).isinf()
isfinite       | (1 / x).isfinite()
nan_to_num     | torch.nan_to_num(x / x, 7.0)
hypot          | torch.hypot(x, c)
xlogy          | torch.xlogy(x, q.abs() + 1)
full_like      | torch.full_like(x, 3.0)
zeros_like     | torch.zeros_like(y)
ones_like      | torch.ones_like(s).sum() + s
to             | b.float() + s
to             | x.to(torch.int32)
_to_copy       | A._to_copy(b, dtype=torch.float32)
type_as        | b.type_as(s)
clone          | x.clone()
contiguous     | x[None].expand(2, -1, -1, -1).contiguous()
detach         | x.detach()
detach_        | x * torch.tensor(2.0)
lift_fresh_copy| x * torch.tensor([2.0, 1.0, 3.0])
alias          | A.alias(x)
dropout        | F.dropout(x, 0.5, training=False)
full           | torch.full((s.shape[0], 2), 3.0) + s[:, None]
zeros          | torch.zeros(2, 3) + x
ones           | torch.ones(s.shape[0])
new_full       | s.new_full((3,), 2.0) * y
new_zeros      | s.new_zeros(s.shape)
new_ones       | y.new_ones(3, s.shape[0])
scalar_tensor  | torch.scalar_tensor(2.0) * s
arange         | x * torch.arange(3)
arange         | y + torch.arange(1, 7, 2)
"""

_REDUCTIONS = """
sum            | x.sum(0)
sum            | x.sum((1, 2))
sum            | x.sum((0, -1), keepdim=True)
sum            | (x > 0).sum(0, dtype=torch.float32)
sum            | (x > 0).sum((1, 2), dtype=torch.float32)
sum            | q.sum() + s
sum            | c.sum(0)
mean           | x.mean(0)
mean           | x.mean((0, 2))
mean           | x.mean(-1)
mean           | s - s.mean()
mean           | b.mean(0, dtype=torch.float32)
var            | x.var((0, 1), correction=0)
var            | y.var(1)
std            | x.std((0, 2), correction=0, keepdim=True)
std            | y.std(1, unbiased=False)
std            | x.std(0).isnan()
linalg_vector_norm | s.norm()
linalg_vector_norm | x.norm(dim=(0, 2), keepdim=True)
linalg_vector_norm | torch.linalg.vector_norm(s, float("-inf"))
linalg_vector_norm | torch.linalg.vector_norm(y, 1, 0)
any            | b.any()
any            | (x > 2).any(0)
any            | (x > 2).any(-1)
all            | (s > -9).all()
all            | (x > 0).all(1, keepdim=True)
all            | (x > -2).all(0)
prod           | y.prod(0)
prod           | x.prod(2)
prod           | (i + 1).prod(0)
amax           | x.amax((0, 1))
amax           | x.amax(2)
amax           | i.amax(0)
amax           | (s - 9).amax()
amin           | (x + 9).amin(0, keepdim=True)
amin           | x.amin((1, 2))
max            | (s - 9).max() - s
max            | x.max(0).values
max            | x.max(1).indices
max            | x.max(1, keepdim=True)[0]
min            | (x + 9).min()
min            | i.min(0).values
min            | q.min(0).values + y
logsumexp      | x.logsumexp(0)
logsumexp      | x.logsumexp((0, 2))
logsumexp      | x.logsumexp(1, keepdim=True)
softmax        | x.softmax(0)
softmax        | x.softmax(-1)
softmax        | F.softmax(s > 0, 0, dtype=torch.float32)
_softmax       | A._softmax(x, 0, False)
log_softmax    | x.log_softmax(0)
log_softmax    | x.log_softmax(1)
_log_softmax   | A._log_softmax(x, 0, False)
logcumsumexp   | x.logcumsumexp(0)
logcumsumexp   | x.logcumsumexp(2)
cumsum         | x.cumsum(0)
cumsum         | x.cumsum(-1)
cumsum         | b.cumsum(0)
cumprod        | y.cumprod(0)
cumprod        | x.cumprod(1)
sort           | x.sort(1).values
sort           | x.sort(stable=True, dim=-1, descending=True).indices
topk           | x.topk(2, -1).values
kthvalue       | x.kthvalue(2, -1).values
median         | x.median(2).values
argmax         | x.argmax(2)
argmin         | x.argmin(1, keepdim=True)
flip           | x.flip(1, 2)
cummax         | x.cummax(2).values
cummin         | x.cummin(1).values
avg_pool1d     | F.avg_pool1d(s[None], 3, 1, 1)
avg_pool1d     | F.avg_pool1d(y.T, 5, 1, 2, count_include_pad=False)
avg_pool1d     | F.avg_pool1d(x, 2)
conv1d         | F.conv1d(y.T, torch.stack([c, -c, c + 1])[:, :1], padding=1, groups=3)
conv1d         | F.conv1d(x.permute(1, 2, 0), c[:, :, None].repeat(1, 1, 3), q[:, 0], padding="same")
conv1d         | F.conv1d(x, c[:, :, None][:, :2], stride=2)
conv1d         | F.conv1d(s[None], q[:1, None], q[0, :1], padding=1)
conv1d         | F.conv1d(x.permute(1, 2, 0), q[:, None].repeat(1, 3, 1), padding=1)
max_pool1d     | F.max_pool1d(s[None] - 9, 3, 1, 1)
max_pool1d     | F.max_pool1d(x.permute(1, 2, 0), 5, 1, 2)
max_pool1d     | F.max_pool1d(x, 2, 1)
"""

_SHAPES = """
reshape        | x.reshape(-1, 6)
reshape        | x.permute(1, 2, 0).reshape(6, -1)
view           | x.view(x.shape[0], 3, 2)
_unsafe_view   | A._unsafe_view(x, [x.shape[0], 6])
flatten        | x.flatten(1)
unflatten      | y.unflatten(1, (3, 1))
squeeze        | x[:, :1].squeeze(1)
unsqueeze      | s[None, :, None]
permute        | x.permute(2, 0, 1)
transpose      | x.transpose(0, -1)
swapaxes       | x.swapaxes(1, 2)
swapdims       | x.swapdims(0, 1)
movedim        | x.movedim(0, 2)
moveaxis       | x.moveaxis((0, 1), (2, 0))
t              | y.t()
numpy_T        | y.T
mT             | x.mT
expand         | s[:, None].expand(-1, 4)
expand         | q.expand(x.shape[0], 2, 3)
expand_as      | y[:, None].expand_as(x)
broadcast_to   | c.broadcast_to(x.shape)
slice          | x[:, 1:, ::2]
slice          | x[:]
slice          | q[-1:] + y
select         | x[:, -1, 0]
narrow         | x.narrow(2, 1, 2)
index          | x[:, [1, 0, 1]]
index          | x[:, [1, 0], [2, 0]]
index          | x.permute(1, 0, 2)[[0, 1, 1], :, [2, 2, 0]]
index          | x[:, :, None][:, [0, 1, 1], :, [2, 2, 0]]
index          | c.flatten()[i.abs()]
index          | c[i.abs() % 2, (s > 0).long()]
index          | q[:, k]
index          | x[:, :, q.argmax(1)]
index          | q[q.argmin(0)].sum(0) + y
index_select   | x.index_select(2, k)
index_select   | q.index_select(1, q[1].abs().long() % 3) + y[:, None]
embedding      | F.embedding(i.abs() % 2, c)
gather         | x.gather(2, x.argsort(2)[:, :, :2])
gather         | q.gather(1, q.argmax(1, keepdim=True))
gather         | x.flatten(1).gather(1, i.abs()[:, None])
pad            | F.pad(x, (1, 2), value=5.0)
constant_pad_nd| A.constant_pad_nd(y, [0, 1])
cat            | torch.cat([x, x * 2], 1)
cat            | torch.cat([q, c], 1)
concat         | torch.concat([y, q[:1].expand(y.shape)], -1)
concatenate    | torch.concatenate([y, y], 1)
stack          | torch.stack([s, y[:, 0]], 1)
stack          | torch.stack([y, q[0].expand_as(y)])
split          | x.split(2, 2)[1]
split_with_sizes | y.split([1, 2], 1)[1]
chunk          | x.chunk(2, 1)[1]
unbind         | x.unbind(1)[1]
"""

_PRODUCTS = """
matmul         | x @ q.T
matmul         | q[0] @ y.T
matmul         | y @ c.T
matmul         | q @ x.mT
matmul         | q[1] @ x.mT
matmul         | c @ x.mT
matmul         | x @ y[:, :, None]
matmul         | y[:, None, None] @ x[:, None].mT
matmul         | c[0] @ x.mT
matmul         | q @ q[0] + s[:, None]
mm             | torch.mm(y, q.T)
mm             | torch.mm(q, c.T)
bmm            | torch.bmm(x, x.mT)
mv             | torch.mv(y, q[1])
dot            | torch.dot(q[0], c[1]) + s
linear         | F.linear(x, c, c[:, 0])
linear         | F.linear(y, q)
linear         | F.linear(y, c[0])
linear         | F.linear(q, y)
einsum         | torch.einsum("wpd,gd->gwp", x, q)
einsum         | torch.einsum("wpd,wd->w", x, y)
einsum         | torch.einsum("...d,gd->...g", x, c)
einsum         | torch.einsum("wpd,gd", x, q)
einsum         | torch.einsum("gd,hd->gh", q, c)
"""


def _cases(text: str) -> list[tuple[str, str]]:
    lines = [line.split("|", 1) for line in text.strip().splitlines()]
    return [(row.strip(), expression.strip()) for row, expression in lines]


CASES = [case for text in (_ELEMENTWISE, _REDUCTIONS, _SHAPES, _PRODUCTS) for case in _cases(text)]
