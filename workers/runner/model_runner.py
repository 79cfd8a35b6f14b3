"""Execute step plans: owns the model, its KV pages and the token table.

`launch` prepares a batch, `_execute` runs the forward pass and chooses tokens, and the outputs are read when the device
has passed an event. If a step does not fit into memory, `_execute_in_parts` does the same with a few tokens at a time.
With speculative decoding, the plan first gets its drafts, and at the end the outputs are cut to spans.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from servekit.errors import ConfigError
from servekit.protocol.block_ring import LAYOUT_BYTES, BlockRing
from servekit.protocol.lora import AdapterLoaded, LoraAdapter
from servekit.protocol.messages import (
    MAX_LISTED_KEYS,
    BlocksListed,
    LoadModel,
    ScheduledChunk,
    SlotAssignment,
    StepPlan,
    StepResult,
    TransferReport,
    WorkerReady,
)
from servekit.protocol.sampling_params import SamplingParams
from workers.attention.interface import AttentionBackend, AttentionMetadata, PagedStep
from workers.attention.selector import choose_attention
from workers.batch import Batch, SamplingRow, SlotTable, lay_out, make_batch
from workers.device.memory import allocation_refused_as, cpu_memory, describe_memory, held_bytes, release_memory
from workers.device.transfer import DeviceEvent, to_device, to_host
from workers.device.triton_support import kernel_errors
from workers.kv_cache.disk_tier import DiskTier
from workers.kv_cache.kv_connector import KVConnector, OffloadingConnector, block_bytes
from workers.kv_cache.kv_quantization import FLOAT8_PAGES
from workers.kv_cache.memory_reserve import IDLE_S, MemoryReserve
from workers.kv_cache.pages import KVCache, LayerShape, bytes_per_block
from workers.kv_cache.transfer_connector import TransferConnector
from workers.layers.cpu_language_model import CpuLanguageModel, make_cpu_language_model
from workers.layers.layer_tap import LayerTap
from workers.loading.decoder_output import LastHiddenStates, computed_once, has_plain_head, tap_layers
from workers.loading.kv_scales import with_checkpoint_scales
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.lora.lora_step import NO_ADAPTER
from workers.parallel.ranks import Ranks
from workers.runner.cuda_graphs import CudaCapture, DecodeGraphs, Forward
from workers.runner.interface import OutOfMemory, Pending
from workers.runner.memory_profiling import (
    CPU_KV_CACHE_BYTES,
    Gpu,
    MemoryUse,
    explain,
    kv_cache_bytes,
    largest_step,
    measure_memory_use,
    num_blocks_in,
)
from workers.runner.mixed_graphs import MixedGraphs
from workers.runner.oom_retry import MIN_TOKENS, merge_results, raises_out_of_memory, split_plan
from workers.runner.step_graphs import Capture
from workers.sampling.logprobs import (
    PendingPromptLogprobs,
    PendingSampledLogprobs,
    prompt_logprobs,
    sampled_logprobs,
)
from workers.sampling.penalties import adjust
from workers.sampling.sampler import sample, warm_up
from workers.sampling.structured_output import GrammarBatch, GrammarMasks
from workers.sampling.token_bans import ban
from workers.speculation.choose import load_drafter
from workers.speculation.drafter import Drafter, LoadedDrafter, Target
from workers.speculation.speculator import Speculator

log = logging.getLogger("servekit.worker")

# Relative distance of logits. Half precision rounds every product; a wrong page or position gives values near 1.
ROUNDED_TOLERANCE = 0.15
ROUNDED_TOKENS = 24
SELF_CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: ROUNDED_TOLERANCE, torch.float16: ROUNDED_TOLERANCE}
Indices = NDArray[np.int64]
KV_CACHE_REMEDY = "lower --kv-cache-memory-bytes or --num-kv-blocks"


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The tokens that a step chose, while they are copied to the host, with their logprobs and errors."""

    token_ids: Tensor  # [num_sampled] int64
    logprobs: PendingSampledLogprobs | None  # None where no row asks
    failures: tuple[tuple[int, str], ...]  # (row, error) of grammars
    deferred: tuple[int, ...]  # rows whose token is not valid, because their grammar's mask was late

    @property
    def invalid_rows(self) -> set[int]:
        """The rows without a valid token."""
        return {*self.deferred, *(row for row, _ in self.failures)}


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """All outputs of a launched step for the manager, while they are copied to the host."""

    plan: StepPlan
    sampled: SampledTokens | None  # None where no chunk samples
    prompt_logprobs: PendingPromptLogprobs | None  # None where no chunk asks

    @property
    def invalid_rows(self) -> set[int]:
        """The rows without a valid token."""
        return set() if self.sampled is None else self.sampled.invalid_rows

    def read(self) -> StepResult:
        """Return the result, without its time, with a token for each sampled row.

        Call it once a DeviceEvent is complete that was recorded after this.
        """
        sampled, prompts = self.sampled, self.prompt_logprobs
        return StepResult(
            epoch=self.plan.epoch,
            step_id=self.plan.step_id,
            token_ids=() if sampled is None else tuple(sampled.token_ids.tolist()),
            step_time_s=0.0,
            logprobs=() if sampled is None or sampled.logprobs is None else sampled.logprobs.read(),
            prompt_logprobs=() if prompts is None else prompts.read(),
            failures=() if sampled is None else sampled.failures,
            deferred=() if sampled is None else sampled.deferred,
        )


@dataclass(frozen=True, slots=True)
class CompleteOutputs:
    """The outputs of a step that is complete, and its result made."""

    result: StepResult

    @property
    def invalid_rows(self) -> set[int]:
        """The rows without a valid token."""
        return {*self.result.deferred, *(row for row, _ in self.result.failures)}

    def read(self) -> StepResult:
        """Return the result, without its time, with a token for each sampled row."""
        return self.result


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of a step's chunks."""

    places: Indices | None  # [num_chunks] of the adapters in memory, or NO_ADAPTER; None if no chunk has one
    failures: dict[int, str]  # by slot: the reason why its adapter cannot be used


NO_ADAPTERS = Adapters(None, {})


class ModelRunner:
    """One model on one device. `launch` is the only way its pages change."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: LoadModel,
        drafter: LoadedDrafter | None = None,
        served_cache_bytes: int = 0,
    ) -> None:
        """Allocate the KV cache and the token table. Raises ConfigError if the device's memory does not hold them.

        `served_cache_bytes`: where this runner only measures memory, the size of the cache that will be served with, so
        that its tables are as large as then.
        """
        self.loaded, self._settings = loaded, settings
        self._group = None if loaded.ranks is None else loaded.ranks.group
        self._stage = None if loaded.ranks is None else loaded.ranks.stage
        if self._stage is not None:
            self._stage.discard_tokens()  # tokens of a runner that measured memory
        layers, device, block_size = _layer_shapes(loaded, settings), loaded.device, settings.block_size
        self.attention = choose_attention(
            device, loaded.dtype, layers, loaded.attention_params, block_size, settings.kv_cache_dtype
        )
        shapes, page_dtype = self.attention.block_shapes, self.attention.page_dtype
        # A drafter's keys and values are in blocks of the same numbers, so a block is as large as both.
        self._bytes_per_block = bytes_per_block(layers, shapes, block_size, page_dtype)
        if drafter is not None:
            self._bytes_per_block += drafter.bytes_per_block
        memory = settings.kv_cache_memory_bytes or CPU_KV_CACHE_BYTES
        num_blocks = settings.num_kv_blocks or num_blocks_in(memory, self._bytes_per_block)
        if loaded.ranks is not None:
            num_blocks = loaded.ranks.minimum(num_blocks)  # a plan names blocks that every rank has
        cache_bytes = num_blocks * self._bytes_per_block
        # On a CPU the operating system grants more memory than there is, and ends the process as it is used. A GPU's
        # allocation fails.
        if device.type == "cpu" and cache_bytes > cpu_memory():
            raise ConfigError(
                f"a KV cache of {num_blocks:,} blocks is {cache_bytes:,} bytes, and {describe_memory(device)}; "
                f"{KV_CACHE_REMEDY}"
            )
        with allocation_refused_as(f"a KV cache of {cache_bytes:,} bytes", device, KV_CACHE_REMEDY):
            self.cache = KVCache(layers, shapes, num_blocks, block_size, page_dtype, device)
        # No sequence is longer than the pool, whatever context the model claims.
        max_blocks = max(num_blocks, served_cache_bytes // self._bytes_per_block)
        max_length = min(loaded.info.max_model_len, max_blocks * block_size + 1)
        num_slots = settings.max_num_seqs
        with allocation_refused_as(
            f"a token table of {num_slots:,} sequences of {max_length:,} tokens",
            device,
            "lower --max-num-seqs or --max-model-len",
        ):
            self.table = SlotTable(num_slots, max_length, max_blocks, block_size, device)
        self._in_c = _language_model_in_c(loaded, self.attention, self.cache, self.table)
        self.connector: KVConnector | None = None
        self._transfers: TransferReport | None = None  # report of the newest step
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None  # graphs of steps with prompts
        self._lora_graphs: DecodeGraphs | None = None  # graphs of decodes with adapters
        self._launched_s, self._finished_s = 0.0, 0.0  # when the last step was launched, and was seen to be complete
        # transformers takes a mask of four dimensions as it is. Without one it would look at the positions.
        self._no_mask = torch.zeros(1, 1, 1, 1, device=device)
        tokenizer_file = Path(settings.model_path) / "tokenizer.json"
        info, max_drafts = loaded.info, settings.speculative.max_drafts
        self.grammars = GrammarMasks(tokenizer_file, info.vocab_size, info.eos_token_ids, num_slots, max_drafts)
        self._speculator: Speculator | None = None
        self._hidden_states: LastHiddenStates | LayerTap | None = None
        if drafter is not None:
            self.speculate(drafter.make_drafter(self.target))

    def speculate(self, drafter: Drafter) -> None:
        """Verify the drafts of this drafter from now on. No sequence has a slot yet."""
        info = self.loaded.info
        self._speculator = Speculator(
            drafter, self.grammars, self.table, info.vocab_size, info.eos_token_ids, self._group
        )
        wanted, decoder = drafter.hidden_states, self.loaded.decoder
        if wanted is not None and wanted.layers:
            num_layers = self.loaded.model.config.get_text_config().num_hidden_layers
            self._hidden_states = tap_layers(decoder, wanted.layers, num_layers)
        elif wanted is not None:
            self._hidden_states = LastHiddenStates(decoder)

    @property
    def drafter(self) -> Drafter | None:
        """The drafter; None without speculative decoding."""
        return None if self._speculator is None else self._speculator.drafter

    @property
    def target(self) -> Target:
        """The part of this runner that a drafter may read."""
        return Target(self.loaded, self._settings, self.attention, self.cache, self.table)

    @property
    def needs_hidden_states(self) -> bool:
        """Whether a drafter reads the hidden states of each step. A CUDA graph does not keep them."""
        return self._hidden_states is not None

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched before the one before it is complete."""
        return self.loaded.device.type == "cuda"

    def is_idle(self) -> bool:
        """Whether no step runs, and none has for a while. Any thread may ask."""
        return self._finished_s >= self._launched_s and time.monotonic() - self._finished_s > IDLE_S

    def execute(self, plan: StepPlan) -> StepResult:
        """Launch a step, and wait for it. Raises OutOfMemory."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Pending[StepResult]:
        """Compute the step's chunks, and choose a token for each chunk that samples.

        Where memory does not hold the step at once, it is computed in parts. Raises OutOfMemory if that does not help.
        Nothing in here waits for the device, with these exceptions: rows with a grammar wait for the step before this
        one, and for this one's forward pass if their masks are late; drafts wait for the steps before this one; parts
        wait for each other; so do reading an adapter, and transfers to and from the disk of a KV connector.
        """
        launched_s = self._launched_s = time.monotonic()
        resolved, batch = self._prepare(plan)
        outputs = self._execute_within_memory(resolved, batch)
        transfers = self._send(plan)  # not the resolved one, which has chunks only
        # Recorded for every step, also where no chunk samples: no step is reported before it is complete.
        end = DeviceEvent(self.loaded.device)

        def read() -> StepResult:
            end.wait()
            return outputs.read()

        speculator = self._speculator
        step = None if speculator is None else speculator.launched(resolved, read, outputs.invalid_rows)
        draft_s, prompt_s = (
            (0.0, 0.0) if speculator is None else (speculator.draft_time_s, speculator.draft_prompt_time_s)
        )
        num_reads, num_evictions = (0, 0) if self.loaded.lora is None else self.loaded.lora.take_counts()

        def finish() -> StepResult:
            end.wait()
            # A step that was launched ahead began when the step before it was complete, or when that was noticed.
            started_s, self._finished_s = max(launched_s, self._finished_s), time.monotonic()
            result = read() if speculator is None or step is None else speculator.settle(step)
            step_s = self._finished_s - started_s
            return replace(
                result,
                step_time_s=step_s,
                draft_time_s=draft_s,
                draft_prompt_time_s=prompt_s,
                num_adapter_reads=num_reads,
                num_adapter_evictions=num_evictions,
                transfers=transfers,
            )

        return Pending(end.is_complete, finish)

    def _prepare(self, plan: StepPlan) -> tuple[StepPlan, Batch | Adapters]:
        """Apply what the plan changes before anything is computed. Raises OutOfMemory.

        Returns the plan that is executed, which names the drafts with speculation, and its inputs. If C reads the step
        from the table, the inputs are its adapters only.
        """
        try:
            return self._apply(plan)
        except OutOfMemory as error:
            raise OutOfMemory(f"the inputs of a step of {plan.num_tokens} tokens do not fit: {error}") from None

    @raises_out_of_memory
    def _apply(self, plan: StepPlan) -> tuple[StepPlan, Batch | Adapters]:
        if self.connector is not None:
            if self.loaded.lora is not None and self.loaded.lora.has_failed:
                self.connector.stop_writing()
            self._transfers = self.connector.transfer(plan)
        if plan.copies:
            self.cache.copy_blocks(*to_device(list(np.array(plan.copies).T), self.loaded.device))
        if self._stage is not None and self._stage.is_first:
            self._stage.receive_tokens(self.table.token_ids)
        if self._speculator is None:
            self.table.update(plan)
        else:
            plan = self._speculator.resolve(plan)
        return plan, self._find_adapters(plan) if self._is_one_call(plan) else self._make_batch(plan)

    def _is_one_call(self, plan: StepPlan) -> bool:
        """Return whether C computes the step from the table's tokens to logits."""
        if self._in_c is None or self.needs_hidden_states or plan.num_tokens > self._in_c.max_tokens:
            return False
        return not self.table.has_prompt_logprobs(plan)

    @raises_out_of_memory
    def _send(self, plan: StepPlan) -> TransferReport | None:
        """Send the blocks that are computed now to other workers. Returns all transfers of the step.

        Raises OutOfMemory: blocks of a GPU are gathered there before they are copied.
        """
        if self.connector is None or self._transfers is None or not plan.sends:
            return self._transfers
        if self.loaded.lora is not None and self.loaded.lora.has_failed:  # perhaps in this step
            self.connector.stop_writing()
        return self.connector.send(plan, self._transfers)

    def _make_batch(self, plan: StepPlan) -> Batch:
        """Lay the step out flat, and bring the adapters that it needs into memory."""
        batch, adapters = lay_out(plan, self.table), self._find_adapters(plan)
        if adapters.places is not None:
            batch.adapter_places = adapters.places.repeat(batch.attention.num_queries)
        batch.adapter_failures = adapters.failures
        return batch

    def _find_adapters(self, plan: StepPlan) -> Adapters:
        """Bring the adapters that the step needs into memory, and return where they are."""
        pool, slots = self.loaded.lora, [chunk.slot for chunk in plan.chunks]
        if pool is None:
            return NO_ADAPTERS
        adapters = [self.table.slot_assignments[slot].adapter for slot in slots]
        needed = {adapter for adapter in adapters if adapter is not None}
        if not needed:
            return NO_ADAPTERS
        places: dict[LoraAdapter | None, int] = {None: NO_ADAPTER}
        failures: dict[LoraAdapter | None, str] = {}
        for adapter in sorted(needed, key=lambda adapter: adapter.number):  # ranks read them in the same order
            try:
                places[adapter] = pool.place_of(adapter, needed)
            except ConfigError as error:
                log.debug("adapter %s: %s", adapter.path, error.message)  # the pool has logged it once
                places[adapter], failures[adapter] = NO_ADAPTER, "the adapter cannot be read any more; load it again"
        of_slots = zip(slots, adapters, strict=True)
        return Adapters(
            np.array([places[adapter] for adapter in adapters]),
            {slot: failures[adapter] for slot, adapter in of_slots if adapter in failures},
        )

    @torch.inference_mode()
    def load_adapter(self, adapter: LoraAdapter) -> AdapterLoaded:
        """Read an adapter and check that it fits. What is wrong with it is the answer's refusal."""
        if self.loaded.lora is None:
            return AdapterLoaded("the server has no place for adapters; start it with --max-loras")
        try:
            fingerprint, rank = self.loaded.lora.load(adapter)
        except ConfigError as error:
            return AdapterLoaded(error.message)
        return AdapterLoaded("", fingerprint, rank)

    def list_blocks(self, start: int) -> BlocksListed:
        """List the blocks that the KV connector holds, from this number on."""
        keys = [] if self.connector is None else self.connector.keys()
        return BlocksListed(tuple(keys[start : start + MAX_LISTED_KEYS]))

    def _execute_within_memory(self, plan: StepPlan, inputs: Batch | Adapters) -> StepOutputs | CompleteOutputs:
        """Execute the step at once; if memory does not hold it, in parts of half as many tokens, and so on."""
        max_tokens = plan.num_tokens
        try:
            return self._execute(plan, inputs)
        except OutOfMemory as error:
            # The other ranks wait for this one, and cannot be interrupted: the server ends all of them.
            if self.loaded.ranks is not None:
                raise
            reason = str(error)
        while max_tokens > MIN_TOKENS:
            release_memory()
            next_tokens = max(MIN_TOKENS, max_tokens // 2)
            log.warning("out of memory with %d tokens at once; trying %d: %s", max_tokens, next_tokens, reason)
            max_tokens = next_tokens
            try:
                return self._execute_in_parts(plan, max_tokens)
            except OutOfMemory as error:
                reason = str(error)
        release_memory()
        raise OutOfMemory(
            f"a step of {plan.num_tokens} tokens does not fit into memory, not even {max_tokens} tokens at a time: "
            f"{reason}"
        )

    @raises_out_of_memory
    def _execute_in_parts(self, plan: StepPlan, max_tokens: int) -> CompleteOutputs:
        results = []
        for part in split_plan(plan, max_tokens):
            outputs = self._execute(part.plan, self._make_batch(part.plan))
            DeviceEvent(self.loaded.device).wait()  # so that memory holds one part's tensors at a time
            results.append((outputs.read(), part.chunk_indices))
        return CompleteOutputs(merge_results(results))

    @raises_out_of_memory
    def _execute(self, plan: StepPlan, inputs: Batch | Adapters) -> StepOutputs | CompleteOutputs:
        """Launch the forward pass and the choice of tokens, and what a drafter computes of the step's prompts."""
        outputs: StepOutputs | CompleteOutputs
        if isinstance(inputs, Batch):
            outputs = self._execute_batch(plan, inputs)
        else:
            outputs = self._execute_in_one_call(plan, inputs)
        if self._speculator is not None:
            self._speculator.compute_prompts()
        return outputs

    def _execute_batch(self, plan: StepPlan, batch: Batch) -> StepOutputs:
        """Execute a step that is laid out flat."""
        if self._stage is not None and not self._stage.is_last:
            self._forward(batch, batch.logits_indices)
            if self._stage.is_first:
                self._stage.expect_tokens(batch.sampled_cells)
            return StepOutputs(plan, None, None)
        grammars = self.grammars.begin(batch.sampling, self.table)
        raw_logits, of_prompts = self._compute(batch)
        sampled = None
        if batch.sampling:
            sampled = self._choose(raw_logits, batch.sampling, batch.sampled_cells, grammars, batch.adapter_failures)
        if self._hidden_states is not None and self.drafter is not None:
            self.drafter.observe(batch, self._taken_hidden_states(batch))
        return StepOutputs(plan, sampled, of_prompts)

    def _execute_in_one_call(self, plan: StepPlan, adapters: Adapters) -> StepOutputs | CompleteOutputs:
        """Execute a step of which `_is_one_call` is true: C computes it, and chooses tokens if all rows are greedy."""
        assert self._in_c is not None
        table, sampling = self.table, [chunk for chunk in plan.chunks if chunk.samples]
        spans = [
            (chunk.slot, chunk.start, chunk.start + chunk.num_tokens, 1 + chunk.num_drafts if chunk.samples else 0)
            for chunk in plan.chunks
        ]
        lora_step = None
        if adapters.places is not None and self.loaded.lora is not None:
            num_tokens = [chunk.num_tokens for chunk in plan.chunks]
            lora_step = self.loaded.lora.make_step(adapters.places.repeat(num_tokens))
        if not adapters.failures and all(table.takes_likeliest[chunk.slot] for chunk in sampling):
            with _named_in_profile("the model, one call into C"):
                token_ids = self._in_c.choose(spans, lora_step)
            return CompleteOutputs(StepResult(plan.epoch, plan.step_id, tuple(token_ids), step_time_s=0.0))
        rows = [table.sampling_row(chunk, behind) for chunk in sampling for behind in range(chunk.num_drafts, -1, -1)]
        grammars = self.grammars.begin(rows, table)
        cells = torch.tensor([row.slot * table.row_length + row.position for row in rows])
        with _named_in_profile("the model, one call into C"):
            logits = self._in_c.logits(spans, lora_step)
        return StepOutputs(plan, self._choose(logits, rows, cells, grammars, adapters.failures), None)

    def _choose(
        self,
        raw_logits: Tensor,
        rows: list[SamplingRow],
        cells: Tensor,
        grammars: GrammarBatch,
        adapter_failures: dict[int, str],
    ) -> SampledTokens:
        """Choose a token for each row of raw logits [num_sampled, vocab_size], and write it to the token table.

        It gets the cells [num_sampled]. `adapter_failures` has, by slot, the reason why its adapter cannot be used.

        All ranks of the last stage have the same logits and choose the same tokens. Only grammars need the first of
        them, because it depends on the time whether a mask is ready.
        """
        table, group = self.table, self._group
        is_constrained = group is not None and any(table.is_constrained(row) for row in rows)
        logits = adjust(raw_logits, rows, table)
        logits = ban(logits, rows, table)
        # Only logprobs need the raw logits again.
        in_place = logits is not raw_logits or all(row.sampling.logprobs is None for row in rows)
        constrained = self.grammars.constrain(logits, rows, grammars, in_place)
        token_ids = sample(constrained.logits, rows)
        if group is not None and is_constrained:
            token_ids = group.broadcast(token_ids)
        if not token_ids.is_cuda:
            self.grammars.ask_ahead(grammars, rows, token_ids)
        table.token_ids.index_copy_(0, cells, token_ids.int())
        if self._stage is not None:
            self._stage.return_tokens(token_ids)
        logprobs = sampled_logprobs(raw_logits, token_ids, rows)
        failures, deferred = constrained.failures, constrained.deferred
        if adapter_failures:
            of_adapters = {i: adapter_failures.get(row.slot) for i, row in enumerate(rows)}
            merged = {**dict(failures), **{i: failure for i, failure in of_adapters.items() if failure is not None}}
            failures = tuple(sorted(merged.items()))
            deferred = tuple(i for i in deferred if i not in merged)
        return SampledTokens(to_host(token_ids), logprobs, failures, deferred)

    def _taken_hidden_states(self, batch: Batch) -> Tensor:
        """Return the hidden states of the newest forward pass that the drafter reads."""
        wanted = None if self.drafter is None else self.drafter.hidden_states
        assert self._hidden_states is not None and wanted is not None
        states = self._hidden_states.take()
        return states if wanted.of_all_tokens else states[batch.logits_indices]

    def _compute(self, batch: Batch) -> tuple[Tensor, PendingPromptLogprobs | None]:
        """Return logits [num_sampled, vocab_size] in float32, and the logprobs of prompts that are asked for."""
        logits = self._replay(batch)
        if logits is not None:
            return logits, None
        if not batch.prompt_logprobs:
            return self._forward(batch, batch.logits_indices), None
        vocab_size = self.loaded.info.vocab_size
        with computed_once(self.loaded.decoder):
            logits = self._forward(batch, batch.logits_indices)
            of_prompts = prompt_logprobs(
                batch.prompt_logprobs, self.table, lambda indices: self._forward(batch, indices), vocab_size
            )
        return logits, of_prompts

    def _replay(self, batch: Batch) -> Tensor | None:
        """Return the logits of a step that a graph computes, as StepGraphs.run does; None for any other step."""
        places = batch.adapter_places
        if places is None:
            logits = None if self._graphs is None else self._graphs.run(batch)
            return self._mixed_graphs.run(batch) if logits is None and self._mixed_graphs is not None else logits
        if self._lora_graphs is None or len(places) > len(batch.attention.num_keys):
            return None
        if len(places) <= len(self._graph_places):
            self._graph_places.fill_(NO_ADAPTER)
            (on_device,) = to_device([places], self.loaded.device)
            self._graph_places[: len(places)].copy_(on_device)
        return self._lora_graphs.run(batch)

    def _forward(self, batch: Batch, token_indices: Tensor) -> Tensor:
        """Return logits [num_indices, vocab_size] in float32 for those indices of the step's flat tokens."""
        # The next stage needs the hidden states of all tokens, as some drafters do.
        is_last_stage = self._stage is None or self._stage.is_last
        observed = None if self._speculator is None else self._speculator.drafter.hidden_states
        is_observed = observed is not None and observed.of_all_tokens and not observed.layers
        wanted = None if batch.prompt_logprobs or is_observed or not is_last_stage else token_indices
        paged = PagedStep(self.attention, self.cache, batch.attention, wanted)
        with contextlib.ExitStack() as stack:
            if self.loaded.lora is not None:
                stack.enter_context(self.loaded.lora.serving(batch.adapter_places))
            return self._logits(batch.input_ids[None], batch.position_ids[None], paged, token_indices).float()

    def _forward_decodes(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionMetadata) -> Tensor:
        """Return logits [num_tokens, vocab_size], in the model's own dtype, of a step of chunks of one token each."""
        return self._logits(input_ids, position_ids, PagedStep(self.attention, self.cache, attention), 0)

    def _forward_mixed(
        self, input_ids: Tensor, position_ids: Tensor, attention: AttentionMetadata, indices: Tensor
    ) -> Tensor:
        """Return logits [num_indices, vocab_size], in the model's own dtype, of a step of any chunks."""
        return self._logits(input_ids, position_ids, PagedStep(self.attention, self.cache, attention, indices), indices)

    def _forward_adapted_decodes(self, input_ids: Tensor, position_ids: Tensor, attention: AttentionMetadata) -> Tensor:
        """Like `_forward_decodes`, with the adapters in the places that `_graph_places` holds."""
        pool = self.loaded.lora
        assert pool is not None
        with pool.masked(pool.mask(self._graph_places[: input_ids.numel()])):
            return self._forward_decodes(input_ids, position_ids, attention)

    def _logits(self, input_ids: Tensor, position_ids: Tensor, paged: PagedStep, keep: Tensor | int) -> Tensor:
        """Call the model. `keep` selects tokens as transformers' `logits_to_keep` does: indices, or 0 for all."""
        output: Any = self.loaded.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=self._no_mask,
            use_cache=False,
            logits_to_keep=keep,
            paged=paged,
        )
        logits: Tensor = output.logits[0]
        if isinstance(keep, Tensor) and len(logits) != len(keep):  # some models do not know `logits_to_keep`
            return logits[keep]
        return logits

    @torch.inference_mode()
    def capture_decodes(self, capture: Capture) -> None:
        """Let decode steps be replays of graphs from now on. Raises what capturing the largest graph raises."""
        self._graphs = self._captured_decodes(self._forward_decodes, capture)

    @torch.inference_mode()
    def capture_decodes_with_adapters(self, capture: Capture) -> None:
        """Let decode steps with LoRA adapters be replays of a second set of graphs: others do not pay for adapters.

        Raises what capturing the largest graph raises.
        """
        self._graph_places = torch.full((len(self.table.num_blocks),), NO_ADAPTER, device=self.loaded.device)
        self._lora_graphs = self._captured_decodes(self._forward_adapted_decodes, capture)

    def _captured_decodes(self, forward: Forward, capture: Capture) -> DecodeGraphs:
        max_rows, width = len(self.table.num_blocks), self.table.block_tables.shape[1]
        sizes = (max_rows, width, self.cache.block_size, self.loaded.info.vocab_size)
        graphs = DecodeGraphs(forward, *sizes, self.loaded.device, capture)
        graphs.capture_all()
        return graphs

    @torch.inference_mode()
    def capture_mixed_steps(self, capture: Capture) -> None:
        """Let small steps with prompts be replays of graphs, too. Call it after `capture_decodes`.

        Raises what capturing the largest graph raises.
        """
        assert self._graphs is not None
        width, max_tokens = self.table.block_tables.shape[1], self._settings.max_num_batched_tokens
        logits = self._graphs.logits  # of one step at a time
        graphs = MixedGraphs(self._forward_mixed, max_tokens, width, self.cache.block_size, logits, capture)
        graphs.capture_all()
        self._mixed_graphs = graphs

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all layers, those of a drafter included."""
        return -(-self._bytes_per_block // self.cache.block_size)

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values, those of a drafter included."""
        return self.cache.num_blocks * self._bytes_per_block

    # -- the self-check: pages give what the model gives --------------------------------------------------------------

    @torch.inference_mode()
    def self_check(self) -> float:
        """Compare logits over KV pages with those of transformers for the same tokens; return the relative distance.

        Raises ConfigError when they differ: refusing a model is better than serving wrong answers. CUDA graphs that
        give other logits are left out.
        """
        info, sample = self.loaded.info, self.loaded.sample
        is_exact, tolerance = self._has_exact_pages, self._logits_tolerance
        # Errors of keys and values that are rounded to a byte add up with the number of tokens.
        max_tokens = len(sample.token_ids) if is_exact else ROUNDED_TOKENS
        num_tokens = min(len(sample.token_ids), max_tokens, self.cache.num_blocks * self.cache.block_size)
        plain = sample.logits[num_tokens - 1]
        paged = self._run_in_chunks(sample.token_ids[:num_tokens])
        if (
            self.loaded.device.type == "cuda"
        ):  # all at once: from 65 rows on, quantized weights are multiplied otherwise
            paged = torch.cat([paged, self._run_in_chunks(sample.token_ids[:num_tokens], [num_tokens])])
        distance = float((paged - plain).norm(dim=-1).max() / plain.norm())
        if not distance <= tolerance:  # NaN fails, too
            exact = "--kv-cache-dtype auto keeps its keys and values exact"
            remedy = "choose one of docs/architectures.md" if is_exact else exact
            raise ConfigError(
                f"architecture {info.architecture} cannot be served: over KV pages its logits differ from "
                f"transformers' own by {distance:.2g} (relative), and {tolerance:.2g} is allowed; {remedy}"
            )
        if self._graphs is not None:
            self._check_graphs_of_several(sample.token_ids[:num_tokens])
        return distance

    @property
    def _has_exact_pages(self) -> bool:
        """Whether pages hold keys and values as the model computes them."""
        return self.attention.page_dtype is self.loaded.dtype

    @property
    def _logits_tolerance(self) -> float:
        """How far logits of the same tokens may be apart (relative), where they are computed in other ways."""
        # Where sums are rounded differently, what is rounded to eight bits may become the next of their numbers.
        is_near = self._has_exact_pages and not self.loaded.rounds_activations
        return SELF_CHECK_TOLERANCE[self.loaded.dtype] if is_near else ROUNDED_TOLERANCE

    def _self_check_ends(self, num_tokens: int) -> list[int]:
        """Return where the chunks of the self-check end."""
        # The last chunks have 5, 3 and 1 tokens, because C computes steps of more and of fewer rows differently.
        possible_ends = {num_tokens // 2, num_tokens - 9, num_tokens - 4, num_tokens - 1, num_tokens}
        return sorted(end for end in possible_ends if end > 0)

    def _run_in_chunks(self, token_ids: tuple[int, ...], ends: list[int] | None = None) -> Tensor:
        """Return the last logits of a sequence computed in chunks, and again from the head alone: [2, vocab_size].

        Where one call of C computes such chunks, its logits are a third row.
        `ends`: where the chunks end; None for those of the self-check.
        """
        blocks, ends = self._self_check_blocks(len(token_ids)), ends or self._self_check_ends(len(token_ids))
        assignment = SlotAssignment(slot=0, sampling=SamplingParams(max_tokens=1, temperature=0.0))
        for start, stop in zip([0, *ends], ends, strict=False):
            new_blocks = () if start else blocks
            chunk = ScheduledChunk(0, start, stop - start, token_ids[start:stop], new_blocks, samples=True)
            plan = StepPlan(0, 0, (assignment,) if start == 0 else (), (chunk,))
            batch = make_batch(plan, self.table)
            with computed_once(self.loaded.decoder):
                logits = self._forward(batch, batch.logits_indices)
                from_head = self._forward(batch, batch.logits_indices)
            self._check_graphs(batch, logits)
            found = [logits, from_head]
            if self._in_c is not None and stop - start <= self._in_c.max_tokens:
                found.append(self._in_c.logits([(0, start, stop, 1)]))
        return torch.cat(found)

    def _self_check_blocks(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of the self-check's sequence."""
        return tuple(reversed(range(-(-num_tokens // self.cache.block_size))))

    def _check_graphs_of_several(self, token_ids: tuple[int, ...]) -> None:
        """Compare graphs of three sequences, all of which read the pages of the one that has just been computed.

        They store nothing: the cells hold these tokens' keys and values, and the other sequences read them.
        """
        sampling, num_tokens = SamplingParams(max_tokens=1, temperature=0.0), len(token_ids)
        slots = range(min(3, len(self.table.num_blocks), num_tokens - 1))
        if not slots:
            return
        blocks = self._self_check_blocks(num_tokens)
        for num_first in (1, 2):  # decodes; then a step with a prompt
            chunks = []
            for slot in slots:
                stop, count = num_tokens - slot, 1 if slot else num_first
                some = token_ids[stop - count : stop]
                chunks.append(ScheduledChunk(slot, stop - count, count, some, blocks, samples=True))
            assignments = tuple(SlotAssignment(slot=slot, sampling=sampling) for slot in slots)
            batch = make_batch(StepPlan(0, 0, assignments, tuple(chunks)), self.table)
            batch.attention.slot_mapping.fill_(-1)
            self._check_graphs(batch, self._forward(batch, batch.logits_indices))

    def _check_graphs(self, batch: Batch, logits: Tensor) -> None:
        """Compare all graphs that can hold a step with its logits, which were computed without them."""
        if self._lora_graphs is not None:
            self._graph_places.fill_(NO_ADAPTER)
        for graphs in (self._graphs, self._lora_graphs, self._mixed_graphs):
            if graphs is not None:
                graphs.check(batch, logits, self._logits_tolerance)


def _language_model_in_c(
    loaded: LoadedModel, attention: AttentionBackend, cache: KVCache, table: SlotTable
) -> CpuLanguageModel | None:
    """Return what computes a step of few tokens in one call; None if C cannot compute all of this model."""
    head = loaded.model.get_output_embeddings()
    if loaded.ranks is not None or head is None:
        return None
    in_c = make_cpu_language_model(loaded.decoder, head, attention, cache, table, loaded.info.vocab_size)
    return in_c if in_c is not None and has_plain_head(loaded.model, loaded.decoder, head) else None


def _layer_shapes(loaded: LoadedModel, settings: LoadModel) -> list[LayerShape]:
    """Return what the layers store, with the checkpoint's own scales where the KV cache has codes of float8."""
    if settings.kv_cache_dtype != FLOAT8_PAGES.name or settings.load_format == "dummy":
        return loaded.layers
    stage = None if loaded.ranks is None else loaded.ranks.stage
    num_layers = loaded.model.config.get_text_config().num_hidden_layers
    first_layer = 0 if stage is None else stage.layers_of(num_layers).start
    return with_checkpoint_scales(loaded.layers, Path(settings.model_path), first_layer)


def make_runner(loaded: LoadedModel, settings: LoadModel, drafter: LoadedDrafter | None = None) -> ModelRunner:
    """Return a runner with as many KV blocks as the settings ask for, or as fit; on a GPU, with decode steps as graphs.

    Raises ConfigError if the device's memory is too small.
    """
    if loaded.device.type != "cuda":
        return ModelRunner(loaded, settings, drafter)
    warm_up(loaded.info.vocab_size, loaded.device)
    if not settings.num_kv_blocks and not settings.kv_cache_memory_bytes:
        use, utilization = _measure_memory_use(loaded, settings, drafter), settings.gpu_memory_utilization
        log.info("%s", explain(use, utilization))
        settings = replace(settings, kv_cache_memory_bytes=max(1, kv_cache_bytes(use, utilization)))
    runner = ModelRunner(loaded, settings, drafter)
    _capture(runner)
    return runner


def _make_connector(runner: ModelRunner, settings: LoadModel) -> KVConnector:
    """Return a connector that offloads blocks. Raises ConfigError if its memory or its folder cannot be used."""
    bytes_per_block, loaded = block_bytes(runner.cache), runner.loaded
    memory = settings.kv_offload_memory_bytes // settings.num_ranks
    num_blocks = memory // bytes_per_block
    flag, on_cpu = f"--kv-offload-memory-bytes {settings.kv_offload_memory_bytes:,}", torch.device("cpu")
    if not num_blocks:
        of_rank = f", of which each of {settings.num_ranks} ranks has a part," if settings.num_ranks > 1 else ""
        raise ConfigError(f"{flag}{of_rank} holds no KV block: one has {bytes_per_block:,} bytes")
    if loaded.ranks is not None:
        num_blocks = loaded.ranks.minimum(num_blocks)  # a block is of use only while all ranks have it
    used = memory + (runner.cache_bytes if loaded.device.type == "cpu" else 0)
    if used > cpu_memory():
        raise ConfigError(f"{flag} is too much in addition to the KV cache: {describe_memory(on_cpu)}; lower it")
    disk = None
    if settings.kv_offload_dir:
        try:
            folder = Path(settings.kv_offload_dir).expanduser()
        except RuntimeError as error:
            raise ConfigError(f"--kv-offload-dir {settings.kv_offload_dir} cannot be used: {error}") from None
        max_bytes = settings.kv_offload_disk_bytes // settings.num_ranks
        disk = DiskTier(folder, _kv_layout(runner, settings), max_bytes, bytes_per_block)
    with allocation_refused_as(f"{memory:,} bytes for offloaded KV blocks", on_cpu, "lower --kv-offload-memory-bytes"):
        return OffloadingConnector(runner.cache, num_blocks, disk)


def _kv_layout(runner: ModelRunner, settings: LoadModel) -> str:
    """Return all that blocks depend on, as a text. A device or a kernel that rounds otherwise gives others."""
    loaded = runner.loaded
    parts: tuple[object, ...] = (
        *(settings.fingerprint, loaded.info.quantization, settings.quantization_group_size, loaded.dtype),
        *(settings.load_format, loaded.device.type, runner.attention.name, settings.kv_cache_dtype),
        *(settings.block_size, loaded.info.max_model_len, [tuple(each.shape[1:]) for each in runner.cache.keys]),
    )
    if settings.num_ranks > 1:  # blocks of the same shape have other contents in another rank
        parts += ((settings.rank, settings.tensor_parallel_size, settings.pipeline_parallel_size),)
    return "\0".join(map(str, parts))


def _make_transfer_connector(runner: ModelRunner, settings: LoadModel, layout: str) -> TransferConnector:
    """Return a connector between prefill and decode workers. Raises ConfigError if their memory is too small."""
    # The agent of a worker that joined fills its inbox, once this process has laid that out.
    written = (settings.kv_transfer_own, settings.kv_transfer_inbox)
    rings = [
        BlockRing(fd, block_bytes(runner.cache), bytes.fromhex(layout), is_writer=number in written)
        for number, fd in enumerate(settings.own_transfer_fds)
    ]
    own = None if settings.kv_transfer_own is None else rings[settings.kv_transfer_own]
    if own is not None and settings.is_result_rank:
        max_tokens = own.max_readable * settings.block_size
        if max_tokens < runner.loaded.info.max_model_len:
            log.warning(
                "the memory for handed-over KV blocks holds %d tokens: sequences that are longer stay on this prefill "
                "replica; raise --kv-transfer-memory-bytes, or set --max-model-len",
                max_tokens,
            )
    if own is not None and settings.kv_transfer_inbox is None:
        rings = [own]
    return TransferConnector(runner.cache, rings, own)


def _capture(runner: ModelRunner) -> None:
    """Let the runner's decode steps be graphs, if its attention and its model's layers allow that."""
    if runner.loaded.ranks is not None:
        # If one rank captured a graph and another one could not, they would exchange tensors of different shapes.
        log.warning("decode steps are launched one kernel at a time: ranks do not capture CUDA graphs")
        return
    if not runner.attention.supports_cuda_graphs:
        log.warning(
            "decode steps are launched one kernel at a time: %s attention cannot be captured as a CUDA graph",
            runner.attention.name,
        )
        return
    if runner.needs_hidden_states:
        log.warning(
            "decode steps are launched one kernel at a time: the drafter reads hidden states, which graphs drop"
        )
        return
    capture = CudaCapture()
    if not _try_capture("decode steps", runner.capture_decodes, capture):
        return
    if runner.loaded.lora is not None:
        _try_capture("decode steps with adapters", runner.capture_decodes_with_adapters, capture)
    _try_capture("steps with prompts", runner.capture_mixed_steps, capture)


def _try_capture(steps: str, capture_steps: Callable[[Capture], None], capture: Capture) -> bool:
    """Capture the graphs of these steps; return whether that succeeded. The log says where it did not."""
    try:
        capture_steps(capture)
    except kernel_errors() as error:  # a model's own layers may contain operations that no graph can capture
        log.warning("%s are launched one kernel at a time: capturing a CUDA graph failed: %s", steps, error)
        return False
    return True


def _measure_memory_use(loaded: LoadedModel, settings: LoadModel, drafter: LoadedDrafter | None = None) -> MemoryUse:
    """Measure what serving takes besides the cache, with a cache that is just large enough for the largest step."""
    gpu = Gpu(loaded.device)
    plan, num_blocks = largest_step(settings, loaded.info.max_model_len)

    def prepare() -> tuple[Callable[[], object], int]:
        settings_of_step = replace(settings, num_kv_blocks=num_blocks)
        runner = ModelRunner(loaded, settings_of_step, drafter, served_cache_bytes=gpu.free())
        _capture(runner)
        return (lambda: runner.execute(plan)), runner.cache_bytes

    use = measure_memory_use(gpu, gpu.total, prepare)
    release_memory()
    return use


def _device_of_rank(settings: LoadModel) -> str:
    """Return the device of this rank: on GPUs, each rank of each replica on a machine has one of its own."""
    devices = settings.device.split(",")
    rank = settings.rank if settings.local_rank is None else settings.local_rank
    if len(devices) > 1:
        return devices[rank]
    name, _, number = settings.device.partition(":")
    is_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    if not is_gpu or (settings.num_ranks == 1 and settings.device_index is None):
        return settings.device
    return f"cuda:{int(number or settings.device_index or 0) + rank}"


def _add_connector(runner: ModelRunner, settings: LoadModel, ranks: Ranks | None) -> tuple[str, int]:
    """Let the runner offload or hand over KV blocks, if it is to.

    Returns for hand-overs the layout of its blocks, and how many another worker can read; otherwise "" and 0.
    """
    if settings.kv_offload_memory_bytes:
        runner.connector = _make_connector(runner, settings)
    if not settings.kv_transfer_fds:
        return "", 0
    layout = blake2b(_kv_layout(runner, settings).encode(), digest_size=LAYOUT_BYTES).hexdigest()
    runner.connector = connector = _make_transfer_connector(runner, settings, layout)
    num_blocks = connector.num_transfer_blocks
    return layout, num_blocks if ranks is None else ranks.minimum(num_blocks)


def _named_in_profile(name: str) -> contextlib.AbstractContextManager[object]:
    """Give what is done within a name in a profile: torch does not see what C computes."""
    # To give it a name takes some microseconds, also where no profile is recorded.
    return record_function(name) if _profiler_enabled() else contextlib.nullcontext()


def _log_loaded(ready: WorkerReady, distance: float) -> None:
    """Log what was loaded, and how long it took. `distance` is that of the self-check."""
    log.info(
        "loaded %.1f M parameters (%s, %.1f MB) in %.1f s, %.1f of them for the weights (%.2f GB/s); attention: %s; "
        "paged logits agree with transformers' within %.1g",
        ready.model.num_parameters / 1e6,
        ready.model.quantization or ready.dtype,
        ready.num_weight_bytes / 1e6,
        ready.load_time_s,
        ready.weights_time_s,
        ready.num_weight_bytes / ready.weights_time_s / 1e9,
        ready.attention,
        distance,
    )


def load(settings: LoadModel, report_stage: Callable[[str], None]) -> tuple[ModelRunner, WorkerReady]:
    """Load a model, check it against transformers, and return its runner and what the manager needs to know of it.

    `report_stage` is called with the name of each stage. Raises ConfigError.
    """
    started_s = time.monotonic()
    manager = ModelManager(_device_of_rank(settings))
    ranks = None
    if settings.num_ranks > 1:
        report_stage("connecting the ranks")
        ranks = Ranks(
            settings.rank,
            settings.tensor_parallel_size,
            settings.pipeline_parallel_size,
            settings.rendezvous,
            manager.device,
            settings.load_timeout_s,
        )
    loaded = manager.load(
        Path(settings.model_path),
        settings.dtype,
        settings.max_model_len,
        load_format=settings.load_format,
        quantization=settings.quantization,
        quantization_group_size=settings.quantization_group_size,
        report_stage=report_stage,
        ranks=ranks,
        max_loras=settings.max_loras,
        max_lora_rank=settings.max_lora_rank,
    )
    drafter = load_drafter(loaded, settings, report_stage)
    report_stage("allocating the KV cache")
    runner = make_runner(loaded, settings, drafter)
    report_stage("comparing paged with plain attention")
    distance = runner.self_check()
    kv_layout, num_transfer_blocks = _add_connector(runner, settings, ranks)
    if settings.is_result_rank:
        runner.grammars.warm_up()
    ready = WorkerReady(
        model=loaded.info,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        num_blocks=runner.cache.num_blocks,
        kv_bytes_per_token=runner.kv_bytes_per_token,
        load_time_s=time.monotonic() - started_s,
        num_weight_bytes=loaded.weights.num_bytes,
        weights_time_s=loaded.weights.time_s,
        attention=runner.attention.name,
        memory_bytes=held_bytes(
            loaded.device,
            loaded.weights.num_bytes,
            runner.cache.num_blocks * settings.block_size * runner.kv_bytes_per_token,
        ),
        kv_layout=kv_layout,
        num_transfer_blocks=num_transfer_blocks,
    )
    if loaded.device.type == "cpu":
        MemoryReserve(runner.cache, lambda: runner.table.num_used_blocks).start(runner.is_idle)
    _log_loaded(ready, distance)
    return runner, ready
