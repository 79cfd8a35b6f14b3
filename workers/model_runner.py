"""Execute step plans: owns the model, its KV pages and the token table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from servekit.errors import ConfigError
from servekit.messages import (
    LoadModel,
    PromptLogprobs,
    Row,
    Seat,
    StepPlan,
    StepResult,
    TokenLogprobs,
    WorkerReady,
)
from servekit.sampling_params import SamplingParams
from workers.attention import choose_attention
from workers.bans import ban
from workers.batch import Batch, SlotTable, make_batch
from workers.constraints import Constraints, Lookout
from workers.decode_graphs import Capture, CudaCapture, DecodeGraphs
from workers.kv_cache import KVCache, bytes_per_block
from workers.kv_capacity import (
    CPU_KV_CACHE_BYTES,
    Gpu,
    MemoryUse,
    explain,
    kv_cache_bytes,
    largest_step,
    num_blocks_in,
    rehearse,
)
from workers.logprobs import prompt_logprobs, sampled_logprobs
from workers.model_manager import LoadedModel, ModelManager, output_recorded, output_replayed
from workers.paged_step import PagedStep, StepRows
from workers.penalties import adjust
from workers.pieces import LEAST_TOKENS, attempt, in_pieces, joined, release_memory
from workers.runner import OutOfMemory, Pending
from workers.sampler import sample
from workers.staging import Mark, on_host, staged

log = logging.getLogger("servekit.worker")

# Relative distance of logits. Half precision rounds every product; a wrong page or position gives values near 1.
ROUNDED_TOLERANCE = 0.15
ROUNDED_TOKENS = 24
SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: ROUNDED_TOLERANCE, torch.float16: ROUNDED_TOLERANCE}


class ModelRunner:
    """One model on one device. `execute` is the only way its pages change."""

    def __init__(self, loaded: LoadedModel, settings: LoadModel, room: int = 0) -> None:
        """`room`: bytes of a larger cache that this runner rehearses for, so that its tables are as large."""
        self.loaded = loaded
        layers, dtype, device, block_size = loaded.layers, loaded.dtype, loaded.device, settings.block_size
        self.attention = choose_attention(device, dtype, layers, loaded.scores, block_size, settings.kv_cache_dtype)
        self._bytes_per_block = bytes_per_block(layers, self.attention.block_shapes, block_size, self.attention.stored)
        memory = settings.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
        num_blocks = settings.num_kv_blocks or num_blocks_in(memory, self._bytes_per_block)
        self.cache = KVCache(layers, self.attention.block_shapes, num_blocks, block_size, self.attention.stored, device)
        # No sequence is longer than the pool, whatever context the model claims.
        most_blocks = max(num_blocks, room // self._bytes_per_block)
        longest = min(loaded.info.max_model_len, most_blocks * block_size + 1)
        self.table = SlotTable(settings.max_num_seqs, longest, most_blocks, block_size, device)
        self._graphs: DecodeGraphs | None = None
        self._finished_s = 0.0  # when the last step was seen to be done
        # A mask of four dimensions is taken to be finished, where without one transformers would look at the positions.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        tokenizer_file = Path(settings.model_path) / "tokenizer.json"
        self.constraints = Constraints(tokenizer_file, loaded.info.vocab_size, loaded.info.eos_token_ids)

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the one before it is done."""
        return self.loaded.device.type == "cuda"

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch, and wait for it. Raises OutOfMemory."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Compute the step's rows, and let those that sample choose a token each.

        In pieces if memory does not hold it at once. Raises OutOfMemory if that does not help. Nothing in here waits
        for the device, but for three: rows with a grammar wait for the step before this one, pieces for each other, and
        so does a graph when it is captured.
        """
        launched = time.monotonic()
        batch = self._begin(plan)
        most_tokens = plan.num_tokens
        result = attempt(partial(self._execute, plan, batch))
        while isinstance(result, str) and most_tokens > LEAST_TOKENS:
            log.warning("%s; %d tokens did not fit at once", result, most_tokens)
            most_tokens = max(LEAST_TOKENS, most_tokens // 2)
            release_memory()
            result = attempt(partial(self._execute_in_pieces, plan, most_tokens))
        if isinstance(result, str):
            release_memory()
            raise OutOfMemory(f"a step of {plan.num_tokens} tokens does not fit, not even in pieces: {result}")
        # Also where nobody samples: a step that is not done is not to be answered for.
        tell, end = result, Mark(self.loaded.device)

        def finish() -> StepResult:
            end.wait()
            # What was launched ahead began when the step before it was done; or rather, when that was noticed.
            started, self._finished_s = max(launched, self._finished_s), time.monotonic()
            return replace(tell(), step_time_s=self._finished_s - started)

        return Pending(end.is_passed, finish)

    def _begin(self, plan: StepPlan) -> Batch:
        """What a plan changes before anything is computed, and its inputs. Raises OutOfMemory."""
        batch = attempt(partial(self._apply, plan))
        if isinstance(batch, str):
            raise OutOfMemory(f"the inputs of a step of {plan.num_tokens} tokens do not fit: {batch}")
        return batch

    def _apply(self, plan: StepPlan) -> Batch:
        if plan.copies:
            self.cache.copy_blocks(*staged(list(np.array(plan.copies).T), self.loaded.device))
        return make_batch(plan, self.table)

    def _execute_in_pieces(self, plan: StepPlan, most_tokens: int) -> Callable[[], StepResult]:
        results = []
        for piece, rows in in_pieces(plan, most_tokens):
            tell = self._execute(piece, make_batch(piece, self.table))
            Mark(self.loaded.device).wait()  # so that memory holds one piece's tensors at a time
            results.append((tell(), rows))
        result = joined(results)
        return lambda: result

    def _execute(self, plan: StepPlan, batch: Batch) -> Callable[[], StepResult]:
        """What is returned tells of the step, when all of it is done."""
        lookout = self.constraints.look(batch.sampling, self.table)
        raw, of_prompts = self._compute(batch)
        if not batch.sampling:
            return lambda: StepResult(plan.epoch, plan.step_id, (), 0.0, (), of_prompts(), ())
        token_ids, of_sampled, failures = self._choose(raw, batch, lookout)
        copy = on_host(token_ids)
        return lambda: StepResult(
            plan.epoch, plan.step_id, tuple(copy.tolist()), 0.0, of_sampled(), of_prompts(), failures
        )

    def _choose(
        self, raw: Tensor, batch: Batch, lookout: Lookout
    ) -> tuple[Tensor, Callable[[], tuple[TokenLogprobs | None, ...]], tuple[tuple[int, str], ...]]:
        """A token for each row that samples, from raw logits [num_sampled, vocab_size], and what to tell of it."""
        rows, table = batch.sampling, self.table
        logits = adjust(raw, rows, table)
        logits = ban(logits, rows, table)
        # Only logprobs look at the raw ones again.
        in_place = logits is not raw or all(row.sampling.logprobs is None for row in rows)
        logits, failures = self.constraints.constrain(logits, rows, lookout, in_place)
        token_ids = sample(logits, rows)
        table.token_ids.index_copy_(0, batch.sampled_cells, token_ids.int())
        return token_ids, sampled_logprobs(raw, token_ids, rows), failures

    def _compute(self, batch: Batch) -> tuple[Tensor, Callable[[], tuple[PromptLogprobs, ...]]]:
        """Logits [num_sampled, vocab_size] in float32, and what is to be told of prompts."""
        if self._graphs is not None and (logits := self._graphs.run(batch)) is not None:
            return logits, tuple
        if not batch.prompt_rows:
            return self._forward(batch, batch.logits_indices), tuple
        with output_recorded(self.loaded.decoder) as outputs:
            logits = self._forward(batch, batch.logits_indices)
        with output_replayed(self.loaded.decoder, outputs[-1]):
            vocab_size = self.loaded.info.vocab_size
            told = prompt_logprobs(batch.prompt_rows, self.table, lambda i: self._forward(batch, i), vocab_size)
        return logits, told

    def _forward(self, batch: Batch, token_indices: Tensor) -> Tensor:
        """Logits [num_indices, vocab_size] in float32, of those of the step's flat tokens."""
        wanted = None if batch.prompt_rows else token_indices
        paged = PagedStep(self.attention, self.cache, batch.rows, wanted)
        return self._logits(batch.input_ids[None], batch.position_ids[None], paged, token_indices).float()

    def _forward_decodes(self, input_ids: Tensor, position_ids: Tensor, rows: StepRows) -> Tensor:
        """The same of a step whose rows all compute one token, in the model's own dtype."""
        return self._logits(input_ids, position_ids, PagedStep(self.attention, self.cache, rows), 0)

    def _logits(self, input_ids: Tensor, position_ids: Tensor, paged: PagedStep, keep: Tensor | int) -> Tensor:
        output: Any = self.loaded.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=keep,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def capture_decodes(self, capture: Capture) -> None:
        """Let decode steps be replays of graphs from now on. Raises what capturing the first one raises."""
        most_rows, width = len(self.table.num_blocks), self.table.block_tables.shape[1]
        sizes = (most_rows, width, self.cache.block_size, self.loaded.info.vocab_size)
        graphs = DecodeGraphs(self._forward_decodes, *sizes, self.loaded.device, capture)
        graphs.capture_largest()
        self._graphs = graphs

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers."""
        return -(-self._bytes_per_block // self.cache.block_size)

    # -- the proof that pages give what the model gives ---------------------------------------------------------------

    @torch.inference_mode()
    def self_check(self) -> float:
        """Compare paged chunks with what transformers said of the same tokens; returns the relative distance.

        Raises ConfigError when they differ: better no answer than a wrong one, whatever the architecture hides.
        """
        info, sample = self.loaded.info, self.loaded.sample
        is_exact = self.attention.stored is self.loaded.dtype
        # The more keys and values were rounded to a byte, the further off is what is made of them.
        most_tokens = len(sample.token_ids) if is_exact else ROUNDED_TOKENS
        num_tokens = min(len(sample.token_ids), most_tokens, self.cache.num_blocks * self.cache.block_size)
        plain = sample.logits[num_tokens - 1]
        paged = self._run_in_chunks(sample.token_ids[:num_tokens])
        distance = float((paged - plain).norm(dim=-1).max() / plain.norm())
        if not distance <= (SELF_CHECK_TOLERANCE[self.loaded.dtype] if is_exact else ROUNDED_TOLERANCE):
            remedy = "" if is_exact else "; its keys and values need --kv-cache-dtype auto"
            raise ConfigError(
                f"architecture {info.architecture} cannot be served: over KV pages its logits differ from "
                f"transformers' own by {distance:.2g} (relative){remedy}"
            )
        return distance

    def _run_in_chunks(self, token_ids: tuple[int, ...]) -> Tensor:
        """[2, vocab_size]: the last logits of a sequence computed in chunks, and once more, from the head alone."""
        num_tokens, block_size = len(token_ids), self.cache.block_size
        blocks = tuple(reversed(range(-(-num_tokens // block_size))))
        seat = Seat(slot=0, sampling=SamplingParams(max_tokens=1, temperature=0.0))
        ends = sorted({num_tokens // 2, num_tokens - 1, num_tokens} - {0})
        for start, stop in zip([0, *ends], ends, strict=False):
            new_blocks = () if start else blocks
            row = Row(0, start, stop - start, token_ids[start:stop], new_blocks, samples=True)
            plan = StepPlan(0, 0, (seat,) if start == 0 else (), (row,))
            batch = make_batch(plan, self.table)
            with output_recorded(self.loaded.decoder) as outputs:
                logits = self._forward(batch, batch.logits_indices)
        with output_replayed(self.loaded.decoder, outputs[-1]):
            replayed = self._forward(batch, batch.logits_indices)
        return torch.cat([logits, replayed])


def make_runner(loaded: LoadedModel, settings: LoadModel) -> ModelRunner:
    """With as many KV blocks as were asked for, or as fit; on a GPU, with decode steps as graphs."""
    if loaded.device.type != "cuda":
        return ModelRunner(loaded, settings)
    if not settings.num_kv_blocks and not settings.kv_cache_memory_bytes:
        use, utilization = _rehearse(loaded, settings), settings.gpu_memory_utilization
        log.info("%s", explain(use, utilization))
        settings = replace(settings, kv_cache_memory_bytes=max(1, kv_cache_bytes(use, utilization)))
    runner = ModelRunner(loaded, settings)
    _capture(runner)
    return runner


def _capture(runner: ModelRunner) -> None:
    if not runner.attention.captures:
        log.warning(
            "decode steps are launched one kernel at a time: attention by %s is in no graph", runner.attention.name
        )
        return
    try:
        runner.capture_decodes(CudaCapture())
    except RuntimeError as error:  # whatever a model's own layers do that no graph can hold
        log.warning("decode steps are launched one kernel at a time, for they could not be captured: %s", error)


def _rehearse(loaded: LoadedModel, settings: LoadModel) -> MemoryUse:
    """See what memory is taken but for the cache, with one just large enough for the largest step."""
    gpu = Gpu(loaded.device)
    plan, num_blocks = largest_step(settings, loaded.info.max_model_len)

    def make() -> tuple[Callable[[], object], int]:
        runner = ModelRunner(loaded, replace(settings, num_kv_blocks=num_blocks), room=gpu.free())
        _capture(runner)
        return partial(runner.execute, plan), runner.cache.num_bytes

    use = rehearse(gpu, gpu.total, make)
    release_memory()
    return use


def load(settings: LoadModel, tell: Callable[[str], None]) -> tuple[ModelRunner, WorkerReady]:
    """From the model's directory to a runner that was seen to give what transformers gives; `tell` hears of each stage.

    Raises ConfigError.
    """
    started = time.monotonic()
    loaded = ModelManager(settings.device).load(
        Path(settings.model_path), settings.dtype, settings.max_model_len, load_format=settings.load_format, tell=tell
    )
    tell("making room for the KV cache")
    runner = make_runner(loaded, settings)
    tell("comparing paged with plain attention")
    distance = runner.self_check()
    runner.constraints.warm_up()
    elapsed_s = time.monotonic() - started
    log.info(
        "loaded %.1f M parameters in %.1f s, %.1f of them for the weights (%.2f GB/s); attention: %s; paged logits "
        "agree with transformers' within %.1g",
        loaded.info.num_parameters / 1e6,
        elapsed_s,
        loaded.weights_time_s,
        loaded.num_weight_bytes / loaded.weights_time_s / 1e9,
        runner.attention.name,
        distance,
    )
    ready = WorkerReady(
        model=loaded.info,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        num_blocks=runner.cache.num_blocks,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        load_time_s=elapsed_s,
        num_weight_bytes=loaded.num_weight_bytes,
        weights_time_s=loaded.weights_time_s,
        attention=runner.attention.name,
    )
    return runner, ready
