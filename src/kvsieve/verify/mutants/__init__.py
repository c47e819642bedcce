"""Mutants: deliberate faults, to prove that the checks would find them.

A mutant counts only if what it computes is finite, nothing but a check complains, and no check was changed for it.
"""

from kvsieve.verify.mutants import (
    attention,
    eviction,
    integration,
    lowering,
    mass,
    prefill,
    scoring,
    selection,
    storage,
    tables,
)
from kvsieve.verify.mutants.base import Mutant

__all__ = ["MUTANTS", "Mutant"]

_MODULES = (scoring, lowering, selection, attention, prefill, storage, tables, mass, eviction, integration)

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for module in _MODULES for mutant in module.TABLE.mutants}
"""Every mutant by its name."""
