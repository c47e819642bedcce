"""Wrong calls of a runtime: refused with expected, received and the remedy, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvsieve.budget import Budget
from kvsieve.errors import ConfigError, UnknownName
from kvsieve.runtime import Runtime
from support import PoisonedRuntime
from test_runtime import tokens, twin_of

# Wrong calls


def opened(decode: bool = False) -> tuple[Runtime, Any, Any]:
    """A runtime with a request of 6 tokens in layer 0, and an open call."""
    runtime = PoisonedRuntime("gqa_quest_sparse_attention", Budget(2), page_size=4)
    request = runtime.admit()
    runtime.extend([request], [6]).attend(0, *tokens(6))
    return runtime, request, runtime.step([request]) if decode else runtime.extend([request], [2])


def _replace(index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    values = list(tokens(2))
    values[index] = change(values[index])
    return values


WRONG_TENSORS: dict[str, Callable[[], Any]] = {
    "tokens": lambda: tokens(3),
    "KV heads": lambda: tokens(2, heads=1),
    "group": lambda: tokens(2, group=2),
    "K width": lambda: tokens(2, k_width=9),
    "V width": lambda: tokens(2, v_width=9),
    "dtype": lambda: tokens(2, dtype=torch.bfloat16),
    "q heads that are no multiple": lambda: _replace(0, lambda q: torch.cat([q, q[:, :1]], 1)),
    "q width": lambda: _replace(0, lambda q: q[..., :7]),
    "q dtype": lambda: _replace(0, lambda q: q.double()),
    "v heads": lambda: _replace(2, lambda v: v[:, :1]),
    "v dtype": lambda: _replace(2, lambda v: v.half()),
    "batched k": lambda: _replace(1, lambda k: k[None]),
    "v tokens": lambda: _replace(2, lambda v: v[:1]),
}


CONSISTENT = {"KV heads", "group", "K width", "V width", "dtype"}
"""Wrong on a known layer only: a new layer may look like this."""


@pytest.mark.parametrize(
    ("what", "first"),
    [(what, first) for first in (True, False) for what in WRONG_TENSORS if not (first and what in CONSISTENT)],
)
def test_wrong_tensors_are_refused_and_change_nothing(what: str, first: bool) -> None:
    """On a known layer and, where tensors contradict each other, on a new one; the right ones still work after."""
    runtime, request, call = opened()
    if first:
        runtime.finish([request])
        runtime = PoisonedRuntime("gqa_quest_sparse_attention", Budget(2), page_size=4)
        request = runtime.admit()
        call = runtime.extend([request], [2])
    with pytest.raises(ConfigError, match="layer 0: expected"):
        call.attend(0, *WRONG_TENSORS[what]())
    assert call.attend(0, *tokens(2)).out.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [{"sinks": torch.zeros(5)}, {"softcap": 0.0}, {"softcap": float("nan")}, {"scale": float("nan")}, {"scale": 2.0}],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    _, _, call = opened(decode=True)
    with pytest.raises(ConfigError, match="layer 0: expected"):
        call.attend(0, *tokens(1), **options)
    assert call.attend(0, *tokens(1)).out.isfinite().all()


def test_wrong_calls_are_refused() -> None:
    runtime, request, call = opened()
    call.attend(0, *tokens(2))
    with pytest.raises(ConfigError, match="one attend per layer and call"):
        call.attend(0, *tokens(2))
    newer = runtime.step([request])
    with pytest.raises(ConfigError, match="newest call"):
        call.attend(0, *tokens(2))
    newer.attend(0, *tokens(1))
    empty = runtime.admit()
    with pytest.raises(ConfigError, match=r"requests with a past.*extend"):
        runtime.step([request, empty])
    with pytest.raises(ConfigError, match="distinct requests"):
        runtime.step([request, request])
    with pytest.raises(ConfigError, match="one count each"):
        runtime.extend([request], [1, 2])
    for requests, counts in (([], []), ([request], [0]), ([request, empty], [3, -1])):
        with pytest.raises(ConfigError, match="at least one new token and no negative count"):
            runtime.extend(requests, counts)
    for action in (lambda: runtime.step([99]), lambda: runtime.finish([99]), lambda: runtime.length(99)):  # type: ignore[list-item, arg-type]
        with pytest.raises(ConfigError, match="request 99"):
            action()
    with pytest.raises(ConfigError, match="request 99"):
        runtime.extend([request, 99], [1, 1])  # type: ignore[list-item]
    assert runtime.length(request) == 9, "refused calls add nothing"
    with pytest.raises(UnknownName, match="eager"):
        Runtime("streaming_llm", Budget(0), backend="eagre")
    with pytest.raises(UnknownName, match="gqa_quest"):
        Runtime("gqa_quest_sparse_atention", Budget(0))


def test_a_finish_that_names_an_unknown_request_ends_nothing() -> None:
    runtime, request, call = opened()
    call.attend(0, *tokens(2))
    for wrong in ([request, 99], [request, request]):
        with pytest.raises(ConfigError):
            runtime.finish(wrong)
        assert runtime.length(request) == 8


def test_a_missed_layer_is_refused() -> None:
    runtime = PoisonedRuntime("gqa_quest_sparse_attention", Budget(2), page_size=4)
    request = runtime.admit()
    call = runtime.extend([request], [6])
    call.attend(0, *tokens(6)), call.attend(1, *tokens(6))
    runtime.step([request]).attend(0, *tokens(1))
    with pytest.raises(ConfigError, match=r"layers \[1\] did not attend"):
        runtime.step([request])


def test_a_layer_that_comes_late_is_refused() -> None:
    """Its K and V would have a hole: the request's past was never stored."""
    runtime, request, call = opened()
    with pytest.raises(ConfigError, match=r"layer 1.*past"):
        call.attend(1, *tokens(2))
    call.attend(0, *tokens(2))
    runtime.finish([request])
    request = runtime.admit()
    call = runtime.extend([request], [2])
    call.attend(0, *tokens(2))
    assert call.attend(1, *tokens(2)).out.isfinite().all(), "nobody has a past any more"


def test_a_broken_forward_pass_can_be_given_up() -> None:
    """Finishing the requests whose tokens were half stored makes the runtime usable again."""
    twin = twin_of("gqa_h2o_sparse_attention")
    kept, broken = twin.admit(2)
    twin.extend([kept, broken], [30, 40])
    twin.runtime.step([broken]).attend(0, *twin.draw(0, 1))
    with pytest.raises(ConfigError, match=r"layers \[1\]"):
        twin.step([kept])
    twin.finish([broken])
    twin.step([kept])
    (again,) = twin.admit()
    twin.extend([again, kept], [33, 0])
    twin.step([kept, again])
    twin.check_storage()
