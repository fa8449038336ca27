# `make train` sets everything up and trains; `make test` sets everything up and tests.
# Variables: PYTHON, VENV (VENV= runs PYTHON as it is, without any set-up), NPROC, BACKEND, STEPS, ARGS, TESTS, WORKERS,
# SECONDS; MODEL, PROMPT, SEED and TP for `make generate`; TORCH and PYTHON for `make test-torch`.
PYTHON ?= python3
VENV ?= .venv
NPROC ?= $(shell gpus=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); if [ "$$gpus" -gt 0 ]; then echo $$gpus; else echo 2; fi)
BACKEND ?= dcompile
STEPS ?=
ARGS ?=
MODEL ?= out/train/hf
PROMPT ?=
TP ?= 1
TESTS ?=
QUICK ?= tests/ir tests/collectives tests/test_pass_texts.py \
	tests/codegen/nest tests/codegen/schedule tests/codegen/test_golden.py \
	$(addprefix tests/codegen/lower/,test_lower.py test_loop_builder.py test_fusible_ops.py test_own_collectives.py symbolic) \
	tests/codegen/emit/test_emitters.py tests/codegen/emit/cpp/test_decisions.py \
	tests/capture/adapters tests/capture/test_joint_graph.py tests/capture/test_compiled_model.py \
	tests/capture/test_graph_programs.py tests/test_layering.py tests/test_vocabulary.py
SECONDS ?= 600
SEED ?= $(shell date +%s)
# A file's tests stay in one worker: two-rank tests keep one pair of processes for all cases of a file. One worker more
# than CI's machine has cores: a fifth of the time, each waits, for a rank's time limit, a compiler, or a process to end.
WORKERS ?= 3
CPU_INDEX ?= https://download.pytorch.org/whl/cpu

py := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
cores := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)

.PHONY: help train generate test quick test-torch test-backends test-doors test-deepspeed test-full models dist-matrix \
	ops-sweep fuzz lint format clean

train: export OMP_NUM_THREADS ?= $(shell echo $$(( $(cores) > $(NPROC) ? $(cores) / $(NPROC) : 1 )))
train: $(if $(VENV),$(VENV)/.has-train)
	$(py) launch/run.py --standalone --nproc-per-node $(NPROC) \
		launch/train.py --backend $(BACKEND) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

help:
	@echo 'make train [STEPS=60] [BACKEND=inductor] [ARGS="--wrap fsdp"]   trains a small Llama: docs/guide/launch.md'
	@echo 'make generate [PROMPT="def main("] [SEED=1]                     goes on with a text by that model'
	@echo 'make quick, make test [TESTS=tests/ir]                          a minute of tests; all tests'
	@echo 'make lint, make format                                          style, types, layers'
	@echo 'The other targets are described beside their rules in the Makefile.'

# Goes on with PROMPT, or with what you type, by the model that `make train` has left; TP processes share it.
generate: $(if $(VENV),$(VENV)/.has-train)
	$(py) $(if $(filter 1,$(TP)),,launch/run.py --standalone --nproc-per-node $(TP)) \
		launch/generate.py --model $(MODEL) --backend $(BACKEND) --temperature 0.8 --top-k 40 \
		--seed $(SEED) $(if $(PROMPT),--prompt "$(PROMPT)",--chat) --max-new-tokens 100 $(ARGS)

# Bytecode is kept whatever the shell says: pytest rewrites nearly 300 files, in each worker, and processes share ours.
test quick test-backends test-doors test-deepspeed test-full models dist-matrix: export PYTHONDONTWRITEBYTECODE =

test: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

# What an edit of the compiler breaks first, in about a minute: IR, text of each pass, lowering, schedules, text of kernels,
# capture without compiling, style of names.
quick: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m pytest -n $(WORKERS) --dist loadfile $(QUICK)

# The same with all that a usual run has a sample of: what `models` and `dist-matrix` run, each a part, and the rest.
test-full: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m pytest -n $(WORKERS) --dist loadfile --full $(TESTS)

# Lightning, TRL and PEFT, which the test extra leaves out: what users of these call, on two ranks.
test-doors: $(if $(VENV),$(VENV)/.has-doors)
	$(py) -m pytest --doors -m doors $(if $(TESTS),$(TESTS),tests/integrations tests/test_guide.py)

# Every architecture of tests/models in training, inference, bfloat16 and with symbolic sizes: about half an hour.
# TESTS="tests/models --poison" fills with NaN, before each call, all memory that no result may depend on.
models: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m pytest -n $(WORKERS) --dist loadfile --all-models $(if $(TESTS),$(TESTS),tests/models)

# Every way to distribute a model, on two and four Gloo ranks, with ATen's kernels and with ours, against stock PyTorch.
dist-matrix: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m pytest -n 1 --dist loadfile --full $(addprefix tests/distributed/test_,matrix.py fsdp2.py tp_fsdp.py) $(ARGS)

# Every operator of torch's table, some 35 minutes of CPU time; writes the list of what falls back to ATen.
# It goes on where it was cut off. ARGS="--shard 2/8" runs a part; join the parts' build/ops-sweep.jsonl and run it again.
ops-sweep: $(if $(VENV),$(VENV)/.has-test)
	@mkdir -p build
	$(py) -m tests.ops.large
	$(py) -m tests.ops.sweep --json build/ops-sweep.jsonl --update $(ARGS)

# Random programs in C++ and in Triton's interpreter against ours, random modules against eager mode, random training
# scripts on two ranks against stock DDP and FSDP; failures are shrunk and kept in tests/fuzz/kept, which the test
# suite replays.
fuzz: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m tests.fuzz --seconds $(SECONDS) $(ARGS)

# DeepSpeed with ZeRO 0 to 3 on two Gloo ranks, its launch script, its benchmark and its page of the guide.
test-deepspeed: $(if $(VENV),$(VENV)/.has-deepspeed)
	DS_ACCELERATOR=cpu $(py) -m pytest --deepspeed -m deepspeed $(if $(TESTS),$(TESTS),tests)

# The whole suite on another torch, another Python, or both, in an environment of its own: make test-torch TORCH=2.15.0,
# make test-torch PYTHON=python3.14. Run by hand, since wheels are large; results are in docs/lab/versions.md.
pinned_torch = $(shell sed -n 's/^torch==//p' constraints.txt)
test-torch: TORCH := $(or $(TORCH),$(pinned_torch))
test-torch: other = .venv-torch-$(TORCH)-$(shell $(PYTHON) -c 'import platform; print("py" + platform.python_version())')
test-torch:
	tools/install.sh $(PYTHON) $(other) test $(CPU_INDEX) $(TORCH)
	$(MAKE) test VENV= PYTHON=$(other)/bin/python

# Other compilers under our collectives (option `kernels`): those of the package index, and fakes of the others. The
# table in docs/guide/backends.md is what it finds; ARGS=--update-golden records that.
test-backends: $(if $(VENV),$(VENV)/.has-backends)
	$(py) -m pytest -n 1 --dist loadfile --backends tests/kernel_backends tests/distributed/test_backends.py $(ARGS)

lint: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m ruff check .
	$(py) -m ruff format --check .
	$(py) -m mypy -p dcompile
	$(py) -m pytest tests/test_layering.py
	$(py) -m tools.code_budget

format: $(if $(VENV),$(VENV)/.has-test)
	$(py) -m ruff check --fix .
	$(py) -m ruff format .

clean:
	rm -rf .venv .venv-torch-* build out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

# One stamp for each extra: a second `make` asks pip nothing. The test extra includes what training needs.
ifneq ($(VENV),)
$(VENV)/.has-train: pyproject.toml constraints.txt tools/install.sh
	tools/install.sh $(PYTHON) $(VENV) train $(CPU_INDEX)
	@touch $@

$(VENV)/.has-test: pyproject.toml constraints.txt tools/install.sh
	tools/install.sh $(PYTHON) $(VENV) test $(CPU_INDEX)
	@touch $@ $(VENV)/.has-train

$(VENV)/.has-backends: $(VENV)/.has-test
	tools/install.sh $(PYTHON) $(VENV) backends $(CPU_INDEX)
	@touch $@

$(VENV)/.has-doors: $(VENV)/.has-test
	tools/install.sh $(PYTHON) $(VENV) doors $(CPU_INDEX)
	@touch $@

$(VENV)/.has-deepspeed: $(VENV)/.has-test
	tools/install.sh $(PYTHON) $(VENV) deepspeed $(CPU_INDEX)
	@touch $@
endif
