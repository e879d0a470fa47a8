# Every target makes the environment that it needs. PYTHON and VENV can be set on the command line. noxfile.py has the tests with other Pythons.
PYTHON ?= python3
VENV ?= .venv
# Of `make test-sdist`: they need tests/support, pages, requirements/ and workflows.
SDIST_TESTS := README.md docs/internals/upstream.md tests/torch_api/_step/test_recompile_reasons.py tests/repository/test_project.py tests/repository/test_release.py
# Of `make test`: a file or folder of tests instead of all.
FILE ?=
BIN := $(VENV)/bin
OLDEST := .venv-oldest
CLIENTS := .venv-clients
BENCH := .venv-bench
TORCHAX := .venv-torchax
DOCS := .venv-docs
PRERELEASES := .venv-prereleases
RELEASE := .venv-release

.PHONY: demo test check nightly mistakes baseline bench torchax docs docs-site gallery test-bench test-oldest test-prereleases test-clients dist test-sdist test-wheel clean

demo: $(VENV)/.installed
	$(BIN)/python examples/finetune_digits.py

test: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n 2 --dist loadfile --durations=10 $(FILE)

check: $(VENV)/.installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/lint-imports && $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "quick and not slow"

# What takes too long for every change: each operator of torch's database with each kind of samples, most examples, the other half of long
# lists of cases, the tables of the benchmark, the contract tests in the safe mode, and all of optax from code that LLVM has optimized.
nightly: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -m nightly
	MASKBRIDGE_SAFE=1 $(BIN)/python -m pytest -n 2 -m "not nightly and not fast_path" tests/contract
	MASKBRIDGE_TEST_OPTIMIZED=1 $(BIN)/python -m pytest -n 2 --dist load tests/torch_api/test_zoo.py

# Whether `make check` catches mistakes that are planted in 24 modules, one at a time. Half an hour on 2 cores.
mistakes: $(VENV)/.installed
	$(BIN)/python tests/support/planted_mistakes.py

# What a step of standard optimizers costs with the installed jaxlib, after a change of that cost.
baseline: $(VENV)/.installed
	MASKBRIDGE_WRITE_BASELINE=1 $(BIN)/python -m pytest -q tests/contract/test_cost_baseline.py

# Three quarters of an hour on 2 cores: figures of this class of machine, the pictures and tables of docs/performance.
bench: $(BENCH)/.installed
	$(BENCH)/bin/python benchmarks/step.py --compiled
	$(BENCH)/bin/python benchmarks/plots.py
	$(BENCH)/bin/python benchmarks/report.py

# Own tracing beside torchax: docs/torchax.md. A quarter of an hour on 2 cores.
torchax: $(TORCHAX)/.installed
	$(TORCHAX)/bin/python benchmarks/against_torchax.py --stable $(TORCHAX)/stable

# Every section of the benchmark, shrunk: the two that take minutes too.
test-bench: $(VENV)/.installed
	MASKBRIDGE_BENCH=1 $(BIN)/python -m pytest tests/repository/test_benchmarks.py

# The tables of transformations, bad inputs, operators and drop-in classes, from the code.
docs: $(VENV)/.installed
	MASKBRIDGE_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/torch_api/test_zoo.py tests/repository/test_errors.py tests/repository/test_docs.py tests/bridge/_tracing/ops/test_op_db.py::test_the_page_has_each_operator

# The site, in site/: open site/index.html. Warnings are errors. The sources are read, not imported, so neither jax nor torch is installed.
docs-site: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# The pictures of docs/gallery.md, from the examples, and what examples/interop.ipynb has printed and drawn. Five minutes on 2 cores.
gallery: $(VENV)/.installed
	for example in examples/[a-z]*.py; do $(BIN)/python $$example --plots docs/images/examples || exit 1; done
	MASKBRIDGE_WRITE_DOCS=1 $(BIN)/python -m pytest -q tests/repository/test_examples.py -k notebook

# The lower bounds of pyproject.toml, exactly.
test-oldest: $(OLDEST)/.installed
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile

# The quick tests with the pre-releases of jax and torch that pip finds (PIP_EXTRA_INDEX_URL), beyond the upper bounds of pyproject.toml.
test-prereleases:
	rm -rf $(PRERELEASES) && $(PYTHON) -m venv $(PRERELEASES)
	$(PRERELEASES)/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(PRERELEASES)/bin/python -m pip install -q -e ".[examples]" --group test
	$(PRERELEASES)/bin/python -m pip install -q --upgrade --pre jax jaxlib torch
	$(PRERELEASES)/bin/python -m bridge || true
	$(PRERELEASES)/bin/python -m pytest -n 2 --dist loadfile -m "quick and not slow"

# The optimizers inside trainers that others wrote, and the pages, some of which need these trainers.
test-clients: $(CLIENTS)/.installed
	$(CLIENTS)/bin/python -m pytest -n 2 --dist loadfile tests/clients docs

# The two files of a release, and what the index and tools/check_release.py require of them.
dist: $(RELEASE)/.installed
	rm -rf dist && $(RELEASE)/bin/python -m build
	$(RELEASE)/bin/twine check --strict dist/*
	$(PYTHON) tools/check_release.py dist

# The built wheel, from an empty directory.
test-wheel: dist
	rm -rf build/wheel .venv-wheel && mkdir -p build/wheel && cp -r tests pyproject.toml build/wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install -q --disable-pip-version-check dist/*.whl pytest -c requirements/constraints.txt
	cd build/wheel && ../../.venv-wheel/bin/python -c "import maskbridge, bridge, torch_api; print(torch_api.__file__)"
	cd build/wheel && ../../.venv-wheel/bin/python -m pytest -q tests/torch_api/test_optimizer.py tests/bridge/_memory/test_adoption.py tests/torch_api/test_state_dict.py

# The source distribution, unpacked into an empty directory.
test-sdist: dist
	rm -rf build/sdist .venv-sdist && mkdir -p build/sdist && tar -xf dist/*.tar.gz -C build/sdist --strip-components=1
	$(PYTHON) -m venv .venv-sdist
	.venv-sdist/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	cd build/sdist && ../../.venv-sdist/bin/python -m pip install -q ".[examples]" --group test -c requirements/constraints.txt
	cd build/sdist && ../../.venv-sdist/bin/python -m pytest -q $(SDIST_TESTS)

$(VENV)/.installed: pyproject.toml requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(BIN)/python -m pip install -q -e ".[examples]" --group dev -c requirements/constraints.txt
	touch $@

$(OLDEST)/.installed: pyproject.toml requirements/oldest.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(OLDEST)/bin/python -m pip install -q -e ".[examples]" --group test -c requirements/oldest.txt
	touch $@

# timm by itself: it asks for torchvision, which its groups and schedulers do not use and which must fit the build of torch.
$(CLIENTS)/.installed: pyproject.toml requirements/constraints.txt requirements/clients.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(CLIENTS)/bin/python -m pip install -q -e ".[clients,examples]" --group test -c requirements/constraints.txt -c requirements/clients.txt
	$(CLIENTS)/bin/python -m pip install -q --no-deps timm -c requirements/clients.txt
	touch $@

# The optimizers that others wrote, for comparison.
$(BENCH)/.installed: pyproject.toml requirements/constraints.txt requirements/bench.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(BENCH)/bin/python -m pip install -q -e ".[bench]" -c requirements/constraints.txt -c requirements/bench.txt
	touch $@

# The pre-release of torchax, which asks for no version of torch; the stable release in a folder beside it, to see whether it is imported.
$(TORCHAX)/.installed: pyproject.toml requirements/constraints.txt requirements/clients.txt requirements/torchax.txt
	$(PYTHON) -m venv $(TORCHAX)
	$(TORCHAX)/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(TORCHAX)/bin/python -m pip install -q -e . transformers diffusers tqdm --group test -c requirements/constraints.txt -c requirements/clients.txt
	$(TORCHAX)/bin/python -m pip install -q --no-deps -r requirements/torchax.txt
	$(TORCHAX)/bin/python -m pip install -q --no-deps --target $(TORCHAX)/stable torchax==0.0.13
	touch $@

$(RELEASE)/.installed: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(RELEASE)/bin/python -m pip install -q --group release
	touch $@

$(DOCS)/.installed: pyproject.toml requirements/docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q --disable-pip-version-check "pip>=25.1"
	$(DOCS)/bin/python -m pip install -q --group docs -c requirements/docs.txt
	touch $@

clean:
	rm -rf $(VENV) $(DOCS) $(OLDEST) $(PRERELEASES) $(CLIENTS) $(BENCH) $(TORCHAX) $(RELEASE) .nox .venv-sdist .venv-wheel build dist site *.egg-info
