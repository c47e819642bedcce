"""The token-level flows through plan_decode and forward_indexer beside float64, as a script for vortex_torch.

Exit code 1 if the stored accumulators or the selection are wrong (``--decay 1.0`` must be).
"""

import argparse
import sys

import torch
from vortex_torch.abs import FORMAT, as_vtensor
from vortex_torch.cache import Context as CacheContext
from vortex_torch.flow.algorithms import GQAH2OTokenSparseAttention, H2OTokenSparseAttention
from vortex_torch.indexer import Context
from vortex_torch.indexer.utils_sglang import plan_decode
from vortex_torch.utils import Mode

FLOWS = {"mean": H2OTokenSparseAttention, "gqa": GQAH2OTokenSparseAttention}


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flow", choices=sorted(FLOWS), default="mean")
    parser.add_argument("--decay", type=float, default=1 - 2**-6)
    for name, value in {"seq-len": 128, "steps": 600, "group": 4, "head-dim": 128, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ulp", type=float, default=2.0, help="boundary that excuses another top-k set")
    for name, value in {"batch": 1, "heads": 1, "topk": 32, "sink": 4, "recent": 8, "chunk": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args()


class Data:
    """Keys with an affinity along a direction that all queries share, and noise across it."""

    def __init__(self, o, segment):
        self.o, self.random = o, torch.Generator().manual_seed(o.seed + 1000 * segment)
        direction = torch.randn(o.head_dim, generator=self.random)
        self.direction = direction / direction.norm()
        planted = 0.2 * torch.randn(o.seq_len, 1, generator=self.random) * o.head_dim**0.25 * self.direction
        self.k = (planted + 0.32 * self.across(o.seq_len)).bfloat16()
        self.exact = torch.zeros(o.seq_len - o.sink - o.recent, dtype=torch.float64)
        self.mass = 0.0

    def across(self, rows):
        x = torch.randn(rows, self.o.head_dim, generator=self.random)
        return x - (x @ self.direction)[:, None] * self.direction

    def query(self):
        return (self.o.head_dim**0.25 * self.direction + self.across(self.o.group)).bfloat16()

    def add(self, q):
        """One step of the recurrence in float64."""
        window = slice(self.o.sink, self.o.seq_len - self.o.recent)
        q = q.double().mean(0, keepdim=True) if self.o.flow == "mean" else q.double()
        logits = q @ self.k[window].double().T * self.o.head_dim**-0.5
        self.exact = torch.softmax(logits, -1).amax(0) + self.o.decay * self.exact


def make_context(o, pages):
    ctx = Context()
    ctx.mode = Mode.profile
    segments = o.batch * o.heads
    ctx.group_size, ctx.num_kv_heads, ctx.num_qo_heads, ctx.head_dim = o.group, o.heads, o.group * o.heads, o.head_dim
    ctx.page_size, ctx.topk_val, ctx.page_reserved_bos, ctx.page_reserved_eos = 1, o.topk, o.sink, o.recent
    ctx.max_chunk_size, ctx.min_chunk_size, ctx.num_sms = o.chunk, 1, 8
    ctx.max_num_pages_per_request, ctx.max_num_pages = pages, pages * segments
    ctx.max_num_workloads = ctx.max_num_pages + segments
    ints = {"dtype": torch.int32, "device": o.device}
    ctx.dense_kv_indices, ctx.sparse_kv_indices = torch.zeros(2, ctx.max_num_pages, **ints)
    ctx.dense_kv_indptr, ctx.sparse_kv_indptr = torch.zeros(2, segments + 1, **ints)
    ctx.kv_last_page_len = torch.zeros(segments, **ints)
    ctx.winfo_q_indices, ctx.winfo_kv_offsets, ctx.winfo_kv_lens = torch.zeros(3, ctx.max_num_workloads, **ints)
    ctx.winfo_num_workloads, ctx.winfo_chunk_size = torch.zeros(2, 1, **ints)
    ctx._created = True
    return ctx


def make_pool(o, flow, rows):
    fields = flow.get_cache_meta_info(1, o.head_dim)
    pool = {name: torch.zeros(rows, *shape, dtype=torch.bfloat16, device=o.device) for name, shape in fields.items()}
    return {name: as_vtensor(field, FORMAT.PAGED) for name, field in pool.items()}


def write_tokens(o, flow, pool, slots):
    """forward_cache for tokens in slots [n]; hh_score of exactly these becomes 0."""
    ctx = CacheContext()
    ctx.mode, ctx.page_size, ctx.head_num, ctx.head_dim = Mode.execute, 1, o.heads, o.head_dim
    ctx.max_new_tokens_per_batch, ctx.total_num_pages = len(slots), len(pool["k"])
    flow.forward_cache(cache=pool, loc=slots, ctx=ctx)


def main():
    o = options()
    slots_per_request = o.seq_len + 3
    order = torch.randperm(o.batch * slots_per_request, generator=torch.Generator().manual_seed(7))
    req_to_token = torch.zeros(2 * o.batch, o.seq_len, dtype=torch.int32)
    req_indices = torch.arange(o.batch).flip(0) * 2
    used = order[: o.batch * o.seq_len].view(o.batch, o.seq_len)
    req_to_token[req_indices] = used.int()
    data = [Data(o, segment) for segment in range(o.batch * o.heads)]
    flow = FLOWS[o.flow](decay=o.decay)
    pool = make_pool(o, flow, len(order) * o.heads)
    ctx = make_context(o, o.seq_len)
    row = (used[:, None, :] * o.heads + torch.arange(o.heads)[:, None]).flatten(0, 1)  # [segments, tokens]
    for own, one in zip(row, data, strict=True):
        pool["k"].as_subclass(torch.Tensor)[own.to(o.device), 0] = one.k.to(o.device)
    hh = pool["hh_score"].as_subclass(torch.Tensor)
    hh.fill_(3.0)  # what a former request left
    write_tokens(o, flow, pool, used.flatten().to(o.device))
    written = torch.zeros(len(hh), dtype=torch.bool)
    written[row.flatten()] = True
    assert bool((hh.cpu()[written] == 0).all()) and bool((hh.cpu()[~written] == 3).all()), "reset"
    out = as_vtensor(torch.zeros(ctx.max_num_pages, 1, 1, dtype=torch.int32, device=o.device), FORMAT.RAGGED)
    lens = torch.full((o.batch,), o.seq_len, dtype=torch.int32, device=o.device)
    tables = req_to_token.to(o.device), req_indices.to(o.device)
    for step in range(o.steps):
        queries = torch.stack([one.query() for one in data])
        for one, q in zip(data, queries, strict=True):
            one.add(q)
        plan_decode(lens, tables[0], tables[1], ctx)
        q = as_vtensor(queries.to(o.device), FORMAT.BATCHED)
        if step == 0:
            ctx.profile()
            flow.forward_indexer(q, out, pool, ctx=ctx)
        ctx.execute()
        flow.forward_indexer(q, out, pool, ctx=ctx)
    good = ctx.batch_size == o.batch
    picked = out.as_subclass(torch.Tensor).flatten().cpu()
    for segment, (own, one) in enumerate(zip(row, data, strict=True)):
        good = judge(o, segment, own, one, hh.flatten().cpu(), picked, ctx) and good
    untouched = hh.cpu()[row].flatten(1)
    outside = torch.cat([untouched[:, : o.sink], untouched[:, o.seq_len - o.recent :]], 1)
    good = good and not outside.any()
    reset = used.flatten()[:5].to(o.device)
    write_tokens(o, flow, pool, reset)
    rows = (reset[:, None] * o.heads + torch.arange(o.heads, device=o.device)).flatten()
    good = good and not hh[rows].any()
    return 0 if good else 1


def judge(o, segment, own, one, hh, picked, ctx):
    window = own[o.sink : o.seq_len - o.recent]
    stored = hh[window].double()
    error = float((stored - one.exact).abs().max() / one.exact.max())
    order = one.exact.argsort(descending=True)
    first = int(ctx.sparse_kv_indptr[segment]) + o.sink
    chosen = set(picked[first : first + o.topk].tolist())
    best = set(window[order[: o.topk]].tolist())
    of_stored = set(window[stored.argsort(descending=True, stable=True)[: o.topk]].tolist())
    overlap = len(chosen & best) / o.topk
    boundary = float(one.exact[order[o.topk - 1]] - one.exact[order[o.topk]])
    ulp = 2.0 ** (torch.frexp(one.exact[order[o.topk]])[1].item() - 8)
    kept = float(stored.sum() / one.exact.sum())
    print(
        f"segment {segment}: rel. error {error:.2e}, mass {float(stored.sum()):.2f} of {float(one.exact.sum()):.2f}, "
        f"top-{o.topk} {overlap:.0%}, boundary {boundary / ulp:.1f} ulp"
    )
    close = boundary < o.ulp * ulp and overlap >= 0.9
    return chosen == of_stored and error < 0.15 and (overlap == 1 or close) and abs(kept - 1) <= 0.10


if __name__ == "__main__":
    sys.exit(main())
