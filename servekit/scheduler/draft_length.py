"""Choose how many drafts a step verifies for each sequence.

If each draft is accepted with probability a once all before it are, a step that verifies k drafts of a sequence gives
1 + a + a² + … + aᵏ expected tokens for it, and computes 1 + k positions. The best numbers of drafts give the most
expected tokens per second: the sum over all sequences of the step, divided by the time that the drafter takes for so
many drafts and the model for so many positions. All of this is measured: a for each sequence, the model's time by the
number of positions, and the drafter's by the number of sequences for which it makes one more draft.

A sequence also waits for the steps that are in flight when it arrives, and for the step of its prompt. Drafts make
all steps longer, so they gain less when answers are short: 1 / (1 / t + w) tokens per step, where t is the expected
number of tokens of one step, and w the number of steps waited for each token. A draft model also computes the prompt
of each sequence that gets drafts. Each token of an answer has its share of that time.

So no setting is needed for where speculation pays off. If more positions take no more time, because the step is limited
by memory, drafts are free. If each position adds time, because the step is limited by arithmetic, only the likeliest
drafts are worth it.

These times are estimates from few steps, which vary. So drafts begin only where they pay by more than the error of
these estimates. And there is an account: `debt` is the time that drafts have lost and not yet regained, in steps
without drafts. A step is charged if what it lost is added, and the debt is paid when it is 0. It limits trials, and it
ends drafts that were expected to pay off and do not.

Expected tokens: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, section 3.1.
Lengths that maximise the rate of a whole batch: Liu et al., "Optimizing Speculative Decoding for Serving Large Language
Models Using Goodput", 2024, section 4.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate, islice, pairwise
from math import exp, hypot, inf

from servekit.scheduler.sequence import Sequence
from servekit.scheduler.step import Step
from servekit.scheduler.step_time import PositionTimes

NUM_LEVELS = 16  # number of levels of acceptance
FIRST_ACCEPTANCE = 0.5  # acceptance until a draft was verified
FIRST_WEIGHT = 4.0  # weight of FIRST_ACCEPTANCE, in drafts
DECAY = 7 / 8  # the weight of a span in its sequence's acceptance, once another one has followed
MEAN_DECAY = 31 / 32  # the same for the acceptance of all drafts, which is expected of a new sequence
# In two of this many steps (a trial), the first sequences verify one draft more than the best number: their texts may
# have become repetitive, or positions may have become faster. If the trial pays off, one more draft is tried at once,
# so that the number grows within a few steps: the expected time of longer steps is only an upper bound (`choose`). A
# trial has two steps, because in the first one a draft model computes the tokens that it has left out; only the second
# one shows the time of a draft. It has few sequences, because under high load each position takes time, and always the
# same ones, so that a draft model has few tokens to compute. The number is a prime: in a pipeline, sequences take turns
# in the steps, and another number could always select the same ones. Halfway between two trials, one step has no
# drafts, so that the time without drafts stays known.
EXPLORE_EVERY = 61
MAX_EXPLORING = 4
# While drafts do not pay off and most drafts of a trial are accepted, the trial continues for up to this many steps.
# Two steps say too little about texts that have become predictable: a sequence with many rejected drafts would have to
# be tried again, and the debt of a trial puts off the next one by hundreds of steps.
MIN_TRIAL_STEPS, MAX_TRIAL_STEPS = 2, 16
# While drafts do not pay off, the best number is computed only in one of this many steps: computing it takes as long as
# the rest of a plan for few sequences.
CONSIDER_EVERY = 8
# The first trials come whenever the number is computed, and only the last of them is charged: code that runs for the
# first time takes longer, and a server with few requests should learn early that drafts pay off.
NUM_FIRST_TRIALS = 3
# Drafts begin only if they are expected to be faster by this factor. Beginning and ending again and again costs the
# most, because each time a draft model has to compute the tokens that it has left out.
MIN_GAIN_TO_BEGIN = 1.2
# Times are means of steps that vary. The largest of several noisy estimates is biased upwards, the more so the more
# steps vary. So drafts begin only if they are also expected to be faster by this many standard errors of the measured
# times, and they end only if they are expected to be slower by as many.
NUM_ERRORS = 0.5
# What a drafter takes for prompts and missing tokens is added to the debt over several steps, with each one this share
# of the rest. It is much at once, and is regained over a whole answer: all at once, it would end drafts that regain it.
PROMPT_SHARE = 1 / 16
PROMPT_DECAY = 31 / 32  # of the weight of earlier steps with drafts in what a drafter takes for a sequence
# The debt falls by this share with each step, and trials wait until it is 0. So drafts that do not pay off take at most
# this share of the time, as long as no step reaches MAX_COST.
PAID_SHARE = 1 / 64
# Drafts end when the debt is larger than this. They do not begin while it is larger than half of this, which is the
# most that a trial of two steps adds.
MAX_DEBT = 16.0
# The drafts of one step add at most this to the debt. In a longer step something was compiled.
MAX_COST = 4.0
# The debt is at most this. A draft model's prompt may take as long as hundreds of steps, and without a bound, one of
# them would stop the trials of all others for 64 times as many. With it, there are no trials for 64 · 64 steps, under a
# minute if a step takes 10 ms, and some hundred in which the prompt is charged. It is four times what ends drafts:
# those that end with most of their prompts not charged yet still pay for these.
LARGEST_DEBT = 4 * MAX_DEBT

# While a step with drafts that is expected to take at least this long is in flight, the next step is not planned. So
# the next step has the requests that arrive meanwhile. In return the device idles until it is sent: mostly 0.3 ms.
MIN_AWAITED_S = 8e-3


def level_of(acceptance: float) -> int:
    """The level of an acceptance between 0 and 1."""
    return min(NUM_LEVELS - 1, int(acceptance * NUM_LEVELS))


def _tokens_per_step(num_tokens: float, waited_per_token: float) -> float:
    """The tokens of a sequence by all its steps, if it gets `num_tokens` in each one for which it does not wait."""
    return 1.0 / (1.0 / num_tokens + waited_per_token)


class DraftLengths:
    """Learns how many drafts are accepted and what they cost, and chooses the number of drafts. It writes `acceptance`.

    `num_drafted` and `num_accepted` count drafts by their position in the span, the first one first.
    """

    def __init__(self, max_drafts: int, max_steps_in_flight: int = 2) -> None:
        self.max_drafts = max_drafts
        # A sequence waits at its arrival for the steps that are in flight, and then for the one that computes its
        # prompt. Drafts make these longer. For short answers, that is a large part of their time.
        self._steps_waited = 1.0 + max_steps_in_flight
        self.times = PositionTimes()  # times of steps by positions, without the drafter's time
        # Of a round of the drafter, which makes one draft for each of so many sequences.
        self.round_times = PositionTimes(unknown_s=0.0, min_s=0.0)
        self.is_drafting = False  # whether the newest step that has its result had drafts
        # The most sequences of a step next to which drafts were expected to pay since they began; 0 while they do not.
        # Next to more of them, they have to begin anew: load may rise within a step.
        self.num_paying = 0
        # The first step of the last trial, and the one after its last.
        self.explored_id, self.explored_stop = -EXPLORE_EVERY, -EXPLORE_EVERY
        self.explored_length = max_drafts + 1  # drafts of a sequence in it, at most
        self.num_explored = 0  # trials, counted up to NUM_FIRST_TRIALS
        # What the drafter took for prompts and missing tokens, and how many sequences got their first drafts with that:
        # sums in which old steps lose weight.
        self.prompt_s, self.num_begun = 0.0, 0.0
        self.num_beginning = 0  # sequences that get their first drafts in the step that is being settled
        self.prompt_debt = 0.0  # what the drafter took for prompts and is not in `debt` yet, in steps
        self.debt = 0.0  # what drafts cost more than they gained, less PAID_SHARE of the steps since; in steps
        self.mean_acceptance, self.mean_weight = FIRST_ACCEPTANCE, FIRST_WEIGHT
        self.num_drafted = [0] * max_drafts
        self.num_accepted = [0] * max_drafts

    @property
    def is_worthwhile(self) -> bool:
        """Whether drafts were expected to pay in the newest step that was planned."""
        return self.num_paying > 0

    @property
    def num_spans(self) -> int:
        """How many spans verified drafts. Each gave one token, and one more for each accepted draft."""
        return self.num_drafted[0] if self.num_drafted else 0

    def admit(self, sequence: Sequence, max_drafts: int | None) -> None:
        """Note a new sequence, for which its client allows so many drafts. It is expected to be like the others."""
        sequence.max_drafts = self.max_drafts if max_drafts is None else min(self.max_drafts, max_drafts)
        sequence.acceptance, sequence.acceptance_weight = self.mean_acceptance, FIRST_WEIGHT

    def observe(self, step: Step, step_time_s: float, position_s: float, mean_answer_tokens: float = inf) -> None:
        """Learn from a step that has its result. The other arguments are those of `choose`."""
        assert step.result is not None
        result, num_decodes = step.result, step.num_decodes
        # A sequence that ended in the step before this one has no drafts, so its step does not show what they take.
        planned = [number for index, number in step.num_drafts.items() if step.is_running(index)]
        num_verified, rounds_s = sum(result.num_drafts), min(step_time_s, result.draft_time_s)
        prompt_s = min(step_time_s - rounds_s, result.draft_prompt_time_s)
        if not step.num_prefill_tokens:
            self.times.observe(num_decodes + num_verified, step_time_s - rounds_s - prompt_s)
        if planned and self.is_drafting:
            num_rounds = max(planned)
            self.round_times.observe(-(-sum(planned) // num_rounds), rounds_s / num_rounds)
        self.is_drafting = bool(planned)
        num_accepted = sum(map(step.num_accepted, step.num_drafts))
        is_trial = self.explored_id <= step.step_id < self.explored_stop and not self.is_worthwhile
        if is_trial and 2 * num_accepted >= num_verified > 0:
            longest = self.explored_id + MAX_TRIAL_STEPS
            self.explored_stop = min(longest, max(self.explored_stop, step.step_id + 1 + MIN_TRIAL_STEPS))
        cost = 0.0
        if (planned or self.is_worthwhile) and self.num_explored >= NUM_FIRST_TRIALS:
            # What the step took more than its tokens would have taken without drafts. A sequence that waits takes part
            # in no step, so an accepted draft saves less than its share of a step's decodes.
            num_plain = max(1, num_decodes)  # a step of prompts has none
            plain_s = self.times.seconds_of(num_plain, position_s)
            longer_s = self.times.seconds_of(num_plain + num_verified, position_s) - plain_s
            waited_per_token = self._waited_per_token(num_plain, mean_answer_tokens)
            cost = (rounds_s + longer_s) / plain_s - num_accepted / (num_plain * (1.0 + waited_per_token))
            self.prompt_debt += prompt_s / plain_s
            if planned:
                self.prompt_s = PROMPT_DECAY * self.prompt_s + prompt_s
                self.num_begun = PROMPT_DECAY * self.num_begun + self.num_beginning
        self.num_beginning = 0
        due = PROMPT_SHARE * self.prompt_debt
        self.prompt_debt -= due
        self.debt = min(LARGEST_DEBT, max(0.0, self.debt + min(cost, MAX_COST) + due - PAID_SHARE))

    def choose(
        self,
        sequences: Collection[Sequence],
        step_id: int,
        position_s: float,
        num_prefill_tokens: int = 0,
        mean_answer_tokens: float = inf,
    ) -> list[int]:
        """Return the number of drafts of each sequence, in a step that decodes these; empty if there are none.

        In a step of more positions than any without prefill had, each of them is expected to take `position_s` more.
        Such steps may never come without prefill, and only those show what positions take. A step with prefill is
        expected to take as much longer with drafts as one without prefill that has as many positions.

        For any number of positions, the best choice takes the drafts that are likeliest to be accepted. So it is enough
        to add drafts in this order, and to keep the number at which the rate was highest. Sequences of one level of
        acceptance get the same number.
        """
        assert sequences, "a step without decodes has no drafts"
        is_exploring, is_considered = step_id < self.explored_stop, step_id % CONSIDER_EVERY == 0
        is_turn = step_id % EXPLORE_EVERY == 0 or (is_considered and self.num_explored < NUM_FIRST_TRIALS)
        if not (self.is_worthwhile or is_exploring or is_turn or is_considered):
            return []
        num_drafting = [0] * NUM_LEVELS  # sequences of each level
        is_known = self.times.classes and self.round_times.classes  # before both times are, only exploring is safe
        for sequence in sequences if is_known else ():
            if sequence.max_drafts:
                num_drafting[level_of(sequence.acceptance)] += 1
        num_sequences = len(sequences)
        waited_per_token = self._waited_per_token(num_sequences, mean_answer_tokens)
        prompt_s = self.prompt_s / max(1.0, self.num_begun) / mean_answer_tokens
        chosen = self._choose_by_level(
            num_sequences, num_drafting, position_s, num_prefill_tokens, waited_per_token, prompt_s
        )
        if self.debt > (MAX_DEBT if self.is_worthwhile else MAX_DEBT / 2):
            chosen = [0] * NUM_LEVELS
        longest = max(chosen)
        self.num_paying = max(self.num_paying, num_sequences) if longest else 0
        has_paid = self.explored_length <= longest < self.max_drafts and step_id - self.explored_id >= MIN_TRIAL_STEPS
        if longest and not is_exploring and step_id % EXPLORE_EVERY == EXPLORE_EVERY // 2:
            return []
        if has_paid or (is_turn and not is_exploring and not self.debt):
            self.explored_id, self.explored_stop = step_id, step_id + MIN_TRIAL_STEPS
            self.explored_length, is_exploring = longest + 1, True
            self.num_explored = min(NUM_FIRST_TRIALS, self.num_explored + 1)
        if not (longest or is_exploring):
            return []
        num_drafts = [chosen[level_of(sequence.acceptance)] for sequence in sequences]
        if is_exploring:
            drafting = (index for index, sequence in enumerate(sequences) if sequence.max_drafts)
            for index in islice(drafting, MAX_EXPLORING):
                num_drafts[index] += 1
        return num_drafts

    def is_awaited(self, step: Step, position_s: float) -> bool:
        """Return whether the next step should be planned only when this one, the newest, has its result.

        Drafts make steps longer. With another step in flight, a request that arrives would wait for two of them. A step
        of one sequence is not awaited: mostly there is one client then, which sends no request before its answer ends.
        """
        if not (self.is_worthwhile and step.num_drafts) or step.num_decodes < 2:
            return False
        num_drafts, num_rounds = sum(step.num_drafts.values()), max(step.num_drafts.values())
        model_s = self.times.seconds_of(step.num_decodes + num_drafts, position_s)
        rounds_s = num_rounds * self.round_times.seconds_of(-(-num_drafts // num_rounds))
        return model_s + rounds_s >= MIN_AWAITED_S

    def _waited_per_token(self, num_sequences: int, mean_answer_tokens: float) -> float:
        """The steps that a sequence waits for each of its tokens, because it waits at its arrival where others run."""
        is_beside_others = 1.0 - 1.0 / num_sequences  # one alone meets no step that is in flight
        return is_beside_others * self._steps_waited / mean_answer_tokens

    def _choose_by_level(
        self,
        num_sequences: int,
        num_drafting: list[int],
        position_s: float,
        num_prefill_tokens: int,
        waited_per_token: float,
        prompt_s: float,
    ) -> list[int]:
        """Return the best number of drafts for each level of acceptance; `num_drafting` has the sequences of each.

        `waited_per_token`: see `_waited_per_token`. `prompt_s` is what the drafter takes for prompts, for each token of
        an answer.
        """
        gains = sorted(
            (-gain, level, position)
            for level in range(1, NUM_LEVELS)  # no draft of the lowest level is expected to be accepted
            if num_drafting[level]
            for position, gain in enumerate(self._gains_of(level, waited_per_token), start=1)
        )
        num_drafts, num_rounds = 0, 0
        num_tokens = _tokens_per_step(1.0, waited_per_token) * num_sequences
        plain_s = self.times.seconds_of(num_sequences, position_s)
        plain_rate, plain_error = num_tokens / plain_s, self.times.error_of(num_sequences)
        num_best, num_others = 0, num_sequences + num_prefill_tokens
        is_going_on = num_sequences <= self.num_paying
        best_rate = 0.0 if is_going_on else plain_rate * MIN_GAIN_TO_BEGIN
        without_s = self.times.seconds_of(num_others, position_s)
        for number, (loss, level, position) in enumerate(gains, start=1):
            num_drafts += num_drafting[level]
            num_rounds = max(num_rounds, position)
            num_tokens -= loss * num_drafting[level]
            draft_time_s = num_rounds * self.round_times.seconds_of(-(-num_drafts // num_rounds))
            longer_s = self.times.seconds_of(num_others + num_drafts, position_s) - without_s
            rate = num_tokens / (plain_s + longer_s + draft_time_s + prompt_s * num_tokens)
            if rate > best_rate:
                error = NUM_ERRORS * hypot(plain_error, self.times.error_of(num_sequences + num_drafts))
                if rate * exp(error if is_going_on else -error) > plain_rate:
                    best_rate, num_best = rate, number
        chosen = [0] * NUM_LEVELS
        for _, level, position in gains[:num_best]:
            chosen[level] = position  # the positions of a level come in ascending order
        return chosen

    def _gains_of(self, level: int, waited_per_token: float) -> list[float]:
        """The tokens per step that each further draft of a sequence adds; less with each one."""
        likelihood = (level + 0.5) / NUM_LEVELS
        expected = accumulate(likelihood**position for position in range(self.max_drafts + 1))
        tokens = [_tokens_per_step(each, waited_per_token) for each in expected]
        return [longer - shorter for shorter, longer in pairwise(tokens)]

    def record(
        self, sequence: Sequence, num_planned: int, num_verified: int, num_accepted: int, ends: bool = False
    ) -> None:
        """Learn from the drafts of a sequence. Call it before `observe`.

        A draft that was planned and not made counts as rejected, because planning it was useless. But a worker leaves
        out those from the end of the answer on. `ends`: whether the token after the accepted drafts ends it. Then
        only those that were made can have been rejected.
        """
        if ends:
            num_planned = num_verified
        for position in range(num_verified):
            self.num_drafted[position] += 1
            self.num_accepted[position] += position < num_accepted
        if not num_verified and not self.is_drafting:
            return  # a draft model makes up for what it has not computed
        # After a rejected draft, nothing is learned: those would have been drafts of another text.
        num_tries = min(num_accepted + 1, num_planned)
        self.num_beginning += sequence.acceptance_weight == FIRST_WEIGHT  # which changes with the first drafts
        weight = DECAY * sequence.acceptance_weight
        sequence.acceptance = (weight * sequence.acceptance + num_accepted) / (weight + num_tries)
        sequence.acceptance_weight = weight + num_tries
        weight = MEAN_DECAY * self.mean_weight
        self.mean_acceptance = (weight * self.mean_acceptance + num_accepted) / (weight + num_tries)
        self.mean_weight = weight + num_tries
