"""Storage: blocks, page tables, the pool of one layer, state rows."""
