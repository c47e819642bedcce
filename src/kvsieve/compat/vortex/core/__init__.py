"""What both sides of the vortex_torch surface share; not itself part of that surface."""
