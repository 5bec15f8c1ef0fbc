# A fresh machine needs Python >= 3.10 and make; everything else goes into .venv.
# Extra pip options through PIP_FLAGS, for example the CPU-only torch, which on Linux saves gigabytes:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
# constraints-lowest.txt has the lowest torch. Begin with `make clean` when you change it.
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin

.NOTPARALLEL:
.PHONY: demo test quick combinations fuzz integrations coverage lint docs screenshots wheel release-check bench figures clean

demo: $(VENV)/.installed-demo
	$(BIN)/halfstep demo

# --timeout stands here and not in pyproject.toml, so that the tests also run where pytest-timeout is missing.
# The folders of tests in two halves, side by side: on two cores that takes little more than half of the time.
# The examples of README and docs run on an installed wheel, which is what their readers have.
HALF := $(addprefix tests/,amp casting cli compat core distributed docs findings fuzz)
PAGES := tests/docs/test_docs.py tests/docs/test_installed.py
test: wheel
	( HALFSTEP_WHEEL=$(WHEEL) PYTHONPATH=$(WHEEL) $(BIN)/python -m pytest --timeout=300 $(PAGES); pages=$$?; \
	  $(BIN)/python -m pytest --timeout=300 $(HALF) $(PAGES:%=--ignore=%) && exit $$pages ) & half=$$!; \
	$(BIN)/python -m pytest --timeout=300 tests $(HALF:%=--ignore=%); code=$$?; \
	wait $$half && exit $$code

WHEEL := $(CURDIR)/build/wheel
wheel: $(VENV)/.installed-test
	rm -rf $(WHEEL) build/dist
	$(BIN)/python -m hatchling build --target wheel --directory build/dist
	$(BIN)/python -m pip install --quiet --no-index --no-deps --target $(WHEEL) build/dist/*.whl

# What a release would publish, built, checked, and used in empty environments with the lowest and the newest torch.
# `make release-check ARCHIVES=--archives` stops before the environments.
release-check: $(VENV)/.installed-test
	PIP_FLAGS="$(PIP_FLAGS)" $(BIN)/python -m tools.release_check $(ARCHIVES)

# Each test takes longer when it is measured.
coverage: $(VENV)/.installed-coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --timeout=600
	$(BIN)/coverage combine
	$(BIN)/coverage html
	$(BIN)/coverage report

# Some tests of nearly every folder, in a minute and a half; what is left out is marked exhaustive. Of the others every value of a
# parameter is in one case.
QUICK := --timeout=300 -m "not exhaustive" --combinations each
quick: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(QUICK) $(HALF) & half=$$!; \
	$(BIN)/python -m pytest $(QUICK) tests $(HALF:%=--ignore=%); code=$$?; \
	wait $$half && exit $$code

# Every combination of parameters, also of three and more: for a release, and after a change that reaches far.
combinations: wheel
	$(BIN)/python -m pytest --timeout=300 --combinations all

# Random cases against references, for MINUTES each.
MINUTES ?= 10
fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES)

# The adapters with the real trainers. The second line is for timm's own files, which need little of torchvision.
integrations: $(VENV)/.installed-integrations
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) --no-deps timm
	$(BIN)/python -m pytest --timeout=300 tests/integrations

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tools/check_site.py site https://halfstep.github.io/halfstep/
	$(BIN)/python tools/search_site.py site

# The site and the reports as people see them, wide and narrow, light and dark. Without Chromium it only says so.
screenshots: docs $(VENV)/.installed-demo
	$(BIN)/python -m tools.screenshots

# Measures the figures of README and docs again, on a machine that does nothing else.
figures: $(VENV)/.installed-demo
	$(BIN)/python -m tools.figures
	$(BIN)/python -m tools.report_pictures

bench: $(VENV)/.installed-demo
	$(BIN)/python -m benchmarks simplenet --device cpu --json simplenet.json

clean:
	rm -rf $(VENV) site build dist halfstep-demo .pytest_cache .mypy_cache .ruff_cache .hypothesis htmlcov .coverage .coverage.*

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "halfstep needs Python 3.10 or newer; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# One stamp for each extra of pyproject.toml, so that nothing is installed twice.
$(VENV)/.installed-%: pyproject.toml $(CONSTRAINTS) | $(BIN)/python
	$(BIN)/python -m pip install $(PIP_FLAGS) -c $(CONSTRAINTS) -e '.[$*]'
	touch $@
