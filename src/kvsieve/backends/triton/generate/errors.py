"""What cannot be generated."""

from __future__ import annotations


class Refused(Exception):
    """A flow, or a part of one, that no kernel is generated for. ``reason`` says which op and why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
