"""How good a flow is on a real model: seeded tasks, the share of attention that selections cover, reports."""
