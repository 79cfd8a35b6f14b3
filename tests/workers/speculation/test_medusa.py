"""Claims about Medusa heads: they change no token, read the newest token's state, and are refused in sentences."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel, SlotAssignment, StepPlan
from servekit.protocol.sampling_params import SamplingParams
from servekit.protocol.speculative_config import SpeculativeConfig
from tests.support.inprocess import InProcessEngine
from tests.support.load_settings import load_settings
from tests.support.tiny_models import VOCAB_SIZE
from tests.workers.test_token_identity import make_prompts, prepared, serve_with_joins_and_leaves
from workers.speculation.choose import load_drafter
from workers.speculation.drafter import DraftRequest
from workers.speculation.medusa import MedusaDrafter, MedusaHeads

SIZE = 48  # of the hidden states of tests/support/tiny_models.py
HEADS = 3


def tensors_of(
    num_heads: int = HEADS, num_blocks: int = 1, *, has_matrix: bool = True, scale: float = 0.3
) -> dict[str, Tensor]:
    """Return heads with the names of the published checkpoints."""
    torch.manual_seed(5)
    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = torch.randn(SIZE, SIZE) * scale
            tensors[f"{head}.{block}.linear.bias"] = torch.randn(SIZE) * scale
        if has_matrix:
            tensors[f"{head}.{num_blocks}.weight"] = torch.randn(VOCAB_SIZE, SIZE)
    return tensors


def settings_for(path: Path) -> LoadModel:
    return load_settings(
        str(prepared("llama")[0].model.name_or_path),
        num_kv_blocks=None,
        speculative=SpeculativeConfig("medusa", str(path), HEADS),
    )


def read(path: Path, tensors: dict[str, Tensor], file: str = "medusa_lm_head.safetensors") -> MedusaHeads:
    save_file(tensors, path / file)
    found = load_drafter(prepared("llama")[0], settings_for(path))
    assert isinstance(found, MedusaHeads)
    return found


def expected(tensors: dict[str, Tensor], states: Tensor, num_blocks: int = 1) -> Tensor:
    """Return the likeliest tokens [num_rows, num_heads], as the authors' code computes them."""
    guesses = []
    for head in range(HEADS):
        x = states
        for block in range(num_blocks):
            weight, bias = (tensors[f"{head}.{block}.linear.{name}"] for name in ("weight", "bias"))
            x = x + torch.nn.functional.silu(torch.nn.functional.linear(x, weight, bias))
        guesses.append((x @ tensors[f"{head}.{num_blocks}.weight"].T).argmax(-1))
    return torch.stack(guesses, dim=-1)


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_heads_compute_what_the_authors_code_does(num_blocks: int, tmp_path: Path) -> None:
    tensors, states = tensors_of(num_blocks=num_blocks), torch.randn(5, SIZE)
    heads = read(tmp_path, tensors)
    assert heads.likeliest(states, HEADS).equal(expected(tensors, states, num_blocks))
    assert heads.likeliest(states, 2).equal(expected(tensors, states, num_blocks)[:, :2])


def test_all_published_names_are_read(tmp_path: Path) -> None:
    tensors, states = tensors_of(), torch.randn(4, SIZE)
    wanted = expected(tensors, states)
    prefixed = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    renamed = {}
    for name, tensor in tensors.items():
        head, _, part = name.split(".", 2)
        renamed[f"lm_heads.{head}.weight" if part == "weight" else f"blocks.{head}.layers.0.{part[7:]}"] = tensor
    for number, each in enumerate((prefixed, renamed)):
        (tmp_path / str(number)).mkdir()
        assert read(tmp_path / str(number), each, "model.safetensors").likeliest(states, HEADS).equal(wanted)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("has_matrix", [True, False])
def test_tokens_are_those_of_generate(has_matrix: bool, max_steps_in_flight: int, tmp_path: Path) -> None:
    loaded, answers = prepared("llama")
    engine = InProcessEngine(
        loaded,
        num_blocks=10,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_steps_in_flight=max_steps_in_flight,
        max_drafts=HEADS,
        loaded_drafter=read(tmp_path, tensors_of(has_matrix=has_matrix)),
    )
    sequences = serve_with_joins_and_leaves(engine, make_prompts(VOCAB_SIZE))
    assert [sequence.output_token_ids for sequence in sequences] == answers
    assert engine.manager.num_preemptions > 0, "the pool was meant to be too small"


def test_drafts_come_from_the_state_of_the_newest_token(tmp_path: Path) -> None:
    """Heads that change nothing, with the model's own matrix, guess the token that was chosen from their state."""
    loaded, _ = prepared("llama")
    heads = read(tmp_path, tensors_of(has_matrix=False, scale=0.0))
    engine = InProcessEngine(loaded, num_blocks=60, max_steps_in_flight=2, max_drafts=HEADS, loaded_drafter=heads)
    drafter, table = engine.runner.drafter, engine.runner.table
    assert isinstance(drafter, MedusaDrafter)
    propose, num_drafts = drafter.propose, 0

    def checked(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        nonlocal num_drafts
        proposed = propose(requests)
        for request, drafts in zip(requests, proposed, strict=True):
            newest = int(table.token_ids[request.slot * table.row_length + request.num_tokens - 1])
            assert drafts == (newest,) * request.max_drafts
            num_drafts += len(drafts)
        return proposed

    drafter.propose = checked  # type: ignore[method-assign]
    sequences = [engine.add(prompt, max_tokens=20, ignore_eos=True) for prompt in make_prompts(VOCAB_SIZE)]
    engine.run()
    assert num_drafts > 200
    assert all(len(sequence.output_token_ids) == 20 for sequence in sequences)


def test_a_slot_that_is_assigned_anew_has_no_state() -> None:
    heads = MedusaHeads(((torch.zeros(2, 4, 4), torch.zeros(2, 1, 4)),), torch.zeros(2, 9, 4), None)
    drafter = MedusaDrafter(heads, num_slots=4)
    assert drafter.propose([DraftRequest(slot=3, num_tokens=5, max_drafts=2)]) == [()]
    drafter._known[3] = (4, 1)
    assert drafter.propose([DraftRequest(slot=3, num_tokens=5, max_drafts=2)]) == [(0, 0)]
    drafter.begin(StepPlan(0, 0, (SlotAssignment(3, SamplingParams(max_tokens=1)),), ()))
    assert drafter.propose([DraftRequest(slot=3, num_tokens=5, max_drafts=2)]) == [()]


def broken(**changes: Any) -> dict[str, Tensor]:
    tensors = tensors_of()
    for name, tensor in changes.items():
        key = name.replace("_", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    return tensors


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "0 Medusa heads"),
        ({"0.0.linear.weight": torch.zeros(SIZE, SIZE)}, "which are not those of"),
        (broken(**{"1_0_linear_bias": None}), "which are not those of"),
        (broken(**{"2_1_weight": None}), "which are not those of"),
        (broken(**{"7_0_linear_bias": torch.zeros(SIZE)}), "which are not those of"),
        (broken(**{"0_0_linear_weight": torch.zeros(SIZE, SIZE + 1)}), "belong to another model"),
        (broken(**{"0_1_weight": torch.zeros(VOCAB_SIZE + 1, SIZE)}), "belong to another model"),
        (broken(**{"0_0_linear_bias": torch.zeros(SIZE, dtype=torch.int64)}), "belong to another model"),
        (broken(optimizer=torch.zeros(1)), "no part of a Medusa head"),
        (tensors_of(17), "1 to 16 heads"),
        (tensors_of(1, 9), "of 1 to 8 blocks"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tensors: dict[str, Tensor], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        read(tmp_path, tensors)


def test_damaged_and_missing_files_are_refused(tmp_path: Path) -> None:
    loaded, settings = prepared("llama")[0], settings_for(tmp_path)
    with pytest.raises(ConfigError, match="holds neither"):
        load_drafter(loaded, settings)
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ConfigError, match="can be read: "):
        load_drafter(loaded, settings)


class Bomb:
    """Creates the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return Path.touch, (self.canary,)


def test_a_pickle_is_refused_and_not_read(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps(Bomb(canary)))
    with pytest.raises(ConfigError, match="Convert it"):
        load_drafter(prepared("llama")[0], settings_for(tmp_path))
    assert not canary.exists()


def test_heads_that_are_no_numbers_change_no_token(tmp_path: Path) -> None:
    loaded, answers = prepared("llama")
    tensors = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors_of().items()}
    engine = InProcessEngine(loaded, max_drafts=HEADS, loaded_drafter=read(tmp_path, tensors))
    sequences = serve_with_joins_and_leaves(engine, make_prompts(VOCAB_SIZE))
    assert [sequence.output_token_ids for sequence in sequences] == answers
