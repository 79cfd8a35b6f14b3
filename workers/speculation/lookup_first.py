"""Use prompt lookup before another drafter: a sequence that repeats its text then gets drafts at almost no cost.

Each of the two has its own acceptance in each sequence. Lookup is asked in every step, so what it finds is compared
with the tokens that follow, also where the other one's drafts were verified. The other one is asked where lookup finds
nothing or has been right less often; and while it is mostly wrong itself, only now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from servekit.protocol.messages import StepPlan
from workers.batch import Batch
from workers.speculation.drafter import Drafter, DraftRequest, LoadedDrafter, Target
from workers.speculation.ngram import NgramDrafter

DECAY = 7 / 8  # factor for the weight of earlier drafts in an acceptance
FIRST_ACCEPTANCE, FIRST_WEIGHT = 0.5, 4.0  # until drafts were verified
# The other drafter takes time. Below this acceptance its drafts seldom pay for it, and it is asked in one of so many
# steps in which lookup finds nothing.
MIN_ACCEPTANCE = 1 / 4
ASK_EVERY = 16


@dataclass(slots=True)
class Acceptance:
    """How likely a draft is right if all before it are: a mean in which old drafts count less and less."""

    mean: float = FIRST_ACCEPTANCE
    weight: float = FIRST_WEIGHT

    def add(self, drafts: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
        """Compare drafts with the tokens that came in their places. Drafts after a wrong one are ignored."""
        num_right = num_compared = 0
        for draft, token_id in zip(drafts, token_ids, strict=False):
            num_compared += 1
            if draft != token_id:
                break
            num_right += 1
        if num_compared:
            weight = DECAY * self.weight
            self.mean = (weight * self.mean + num_right) / (weight + num_compared)
            self.weight = weight + num_compared


@dataclass(slots=True)
class _Progress:
    """What is known of the drafters in one sequence."""

    lookup: Acceptance
    other: Acceptance
    num_left_out: int = 0  # steps since the other one's last drafts in which it could have been used
    start: int = -1  # the position of the drafts that were made last
    of_lookup: tuple[int, ...] = ()
    of_other: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LookupFirst:
    """A loaded drafter that is used after lookup."""

    other: LoadedDrafter

    @property
    def bytes_per_block(self) -> int:
        """The bytes of the other drafter's keys and values in each block."""
        return self.other.bytes_per_block

    def make_drafter(self, target: Target) -> LookupFirstDrafter:
        """Return the drafter. Raises ConfigError if the other one has too little memory."""
        return LookupFirstDrafter(self.other.make_drafter(target))


@dataclass(slots=True)
class _Asked:
    """The drafts that were found and requested in one step."""

    found: list[tuple[int, ...]] = field(default_factory=list)  # by lookup, for each request
    of_other: list[DraftRequest] = field(default_factory=list)


class LookupFirstDrafter(Drafter):
    """Uses lookup first, and then another drafter for the sequences that want better drafts."""

    def __init__(self, other: Drafter) -> None:
        self.other = other
        self.hidden_states = other.hidden_states
        self.is_same_on_all_ranks = other.is_same_on_all_ranks
        self._lookup = NgramDrafter()
        self._asked = _Asked()
        self._progress: dict[int, _Progress] = {}  # by slot
        # Acceptances over all sequences: a new sequence is expected to be like the others.
        self._means = _Progress(Acceptance(), Acceptance())

    def begin(self, plan: StepPlan) -> None:
        for assignment in plan.slot_assignments:
            lookup, other = self._means.lookup.mean, self._means.other.mean
            self._progress[assignment.slot] = _Progress(Acceptance(lookup), Acceptance(other))
        self._lookup.begin(plan)
        self.other.begin(plan)

    def commit(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        progress = self._progress[slot]
        if progress.start == start:
            for known in (progress, self._means):
                known.lookup.add(progress.of_lookup, token_ids)
                known.other.add(progress.of_other, token_ids)
        progress.start = -1
        self._lookup.commit(slot, start, token_ids)
        self.other.commit(slot, start, token_ids)

    def prepare(self, requests: list[DraftRequest]) -> None:
        found = self._lookup.propose(requests)
        wanted = [request for request, drafts in zip(requests, found, strict=True) if self._asks(request, drafts)]
        self._asked = _Asked(found, wanted)
        if wanted:
            self.other.prepare(wanted)

    def _asks(self, request: DraftRequest, found: tuple[int, ...]) -> bool:
        """Whether the other drafter is used as well, if lookup has found these drafts."""
        progress = self._progress[request.slot]
        if found and progress.lookup.mean >= progress.other.mean:
            return False
        progress.num_left_out += 1
        return progress.other.mean >= MIN_ACCEPTANCE or progress.num_left_out >= ASK_EVERY

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        asked = self._asked
        proposed = self.other.propose(asked.of_other) if asked.of_other else []
        of_others = {request.slot: drafts for request, drafts in zip(asked.of_other, proposed, strict=True)}
        drafts = []
        for request, found in zip(requests, asked.found, strict=True):
            progress, of_other = self._progress[request.slot], of_others.get(request.slot, ())
            progress.start, progress.of_lookup, progress.of_other = request.num_tokens, found, of_other
            # The other drafter makes none while it catches up. It is used again in the next step.
            if of_other:
                progress.num_left_out = 0
            drafts.append(of_other or found)
        return drafts

    def observe(self, batch: Batch, hidden_states: Tensor) -> None:
        self.other.observe(batch, hidden_states)

    def compute_prompts(self) -> None:
        self.other.compute_prompts()
