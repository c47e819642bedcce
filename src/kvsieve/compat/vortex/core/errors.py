"""Errors of the vortex_torch layer. vortex_torch asserts, so these are AssertionErrors too."""

from __future__ import annotations

from kvsieve.errors import ConfigError


class OpError(ConfigError, AssertionError):
    """An op that is called with operands it cannot take: type, rank, format, shape or device."""


class PageSizeError(ConfigError, AssertionError):
    """A flow whose page size is fixed got another one."""


class FormatError(ConfigError, RuntimeError):
    """Tensors of two formats, or a tensor with and one without a format, in one torch op."""
