"""Define the interface of drafters, which guess the next tokens of sequences; the model verifies the guesses.

Guesses change only the speed. The tokens are always those that the model chooses without drafts, so a drafter may be
wrong, or make fewer drafts than requested, or none. A drafter must be fast, because it runs between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from servekit.protocol.messages import LoadModel, StepPlan
from workers.attention.interface import AttentionBackend
from workers.batch import Batch, SlotTable
from workers.kv_cache.pages import KVCache
from workers.loading.model_manager import LoadedModel


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A sequence that wants up to `max_drafts` guesses at the tokens after its newest one.

    Its tokens are the first `num_tokens` cells of its row of the token table. The newest one, at position
    `num_tokens - 1`, is not computed yet: it is the first token of the chunk that will verify the drafts. The slot's
    block table reaches up to position `num_tokens - 1 + max_drafts`.
    """

    slot: int
    num_tokens: int
    max_drafts: int  # at least 1


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Which hidden states of the model a drafter reads.

    By default they are what the output head reads, [num_sampled, hidden_size], one row for each entry of
    `Batch.sampling`: the row with `position` p is the state of position p - 1, from which the token at p was chosen.
    """

    of_all_tokens: bool = False  # [num_tokens, hidden_size], one row for each token of the step
    # Instead, what enters the layers of these numbers, side by side [..., len(layers) * hidden_size]. The number of
    # layers stands for what the last one returns, before the last norm.
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """The model that drafts are made for, and what a drafter may read of its runner. A drafter changes none of it."""

    loaded: LoadedModel
    settings: LoadModel
    attention: AttentionBackend
    cache: KVCache  # a drafter's own keys and values can be in blocks with the same numbers
    table: SlotTable  # tokens, block tables and sampling parameters by slot


class LoadedDrafter(Protocol):
    """A drafter's weights on the device, before anything has memory for keys and values."""

    @property
    def bytes_per_block(self) -> int:
        """The bytes of the drafter's own keys and values in each block; 0 if it keeps none.

        The number of blocks is chosen so that memory holds both models' keys and values.
        """

    def make_drafter(self, target: Target) -> Drafter:
        """Return the drafter, with memory for its keys and values. Raises ConfigError if there is too little.

        It may be called again, with other blocks, when the first drafter is no longer used.
        """


@dataclass(frozen=True, slots=True)
class WithoutWeights:
    """A drafter that needs nothing on the device."""

    make: Callable[[], Drafter]
    bytes_per_block: int = 0

    def make_drafter(self, target: Target) -> Drafter:
        """Return the drafter."""
        return self.make()


class Drafter:
    """Guesses tokens. The runner calls it in each step, also in steps in which no sequence wants drafts.

    The order is: `begin`; `commit` for each sequence of which more became known; `prepare` and `propose`, if a sequence
    wants drafts; then the model's forward pass and the choice of tokens; `observe`, if the drafter reads hidden states;
    and `compute_prompts`. Tokens of steps without drafts are committed when the sequence wants drafts again. So there
    may be several steps between a step and the `commit` of its tokens.

    Subclasses override what they need; the other methods do nothing.
    """

    # Which hidden states `observe` gets; None: it is not called. Otherwise a step is neither a CUDA graph nor one call
    # into C, because these do not keep them.
    hidden_states: HiddenStates | None = None
    # Whether all ranks of a tensor-parallel group propose the same drafts by themselves. If not, they use rank 0's.
    is_same_on_all_ranks: bool = False

    def begin(self, plan: StepPlan) -> None:
        """Prepare for a step. The plan is the manager's: it names slots that are assigned anew, and blocks to copy.

        A drafter that keeps something for each block copies it for `plan.copies`, as the runner copies keys and values
        before this. What it keeps for a slot is void if the slot is assigned anew. The token table has the plan's
        known tokens already, and the block tables its new blocks.
        """

    def commit(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        """Take tokens of a sequence that have become known on the host: prompt tokens, or tokens of its answer.

        They are at positions from `start` on. What was committed for these positions or for later ones is void: a
        sequence may go back by a few tokens. There may be a gap before `start` whose tokens the host does not know.
        """

    def prepare(self, requests: list[DraftRequest]) -> None:
        """Compute what was not computed while no drafts were wanted. This time does not count as time of drafts."""

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        """Return up to `max_drafts` token ids for each request; an empty tuple means no guess.

        Drafts from an unknown id on are dropped, and so are drafts beyond `max_drafts`.
        """
        return [()] * len(requests)

    def observe(self, batch: Batch, hidden_states: Tensor) -> None:
        """Read what the model has computed: the batch with its drafts, when the chosen tokens are in the token table.

        The batch names the slot, position and blocks of each token, so a drafter with keys and values of its own can
        compute them here for the same tokens. Some tokens are drafts that the model rejects: their positions are
        computed again by a later step, before anything reads them. If a step is computed in parts, because it does not
        fit into memory, this is called for each part, and for some parts twice. Its time counts as the model's.
        """

    def compute_prompts(self) -> None:
        """Compute what the drafter needs of the prompts in this step's chunks, at the end of the step.

        If a step is computed in parts, this is called after each part. Its time does not count as time of drafts.
        """
