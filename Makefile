# Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Changes when the code's requirements do, not when the code does.
INSTALLED := $(VENV)/.installed

.PHONY: serve test simulate torture coverage check format bench bench-manager bench-grammar bench-scheduling bench-streams bench-accuracy bench-memory bench-worker bench-gpu bench-viewers parallel-queries screenshot demo-model demo-model-eval clean help

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

serve: $(INSTALLED)  ## serve the embedded demo model; ARGS="--port 9000" passes flags
	@$(BIN)/servekit serve $(ARGS)

# With a thread for each, the two do not wait for one another's.
test: $(INSTALLED)  ## run the tests; each file in one of two processes, for most of them wait for servers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

coverage: $(INSTALLED)  ## branch coverage of the pure core by its unit tests and a few simulations: 100 %
	$(BIN)/coverage run -m pytest -q tests/unit tests/sim -m "not long"
	$(BIN)/coverage report

check: $(INSTALLED)  ## lint, types and import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

simulate: $(INSTALLED)  ## hunt for scheduler bugs with seeds that nobody has tried; SECONDS=60
	$(BIN)/python -m tests.sim.simulate --seconds $(or $(SECONDS),60) $(ARGS)

torture: $(INSTALLED)  ## kill, starve, flood and soak a real server (3 hours); ARGS="workers --scale 0.1"
	$(BIN)/python -m tests.torture $(ARGS)

bench: $(INSTALLED)  ## output tokens/s against a loop of transformers' generate
	$(BIN)/python benchmarks/against_generate.py $(ARGS)

bench-manager: $(INSTALLED)  ## what planning and committing a step costs
	$(BIN)/python benchmarks/manager.py $(ARGS)

bench-grammar: $(INSTALLED)  ## what following a grammar costs
	$(BIN)/python benchmarks/grammar.py $(ARGS)

bench-scheduling: $(INSTALLED)  ## what the policies do for people, in virtual time (2 minutes)
	$(BIN)/python benchmarks/scheduling.py $(ARGS)

bench-streams: $(INSTALLED)  ## what an open stream costs: memory and tasks
	$(BIN)/python -m benchmarks.open_streams $(ARGS)

bench-accuracy: $(INSTALLED)  ## how far the worker's bfloat16 is from exact, in logits and in tokens (4 minutes)
	$(BIN)/python -m benchmarks.accuracy $(ARGS)

bench-memory: $(INSTALLED)  ## whether a worker's memory grows in 100,000 steps (4 minutes)
	$(BIN)/python -m benchmarks.worker_memory $(ARGS)

bench-worker: $(INSTALLED)  ## what a step costs the worker, beside its multiplications alone
	$(BIN)/python -m benchmarks.worker $(ARGS)

bench-gpu: $(INSTALLED)  ## all that is to be measured on a GPU, and each stage alone; ARGS="--out FOLDER --stages kernels steps"
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-viewers: $(INSTALLED)  ## what it costs that somebody watches the scheduler
	$(BIN)/python -m benchmarks.viewers $(ARGS)

parallel-queries: $(INSTALLED)  ## 102,000 queries in flight at once, each checked (quarter of an hour); ARGS="streams"
	$(BIN)/python -m benchmarks.parallel_queries $(ARGS)

demo-model: $(INSTALLED)  ## train the demo model again, from its seed (about half an hour on 2 cores)
	$(BIN)/python scripts/demo_model/train.py --out servekit/demo_model $(ARGS)

demo-model-eval: $(INSTALLED)  ## how well the demo model answers held-out questions
	$(BIN)/python scripts/demo_model/evaluate.py --model servekit/demo_model $(ARGS)

screenshot: $(INSTALLED)  ## the pictures of the console in docs/, by Chromium
	$(BIN)/python -m scripts.screenshot $(ARGS)

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

# torch first and by its exact version: where a CPU build of that version is at hand, pip takes it, and anything looser
# would look further. Where none is, torch's default Linux package comes, with CUDA; see the README.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): about a minute, and the download of torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
