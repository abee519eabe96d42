# make reproduce   run every notebook headlessly on embedded data; results in outputs/toy
# make test        lint, types, unit tests, every notebook
# make lab         JupyterLab on the collection
# make benchmark   a round against a bare PyTorch loop; workers, start-up, growth, a thousand clients on Flower;
#                    results in outputs/benchmarks
# make benchmark-flower   a round against one of Flower's simulation with plain PyTorch clients
# make benchmark-scale    what the paper's three experiments take: an hour or more, one full-size round of each
# make runs        a batch of runs, all methods on the embedded data unless told otherwise, such as
#                    make runs PRESET=paper DATASET=fashion_mnist METHODS="fedavg feddip" SEEDS="0 1 2" JOBS=2
# make paper-fashion   every table and figure of the paper on Fashion-MNIST, and README's, from the records in outputs/runs
# make laptop-cifar    the same of the runs of reduced size on CIFAR-10 and CIFAR-100
# make site        the notebooks as they were executed, as a static site in outputs/site that opens from disk
# make notebooks   run the notebooks in place, to renew the outputs they carry

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))

# The profile keeps kernels from warning about loopback, the other variable from warning about frozen modules.
export IPYTHONDIR := $(CURDIR)/notebooks/.ipython
export PYDEVD_DISABLE_FILE_VALIDATION := 1
# Progress bars would be part of a notebook's output, and different every time. Small networks only lose by threads.
QUIET := TQDM_DISABLE=1 OMP_NUM_THREADS=1

# Tests are spread over the cores; a notebook's cells belong together.
SPREAD := -n logical --maxprocesses 4

# Of `make runs`.
PRESET ?= smoke
DATASET ?= $(if $(filter smoke,$(PRESET)),fashion_mini,fashion_mnist)
METHODS ?= all
SEEDS ?= 0
PARTITIONS ?= iid
RULES ?= paper
JOBS ?= 2
OPTIONS ?=

.PHONY: reproduce test lab benchmark benchmark-flower benchmark-scale runs paper-fashion laptop-cifar site notebooks clean
.DELETE_ON_ERROR:

reproduce: $(INSTALLED)
	@mkdir -p outputs/toy/notebooks
	@set -e; for notebook in $(NOTEBOOKS); do \
	  $(BIN)/papermill -k python3 --cwd notebooks --execution-timeout 900 -p out ../outputs/toy \
	    $$notebook outputs/toy/notebooks/$$(basename $$notebook); \
	done
	@echo "Executed notebooks are in outputs/toy/notebooks, figures in outputs/toy/figures, records in outputs/toy/runs."
	@$(BIN)/python -m feddip_core.study.expected outputs/toy/runs

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(QUIET) $(BIN)/pytest -rs $(SPREAD) --dist loadgroup tests
	$(QUIET) $(BIN)/pytest $(SPREAD) --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout 300 notebooks

lab: $(INSTALLED)
	$(BIN)/jupyter lab --notebook-dir=notebooks

benchmark: $(INSTALLED)
	$(BIN)/python tests/benchmarks/benchmark.py
	$(BIN)/python tests/benchmarks/benchmark_many.py

runs: $(INSTALLED)
	$(BIN)/python -m feddip_core.batch --preset $(PRESET) --dataset $(DATASET) --methods $(METHODS) --seeds $(SEEDS) \
	  --partitions $(PARTITIONS) --rules $(RULES) --jobs $(JOBS) $(OPTIONS)

benchmark-scale: $(INSTALLED)
	$(BIN)/python tests/benchmarks/benchmark_scale.py

benchmark-flower: $(INSTALLED)
	$(BIN)/python tests/benchmarks/benchmark_flower.py

RESULTS := accuracy communication non_iid layer_sparsity extreme_sparsity
# $(call results,preset,data set,notebooks): each from the records, two at a time.
define results
	@mkdir -p outputs/notebooks
	printf '%s\n' $(3) | xargs -P 2 -I NAME $(BIN)/papermill -k python3 --no-progress-bar --cwd notebooks \
	  --execution-timeout 900 -p preset $(1) -p dataset $(2) -p runs ../outputs/runs -p out ../outputs \
	  notebooks/NAME.ipynb outputs/notebooks/NAME-$(2)-$(1).ipynb
endef

# The figures, then the outputs that the notebooks carry: whoever adds a record renews both.
OF_RECORDS := $(RESULTS) paper_vs_code convergence
paper-fashion: $(INSTALLED)
	$(call results,paper,fashion_mnist,$(OF_RECORDS))
	$(BIN)/papermill -k python3 --no-progress-bar --cwd notebooks -p out ../outputs notebooks/reproduction.ipynb \
	  outputs/notebooks/reproduction.ipynb
	$(MAKE) notebooks NOTEBOOKS='$(patsubst %,notebooks/%.ipynb,$(OF_RECORDS) reproduction)'
	$(BIN)/python -m feddip_core.study.readme

laptop-cifar: $(INSTALLED)
	$(call results,laptop,cifar10,$(RESULTS))
	$(call results,laptop,cifar100,$(RESULTS))
	$(BIN)/python -m feddip_core.study.readme

site: $(INSTALLED)
	$(BIN)/python -m feddip_core.lab.gallery
	@echo "The site begins at outputs/site/index.html."

notebooks: $(INSTALLED)
	@set -e; for notebook in $(NOTEBOOKS); do \
	  $(QUIET) $(BIN)/jupyter nbconvert --to notebook --execute --inplace --log-level WARN $$notebook; \
	done
	$(BIN)/python -m feddip_core.lab.tidy $(NOTEBOOKS)

$(INSTALLED): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks,flower,test]'
	@touch $@

clean:
	rm -rf .venv outputs/notebooks outputs/site outputs/screenshots
