# The only door: `make help` lists every target. Nothing but python3 and make is needed beforehand.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
CEILING := 300
PROTO := service/rpc/open_inference

.DEFAULT_GOAL := help
.PHONY: help serve train load-test test gpu-check check format proto docker-up docker-down clean

help: ## list every target
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

serve: .venv/serve.stamp ## run the service on the committed weights (ARGS="--port 9000")
	$(BIN)/python -m service $(ARGS)

train: .venv/dev.stamp ## train with the default recipe (ARGS="fit --out /tmp/weights")
	$(BIN)/python -m trainer $(ARGS)

load-test: .venv/dev.stamp ## drive a running service (ARGS="--mode open --rate 500")
	$(BIN)/python benchmarks/load_test.py $(ARGS)

test: .venv/dev.stamp ## run the tests and measure their coverage (ARGS="-k batcher --no-cov")
	$(BIN)/python -m pytest --cov --cov-report=term $(ARGS)

gpu-check: .venv/dev.stamp ## on a GPU: its tests, and compute-sanitizer on our kernels
	$(BIN)/python -m pytest tests/gpu $(ARGS)
	# Not the driver's refusals: NVIDIA's Python bindings ask it for functions that it may not have.
	for tool in memcheck racecheck initcheck; do \
	  compute-sanitizer --report-api-errors no --tool $$tool --error-exitcode 1 \
	    $(BIN)/python -m tests.gpu.sanitize || exit 1; done

check: .venv/dev.stamp ## format, lint, types, import contracts, ceilings, spelling, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@wc -l $$(git ls-files 'lenet/*.py' 'service/*.py' 'trainer/*.py' | grep -v _pb2) | \
	  awk '$$2 != "total" && $$1 > $(CEILING) {print $$2 ": " $$1 " lines, more than $(CEILING)"; bad = 1} END {exit bad}'
	$(BIN)/codespell $$(git ls-files)
	@folder=$$(mktemp -d) && $(BIN)/python -m grpc_tools.protoc -I. --python_out=$$folder \
	  --pyi_out=$$folder --grpc_python_out=$$folder $(PROTO).proto && \
	  for suffix in _pb2.py _pb2.pyi _pb2_grpc.py; do diff -u $(PROTO)$$suffix $$folder/$(PROTO)$$suffix || \
	  { echo 'the generated code is stale: make proto'; exit 1; }; done; rm -r $$folder

format: .venv/dev.stamp ## format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: .venv/dev.stamp ## regenerate the gRPC code from its .proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. $(PROTO).proto

docker-up: ## build and start the service and Prometheus with docker-compose
	docker-compose up --build --detach

docker-down: ## stop them
	docker-compose down

clean: ## remove what this Makefile made
	rm -rf .venv build *.egg-info .coverage* .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# Two stamps on one environment: serving needs a fraction of what developing needs.
.venv/serve.stamp: pyproject.toml constraints.txt | .venv
	@echo 'installing what serving needs into .venv'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv
	@echo 'installing what developing needs into .venv'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/serve.stamp

.venv:
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info[:2] < (3, 14) or sys.exit(f"this is Python {sys.version.split()[0]}, expected 3.11 to 3.13: name one with PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
