"""Arguments of a wrong type are the user's error: one sentence, not an AttributeError from within."""

import pytest
import torch

from kvsieve import Budget, Runtime, build_flow, load_flow
from kvsieve.errors import ConfigError
from tiny_models import build


@pytest.mark.parametrize("wrong", [3, None, Budget])
def test_flows_and_backends_of_a_wrong_type(wrong: object) -> None:
    for call in (load_flow, build_flow):
        with pytest.raises(ConfigError, match=r"flow: expected a registered name.*received"):
            call(wrong)
    with pytest.raises(ConfigError, match="flow: expected a Flow instance or a registered name"):
        Runtime(wrong, Budget(2))
    with pytest.raises(ConfigError, match=r"backend: expected a Backend instance or a name \(eager, compiled"):
        Runtime("h2o", Budget(2), backend=wrong)
    with pytest.raises(ConfigError, match=r"budget: .*or keep fewer tokens with retention=Evict\(capacity\)"):
        Runtime("h2o", wrong)


def test_a_model_or_nothing_in_place_of_its_config() -> None:
    from kvsieve import SparseCache

    model = build("llama")
    for wrong in (model, None, "llama"):
        with pytest.raises(ConfigError, match=r"config: expected a model's config.*pass model\.config"):
            SparseCache(wrong, flow="h2o", budget=Budget(2))


@pytest.mark.parametrize("wrong", ["a", None, -1.0])
def test_crop_by_something_else_than_a_number(wrong: object) -> None:
    from kvsieve import SparseCache

    model = build("llama")
    cache = SparseCache(model.config, flow="h2o", budget=Budget(2), page_size=4)
    model(torch.ones(1, 9, dtype=torch.long), past_key_values=cache)
    with pytest.raises(ConfigError, match=r"crop: expected a number of tokens in \[-9, 0\], received"):
        cache.crop(wrong)
