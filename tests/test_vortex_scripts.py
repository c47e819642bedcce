"""Scripts written for vortex_torch, run as they are; and how its name resolves to the layer."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from kvsieve.compat.vortex import install
from kvsieve.compat.vortex.__main__ import main
from kvsieve.errors import ConfigError

SCRIPTS = Path(__file__).parent / "vortex_scripts"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs a script through the runner, in this process: exit code and what it printed."""

    def run_script(name: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as exit_:
            main([str(SCRIPTS / f"{name}.py"), *arguments])
        return exit_.value.code or 0, capsys.readouterr().out

    return run_script


def numbers(line: str) -> dict[str, float]:
    """Named numbers of a line that a script printed."""
    found = re.findall(r"(rel\. error|mass|max|top-32) ([\d.e+-]+)", line)
    return {name: float(value.rstrip(",.")) for name, value in found}


@pytest.mark.parametrize("device", DEVICES)
def test_profile_mode(run, device: str) -> None:
    assert run("profile_mode", "--device", device) == (0, "profile mode: as expected\n")


@pytest.mark.parametrize("device", DEVICES)
def test_execute_mode(run, device: str) -> None:
    """128 tokens, 800 steps, bfloat16: published 8.40e-03 with a maximum of 18.2; undecayed 4.17e-01."""
    code, out = run("execute_mode", "--device", device)
    decayed, undecayed = map(numbers, out.splitlines())
    assert code == 0 and 0.002 < decayed["rel. error"] < 0.02 and 16.5 < decayed["max"] < 18.8
    assert 0.39 < undecayed["rel. error"] < 0.43


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flow", ["mean", "gqa"])
def test_oracle(run, flow: str, device: str) -> None:
    """600 steps through plan_decode and forward_indexer in bfloat16."""
    code, out = run("oracle", "--flow", flow, "--device", device)
    seen = numbers(out)
    assert code == 0 and seen["rel. error"] < 0.033
    if flow == "mean":
        assert seen["rel. error"] > 0.015 and 64.3 < seen["mass"] < 64.8


def test_the_oracle_refuses_an_undecayed_accumulator(run) -> None:
    code, out = run("oracle", "--decay", "1.0", "--device", "cpu")
    seen = numbers(out)
    assert code == 1 and 0.30 < seen["rel. error"] < 0.42 and 425 < seen["mass"] < 447


@pytest.mark.parametrize("flow", ["mean", "gqa"])
def test_oracle_on_an_odd_batch(run, flow: str) -> None:
    """Three requests, five KV heads, three query heads each, permuted tables, chunks of 7."""
    shape = ["--batch", "3", "--heads", "5", "--group", "3", "--head-dim", "80", "--chunk", "7", "--steps", "60"]
    code, out = run("oracle", "--flow", flow, *shape, "--seq-len", "99", "--ulp", "4", "--device", "cpu")
    assert code == 0 and len(out.splitlines()) == 15


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_published_bands(run, seed: int) -> None:
    """Eight seeds each of the two scripts, in the bands of docs/accumulators.md."""
    code, out = run("oracle", "--seed", str(seed), "--ulp", "4", "--device", "cpu")
    seen = numbers(out)
    assert code == 0 and 0.015 < seen["rel. error"] < 0.033 and 64.2 < seen["mass"] < 64.9 and seen["top-32"] >= 90
    code, out = run("oracle", "--seed", str(seed), "--decay", "1.0", "--device", "cpu")
    seen = numbers(out)
    assert code == 1 and 0.30 < seen["rel. error"] < 0.42 and 425 < seen["mass"] < 447
    code, out = run("execute_mode", "--seed", str(seed), "--device", "cpu")
    assert code == 0


def test_the_runner(tmp_path: Path) -> None:
    """Arguments, directory, __main__ and exit code, in a process of its own."""
    (tmp_path / "beside.py").write_text("VALUE = 5\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, beside, vortex_torch.flow\n"
        "print(__name__, sys.argv[1:], beside.VALUE, vortex_torch.flow.vFlow.__name__)\n"
        "sys.exit(7)\n"
    )
    command = [sys.executable, "-m", "kvsieve.compat.vortex", str(script), "--x", "1"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (7, "__main__ ['--x', '1'] 5 vFlow\n"), result.stderr


def test_the_runner_without_a_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main([]) == 2 and "usage" in capsys.readouterr().err
    assert main([str(tmp_path / "none.py")]) == 2 and "no such script" in capsys.readouterr().err
    assert main(["--device", "cpu"]) == 2
    assert "--device: no such script; expected a Python file, then its arguments" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "SCRIPT" in capsys.readouterr().out


NAMES = """
vortex_torch.abs FORMAT as_vtensor vTensor vOp ContextBase
vortex_torch.abs.tensor FORMAT as_vtensor vTensor
vortex_torch.abs.op vOp
vortex_torch.abs.context_base ContextBase
vortex_torch.utils Mode UNSET ElementwiseBinaryOpType ElementwiseOpType ReduceType Schedule
vortex_torch.flow vFlow register build_vflow RegistryError FlowLoadError FlowInitError algorithms registry
vortex_torch.flow.flow vFlow
vortex_torch.flow.registry register get has list_keys RegistryError
vortex_torch.flow.loader build_vflow
vortex_torch.flow.algorithms H2OSparseAttention GQAH2OSparseAttention H2OTokenSparseAttention GQAH2OTokenSparseAttention
vortex_torch.flow.algorithms BlockSparseAttention GQABlockSparseAttention GQAQuestSparseAttention
vortex_torch.indexer Context ctx get_ctx GeMV GeMM Mean Max Min Sum L2Norm Maximum Minimum Multiply Add Relu Sigmoid
vortex_torch.indexer Silu Add_Mul Abs Softmax Normalize Transpose Save Load topK approxTopK Log Exp Kron Reshape
vortex_torch.indexer MaskSlice Conv1d WhereEqual WhereNotEqual WhereGreater WhereGreaterEqual WhereLess WhereLessEqual
vortex_torch.indexer.context Context
vortex_torch.indexer.output_func topK
vortex_torch.indexer.utils_sglang plan_decode sglang_plan_decode sglang_plan_prefill
vortex_torch.indexer.triton_kernels.elementwise_binary_impl _elementwise_binary_rpr _elementwise_binary_rrr
vortex_torch.indexer.triton_kernels.elementwise_binary_impl _elementwise_binary_bpr elementwise_binary_rpr
vortex_torch.indexer.triton_kernels.elementwise_impl _elementwise_rr elementwise_rr
vortex_torch.indexer.triton_kernels.save_load_impl _save_rp _load_pr save_rp load_pr
vortex_torch.indexer.triton_kernels.matmul_impl _mm_bpr _mm_rrr _mm_rpr
vortex_torch.indexer.triton_kernels.reduce_impl _reduce_rr
vortex_torch.indexer.triton_kernels.softmax_impl _softmax_inplace_r
vortex_torch.indexer.triton_kernels.normalize_impl _normalize_inplace_r
vortex_torch.cache Context Fill Mean Max Min L2Norm GeMM Maximum Minimum Multiply Add Relu Silu Sigmoid Abs Add_Mul
vortex_torch.cache set_kv_buffer_launcher MeanInterleave MaxInterleave MinInterleave L2NormInterleave Log Exp Reshape
vortex_torch.cache.fill Fill
vortex_torch.cache.triton_kernels.fill_impl _fill_p fill_p
vortex_torch.cache.triton_kernels.reduce_impl _reduce_pp _reduce_rp _reduce_pr _reduce_rr
vortex_torch.cache.triton_kernels.set_kv set_kv_buffer_launcher
vortex_torch_C topk_output sglang_plan_decode
"""


@pytest.mark.parametrize("line", NAMES.strip().splitlines())
def test_every_import_path(line: str) -> None:
    install()
    install()  # once more changes nothing
    module_name, *names = line.split()
    module = importlib.import_module(module_name)
    for name in names:
        assert hasattr(module, name), f"{module_name}.{name}"
    if module_name.startswith("vortex_torch."):
        own = importlib.import_module(module_name.replace("vortex_torch", "kvsieve.compat.vortex", 1))
        assert own is module, "shared, not loaded twice"


def test_import_styles() -> None:
    install()
    space: dict[str, object] = {}
    exec("import vortex_torch\nimport vortex_torch.indexer as i\nfrom vortex_torch import flow, cache", space)
    assert space["vortex_torch"].indexer is space["i"] and space["flow"].vFlow  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError, match=r"vortex_torch\.nothing"):
        importlib.import_module("vortex_torch.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("vortex_torch.bridge")


@pytest.mark.parametrize("name", ["vortex_torch", "vortex_torch_C"])
def test_another_vortex_torch_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for present in [key for key in sys.modules if key.split(".")[0] in ("vortex_torch", "vortex_torch_C")]:
        monkeypatch.delitem(sys.modules, present)
    other = types.ModuleType(name)
    other.__file__ = "/somewhere/vortex.py"
    monkeypatch.setitem(sys.modules, name, other)
    with pytest.raises(ConfigError, match=rf"{name}: expected a process that has not imported it.*/somewhere"):
        install()
    assert sys.modules[name] is other
