#!/bin/sh
# What needs a CUDA GPU, in some minutes on 16 cores: kernels against PyTorch ops and float64, step graphs, the oracle,
# kernel mutants, offsets beyond 2**31 elements, fifty runs bit for bit, and two passes under compute-sanitizer.
#
#     sh tests/gpu.sh            from the repository root; PYTHON names another python3
set -u
PYTHON=${PYTHON:-python3}
export PYTHONPATH=src
failed=0

run() {
    "$@" || failed=1
}

check() {
    run "$PYTHON" -m pytest -q -n auto -rf --tb=short "$@"
}

check tests/test_triton*.py tests/test_stepgraph.py tests/test_kernel_mutants.py tests/test_autotune.py tests/test_prefill.py
# A tenth of the random flows; what reads a model from disk needs no GPU.
check -m "not slow" -k "not smollm2" tests/test_generate*.py tests/test_papers.py
check -m slow tests/test_generate_flows.py -k shipped # the rest of the grid of shapes and dtypes
check tests/test_vllm_cuda_parts.py
check tests/test_cuda.py -k "triton or offsets or fifty or waits"
run "$PYTHON" -m kvsieve verify gqa_quest_sparse_attention --backend triton --device cuda
if command -v compute-sanitizer > /dev/null; then
    kernels="tests/test_triton_select.py tests/test_triton_attend.py tests/test_triton_evict.py"
    small="again or one_token or (attention_and_mass and sum and 5) or (adds_itself and 5) or (selection_is_exact and 65)"
    run compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" -m pytest -q -rf --tb=short $kernels -k "$small"
    run compute-sanitizer --tool racecheck --error-exitcode 9 "$PYTHON" -m pytest -q -rf --tb=short $kernels -k "$small"
fi
exit $failed
