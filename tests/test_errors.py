"""Names that are not known: near ones are suggested, far ones are not."""

import pytest

from kvsieve.errors import UnknownName

KNOWN = ["compiled", "eager", "gqa_quest_sparse_attention", "h2o", "snapkv", "streaming_llm"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gqa_qest", "did you mean gqa_quest_sparse_attention?"),
        ("quest", "did you mean gqa_quest_sparse_attention?"),
        ("snapvk", "did you mean snapkv?"),
        ("eagre", "did you mean eager?"),
        ("streamin", "did you mean streaming_llm?"),
        ("nope", "known: "),
        ("x", "known: "),
        ("", "known: "),
    ],
)
def test_only_near_names_are_suggested(name: str, hint: str) -> None:
    assert f"unknown flow {name!r}: {hint}" in str(UnknownName("flow", name, KNOWN))
