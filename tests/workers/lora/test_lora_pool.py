"""Sequences with different adapters share steps, and each answers as its merged model would alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from servekit.errors import ConfigError
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import StepPlan, StepResult
from tests.support.drafters import RandomDrafter
from tests.support.inprocess import InProcessEngine, load
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, WIDE_ARCHITECTURES, make_model
from tests.workers.test_token_identity import LENGTHS, generate, make_prompts
from workers.csrc.bindings import LORA_RUN_ROWS
from workers.kv_cache.kv_connector import OffloadingConnector
from workers.kv_cache.pages import KVCache
from workers.loading.model_manager import LoadedModel
from workers.speculation.drafter import Drafter
from workers.speculation.ngram import NgramDrafter

NUM_ADAPTERS = 8
NUM_PLACES = 4  # fewer than adapters: some are read again
# Of each adapter: different ranks, scales and layers.
CONFIGS = [
    {},
    {"r": 4, "lora_alpha": 8},
    {"r": 16, "use_rslora": True, "lora_alpha": 16},
    {"target_modules": ["q_proj", "v_proj"]},
    {"target_modules": ["down_proj"], "r": 3},
    {"rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.1.self_attn.o_proj": 3}},
    {"layers_to_transform": [1]},
    {"r": 1, "lora_alpha": 2},
]


@cache
def adapters_of(name: str) -> tuple[Path, tuple[LoraAdapter, ...], tuple[PreTrainedModel, ...]]:
    """Return the directory of a model, its adapters, and the model followed by those with an adapter merged."""
    directory = Path(mkdtemp(prefix="lora-"))
    model = make_model(directory / "model", *{**ARCHITECTURES, **WIDE_ARCHITECTURES}[name])
    merged = [make_adapter(directory / str(i), model, i, **config) for i, config in enumerate(CONFIGS)]
    adapters = tuple(LoraAdapter(number, str(directory / str(number))) for number in range(NUM_ADAPTERS))
    return directory / "model", adapters, (model, *merged)


def loaded_with(name: str, num_places: int = NUM_PLACES) -> tuple[LoadedModel, list[LoraAdapter | None]]:
    """Return a model with room for adapters, and None for no adapter, followed by the checked adapters."""
    directory, adapters, _ = adapters_of(name)
    loaded = load(directory, max_loras=num_places, max_lora_rank=16)
    assert loaded.lora is not None
    checked = [LoraAdapter(each.number, each.path, loaded.lora.load(each)[0]) for each in adapters]
    return loaded, [None, *checked]


@cache
def answer(name: str, model: int, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    return generate(adapters_of(name)[2][model], list(prompt), max_tokens, ignore_eos=True)


@pytest.mark.parametrize(("name", "chunk", "in_flight"), [("llama", 64, 1), ("llama", 7, 2), ("llama_wide", 64, 2)])
def test_a_batch_of_eight_adapters_answers_as_merged_models_do(name: str, chunk: int, in_flight: int) -> None:
    loaded, adapters = loaded_with(name, NUM_ADAPTERS)
    engine = InProcessEngine(
        loaded, num_blocks=20, block_size=4, max_num_batched_tokens=chunk, max_steps_in_flight=in_flight, max_num_seqs=9
    )
    prompts, max_tokens = make_prompts(VOCAB_SIZE), 12
    sequences = [
        engine.add(prompts[i], adapter=adapter, max_tokens=max_tokens, ignore_eos=True)
        for i, adapter in enumerate(adapters)
    ]
    engine.run()
    expected = [answer(name, i, tuple(prompts[i]), max_tokens) for i in range(len(adapters))]
    assert [sequence.output_token_ids for sequence in sequences] == expected
    assert engine.manager.num_preemptions > 0, "the pool was meant to be too small"
    unadapted = [answer(name, 0, tuple(prompts[i]), max_tokens) for i in range(len(adapters))]
    assert sum(a != b for a, b in zip(expected, unadapted, strict=True)) >= NUM_ADAPTERS - 1


@pytest.mark.parametrize("drafter", [NgramDrafter(), RandomDrafter(VOCAB_SIZE, seed=1)], ids=["ngram", "random"])
def test_drafts_do_not_change_the_answers_of_adapters(drafter: Drafter) -> None:
    loaded, adapters = loaded_with("llama", NUM_ADAPTERS)
    engine = InProcessEngine(loaded, num_blocks=100, max_num_seqs=9, max_drafts=4, drafter=drafter)
    prompts, max_tokens = make_prompts(VOCAB_SIZE), 24
    sequences = [
        engine.add(prompts[i], adapter=adapter, max_tokens=max_tokens, ignore_eos=True)
        for i, adapter in enumerate(adapters)
    ]
    engine.run()
    expected = [answer("llama", i, tuple(prompts[i]), max_tokens) for i in range(len(adapters))]
    assert [sequence.output_token_ids for sequence in sequences] == expected
    assert sum(sequence.num_drafted_tokens for sequence in sequences) > 0


def test_a_worker_that_replaces_a_lost_one_reads_the_adapters_again() -> None:
    loaded, adapters = loaded_with("llama", NUM_ADAPTERS)
    engine, prompts, max_tokens = InProcessEngine(loaded, num_blocks=200, max_num_seqs=9), make_prompts(VOCAB_SIZE), 12
    sequences = [
        engine.add(prompts[i], adapter=adapter, max_tokens=max_tokens, ignore_eos=True)
        for i, adapter in enumerate(adapters)
    ]
    for _ in range(5):
        engine.step()
    replacement = load(adapters_of("llama")[0], max_loras=NUM_ADAPTERS, max_lora_rank=16)
    engine.lose_worker(replacement)
    engine.run()
    expected = [answer("llama", i, tuple(prompts[i]), max_tokens) for i in range(len(adapters))]
    assert [sequence.output_token_ids for sequence in sequences] == expected


def test_results_count_what_was_read_and_evicted() -> None:
    loaded, adapters = loaded_with("llama", 2)
    pool, engine, prompt = loaded.lora, InProcessEngine(loaded), make_prompts(VOCAB_SIZE)[3]
    assert pool is not None and pool.take_counts() == (2, 0), "the check of the first two gave them places"
    results: list[StepResult] = []
    execute = engine.runner.execute

    def watched(plan: StepPlan) -> StepResult:
        results.append(execute(plan))
        return results[-1]

    engine.runner.execute = watched  # type: ignore[method-assign]
    for adapter in adapters[1:5]:
        engine.add(prompt, adapter=adapter, max_tokens=2, ignore_eos=True)
        engine.run()
    assert [(each.num_adapter_reads, each.num_adapter_evictions) for each in results[::2]] == [
        (0, 0),
        (0, 0),
        (1, 1),
        (1, 1),
    ]


@pytest.mark.parametrize("name", ["gemma2", "qwen3", "starcoder2"])
def test_layers_of_transformers_take_adapters_too(name: str) -> None:
    directory = Path(mkdtemp(prefix="lora-"))
    model = make_model(directory / "model", *ARCHITECTURES[name])
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", *(["c_fc", "c_proj"] if name == "starcoder2" else ["up_proj"])]
    merged = make_adapter(directory / "adapter", model, 3, target_modules=targets)
    loaded = load(directory / "model", max_loras=2, max_lora_rank=8)
    assert loaded.lora is not None
    adapter = LoraAdapter(0, str(directory / "adapter"))
    adapter = LoraAdapter(0, adapter.path, loaded.lora.load(adapter)[0])
    engine, prompts = InProcessEngine(loaded), make_prompts(VOCAB_SIZE)[:4]
    sequences = [
        engine.add(prompt, adapter=each, max_tokens=8, ignore_eos=True)
        for prompt, each in zip(prompts, (None, adapter, adapter, None), strict=True)
    ]
    engine.run()
    models = (model, merged, merged, model)
    assert [sequence.output_token_ids for sequence in sequences] == [
        generate(each, prompt, 8, ignore_eos=True) for prompt, each in zip(prompts, models, strict=True)
    ]


def test_decodes_with_adapters_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is a function that is called again here; it computes as on a GPU, with a mask of all places."""
    monkeypatch.setattr("workers.lora.lora_pool.c_library", lambda dtype: None)
    loaded, adapters = loaded_with("llama", NUM_ADAPTERS)
    engine, prompts = InProcessEngine(loaded, max_num_seqs=9, num_blocks=200), make_prompts(VOCAB_SIZE)
    num_replays = 0

    @dataclass
    class Repeated:
        compute: Callable[[], None]

        def replay(self) -> None:
            nonlocal num_replays
            num_replays += 1
            self.compute()

    def capture(compute: Callable[[], None]) -> Repeated:
        compute()
        return Repeated(compute)

    engine.runner.capture_decodes(capture)
    engine.runner.capture_decodes_with_adapters(capture)
    for used in (adapters, [None] * 3, adapters[3:5]):
        sequences = [
            engine.add(prompts[i], adapter=adapter, max_tokens=8, ignore_eos=True) for i, adapter in enumerate(used)
        ]
        engine.run()
        models = [adapters.index(adapter) for adapter in used]
        expected = [answer("llama", model, tuple(prompts[i]), 8) for i, model in enumerate(models)]
        assert [sequence.output_token_ids for sequence in sequences] == expected
    assert num_replays >= 3 * 7


def test_adapters_without_a_place_are_read_again() -> None:
    loaded, adapters = loaded_with("llama", 2)
    engine, prompt = InProcessEngine(loaded), make_prompts(VOCAB_SIZE)[3]
    for _ in range(2):
        for index, adapter in enumerate(adapters):
            sequence = engine.add(prompt, adapter=adapter, max_tokens=6, ignore_eos=True)
            engine.run()
            assert sequence.output_token_ids == answer("llama", index, tuple(prompt), 6)


def test_a_prefix_is_found_by_sequences_with_the_same_adapter_only() -> None:
    loaded, adapters = loaded_with("llama")
    engine, prompt = InProcessEngine(loaded), make_prompts(VOCAB_SIZE)[5]
    assert LENGTHS[5] > LORA_RUN_ROWS
    found = []
    for index in (0, 1, 2, 1, 0, 2):
        sequence = engine.add(prompt, adapter=adapters[index], max_tokens=6, ignore_eos=True)
        engine.run()
        found.append(sequence.num_cached_tokens)
        assert sequence.output_token_ids == answer("llama", index, tuple(prompt), 6)
    assert found[:3] == [0, 0, 0]
    assert all(found[3:])


def test_logprobs_are_close_to_those_of_the_merged_model() -> None:
    loaded, adapters = loaded_with("llama")
    engine, prompt = InProcessEngine(loaded), make_prompts(VOCAB_SIZE)[1]
    sequence = engine.add(prompt, adapter=adapters[1], max_tokens=1, logprobs=VOCAB_SIZE // 8)
    engine.run()
    (given,) = engine.logprobs[sequence.sequence_id]
    assert given is not None
    with torch.inference_mode():
        expected = adapters_of("llama")[2][1](torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    ids, values = zip(*given.top, strict=True)
    torch.testing.assert_close(torch.tensor(values), expected[list(ids)], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", None])
def test_one_call_for_all_layers_adds_the_adapters_too(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers in a batch are those without the fused C path, in which every step is one of torch's."""
    directory, adapters, _ = adapters_of("llama_wide")
    dtype = "float32" if quantization else "bfloat16"
    loaded = load(directory, dtype, quantization=quantization, max_loras=8, max_lora_rank=16)
    assert loaded.lora is not None
    checked = [LoraAdapter(each.number, each.path, loaded.lora.load(each)[0]) for each in adapters]
    decoder = loaded.decoder.cpu_decoder
    if decoder is None:
        pytest.skip("this processor does not run all layers in one call")
    calls = []
    decode = decoder.decode

    def counted(x: torch.Tensor, *args: Any) -> None:
        calls.append(len(x))
        decode(x, *args)

    monkeypatch.setattr(decoder, "decode", counted)
    prompt = make_prompts(VOCAB_SIZE)[2][:1]  # the call takes few rows

    def answers() -> list[list[tuple[int, float]]]:
        engine = InProcessEngine(loaded)
        engine.runner._in_c = None  # test_cpu_language_model.py has steps in which the head is in the call, too
        sequences = [engine.add(prompt, adapter=each, max_tokens=1, logprobs=5) for each in (None, *checked[:7])]
        engine.run()
        return [engine.logprobs[sequence.sequence_id][0].top for sequence in sequences]

    together = answers()
    assert calls == [8]
    loaded.decoder.cpu_decoder = None
    apart = answers()
    tolerance = 0.02 if quantization else 0.3
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(
            torch.tensor([value for _, value in one]),
            torch.tensor([value for _, value in other]),
            atol=tolerance,
            rtol=0,
        )
    assert len({tuple(one) for one in together}) == len(together), "the adapters were meant to differ"


def test_a_sequence_fails_if_its_adapter_cannot_be_read_any_more() -> None:
    loaded, adapters = loaded_with("llama", 1)
    engine, prompt = InProcessEngine(loaded), make_prompts(VOCAB_SIZE)[3]
    changed = adapters[2]
    assert changed is not None
    broken = engine.add(prompt, adapter=LoraAdapter(2, changed.path, "other files"), max_tokens=6)
    fine = engine.add(prompt, adapter=adapters[1], max_tokens=6, ignore_eos=True)
    engine.run()
    assert broken.finish_reason == "error" and broken.output_token_ids == []
    assert fine.output_token_ids == answer("llama", 1, tuple(prompt), 6)


def test_an_adapter_that_failed_stays_dead_for_its_prefix_is_of_the_bare_model(tmp_path: Path) -> None:
    loaded, _ = loaded_with("llama", 1)
    make_adapter(tmp_path, adapters_of("llama")[2][0], 1)
    assert loaded.lora is not None
    adapter = LoraAdapter(50, str(tmp_path), loaded.lora.load(LoraAdapter(50, str(tmp_path)))[0])
    connectors: list[OffloadingConnector] = []

    def make_connector(cache: KVCache) -> OffloadingConnector:
        connectors.append(OffloadingConnector(cache, 4))
        return connectors[0]

    engine, prompt = InProcessEngine(loaded, make_connector=make_connector), make_prompts(VOCAB_SIZE)[5]
    connectors[0]._is_writing = True  # as if it had a disk
    (tmp_path / "adapter_config.json").rename(tmp_path / "away")
    first = engine.add(prompt, adapter=adapter, max_tokens=3)
    engine.run()
    (tmp_path / "away").rename(tmp_path / "adapter_config.json")
    second = engine.add(prompt, adapter=adapter, max_tokens=3)
    engine.run()
    assert [first.finish_reason, second.finish_reason] == ["error", "error"]
    assert not connectors[0]._is_writing, "blocks that were computed without it do not outlive the worker"
    again = LoraAdapter(51, adapter.path, adapter.fingerprint)
    third = engine.add(prompt, adapter=again, max_tokens=3, ignore_eos=True)
    engine.run()
    assert third.finish_reason == "length" and third.num_cached_tokens == 0


def test_a_place_that_could_not_be_written_is_given_to_one_adapter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, adapters = loaded_with("llama", 2)
    pool = loaded.lora
    assert pool is not None
    one, two, three = (adapter for adapter in adapters[1:4] if adapter is not None)
    places = {two: pool.place_of(two, set())}  # after one, which is now the least recently used

    def fail(*args: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("workers.lora.lora_linear.CLoraLinear.write", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            pool.place_of(three, {two})
    places[three] = pool.place_of(three, {two})
    assert places[two] == pool.place_of(two, set()) != places[three]
    assert pool.place_of(one, {two}) == places[three]


def test_files_that_change_while_they_are_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, adapters = loaded_with("llama", 1)
    pool = loaded.lora
    assert pool is not None and adapters[2] is not None
    states = iter(["before", "after"] * 2)
    monkeypatch.setattr("workers.lora.lora_pool.file_state", lambda path: next(states))
    with pytest.raises(ConfigError, match="have changed"):
        pool.load(LoraAdapter(60, adapters[2].path))
    with pytest.raises(ConfigError, match="have changed"):
        pool.place_of(adapters[2], set())


def test_a_step_that_needs_too_many_adapters_fails_some_sequences_and_serves_the_others() -> None:
    loaded, adapters = loaded_with("llama", 2)
    engine, prompt = InProcessEngine(loaded), make_prompts(VOCAB_SIZE)[3]
    sequences = [engine.add(prompt, adapter=adapter, max_tokens=3, ignore_eos=True) for adapter in adapters[1:4]]
    engine.run()
    assert sorted(sequence.finish_reason for sequence in sequences) == ["error", "length", "length"]


def test_without_places_there_are_no_adapters() -> None:
    directory, adapters, _ = adapters_of("llama")
    loaded = load(directory)
    assert loaded.lora is None
    assert "--max-loras" in InProcessEngine(loaded).runner.load_adapter(adapters[0]).refusal


def test_an_adapter_of_another_model_is_refused_by_shape() -> None:
    loaded, _ = loaded_with("llama")
    directory = Path(mkdtemp(prefix="lora-"))
    other = make_model(directory / "model", "llama", {**WIDE_ARCHITECTURES["llama_wide"][1]})
    make_adapter(directory / "adapter", other, 0)
    assert loaded.lora is not None
    with pytest.raises(ConfigError, match="it is of another model"):
        loaded.lora.load(LoraAdapter(99, str(directory / "adapter")))
