"""Errors of the vortex_torch layer. vortex_torch asserts, so these are AssertionErrors too."""

from __future__ import annotations

import torch

from kvsieve.errors import ConfigError, FlowError


class OpError(FlowError, AssertionError):
    """An op that is called with operands it cannot take: type, rank, format, shape or device.

    Args:
        where: the op or function. problem: what it expected and received. remedy: what to do instead.
    """

    def __init__(self, where: str, problem: str, remedy: str) -> None:
        super().__init__(where, problem, remedy)
        self.problem = f"{where}: {problem}"  # the trace replaces where by the flow's method


class UnknownField(OpError, AttributeError):
    """A context field that has no value while a flow is traced."""


class PageSizeError(ConfigError, AssertionError):
    """A flow whose page size is fixed got another one."""


class FormatError(ConfigError, RuntimeError):
    """Tensors of two formats, or a tensor with and one without a format, in one torch op."""


def described(x: object) -> str:
    """A value in one line: a tensor by dtype and shape, anything else as it prints."""
    if isinstance(x, torch.Tensor):
        return f"a {x.dtype} tensor of shape {list(x.shape)}"
    return repr(x)
