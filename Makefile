# Everything creates .venv from $(PYTHON) when it is missing; nothing else needs typing.
PYTHON ?= python3
VENV ?= .venv
ARGS ?=
CORES ?= logical
BENCH ?= bytes
IMAGE ?= thin
WHEELS ?=
ACCOUNTING ?= yes
SLURM ?= system
SHUFFLE ?= $(shell date +%s)
TORCH ?= auto
RUN := $(VENV)/bin/python -m experiments
PIP := $(VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt
# Calls pip, and shows of what it says which files it downloads, with their sizes, and when it builds and installs.
INSTALL = { $(PIP) $(1) || echo pip failed; } \
  | sed -un -e '/^pip failed$$/q1' -e '/\.metadata/d' -e '/^ *\(Downloading\|Building\|Installing\)/p'

.DEFAULT_GOAL := help
.PHONY: help test test-extended test-all test-shuffled lint docs figures claims validate report benchmark collect bench gpu-first horovod transformers dist sif slurm-up slurm-down clean FORCE
# A prerequisite that is never up to date: pattern rules can't be phony.
FORCE: ;

help: ## this list
	@awk -F':.*## ' '/^[a-z%-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo '  Words for the runs go into ARGS: make reproduce-fig3 ARGS="profile=smoke seed=1"; FORCE=1 measures again.'
	@echo '  TORCH=cpu or TORCH=cuda names the build of torch to install.'

reproduce-%: $(VENV)/.train FORCE ## fig1, fig2, fig3, fig4 or speed: missing runs, picture, verdicts, report (ARGS=, FORCE=1)
	@$(RUN) reproduce $* --report $(ARGS)

# A figure that there is not is refused before anything is installed for it. Not by a prerequisite: of a pattern's, make
# takes those with the stem last.
FIGURES = $(shell ls experiments/figures | sed -n 's/^[^_][^_]*_\(.*\)\.py$$/\1/p' | tr _ -)
ASKED_FOR := $(patsubst reproduce-%,%,$(filter reproduce-%,$(MAKECMDGOALS)))
ifneq ($(if $(ASKED_FOR),$(filter-out $(FIGURES),$(ASKED_FOR))),)
$(error reproduce-$(filter-out $(FIGURES),$(ASKED_FOR)): there is no such figure; there are: $(FIGURES))
endif

PYTEST := $(VENV)/bin/python -m pytest -n $(CORES) --maxprocesses=8

test: $(VENV)/.dev ## run the test suite: all laws, nothing slow (CORES=1: one process)
	@$(PYTEST) -m "not extended" $(ARGS)

test-extended: $(VENV)/.dev ## run the tests that are slow or need a system: SLURM, containers, Horovod, a browser, trainers' packages
	@$(PYTEST) -m extended $(ARGS)

test-all: test test-extended ## run both

# Tests must not depend on their order, nor on what earlier ones have left where all may write.
test-shuffled: $(VENV)/.dev ## the same in another order, in a temporary folder that keeps what was left there (SHUFFLE=number)
	@mkdir -p build/tmp-used
	@SHUFFLE=$(SHUFFLE) TMPDIR="$(CURDIR)/build/tmp-used" $(PYTEST) -m "not extended" $(ARGS)

lint: $(VENV)/.dev ## ruff, mypy (strict), import contracts
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

figures: $(VENV)/.figures ## every figure and table again from stored records; needs no torch
	@$(RUN) figures $(ARGS)

claims: $(VENV)/.figures ## every statement of the papers and what became of it; the last line is JSON; needs no torch
	@$(RUN) claims

validate: $(VENV)/.figures ## reads all stored records and compares them with their digests and schemas; needs no torch
	@$(RUN) validate

report: $(VENV)/.figures ## pages on every figure, verdict and run, to read in a browser; needs no torch
	@$(RUN) report $(ARGS)

benchmark: $(VENV)/.figures ## the benchmark with rules: pages on every entry and link, from stored records; needs no torch
	@$(RUN) benchmark $(ARGS)

collect: $(VENV)/.figures ## all runs into results/records/*.parquet
	@$(RUN) collect $(ARGS)

bench: $(VENV)/.train ## run a benchmark: BENCH=step, peers, methods, bytes, operators, launch, select, auto, overlap, link, roofs, kernels, ... (ARGS=)
	@$(VENV)/bin/python -m experiments bench $(BENCH) $(ARGS)

gpu-first: $(VENV)/.dev ## a GPU's first minutes, part by part, resumable (ARGS="--plan", "--minutes 9", "device=cpu")
	@$(VENV)/bin/python -m experiments bench gpu_first $(ARGS)

horovod: $(VENV)/.train ## Horovod 0.28.1 for comm=horovod: built against this torch once, then found in a cache
	@wheel=$$($(VENV)/bin/python singularity/horovod/build) \
	 && $(PIP) --quiet --no-deps --force-reinstall "$$wheel" && $(PIP) --quiet cloudpickle packaging psutil pyyaml

transformers: $(VENV)/.train ## Hugging Face's, for tasks with BERT or a masked autoencoder
	@$(call INSTALL,-r requirements/transformers.txt)

docs: $(VENV)/.dev requirements/docs.txt ## the pages of docs/ as a site with a search and the library's reference, into build/site
	@$(call INSTALL,-r requirements/docs.txt)
	@$(VENV)/bin/python docs/site/stage.py && NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict -f docs/site/mkdocs.yml
	@echo "build/site/index.html; for its search: $(VENV)/bin/python -m http.server -d build/site"

dist: $(VENV)/.dev requirements/dist.txt ## the library as wheel and source archive in build/dist, checked; says what a release lacks
	@$(call INSTALL,-r requirements/dist.txt)
	@$(VENV)/bin/python -m tests.dist build/dist

sif: $(VENV)/.train ## a container image: IMAGE=thin (for this .venv), cpu or gpu (everything inside)
	@$(VENV)/bin/python singularity/build $(IMAGE)

slurm-up slurm-down: export SPARSIFY_SLURM = $(SLURM)
slurm-up: ## a real SLURM on this machine, as root: four nodes, fake GPUs (ACCOUNTING=no: without sacct; LINK=ethernet_1g: slow links; SLURM=newer)
	@slurm/devcluster/up "$(ACCOUNTING)" "$(LINK)"

slurm-down: ## stop that SLURM and its jobs; accounting and logs stay
	@slurm/devcluster/down

clean: ## remove .venv and caches; results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# Three layers of one environment: what figures need, what runs need besides, what developers need besides. A stamp says
# that a layer is whole; pip is what an environment gets last, so without it the making was broken off.
$(VENV)/bin/pip:
	@$(PYTHON) experiments/versions.py
	$(PYTHON) -m venv $(VENV)

ifneq ($(WHEELS),)
# Without a network: what $(PYTHON) has, torch above all, and the wheels that were carried, without a question.
$(VENV)/.dev: $(wildcard $(WHEELS)/*.whl)
	@[ -n "$^" ] || { echo "WHEELS=$(WHEELS): there are no wheels; docs/measuring.md says how pip downloads them" >&2; exit 1; }
	@$(PYTHON) experiments/versions.py
	$(PYTHON) -m venv --system-site-packages $(VENV)
	@rm -f $@ && $(VENV)/bin/python -m pip install --quiet --no-index --no-deps $^ \
	 && touch $(VENV)/.figures $(VENV)/.train $@

$(VENV)/.figures $(VENV)/.train: $(VENV)/.dev
else
LAYER_SOURCES := pyproject.toml constraints.txt $(wildcard requirements/*.txt)
USERS.train = runs
USERS.dev = runs, tests and checks

$(VENV)/.figures: $(LAYER_SOURCES) | $(VENV)/bin/pip
	@echo "installing what figures need into $(VENV)"
	@rm -f $@ && $(call INSTALL,-r requirements/figures.txt) && touch $@

# One call of pip for all layers below: it chooses versions once, and no index is asked twice.
$(VENV)/.train $(VENV)/.dev: $(LAYER_SOURCES) | $(VENV)/bin/pip
	@echo "installing torch and what else $(USERS$(@F)) need into $(VENV) (some minutes, once)"
	@rm -f $@
	@if $(TAKES_CPU_BUILD); then \
	   $(call INSTALL,$(CPU_BUILD) $(LAYER) 2>/dev/null) && exit; \
	   echo "the index has no CPU build of torch, so this is the one for GPUs, 5 GB more; PIP_EXTRA_INDEX_URL may \
	name an index that has it"; fi; \
	 $(call INSTALL,$(LAYER))
	@touch $(VENV)/.figures $(VENV)/.train $@

LAYER = -e '.[$(subst .,,$(@F))]'
endif

# The build of torch: cpu; cuda, which runs without a GPU too; auto, which is cpu where there is neither a GPU nor a
# SLURM, whose nodes may have one.
ifeq ($(filter $(TORCH),auto cpu cuda),)
$(error TORCH=$(TORCH): must be auto, cpu or cuda)
endif
TAKES_CPU_BUILD = [ $(TORCH) = cpu ] || { [ $(TORCH) = auto ] && ! nvidia-smi -L && ! command -v sbatch; } >/dev/null 2>&1
CPU_BUILD = $$(sed -n 's/^\(torch\(vision\)*==[0-9.]*\).*/\1+cpu/p' constraints.txt)
