"""What is compared: flows, and the reference lines dense, oracle selection, random pages and recent only."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvsieve.budget import Budget
from kvsieve.errors import ConfigError
from kvsieve.flow import DEFAULT_PAGE_SIZE, Flow, check_flow, choose_page_size, flow_name, load_flow

DENSE, ORACLE, RANDOM, RECENT = "dense", "oracle selection", "random pages", "recent only"
REFERENCES = (DENSE, ORACLE, RANDOM, RECENT)
RECENT_FLOW = "streaming_llm"


@dataclass(frozen=True)
class Contender:
    """One line of the report.

    Attributes:
        name: unique; a flow's name, or a reference's.
        rule: "flow": the flow selects; else one of ``REFERENCES``.
        spec: the flow that runs, as :func:`~kvsieve.flow.load_flow` takes it.
        arguments: of the flow.
        page_size: tokens per page.
        digest: of the flow's source and arguments: results of another version are not mixed in.
        evicts: tokens are evicted: the budget is the capacity.
    """

    name: str
    rule: str
    spec: str
    page_size: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    evicts: bool = False

    def build(self) -> Flow:
        """The flow that runs."""
        return load_flow(self.spec, **self.arguments)

    def budget(self, flow: Flow, tokens: int) -> Budget:
        """The budget of ``tokens`` for this contender; everything for dense."""
        if self.rule == DENSE:
            return Budget(0, 0, 10**6)
        return Budget.tokens(tokens, self.page_size, selects=flow.score is not None)

    def stored(self, tokens: int, context: int) -> float:
        """Share of the context's K and V that stays in memory under a budget of ``tokens``."""
        return min(1.0, tokens / context) if self.evicts else 1.0


def evicting(contender: Contender) -> Contender | None:
    """The same flow where tokens are evicted; None if it cannot, or has no mass to evict by."""
    flow = contender.build()
    if contender.rule != "flow" or not flow.evictable or flow.mass is None:
        return None
    return replace(contender, name=f"{contender.name}, evicting", evicts=True)


def flow_contender(spec: str, arguments: Mapping[str, Any], page_size: int | None) -> Contender:
    """A flow by name or ``file.py:Class``.

    Raises:
        UnknownName, ConfigError: no such flow, or a page size that it refuses.
    """
    flow = load_flow(spec, **arguments)
    size = choose_page_size(flow, page_size if flow.page_size is None else None)
    check_flow(flow, size, Budget(0))
    if spec == RECENT_FLOW and not arguments and size == DEFAULT_PAGE_SIZE:
        return reference(RECENT, size)
    shown = flow_name(flow) + (f" ({', '.join(f'{k}={v}' for k, v in arguments.items())})" if arguments else "")
    return Contender(shown, "flow", spec, size, dict(arguments), _digest(flow))


def reference(rule: str, page_size: int) -> Contender:
    """A reference line; those of another page size than 16 say so."""
    name = f"{RECENT} ({RECENT_FLOW})" if rule == RECENT else rule
    shown = name if page_size == DEFAULT_PAGE_SIZE or rule == DENSE else f"{name}, page {page_size}"
    return Contender(shown, rule, RECENT_FLOW, page_size)


def line_up(
    specs: Sequence[str],
    arguments: Mapping[str, Any],
    page_size: int | None,
    references: bool = True,
    evict: bool = False,
) -> list[Contender]:
    """Flows, and the references that belong beside them: all at the first flow's page size, oracle at every one.

    ``evict``: flows that can are also run with tokens evicted.

    Raises:
        ConfigError: two flows of one name.
    """
    flows = [flow_contender(spec, arguments, page_size) for spec in dict.fromkeys(specs)]
    names = [flow.name for flow in flows]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ConfigError(f"expected flows of different names, received {double} twice; rename one of them")
    both = [(flow, evicting(flow) if evict else None) for flow in flows]
    flows = [one for pair in both for one in pair if one is not None]
    if not references:
        return flows
    sizes = list(dict.fromkeys(sorted((flow.page_size for flow in flows), reverse=True)))
    beside = [reference(rule, sizes[0]) for rule in REFERENCES]
    beside += [reference(ORACLE, size) for size in sizes[1:]]
    return beside + [flow for flow in flows if flow not in beside]


def _digest(flow: Flow) -> str:
    try:
        source = inspect.getsource(type(flow))
    except (OSError, TypeError):
        source = repr(type(flow))
    return hashlib.sha256(f"{source}{flow!r}".encode()).hexdigest()[:12]
