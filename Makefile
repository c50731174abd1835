# Each target creates the virtual environment it needs and installs missing packages. The second run is quick.
#
#   make demo        200,000 records through a gateway, a local Kinesis and back, none lost
#   make test        the tests, on asyncio and trio          make test ARGS="-k token_bucket -x"
#   make test-long   the tests marked long                   make test WORKERS=0 ARGS="--pdb": in one process
#   make check       format, lint, types, layers, coverage   make -k check: all of them, past the first failure
#
# Another interpreter: make test PYTHON=python3.13 VENV=.venv-3.13

VENV    ?= .venv
BIN     := $(VENV)/bin
RUN     := $(BIN)/python -m
PIP      = $(RUN) pip --quiet --disable-pip-version-check
PYTHONS := $(or $(PYTHON),python3.13 python3.12 python3.11 python3 python)
SOURCES  = $(shell find $(wildcard kpl_core kpl_integrations tests examples docs README.md) -type f -not -path '*/__pycache__/*')
RELEASED = $(SOURCES) $(shell find $(wildcard benchmarks .ci) -type f -not -path '*/__pycache__/*') $(wildcard *.md *.toml *.yml LICENSE Makefile)

# Each run of the tests has two worker processes for each core, because the tests wait for servers and programs nearly
# half of the time. A worker that has finished takes tests from another one.
CORES    := $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1)
WORKERS  ?= $(shell echo $$(( 2 * $(CORES) )))
PARALLEL := -n $(WORKERS) --dist worksteal

# The kernels in C run in `make compiled` and in the benchmarks. All other targets run the same in Python.
export KPL_KERNELS := off
compiled: export KPL_KERNELS := require
bench: export KPL_KERNELS :=

# Without byte code on disk each process compiles all modules again: every worker the tests, every program the packages.
unexport PYTHONDONTWRITEBYTECODE

# Inside the environment, so that two environments in one folder do not mix their figures.
export COVERAGE_FILE := $(abspath $(VENV))/.coverage

CORE_TESTS := $(addprefix tests/,options records pipeline fairness durability producer transport background)
# What the kernels in C run under: every way to put, and what follows a put.
KERNEL_TESTS := $(addprefix tests/,pipeline fairness durability producer background ingest/request ingest/routes ingest/streams ingest/fast_path)

# The exact versions of the test environments, with hashes. `make lock` writes them; the tests never take others.
LOCKED   := .ci/locked
# $(call install_locked,pip,dev)
install_locked = $(1) install --require-hashes --requirement $(LOCKED)/$(2).txt
# The same versions, without hashes, for a pip that installs something beside them.
VERSIONS := $(abspath $(VENV))/versions.txt
CONSTRAINED := PIP_CONSTRAINT=$(VERSIONS) PIP_BUILD_CONSTRAINT=$(VERSIONS)

# Stamps: empty files that record what the environment contains. The report of the coverage is a stamp, too.
READY_TO_RUN := $(VENV)/.ready-to-run
READY_TO_DEV := $(VENV)/.ready-to-develop
READY_TO_DOC := $(VENV)/.ready-to-document
READY_TO_REL := $(VENV)/.ready-to-release
COVERED      := $(VENV)/coverage.json
BUILT        := dist/.built
UV           := .venv-lock/bin/uv

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-long test-suites test-pythons test-newest test-lowest lock lock-image check format lint types layers coverage fuzz mutants interop chaos hostile laws simulate drill bench docs package compiled dist extras installed clean distclean

help:
	@echo 'make demo      200,000 records through a gateway, a local Kinesis and back, none lost'
	@echo 'make test      the tests on asyncio and trio, without those marked long'
	@echo 'make test-long the tests marked long'
	@echo 'make test-pythons  the tests of core, driver and ingest on each installed CPython from 3.11 on'
	@echo 'make test-newest, make test-lowest  the tests that touch dependencies, on the newest or the lowest allowed versions'
	@echo 'make lock      take the newest versions into the locked test environment and the image'
	@echo 'make lock-image  the same versions as the test environment, for the image'
	@echo 'make check     format, lint, types, layers, coverage'
	@echo 'make coverage  what the tests cover of each folder, beside its floor'
	@echo 'make fuzz      send arbitrary bodies to the decoders of the gateway for a minute (SECONDS=60)'
	@echo 'make mutants   small faults put into the machines, to see that a test fails for each (ARGS="--sample 60")'
	@echo 'make interop   the tests with independent emulators, consumers and SDKs'
	@echo 'make chaos     the tests with injected faults, for some minutes'
	@echo 'make hostile   small expensive requests: what each costs, and whether a quiet tenant is served beside the worst'
	@echo 'make drill     breaks each part of a gateway: what /readyz, alert, dashboard, log, kpl doctor and a trace say, and how it ends'
	@echo 'make simulate  producers and a gateway under faults of service and disk in virtual time, seed by seed (SECONDS=60 SEED=7)'
	@echo 'make laws      what is in force in a fleet under each kind of fault, ten million transitions in virtual time'
	@echo 'make bench     records per CPU-second, compared with the alternatives'
	@echo 'make docs      the documentation site, into site/'
	@echo 'make package   the wheel, and the tests on it, outside this folder'
	@echo 'make dist      pure and compiled wheels, sdist, bill of materials, licences and hashes, into dist/'
	@echo 'make extras    each extra of that wheel alone, in an environment of its own'
	@echo 'make compiled  the wheel with the kernels in C, and the tests on it of what they do'
	@echo 'make clean     remove what was built; distclean: the environments too'

demo: $(READY_TO_RUN)
	@$(BIN)/kpl demo $(ARGS)

test: $(READY_TO_DEV)
	@$(RUN) pytest --quiet -m 'not long' $(PARALLEL) $(ARGS)

# Each worker collects all tests of the files it gets, so it gets only those with a long one.
LONG_FILES = $(shell grep -rl 'mark\.long' tests --include='test_*.py' | grep -vE '^tests/(browser|interop|chaos|hostile|packaging)/')

test-long: $(READY_TO_DEV)
	@$(RUN) pytest --quiet -m long $(PARALLEL) $(LONG_FILES) $(ARGS)

# The suites that depend most on the interpreter, long tests included.
test-suites: $(READY_TO_DEV)
	@$(RUN) pytest --quiet $(PARALLEL) $(CORE_TESTS) tests/ingest $(ARGS)

# One environment for each interpreter: .venv-3.11, .venv-3.12, ... All of them run, even if one fails.
test-pythons:
	@.ci/pythons | { failed=; while read -r version python; do \
	    echo "Python $$version: $$python"; \
	    $(MAKE) --no-print-directory test-suites PYTHON="$$python" VENV=".venv-$$version" </dev/null || failed="$$failed $$version"; \
	done; if [ -n "$$failed" ]; then echo "FAILED on Python$$failed"; exit 1; fi; }

# What a new or an old version of a dependency can break.
DEPENDENCY_TESTS := $(addprefix tests/,asgi background cli coordination dynamodb_limits ingest kinesis_protocol local_kinesis logging_handler \
    metrics otel producer testing transport) tests/interop/test_coordination_stores.py

test-newest: $(BIN)/python
	@$(MAKE) --no-print-directory VENV=.venv-newest .venv-newest/bin/python
	@.venv-newest/bin/python -m pip --quiet install --upgrade 'pip>=25.1'
	@.venv-newest/bin/python -m pip --quiet install --upgrade --upgrade-strategy eager --editable '.[all]' --group dev
	@.venv-newest/bin/python -m pytest --quiet -m 'not long' $(PARALLEL) $(DEPENDENCY_TESTS) $(ARGS)

test-lowest: $(UV)
	@$(MAKE) --no-print-directory VENV=.venv-lowest .venv-lowest/bin/python
	@$(UV) pip compile --quiet --resolution lowest-direct --python .venv-lowest/bin/python --extra all --group lowest pyproject.toml --output-file .venv-lowest/versions.txt
	@$(UV) pip sync --quiet --python .venv-lowest/bin/python .venv-lowest/versions.txt
	@$(UV) pip install --quiet --python .venv-lowest/bin/python --no-deps --no-build-isolation --editable .
	@.venv-lowest/bin/python -m pytest --quiet -m 'not long' $(PARALLEL) $(DEPENDENCY_TESTS) $(ARGS)

# For every supported Python and platform, and without the name of an index.
COMPILE = $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-header --no-annotate
LOCK = $(COMPILE) pyproject.toml

lock: $(UV)
	@$(LOCK) --extra all --group dev --output-file $(LOCKED)/dev.txt
	@$(LOCK) --group docs --constraint $(LOCKED)/dev.txt --output-file $(LOCKED)/docs.txt
	@$(LOCK) --group release --constraint $(LOCKED)/dev.txt --output-file $(LOCKED)/release.txt
	@$(MAKE) --no-print-directory lock-image

# What examples/deploy/Dockerfile installs, and what builds the wheel in it: the versions that the tests ran with.
lock-image: $(UV)
	@$(LOCK) $(patsubst %,--extra %,cli ingest local redis) --constraint $(LOCKED)/dev.txt --output-file $(LOCKED)/image.txt
	@$(COMPILE) --group build --constraint $(LOCKED)/dev.txt --output-file $(LOCKED)/image-build.txt

check: format lint types layers coverage

# $(call quietly,name,command): prints one line if the command passes, else its complete output
define quietly
@printf '%-10s' '$(1)'; if said=$$($(2) 2>&1); then echo ok; else echo FAILED; printf '%s\n' "$$said"; exit 1; fi
endef

format: $(READY_TO_DEV)
	$(call quietly,format,$(BIN)/ruff format --check --diff --quiet .)

lint: $(READY_TO_DEV)
	$(call quietly,lint,$(BIN)/ruff check --quiet --output-format concise .)

types: $(READY_TO_DEV)
	$(call quietly,types,$(RUN) mypy $(wildcard kpl_core kpl_integrations tests benchmarks examples))

layers: $(READY_TO_DEV)
	$(call quietly,layers,$(BIN)/lint-imports --no-logo)

# Both packages, also in the programs that the tests start. On one of the two backends: the other one covers hardly any
# more lines. The second run is for the code that only servers and command lines reach, in tests marked long.
coverage: $(COVERED)
	@$(RUN) tests.coverage_floors.floors $(COVERED)

# Simulations, laws with thousands of steps, and tests of pages and sources: other tests cover the same lines sooner.
UNTRACED := $(addprefix tests/,benchmarks coverage_floors docs faults mutation test_architecture.py test_language.py asgi/test_pages.py \
    $(addprefix coordination/test_,bounds.py calm_fleets.py cost.py fleet_of_producers.py lease_law.py with_producers.py) \
    durability/replay/test_replay_speed.py fairness/test_fair_queue_laws.py limits/test_laws.py pipeline/test_mass_expiry.py \
    producer/test_rates.py $(addprefix ingest/,admission/test_gateway_fairness.py admission/test_retry_after_scheduler.py \
    fast_path/test_repeated_requests.py http/test_refused_heads.py))
TRACED_LONG := tests/cli/test_dlq.py tests/cli/test_serve_workers.py

TRACED = HYPOTHESIS_PROFILE=coverage $(RUN) coverage run -m pytest --quiet --timeout 180 -p no:cacheprovider $(PARALLEL) -k 'not trio'

$(COVERED): $(READY_TO_DEV) $(SOURCES)
	@$(RUN) coverage erase
	@$(TRACED) -m 'not long' $(UNTRACED:%=--ignore=%)
	@$(TRACED) -m long $(TRACED_LONG)
	@$(RUN) coverage combine --quiet
	@$(RUN) coverage json --quiet -o $@

fuzz: $(READY_TO_DEV)
	@seed=$$(date +%s) && echo "seed $$seed" && \
	    TESTS_FUZZ_SECONDS=$(or $(SECONDS),60) TESTS_FUZZ_SEED=$$seed $(RUN) pytest --quiet tests/ingest/decoding/test_fuzz.py $(ARGS)

# Not in the gate, because it takes half an hour and more.
mutants: $(READY_TO_DEV)
	@$(RUN) tests.mutation --map $(VENV)/.mutants $(ARGS)

interop: $(READY_TO_DEV)
	@$(RUN) pytest --quiet tests/interop tests/browser $(ARGS)

chaos: $(READY_TO_DEV)
	@$(RUN) pytest --quiet tests/chaos $(ARGS)

hostile: $(READY_TO_DEV)
	@$(RUN) pytest --quiet --capture no tests/hostile $(ARGS)

drill: $(READY_TO_DEV)
	@$(RUN) tests.drill $(ARGS)

simulate: $(READY_TO_DEV)
	@$(RUN) tests.world.simulate --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED))

# About a quarter of an hour of CPU time.
laws: $(READY_TO_DEV)
	@PYTHONHASHSEED=0 $(RUN) tests.world --transitions 10000000 $(ARGS)

bench: $(READY_TO_DEV)
	@$(RUN) benchmarks $(ARGS)
	@$(RUN) benchmarks.hooks_cost

# The pages open as files, so they load nothing from a server.
docs: $(READY_TO_DOC)
	$(call quietly,docs,{ NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict && ! grep -rE '<(script|link)[^>]+(src|href)="?https?:' --include='*.html' site; })

# Here the packages are imported from this folder. Only tests outside of it prove that the wheel is complete.
# $(call on_the_wheel,the wheel,what is tested)
define on_the_wheel
@test -x $(VENV)-wheel/bin/python || $(RUN) venv $(VENV)-wheel
@$(call install_locked,$(VENV)-wheel/bin/python -m pip --quiet,dev)
@$(VENV)-wheel/bin/python -m pip --quiet install --force-reinstall --no-deps $(1)
@elsewhere=$$(mktemp -d) && trap 'rm -rf "$$elsewhere"' EXIT && \
    cp -R $(wildcard tests examples benchmarks docs .ci *.md *.toml *.yml Makefile LICENSE) "$$elsewhere" && \
    python=$(abspath $(VENV))-wheel/bin/python && cd "$$elsewhere" && \
    $$python -m pytest --quiet -o cache_dir=$(abspath $(VENV))-wheel/.cache-of-$@ $(PARALLEL) $(2) $(ARGS)
endef

package: $(BUILT)
	$(call on_the_wheel,dist/*-none-any.whl,)

compiled: $(READY_TO_DEV)
	@rm -rf build/compiled
	@$(PIP) wheel --no-build-isolation --no-deps --wheel-dir build/compiled .
	$(call on_the_wheel,build/compiled/*.whl,$(KERNEL_TESTS))

installed: $(READY_TO_DOC) $(READY_TO_REL)

# The bill and the licences are those of an environment without other packages.
$(BUILT): $(READY_TO_REL) $(RELEASED)
	@rm -rf dist
	@$(RUN) build --no-isolation --outdir dist . >/dev/null
	@$(RUN) venv --clear $(VENV)-dist
	@$(CONSTRAINED) $(VENV)-dist/bin/python -m pip --quiet --disable-pip-version-check install "$$(echo dist/*-none-any.whl)[all]"
	@$(VENV)-dist/bin/python -m pip --quiet --disable-pip-version-check uninstall --yes pip setuptools
	@$(RUN) cyclonedx_py environment --pyproject pyproject.toml --mc-type library --output-reproducible --output-file dist/sbom.cdx.json $(VENV)-dist/bin/python
	@$(RUN) piplicenses --python $(VENV)-dist/bin/python --from=mixed --order=license --format=markdown --output-file dist/LICENCES.md >/dev/null
	@touch $@

# A compiled wheel for each installed CPython, which auditwheel checks and marks with the platforms it works on. Each wheel is
# then tried in an environment of its own.
dist: $(BUILT)
	@rm -rf dist/*-cp3* dist/SHA256SUMS build/wheels
	@.ci/pythons | while read -r version python; do \
	    echo "Compiling for Python $$version" && \
	    KPL_KERNELS=require $(CONSTRAINED) "$$python" -m pip --quiet --disable-pip-version-check wheel --no-deps --wheel-dir build/wheels/$$version . </dev/null && \
	    if [ "$$(uname)" = Linux ]; then \
	        PATH=$(abspath $(BIN)):$$PATH $(RUN) auditwheel repair --wheel-dir dist build/wheels/$$version/*.whl </dev/null || exit 1; \
	    else cp build/wheels/$$version/*.whl dist; fi; \
	done
	@.ci/pythons | while read -r version python; do \
	    for wheel in dist/*-cp3$${version#3.}-*.whl dist/*-none-any.whl; do $(CONSTRAINED) .ci/try-wheel "$$python" "$$wheel" </dev/null || exit 1; done; \
	done
	@cd dist && sha256sum * >SHA256SUMS && cat SHA256SUMS
	@.ci/may-release dist || echo 'Warning: the files are complete, and may not be published like this.'

extras: $(BUILT)
	@$(CONSTRAINED) DIST=$(abspath dist) $(RUN) pytest --quiet -o cache_dir=$(abspath $(VENV))/.extras-cache tests/packaging $(ARGS)

clean:
	@rm -rf build dist site htmlcov .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	@rm -f $(COVERED)
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv .venv-*

$(BIN)/python:
	@for python in $(PYTHONS); do \
	    if $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "Creating $(VENV) with $$($$python --version)"; \
	        exec $$python -m venv --clear $(VENV); \
	    fi; \
	done; \
	echo 'No Python 3.11 or newer with its venv module among: $(PYTHONS).' >&2; \
	echo 'Install one (Debian, Ubuntu: apt install python3 python3-venv) or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3' >&2; \
	exit 1

# An environment of its own, because uv writes the versions of the others.
$(UV): pyproject.toml | $(BIN)/python
	@$(RUN) venv $(dir $(UV))..
	@$(dir $(UV))python -m pip --quiet install 'pip>=25.1'
	@$(dir $(UV))python -m pip --quiet install --group lock
	@touch $@

# Also before `make compiled`, because an editable installation has no kernels.
$(READY_TO_RUN) $(READY_TO_DEV): export KPL_KERNELS := off

$(READY_TO_RUN): pyproject.toml | $(BIN)/python
	@echo 'Installing what the command needs'
	@$(PIP) install --editable '.[cli,ingest,local]'
	@touch $@

$(READY_TO_DEV): pyproject.toml $(LOCKED)/dev.txt | $(BIN)/python
	@echo 'Installing what tests and checks need'
	@$(call install_locked,$(PIP),dev)
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@sed -e '/--hash=/d' -e 's/ \\$$//' $(LOCKED)/*.txt >$(VERSIONS)
	@touch $@ $(READY_TO_RUN)

$(READY_TO_REL): $(LOCKED)/release.txt | $(READY_TO_DEV)
	@$(call install_locked,$(PIP),release)
	@touch $@

$(READY_TO_DOC): $(LOCKED)/docs.txt | $(READY_TO_DEV)
	@$(call install_locked,$(PIP),docs)
	@touch $@
