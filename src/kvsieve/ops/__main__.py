"""Prints docs/ops.md: ``python -m kvsieve.ops > docs/ops.md``."""

from __future__ import annotations

from kvsieve.ops import OpKind, table

HEAD = """# The op set of flows

Written by `python -m kvsieve.ops > docs/ops.md`; a test keeps it current.

A flow may use the ATen ops below, under any of their names in Python (`x + y` is `add`, `x.max(0)` is `max`, `x @ y`
is `matmul`, `x[:, None]` is `slice` and `unsqueeze`). Other functions of PyTorch work if torch takes them apart into
these: `layer_norm`, `normalize`, `cosine_similarity`, `argsort`, `roll`, `repeat`, `addmm`, `logaddexp`, `var_mean`
and many more. All else is refused when the flow is traced, with the line that used it.

What holds for every op: it returns a new tensor (no in-place form, no `out=`), draws no random numbers, computes in
float32, integers or booleans, and no tensor has two page axes. What a batch pads is never reduced.
"""


def page() -> str:
    """The text of docs/ops.md."""
    return HEAD + "".join(_section(kind) for kind in dict.fromkeys(type(kind) for kind in table.values()))


def _section(kind: type[OpKind]) -> str:
    names = [f"`{name}`" for name, row in table.items() if type(row) is kind]
    about = " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("``", "`")
    return f"\n## {kind.__name__}\n\n{about}\n\nPage axis: {kind.over_pages}.\n\n{', '.join(names)}\n"


if __name__ == "__main__":
    print(page(), end="")
