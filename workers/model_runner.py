"""Execute step plans: owns the model, its KV pages and the token table."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
from workers.constraints import Constraints
from workers.kv_cache import KVCache, bytes_per_block
from workers.logprobs import prompt_logprobs, sampled_logprobs
from workers.model_manager import LoadedModel, ModelManager, output_recorded, output_replayed
from workers.paged_step import PagedStep
from workers.penalties import adjust
from workers.pieces import LEAST_TOKENS, attempt, in_pieces, joined, release_memory
from workers.runner import OutOfMemory
from workers.sampler import sample

log = logging.getLogger("servekit.worker")

CPU_KV_CACHE_BYTES = 2**30
# Relative distance of logits. Half precision rounds every product; a wrong page or position gives values near 1.
SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.15}


class ModelRunner:
    """One model on one device. `execute` is the only way its pages change."""

    def __init__(self, loaded: LoadedModel, settings: LoadModel) -> None:
        self.loaded = loaded
        layers, dtype, device, block_size = loaded.layers, loaded.dtype, loaded.device, settings.block_size
        self.attention = choose_attention(device, dtype, layers)
        self._bytes_per_block = bytes_per_block(layers, self.attention.block_shapes, block_size, dtype)
        num_blocks = settings.num_kv_blocks or self._num_blocks_that_fit(settings)
        self.cache = KVCache(layers, self.attention.block_shapes, num_blocks, block_size, dtype, device)
        # No sequence is longer than the pool, whatever context the model claims.
        longest = min(loaded.info.max_model_len, num_blocks * block_size + 1)
        self.table = SlotTable(settings.max_num_seqs, longest, num_blocks, block_size, device)
        # A mask of four dimensions is taken to be finished, where without one transformers would look at the positions.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        tokenizer_file = Path(settings.model_path) / "tokenizer.json"
        self.constraints = Constraints(tokenizer_file, loaded.info.vocab_size, loaded.info.eos_token_ids)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the step's rows, and let those that sample choose a token each.

        In pieces if memory does not hold it at once. Raises OutOfMemory if that does not help.
        """
        started = time.monotonic()
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
        return replace(result, step_time_s=time.monotonic() - started)

    def _begin(self, plan: StepPlan) -> Batch:
        """What a plan changes before anything is computed, and its inputs. Raises OutOfMemory."""
        batch = attempt(partial(self._apply, plan))
        if isinstance(batch, str):
            raise OutOfMemory(f"the inputs of a step of {plan.num_tokens} tokens do not fit: {batch}")
        return batch

    def _apply(self, plan: StepPlan) -> Batch:
        if plan.copies:
            sources, targets = torch.tensor(plan.copies, device=self.loaded.device).T
            self.cache.copy_blocks(sources, targets)
        return make_batch(plan, self.table)

    def _execute_in_pieces(self, plan: StepPlan, most_tokens: int) -> StepResult:
        pieces = in_pieces(plan, most_tokens)
        return joined([(self._execute(piece, make_batch(piece, self.table)), rows) for piece, rows in pieces])

    def _execute(self, plan: StepPlan, batch: Batch) -> StepResult:
        raw, of_prompts = self._compute(batch)
        sampled, of_sampled, failures = self._choose(raw, batch) if batch.sampling else ((), (), ())
        return StepResult(plan.epoch, plan.step_id, sampled, 0.0, of_sampled, of_prompts, failures)

    def _choose(
        self, raw: Tensor, batch: Batch
    ) -> tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...], tuple[tuple[int, str], ...]]:
        """A token for each row that samples, from raw logits [num_sampled, vocab_size], and what to tell of it."""
        rows, table = batch.sampling, self.table
        logits = adjust(raw, rows, table)
        logits = ban(logits, rows, table)
        # Only logprobs look at the raw ones again.
        in_place = logits is not raw or all(row.sampling.logprobs is None for row in rows)
        logits, failures = self.constraints.constrain(logits, rows, table, in_place)
        token_ids = sample(logits, rows)
        table.token_ids[batch.sampled_cells] = token_ids.int()
        return tuple(token_ids.tolist()), sampled_logprobs(raw, token_ids, rows), failures

    def _compute(self, batch: Batch) -> tuple[Tensor, tuple[PromptLogprobs, ...]]:
        """Logits [num_sampled, vocab_size] in float32, and what is to be told of prompts."""
        if not batch.prompt_rows:
            return self._forward(batch, batch.logits_indices), ()
        with output_recorded(self.loaded.decoder) as outputs:
            logits = self._forward(batch, batch.logits_indices)
        with output_replayed(self.loaded.decoder, outputs[-1]):
            vocab_size = self.loaded.info.vocab_size
            told = prompt_logprobs(batch.prompt_rows, self.table, lambda i: self._forward(batch, i), vocab_size)
        return logits, told

    def _forward(self, batch: Batch, token_indices: Tensor) -> Tensor:
        """Logits [num_indices, vocab_size] in float32, of those of the step's flat tokens."""
        output = self.loaded.model(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=token_indices,
            paged=PagedStep(self.attention, self.cache, batch.rows, None if batch.prompt_rows else token_indices),
        )
        logits: Tensor = output.logits[0]
        return logits.float()

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers."""
        return -(-self._bytes_per_block // self.cache.block_size)

    def _num_blocks_that_fit(self, settings: LoadModel) -> int:
        memory = settings.kv_cache_memory_bytes or self._free_memory(settings.gpu_memory_utilization)
        if memory < self._bytes_per_block:
            raise ConfigError(
                f"{memory} bytes are left for the KV cache, and one block takes {self._bytes_per_block}; raise "
                "kv_cache_memory_bytes, or gpu_memory_utilization where that decides"
            )
        return memory // self._bytes_per_block

    def _free_memory(self, gpu_memory_utilization: float) -> int:
        if self.loaded.device.type == "cpu":
            return CPU_KV_CACHE_BYTES
        free, total = torch.cuda.mem_get_info(self.loaded.device)
        return int(free - (1.0 - gpu_memory_utilization) * total)

    # -- the proof that pages give what the model gives ---------------------------------------------------------------

    @torch.inference_mode()
    def self_check(self) -> float:
        """Compare paged chunks with what transformers said of the same tokens; returns the relative distance.

        Raises ConfigError when they differ: better no answer than a wrong one, whatever the architecture hides.
        """
        info, sample = self.loaded.info, self.loaded.sample
        num_tokens = min(len(sample.token_ids), self.cache.num_blocks * self.cache.block_size)
        plain = sample.logits[num_tokens - 1]
        paged = self._run_in_chunks(sample.token_ids[:num_tokens])
        distance = float((paged - plain).norm(dim=-1).max() / plain.norm())
        if not distance <= SELF_CHECK_TOLERANCE.get(self.loaded.dtype, 0.15):
            raise ConfigError(
                f"architecture {info.architecture} cannot be served: over KV pages its logits differ from "
                f"transformers' own by {distance:.2g} (relative)"
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


def load(settings: LoadModel, tell: Callable[[str], None]) -> tuple[ModelRunner, WorkerReady]:
    """From the model's directory to a runner that was seen to give what transformers gives; `tell` hears of each stage.

    Raises ConfigError.
    """
    started = time.monotonic()
    tell("loading the weights")
    loaded = ModelManager(settings.device).load(Path(settings.model_path), settings.dtype, settings.max_model_len)
    tell("making room for the KV cache")
    runner = ModelRunner(loaded, settings)
    tell("comparing paged with plain attention")
    distance = runner.self_check()
    runner.constraints.warm_up()
    elapsed_s = time.monotonic() - started
    log.info(
        "loaded %.1f M parameters in %.1f s; attention: %s; paged logits agree with transformers' within %.1g",
        loaded.info.num_parameters / 1e6,
        elapsed_s,
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
    )
    return runner, ready
