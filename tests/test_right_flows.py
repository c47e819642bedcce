"""Flows that look suspicious and are right: accepted, and equal to their own code in float64."""

from __future__ import annotations

import pytest
import torch

from flow_compare import compare
from kvsieve.flow import Flow
from kvsieve.graph import Geometry, trace_flow
from right_base import MeanKey

F = torch.nn.functional
GEOMETRIES = Geometry(5, 8, 6, 3, layer=2), Geometry(1, 7, 7, 1, scale=0.5), Geometry(33, 8, 6, 7)
CASES: dict[str, type[Flow]] = {}


def right(cls: type[Flow]) -> type[Flow]:
    CASES[cls.__name__] = cls
    return cls


def helper(x):
    """A function of the flow's file."""
    return x.square().sum(-1) + 1


@right
class Cosine(MeanKey):
    def score(self, q, pages):
        return F.cosine_similarity(q[:, None], pages["mean"][None], dim=-1).amax(0)


@right
class Normalize(MeanKey):
    def score(self, q, pages):
        return (F.normalize(pages["mean"], dim=-1) @ F.normalize(q, dim=-1).T).mean(1)


@right
class LayerNorm(MeanKey):
    def score(self, q, pages):
        return (F.layer_norm(pages["mean"], q.shape[-1:]) @ q[0]).abs()


@right
class Einsum(MeanKey):
    def score(self, q, pages):
        return torch.einsum("gd,wpd->wgp", q, pages["k"]).amax((1, 2)) + torch.einsum(
            "...d,gd->...g", pages["mean"], q
        ).sum(1)


@right
class ImplicitEinsum(MeanKey):
    def score(self, q, pages):
        return torch.einsum("wd, gd", pages["mean"], q).mean(0)  # implicit output: "gw"


@right
class LinearWeights(MeanKey):
    def __init__(self):
        self.weight = torch.linspace(-1, 1, 3)

    def score(self, q, pages):
        weight = self.weight[:, None].expand(3, q.shape[-1])
        return F.linear(pages["mean"], weight, self.weight).square().sum(1)


@right
class DeviationOverPages(MeanKey):
    def score(self, q, pages):
        spread = torch.nan_to_num(pages["mean"].std(0), 1.0)  # one page has no deviation
        return ((pages["mean"] - pages["mean"].mean(0)) / (0.5 + spread)).abs().sum(-1)


@right
class FullSlices(MeanKey):
    def score(self, q, pages):
        return (
            (pages["mean"][:, None] * q[None, :, :]).sum((1, 2)) + pages["mean"][:, 0] + pages["k"][:, -1, ::2].sum(-1)
        )


@right
class Helpers(MeanKey):
    def score(self, q, pages):
        return self.seen(q, pages).amax(1) / helper(pages["mean"])


@right
class Heir(Cosine):
    def score(self, q, pages):
        return super().score(q, pages) + 0.5 * pages["spread"].mean(-1)


@right
class Module(MeanKey):
    def __init__(self):
        torch.manual_seed(0)
        self.head = torch.nn.Sequential(
            torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.LayerNorm(5), torch.nn.Dropout(), torch.nn.Linear(5, 1)
        ).eval()

    def score(self, q, pages):
        seen = self.seen(q, pages)
        return self.head(torch.stack([seen.mean(1), seen.amax(1), seen.amin(1)], -1))[:, 0]


@right
class ByPosition(MeanKey):
    def score(self, q, pages):
        fresh = torch.where(pages["position"] < 12.5, 2.0, 1.0)
        return torch.where(pages["age"] > 7.5, fresh * self.seen(q, pages).amax(1), pages["age"] / 8)


@right
class MaxOverTokens(MeanKey):
    def score(self, q, pages):
        return (pages["k"] @ q.T).max(1).values.sum(-1)


@right
class TopTokens(MeanKey):
    def score(self, q, pages):
        logits = (pages["k"] @ q.T).amax(-1)
        return logits.topk((logits.shape[1] + 1) // 2, dim=1).values.mean(1)


@right
class LargestQueryChannels(MeanKey):
    """SparQ's step (arXiv 2312.04985): score with the channels in which the query is large."""

    def score(self, q, pages):
        channels = q.abs().sum(0).topk(3).indices
        return (q[:, channels] @ pages["mean"][:, channels].T).amax(0)


@right
class OwnChannels(MeanKey):
    def score(self, q, pages):
        return pages["mean"].gather(1, pages["spread"].topk(2).indices).sum(1)


@right
class PositionTable(MeanKey):
    def __init__(self):
        self.bias = torch.linspace(0, 1, 12).square()

    def score(self, q, pages):
        bucket = (pages["age"] / 16).long().clamp(0, 11)
        return self.seen(q, pages).mean(1) + self.bias[bucket]


@right
class ZScore(MeanKey):
    def score(self, q, pages, layer, scale):
        logits = scale * self.seen(q, pages).amax(1)
        return (logits - logits.mean()) / (1 + logits.std(correction=0)) * (1 + layer)


@right
class Vote(MeanKey):
    def score(self, q, pages):
        seen = torch.softmax(q @ pages["mean"].T, -1)
        return F.max_pool1d(seen, 5, 1, 2).sum(0) + F.avg_pool1d(seen, 3, 1, 1, count_include_pad=False).sum(0)


@right
class PerHead(MeanKey):
    def score(self, q, pages):
        heads = [torch.softmax(pages["mean"] @ q[h], 0) for h in range(q.shape[0])]
        return torch.stack(heads).amax(0) + sum(pages["mean"].unbind(1)) / 10


@right
class Casts(MeanKey):
    def score(self, q, pages):
        seen = self.seen(q.float(), pages).to(torch.float32)
        return (seen > 0.123).float() @ torch.eye(q.shape[0]).sum(1) + (seen > 0.321).sum(1) * 0.1


@right
class AttributesAndLists(MeanKey):
    def __init__(self):
        self.weights = {"mean": 0.7, "spread": 0.3}
        self.taps = [torch.tensor(0.5), torch.tensor(0.25)]

    def score(self, q, pages):
        fields = sum(w * (pages[name] @ q.T).amax(1) for name, w in self.weights.items())
        return fields * self.taps[0] + self.taps[1]


@right
class Trail(MeanKey):
    def init_state(self, page_size, head_dim):
        return {"trail": torch.zeros(page_size), "visits": torch.zeros((), dtype=torch.int32)}

    def score(self, q, pages):
        trail = 0.9 * pages["trail"] + torch.softmax(pages["k"] @ q[0], 0)
        return trail.sum(1), {"trail": trail, "visits": pages["visits"] + 1}


@right
class ConstantScore(MeanKey):
    def score(self, q, pages):
        return torch.zeros(pages["mean"].shape[0]) + 0.5


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda geometry: f"p{geometry.page_size}")
@pytest.mark.parametrize("name", CASES)
def test_accepted_and_equal(name: str, geometry: Geometry) -> None:
    compare(trace_flow(CASES[name](), geometry))
