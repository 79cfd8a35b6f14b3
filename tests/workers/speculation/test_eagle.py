"""EAGLE-3 heads and MTP layers over pages draft what the same heads draft when everything is computed anew.

The outside truth is plain arithmetic on the checkpoint's tensors for EAGLE-3, and transformers' own MTP layer. Both
compute all positions for each draft, without a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import rms_norm, silu
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from servekit.protocol.messages import StepPlan, StepResult
from servekit.protocol.speculative_config import SpeculativeConfig
from servekit.scheduler.sequence import Sequence
from tests.support.draft_heads import (
    EAGLE_LAYERS,
    MAX_DRAFTS,
    MTP_MODELS,
    add_mtp_layer,
    make_eagle3_head,
    settings_with_head,
)
from tests.support.drafters import FixedDraftLengths
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import _LLAMA_LIKE, ARCHITECTURES, make_model
from workers.batch import Batch
from workers.loading.model_manager import LoadedModel
from workers.runner.interface import OutOfMemory
from workers.runner.model_runner import ModelRunner
from workers.runner.model_runner import load as load_runner
from workers.runner.oom_retry import MIN_TOKENS
from workers.speculation.drafter import DraftRequest
from workers.speculation.eagle import EagleDrafter, LoadedHead, load_eagle_head, load_mtp_layer

# Several are computed in two chunks; see `serve`.
PROMPTS = [list(range(3, 3 + length)) for length in (2, 19, 5)] + [[7, 7, 9] * 4, [11, 90, 30, 4, 66] * 5]
EPSILON = 1e-5


@dataclass
class Seen:
    """What a drafter was asked for, and what it answered."""

    token_ids: list[int]
    max_drafts: int
    drafts: tuple[int, ...]


def speculating(loaded: LoadedModel, head: LoadedHead, **options: Any) -> tuple[InProcessEngine, list[Seen]]:
    """Return an engine with this head's drafts, and a list that fills with what it is asked for."""
    engine = InProcessEngine(loaded, max_drafts=MAX_DRAFTS, loaded_drafter=head, **options)
    runner, drafter = engine.runner, engine.runner.drafter
    assert drafter is not None
    seen: list[Seen] = []
    propose = drafter.propose

    def watched(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        table = runner.table
        rows = table.token_ids.view(-1, table.row_length)
        before = [rows[request.slot, : request.num_tokens].tolist() for request in requests]
        proposed = propose(requests)
        for token_ids, request, drafts in zip(before, requests, proposed, strict=True):
            seen.append(Seen(token_ids, request.max_drafts, drafts))
        return proposed

    drafter.propose = watched  # type: ignore[method-assign]
    return engine, seen


def serve(engine: InProcessEngine, max_tokens: int = 10) -> list[list[int]]:
    sequences: list[Sequence] = [engine.add(prompt, max_tokens=max_tokens, ignore_eos=True) for prompt in PROMPTS]
    engine.run()
    return [list(sequence.output_token_ids) for sequence in sequences]


class NaiveEagle3:
    """EAGLE-3 as its paper describes it, on a checkpoint's tensors."""

    def __init__(self, tensors: dict[str, Tensor], model: PreTrainedModel, *, norm_before_residual: bool) -> None:
        self.tensors, self.model, self.norm_before_residual = tensors, model, norm_before_residual

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"midlayer.{name}.weight"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors.get(f"{name}.weight", self.tensors.get(f"midlayer.{name}.weight"))
        assert weight is not None
        return rms_norm(x, x.shape[-1:], weight, EPSILON)

    def embed(self, token_ids: list[int]) -> Tensor:
        ids = torch.tensor(token_ids)
        own = self.tensors.get("embed_tokens.weight")
        return self.model.get_input_embeddings()(ids) if own is None else own[ids]

    def layer(self, features: Tensor, token_ids: list[int]) -> Tensor:
        normed = self.norm(features, "hidden_norm")
        x = torch.cat([self.norm(self.embed(token_ids), "input_layernorm"), normed], dim=-1)
        length, head_dim = len(x), 16
        q, k, v = (
            (x @ self.weight(f"self_attn.{name}_proj").T).view(length, -1, head_dim).transpose(0, 1) for name in "qkv"
        )
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.cat([angles, angles], dim=-1)
        rotated = []
        for heads in (q, k):
            low, high = heads.chunk(2, dim=-1)
            rotated.append(heads * angles.cos() + torch.cat([-high, low], dim=-1) * angles.sin())
        q, k = rotated
        groups = len(q) // len(k)
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        scores = (q @ k.transpose(1, 2) / head_dim**0.5).masked_fill(
            torch.ones(length, length).triu(1).bool(), -torch.inf
        )
        attended = (scores.softmax(dim=-1) @ v).transpose(0, 1).flatten(1) @ self.weight("self_attn.o_proj").T
        x = (normed if self.norm_before_residual else features) + attended
        y = self.norm(x, "post_attention_layernorm")
        gated = silu(y @ self.weight("mlp.gate_proj").T) * (y @ self.weight("mlp.up_proj").T)
        return x + gated @ self.weight("mlp.down_proj").T

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], num_drafts: int) -> tuple[int, ...]:
        states = self.model(torch.tensor([token_ids[:-1]]), output_hidden_states=True).hidden_states
        features = torch.cat([states[layer][0] for layer in EAGLE_LAYERS], dim=-1) @ self.tensors["fc.weight"].T
        following, drafts = token_ids[1:], []
        for _ in range(num_drafts):
            returned = self.layer(features, following)[-1:]
            draft = int((self.norm(returned, "norm") @ self.tensors["lm_head.weight"].T).argmax())
            drafts.append(draft + int(self.tensors["d2t"][draft]) if "d2t" in self.tensors else draft)
            features, following = torch.cat([features, returned]), [*following, drafts[-1]]
        return tuple(drafts)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gemma2", {"layout": "layers.0", "draft_vocab_size": 50, "norm_before_residual": True}),
        ("stablelm", {"hidden_size": 64, "draft_vocab_size": 90}),
    ],
    ids=["midlayer", "speculators", "another hidden size"],
)
def test_an_eagle3_head_drafts_what_it_drafts_without_a_cache(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Fused layers, scaled embeddings, and layers that drop keyword arguments."""
    model, loaded = make_model(tmp_path / "model", *ARCHITECTURES[name]), load(tmp_path / "model")
    tensors = make_eagle3_head(tmp_path / "head", model.config, **options)
    head = load_eagle_head(loaded, settings_with_head(loaded, "eagle", str(tmp_path / "head")))
    naive = NaiveEagle3(tensors, model, norm_before_residual=options.get("norm_before_residual", False))
    check_drafts(loaded, head, naive.drafts)


def check_drafts(loaded: LoadedModel, head: LoadedHead, naive: Callable[[list[int], int], tuple[int, ...]]) -> None:
    """Serve prompts, and compare each third of the drafts with those that `naive` makes, and all tokens."""
    engine, seen = speculating(loaded, head, max_num_batched_tokens=16)
    answers = serve(engine)
    assert len(seen) > 10 and any(len(each.drafts) == MAX_DRAFTS for each in seen)
    for each in seen[::3]:
        assert each.drafts == naive(each.token_ids, each.max_drafts), each
    assert answers == serve(InProcessEngine(loaded)), "drafts change tokens"


class NaiveMtp:
    """transformers' MTP layer with the embedding, the last norm and the head of transformers' model."""

    def __init__(self, mtp: Any, model: PreTrainedModel) -> None:
        self.mtp, self.model = mtp, model

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], num_drafts: int) -> tuple[int, ...]:
        states = self.model.model(torch.tensor([token_ids[:-1]]), use_cache=False).last_hidden_state
        following, drafts = token_ids[1:], []
        for _ in range(num_drafts):
            positions = torch.arange(len(following))[None]
            ids = torch.tensor([following])
            returned = self.mtp.forward_layer(0, states, positions, None, input_ids=ids)[:, -1:]
            drafts.append(int(self.model.lm_head(returned[0, -1]).argmax()))
            states, following = torch.cat([states, returned], dim=1), [*following, drafts[-1]]
        return tuple(drafts)


def naive_mtp(model: PreTrainedModel, added: dict[str, Tensor]) -> NaiveMtp:
    """Put the tensors of a checkpoint into transformers' layer by hand."""
    mtp = MtpModel(model, 1).eval()
    layer, parameters = mtp.layers[0], {}
    for name, tensor in added.items():
        own = name.split(".", 3)[3]
        if own in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
            parameters[own] = tensor
        elif own == "shared_head.norm.weight":
            parameters["post_norm.weight"] = tensor
        elif "embed_tokens" not in own and "shared_head" not in own:
            parameters[f"mtp_block.{own}"] = tensor
    _join_experts(parameters)
    layer.load_state_dict(parameters, strict=True)
    return NaiveMtp(mtp, model)


def _join_experts(parameters: dict[str, Tensor]) -> None:
    """Stack the matrices of experts, which checkpoints have one by one."""
    prefix = "mtp_block.mlp.experts."
    experts = {name: parameters.pop(name) for name in list(parameters) if name.startswith(prefix + "0")}
    number = 0
    stacked: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
    while experts:
        gate, up, down = (experts.pop(f"{prefix}{number}.{kind}_proj.weight") for kind in ("gate", "up", "down"))
        stacked["gate_up_proj"].append(torch.cat([gate, up]))
        stacked["down_proj"].append(down)
        number += 1
        experts = {name: parameters.pop(name) for name in list(parameters) if name.startswith(f"{prefix}{number}.")}
    parameters |= {prefix + name: torch.stack(tensors) for name, tensors in stacked.items() if tensors}


@pytest.mark.parametrize("model_type", MTP_MODELS)
def test_a_mtp_layer_drafts_what_it_drafts_without_a_cache(model_type: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, model_type, {**_LLAMA_LIKE, **MTP_MODELS[model_type]})
    naive = naive_mtp(model, add_mtp_layer(tmp_path))
    loaded = load(tmp_path)
    check_drafts(loaded, load_mtp_layer(loaded, settings_with_head(loaded, "mtp")), naive.drafts)


def test_all_drafts_of_a_head_that_knows_the_model_are_accepted(tmp_path: Path) -> None:
    """The model's next token depends on the newest one alone, and the MTP layer is made to compute the same."""
    make_model(tmp_path, "glm4_moe", {**_LLAMA_LIKE, **MTP_MODELS["glm4_moe"]})
    add_mtp_layer(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()  # no layer adds anything
    size = tensors["model.norm.weight"].shape[0]
    prefix = f"model.layers.{_LLAMA_LIKE['num_hidden_layers']}."
    tensors[f"{prefix}enorm.weight"].fill_(1.0)
    tensors[f"{prefix}eh_proj.weight"].copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
    tensors[f"{prefix}shared_head.norm.weight"].copy_(tensors["model.norm.weight"])
    save_file(tensors, file, metadata={"format": "pt"})
    loaded = load(tmp_path)
    engine, seen = speculating(loaded, load_mtp_layer(loaded, settings_with_head(loaded, "mtp")))
    prompt, num_tokens = [5, 17, 40], 60
    sequence = engine.add(prompt, max_tokens=num_tokens, ignore_eos=True)
    engine.run()
    text = [*prompt, *sequence.output_token_ids]
    assert sum(len(each.drafts) for each in seen) > num_tokens / 2
    for each in seen:
        known = len(each.token_ids)
        assert list(each.drafts)[: len(text) - known] == text[known : known + len(each.drafts)]
    assert engine.num_steps < num_tokens / 2, "accepted drafts saved no steps"


@pytest.mark.parametrize("options", [{"num_blocks": 14}, {"max_steps_in_flight": 2}], ids=["preempted", "ahead"])
def test_answers_are_the_same_under_preemption_and_ahead(options: dict[str, Any], tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", *ARCHITECTURES["llama"])
    loaded = load(tmp_path / "model")
    make_eagle3_head(tmp_path / "head", model.config)
    head = load_eagle_head(loaded, settings_with_head(loaded, "eagle", str(tmp_path / "head")))
    engine, seen = speculating(loaded, head, **options)
    assert serve(engine) == serve(InProcessEngine(loaded)) and seen


def test_a_step_that_is_computed_in_parts_drafts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model", *ARCHITECTURES["llama"])
    loaded = load(tmp_path / "model")
    tensors = make_eagle3_head(tmp_path / "head", model.config)
    head = load_eagle_head(loaded, settings_with_head(loaded, "eagle", str(tmp_path / "head")))
    naive = NaiveEagle3(tensors, model, norm_before_residual=False)
    execute, num_refused = ModelRunner._execute, 0

    def limited(self: ModelRunner, plan: StepPlan, batch: Batch) -> Any:
        nonlocal num_refused
        outputs = execute(self, plan, batch)  # what it computed is computed again
        if len(batch.input_ids) > MIN_TOKENS:
            num_refused += 1
            raise OutOfMemory("as if")
        return outputs

    engine, seen = speculating(loaded, head)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "_execute", limited)
        answers = serve(engine)
    assert num_refused and answers == serve(InProcessEngine(loaded))
    for each in seen[::3]:
        if each.drafts:  # none where the newest token's row was in an earlier part
            assert each.drafts == naive.drafts(each.token_ids, each.max_drafts), each
    assert any(each.drafts for each in seen)


def with_head(method: str, folder: Path) -> tuple[LoadedModel, LoadedHead]:
    """Return a model, and an EAGLE-3 head or a MTP layer for it."""
    if method == "mtp":
        make_model(folder, "glm4_moe", {**_LLAMA_LIKE, **MTP_MODELS["glm4_moe"]})
        add_mtp_layer(folder)
        loaded = load(folder)
        return loaded, load_mtp_layer(loaded, settings_with_head(loaded, "mtp"))
    model, head = make_model(folder / "model", *ARCHITECTURES["qwen3"]), folder / "head"
    loaded = load(folder / "model")
    make_eagle3_head(head, model.config)
    return loaded, load_eagle_head(loaded, settings_with_head(loaded, "eagle", str(head)))


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_forks_and_hits_in_the_prefix_cache_change_no_token(method: str, tmp_path: Path) -> None:
    loaded, head = with_head(method, tmp_path)

    def answers(engine: InProcessEngine) -> list[list[int]]:
        options = {"max_tokens": 10, "temperature": 1.0, "ignore_eos": True}
        leader = engine.add(PROMPTS[1], seed=1, **options)
        forks = [engine.add(PROMPTS[1], leader, seed=seed, **options) for seed in (2, 3)]
        engine.run()
        later = engine.add([*PROMPTS[1][:17], 99, 98], seed=4, **options)  # shares blocks
        engine.run()
        return [list(each.output_token_ids) for each in (leader, *forks, later)]

    engine, seen = speculating(loaded, head)
    assert answers(engine) == answers(InProcessEngine(loaded))
    assert engine.num_copies and seen


@pytest.mark.parametrize("method", ["eagle", "mtp"])
def test_a_worker_that_is_lost_changes_no_token(method: str, tmp_path: Path) -> None:
    """Sequences that were in flight have no drafts from then on. Later ones have."""
    loaded, head = with_head(method, tmp_path)

    def answers(engine: InProcessEngine, lose_at: int | None) -> list[list[int]]:
        options = {"max_tokens": 16, "temperature": 0.8, "ignore_eos": True}
        leader = engine.add(PROMPTS[1], seed=1, **options)
        sequences = [leader, engine.add(PROMPTS[1], leader, seed=2, **options)]
        sequences += [engine.add(prompt, seed=3, **options) for prompt in PROMPTS]
        while engine.num_steps != lose_at and engine.manager.has_work:
            engine.step()
        if lose_at is not None:
            assert engine.manager.has_work
            engine.lose_worker()
        engine.run()
        later = engine.add(PROMPTS[1], seed=5, **options)
        engine.run()
        return [list(each.output_token_ids) for each in (*sequences, later)]

    expected = answers(InProcessEngine(loaded), None)
    for lose_at in (3, 6):
        engine, seen = speculating(loaded, head)
        assert answers(engine, lose_at) == expected
        lengths = engine.manager.draft_lengths
        assert seen and lengths.num_spans > len(seen), "the new worker drafts, too"


def test_what_a_head_computes_of_each_step_is_no_time_of_drafts(tmp_path: Path) -> None:
    """It computes the same whether drafts are wanted or not. So it is a part of the model's time in both cases."""
    loaded, head = with_head("eagle", tmp_path)
    engine, seen = speculating(loaded, head)
    engine.manager.draft_lengths = FixedDraftLengths(MAX_DRAFTS, lambda step_id: MAX_DRAFTS * (step_id % 2))
    execute, results = engine.runner.execute, []

    def watched(plan: StepPlan) -> StepResult:
        results.append((plan.has_drafts, execute(plan)))
        return results[-1][1]

    engine.runner.execute = watched  # type: ignore[method-assign]
    serve(engine)
    assert seen and all((result.draft_time_s > 0.0) == has_drafts for has_drafts, result in results)
    # If what the head computes were counted, it would be some hundred microseconds.
    assert median(result.draft_prompt_time_s for has_drafts, result in results if not has_drafts) < 20e-6


def test_a_worker_that_loads_a_head_counts_its_keys_and_values(tmp_path: Path) -> None:
    """One layer of two heads of 16 numbers, beside the model's three layers of two heads of 8."""
    model = make_model(tmp_path / "model", *ARCHITECTURES["llama"])
    make_eagle3_head(tmp_path / "head", model.config)
    settings = settings_with_head(load(tmp_path / "model"), "eagle", str(tmp_path / "head"))
    without, _ = load_runner(replace(settings, speculative=SpeculativeConfig()), lambda _: None)
    runner, _ = load_runner(settings, lambda _: None)
    assert isinstance(runner.drafter, EagleDrafter)
    if runner.attention.name == "torch":  # others round up
        assert runner.kv_bytes_per_token - without.kv_bytes_per_token == 2 * 2 * 16 * 4
    assert runner.kv_bytes_per_token > without.kv_bytes_per_token
