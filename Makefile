# `make help` lists every target. It needs python3 with its venv module, and make.
PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
, := ,
LONG_MODULE := 500
PROTOS := service/forms/open_inference service/api/health service/api/reflection lenet/onnx_subset
PROTOC = $(BIN)/python -m grpc_tools.protoc -I.
# Some tests wait: three at a time keep two cores busy. Without bytecode on disk each of them, and each
# service that a test starts, would compile every module anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist worksteal --durations=10
QUICK := -m 'not process and not long'
ABOUT_TESTS := This takes about 90 seconds on two idle cores. Tests that start a service, a browser \
  or a training run are left out: make test-all. Tests that need a GPU, MNIST or a program that is \
  not installed are skipped; the last lines say why.
ABOUT_ALL := This takes about 9 minutes on two idle cores.

.DEFAULT_GOAL := help
.PHONY: help serve train judge load-test dev test test-all faults soak fuzz schemathesis coverage gpu-check docs docs-check check format proto dist reference env-example prometheus-rule docker-image docker-up docker-down image-size clean

help: ## list every target
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

serve: .venv/serve.stamp ## run the service on the committed weights (ARGS="--port 9000")
	$(BIN)/python -m service $(ARGS)

train: .venv/dev.stamp ## train with the default recipe (ARGS="fit --out /tmp/weights")
	$(BIN)/python -m trainer $(ARGS)

JUDGE = build/judge
judge: .venv/dev.stamp ## train the judge of what is found in pictures (DATA=FOLDER with MNIST)
	$(BIN)/python -m trainer.judge samples $(JUDGE)/scenes.npz $(if $(DATA),--data $(DATA))
	$(BIN)/python -m trainer fit --data $(JUDGE)/scenes.npz --labels $(JUDGE)/scenes.txt \
	  --model trainer/judge.json --epochs 10 --rotation 4 --scale 0.05 --shear 4 --shift 0.5 --elastic 0.4 \
	  --smoothing 0.02 --out $(JUDGE) $(ARGS)
	cp "$$(ls -t $(JUDGE)/judge/*.safetensors | head -1)" service/pictures/judge.safetensors

load-test: .venv/dev.stamp ## drive a running service (ARGS="--mode open --rate 500")
	$(BIN)/python -m benchmarks.load_test $(ARGS)

dev: .venv/dev.stamp ## install what training, benchmarks, tests and checks need into .venv

test: .venv/dev.stamp ## run the tests that start no process: 90 seconds on two cores (ARGS="-k batcher")
	@$(if $(ARGS),,echo '$(ABOUT_TESTS)')
	$(PYTEST) $(QUICK) $(ARGS)

test-all: .venv/dev.stamp ## run every test that needs no GPU, but the long ones: 9 minutes on two cores
	@$(if $(ARGS),,echo '$(ABOUT_ALL)')
	$(PYTEST) $(ARGS)

faults: .venv/dev.stamp ## run every experiment of tests/faults, the long ones too (FAULT_SEEDS=10)
	FAULT_SEEDS=$${FAULT_SEEDS:-10} $(BIN)/python -m pytest -m '' tests/faults $(ARGS)

soak: .venv/dev.stamp ## good, bad and killed clients for 10 minutes (SOAK=24h WORKERS=2 make soak)
	$(BIN)/python -m tests.faults.soak --duration $${SOAK:-10m} --workers $${WORKERS:-1} $(ARGS)

fuzz: .venv/dev.stamp ## fuzz the parsers one after another, or one of them (TARGET=json FUZZ_S=600)
	@for target in $${TARGET:-$$($(BIN)/python -m tests.fuzz --list)}; do \
	  $(BIN)/python -m tests.fuzz $$target --seconds $${FUZZ_S:-60} || exit 1; done

schemathesis: .venv/dev.stamp build/schemathesis.stamp ## test the service against its OpenAPI document (ST_S=600)
	$(BIN)/python -m tests.fuzz.openapi --seconds $${ST_S:-120} $(ARGS)

coverage: .venv/dev.stamp ## run the tests of test-all and measure their coverage, which takes half as long again
	$(PYTEST) --cov --cov-report=term $(ARGS)
	@$(BIN)/python -c 'import tomllib; \
	  run = tomllib.load(open("pyproject.toml", "rb"))["tool"]["coverage"]["run"]; \
	  print("not measured here (generated, or needs a GPU):", *run["omit"], sep="\n  ")'

gpu-check: .venv/dev.stamp ## on a GPU: its tests, and compute-sanitizer on our kernels
	$(BIN)/python -m pytest tests/gpu $(ARGS)
	# Driver API errors are not reported: NVIDIA's Python bindings probe for functions that a
	# driver may lack.
	for tool in memcheck racecheck initcheck synccheck; do \
	  compute-sanitizer --report-api-errors no --tool $$tool --error-exitcode 1 \
	    $(BIN)/python -m tests.gpu.sanitize || exit 1; done

docs: .venv/docs.stamp ## build the documentation as a site in build/site, which opens without a server
	$(BIN)/python -m website.build

docs-check: ## run the commands of README.md and docs that need no GPU (LENET_TEST_MNIST=FOLDER)
	@$(PYTHON) tests/docs_check.py

check: .venv/dev.stamp ## format, lint, types, import contracts, spelling, generated code
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cu' '*.cuh')
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell $$(git ls-files)
	@folder=$$(mktemp -d) && $(PROTOC) --python_out=$$folder --pyi_out=$$folder $(PROTOS:=.proto) && \
	  for file in $(PROTOS:=_pb2.py) $(PROTOS:=_pb2.pyi); do \
	  diff -u $$file $$folder/$$file || { echo 'the generated code is out of date: run make proto'; exit 1; }; done; rm -r $$folder
	@wc -l $$(git ls-files 'lenet/*.py' 'service/*.py' 'trainer/*.py' 'wire/*.py' | grep -v _pb2) | \
	  awk '$$2 != "total" && $$1 > $(LONG_MODULE) {print $$2 " has " $$1 " lines: does it hold one idea?"}'

format: .venv/dev.stamp ## format the code and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cu' '*.cuh')
	$(BIN)/ruff check --fix .

proto: .venv/dev.stamp ## regenerate the code of the .proto files
	$(PROTOC) --python_out=. --pyi_out=. $(PROTOS:=.proto)

dist: .venv/dev.stamp ## build sdist and wheel of the last commit into dist, and check them
	rm -rf dist build/release
	git clone --quiet . build/release
	git rev-parse HEAD >build/release/lenet/COMMIT
	$(BIN)/python -m build --no-isolation --outdir dist build/release
	$(BIN)/python -m twine check --strict dist/*

reference: .venv/dev.stamp ## write docs/reference anew from the code
	$(BIN)/python -m website.reference

env-example: .venv/serve.stamp ## write .env.example anew from the settings
	$(BIN)/python -m deploy.env_example

prometheus-rule: ## write the resource of the Prometheus Operator anew from deploy/prometheus/rules
	@$(PYTHON) -m deploy.prometheus_rule

# The Dockerfile needs BuildKit, which Docker before 23 and docker-compose 1 leave off by default.
docker-image docker-up docker-down: export DOCKER_BUILDKIT := 1
docker-up docker-down: export COMPOSE_DOCKER_CLI_BUILD := 1
docker-image docker-up: export COMMIT = $(shell git rev-parse HEAD 2>/dev/null)
COMPOSE = $(or $(shell docker compose version >/dev/null 2>&1 && echo docker compose || \
  command -v docker-compose),$(error neither `docker compose` nor docker-compose runs here: install \
  Docker with its Compose plugin, or on Debian: apt install docker.io docker-compose))
TARGET ?= service

# Compose 1 cannot pass secrets to a build, so this does not use Compose.
docker-image: ## build an image (TARGET=trainer), behind a mirror too (PIP_CONF=pip.conf CERTIFICATES=ca.pem)
	docker build --target $(TARGET) --tag lenet-serve:$(TARGET) --build-arg COMMIT \
	  $(if $(PIP_CONF),--secret id=pip$(,)src=$(PIP_CONF)) \
	  $(if $(CERTIFICATES),--secret id=certificates$(,)src=$(CERTIFICATES)) \
	  $(if $(PYTHON_IMAGE),--build-arg PYTHON_IMAGE=$(PYTHON_IMAGE)) $(ARGS) .

docker-up: ## build and start the service and Prometheus with Docker Compose (BUILD=no)
	$(COMPOSE) up $(if $(filter no,$(BUILD)),--no-build,--build) --detach

docker-down: ## stop them
	$(COMPOSE) down

image-size: ## list what is in the images that are built, without their base
	@for image in $$(docker image ls --format '{{.Repository}}:{{.Tag}}' lenet-serve | sort); do \
	  docker run --rm --entrypoint python $$image -c "$$(cat deploy/image/sizes.py)" $$image; done

clean: ## remove what this Makefile made
	rm -rf .venv build dist *.egg-info .coverage* .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

# Only wheels: a Python that a dependency has none for is named, instead of an hour of compiling that
# ends with a missing compiler. The environment is then made afresh, with another PYTHON.
INSTALL = echo 'installing what $(1) needs into .venv'; \
  $(BIN)/python -m pip install --progress-bar off --only-binary :all: --constraint constraints.txt \
  --editable $(2) >.venv/pip.log 2>&1 || { \
  name=$$(sed -n -e 's/^ERROR: No matching distribution found for //p' \
  -e '/no matching distributions available/{n;s/ //gp;}' .venv/pip.log); \
  grep -v '^  *Using cached\|^Collecting' .venv/pip.log >&2; \
  if [ -n "$$name" ]; then rm .venv/created.stamp; \
  echo "pip found no wheel of $$name for $$($(BIN)/python -V). Python 3.11 to 3.14 have wheels of" \
  "every dependency: name one of them, as in PYTHON=python3.12. If this is one of them, pip does" \
  "not reach its package index." >&2; fi; exit 1; }

# Three stamps on one environment: serving and the site need a fraction of what developing
# needs.
.venv/serve.stamp: pyproject.toml constraints.txt | .venv/created.stamp
	@$(call INSTALL,serving,.)
	@touch $@

.venv/dev.stamp: pyproject.toml constraints.txt | .venv/created.stamp
	@$(call INSTALL,developing,'.[dev]')
	@touch $@ .venv/serve.stamp .venv/docs.stamp

.venv/docs.stamp: pyproject.toml constraints.txt | .venv/created.stamp
	@$(call INSTALL,the site,'.[docs]')
	@touch $@ .venv/serve.stamp

# An environment of its own: it brings thirty packages, some of them older than ours.
build/schemathesis.stamp:
	$(PYTHON) -m venv build/schemathesis
	build/schemathesis/bin/python -m pip install --quiet schemathesis==4.32.5
	@touch $@

# A creation that failed or was interrupted leaves a folder without this stamp: start afresh.
.venv/created.stamp:
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) was not found: install Python 3.11 to' \
	  '3.14, or name its executable, as in PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; (3, 11) <= sys.version_info[:2] or sys.exit(f"$(PYTHON) is Python {sys.version.split()[0]}, expected 3.11 to 3.14: name another, as in PYTHON=python3.12")'
	@$(PYTHON) -c 'import ensurepip' >/dev/null 2>&1 || { echo '$(PYTHON) has no venv module. On Debian' \
	  'and Ubuntu: sudo apt install python3-venv. Then run make again.' >&2; exit 1; }
	@rm -rf .venv
	@echo 'creating .venv with $(PYTHON)'
	@$(PYTHON) -m venv .venv || { echo '$(PYTHON) could not create .venv, see above. On Debian and' \
	  'Ubuntu: sudo apt install python3-venv. Then run make again.' >&2; exit 1; }
	@touch $@
