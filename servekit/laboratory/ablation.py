"""Define experiments that vary one setting: KV cache, chunks, block size, prefix cache, memory, batch size."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from servekit.laboratory.batching import MODES, BatchingMode
from servekit.laboratory.summary import Summary
from servekit.laboratory.virtual_run import LabSettings
from servekit.laboratory.workload import LabRequest, Workload

KV_CACHE_PROMPT_TOKENS = 32
KV_CACHE_LENGTHS = (1, 25, 50, 100, 200)  # tokens of the answer
MIN_GAIN = 1.25  # of twice as many slots, up to the knee


class Case(Struct, frozen=True):
    """One run of an experiment."""

    label: str
    mode: BatchingMode
    settings: LabSettings
    workload: Workload


class Ablation(Struct, frozen=True):
    """An experiment: what it changes, how its runs are made, and which figures show the effect."""

    name: str
    explanation: str
    cases: Callable[[Workload, LabSettings], list[Case]]
    figures: tuple[str, ...]  # fields of Summary
    is_in_pairs: bool = False  # then the last two runs show the effect; otherwise the first and the last one do


def _kv_cache(_: Workload, settings: LabSettings) -> list[Case]:
    """Without a KV cache each token computes the whole text again: an answer is as many requests for one token."""
    cases = []
    mode, settings = MODES["one-by-one"], replace(settings, has_prefix_cache=False, num_slots=1)
    for num_tokens in KV_CACHE_LENGTHS:
        if KV_CACHE_PROMPT_TOKENS + num_tokens > settings.max_model_len:
            break
        text = tuple(range(KV_CACHE_PROMPT_TOKENS + num_tokens))
        once = LabRequest(0.0, text[:KV_CACHE_PROMPT_TOKENS], num_tokens)
        again = [LabRequest(0.0, text[: KV_CACHE_PROMPT_TOKENS + number], 1) for number in range(num_tokens)]
        length = f"{num_tokens} token{'s' if num_tokens > 1 else ''}"
        for label, requests in (("with", (once,)), ("without", tuple(again))):
            cases.append(Case(f"{length}, {label}", mode, settings, Workload("one prompt", requests)))
    return cases


def _chunks(workload: Workload, settings: LabSettings) -> list[Case]:
    cases = [
        Case(f"{size} tokens a step", MODES["chunked"], replace(settings, chunk_tokens=size), workload)
        for size in (16, 32, 64, 128, 256, 512)
        if size >= settings.num_slots
    ]
    return [*cases, Case("no chunks", MODES["continuous"], settings, workload)]


def _block_size(workload: Workload, settings: LabSettings) -> list[Case]:
    return [
        Case(f"blocks of {size}", MODES["chunked"], replace(settings, block_size=size), workload)
        for size in (1, 4, 8, 16, 32, 64, 128)
        if settings.num_kv_tokens // size * size >= workload.max_length
    ]


def _prefix_cache(workload: Workload, settings: LabSettings) -> list[Case]:
    return [
        Case(label, MODES["chunked"], replace(settings, has_prefix_cache=is_on), workload)
        for label, is_on in (("off: every prompt is cold", False), ("on: warm after the first", True))
    ]


def _memory(workload: Workload, settings: LabSettings) -> list[Case]:
    return [
        Case(label, MODES["chunked"], replace(settings, is_paged=is_paged), workload)
        for label, is_paged in (("contiguous", False), ("paged", True))
    ]


def _batch_size(workload: Workload, settings: LabSettings) -> list[Case]:
    """All requests come at once, so that every slot is always taken while requests wait."""
    at_once = Workload(
        workload.name, tuple(LabRequest(0.0, each.prompt, each.num_output_tokens) for each in workload.requests)
    )
    return [
        Case(
            f"{size} slot{'s' if size > 1 else ''}",
            MODES["continuous"],
            replace(settings, num_slots=size, num_kv_tokens=max(settings.num_kv_tokens, size * settings.max_model_len)),
            at_once,
        )
        for size in (1, 2, 4, 8, 16, 32)
    ]


_LATENCIES = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")
ABLATIONS = {
    each.name: each
    for each in (
        Ablation(
            "kv-cache",
            f"an answer to {KV_CACHE_PROMPT_TOKENS} tokens, with a KV cache and without one",
            _kv_cache,
            ("last_token_s", "duration_s"),
            is_in_pairs=True,
        ),
        Ablation("chunks", "the most tokens of a step", _chunks, ("tokens_per_s", *_LATENCIES)),
        Ablation(
            "block-size",
            "the tokens of a KV block",
            _block_size,
            ("tokens_per_s", "unused_memory_share", "cached_prompt_share"),
        ),
        Ablation(
            "prefix-cache", "the prefix cache", _prefix_cache, ("cached_prompt_share", "tokens_per_s", *_LATENCIES)
        ),
        Ablation(
            "memory",
            "KV memory in pages, or in one piece for the longest possible sequence",
            _memory,
            ("tokens_per_s", "unused_memory_share", "ttft_p50_s", "ttft_p99_s"),
        ),
        Ablation(
            "batch-size",
            "the number of slots",
            _batch_size,
            ("tokens_per_s_while_waiting", "itl_p50_s", "idle_slot_share"),
        ),
    )
}


def knee(summaries: list[Summary]) -> int:
    """The index of the run up to which twice as many slots gave at least a quarter more tokens per second."""
    rates = [summary.tokens_per_s_while_waiting for summary in summaries]
    num_known = next((index for index, rate in enumerate(rates) if not rate), len(rates))  # up to where requests waited
    for index in range(1, num_known):
        if rates[index] < MIN_GAIN * rates[index - 1]:
            return index - 1
    return max(0, num_known - 1)
