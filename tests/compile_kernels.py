"""Compile the Triton kernels for compute capability 9.0, without a GPU: a compiler refuses more than the interpreter.

Run without TRITON_INTERPRET; prints the kernels that failed, and exits with their number.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from kvsieve.backends.triton import attend, evict, longrow, seed, select, store
from kvsieve.backends.triton.generate import generate_score, generate_summarize
from kvsieve.backends.triton.generate.program import Variant
from kvsieve.backends.triton.generate.run import Built
from kvsieve.backends.triton.launch import UNFUSED
from kvsieve.flow import build_flow, load_flow
from kvsieve.graph import Geometry, trace_flow

PAPERS = Path(__file__).parents[1] / "examples" / "paper_flows.py"
TARGET = GPUTarget("cuda", 90, 32)
FLOATS = {"q", "k", "v", "out", "k_pool", "v_pool"}
SINGLES = {"lse", "part", "part_lse", "raw", "sinks", "scores", "mass", "mass_sum", "unit", "weights", "column"}
LONGS = {"blocks", "count", "lengths", "rows", "pages", "table", "requests", "pages_out", "blocks_out", "recent",
         "bounds", "offsets", "slots", "positions", "position"}  # fmt: skip
INTS = {"bitmap", "found"}
NUMBERS = {"scale", "softcap"}
POINTERS = {"q_ptr": "*bf16", "k_ptr": "*bf16", "v_ptr": "*bf16", "k_max_ptr": "*bf16", "k_min_ptr": "*bf16"}
POINTERS |= {f"{name}_ptr": "*i64" for name in ("requests", "table", "row_table", "widths", "lengths", "blocks")}
KINDS = (FLOATS, "*{}"), (SINGLES, "*fp32"), (LONGS, "*i64"), (INTS, "*i32"), (NUMBERS, "fp32")


def signature(kernel: Any, constants: dict[str, Any], dtype: str) -> dict[str, str]:
    """Types of a kernel's arguments, by their names."""
    kinds = {name: what.format(dtype) for names, what in KINDS for name in names}
    return {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}


def cases() -> list[tuple[str, Any, dict[str, Any], int, str]]:
    """(what, kernel, constants, warps, dtype of K and V) of each kernel, in the forms that differ."""
    made: list[tuple[str, Any, dict[str, Any], int, str]] = []
    for dtype, tokens, stages, splits, more in (
        ("bf16", 32, 5, 1, {}),
        ("bf16", 128, 1, 16, {"SINKS": True}),
        ("fp16", 32, 5, 8, {"SOFTCAP": True, "RAW": True}),
        ("bf16", 32, 5, 2, {"HEADS": 16}),
        ("bf16", 32, 5, 1, {"RAW": True, "MASS": True}),
        ("fp32", 16, 5, 4, {"RAW": True, "SINKS": True}),
    ):
        wide = dtype == "fp32"
        constants = {
            "P": 5, "D": 80, "DV": 48, "ROWS": 16, "HEADS": {"bf16": 4, "fp16": 8, "fp32": 16}[dtype],
            "PARTS": {"bf16": 3, "fp16": 2, "fp32": 1}[dtype], "TIMES": 1, "TOKENS": tokens, "BLOCK_D": 128,
            "BLOCK_DV": 64, "SOFTCAP": False, "SINKS": False, "RAW": False, "WIDE": wide, "GROUP": 4, "SPLITS": splits,
            "PART": min(splits, 8), "STAGES": stages, "PDL": 1, "MASS": False, "BLOCK_P": 8, "PAGES": 64,
            "REDUCTION": "mean", "SUM": True, **more,
        }  # fmt: skip
        absent = {"sinks": not constants["SINKS"], "raw": not constants["RAW"], "part": splits == 1}
        absent |= {"part_lse": splits == 1}
        absent |= dict.fromkeys(("pages", "rows", "unit", "mass", "mass_sum"), not constants["MASS"])
        constants |= {name: None for name, gone in absent.items() if gone}
        made.append((f"attend {dtype} {splits}", attend._attend_kernel, constants, 4, dtype))
        if splits > 1:
            made.append((f"merge {splits}", attend._merge_kernel, constants, 4, dtype))
    for width, warps in ((64, 1), (2048, 4), (8192, 8), (131072, 8)):
        whole = width <= 8192
        constants = {
            "BLOCK": width, "GROUPS": 64, "WHOLE": whole, "ALL": whole, "REQUESTS": 8, "RANKED": True,
            "LIST": 128, "MOST": longrow.MOST, "PIECE": longrow.PIECE, "PAIRS": width == 2048, "PDL": 2,
            **({"bitmap": None, "found": None} if whole else {}),
        }  # fmt: skip
        made.append((f"select {width}", select._select_kernel, constants, warps, "bf16"))
    constants = {"STRIDE_BITS": 5, "SAMPLES": longrow.SAMPLES, "PDL": 1}
    made.append(("bound", longrow._bound_kernel, constants, 8, "bf16"))
    made.append(("bitmap", longrow._bitmap_kernel, {"PIECE": longrow.PIECE, "PDL": 1}, 4, "bf16"))
    made.append(
        (
            "write",
            store._write_kernel,
            {"D": 80, "DV": 48, "BLOCK": 128, "SLOTS": True, "MASS": True, "PDL": 1},
            1,
            "bf16",
        )
    )
    made.append(("enter", store._enter_kernel, {"SIZES": (1, 80, 3000), "PDL": 2}, 1, "bf16"))
    for reduction in ("mean", "max"):
        constants = {"P": 5, "GROUP": 3, "BLOCK_P": 8, "PAGES": 64, "REDUCTION": reduction, "SUM": True, "PDL": 1}
        made.append((f"mass {reduction}", store._mass_kernel, constants, 2, "bf16"))
    constants = {"P": 5, "BLOCK_P": 8, "BLOCK_H": 8, "PAGES": 64, "PDL": 1}
    made.append(("forget mass", store._clear_kernel, constants, 4, "bf16"))
    constants = {"P": 5, "D": 80, "DV": 48, "BLOCK": 1024, "WIDTH": 128, "MASS": True, "PDL": 1}
    made.append(("evict", evict._evict_kernel, constants, 4, "bf16"))
    for dtype in ("bf16", "fp32"):
        constants = {"P": 5, "D": 80, "GROUP": 4, "ROWS": 64, "TOKENS": 64, "BLOCK_D": 128, "SOFTCAP": True}
        constants["WIDE"] = dtype == "fp32"
        made.append((f"lse {dtype}", seed._lse_kernel, {**constants, "SINKS": True}, 4, dtype))
        made.append((f"columns {dtype}", seed._columns_kernel, {**constants, "REDUCTION": "max"}, 4, dtype))
    return made


def generated() -> list[tuple[str, ASTSource, int]]:
    """Kernels of flows: (what, source, warps). Scores, for chunks dealt out and not, waiting at once or late;
    summaries, of pages that are full and of those that a step may fill."""
    made = []
    shipped = [build_flow(name) for name in ("gqa_quest_sparse_attention", "h2o", "block_sparse_attention")]
    papers = [load_flow(f"{PAPERS}:{name}") for name in ("Loki", "DoubleSparsity", "LServe")]
    for flow in (*shipped, *papers):
        graphs = trace_flow(flow, Geometry(1, 80, 48, 3))
        program = generate_score(graphs)
        built = program.built(Variant(2))
        for requests, late, pdl in ((0, False, 1), (8, True, 1), (64, True, 2)):
            made += kernels_of(built, {"REQUESTS": requests, "LATE": late, "PDL": pdl})
        if program.whole is not None:
            made += kernels_of(program.whole.built(Variant(2)), {"REQUESTS": 0, "LATE": True, "PDL": 1})
        if graphs.summarize is not None:
            built = generate_summarize(graphs).built(Variant(2, None))
            sizes = {"P": 1, "D": 80, "DV": 48}
            made += kernels_of(built, {**sizes, "PDL": 3, "tokens": None})
            made += kernels_of(built, {**sizes, "PDL": 2})
    return made + token_major()


def token_major() -> list[tuple[str, ASTSource, int]]:
    """Kernels that read K and V where an engine stores token by token."""
    made = []
    for flow in (build_flow("gqa_quest_sparse_attention"), load_flow(f"{PAPERS}:Loki")):
        graphs = trace_flow(flow, Geometry(16, 128, 128, 4))
        if graphs.summarize is not None:
            built = generate_summarize(graphs).built(Variant(2, None, False, True))
            made += kernels_of(built, {"P": 16, "D": 128, "DV": 128, "PDL": 3, "tokens": None})
        built = generate_score(graphs).built(Variant(2, torch.bfloat16, False, True))
        made += kernels_of(built, {"REQUESTS": 0, "LATE": False, "PDL": 1})
    assert sum("k_token" in source.fn.arg_names for _, source, _ in made) >= 2
    return made


def kernels_of(built: Built, choices: dict[str, Any]) -> list[tuple[str, ASTSource, int]]:
    """All kernels of a program, with some constants."""
    made = []
    for kernel, tile in (*built.ahead, *zip(built.kernels, built.tilings, strict=True)):
        known = {
            "PAGES": tile.pages,
            "HEADS": 2,
            "EACH": tile.each,
            "STAGES": tile.stages,
            "DOT": tl.bfloat16,
            **choices,
        }
        known |= {one.name: built.tilings[int(one.key)].pages for one in kernel.arguments if one.source == "pages"}
        function = getattr(built.module, kernel.name)
        types = {one.name: POINTERS.get(one.name, "*fp32" if one.name.endswith("_ptr") else "i32")
                 for one in kernel.arguments}  # fmt: skip
        types["tokens"] = ("*i64", *["*bf16"] * 4, *["i32"] * 12)
        types = {name: "constexpr" if name in known else types.get(name, "i32") for name in function.arg_names}
        own = {name: value for name, value in known.items() if name in function.arg_names}
        source = ASTSource(function, signature=types, constexprs=own)
        made.append((f"{kernel.name} {choices}", source, tile.warps))
    return made


def main() -> int:
    """Compile all; the number that failed."""
    failed = 0
    scores = generated()
    for name, source, warps in scores:
        try:
            compile(source, target=TARGET, options={"num_warps": warps} | UNFUSED)
        except Exception as error:  # whatever the compiler raises
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}"[:2000])
    for name, kernel, constants, warps, dtype in cases():
        types = signature(kernel, constants, dtype)
        if name.startswith("select"):
            types["recent"] = "i32"
        if name == "enter":
            types |= dict.fromkeys(("fields", "initial"), ("*fp32", "*bf16", "*i1")) | {"strides": ("i32",) * 6}
        if name.startswith(("lse", "columns")):
            types |= {"rows": "i32"} | ({"out": "*fp32"} if kernel is seed._columns_kernel else {})
        try:
            own = {key: value for key, value in constants.items() if key in kernel.arg_names}
            source = ASTSource(kernel, signature=types, constexprs=own)
            compile(source, target=TARGET, options={"num_warps": warps} | UNFUSED)
        except Exception as error:  # whatever the compiler raises
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}"[:2000])
    print(f"{len(cases())} kernels and {len(scores)} generated ones, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
