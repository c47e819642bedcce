"""The plug-in's configuration: one JSON object in vLLM's ``additional_config["kvsieve"]``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvsieve.backends import backend_names
from kvsieve.budget import Budget
from kvsieve.errors import ConfigError, UnknownName, check_integer
from kvsieve.flow import Flow, check_flow, choose_page_size, load_flow

KEY = "kvsieve"
"""Where the plug-in looks in ``additional_config``."""


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    ``budget``: pages attended per decode step; ``layer_budgets``: where a layer has its own. ``skip_layers`` stay
    dense. ``audit_every``: every so many sparse steps one layer also attends everything, to see what attention the
    selection captured; 0: never.
    """

    flow: Flow
    budget: Budget
    page_size: int
    layer_budgets: Mapping[int, Budget]
    skip_layers: frozenset[int]
    backend: str
    audit_every: int

    def budget_of(self, layer: int) -> Budget:
        """The budget of a layer."""
        return self.layer_budgets.get(layer, self.budget)


def default_backend(device: str) -> str:
    """What runs flows on a type of device unless the settings say otherwise."""
    return "triton" if device == "cuda" else "compiled"


def settings_from(additional_config: Any, device: str = "cpu") -> Settings | None:
    """The settings in vLLM's ``additional_config`` for a type of device; None if there are none: the plug-in then
    changes nothing.

    Raises:
        ConfigError: with expected, received and the remedy.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    return parse(additional_config[KEY], device)


def parse(options: Any, device: str = "cpu") -> Settings:
    """Settings for a type of device from the JSON object ``{"flow": ..., "budget": {...}, ...}``.

    Raises:
        ConfigError: with expected, received and the remedy.
    """
    options = _mapping(options, KEY)
    known = ("flow", "flow_args", "budget", "layer_budgets", "page_size", "skip_layers", "backend", "audit_every")
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UnknownName(f"{KEY} option", unknown[0], known)
    for name in ("flow", "budget"):
        if name not in options:
            raise ConfigError(
                f'{KEY}: expected "{name}", received {dict(options)}; for example {{"flow": '
                '"gqa_quest_sparse_attention", "budget": {"topk": 29, "sink": 1, "recent": 2}}'
            )
    flow = load_flow(options["flow"], **_mapping(options.get("flow_args", {}), f"{KEY}.flow_args"))
    page_size = choose_page_size(flow, options.get("page_size"))
    budget = _budget(options["budget"], f"{KEY}.budget", flow, page_size)
    per_layer = _mapping(options.get("layer_budgets", {}), f"{KEY}.layer_budgets")
    budgets = {
        _layer(key, "layer_budgets"): _budget(value, f"{KEY}.layer_budgets.{key}", flow, page_size)
        for key, value in per_layer.items()
    }
    backend = options.get("backend", default_backend(device))
    if backend not in backend_names():
        raise UnknownName(f"{KEY}.backend", str(backend), backend_names())
    audit = options.get("audit_every", 0)
    check_integer(f"{KEY}.audit_every", audit, 0)
    return Settings(flow, budget, page_size, budgets, _skipped(options.get("skip_layers", [])), backend, audit)


def _budget(value: Any, where: str, flow: Flow, page_size: int) -> Budget:
    fields = _mapping(value, where)
    known = [field.name for field in dataclasses.fields(Budget)]
    unknown = sorted(set(fields) - {*known, "tokens"})
    if unknown:
        raise UnknownName(f"{where} field", unknown[0], [*known, "tokens"])
    if "tokens" in fields:
        if len(fields) > 1:
            raise ConfigError(f'{where}: expected either "tokens" or pages, received {dict(fields)}; drop one')
        budget = Budget.tokens(fields["tokens"], page_size, selects=flow.score is not None)
    else:
        budget = Budget(**{"topk": 0, **fields})
    check_flow(flow, page_size, budget)
    return budget


def _skipped(value: Any) -> frozenset[int]:
    if not isinstance(value, list):
        raise ConfigError(f"{KEY}.skip_layers: expected a list of layer numbers such as [0, 1], received {value!r}")
    return frozenset(_layer(one, "skip_layers") for one in value)


def _layer(value: Any, where: str) -> int:
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    check_integer(f"{KEY}.{where}", number, 0)
    return int(number)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where}: expected a JSON object, received {value!r}")
    return value
