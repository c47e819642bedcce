# make demo    a sparse-attention flow continues a real text on a real model, beside dense attention
# make test    the test suite without the slow tests        make test-slow    the slow ones
# make lint    ruff and mypy                                make model        fetch the demo's model only
# make test-vllm    the tests inside vLLM, which goes into an environment of its own, $(VLLM_VENV) (3.4 GB)
#
# python3 (3.10 or newer, with venv) and make are enough: everything else goes into $(VENV) and into
# $KVSIEVE_CACHE (~/.cache/kvsieve), which holds the model.

PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VLLM_VENV)/.installed
TEXT := examples/jargon.txt
GENERATE := $(BIN)/kvsieve generate --model smollm2 --prompt-file $(TEXT) --budget-tokens 512 --max-new-tokens 48 --compare

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: setup setup-vllm model test test-slow test-vllm demo lint format clean

setup: $(STAMP)

# torch goes first and is pinned exactly: what comes later finds it installed and pulls in no other build.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,dev]'
	touch $@

model: $(STAMP)
	$(BIN)/python -m kvsieve.models smollm2

# Two workers: more threads than cores only wait for each other. Each takes half of the tests in a row, so that what a
# module builds is built once, and takes over from the other what is left.
test: export OMP_NUM_THREADS := 1
test: model
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow' $(PYTEST_ARGS)

setup-vllm: $(VLLM_STAMP)

# vLLM wants torchvision and torchaudio, whose builds on PyPI do not load beside a CPU build of torch; it runs without.
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet torch==2.13.0
	$(VLLM_VENV)/bin/python -m pip install --quiet -e '.[vllm,hf,dev]'
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: export OMP_NUM_THREADS := 1
test-vllm: model $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/test_vllm_*.py $(PYTEST_ARGS)

test-slow: model
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

demo: model
	$(GENERATE) --flow gqa_quest_sparse_attention --page-size 16
	$(GENERATE) --flow h2o_token_sparse_attention --page-size 1

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src/kvsieve

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
