"""A step as one call of C gives the logits and the tokens that the model gives, bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import SlotAssignment
from servekit.protocol.sampling_params import SamplingParams
from tests.support.inprocess import InProcessEngine
from tests.support.lora_adapters import make_adapter
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from tests.workers.test_token_identity import make_prompts
from workers.batch import takes_likeliest
from workers.csrc.build import c_library
from workers.layers.cpu_language_model import CpuLanguageModel, Span
from workers.layers.linear import can_pack
from workers.layers.skinny_gemm import SkinnyGemm, SkinnyGemmWeight
from workers.loading.decoder_output import has_plain_head
from workers.loading.model_manager import LoadedModel, ModelManager
from workers.lora.lora_step import LoraStep
from workers.speculation.drafter import Drafter, DraftRequest

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}  # multiples of 32, as in real models
IN_ONE_CALL = [
    *("llama", "mistral_sliding", "qwen2", "qwen3", "phi3", "phi3_partly_rotated", "olmo2"),
    *("mixtral", "qwen3_moe", "qwen2_moe"),
]
NOT_IN_ONE_CALL = ["granite_scaled", "gemma", "gemma2", "gemma3_two_rotations", "olmo3", "gpt2"]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
MATTERING: dict[
    str, Any
] = {  # fields of sampling parameters, each with a value that changes what is chosen or computed
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": ((3, 1.0),),
    "allowed_token_ids": (3, 4),
    "bad_words": ((3,),),
    "grammar": "{}",
    "min_tokens": 1,
    "logprobs": 0,
    "prompt_logprobs": 0,
}


def load(path: Path, name: str, dtype: str, max_loras: int = 0, **changes: Any) -> LoadedModel:
    library = c_library(dtype) if can_pack(getattr(torch, dtype)) else None
    weight = torch.randn(64, 64).to(getattr(torch, dtype))
    if library is None or not isinstance(SkinnyGemm(library).make_weight(weight, None), SkinnyGemmWeight):
        pytest.skip("this processor lacks the instructions, or oneDNN has a layout that the C code cannot read")
    model_type, sizes = ARCHITECTURES[name]
    make_model(path, model_type, {**sizes, **SIZES, **changes})
    return ModelManager("cpu").load(path, dtype, None, max_loras=max_loras, max_lora_rank=16)


def count_calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count the calls of C from now on, by the method that makes them."""
    calls = {"choose": 0, "logits": 0}

    def counted(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(self: CpuLanguageModel, spans: list[Span], adapters: LoraStep | None) -> Any:
            calls[name] += 1
            return method(self, spans, adapters)

        return call

    for name in calls:
        monkeypatch.setattr(CpuLanguageModel, name, counted(getattr(CpuLanguageModel, name), name))
    return calls


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", IN_ONE_CALL)
def test_logits_are_those_of_the_model(name: str, dtype: str, tmp_path: Path) -> None:
    runner = InProcessEngine(load(tmp_path, name, dtype)).runner
    assert runner._in_c is not None
    token_ids = tuple(range(1, 60))
    for num_last in (1, 2, 5, 13, 32):
        of_model, _, in_one_call = runner._run_in_chunks(token_ids, [len(token_ids) - num_last, len(token_ids)])[-3:]
        assert of_model.norm() > 0.1 and torch.equal(in_one_call, of_model)


@pytest.mark.parametrize("name", NOT_IN_ONE_CALL)
def test_other_models_are_not_computed_in_one_call(name: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, name, "float32", **({} if name != "gpt2" else {"hidden_size": 48}))
    assert InProcessEngine(loaded).runner._in_c is None


@pytest.mark.parametrize("name", ["llama", "granite_scaled", "gemma2"])
def test_a_head_that_scales_or_caps_logits_is_not_plain(name: str, tmp_path: Path) -> None:
    loaded = load(tmp_path, name, "bfloat16")
    head: Any = loaded.model.get_output_embeddings()
    assert has_plain_head(loaded.model, loaded.decoder, head) == (name == "llama")
    assert InProcessEngine(loaded).runner.self_check() < 0.05, "the decoder computes again"


def test_a_model_whose_head_alone_is_not_plain_is_not_computed_in_one_call(tmp_path: Path) -> None:
    changes = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0}
    for logits_scaling in (1.0, 2.0):
        loaded = load(tmp_path, "granite_scaled", "float32", **changes, logits_scaling=logits_scaling)
        assert (InProcessEngine(loaded).runner._in_c is None) == (logits_scaling != 1.0)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_steps_that_are_laid_out(
    dtype: str, max_steps_in_flight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows that take the likeliest token alone, and with other rows among them."""
    loaded = load(tmp_path, "llama", dtype)
    calls = count_calls(monkeypatch)

    def served(in_one_call: bool) -> list[Any]:
        engine = InProcessEngine(loaded, num_blocks=48, max_steps_in_flight=max_steps_in_flight)
        if not in_one_call:
            engine.runner._in_c = None
        others: list[dict[str, Any]] = [
            *({}, {"temperature": 0.9, "seed": 5}, {"logprobs": 2}, {"repetition_penalty": 1.3}),
            *({"prompt_logprobs": 1}, {"bad_words": ((3,), (5, 6))}, {}, {"min_tokens": 5}),
        ]
        prompts = make_prompts(VOCAB_SIZE)
        added = [engine.add(prompt, max_tokens=24) for prompt in prompts]
        engine.run()
        added += [engine.add(prompt, **each, max_tokens=12) for prompt, each in zip(prompts, others, strict=False)]
        engine.run()
        added.append(engine.add(prompts[3], prompt_logprobs=1, max_tokens=2))  # alone: a step of few tokens
        engine.run()
        return [(each.output_token_ids, engine.logprobs[each.sequence_id], each.prompt_logprobs) for each in added]

    expected = served(in_one_call=False)
    assert calls == {"choose": 0, "logits": 0}
    assert served(in_one_call=True) == expected
    assert calls["choose"] > 20 and calls["logits"] > 8


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_drafts_are_verified_in_the_same_call(
    max_steps_in_flight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are greedy or not, and the drafter is right half of the time."""
    loaded = load(tmp_path, "llama", "float32")
    calls = count_calls(monkeypatch)

    def served(drafter: Drafter | None, others: dict[str, Any]) -> list[Any]:
        engine = InProcessEngine(
            loaded,
            num_blocks=48,
            max_steps_in_flight=max_steps_in_flight,
            max_drafts=3 if drafter is not None else 0,
            drafter=drafter,
        )
        if drafter is None:
            engine.runner._in_c = None
        prompts = make_prompts(VOCAB_SIZE)
        added = [engine.add(prompt, max_tokens=24, ignore_eos=True, **others) for prompt in prompts]
        engine.run()
        lengths = engine.manager.draft_lengths
        assert drafter is None or sum(lengths.num_drafted) > sum(lengths.num_accepted) > 8
        return [(each.output_token_ids, engine.logprobs[each.sequence_id]) for each in added]

    for others in ({}, {"temperature": 0.7, "seed": 3}, {"logprobs": 1, "repetition_penalty": 1.2}):
        expected = served(None, others)
        before = dict(calls)
        known = [prompt + tokens for prompt, (tokens, _) in zip(make_prompts(VOCAB_SIZE), expected, strict=True)]
        found = served(HalfRight(known), others)
        for (tokens, logprobs), (of_other, logprobs_of_other) in zip(found, expected, strict=True):
            assert tokens == of_other
            assert [each and each.logprob for each in logprobs] == pytest.approx(
                [each and each.logprob for each in logprobs_of_other], abs=1e-4
            )
        name = "logits" if others else "choose"
        assert calls[name] > before[name] + 8


class HalfRight(Drafter):
    """Drafts the tokens that come, but for every other request the last one is wrong."""

    def __init__(self, known: list[list[int]]) -> None:
        self._known, self._tokens, self._num_requests = known, dict[int, list[int]](), 0

    def commit(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        tokens = self._tokens.setdefault(slot, [])
        tokens[start:] = token_ids

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._drafts(request) for request in requests]

    def _drafts(self, request: DraftRequest) -> tuple[int, ...]:
        tokens = self._tokens[request.slot][: request.num_tokens]
        known = next(each for each in self._known if each[: len(tokens)] == tokens)
        drafts = known[request.num_tokens : request.num_tokens + request.max_drafts]
        self._num_requests += 1
        if self._num_requests % 2 and drafts:
            drafts[-1] = (drafts[-1] + 1) % VOCAB_SIZE
        return tuple(drafts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_take_part_in_the_call(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence has another adapter, or none, and one has an adapter that cannot be read any more."""
    make_model(tmp_path / "model", ARCHITECTURES["llama"][0], {**ARCHITECTURES["llama"][1], **SIZES})
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", "llama", dtype, max_loras=4)
    assert loaded.lora is not None
    adapters: list[LoraAdapter | None] = [None]
    for number in (1, 2, 3):
        make_adapter(tmp_path / str(number), base, number)
        adapter = LoraAdapter(number, str(tmp_path / str(number)))
        adapters.append(replace(adapter, fingerprint=loaded.lora.load(adapter)[0]))
    changed = LoraAdapter(9, str(tmp_path / "1"), "other files")
    calls = count_calls(monkeypatch)

    def served(in_one_call: bool) -> list[Any]:
        engine = InProcessEngine(loaded, num_blocks=48)
        if not in_one_call:
            engine.runner._in_c = None
        prompts = [prompt[:3] for prompt in make_prompts(VOCAB_SIZE)[1:6]]
        added = [
            engine.add(prompt, adapter=adapter, max_tokens=8, ignore_eos=True, logprobs=logprobs)
            for logprobs in (None, 2)
            for prompt, adapter in zip(prompts, [*adapters, changed], strict=True)
        ]
        engine.run()
        return [(each.output_token_ids, each.finish_reason, engine.logprobs[each.sequence_id]) for each in added]

    expected = served(in_one_call=False)
    assert calls == {"choose": 0, "logits": 0} and expected[4][:2] == ([], "error")
    assert served(in_one_call=True) == expected
    assert calls["logits"] > 7
    of_adapters = {tuple(tokens) for tokens, *_ in expected}
    assert len(of_adapters) == 5, "the answers with different adapters were meant to differ"


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, VOCAB_SIZE + 5])
@pytest.mark.parametrize("largest", [(9,), (9, 70), (127, 64), (0, 127)])
def test_the_first_of_several_largest_logits_is_chosen(
    largest: tuple[int, ...], vocab_size: int, tmp_path: Path
) -> None:
    """As torch's argmax chooses it, also behind the last whole vector of logits."""
    of_head = [*largest[:-1], largest[-1] + vocab_size - VOCAB_SIZE]
    for sign in (1.0, -1.0):
        load(tmp_path, "llama", "float32", vocab_size=vocab_size)
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        weight = model.lm_head.weight.data
        row = sign * weight[0].clone()
        weight.zero_()
        weight[of_head] = row
        model.save_pretrained(tmp_path)
        engine = InProcessEngine(ModelManager("cpu").load(tmp_path, "float32", None))
        in_c = engine.runner._in_c
        if in_c is None:
            assert vocab_size % 16, "C multiplies by heads of whole vectors"
            pytest.skip("C does not multiply by this head")
        engine.add(make_prompts(VOCAB_SIZE)[2])
        engine.step()
        span = (0, 0, 2, 1)
        logits = in_c.logits([span])[0]
        expected = min(of_head) if logits[of_head[0]] > 0 else int(logits.argmax())
        assert logits[of_head[0]] != 0 and in_c.choose([span]) == [expected] == [int(logits.argmax())]
        row_length = engine.runner.table.row_length
        assert engine.runner.table.token_ids[:row_length][2] == expected, "C writes it into the table"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotations_of_all_positions_are_those_of_the_decoder(dtype: str, tmp_path: Path) -> None:
    """Positions are computed together, and more of them when a sequence becomes longer."""
    runner = InProcessEngine(load(tmp_path, "llama", dtype, max_position_embeddings=8192)).runner
    in_c, decoder = runner._in_c, runner.loaded.decoder
    assert in_c is not None
    for num_positions in (7, 1500, 5000):
        in_c._know_positions(num_positions)
        assert len(in_c._rotation[0]) >= num_positions
        for position in (0, 1, num_positions // 3, num_positions - 1):
            (expected,) = decoder.rotations(in_c._logits, torch.tensor([[position]]))
            for found, each in zip(in_c._rotation, expected, strict=True):
                assert torch.equal(found[position], each[0])


def test_what_else_is_read_from_logits_is_known() -> None:
    assert takes_likeliest(SlotAssignment(0, replace(GREEDY, seed=3, stop=("a",), top_k=3, top_p=0.5)))
    assert not takes_likeliest(SlotAssignment(0, replace(GREEDY, temperature=0.5)))
    assert not takes_likeliest(SlotAssignment(0, GREEDY, grammar=0))
    for field, value in MATTERING.items():
        assert not takes_likeliest(SlotAssignment(0, replace(GREEDY, **{field: value}))), field
