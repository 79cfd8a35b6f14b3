# Everything runs in .venv. A target installs what it needs there, when the requirements changed since the last time.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Stamps of what is installed: the server; the server and the terminal clients; everything that tests and benchmarks need.
RUNTIME := $(VENV)/.installed-runtime
TERMINAL := $(VENV)/.installed-terminal
DEVELOPMENT := $(VENV)/.installed

.PHONY: serve chat top test test-long docs simulate torture coverage check format bench bench-manager bench-journal bench-explain bench-grammar bench-scheduling bench-routing bench-replicas bench-models bench-speculation bench-streams bench-api-processes bench-accuracy bench-kv-cache bench-formats bench-memory bench-worker bench-lora bench-gpu bench-viewers parallel-queries kubernetes kubernetes-tools wheel screenshot demo-model demo-model-eval clean help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(RUNTIME)  ## serve the embedded demo model; ARGS="--port 9000" passes flags
	@$(BIN)/servekit serve $(ARGS)

chat: $(TERMINAL)  ## talk to a server's model in the terminal; ARGS="http://HOST:PORT"
	@$(BIN)/servekit chat $(ARGS)

top: $(TERMINAL)  ## watch a server's scheduler in the terminal; ARGS="http://HOST:PORT"
	@$(BIN)/servekit top $(ARGS)

# Three processes for two cores, because a third of the time tests wait: for servers, workers and timeouts. One OpenMP
# thread per process: with more, processes compete for the cores. Compiled modules are kept whatever the environment says:
# tests start hundreds of processes, and pytest takes half of the collection to rewrite the asserts of modules.
# If one of the processes crashes, the tests end with that: otherwise pytest-xdist starts another process, and waits for it
# forever if the test was the last one of its file.
TEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n 3 --no-loadscope-reorder \
	--max-worker-restart 0

test: $(DEVELOPMENT)  ## run the tests, in three processes
	$(TEST) --dist loadfile -m "not long" $(ARGS)

test-long: $(DEVELOPMENT)  ## run the long tests: a million simulated steps, and faults injected into real servers
	$(TEST) --dist loadscope -m long $(ARGS)

coverage: $(DEVELOPMENT)  ## measure branch coverage of the pure core (must be 100 %), by the tests that mirror it
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -q -n 2 --dist worksteal --max-worker-restart 0 --pure-core only
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

wheel: $(DEVELOPMENT)  ## build a wheel into build/wheels, with C kernels for all processors of this kind of machine
	HATCH_BUILD_HOOK_ENABLE_CUSTOM=true $(BIN)/pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir build/wheels

kubernetes-tools: $(DEVELOPMENT)  ## install Helm and the schemas of Kubernetes, which the tests of the chart need (60 MB)
	$(BIN)/python -m scripts.kubernetes install

kubernetes: kubernetes-tools  ## write deploy/kubernetes.yml, which the Helm chart makes
	$(BIN)/python -m scripts.kubernetes write

docs: $(DEVELOPMENT)  ## build the documentation site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check: $(DEVELOPMENT)  ## run the linter, the type checker and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(DEVELOPMENT)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

simulate: $(DEVELOPMENT)  ## search for scheduler bugs with new random seeds; SECONDS=60
	$(BIN)/python -m tests.servekit.simulation.simulate --seconds $(or $(SECONDS),60) $(ARGS)

torture: $(DEVELOPMENT)  ## inject faults and overload into a real server (4 hours); ARGS="workers --scale 0.1"
	$(BIN)/python -m tests.torture $(ARGS)

bench: $(DEVELOPMENT)  ## compare output tokens/s with a loop of transformers' generate
	$(BIN)/python benchmarks/against_generate.py $(ARGS)

bench-manager: $(DEVELOPMENT)  ## measure the cost of planning and committing a step
	$(BIN)/python benchmarks/manager.py $(ARGS)

bench-grammar: $(DEVELOPMENT)  ## measure the cost of structured output
	$(BIN)/python benchmarks/grammar.py $(ARGS)

bench-scheduling: $(DEVELOPMENT)  ## compare the scheduling policies in virtual time (2 minutes)
	$(BIN)/python benchmarks/scheduling.py $(ARGS)

bench-routing: $(DEVELOPMENT)  ## compare the router with simple policies on a simulated fleet (3 minutes)
	$(BIN)/python -m benchmarks.routing $(ARGS)

bench-replicas: $(DEVELOPMENT)  ## compare two replicas with two threads, and with two servers (15 minutes)
	$(BIN)/python -m benchmarks.replicas $(ARGS)

bench-models: $(DEVELOPMENT)  ## compare models that are loaded on demand with models that stay loaded (3 minutes)
	$(BIN)/python -m benchmarks.several_models $(ARGS)

bench-speculation: $(DEVELOPMENT)  ## compare drafters with no speculation, by task and load (25 minutes)
	$(BIN)/python -m benchmarks.speculation $(ARGS)

bench-lora: $(DEVELOPMENT)  ## compare steps with LoRA adapters with those of the model alone (3 minutes)
	$(BIN)/python -m benchmarks.lora $(ARGS)

bench-streams: $(DEVELOPMENT)  ## measure memory and tasks of an open stream
	$(BIN)/python -m benchmarks.open_streams $(ARGS)

bench-api-processes: $(DEVELOPMENT)  ## measure tokens/s and CPU a token with 1, 2 and 4 API processes (10 minutes)
	$(BIN)/python -m benchmarks.api_processes $(ARGS)

bench-accuracy: $(DEVELOPMENT)  ## compare the worker's bfloat16 with float64, in logits and in tokens (4 minutes)
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

bench-kv-cache: $(DEVELOPMENT)  ## time decode steps over long contexts with each format of KV pages (5 minutes)
	$(BIN)/python -m benchmarks.kv_cache $(ARGS)

bench-formats: $(DEVELOPMENT)  ## compare formats of weights: latency, memory, accuracy (25 minutes); ARGS="--quick"
	$(BIN)/python -m benchmarks.formats $(ARGS)

bench-memory: $(DEVELOPMENT)  ## measure a worker's memory over 100,000 quick requests (20 minutes)
	$(BIN)/python -m benchmarks.worker_memory $(ARGS)

bench-worker: $(DEVELOPMENT)  ## measure a worker's step, and its matrix multiplications alone
	$(BIN)/python -m benchmarks.worker $(ARGS)

bench-gpu: $(DEVELOPMENT)  ## run all GPU benchmarks, one process a stage; ARGS="--out FOLDER --stages kernels steps"
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-journal: $(DEVELOPMENT)  ## measure the cost of the journal; ARGS=live replays 1,000 requests with faults
	$(BIN)/python -m benchmarks.journal $(or $(ARGS),cost)

bench-explain: $(DEVELOPMENT)  ## measure what explanations cost; ARGS=live explains 1,000 requests with faults
	$(BIN)/python -m benchmarks.explain $(or $(ARGS),cost)

bench-viewers: $(DEVELOPMENT)  ## measure the cost of the live view
	$(BIN)/python -m benchmarks.viewers $(ARGS)

parallel-queries: $(DEVELOPMENT)  ## run 102,000 queries in flight at once and check each answer (15 minutes); ARGS="streams"
	$(BIN)/python -m benchmarks.parallel_queries $(ARGS)

demo-model: $(DEVELOPMENT)  ## train the demo model again from its seed (about 30 minutes on 2 cores)
	$(BIN)/python scripts/demo_model/train.py --out servekit/assets/demo_model $(ARGS)

demo-model-eval: $(DEVELOPMENT)  ## measure how well the demo model answers held-out questions
	$(BIN)/python scripts/demo_model/evaluate.py --model servekit/assets/demo_model $(ARGS)

screenshot: $(DEVELOPMENT)  ## make the pictures of the console in docs/ with Chromium
	$(BIN)/python -m scripts.screenshot $(ARGS)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# torch is installed first and by its exact version: where a CPU build of that version is at hand, pip takes it, and a
# looser requirement would make pip look further. Otherwise torch's default Linux package comes, with CUDA; see the README.
define install
	@echo "installing $(1) into $(VENV): about a minute, and the download of torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '$(1)'
	@touch $@
endef

REQUIREMENTS := pyproject.toml constraints.txt

$(RUNTIME): $(REQUIREMENTS)
	$(call install,.)

$(TERMINAL): $(REQUIREMENTS)
	$(call install,.[terminal])
	@touch $(RUNTIME)

$(DEVELOPMENT): $(REQUIREMENTS)
	$(call install,.[dev])
	@touch $(RUNTIME) $(TERMINAL)
