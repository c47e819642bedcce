"""Line breaks of generated source."""

from __future__ import annotations

WIDTH = 116
INDENT = "    "


def broken(line: str) -> list[str]:
    """A line of at most :data:`WIDTH` columns, or its outermost call, an argument a line; the comment goes first."""
    if len(line) <= WIDTH or line.lstrip().startswith("#"):
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    code, _, comment = line.strip().partition("  # ")
    start, end = _outer_call(code)
    if start < 0:
        return [line]
    lines = [f"{indent}# {comment}"] if comment else []
    lines.append(f"{indent}{code[: start + 1]}")
    lines += [f"{indent}{INDENT}{argument}," for argument in _arguments(code[start + 1 : end])]
    return [*lines, f"{indent}{code[end:]}"]


def _outer_call(code: str) -> tuple[int, int]:
    """Where the longest outermost parenthesis of a call opens and closes; -1 if there is none."""
    best, depth, start = (-1, -1), 0, 0
    for place, letter in enumerate(code):
        if letter in "([":
            start = place if depth == 0 else start
            depth += 1
        elif letter in ")]":
            depth -= 1
            called = code[start] == "(" and start and (code[start - 1].isalnum() or code[start - 1] == "_")
            if depth == 0 and called and place - start > best[1] - best[0]:
                best = start, place
    return best


def _arguments(text: str) -> list[str]:
    """Arguments between commas that stand in no bracket."""
    parts, depth, first = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and depth == 0:
            parts.append(text[first:place].strip())
            first = place + 1
    return [*parts, text[first:].strip()]
