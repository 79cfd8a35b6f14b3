"""Choose how many drafts a step verifies for each sequence.

If each draft is accepted with probability a once all before it are, a step that verifies k drafts of a sequence gives
1 + a + a² + … + aᵏ expected tokens for it, and computes 1 + k positions. The best numbers of drafts give the most
expected tokens per second: the sum over all sequences of the step, divided by the time of a step with so many
positions. Both are measured: a for each sequence, the time by the number of positions.

So no setting says where speculation pays. Where more positions take no longer, because the step waits for memory,
drafts are free; where each one adds its share, because the step waits for arithmetic, only the likeliest are worth it.

Expected tokens: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, section 3.1.
Lengths that maximise the rate of a whole batch: Liu et al., "Optimizing Speculative Decoding for Serving Large Language
Models Using Goodput", 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step_time import PositionTimes

NUM_LEVELS = 16  # of acceptance, which are distinguished
FIRST_ACCEPTANCE = 0.5  # until a draft was verified
FIRST_WEIGHT = 4.0  # of that, in drafts
DECAY = 7 / 8  # the weight of a span in its sequence's acceptance, once another one has followed
MEAN_DECAY = 63 / 64  # the same for the mean of all sequences
# In one step of so many, every sequence verifies one draft more than pays: its text may have become repetitive, and
# more positions may take less time than they once did. If such a step takes twice as long, this costs 1.6 %. All do it
# in the same step, because a step of one more position may take as long as one of twice as many. The number is a prime:
# otherwise it could always meet the same sequences, where several take turns in the steps of a pipeline.
EXPLORE_EVERY = 61


def level_of(acceptance: float) -> int:
    """The level of an acceptance between 0 and 1."""
    return min(NUM_LEVELS - 1, int(acceptance * NUM_LEVELS))


class DraftLengths:
    """Learns how many drafts are accepted and what they cost, and chooses the number of drafts. It writes `acceptance`.

    `num_drafted` and `num_accepted` count drafts by their position in the span, the first one first.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.times = PositionTimes()
        self.mean_acceptance = FIRST_ACCEPTANCE
        self.num_drafted = [0] * max_drafts
        self.num_accepted = [0] * max_drafts

    @property
    def num_spans(self) -> int:
        """How many spans verified drafts. Each gave one token, and one more for each accepted draft."""
        return self.num_drafted[0] if self.num_drafted else 0

    def admit(self, sequence: Sequence, max_drafts: int | None) -> None:
        """Note a new sequence, for which its client allows so many drafts. It is expected to be like the others."""
        sequence.max_drafts = self.max_drafts if max_drafts is None else min(self.max_drafts, max_drafts)
        sequence.acceptance, sequence.acceptance_weight = self.mean_acceptance, FIRST_WEIGHT

    def choose(self, sequences: Iterable[Sequence], step_id: int) -> list[int]:
        """Return the number of drafts for each level of acceptance, in a step that decodes these sequences.

        For any number of positions, the best choice takes the drafts that are likeliest to be accepted. So it is enough
        to add drafts in this order, and to keep the number at which the rate was highest. Sequences of one level get
        the same number.
        """
        num_sequences = 0
        num_drafting = [0] * NUM_LEVELS  # sequences of each level
        for sequence in sequences:
            num_sequences += 1
            if sequence.max_drafts:
                num_drafting[level_of(sequence.acceptance)] += 1
        likeliest = sorted(
            (-(((level + 0.5) / NUM_LEVELS) ** position), level, position)
            for level in range(1, NUM_LEVELS)  # of the lowest level, nothing is expected
            if num_drafting[level]
            for position in range(1, self.max_drafts + 1)
        )
        num_positions, num_tokens = num_sequences, float(num_sequences)
        best_rate, num_best = num_tokens / self.times.seconds_of(num_positions), 0
        for number, (unlikelihood, level, _) in enumerate(likeliest, start=1):
            num_positions += num_drafting[level]
            num_tokens -= unlikelihood * num_drafting[level]
            rate = num_tokens / self.times.seconds_of(num_positions)
            if rate > best_rate:
                best_rate, num_best = rate, number
        num_drafts = [0] * NUM_LEVELS
        for _, level, position in likeliest[:num_best]:
            num_drafts[level] = position  # the positions of a level come in ascending order
        if step_id % EXPLORE_EVERY == 0:
            return [min(each + 1, self.max_drafts) for each in num_drafts]
        return num_drafts

    def record(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn from the verified drafts of a sequence."""
        for position in range(num_drafts):
            self.num_drafted[position] += 1
            self.num_accepted[position] += position < num_accepted
        # Behind a rejected draft, nothing is learned: those would have been drafts of another text.
        num_tries = min(num_accepted + 1, num_drafts)
        weight = DECAY * sequence.acceptance_weight
        sequence.acceptance = (weight * sequence.acceptance + num_accepted) / (weight + num_tries)
        sequence.acceptance_weight = weight + num_tries
        self.mean_acceptance += (1.0 - MEAN_DECAY) * (sequence.acceptance - self.mean_acceptance)
