# The two commands of the README (`make train`, `make test`) and a few for developers; `make help` lists them.
# They need Python >= 3.11, pip and make: the rest is installed into .venv, once.
.DEFAULT_GOAL := help
.PHONY: help train test test-all test-gpu bench lint format docs clean ready ready-test ready-docs
.NOTPARALLEL:

PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11 python; do \
  $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
VENV ?=
ARGS ?=
DEVICE = cpu
# If a worker dies, the run fails: pytest-xdist 3.8 would wait forever after replacing the worker
# (https://github.com/pytest-dev/pytest-xdist/issues/1378).
PARALLEL = -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
SOURCES = rl_dist envs agents benchmarks examples clstm_ppo.py train_distributed.py check_gpu_setup.py

ifeq ($(strip $(VENV)),)
ENV := .venv
ready: .venv/.installed
ready-test: .venv/.installed-test
ready-docs: .venv/.installed-docs
else  # the user's own environment: install what is missing, and change nothing else
ENV := $(patsubst ~/%,$(HOME)/%,$(VENV))
ready: ; @$(call complete,)
ready-test: ; @$(call complete,test)
ready-docs: ; @$(call complete,docs)
endif

# The checkout is on the path, so that the user's own environment needs no installation of this project.
RUN = PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" "$(ENV)/bin/python"

help:
	@echo "make train [ARGS='...']   install into .venv (once) and train; ARGS are flags of train_distributed.py"
	@echo "make test  [ARGS='...']   install, then lint, types and tests; ARGS are flags of pytest (-n 0: one process)"
	@echo "make test-all             the long tests, too, with all loggers, POPGym and Ray installed (an hour or more)"
	@echo "make test-gpu             the tests that need CUDA GPUs; writes a report to send back, gpu_report_DATE.xml"
	@echo "make bench [DEVICE=cuda]  speed of this checkout in 7 minutes; ARGS='--base ../base' compares another checkout"
	@echo "make lint                 ruff and mypy alone"
	@echo "make format               let ruff repair and format the code"
	@echo "make docs                 install, then build the site of docs/ into site/ (open site/index.html)"
	@echo "make clean                remove .venv, caches and build leftovers; keeps runs/"
	@echo "VENV=/path  uses that environment instead of .venv: only what is missing is installed, torch stays"
	@echo "PYTHON=...  the Python (3.11 or newer) that .venv is made with"

train: ready
	@$(RUN) train_distributed.py $(ARGS)

test: ready-test
	@failed=; \
	echo "== ruff"; $(RUN) -m ruff check . || failed="$$failed ruff"; \
	$(RUN) -m ruff format --check --quiet . || failed="$$failed format"; \
	echo "== mypy"; $(RUN) -m mypy $(SOURCES) || failed="$$failed mypy"; \
	echo "== pytest"; $(RUN) -m pytest $(PARALLEL) $(ARGS); code=$$?; \
	if [ $$code = 1 ]; then echo "== pytest: what failed, once more and alone"; \
	  $(RUN) -m pytest $(ARGS) -n 0 --last-failed --last-failed-no-failures none; code=$$?; fi; \
	test $$code = 0 || failed="$$failed pytest"; \
	test -z "$$failed" || { echo "make test: failed:$$failed" >&2; exit 1; }

test-all: ready-test
	@$(call complete,test wandb mlflow popgym ray)
	@$(RUN) -m pytest $(PARALLEL) -m "not gpu" $(ARGS)

test-gpu: ready
	@$(call complete,gpu-test)
	@$(RUN) -m pytest -m gpu --junitxml="gpu_report_`date +%Y-%m-%d_%H-%M`.xml" tests/gpu $(ARGS)

bench: ready
	@$(RUN) benchmarks/against_peers.py --peers --device $(DEVICE) $(ARGS)

lint: ready-test
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

format: ready-test
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

docs: ready-docs
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet && echo "built site/index.html"

clean:
	rm -rf .venv site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.installed: pyproject.toml constraints.txt
	@$(call install,.)

.venv/.installed-test: pyproject.toml constraints.txt
	@$(call install,.[test])
	@touch .venv/.installed

.venv/.installed-docs: pyproject.toml constraints.txt
	@$(call install,.[docs])
	@touch .venv/.installed

# A Python without ensurepip (Debian's, without python3-venv) still does if it has pip: pip can install itself.
define install
python='$(PYTHON)'; \
"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
  { echo "error: Python 3.11 or newer is needed, found `$${python:-python3} --version 2>&1`;" \
  "name one with PYTHON=/path/to/python3" >&2; exit 1; }; \
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
  if "$$python" -c 'import ensurepip, venv' 2>/dev/null; then "$$python" -m venv --clear .venv; \
  elif "$$python" -c 'import pip, venv' 2>/dev/null; then \
    "$$python" -m venv --clear --without-pip .venv && "$$python" -m pip --python .venv/bin/python install --quiet pip; \
  else echo "error: $$python has neither venv with ensurepip nor pip: install them" \
    "(Debian, Ubuntu: apt install python3-venv)" >&2; false; fi || exit 1; \
fi; \
echo "installing into .venv (once; torch is large, so this takes a minute or more) ..."; \
began=`date +%s`; \
.venv/bin/python -m pip install --disable-pip-version-check -qq -c constraints.txt -e '$(1)' || \
  { echo "error: the installation failed (see above); run the same command again to go on" >&2; exit 1; }; \
touch $@; echo "installed in $$((`date +%s` - began)) s"
endef

define complete
test -x "$(ENV)/bin/python" || { echo "error: VENV=$(VENV) holds no bin/python;" \
  "leave VENV out and .venv is made" >&2; exit 1; }; \
"$(ENV)/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "error: VENV=$(VENV) has a Python older than 3.11" >&2; exit 1; }; \
"$(ENV)/bin/python" .ci/complete_environment.py $(1)
endef
