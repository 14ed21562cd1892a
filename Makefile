# A fresh machine needs python3 (>= 3.10), pip and make. Everything else goes into .venv;
# constraints.txt pins what was tested.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(VENV)/bin/python -m pip --disable-pip-version-check -q
STAMP  := $(VENV)/.installed
# two processes, each with whole files, so that what a file makes once is made once; in the order of
# the files: the last are short
TWO    := -n 2 --dist loadfile --no-loadscope-reorder
# PIP_ARGS: extra arguments for pip, for example PyTorch's CPU index on a Linux machine without a GPU
# small models on few cores run fastest with one thread per process
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup demo test test-browser test-hosts test-verl test-wheel fuzz check docs bench clean
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(PIP_ARGS) "$$(grep '^torch==' constraints.txt)"
	$(PIP) install $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	OMP_NUM_THREADS=2 $(VENV)/bin/counterpoise train recipes/demo.yaml --fresh

test: setup
	$(PY) -m pytest $(TWO)

# the pages in a real browser; `make test` runs these too where it finds one
test-browser: setup
	command -v chromium || command -v google-chrome || (apt-get update -qq && apt-get install -y -qq chromium)
	REQUIRE_BROWSER=1 $(PY) -m pytest -m browser

# inside TRL: slower, several processes
test-hosts: setup
	$(PY) -m pytest tests/hosts/trl $(TWO)

# verl needs an environment of its own (its transformers pin is older than ours)
test-verl: setup
	bash scripts/make_verl_env.sh $(PY) .venv-verl
	PYTHONPATH= .venv-verl/bin/python -m pytest tests/catalogue/test_parity_verl.py tests/hosts/verl -p no:cacheprovider

# damaged input of every kind, seeded, over all cores; shorter or other: make fuzz FUZZ="dumps --seed 1 --scale 0.1"
fuzz: setup
	PYTHONPATH=tests $(PY) -m fuzz $(FUZZ)

# the package as a user gets it: built, installed elsewhere, run outside the repository
test-wheel: setup
	bash scripts/test_wheel.sh $(PY)

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

# the site, in site/; the generated pages first; a broken link or anchor is an error
docs: setup
	$(PY) scripts/make_reference.py
	$(VENV)/bin/zensical build --clean --strict

bench: setup
	$(PY) benchmarks/bench_credit.py

clean:
	rm -rf $(VENV) build dist site .cache .pytest_cache .ruff_cache
