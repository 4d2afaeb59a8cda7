# One entry point for people and CI. Every target prepares its tools (scripts/setup does nothing if all are installed).
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# A shell opened before scripts/setup installed the toolchain does not have it on the PATH.
export PATH := $(CURDIR)/.venv/bin:$(HOME)/.cargo/bin:$(PATH)

.PHONY: help setup setup-tests demo test test-crates test-long test-rust test-loom test-sim test-python test-manifests test-e2e identity test-rdma sim chaos prove sanitize lint bench fuzz clean test-gpu test-ops dist docs

# The Python for tests on a GPU, with vLLM's CUDA build and pillion; and the tests to run, with pytest's options.
PYTHON ?= python3
TESTS ?=
# Without the job server of make: its pipe is closed to a recipe.
TEST_CRATES = env -u MAKEFLAGS -u MFLAGS cargo test --workspace --features connector-shim/c,mesh/rdma --quiet
# Two tests at a time: an engine of the tests computes with one thread. Tests of one group share their engines.
AT_ONCE = 2
PYTEST = python -m pytest -q -n $(AT_ONCE) --dist loadgroup
# Releases of vLLM beside the one in .venv: the newest, and older ones.
NEWEST_VLLM := $(shell sed -n 's/^NEWEST_VLLM_VERSION=//p' scripts/setup)
OLDER_VLLM := $(shell sed -n 's/^OLDER_VLLM_VERSIONS="\(.*\)"/\1/p' scripts/setup)
# Seconds of `make fuzz` for each target.
SECONDS_EACH ?= 60
# Worlds of `make sim`, rounds of `make chaos` of one engine and of a pair, and the first of their seeds.
RUNS ?= 200000
ROUNDS ?= 100
PAIR_ROUNDS ?= 300
SEED ?= 1

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: ## install all tools and build Pillion into .venv
	@scripts/part setup scripts/setup

setup-tests: setup
	@scripts/part setup-tests scripts/setup tests

demo: setup ## a real vLLM engine gets its KV back after a restart: table, and a picture under demo-out/
	@python scripts/demo.py

test: test-crates test-loom test-python test-manifests test-e2e ## all tests; no GPU needed

test-crates: setup-tests ## test-rust and test-sim at the same time: the tests of the crates mostly wait, the worlds compute
	@scripts/part build-crates $(TEST_CRATES) --no-run
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-rust test-sim

test-long: setup-tests ## tests too long for CI: many seeds, this release against the one before, built from history, and the next, and other engines
	@scripts/build-release previous
	@scripts/build-release next
	$(PYTEST) tests/skew
	@scripts/setup engines
	$(PYTEST) tests/engines tests/e2e/test_windows.py tests/e2e/test_restart.py tests/e2e/test_pair_chaos.py
	@scripts/setup releases
	for release in $(OLDER_VLLM); do PYTHONPATH=$(CURDIR)/.cache/vllm-$$release $(PYTEST) tests/e2e/test_restart.py || exit 1; done
	PLAYS=48 SET_STEPS=1000000 $(PYTEST) tests/vllm/test_storm.py
	CACHES=100000 $(PYTEST) tests/vllm/test_coordinator.py
	FAILED_LOADS=1000 $(PYTEST) tests/vllm/test_half_loads.py
	for setup in one two engine; do HANDOVER_SETUP=$$setup HANDOVERS=200 $(PYTEST) tests/e2e/test_handover.py || exit 1; done
	$(MAKE) sim RUNS=20000

test-rust: setup-tests ## unit and property tests of the crates
	@scripts/part test-rust $(TEST_CRATES)

test-loom: setup ## every interleaving of the rings and fences
	@RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR="$${CARGO_TARGET_DIR:-target}/loom" \
		scripts/part test-loom cargo test --release --package shm-protocol --test loom --quiet

test-sim: setup ## 1,000 simulated worlds with faults, and worlds with a fault to find
	@scripts/part test-sim $(TEST_CRATES) --test simulator -- --runs 1000 --seed 1

# Scripted engines, in four groups, mostly wait.
test-python: AT_ONCE = 4
test-python: setup-tests ## the connector against vLLM's signatures and schedulers, without an engine
	@scripts/part test-python $(PYTEST) tests/unit tests/vllm

test-e2e: setup-tests ## the connector in real vLLM engines, of the newest release too
	@scripts/part test-e2e $(PYTEST) tests/e2e tests/identity/test_engines.py --ignore=tests/e2e/test_windows.py --ignore=tests/e2e/test_pair_chaos.py -k 'not spawned'
	@PYTHONPATH=$(CURDIR)/.cache/vllm-$(NEWEST_VLLM) scripts/part test-e2e-newest $(PYTEST) tests/e2e/test_restart.py tests/e2e/test_windows.py -k 'not spawned'

test-manifests: setup ## `pillion inject` on odd manifests and on charts, and deploy/, as Kubernetes reads them
	@scripts/part setup-manifests scripts/setup manifests
	@cd tests && PILLION_BINARY="$(CURDIR)/.venv/bin/pillion" ../scripts/part test-manifests ../.cache/tools/bin/python -m pytest -q \
		ops/test_manifests.py ops/test_charts.py ops/test_odd_manifests.py ops/test_helm.py

identity: setup-tests ## every setting with an effect on KV, and many without, in pairs of engines
	EVERY_KNOB=1 $(PYTEST) tests/vllm/test_knobs.py tests/identity

test-rdma: ## blocks over RDMA, in a QEMU guest with Soft-RoCE: no RDMA NIC needed; Debian, root or sudo
	@scripts/setup rust
	@scripts/test-rdma

test-gpu: ## the connector in real engines on a GPU: PYTHON=python3 TESTS='tests/gpu/test_kill.py --rounds 40'
	@$(PYTHON) tests/gpu $(TESTS)

test-ops: setup ## manifests, alerts and dashboard in Prometheus, unit, the book, its quick start, and in podman the files of make dist; Debian, root
	@scripts/setup ops
	$(PYTEST) -rs tests/monitoring tests/podman
	cargo build --quiet --locked --package pillion-cli --bin pillion
	@cd tests && PILLION_BINARY="$${CARGO_TARGET_DIR:-$(CURDIR)/target}/debug/pillion" ../.cache/tools/bin/python -m pytest -q ops

docs: ## the documentation as a book, under target/book/; a warning or a broken link is an error
	@scripts/setup docs
	@PATH="$(CURDIR)/.cache/tools/bin:$$PATH" scripts/book

dist: ## the release under dist/: wheel, tarball, lists of parts, images if buildah is installed; PILLION_TARGET=aarch64-unknown-linux-gnu
	@scripts/setup dist
	@PATH="$(CURDIR)/.cache/tools/bin:$$PATH" scripts/dist dist$(PILLION_TARGET:%=/%)

sim: setup ## more simulated worlds: RUNS=200000 SEED=1
	cargo test --profile sim --package sidecar --test simulator --quiet -- --runs $(RUNS) --seed $(SEED)

chaos: setup ## real engines and sidecars killed and frozen under load: ROUNDS=100 PAIR_ROUNDS=300 SEED=1; a JSON line of one engine, then one of a pair
	@python tests/chaos --rounds $(ROUNDS) --seed $(SEED)
	@python tests/chaos --pair --rounds $(PAIR_ROUNDS) --seed $(SEED)

prove: setup-tests ## remove each protection in turn and see its test fail
	@scripts/prove

sanitize: setup ## address and thread sanitizers over the Rust tests
	@scripts/sanitize

lint: setup ## formatting, clippy, ruff, mypy, typos, cargo-deny, advisories where their database can be fetched, the rules of scripts/tidy and scripts/edges, pictures, generated pages
	cargo fmt --all --check
	cargo fmt --manifest-path examples/candle/Cargo.toml --check
	cargo update --manifest-path examples/candle/Cargo.toml --workspace --locked --quiet
	@scripts/part clippy cargo clippy --workspace --all-targets --features connector-shim/python,connector-shim/c,mesh/rdma --quiet -- -D warnings
	@scripts/part clippy-without-etcd cargo clippy --package sidecar --quiet -- -D warnings
	ruff check .
	ruff format --check .
	@scripts/part mypy mypy
	scripts/tidy
	scripts/edges
	scripts/pictures --check
	scripts/options --check
	scripts/metrics --check
	scripts/support --check
	scripts/trials/check
	typos
	cargo package --quiet --offline --no-verify --allow-dirty -p shm-protocol -p copy-engine -p connector-shim -p pillion
	cargo-deny --log-level error check --hide-inclusion-graph bans licenses sources
	@scripts/advisories

bench: setup ## every benchmark, one JSON line each
	@for name in $$(benches/run); do echo "== $$name"; benches/run $$name; done

fuzz: setup ## every parser of a peer's bytes, SECONDS_EACH=60 for each
	scripts/fuzz $(SECONDS_EACH)

clean: ## remove build outputs (not .venv)
	cargo clean
	rm -rf demo-out dist
