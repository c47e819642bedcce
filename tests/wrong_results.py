"""Wrong flows: what methods take and return. Where no statement is to blame, the ``def`` is marked ``# wrong``."""

from __future__ import annotations

import torch

from kvsieve.flow import Flow
from wrong_flow import Means, wrong


class Counted(Means):
    """One state field more, a number a page."""

    def init_state(self, page_size, head_dim):
        return {"count": torch.zeros(())}


@wrong("scores has shape [W, 8], expected [W]", "reduce over heads, tokens and head_dim")
class WrongShape(Means):
    def score(self, q, pages):
        return pages["k"].mean(1)  # wrong


@wrong("scores has shape [3], expected [W]", "reduce over heads, tokens and head_dim")
class NoPageAxis(Means):
    def score(self, q, pages):
        return q.sum(1)  # wrong


@wrong("scores are torch.int64", "return floating-point scores")
class IntegerScores(Means):
    def score(self, q, pages):
        return pages["age"].long()  # wrong


@wrong("returns float", "return scores [W]")
class NumberScore(Means):
    def score(self, q, pages):  # wrong
        return 3.0


@wrong("returns NoneType", "return scores [W]")
class NoScore(Means):
    def score(self, q, pages):  # wrong
        pages["age"].sum()


@wrong("unknown page field 'men'", "use mean")
class UnknownField(Means):
    def score(self, q, pages):
        return pages["men"].sum(-1)  # wrong


@wrong("unknown page field 'histogram'", "known: age, k, mean, position, v")
class UnlikelyField(Means):
    def score(self, q, pages):
        return pages["histogram"].sum(-1)  # wrong


@wrong("returns state 'seen', which init_state does not declare (it declares count)", "add 'seen' to init_state")
class UndeclaredState(Counted):
    def score(self, q, pages):  # wrong
        return pages["age"], {"seen": pages["age"]}


@wrong("state 'count' has shape [W, 8], expected [W]", "in the shape that init_state gives it")
class StateShape(Counted):
    def score(self, q, pages):
        return pages["age"], {"count": pages["mean"] + 1}  # wrong


@wrong("state 'count' is returned as torch.int64, expected torch.float32", "cast it")
class StateDtype(Counted):
    def score(self, q, pages):
        return pages["age"], {"count": pages["count"].long()}  # wrong


@wrong("state 'count' has shape [], expected [W]", "one row a page")
class StateWithoutPages(Counted):
    def score(self, q, pages):
        return pages["age"], {"count": q.sum()}  # wrong


@wrong("state 'count' is float", "return a tensor")
class StateNumber(Counted):
    def score(self, q, pages):  # wrong
        return pages["age"], {"count": 1.0}


@wrong("expected the parameters (q, pages) and optionally layer and scale", "constructor arguments")
class UnknownParameter(Means):
    def score(self, q, pages, temperature):  # wrong
        return pages["age"] * temperature


@wrong("returns a tensor", "return a dict of name: tensor")
class SummaryNoDict(Flow):
    def summarize(self, k, v):  # wrong
        return k.mean(0)


@wrong("returns NoneType", "return a dict of name: tensor")
class SummaryNone(Flow):
    def summarize(self, k, v):  # wrong
        k.mean(0)


@wrong("summary field 'mean' is list", "return a dict of name: tensor")
class SummaryOfLists(Flow):
    def summarize(self, k, v):  # wrong
        return {"mean": [1.0, 2.0]}


@wrong("summary field 'k' has a reserved name", "rename")
class ReservedName(Flow):
    def summarize(self, k, v):  # wrong
        return {"k": k.mean(0)}


@wrong("summary_dtypes names peak", "name fields of summarize: mean")
class DtypeOfNothing(Means):
    summary_dtypes = {"peak": torch.float16}  # noqa: RUF012

    def summarize(self, k, v):  # wrong
        return {"mean": k.mean(0)}


@wrong("count is both a summary and a state field", "give them different names")
class TwiceNamed(Flow):
    def summarize(self, k, v):
        return {"count": k.mean(0)}

    def init_state(self, page_size, head_dim):  # wrong
        return {"count": torch.zeros(())}

    def score(self, q, pages):
        return pages["age"]


@wrong("TypeError: bad operand", "return {name: tensor}")
class InitRaises(Means):
    def init_state(self, page_size, head_dim):
        return {"count": -"1"}  # wrong


@wrong("takes 1 positional argument but 3 were given", "def init_state(self, page_size, head_dim)")
class InitWithoutSizes(Means):
    def init_state(self):  # wrong
        return {"count": torch.zeros(())}


@wrong("op sum on [5, 8]: IndexError", "mend this statement")
class SummarizeRaises(Flow):
    def summarize(self, k, v):
        return {"mean": k.sum(4)}  # wrong


@wrong("summary field 'mean' is torch.float16", "name dtypes in summary_dtypes")
class SummaryInHalf(Flow):
    def summarize(self, k, v):  # wrong
        return {"mean": k.mean(0).half()}
