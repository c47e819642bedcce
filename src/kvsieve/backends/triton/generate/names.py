"""Names in generated kernels: those of the flow's fields and graph nodes, made unique."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass, field

from kvsieve.backends.triton.generate.ir import Op

_RESERVED = (
    "tl f triton page pages valid block row head heads request place chunk chunks width width_bound length sink "
    "page_size start program groups group mass_scale blocks_ptr count number first PAGES HEADS EACH DOT PDL "
    "wait_for_inputs let_next_start"
)
RESERVED = frozenset(_RESERVED.split())


@dataclass
class Names:
    """Hands out names, each once."""

    used: set[str] = field(default_factory=lambda: set(RESERVED))
    _kept: dict[int, str] = field(default_factory=dict)

    def new(self, base: str) -> str:
        """``base`` as an identifier, with a number behind it if it is taken."""
        base = re.sub(r"\W", "_", base).strip("_") or "value"
        base = f"{base}_" if keyword.iskeyword(base) else base
        name, number = base, 1
        while name in self.used:
            number += 1
            name = f"{base}_{number}"
        self.used.add(name)
        return name

    def kept(self, op: Op, base: str) -> str:
        """The one name of an op."""
        if id(op) not in self._kept:
            self._kept[id(op)] = self.new(base)
        return self._kept[id(op)]
