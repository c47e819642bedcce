"""Triton's interpreter, without doing again what is done: it replaces every function of ``triton.language`` at the call
of a kernel and then at each call inside of it, which takes longer than what the functions do on small tiles."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def replace_language_once() -> None:
    """Calls inside of a kernel leave the modules alone that this run of the kernel has replaced already."""
    from triton.runtime import interpreter

    replace: Callable[[Any], Any] = interpreter._patch_lang
    execute: Callable[..., None] = interpreter.GridExecutor.__call__
    replaced: set[frozenset[int]] = set()

    def replace_once(function: Any) -> Any:
        modules = frozenset(id(value) for value in function.__globals__.values() if inspect.ismodule(value))
        if modules in replaced:
            return None  # what calls inside of a kernel do not use
        replaced.add(modules)
        return replace(function)

    def execute_afresh(self: Any, *arguments: Any, **named: Any) -> None:
        replaced.clear()
        try:
            execute(self, *arguments, **named)
        finally:
            replaced.clear()

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = execute_afresh
