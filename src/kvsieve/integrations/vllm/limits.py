"""What the plug-in refuses at start, each with its reason and the remedy."""

from __future__ import annotations

import math
from typing import Any

from kvsieve.errors import ConfigError
from kvsieve.flow import Flow, flow_name
from kvsieve.integrations.vllm.config import Settings


def refuse_what_vllm_lacks(settings: Settings, vllm_config: Any) -> None:
    """Refuse what vLLM cannot give a flow, and engine options that the plug-in cannot honour.

    Raises:
        ConfigError: with expected, received and the remedy.
    """
    flow, cache, parallel = settings.flow, vllm_config.cache_config, vllm_config.parallel_config
    refuse_prefix_caching(flow, cache.enable_prefix_caching)
    if cache.cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(
            f"--kv-cache-dtype: expected auto (K and V in the model's own dtype), received {cache.cache_dtype}; leave "
            "it out"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"{name}: expected 1 (a request's pages on one worker), received {getattr(parallel, name)}; use tensor "
                "parallelism"
            )
    if (flow.init_state is not None or flow.mass is not None) and vllm_config.speculative_config is not None:
        raise ConfigError(
            f"flow {flow_name(flow)} keeps state, which rejected draft tokens would have changed: expected no "
            "speculative_config, received one; use a flow of summaries only"
        )
    if vllm_config.kv_transfer_config is not None:
        raise ConfigError(
            "kvsieve: expected no kv_transfer_config, received one: blocks that a connector brings in are written "
            "behind the plug-in, which would not summarize their pages"
        )
    layers = layer_count(vllm_config)
    beyond = sorted(layer for layer in {*settings.skip_layers, *settings.layer_budgets} if layer >= layers)
    if beyond:
        raise ConfigError(
            f"kvsieve: expected layers of a model that has {layers} (0 to {layers - 1}), received {beyond} in "
            "skip_layers or layer_budgets"
        )


def refuse_prefix_caching(flow: Flow, caching: bool) -> None:
    """Refuse prefix caching beside attention mass that prompts seed.

    Raises:
        ConfigError: names the option that turns it off.
    """
    if flow.mass is not None and flow.mass.seed != "none" and caching:
        raise ConfigError(
            f"flow {flow_name(flow)} seeds its attention mass by the prompt's queries, and vLLM skips those of a "
            "cached prefix: expected prefix caching to be off, received on; add --no-enable-prefix-caching"
        )


def refuse_backend(settings: Settings, device: str) -> None:
    """Refuse a backend of kvsieve that does not run on a type of device.

    Raises:
        ConfigError: names those that do.
    """
    fitting = ("triton", "triton+compiled", "eager") if device == "cuda" else ("compiled", "eager")
    if settings.backend not in fitting:
        raise ConfigError(f"kvsieve.backend: expected {', '.join(fitting)} on {device}, received {settings.backend}")


def refuse_audit(settings: Settings, graphs: bool) -> None:
    """Refuse an audit of captured decode steps, which nobody can look into.

    Raises:
        ConfigError: audits are wanted, and graphs.
    """
    if settings.audit_every and graphs:
        raise ConfigError(
            f"kvsieve.audit_every: expected 0 where decode steps are CUDA graphs, received {settings.audit_every}; "
            "leave it out or add --enforce-eager"
        )


def refuse_memory(side_fields: int, memory: int, utilization: float) -> None:
    """Refuse summaries and state of so many bytes that cannot fit beside what vLLM takes of a GPU.

    Raises:
        ConfigError: names the options that lower them.
    """
    left = int((1 - utilization) * memory)
    if side_fields > left:
        raise ConfigError(
            f"kvsieve: expected summaries and state to fit into the {left / 1e9:.1f} GB that --gpu-memory-utilization "
            f"{utilization} leaves, received {side_fields / 1e9:.1f} GB; lower it, and with state also --max-num-seqs "
            "or --max-model-len"
        )


def layer_count(vllm_config: Any) -> int:
    """Layers of the whole model."""
    return int(vllm_config.model_config.hf_text_config.num_hidden_layers)


def refuse_block_size(page_size: int, block_size: int) -> None:
    """Refuse pages that do not divide vLLM's blocks.

    Raises:
        ConfigError: names page sizes and block sizes that fit.
    """
    if block_size % page_size:
        fitting = [size for size in range(1, block_size + 1) if block_size % size == 0]
        raise ConfigError(
            f"page_size {page_size} does not divide vLLM's blocks of {block_size} tokens: expected one of {fitting}, "
            f"or --block-size {math.lcm(page_size, 32)}"
        )


def refuse_layer(name: str, layer: Any) -> None:
    """Refuse a layer whose attention the plug-in cannot do.

    Raises:
        ConfigError: names the layer and what it needs; ``skip_layers`` is the remedy.
    """
    impl, needs = layer.impl, None
    if impl.alibi_slopes is not None:
        needs = "ALiBi slopes"
    elif impl.kv_sharing_target_layer_name is not None:
        needs = f"the keys and values of layer {impl.kv_sharing_target_layer_name}"
    elif getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
        needs = f"values of another width ({layer.head_size_v}) than keys ({layer.head_size})"
    if needs:
        raise ConfigError(f"layer {name} needs {needs}, which the plug-in does not offer: put it into skip_layers")
