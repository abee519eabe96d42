# make reproduce   run every notebook headlessly on embedded data; results in outputs/toy
# make test        lint, types, unit tests, every notebook: about ten minutes on two cores
# make check       lint, types and the fast tests: under two minutes
# make torture     ten minutes of random kills, damaged files, hostile clients and random experiments; reports what held
# make lab         JupyterLab, with the page to start from
# make benchmark   a round against a bare PyTorch loop; workers, start-up, growth, networks, a thousand clients on Flower;
#                    results in outputs/benchmarks
# make benchmark-inference   sparse models against dense ones: PyTorch, ONNX Runtime, C; one thread, four minutes
# make benchmark-flower   a round against one of Flower's simulation with plain PyTorch clients
# make benchmark-scale    what the paper's three experiments take: an hour or more, one full-size round of each
# make gpu-check   does this machine's GPU compute what its CPU does? a few minutes; without CUDA, what can be seen anyway
# make runs        a batch of runs, all methods on the embedded data unless told otherwise, such as
#                    make runs PRESET=paper DATASET=fashion_mnist METHODS="fedavg feddip" SEEDS="0 1 2" JOBS=2
# make league      the league of methods: its runs, then its table; METHOD=yours:Mine runs your own beside the records
# make paper-fashion   every table and figure of the paper on Fashion-MNIST, and README's, from the records in outputs/runs
# make narrow-cifar    the same for CIFAR-10 and CIFAR-100 with narrow networks
# make site        the executed notebooks as a static site in outputs/site that opens from disk
# make slides      slides of notebooks 01 to 06, in outputs/slides; they open from disk (npm fetches reveal.js once)
# make notebooks   run the notebooks in place, to renew the outputs they carry
# make lock        renew hashes.txt from pyproject.toml and constraints.txt

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb))

# In JupyterLab long lines wrap, and no question about news covers the page.
export JUPYTER_CONFIG_PATH := $(CURDIR)/notebooks/.jupyter
# The profile stops kernels from warning about loopback, the other variable from warning about frozen modules.
export IPYTHONDIR := $(CURDIR)/notebooks/.ipython
export PYDEVD_DISABLE_FILE_VALIDATION := 1
# Progress bars would become part of a notebook's output and differ every time. Threads only slow small networks down.
QUIET := TQDM_DISABLE=1 OMP_NUM_THREADS=1

# Tests are spread over the cores; a notebook's cells belong together.
SPREAD := -n logical --maxprocesses 4

# Variables of `make runs`.
PRESET ?= smoke
DATASET ?= $(if $(filter smoke,$(PRESET)),fashion_mini,fashion_mnist)
METHODS ?= all
SEEDS ?= 0
PARTITIONS ?= iid
RULES ?= paper
JOBS ?= 2
OPTIONS ?=

.PHONY: reproduce lint check test torture gpu-check lab benchmark benchmark-inference benchmark-flower benchmark-scale runs league paper-fashion narrow-cifar site slides notebooks lock clean
.DELETE_ON_ERROR:

reproduce: $(INSTALLED)
	@$(BIN)/python -m feddip_core.reproduce

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(QUIET) $(BIN)/pytest -p no:nbval -m 'not slow' $(SPREAD) --dist loadgroup tests

test: lint
	$(QUIET) $(BIN)/pytest -p no:nbval -rs $(SPREAD) --dist loadgroup tests
	$(QUIET) $(BIN)/pytest $(SPREAD) --dist loadfile --nbval --nbval-current-env --nbval-cell-timeout 1800 notebooks

torture: $(INSTALLED)
	$(QUIET) PYTHONPATH=tests/engine:tests/flower $(BIN)/python tests/torture.py $(OPTIONS)

gpu-check: $(INSTALLED)
	$(BIN)/python tests/gpu_check.py $(OPTIONS)

lab: $(INSTALLED)
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb

benchmark: $(INSTALLED)
	$(BIN)/python tests/benchmarks/benchmark.py
	$(BIN)/python tests/benchmarks/benchmark_networks.py
	$(BIN)/python tests/benchmarks/benchmark_many.py

runs: $(INSTALLED)
	$(BIN)/python -m feddip_core.batch --preset $(PRESET) --dataset $(DATASET) --methods $(METHODS) --seeds $(SEEDS) \
	  --partitions $(PARTITIONS) --rules $(RULES) --jobs $(JOBS) $(OPTIONS)

LEAGUE = $(BIN)/python -m feddip_core.batch --preset paper --dataset fashion_mnist $(if $(METHOD),--methods $(METHOD)) \
  --jobs $(JOBS) $(OPTIONS) --results
league: $(INSTALLED)
	$(LEAGUE) league_choices --seeds 10
	$(LEAGUE) league --seeds 1 2 3
	$(BIN)/python -m feddip_core.study.standings $(METHOD)

benchmark-scale: $(INSTALLED)
	$(BIN)/python tests/benchmarks/benchmark_scale.py

benchmark-inference: $(INSTALLED)
	$(BIN)/python tests/benchmarks/benchmark_inference.py

benchmark-flower: $(INSTALLED)
	$(BIN)/python tests/benchmarks/benchmark_flower.py

# First each client's accuracy, then the figures, then the notebooks' outputs: a new record changes all.
OF_RECORDS := 10_reproduction 11_accuracy 12_communication 13_non_iid 14_layer_sparsity 15_extreme_sparsity \
  16_paper_vs_code 18_beyond_the_paper 19_league 20_convergence
paper-fashion: $(INSTALLED)
	$(BIN)/python -m feddip_core.study.per_client outputs/runs fashion_mnist
	$(BIN)/python -m feddip_core.reproduce --preset paper --dataset fashion_mnist --jobs 2
	$(MAKE) notebooks NOTEBOOKS='$(patsubst %,notebooks/%.ipynb,$(OF_RECORDS))'

narrow-cifar: $(INSTALLED)
	$(BIN)/python -m feddip_core.reproduce --preset narrow --dataset cifar10 cifar100 --jobs 2
	$(MAKE) notebooks NOTEBOOKS=notebooks/10_reproduction.ipynb

site: $(INSTALLED)
	$(BIN)/python -m feddip_core.lab.gallery
	@echo "The site begins at outputs/site/index.html."

slides: $(INSTALLED)
	$(BIN)/python -m feddip_core.lab.slides

notebooks: $(INSTALLED)
	@set -e; for notebook in $(NOTEBOOKS); do \
	  $(QUIET) $(BIN)/jupyter nbconvert --to notebook --execute --inplace --log-level WARN $$notebook; \
	done
	$(BIN)/python -m feddip_core.lab.tidy $(NOTEBOOKS)

# Versions with the hashes of all their files, for every platform. PyTorch and its CUDA packages are left out: each
# machine's pip decides which build fits.
CUDA := triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc cuda-runtime \
  cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
lock:
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11.5 --generate-hashes --no-header --no-annotate \
	  --no-emit-index-url $(addprefix --no-emit-package=,torch torchvision $(CUDA)) --all-extras -c constraints.txt \
	  pyproject.toml -o hashes.txt

# First the registry's packages, checked by hash; then PyTorch, whose build depends on the machine, and this project.
$(INSTALLED): constraints.txt hashes.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=…")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r hashes.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[notebooks,flower,deploy,test]'
	@touch $@

clean:
	rm -rf .venv outputs/notebooks outputs/site outputs/slides outputs/screenshots
