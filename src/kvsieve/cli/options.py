"""Command-line values: flow arguments, budgets, dtypes, layers, files, devices."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvsieve.budget import Budget, BudgetTooSmall
from kvsieve.dtypes import DTYPES
from kvsieve.errors import ConfigError, UnknownName, check_integer
from kvsieve.flow import Flow, flow_name, load_flow
from kvsieve.retention import Evict, Keep, Retention

CONSTANTS: dict[str, Any] = {"true": True, "false": False, "none": None}
DEFAULT_BUDGET_TOKENS = 512
RETENTIONS = ("keep", "evict")
PACKAGE = Path(__file__).parents[1]
OWN_TEXTS = (PACKAGE / "evaluate" / "jargon.txt", PACKAGE.parents[1] / "examples" / "jargon.txt")
"""Where a wheel and a checkout have the text that commands read unless another is named."""


def parse_flow_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """``["w_peak=0.5", "name=x"] -> {"w_peak": 0.5, "name": "x"}``; values are int, float, bool, None, a list as in
    JSON, or text.

    Raises:
        ConfigError: a pair is not ``key=value``, or a key comes twice.
    """
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"--flow-arg: expected key=value, such as decay=0.9, received {pair!r}")
        if key in arguments:
            raise ConfigError(f"--flow-arg {key}: expected one value, received several")
        arguments[key] = parse_value(value)
    return arguments


def parse_value(text: str) -> Any:
    """A value as int, float, bool, None or a JSON list if it reads as one, otherwise as text."""
    if text.lower() in CONSTANTS:
        return CONSTANTS[text.lower()]
    if text.startswith("["):
        try:
            return json.loads(text)
        except ValueError:
            return text
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_dtype(name: str) -> torch.dtype:
    """``fp32``, ``bf16`` or ``fp16``.

    Raises:
        UnknownName: another name.
    """
    if name not in DTYPES:
        raise UnknownName("dtype", name, DTYPES)
    return DTYPES[name]


def parse_layers(text: str, option: str = "--skip-layers") -> list[int]:
    """``"0,1,4-6" -> [0, 1, 4, 5, 6]``; empty text is no layer.

    Raises:
        ConfigError: a part is no number and no range.
    """
    layers: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"{option}: expected numbers such as 0,1,4-6, received {part!r}")
        layers.extend(range(int(first), int(last or first) + 1))
    return sorted(set(layers))


def choose_budget(
    flow: Flow,
    page_size: int,
    tokens: int | None = None,
    *,
    topk: int | None = None,
    sink: int | None = None,
    recent: int | None = None,
    ratio: float | None = None,
) -> Budget:
    """A budget in tokens (512 if nothing is said), or one in pages.

    Raises:
        ConfigError: both ways are mixed, or a value is out of range.
    """
    in_pages = {"topk": topk, "sink": sink, "recent": recent, "ratio": ratio}
    given = {name: value for name, value in in_pages.items() if value is not None}
    if given and tokens is not None:
        raise ConfigError(
            f"expected either --budget-tokens or pages, received --budget-tokens and --{', --'.join(given)}; drop one"
        )
    if given and flow.score is not None and not {"topk", "ratio"} & set(given):
        raise ConfigError(
            f"a budget in pages needs --topk or --ratio, received only --{', --'.join(given)}: the flow would choose "
            "nothing; add --topk N (--topk 0 for sink and recent pages alone)"
        )
    for name, least in (("topk", 0), ("sink", 0), ("recent", 1)):
        check_integer(f"--{name}", given.get(name, least), least)
    if ratio is not None and not 0 <= ratio <= 1:
        raise ConfigError(f"--ratio: expected a number in [0, 1], received {ratio}")
    if given:
        return Budget(**{"topk": 0, **given})  # type: ignore[arg-type]
    wanted = DEFAULT_BUDGET_TOKENS if tokens is None else tokens
    check_integer("--budget-tokens", wanted, 1)
    try:
        return Budget.tokens(wanted, page_size, selects=flow.score is not None)
    except BudgetTooSmall as error:
        raise ConfigError(
            f"--budget-tokens: {error.problem}; raise the budget to {error.least} tokens, lower --page-size, or count "
            "pages with --topk, --sink and --recent"
        ) from None


def note_budget(flow: Flow, budget: Budget, *, asked: bool = False) -> None:
    """Say on stderr that a budget leaves a flow nothing to choose, unless just that was ``asked`` for."""
    if asked:
        return
    if flow.score is None:
        why = "it has no score: it attends sink and recent pages only"
    elif not budget.topk and not budget.ratio:
        why = "the budget is all sink and recent pages"
    else:
        return
    print(f"note: flow {flow_name(flow)} chooses no pages, for {why}", file=sys.stderr)


def load_flows(names: Sequence[str], pairs: Sequence[str]) -> list[Flow]:
    """Flows of a command; with arguments there may be one.

    Raises:
        ConfigError: arguments for several flows, or wrong ones.
    """
    arguments = parse_flow_arguments(pairs)
    if arguments and len(set(names)) > 1:
        raise ConfigError("--flow-arg belongs to one flow: expected one, received several; run them one by one")
    return [load_flow(name, **arguments) for name in names]


def choose_retention(
    flow: Flow, name: str, capacity: int | None, sink: int | None, recent: int | None, in_pages: Mapping[str, object]
) -> Retention:
    """``keep``, or ``evict`` with a capacity in tokens; ``sink`` and ``recent`` are tokens then.

    ``in_pages``: options that only a budget has, by name; None where not given.

    Raises:
        ConfigError: options of the one are given with the other, or values are out of range.
    """
    if name not in RETENTIONS:
        raise UnknownName("retention", name, RETENTIONS)
    if name == "keep":
        if capacity is not None:
            raise ConfigError("--capacity: expected --retention evict beside it, received --retention keep")
        return Keep()
    given = sorted(option for option, value in in_pages.items() if value is not None)
    if given:
        raise ConfigError(f"--retention evict has a --capacity and no budget: received --{', --'.join(given)} too")
    if capacity is None:
        raise ConfigError("--retention evict: expected --capacity TOKENS, received none")
    sinks = Evict.sink if sink is None else sink
    if recent is None:  # without mass nothing else stays
        recent = Evict.recent if flow.mass else max(1, capacity - sinks)
    return Evict(capacity, sinks, recent)


def read_file(name: str, option: str) -> str:
    """Text of a UTF-8 file, or of stdin for ``-``.

    Raises:
        ConfigError: it cannot be read; names the option that asked for it.
    """
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{option} {name}: expected UTF-8 text, received other bytes ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"{option} {name}: {error.strerror or error}; expected a readable text file") from None


def read_text(name: str | None) -> str:
    """The text of a ``--text`` file; None: kvsieve's own, from wherever it lies, whatever the working directory.

    Raises:
        ConfigError: it cannot be read, or an installation lacks it.
    """
    if name is not None:
        return read_file(name, "--text")
    own = next((path for path in OWN_TEXTS if path.is_file()), None)
    if own is None:
        raise ConfigError("--text: expected a file with a text, received none, and kvsieve's own is not installed here")
    return own.read_text(encoding="utf-8")


def check_device(name: str) -> None:
    """Refuse a device that this machine does not have.

    Raises:
        ConfigError: no such device.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if "device string" in reason:  # torch lists all that it was ever ported to
            reason = "it is no name of a device"
        needs = "; it needs an NVIDIA GPU and a CUDA build of torch" if name.startswith("cuda") else ""
        raise ConfigError(f"--device {name}: expected a device of this machine, such as cpu; {reason}{needs}") from None
