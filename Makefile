# `make demo` and `make test` are all that a newcomer needs; both set everything up first.
PYTHON ?= python3
RATERS ?= concise
SEED ?= 1
UPGRADE ?=
BIN := .venv/bin

.PHONY: help setup demo test test-long check types units light engines lock clean

help: ## Show this.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

setup: ## Make .venv with all pinned packages (minutes once, then nothing).
	@$(PYTHON) requirements/install.py

demo: setup ## Turn the wheel once with simulated raters and report. RATERS=concise|verbose|random SEED=1
	@$(BIN)/flywheel demo --raters $(RATERS) --seed $(SEED)

test: setup ## Run every test, on the real parts.
	@$(MAKE) --no-print-directory -j2 light engines

test-long: setup ## The laws that take minutes each.
	@$(BIN)/python -m pytest -m long -s

check: setup ## The fast loop: format, lint, types, unit tests.
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(MAKE) --no-print-directory -j2 -Otarget types units

types:
	@$(BIN)/mypy

units:
	@$(BIN)/python -m pytest -m "not real and not engine"

light:
	@$(BIN)/python -m pytest -m "not engine and not long" --durations=10 --durations-min=20

engines:
	@$(BIN)/python -m pytest -m "engine and not long" --durations=10 --durations-min=20

lock: setup ## Make requirements/cpu.lock anew; UPGRADE=1 takes the newest versions.
	@$(BIN)/python requirements/lock.py $(if $(UPGRADE),--upgrade)

clean: ## Stop the platform; remove its data, caches and build outputs. Keeps .venv.
	@if [ -x $(BIN)/flywheel ]; then $(BIN)/flywheel down || true; fi
	@rm -rf .flywheel build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
