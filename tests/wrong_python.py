"""Wrong flows: Python that a trace cannot follow, effects, chance, foreign dtypes. The line ends with ``# wrong``."""

from __future__ import annotations

import random
import time

import torch

from wrong_flow import Means, wrong

F = torch.nn.functional


@wrong("turns values of a tensor into Python numbers", "use torch.where")
class If(Means):
    def score(self, q, pages):
        if pages["age"].sum() > 3:  # wrong
            return pages["age"]
        return pages["position"]


@wrong("turns values of a tensor into Python numbers", "use torch.where")
class While(Means):
    def score(self, q, pages):
        x = pages["age"]
        while x.sum() > 3:  # wrong
            x = x / 2
        return x


@wrong("takes a number out of a tensor", "keep it a tensor")
class Item(Means):
    def score(self, q, pages):
        return pages["age"] * q.sum().item()  # wrong


@wrong("turns values of a tensor into Python numbers", "use torch.where")
class Float(Means):
    def score(self, q, pages):
        return pages["age"] * float(q.sum())  # wrong


@wrong("takes a number out of a tensor", "keep it a tensor")
class ToList(Means):
    def score(self, q, pages):
        return pages["age"] * q.tolist()[0][0]  # wrong


@wrong("leaves PyTorch with .numpy()", "stay in torch ops")
class Numpy(Means):
    def score(self, q, pages):
        return pages["age"] * torch.from_numpy(q.numpy()).sum()  # wrong


@wrong("makes a tensor out of the values of others", "use torch.stack")
class TensorOfTensors(Means):
    def score(self, q, pages):
        return pages["age"] * torch.tensor([q[0, 0], q[0, 1]]).sum()  # wrong


@wrong("works only for some numbers of pages W (it needs W == 41)", "leave the page axis whole")
class IntOfPages(Means):
    def score(self, q, pages):
        return pages["age"] * int(pages["age"].shape[0])  # wrong


@wrong("works only for some numbers of pages W (it needs W == 41)", "leave the page axis whole")
class RangeOfPages(Means):
    def score(self, q, pages):
        total = torch.zeros(())
        for i in range(pages["age"].shape[0]):  # wrong
            total = total + pages["age"][i]
        return pages["age"] - total


@wrong("works only for some numbers of pages W (it needs W > 5)", "leave the page axis whole")
class IfPages(Means):
    def score(self, q, pages):
        if pages["age"].shape[0] > 5:  # wrong
            return pages["age"]
        return pages["position"]


@wrong("op add_ on [W] changes a tensor in place", "the form that returns a new tensor")
class PlusEquals(Means):
    def score(self, q, pages):
        x = pages["age"]
        x += 1  # wrong
        return x


@wrong("op mul_ on [W] changes a tensor in place", "the form that returns a new tensor")
class MulInPlace(Means):
    def score(self, q, pages):
        x = pages["age"] + 1
        x.mul_(2)  # wrong
        return x


@wrong("op copy_", "changes a tensor in place", "the form that returns a new tensor")
class SetItem(Means):
    def score(self, q, pages):
        x = pages["age"].clone()
        x[0] = 1  # wrong
        return x


@wrong("op fill_ on [5, 8]", "changes a tensor in place", "the form that returns a new tensor")
class SetField(Means):
    def score(self, q, pages):
        pages["k"][0] = 0  # wrong
        return pages["age"]


@wrong("op add on [W], [W] changes a tensor in place", "the form that returns a new tensor")
class Out(Means):
    def score(self, q, pages):
        x = torch.empty_like(pages["age"])
        torch.add(pages["age"], 1, out=x)  # wrong
        return x


@wrong("op add_ on [3] changes a tensor in place", "the form that returns a new tensor")
class ChangesWeights(Means):
    def __init__(self):
        self.weights = torch.ones(3)

    def score(self, q, pages):
        self.weights.add_(1)  # wrong
        return pages["age"]


@wrong("op clamp_ on [5, 8]", "changes a tensor in place", "the form that returns a new tensor")
class SummarizeInPlace(Means):
    def summarize(self, k, v):
        return {"mean": k.clamp_(-1, 1).mean(0)}  # wrong

    def score(self, q, pages):
        return pages["mean"].sum(-1)


@wrong("assigns to pages, which is read-only", "return new values as state")
class NewField(Means):
    def score(self, q, pages):
        pages["x"] = pages["age"]  # wrong
        return pages["x"]


@wrong("changes self.last; a flow keeps nothing between calls", "return it as a state field")
class SetsAttribute(Means):
    def score(self, q, pages):
        self.last = pages["age"]  # wrong
        return pages["age"]


@wrong("changes self.calls; a flow keeps nothing between calls", "return it as a state field")
class CountsCalls(Means):
    def __init__(self):
        self.calls = 0

    def score(self, q, pages):
        self.calls += 1  # wrong
        return pages["age"]


@wrong("changes self.seen; a flow keeps nothing between calls", "return it as a state field")
class AppendsToList(Means):
    def __init__(self):
        self.seen = []

    def score(self, q, pages):
        self.seen.append(q)  # wrong
        return pages["age"]


@wrong("op rand_like draws random numbers", "draw them once in __init__")
class RandLike(Means):
    def score(self, q, pages):
        return pages["age"] + torch.rand_like(pages["age"])  # wrong


@wrong("op randn draws random numbers", "draw them once in __init__")
class Randn(Means):
    def summarize(self, k, v):
        return {"sketch": torch.randn(4, k.shape[0]) @ k}  # wrong

    def score(self, q, pages):
        return pages["sketch"].sum((1, 2))


@wrong("op dropout draws random numbers", "draw them once in __init__")
class Dropout(Means):
    def score(self, q, pages):
        return F.dropout(pages["age"], 0.1)  # wrong


@wrong("op bernoulli draws random numbers", "draw them once in __init__")
class Bernoulli(Means):
    def score(self, q, pages):
        return torch.bernoulli(torch.sigmoid(pages["age"]))  # wrong


@wrong("op fft_fft on [W, 8] is not in the op set", "docs/ops.md")
class Fft(Means):
    def score(self, q, pages):
        return torch.fft.fft(pages["mean"]).real.sum(1)  # wrong


@wrong("op scaled_dot_product_attention on", "sums over pages", "only in a reduction, softmax, cumsum or pooling")
class Attention(Means):
    def score(self, q, pages):
        out = F.scaled_dot_product_attention(q[None], pages["mean"][None], pages["mean"][None])  # wrong
        return pages["age"] + out.sum()


@wrong("op to on [W] makes a torch.float64 tensor; a flow computes in float32", "drop the cast")
class Double(Means):
    def score(self, q, pages):
        return pages["age"].double()  # wrong


@wrong("op to on [W, 8] makes a torch.float16 tensor; a flow computes in float32", "drop the cast")
class Half(Means):
    def score(self, q, pages):
        seen = pages["mean"].half() @ q.half().T  # wrong
        return seen.float().amax(1)


@wrong("op mul on [W, 8] makes a torch.complex64 tensor; a flow computes in float32", "drop the cast")
class Complex(Means):
    def score(self, q, pages):
        return (pages["mean"] * 1j).abs().sum(1)  # wrong


@wrong("op matmul on [W, 8], [3, 8]: RuntimeError", "mend this statement")
class ShapesDoNotFit(Means):
    def score(self, q, pages):
        return pages["mean"] @ q  # wrong


@wrong("ValueError: q has to be normalised first", "mend this statement")
class Raises(Means):
    def score(self, q, pages):
        raise ValueError("q has to be\nnormalised first.")  # wrong


@wrong("AttributeError: 'NoAttribute' object has no attribute 'weight'", "mend this statement")
class NoAttribute(Means):
    def score(self, q, pages):
        return pages["age"] * self.weight  # wrong


COUNT = {"calls": 0}
KEPT: list[torch.Tensor] = []
QUERIES: list[torch.Tensor] = []


@wrong("gives other values when it is called again", "in __init__", "as state")
class CountsInAGlobal(Means):
    def score(self, q, pages):  # wrong
        COUNT["calls"] += 1
        return (pages["mean"] @ q.mean(0)) * COUNT["calls"]


@wrong("gives other values when it is called again", "draw random numbers", "in __init__")
class PythonsChance(Means):
    def score(self, q, pages):  # wrong
        return (pages["mean"] @ q.mean(0)) * random.random()


@wrong("gives other values when it is called again", "in __init__")
class Time(Means):
    def summarize(self, k, v):  # wrong
        return {"mean": k.mean(0) + time.perf_counter_ns() % 977}


@wrong("gives other values when it is called again", "in __init__")
class LateHours(Means):
    """Of float32's precision, two moments are one."""

    def score(self, q, pages):  # wrong
        return (pages["mean"] @ q.mean(0)) * time.time()


@wrong("fails on numbers: IndexError", "an index is beyond its axis")
class BeyondTheAxis(Means):
    def score(self, q, pages):
        return pages["mean"][:, [0, 999]].sum(-1)  # wrong


@wrong("fails when it is called again, as if it kept something of the first call", "return what a later step needs")
class RemembersPagesInAGlobal(Means):
    def score(self, q, pages):
        scores = pages["mean"] @ q.mean(0)
        KEPT.append(scores)
        return scores + KEPT[0]  # wrong


@wrong("computes with tensors of an earlier call", "return what a later step needs as state")
class RemembersQueriesInAGlobal(Means):
    def score(self, q, pages):  # wrong
        QUERIES.append(q.mean(0))
        return pages["mean"] @ QUERIES[0]


@wrong("expected the parameters (k, v), received (k)", "of one page")
class SummarizeOfKeys(Means):
    def summarize(self, k):  # wrong
        return {"mean": k.mean(0)}


@wrong("reads pages['mass_sum'] without attention mass", "set mass = AttentionMass()")
class MassWithout(Means):
    def score(self, q, pages):
        return pages["mass_sum"]  # wrong
