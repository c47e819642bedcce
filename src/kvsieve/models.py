"""Models for the CLI, the demo and the tests: ``smollm2`` by name, or anything that Transformers loads.

``python -m kvsieve.models smollm2`` fetches the small model once; later loads need no network.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from kvsieve.cache import cache_dir
from kvsieve.errors import ConfigError, KvsieveError

IMPLEMENTATION = "kvsieve"
"""The ``attn_implementation`` that the Transformers integration registers."""


def load_model(
    name: str, dtype: torch.dtype = torch.float32, attn_implementation: str = IMPLEMENTATION, device: str = "cpu"
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        name: ``smollm2`` (SmolLM2-135M-Instruct, fetched once into :func:`cache_dir`), a local directory in the
            layout of Transformers, or a hub path such as ``owner/name``.
        dtype: floating dtype of the weights and activations.
        attn_implementation: ``kvsieve``, or one of Transformers' own such as ``sdpa``.
        device: where the model goes, such as ``cpu`` or ``cuda``.

    Returns:
        ``(model, tokenizer)``; the model is in eval mode.

    Raises:
        ConfigError: Transformers is missing, or there is no such model.
        KvsieveError: the model could not be fetched.
    """
    require("transformers")
    directory, offline = resolve_model(name)
    if attn_implementation == IMPLEMENTATION:
        importlib.import_module("kvsieve.integrations.transformers")  # importing it registers the attention
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, local_files_only=offline)
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attn_implementation, local_files_only=offline
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"model {name!r} does not load: expected 'smollm2', a local model directory or a reachable hub path; "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return model.to(device).eval(), tokenizer


def resolve_model(name: str) -> tuple[str, bool]:
    """What ``from_pretrained`` should load, and whether it lies on this machine.

    Raises:
        ConfigError: ``name`` is written as a local path and no such directory exists.
        KvsieveError: the small model could not be fetched.
    """
    if name == "smollm2":
        from kvsieve.smollm2 import fetch_smollm2

        return str(fetch_smollm2(cache_dir())), True
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path), True
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1
    if looks_local:
        found = "a file" if path.exists() else "no such directory"
        raise ConfigError(f"model {name!r}: expected 'smollm2', a local directory or a hub path owner/name; {found}")
    return name, False


def positions_of(model: Any) -> int | None:
    """Tokens that a model's position encoding covers; None if its configuration does not say."""
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit


def require(*packages: str) -> None:
    """Refuse to go on without the packages of the ``hf`` extra.

    Raises:
        ConfigError: one is not installed; says how to install it.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"models need the package {package}, which is not installed: pip install 'kvsieve[hf]'")


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, for errors of one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def quiet_transformers() -> None:
    """Keep the loading bars and hints of Transformers out of the terminal, where it is installed."""
    try:
        from transformers.utils import logging
    except ImportError:
        return  # load_model says what is missing
    warnings.filterwarnings("ignore", message="`past_key_values` is deprecated", category=FutureWarning)
    logging.set_verbosity_error()
    logging.disable_progress_bar()


if __name__ == "__main__":
    try:
        for requested in sys.argv[1:] or ["smollm2"]:
            print(f"{requested}: {resolve_model(requested)[0]}")
    except KvsieveError as failure:
        print(f"error: {failure}", file=sys.stderr)
        raise SystemExit(2) from None
