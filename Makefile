# Every target sets itself up: a virtual environment in .venv, with what the project's files name.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.done

.PHONY: demo test test-web lint bench clean help

help:            ## say what there is
	@grep -E '^[a-z-]+: .*##|^[a-z-]+:  *##' $(MAKEFILE_LIST) | sed 's/:.*##/ —/'

demo: $(SETUP)   ## paint the red panda in the manner of the Starry Night
	$(BIN)/stylize assets/content/red_panda.webp assets/style/starry_night.png --out outputs/result.png --overwrite

test: $(VENV)/.done-dev   ## run the tests
	$(BIN)/python -m pytest

test-web: $(VENV)/.done-test-web  ## try the web page in a real browser
	@tools/need_chromium.sh
	$(BIN)/python -m pytest tests/web/browser.py tests/test_web_*.py

lint: $(VENV)/.done-test-web  ## ruff and mypy
	$(BIN)/ruff check src tests tools benchmarks
	$(BIN)/mypy

bench: $(VENV)/.done-bench   ## race the peers; about 40 minutes, on a quiet machine
	$(BIN)/python benchmarks/race.py
	$(BIN)/python benchmarks/evaluation.py --json docs/benchmarks/evaluation.json

$(SETUP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.done-%: pyproject.toml $(SETUP)
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	@touch $@

clean:           ## remove the environment and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
