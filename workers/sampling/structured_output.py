"""Constrain answers to grammars: which tokens may come next, for the rows whose requests have a grammar.

The masks come from the mask process (workers/grammar/). A step sends the process the tokens that it has not received.
On a CPU that is done as soon as they are sampled, so that the process works while the worker prepares the next step. On
a GPU it works while the device computes the forward pass. A row whose mask is late is deferred: it samples no token in
this step, and the manager plans its position again. So a grammar delays the other rows by a share of a step at most.

A matcher's state is derived from the token table like everything else. The tokens to send are that of the step before
or, after a preemption and for a new process, the whole answer so far.

A sequence with drafts has a row for each, and needs a mask for each. A row after a draft that the grammar forbids has
none, as does one whose mask is late. There the sequence's span ends, and no row before it is deferred for that.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from servekit.protocol.messages import MAX_FAILURE_CHARACTERS, SlotAssignment
from workers.batch import SamplingRow, SlotTable
from workers.device.transfer import DeviceEvent, to_device, to_host
from workers.grammar.budgets import Lateness, SlowTenants
from workers.grammar.client import Lost, MaskProcess, wait_for_any
from workers.grammar.messages import Ask, AskMasks, Begin, Mask, num_common

INFINITY = float("inf")
# A step waits for masks for MIN_WAIT_S, or for WAIT_SHARE of the time until its forward pass ended, if that is longer.
# A grammar that is made to be slow can delay each step of others by this time. Without the wait, a mask that is a
# little late would delay its row by a whole step. If processors are scarce, the mask process gets one during the wait.
MIN_WAIT_S = 0.002
WAIT_SHARE = 0.25
ALONE_SHARE = 1.0  # of a step in which all rows wait; without the wait, such steps would take the mask process's time
# What the logits of eight tokens may be at most, for each byte of a mask.
_LIMITS_OF_BYTES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), INFINITY, -INFINITY
).astype(np.float32)
LIMITS_AT_ONCE = 2**16  # which stay in a processor's cache
MAX_SUSPECTS = 1024  # groups that were worked on when the mask process was killed; the oldest are removed


@dataclass(slots=True, eq=False)
class _GrammarState:
    """One sequence's place in its grammar."""

    assignment: SlotAssignment
    number: int  # the sequence's number in messages to the mask process
    process: MaskProcess
    incarnation: int = 0  # of the mask process that has the sequence; 0: none
    num_sent: int = 0  # tokens of the answer that were sent to this process
    # The mask of the token after these was asked for, once, and a second time if there are drafts that the process did
    # not get with the first ask.
    first_ask: int = 1  # earlier ones were about earlier tokens
    last_ask: int = 0
    is_asked: bool = False  # the last ask is not answered
    is_ready: bool = False  # the mask of the next token is in the shared memory
    asked_drafts: tuple[int, ...] = ()
    ready_drafts: tuple[int, ...] = ()  # the masks after these drafts are in the shared memory, too
    forced: tuple[int, ...] = ()  # known tokens that the grammar forces after those that were sent
    num_planned: int = 0  # drafts that the last plan allowed
    # The row was deferred with this many tokens in its answer. Until it is planned again, rows that a plan ahead has
    # after it have no valid token.
    deferred_at: int | None = None
    error: str = ""  # the reason why there is no further mask

    def move_to(self, process: MaskProcess) -> None:
        """Let another process follow the sequence, from its first token on."""
        if self.process is not process:
            self.process, self.incarnation = process, 0
            self.first_ask = self.last_ask + 1

    def ask(self, token_ids: tuple[int, ...], drafts: tuple[int, ...]) -> Ask:
        """Return the message that asks for the masks after tokens that the process lacks, and after drafts."""
        self.last_ask += 1
        self.is_asked, self.asked_drafts, self.ready_drafts = True, drafts, ()
        self.num_sent += len(token_ids)
        if self.forced:
            is_as_forced = self.forced[: len(token_ids)] == token_ids
            self.forced = self.forced[len(token_ids) :] if is_as_forced else ()
        return Ask(self.number, token_ids, self.last_ask, drafts, self.num_planned)

    @property
    def has_process(self) -> bool:
        """Whether the process that has the sequence is still there, as far as is known."""
        return self.process.is_running and self.incarnation == self.process.incarnation

    def lacks_masks(self, drafts: tuple[int, ...]) -> bool:
        """Whether masks are to be asked for, given the drafts of a step."""
        if not (self.is_asked or self.is_ready):
            return True
        if not drafts or self.asked_drafts or self.ready_drafts[: len(drafts)] == drafts:
            return False
        return self.has_process  # drafts alone are no reason to begin in a new process

    def use_masks(self, drafts: tuple[int, ...]) -> int:
        """Return how many masks there are for a step with these drafts, and expect no more for it."""
        self.is_asked = self.is_ready = False
        self.first_ask, self.deferred_at = self.last_ask + 1, None
        return 1 + num_common(drafts, self.ready_drafts) if drafts else 1

    def lacks_token(self, row: SamplingRow) -> bool:
        """Whether a position before the row's was deferred, so that a token before the row is missing.

        A row before the deferred one lacks none. There is such a row if a step was executed in parts, and a part began
        with a draft's row that was deferred: if the draft is rejected, the next plan begins before that row.
        """
        return self.deferred_at is not None and row.num_outputs > self.deferred_at


# A sequence, tokens of its answer that its process lacks, and drafts after them.
_Unsent = tuple[_GrammarState, tuple[int, ...], tuple[int, ...]]


@dataclass(slots=True, eq=False)
class _SequenceRows:
    """The rows of one sequence in a step: one, and one more for each draft."""

    state: _GrammarState
    first: int
    num_rows: int = 1
    drafts: tuple[int, ...] = ()  # once they are on the host
    num_masked: int = 0  # rows whose masks were there

    def span(self, sampled: list[int]) -> tuple[int, ...]:
        """Return the token ids of the sequence, given those of all rows [num_rows]: one, and each accepted draft's."""
        if self.num_masked == 1:
            return (sampled[self.first],)
        token_ids = tuple(sampled[self.first : self.first + self.num_masked])
        return token_ids[: 1 + num_common(token_ids, self.drafts)]


@dataclass(slots=True)
class GrammarBatch:
    """The rows of a step that have a grammar, and the tokens that are to be sent to the mask process."""

    sequences: list[_SequenceRows]
    unsent: list[tuple[_SequenceRows, int]]  # sequences whose masks may be needed, and how many tokens to send
    token_ids: Tensor | None  # [sum of these and of drafts] int32, once `arrival` is complete; None if there are none
    arrival: DeviceEvent
    asked_s: float = 0.0
    awaited: list[_GrammarState] = field(default_factory=list)  # those whose masks the step waits for

    @property
    def is_waiting(self) -> bool:
        """Whether masks are missing that the step waits for."""
        return any(state.is_asked for state in self.awaited)


@dataclass(frozen=True, slots=True)
class Constrained:
    """The logits of a step, and the rows that sample no token."""

    logits: Tensor  # [num_rows, vocab_size]
    failures: tuple[tuple[int, str], ...] = ()  # (row, why its answer ends)
    deferred: tuple[int, ...] = ()  # rows; among them those after drafts that have no mask


class GrammarMasks:
    """The masks of the sequences in their slots."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        num_slots: int,
        max_drafts: int = 0,
    ) -> None:
        model = (tokenizer_file, vocab_size, eos_token_ids, num_slots, max_drafts)
        self._max_drafts = max_drafts
        self._process = MaskProcess(*model)
        self._slow_process = MaskProcess(*model, for_slow_tenants=True)  # started when there is such a tenant
        self._exclusion = _Exclusion(self._process.masks.shape[-1])
        self._slow_tenants = SlowTenants()
        self._lateness = Lateness()
        self._states: dict[int, _GrammarState] = {}  # by slot
        self._by_number: dict[int, _GrammarState] = {}  # the same
        self._numbers = count(1)
        self._suspects: OrderedDict[int, None] = OrderedDict()  # groups, the oldest first

    def warm_up(self) -> None:
        """Start the process before the first request: for a large vocabulary, it needs seconds to be ready.

        Where llguidance cannot use the tokenizer, the sandbox reports it to the operator and to clients, and no request
        with a grammar reaches the worker.
        """
        self._process.ensure_started()

    def stop(self) -> None:
        """End the processes."""
        for process in self._running():
            process.stop()

    def _running(self) -> list[MaskProcess]:
        return [process for process in (self._process, self._slow_process) if process.is_running]

    def begin(self, rows: list[SamplingRow], table: SlotTable) -> GrammarBatch:
        """Ask for the masks of the rows that have a grammar, or begin to copy the tokens that this takes.

        Called before the forward pass is launched. On a CPU, most masks have been asked for by `ask_ahead`. On a GPU,
        the tokens are those of the step before, which may still be computed: `constrain` asks as soon as they arrive,
        and the device computes this step's forward pass then.
        """
        sequences: list[_SequenceRows] = []
        for i, row in enumerate(rows):
            if row.sampling.grammar is None:
                continue
            if sequences and sequences[-1].state.assignment.slot == row.slot:
                sequences[-1].num_rows += 1
            else:
                sequences.append(_SequenceRows(self._state(table.slot_assignments[row.slot], row.num_outputs), i))
        # Each lacks the newest tokens or, after a preemption, the whole answer.
        unsent: list[tuple[_SequenceRows, int]] = []
        cells = []
        now_s = time.monotonic()
        for each in sequences:
            row, state, num_drafts, num_unsent = rows[each.first], each.state, each.num_rows - 1, 0
            if state.error or state.lacks_token(row):
                continue
            if state.is_asked or state.is_ready:
                if not num_drafts:
                    continue
            else:
                if self._slow_tenants.is_slow(state.assignment.tenant, now_s):
                    state.move_to(self._slow_process)
                if not state.process.ensure_started():
                    continue
                if state.incarnation != state.process.incarnation:
                    state.num_sent = 0
                num_unsent = max(0, row.num_outputs - state.num_sent)
            end = row.slot * table.row_length + row.position
            cells.append(np.arange(end - num_unsent, end + num_drafts))
            unsent.append((each, num_unsent))
        token_ids = None
        if any(len(each) for each in cells):
            (indices,) = to_device([np.concatenate(cells)], table.token_ids.device)
            token_ids = to_host(table.token_ids.index_select(0, indices))
        batch = GrammarBatch(sequences, unsent, token_ids, DeviceEvent(table.token_ids.device))
        if table.token_ids.device.type == "cpu":
            self._ask(batch)
        return batch

    def ask_ahead(self, batch: GrammarBatch, rows: list[SamplingRow], token_ids: Tensor) -> None:
        """Ask for the masks of the next step, given the token ids [num_rows] that this one has sampled on a CPU.

        Without it, the process would compute them alongside the forward pass, which uses all cores. A mask is computed
        in vain if the answer has ended. `begin` asks for the others, and for those after drafts.
        """
        sampled = token_ids.tolist() if batch.sequences else []
        unsent: list[_Unsent] = []
        for each in batch.sequences:
            state = each.state
            is_up_to_date = state.num_sent == rows[each.first].num_outputs
            if each.num_masked and is_up_to_date and state.has_process:
                unsent.append((state, each.span(sampled), ()))
        self._send(unsent)

    def forced_tokens(self, assignment: SlotAssignment, num_outputs: int, max_drafts: int) -> tuple[int, ...]:
        """Return tokens that a sequence's grammar forces after `num_outputs` tokens of its answer, as far as known.

        They are drafts for the slot's next chunk. Their text is certain, and how it is divided into tokens is not. The
        masks after them come with the answers of the mask process to later steps, if these are steps with drafts, too.
        """
        state = self._states.get(assignment.slot)
        if state is None or state.assignment is not assignment:
            return ()
        state.num_planned = max_drafts
        if state.is_asked:
            self._receive(0.0)
        first = num_outputs - state.num_sent
        return state.forced[first : first + max_drafts] if first >= 0 else ()

    def _ask(self, batch: GrammarBatch) -> None:
        """Ask for the masks, once their tokens have arrived."""
        if batch.unsent:
            batch.arrival.wait()
        batch.asked_s = time.monotonic()
        token_ids = iter([] if batch.token_ids is None else batch.token_ids.tolist())
        asks = []
        for each, num_unsent in batch.unsent:
            newest = tuple(islice(token_ids, num_unsent))
            each.drafts = tuple(islice(token_ids, each.num_rows - 1))[: self._max_drafts]
            if each.state.lacks_masks(each.drafts):
                asks.append((each.state, newest, each.drafts))
        self._send(asks)

    def _send(self, unsent: list[_Unsent]) -> None:
        """Send each sequence's token ids to its process, and expect masks for each."""
        for process in self._running():
            if of_process := [each for each in unsent if each[0].process is process]:
                process.ask(_message(of_process))

    def _wait(self, batch: GrammarBatch, num_rows: int, computed: DeviceEvent) -> None:
        """Wait a bounded time for the masks of a step. `computed` is complete after its forward pass."""
        self._receive(0.0)
        waiting = [each for each in batch.sequences if each.state.is_asked]
        if not waiting:
            return
        asked = [each.state for each in waiting]
        if sum(each.num_rows for each in waiting) == num_rows:  # no other row is delayed
            batch.awaited = asked
            self._wait_for(batch, computed, ALONE_SHARE)
            return
        tenants = {state.assignment.tenant for state in asked}
        tenants = {tenant for tenant in tenants if self._lateness.is_awaited(tenant)}
        batch.awaited = [state for state in asked if state.assignment.tenant in tenants]
        self._wait_for(batch, computed, WAIT_SHARE)
        late = {state.assignment.tenant for state in batch.awaited if state.is_asked}
        for tenant in tenants:
            self._lateness.record(tenant, tenant in late)

    def _wait_for(self, batch: GrammarBatch, computed: DeviceEvent, share: float) -> None:
        self._wait_until(batch, time.monotonic() + MIN_WAIT_S)
        if batch.is_waiting:
            computed.wait()
            now_s = time.monotonic()
            self._wait_until(batch, now_s - MIN_WAIT_S + share * (now_s - batch.asked_s))

    def _wait_until(self, batch: GrammarBatch, deadline_s: float) -> None:
        while batch.is_waiting and (now_s := time.monotonic()) < deadline_s:
            self._receive(deadline_s - now_s)

    def _receive(self, timeout_s: float) -> None:
        """Take the answers of the processes, after a wait for the first one. Also handles the loss of a process."""
        running = self._running()
        if timeout_s > 0.0:
            wait_for_any(running, timeout_s)
        for process in running:
            received = process.receive(0.0)
            if isinstance(received, Lost):
                self._handle_loss(process, received)
                continue
            for mask in received:
                if (state := self._by_number.get(mask.sequence)) is not None:
                    self._take(mask, state)

    def _take(self, mask: Mask, state: _GrammarState) -> None:
        if mask.number < state.first_ask:  # it is about earlier tokens
            return
        state.error, state.forced = mask.error, mask.forced
        state.is_ready = not (mask.error or mask.is_slow)
        if mask.number == state.last_ask or mask.is_slow:
            state.is_asked = False
            if mask.num_drafts:
                state.ready_drafts = (state.asked_drafts or mask.forced)[: mask.num_drafts]
        if mask.is_slow:
            self._slow_tenants.add(state.assignment.tenant, time.monotonic())
            state.move_to(self._slow_process)

    def _handle_loss(self, process: MaskProcess, lost: Lost) -> None:
        """Expect no more masks from the process. Fail the request that it was working for, if this request caused the
        loss.

        A crash is caused by the request. A kill may be due to the request's memory or to an operator. So the first one
        makes the request a suspect, and the second one ends it.
        """
        for state in self._states.values():
            if state.process is process:
                state.is_asked = False
        suspect = None if lost.sequence is None else self._by_number.get(lost.sequence)
        if suspect is None:
            return
        group_id = suspect.assignment.group_id
        if not lost.is_crash and group_id not in self._suspects:
            self._suspects[group_id] = None
            while len(self._suspects) > MAX_SUSPECTS:
                self._suspects.popitem(last=False)
            return
        for state in self._states.values():
            if state.assignment.group_id == group_id:
                state.error = (
                    "the grammar took too much memory or nesting, and ended the process that computes token masks: "
                    "make it simpler"
                )

    def constrain(
        self, logits: Tensor, rows: list[SamplingRow], grammars: GrammarBatch, in_place: bool = False
    ) -> Constrained:
        """Set logits [num_rows, vocab_size] to minus infinity for tokens that a row's grammar does not allow next.

        Called when the forward pass has been launched. If a row's other parameters leave none of the tokens that its
        grammar allows, the grammar has priority.
        """
        if not grammars.sequences:
            return Constrained(logits)
        if logits.device.type != "cpu":
            self._ask(grammars)
        self._wait(grammars, len(rows), DeviceEvent(logits.device))
        # One bit for each token that may come; other rows keep all of theirs.
        bits = np.full((len(rows), self._process.masks.shape[-1]), -1, dtype=np.int32)
        masked: list[int] = []
        failures: list[tuple[int, str]] = []
        deferred: list[int] = []
        for each in grammars.sequences:
            state, first = each.state, each.first
            error = state.error or ("" if state.is_ready else state.process.refusal)
            if error:
                failures.append((first, error[:MAX_FAILURE_CHARACTERS]))
            elif state.is_ready and not state.lacks_token(rows[first]):
                each.num_masked = state.use_masks(each.drafts)
                for number in range(each.num_masked):
                    bits[first + number] = state.process.masks[rows[first].slot, number]
                    masked.append(first + number)
            else:
                if state.deferred_at is None:
                    state.deferred_at = rows[first].num_outputs
                deferred.append(first)
            if each.num_rows > 1:
                deferred += range(first + max(1, each.num_masked), first + each.num_rows)
        constrained = self._apply(bits, masked, logits, rows, in_place) if masked else logits
        return Constrained(constrained, tuple(failures), tuple(deferred))

    def _apply(
        self, bits: NDArray[np.int32], masked: list[int], logits: Tensor, rows: list[SamplingRow], in_place: bool
    ) -> Tensor:
        """Return logits without the tokens that the bits [num_rows, num_words] exclude, for the rows `masked`."""
        if logits.device.type == "cpu":
            constrained = self._exclusion.apply(logits, bits, in_place)
        else:
            outside = _unpacked(~bits, logits.shape[-1], logits.device)
            constrained = (
                logits.masked_fill_(outside, -INFINITY) if in_place else logits.masked_fill(outside, -INFINITY)
            )
        banning = [i for i in masked if rows[i].sampling.bans_tokens]
        if banning:
            (indices,) = to_device([np.array(banning)], logits.device)
            of_banning = constrained.index_select(0, indices)
            has_none = of_banning.amax(dim=-1, keepdim=True) == -INFINITY
            outside = _unpacked(~bits[banning], logits.shape[-1], logits.device)
            allowed = torch.where(outside, -INFINITY, 0.0)
            constrained = constrained.index_copy(0, indices, torch.where(has_none, allowed, of_banning))
        return constrained

    def _state(self, assignment: SlotAssignment, num_outputs: int) -> _GrammarState:
        """Return the state of the sequence that has the slot now; at the grammar's start if it is new there.

        It also begins again if it is ahead of the answer, which has `num_outputs` tokens: then the step is executed
        again, because memory ran out after its tokens were sent.
        """
        state = self._states.get(assignment.slot)
        if state is None or state.assignment is not assignment or state.num_sent > num_outputs:
            if state is not None:
                del self._by_number[state.number]
                state.process.forget(state.number)
            state = _GrammarState(assignment, next(self._numbers), self._process)
            self._states[assignment.slot] = self._by_number[state.number] = state
        return state


def _message(unsent: list[_Unsent]) -> AskMasks:
    """Return the message that asks one process for masks."""
    begins, asks = [], []
    grammars: dict[str, int] = {}
    for state, token_ids, drafts in unsent:
        if state.incarnation != state.process.incarnation:
            assignment = state.assignment
            grammar = assignment.sampling.grammar
            assert grammar is not None
            index = grammars.setdefault(grammar, len(grammars))
            begins.append(Begin(state.number, assignment.slot, assignment.tenant, assignment.group_id, index))
            state.incarnation = state.process.incarnation
        asks.append(state.ask(token_ids, drafts))
    return AskMasks(tuple(asks), tuple(begins), tuple(grammars))


class _Exclusion:
    """Excludes tokens from logits on a CPU: by the minimum of each logit and a limit, which is infinite if allowed.

    numpy vectorizes that. torch computes `masked_fill` element by element on a CPU, which takes several times as long,
    and its views take longer than the work. The memory of the limits is kept, because new memory costs page faults.
    """

    def __init__(self, num_words: int) -> None:
        """Masks have so many words of 32 tokens."""
        self._limits = np.empty((max(1, LIMITS_AT_ONCE // (32 * num_words)), 4 * num_words, 8), dtype=np.float32)

    def apply(self, logits: Tensor, bits: NDArray[np.int32], in_place: bool) -> Tensor:
        """Return logits [num_rows, num_tokens] with minus infinity where a bit [num_rows, num_words] is 0."""
        num_rows, num_tokens = logits.shape
        constrained = logits if in_place else torch.empty_like(logits)
        before, after, bytes_of_rows = logits.numpy(), constrained.numpy(), bits.view(np.uint8)
        for first in range(0, num_rows, len(self._limits)):
            part = slice(first, first + len(self._limits))
            limits = self._limits[: len(bytes_of_rows[part])]
            _LIMITS_OF_BYTES.take(bytes_of_rows[part], axis=0, out=limits, mode="clip")  # "raise" would copy them
            np.minimum(before[part], limits.reshape(len(limits), -1)[:, :num_tokens], out=after[part])
        return constrained


def _unpacked(bits: NDArray[np.int32], num_tokens: int, device: torch.device) -> Tensor:
    """Return [num_rows, num_tokens] bool, given that many bits in words [num_rows, num_words], the lowest first."""
    if device.type == "cpu":
        unpacked = np.unpackbits(bits.view(np.uint8), axis=-1, count=num_tokens, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    # Unpacked on the device: an eighth of the bytes to copy.
    (packed,) = to_device([bits.view(np.uint8)], device)
    places = torch.arange(8, dtype=torch.uint8, device=device)
    return (packed[..., None].bitwise_right_shift(places) & 1).flatten(1)[:, :num_tokens].bool()
