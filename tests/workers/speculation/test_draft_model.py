"""Claims about draft models: they change no token, share the model's blocks, and are right where they should be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

import pytest
from safetensors.torch import load_file, save_file

from servekit.errors import ConfigError
from servekit.protocol.messages import LoadModel, StepPlan, StepResult
from servekit.protocol.speculative_config import SpeculativeConfig
from servekit.scheduler.sequence import Sequence
from tests.support.drafters import FixedDraftLengths
from tests.support.inprocess import InProcessEngine, load
from tests.support.load_settings import load_settings
from tests.support.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_model
from tests.workers.test_token_identity import make_prompts, prepared, serve_with_joins_and_leaves
from workers.runner.model_runner import make_runner
from workers.speculation import draft_model
from workers.speculation.choose import load_drafter
from workers.speculation.draft_model import DraftModel, load_draft_model
from workers.speculation.drafter import DraftRequest

MAX_DRAFTS = 3
SMALLER = {**ARCHITECTURES["llama"][1], "num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 48}


def settings_for(target: Path, speculative: SpeculativeConfig, **fields: object) -> LoadModel:
    return load_settings(str(target), speculative=speculative, **{"num_kv_blocks": None, **fields})


@cache
def drafting(name: str, draft: str) -> DraftModel:
    """Return a draft model for the model `name` of `prepared`."""
    loaded, _ = prepared(name)
    path = Path(loaded.model.name_or_path)
    if draft == "itself":
        config = SpeculativeConfig("draft", str(path), MAX_DRAFTS)
    elif draft == "smaller":
        smaller = Path(mkdtemp(prefix="draft-"))
        make_model(smaller, "llama", {**SMALLER, "vocab_size": loaded.info.vocab_size}, seed=1)
        config = SpeculativeConfig("draft", str(smaller), MAX_DRAFTS)
    else:
        config = SpeculativeConfig("self", max_drafts=MAX_DRAFTS, quantization=draft)
    return load_draft_model(loaded, settings_for(path, config))


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize(
    ("name", "draft"),
    [
        ("llama", "itself"),
        ("llama", "smaller"),
        ("llama", "int8"),
        ("llama", "w4a8"),
        ("gemma2", "smaller"),
        ("gpt2", "itself"),
    ],
)
def test_tokens_are_those_of_generate(name: str, draft: str, max_steps_in_flight: int) -> None:
    """In a pool that is too small, so that sequences are preempted and computed again."""
    loaded, answers = prepared(name)
    engine = InProcessEngine(
        loaded,
        num_blocks=10,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        max_steps_in_flight=max_steps_in_flight,
        max_drafts=MAX_DRAFTS,
        loaded_drafter=drafting(name, draft),
    )
    sequences = serve_with_joins_and_leaves(engine, make_prompts(VOCAB_SIZE))
    assert [sequence.output_token_ids for sequence in sequences] == answers
    assert engine.manager.num_preemptions > 0, "the pool was meant to be too small"
    assert sum(engine.manager.draft_lengths.num_drafted) > 0


@pytest.mark.parametrize("draft", ["itself", "smaller"])
def test_forks_and_prefix_hits_change_no_token(draft: str) -> None:
    """Sampled and greedy answers to one prompt, asked twice: the second time its blocks are in the prefix cache."""
    loaded, _ = prepared("llama")
    prompt = make_prompts(VOCAB_SIZE)[1]

    def answers(max_drafts: int) -> list[list[int]]:
        drafter = drafting("llama", draft) if max_drafts else None
        engine = InProcessEngine(loaded, num_blocks=100, max_drafts=max_drafts, loaded_drafter=drafter)
        sequences: list[Sequence] = []
        for _ in range(2):
            leader = engine.add(prompt, max_tokens=12, ignore_eos=True)
            sampled = [
                engine.add(prompt, leader, max_tokens=12, ignore_eos=True, temperature=1.0, seed=seed)
                for seed in range(3)
            ]
            sequences += [leader, *sampled]
            engine.run()
        assert engine.num_copies > 0
        assert engine.manager.num_cached_tokens > 0
        return [sequence.output_token_ids for sequence in sequences]

    assert answers(MAX_DRAFTS) == answers(0)


def test_every_draft_of_the_model_itself_is_accepted() -> None:
    """Also behind copied blocks and blocks from the prefix cache: the drafter has keys and values of its own there."""
    loaded, _ = prepared("llama")
    engine = InProcessEngine(loaded, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=drafting("llama", "itself"))
    for _ in range(2):
        for prompt in make_prompts(VOCAB_SIZE):
            leader = engine.add(prompt, max_tokens=20, ignore_eos=True)
            engine.add(prompt, leader, max_tokens=17, ignore_eos=True)
            engine.add([*prompt, 5, 6, 7], max_tokens=18, ignore_eos=True)
        engine.run()
    assert engine.num_copies > 0
    assert engine.manager.num_cached_tokens > 100
    lengths = engine.manager.draft_lengths
    assert lengths.num_accepted == lengths.num_drafted
    assert min(lengths.num_drafted) > 50


def pausing_draft_lengths() -> FixedDraftLengths:
    """No drafts in some steps, and the most in all others."""
    return FixedDraftLengths(MAX_DRAFTS, lambda step_id: 0 if 10 <= step_id < 40 else MAX_DRAFTS)


@pytest.mark.parametrize("bound", [256, 8])
def test_a_drafter_makes_up_for_steps_without_drafts(bound: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "MAX_CATCH_UP_TOKENS", bound)
    monkeypatch.setattr(draft_model, "MAX_WANTED_CATCH_UP_TOKENS", bound)
    loaded, _ = prepared("llama")
    engine = InProcessEngine(loaded, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=drafting("llama", "itself"))
    engine.manager.draft_lengths = pausing_draft_lengths()
    drafter = engine.runner.drafter
    compute, propose, largest, is_proposing = drafter._compute, drafter.propose, 0, False

    def watched(spans: list[tuple[int, int, int]], numbers: list[int] | None = None) -> list[list[int]]:
        nonlocal largest
        sizes = [stop - start for _, start, stop in spans]
        largest = max(largest, sum(sizes))
        assert not is_proposing or max(sizes) <= draft_model.MAX_LACKING, "this is no time of drafts"
        return compute(spans, numbers)

    def proposing(requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        nonlocal is_proposing
        is_proposing = True
        drafts = propose(requests)
        is_proposing = False
        return drafts

    drafter._compute, drafter.propose = watched, proposing
    sequences = [engine.add(prompt[:8], max_tokens=160, ignore_eos=True) for prompt in make_prompts(VOCAB_SIZE)[:3]]
    while engine.num_steps < 39:
        engine.step()
    largest = 0
    num_accepted = sum(engine.manager.draft_lengths.num_accepted)
    engine.run()
    assert 3 < largest <= bound + len(sequences)
    # While it catches up it makes fewer drafts than are wanted, and the manager counts those as rejected.
    assert sum(engine.manager.draft_lengths.num_accepted) > num_accepted + 40


def test_short_prompts_are_left_out_while_no_drafts_are_wanted_and_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one is computed at once. All drafts of the model itself are right, so nothing is missing in the end."""
    loaded, _ = prepared("llama")
    monkeypatch.setattr(draft_model, "MAX_LEFT_OUT_TOKENS", 10)
    engine = InProcessEngine(loaded, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=drafting("llama", "itself"))
    lengths = engine.manager.draft_lengths = pausing_draft_lengths()
    drafter = engine.runner.drafter
    compute, computed = drafter._compute, []

    def watched(spans: list[tuple[int, int, int]], numbers: list[int] | None = None) -> list[list[int]]:
        computed.extend(stop - start for _, start, stop in spans)
        return compute(spans, numbers)

    drafter._compute = watched
    prompt = make_prompts(VOCAB_SIZE)[5]
    engine.add(prompt[:8], max_tokens=100, ignore_eos=True)
    while engine.num_steps < 20:
        engine.step()
    computed.clear()
    engine.add(prompt[1:9], max_tokens=60, ignore_eos=True)
    while engine.num_steps < 25:
        engine.step()
    assert not computed, "the short prompt is left out"
    engine.add(prompt[2:], max_tokens=60, ignore_eos=True)
    while engine.num_steps < 39:
        engine.step()
    assert max(computed) == 29, "the long one is not"
    num_drafted, num_accepted = sum(lengths.num_drafted), sum(lengths.num_accepted)
    engine.run()
    assert sum(lengths.num_drafted) - num_drafted == sum(lengths.num_accepted) - num_accepted > 50


def test_a_first_token_waits_for_the_draft_models_prompt_only_if_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are wanted in each step. A short prompt is computed before the first drafts, and they are right."""
    loaded, _ = prepared("llama")
    monkeypatch.setattr(draft_model, "MAX_LEFT_OUT_TOKENS", 10)
    prompt = make_prompts(VOCAB_SIZE)[5]
    for num_tokens, computed_with_it in ((8, 0), (24, 24)):
        engine = InProcessEngine(loaded, max_drafts=MAX_DRAFTS, loaded_drafter=drafting("llama", "itself"))
        lengths = engine.manager.draft_lengths = FixedDraftLengths(MAX_DRAFTS, lambda _: MAX_DRAFTS)
        engine.add([7, 8, 9], max_tokens=60, ignore_eos=True)
        for _ in range(10):
            engine.step()
        drafter, num_computed = engine.runner.drafter, 0
        compute = drafter._compute

        def watched(
            spans: list[tuple[int, int, int]],
            numbers: list[int] | None = None,
            compute: Callable[..., list[list[int]]] = compute,
        ) -> list[list[int]]:
            nonlocal num_computed
            num_computed += sum(stop - start for _, start, stop in spans) if numbers is None else 0
            return compute(spans, numbers)

        drafter._compute = watched
        sequence = engine.add(prompt[:num_tokens], max_tokens=20, ignore_eos=True)
        while not sequence.output_token_ids:
            engine.step()
        assert num_computed == computed_with_it
        engine.run()
        assert num_computed >= num_tokens - 1
        assert lengths.num_accepted == lengths.num_drafted


def test_drafts_that_are_only_tried_make_no_prompt_wanted() -> None:
    """Two steps in 30 have a draft. What is made up for in them is all that the drafter computes."""
    loaded, _ = prepared("llama")
    engine = InProcessEngine(loaded, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=drafting("llama", "itself"))
    lengths = engine.manager.draft_lengths = FixedDraftLengths(MAX_DRAFTS, lambda step_id: int(step_id % 30 in (9, 10)))
    drafter, step_id, computed = engine.runner.drafter, 0, set()
    begin, compute = drafter.begin, drafter._compute

    def beginning(plan: StepPlan) -> None:
        nonlocal step_id
        step_id = plan.step_id
        begin(plan)

    def watched(spans: list[tuple[int, int, int]], numbers: list[int] | None = None) -> list[list[int]]:
        if spans:
            computed.add(step_id % 30)
        return compute(spans, numbers)

    drafter.begin, drafter._compute = beginning, watched
    for prompt in make_prompts(VOCAB_SIZE)[:4]:
        engine.add(prompt, max_tokens=60, ignore_eos=True)
        for _ in range(11):  # the second prompt comes behind two steps with drafts
            engine.step()
    engine.run()
    assert computed == {9, 10} and sum(lengths.num_accepted) > 8


def test_blocks_of_the_prefix_cache_that_it_left_out_are_made_up_for() -> None:
    """A prompt is answered while no drafts are wanted. Behind its blocks, all drafts of the model itself are right."""
    loaded, _ = prepared("llama")
    engine = InProcessEngine(loaded, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=drafting("llama", "itself"))
    wanted = 0
    lengths = engine.manager.draft_lengths = FixedDraftLengths(MAX_DRAFTS, lambda _: wanted)
    prompt = make_prompts(VOCAB_SIZE)[5]
    first = engine.add(prompt, max_tokens=30, ignore_eos=True)
    engine.run()
    assert not sum(lengths.num_drafted)
    wanted = MAX_DRAFTS
    text = list(first.token_ids)
    for number in range(3):
        num_cached = engine.manager.num_cached_tokens
        engine.add(text[: 40 + number], max_tokens=20, ignore_eos=True)
        leader = engine.add([*text[:37], 5 + number, 6], max_tokens=20, ignore_eos=True)
        engine.add([*text[:37], 5 + number, 6], leader, max_tokens=20, ignore_eos=True)
        engine.run()
        assert engine.manager.num_cached_tokens > num_cached
    assert lengths.num_accepted == lengths.num_drafted and min(lengths.num_drafted) > 30
    drafter = engine.runner.drafter
    before, drafter._num_computed = drafter._num_computed, [0] * len(drafter._num_computed)
    engine.add(text[:40], max_tokens=2, ignore_eos=True)
    engine.step()
    assert drafter._num_computed != before and max(drafter._num_computed) >= 36, "what was made up for is made once"
    engine.run()


def test_only_rounds_are_time_of_drafts_and_prompts_are_counted_apart() -> None:
    loaded, _ = prepared("llama")
    engine = InProcessEngine(loaded, num_blocks=200, max_drafts=MAX_DRAFTS, loaded_drafter=drafting("llama", "itself"))
    engine.manager.draft_lengths = FixedDraftLengths(MAX_DRAFTS, lambda step_id: MAX_DRAFTS if step_id < 3 else 0)
    execute, results = engine.runner.execute, []

    def watched(plan: StepPlan) -> StepResult:
        results.append(execute(plan))
        return results[-1]

    engine.runner.execute = watched
    engine.add(make_prompts(VOCAB_SIZE)[5], max_tokens=20, ignore_eos=True)
    engine.run()
    prompt, first, second, *others = results
    assert prompt.draft_time_s == 0.0 and first.draft_prompt_time_s > second.draft_prompt_time_s
    assert min(first.draft_time_s, second.draft_time_s) > 0.0
    assert all(result.draft_time_s == 0.0 for result in others)
    assert median(result.draft_prompt_time_s for result in others) < 1e-3, "one may have waited for a processor"


def test_its_keys_and_values_count_as_the_models_own() -> None:
    loaded, _ = prepared("llama")
    drafter = drafting("llama", "itself")
    settings = settings_for(Path(loaded.model.name_or_path), SpeculativeConfig(), kv_cache_memory_bytes=10**6)
    alone, both = make_runner(loaded, settings), make_runner(loaded, settings, drafter)
    assert both.kv_bytes_per_token == 2 * alone.kv_bytes_per_token
    assert both.cache.num_blocks == alone.cache.num_blocks // 2
    assert both.cache_bytes <= 10**6


def test_a_draft_model_with_a_shorter_context_drafts_only_within_it(tmp_path: Path) -> None:
    loaded, _ = prepared("llama")
    make_model(tmp_path, "llama", {**SMALLER, "max_position_embeddings": 20})
    config = SpeculativeConfig("draft", str(tmp_path), MAX_DRAFTS)
    short = load_draft_model(loaded, settings_for(Path(loaded.model.name_or_path), config))
    prompt = make_prompts(VOCAB_SIZE)[4]
    found = []
    for max_drafts in (0, MAX_DRAFTS):
        engine = InProcessEngine(loaded, max_drafts=max_drafts, loaded_drafter=short if max_drafts else None)
        sequences = [engine.add(prompt[:length], max_tokens=30, ignore_eos=True) for length in (2, 3, 19)]
        sequences.append(engine.add(prompt * 10, max_tokens=30, ignore_eos=True))
        engine.run()
        found.append([sequence.output_token_ids for sequence in sequences])
    assert found[0] == found[1]


def write_tokenizer(path: Path, size: int, swapped: bool = False) -> None:
    tokens = {f"t{number}": number for number in range(size)}
    if swapped:
        tokens["t5"], tokens["t6"] = 6, 5
    (path / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": tokens, "merges": []}}))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    shutil.copytree(prepared("llama")[0].model.name_or_path, tmp_path / "target")
    return tmp_path / "target"


def test_another_vocabulary_is_refused(target: Path, tmp_path: Path) -> None:
    loaded = load(target)
    draft = tmp_path / "draft"
    make_model(draft, "llama", {**SMALLER, "vocab_size": VOCAB_SIZE + 8})
    settings = settings_for(target, SpeculativeConfig("draft", str(draft), MAX_DRAFTS))
    with pytest.raises(ConfigError, match="has 136 tokens, and the model has 128"):
        load_drafter(loaded, settings)
    write_tokenizer(target, 120)
    with pytest.raises(ConfigError, match="has 136 tokens, and the model has 128"):
        load_drafter(loaded, settings)
    write_tokenizer(draft, 120, swapped=True)
    with pytest.raises(ConfigError, match="another tokenizer"):
        load_drafter(loaded, settings)
    write_tokenizer(draft, 120)
    assert load_drafter(loaded, settings) is not None, "only the padding of the embedding differs"


@pytest.mark.parametrize("difference", [-8, 8])
def test_a_vocabulary_with_another_padding_changes_no_token(difference: int, target: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    make_model(draft, "llama", {**SMALLER, "vocab_size": VOCAB_SIZE + difference})
    write_tokenizer(target, 100)
    write_tokenizer(draft, 100)
    loaded, answers = prepared("llama")
    drafter = load_draft_model(loaded, settings_for(target, SpeculativeConfig("draft", str(draft), MAX_DRAFTS)))
    engine = InProcessEngine(loaded, max_drafts=MAX_DRAFTS, loaded_drafter=drafter)
    sequences = serve_with_joins_and_leaves(engine, make_prompts(VOCAB_SIZE))
    assert [sequence.output_token_ids for sequence in sequences] == answers


def test_files_that_cannot_be_served_are_refused(target: Path, tmp_path: Path) -> None:
    loaded, draft = load(target), tmp_path / "draft"
    settings = settings_for(target, SpeculativeConfig("draft", str(draft), MAX_DRAFTS))
    with pytest.raises(ConfigError, match="there is no draft model in"):
        load_drafter(loaded, settings)
    make_model(draft, "llama", SMALLER)
    weights = draft / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="--speculative draft: "):
        load_drafter(loaded, settings)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(ConfigError, match="--speculative draft: "):
        load_drafter(loaded, settings)


def test_weights_that_are_no_numbers_change_no_token(tmp_path: Path) -> None:
    loaded, answers = prepared("llama")
    make_model(tmp_path, "llama", SMALLER)
    weights = load_file(tmp_path / "model.safetensors")
    for index, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        weights["model.embed_tokens.weight"][3 + index] = value
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = SpeculativeConfig("draft", str(tmp_path), MAX_DRAFTS)
    drafter = load_draft_model(loaded, settings_for(Path(loaded.model.name_or_path), config))
    engine = InProcessEngine(loaded, max_drafts=MAX_DRAFTS, loaded_drafter=drafter)
    sequences = serve_with_joins_and_leaves(engine, make_prompts(VOCAB_SIZE))
    assert [sequence.output_token_ids for sequence in sequences] == answers
