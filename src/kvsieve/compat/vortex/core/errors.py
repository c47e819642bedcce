"""Errors of the vortex_torch layer. vortex_torch asserts, so these are AssertionErrors too."""

from __future__ import annotations

from kvsieve.errors import ConfigError, FlowError

REMEDY = "pass what the docstring says"


class OpError(FlowError, AssertionError):
    """An op that is called with operands it cannot take: type, rank, format, shape or device.

    Args:
        message: ``where: problem`` or ``where: problem; remedy``.
    """

    def __init__(self, message: str) -> None:
        where, _, rest = message.partition(": ")
        problem, _, remedy = rest.rpartition("; ")
        problem, remedy = (problem, remedy) if problem else (remedy, REMEDY)
        super().__init__(where, problem, remedy)
        self.problem = f"{where}: {problem}"  # the trace replaces where by the flow's method


class UnknownField(OpError, AttributeError):
    """A context field that has no value while a flow is traced."""


class PageSizeError(ConfigError, AssertionError):
    """A flow whose page size is fixed got another one."""


class FormatError(ConfigError, RuntimeError):
    """Tensors of two formats, or a tensor with and one without a format, in one torch op."""
