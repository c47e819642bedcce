"""The vortex_torch surface: flows and scripts that were written for vortex_torch run here unchanged.

``install()`` makes ``import vortex_torch`` resolve to this layer; ``python -m kvsieve.compat.vortex SCRIPT`` runs a
script that way. Not affiliated with vortex_torch (Infini-AI-Lab); the implementation is kvsieve's own.
"""

from kvsieve.compat.vortex.install import install

__all__ = ["install"]
