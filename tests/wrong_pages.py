"""Wrong flows: pages mixed with pages, cut, counted or ranked. The offending line ends with ``# wrong``."""

from __future__ import annotations

import math

import torch

from wrong_flow import Means, wrong

F = torch.nn.functional


@wrong("op reshape folds the page axis of [W, 8]", "leave the page axis whole")
class ReshapeAll(Means):
    def score(self, q, pages):
        flat = pages["mean"].reshape(-1)  # wrong
        return flat + flat


@wrong("op reshape on [W, 8]: works only for some numbers of pages W", "leave the page axis whole")
class ReshapeRows(Means):
    def score(self, q, pages):
        rows = pages["mean"].reshape(4, -1)  # wrong
        return rows.sum(0)


@wrong("op view on [W, 8]", "(it needs W != 8)", "leave the page axis whole")
class Shuffle(Means):
    def score(self, q, pages):
        mean = pages["mean"]
        turned = mean.view(mean.shape[1], mean.shape[0])  # wrong
        return turned.sum(0)


@wrong("op view on [W, 8]: folds the page axis", "leave the page axis whole")
class ReshapeUneven(Means):
    def score(self, q, pages):
        return pages["mean"].view(6, -1).sum(0)  # wrong


@wrong("op flatten folds the page axis of [W, 5, 8]", "leave the page axis whole")
class Flatten(Means):
    def score(self, q, pages):
        return pages["k"].flatten(0, 1).sum(-1)  # wrong


@wrong("op squeeze of [W, 1] would drop the page axis where W is 1", "name the dim")
class SqueezeAll(Means):
    def score(self, q, pages):
        return pages["mean"][:, :1].squeeze()  # wrong


@wrong("op matmul on [W, 8], [8, W] makes [W, W]", "only in a reduction, softmax, cumsum or pooling")
class PagesByPages(Means):
    def score(self, q, pages):
        similar = pages["mean"] @ pages["mean"].T  # wrong
        return similar.mean(1)


@wrong("op matmul of [8, W] and [W, 8] sums over pages", "reduce over pages with sum")
class ContractPages(Means):
    def score(self, q, pages):
        covariance = pages["mean"].T @ pages["mean"]  # wrong
        return pages["mean"] @ covariance[0]


@wrong("op linear of [W] and [3, W] sums over pages", "reduce over pages with sum")
class LinearOverPages(Means):
    def score(self, q, pages):
        weight = pages["age"].expand(3, -1)
        return pages["age"] + F.linear(pages["age"], weight).sum()  # wrong


@wrong("op einsum 'wd,wd->d' of [W, 8], [W, 8] sums over pages", "reduce over pages with sum")
class EinsumOverPages(Means):
    def score(self, q, pages):
        energy = torch.einsum("wd,wd->d", pages["mean"], pages["mean"])  # wrong
        return pages["mean"] @ energy


@wrong("op einsum on [W, 8] makes [W, W]", "only in a reduction, softmax, cumsum or pooling")
class EinsumPairs(Means):
    def score(self, q, pages):
        return torch.einsum("wd,vd->wv", pages["mean"], pages["mean"]).amax(1)  # wrong


@wrong("op mul on [W, 1], [1, W] makes [W, W]", "only in a reduction, softmax, cumsum or pooling")
class OuterProduct(Means):
    def score(self, q, pages):
        age = pages["age"]
        return (age[:, None] * age[None]).sum(0)  # wrong


@wrong("op outer on [W]", "makes [W, W]", "only in a reduction, softmax, cumsum or pooling")
class OuterCall(Means):
    def score(self, q, pages):
        return torch.outer(pages["age"], pages["age"]).sum(0)  # wrong


@wrong("op sort over the page axis of [W]", "pages are ranked by the runtime")
class SortPages(Means):
    def score(self, q, pages):
        return pages["age"].sort().values  # wrong


@wrong("op argsort on [W]", "sort over the page axis", "only in a reduction, softmax, cumsum or pooling")
class ArgsortPages(Means):
    def score(self, q, pages):
        return pages["age"].argsort().float()  # wrong


@wrong("op topk over the page axis of [W]", "pages are ranked by the runtime")
class TopkPages(Means):
    def score(self, q, pages):
        best = pages["age"].topk(2).values  # wrong
        return pages["age"] - best[0]


@wrong("op argmax over the page axis of [W]", "pages are ranked by the runtime")
class ArgmaxPages(Means):
    def score(self, q, pages):
        return pages["age"] - pages["age"].argmax()  # wrong


@wrong("op max over the page axis is asked for indices", "use amax for the value")
class MaxIndices(Means):
    def score(self, q, pages):
        best = pages["mean"].max(0)  # wrong
        return pages["age"] + best.indices.sum()


@wrong("op median over the page axis of [W]", "pages are ranked by the runtime")
class MedianPages(Means):
    def score(self, q, pages):
        return pages["age"] - pages["age"].median()  # wrong


@wrong("op roll on [W]", "only in a reduction, softmax, cumsum or pooling")
class RollPages(Means):
    def score(self, q, pages):
        return pages["age"] - pages["age"].roll(1)  # wrong


@wrong("op flip over the page axis of [W]", "pages are ranked by the runtime")
class FlipPages(Means):
    def score(self, q, pages):
        return pages["age"].flip(0)  # wrong


@wrong("op index of [W] by a mask makes a size that depends on values", "mask pages with torch.where")
class MaskIndex(Means):
    def score(self, q, pages):
        young = pages["age"][pages["age"] < 64]  # wrong
        return pages["age"] - young.mean()


@wrong("op nonzero on [W] makes a size that depends on values", "torch.where")
class Nonzero(Means):
    def score(self, q, pages):
        return (pages["age"] < 64).nonzero()[:, 0].float()  # wrong


@wrong("op indexing on [W]: works only for some numbers of pages W", "leave the page axis whole")
class SlicePages(Means):
    def score(self, q, pages):
        return pages["age"][1:]  # wrong


@wrong("op select takes part of the page axis of [W]", "mask pages with torch.where")
class FirstPage(Means):
    def score(self, q, pages):
        return pages["age"] - pages["age"][0]  # wrong


@wrong("op unbind", "works only for some numbers of pages W", "leave the page axis whole")
class IteratePages(Means):
    def score(self, q, pages):
        return torch.stack([page.sum() for page in pages["mean"]])  # wrong


@wrong("op gather from [W] by [2] takes part of the page axis", "mask pages with torch.where")
class GatherPages(Means):
    def score(self, q, pages):
        return pages["age"] + pages["age"].gather(0, torch.tensor([0, 1])).sum()  # wrong


@wrong("op cat on [W] makes [2*W]", "only in a reduction, softmax, cumsum or pooling")
class CatPages(Means):
    def score(self, q, pages):
        return torch.cat([pages["age"], pages["age"]])  # wrong


@wrong("op avg_pool1d on [1, W]: works only for some numbers of pages W", "leave the page axis whole")
class PoolPages(Means):
    def score(self, q, pages):
        return F.avg_pool1d(pages["age"][None], 5)[0]  # wrong


@wrong("op conv1d of [1, W, ", "with weight [1, W, 1] mixes pages as channels", "leave the page axis whole")
class ConvolvePages(Means):
    def score(self, q, pages):
        mixed = F.conv1d(pages["k"][:, 0][None], pages["age"][None, :, None])  # wrong
        return pages["age"] + mixed.sum()


@wrong("op max_pool1d(kernel_size=4, stride=1, padding=2, dilation=1) changes the number of pages", "odd kernel_size")
class PoolEven(Means):
    def score(self, q, pages):
        return F.max_pool1d(pages["age"][None], 4, 1, 2)[0]  # wrong


@wrong("op softmax on [W]: there is no dim 1", "name a dim it has")
class SoftmaxDim(Means):
    def score(self, q, pages):
        return torch.softmax(pages["age"], 1)  # wrong


@wrong("op arange computes with the number of pages", "use mean")
class CountPages(Means):
    def score(self, q, pages):
        return pages["age"] + torch.arange(pages["age"].shape[0])  # wrong


@wrong("op div computes with the number of pages", "use mean")
class DivideByPages(Means):
    def score(self, q, pages):
        return pages["age"] / pages["age"].shape[0]  # wrong


@wrong("op full computes with the number of pages", "use mean")
class FillWithPages(Means):
    def score(self, q, pages):
        return pages["age"] + torch.full((1,), len(pages["mean"].T[0].shape) * pages["age"].numel())  # wrong


@wrong("(it needs W == 41)", "leave the page axis whole")
class LogOfPages(Means):
    def score(self, q, pages):
        return pages["age"] * math.log(pages["age"].shape[0])  # wrong


@wrong("op amax", "[W, 0, 8]", "mend this statement")
class MaxOfNothing(Means):
    def score(self, q, pages):
        return pages["k"][:, 0:0].amax(1).sum(-1)  # wrong


@wrong("op mean over an empty axis of [W, 0, 8]", "reduce at least one element")
class MeanOfNothing(Means):
    def score(self, q, pages):
        return pages["k"][:, 0:0].mean(1).sum(-1)  # wrong
