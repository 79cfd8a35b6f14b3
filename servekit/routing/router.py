"""Choose the replica for each new sequence, and the waiting sequences that should move to another one.

All workload managers are in this process, so the router knows the exact state of every replica: it reads the managers
when it decides, and they include what was added a moment ago. The router itself records only which blocks will be
published by prompts that were sent and are not computed yet, because the managers do not know that.

The replica with the lowest cost is chosen: the predicted time to the first token, and a part of the time that this
sequence and those in the same steps then spend on its tokens (docs/design/routing.md). Among equal costs, the least
loaded replica is chosen. A conversation stays on its replica because its prefix is cached there, and leaves it when
waiting there costs more than computing the prefix again elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from msgspec import Struct
from msgspec.structs import astuple

from servekit.protocol.lora import salted
from servekit.routing.replica import Load, Replica, RoutedPrompt, Speed
from servekit.routing.turns import load_before
from servekit.scheduler.commands import AddSequence
from servekit.scheduler.prefix_cache import continue_chain
from servekit.scheduler.workload_manager import WorkloadManager

# What a second between tokens counts, for this sequence and those in the same steps, relative to one before the first
# token. With more, prefixes are computed again elsewhere more often; with less, a replica that has returned idles for
# longer.
DECODE_WEIGHT = 0.15
MIN_GAIN_S = 0.05  # a move must save at least this time
MIN_GAIN_RATIO = 0.5  # and at least this part of the wait that is left after the move
LOOKS_PER_MOVE = 4  # prompts checked in one call for each prompt that may move; a check compares all replicas
TIE_RATIO = 0.05  # costs that differ by no more count as equal, because measured speeds are not exact
UNKNOWN_LENGTH = 128.0  # assumed length of answers, until one has ended
UNKNOWN_SPEED = Speed(50e-6, 0.0, 10e-3)  # assumed speed, until a replica has computed a prompt


class Route(Struct, frozen=True):
    """The replica for a prompt, and what was expected there."""

    replica_id: int
    num_cached_tokens: int  # in the prefix cache, or about to be computed for an earlier sequence
    ttft_s: float  # predicted time to the first token


class Move(Struct, frozen=True):
    """Waiting answers to one prompt that should move together."""

    sequence_ids: tuple[int, ...]  # the leader first
    source_id: int
    target_id: int


class _Choice(Struct, gc=False):
    """One replica for a prompt, and what it costs there."""

    replica: Replica
    cost_s: float
    ttft_s: float
    num_sequences: int  # that the replica has
    num_found: int  # blocks in the prefix cache
    num_cached: int  # of these, and of those that are about to be computed for an earlier sequence


class Router:
    """Routes sequences to replicas, which have the same model and the same size of blocks."""

    def __init__(self, block_size: int) -> None:
        self.replicas: dict[int, Replica] = {}
        self._block_size = block_size
        self._num_routes = 0

    def add_replica(self, replica_id: int, manager: WorkloadManager) -> None:
        """Begin to send sequences to a replica."""
        assert manager.config.block_size == self._block_size, "all replicas have blocks of the same size"
        assert replica_id not in self.replicas, f"replica id {replica_id} is in use"
        self.replicas[replica_id] = Replica(replica_id, manager)

    def remove_replica(self, replica_id: int) -> None:
        """Forget a replica."""
        del self.replicas[replica_id]

    def set_available(self, replica_id: int, is_available: bool) -> None:
        """Set whether a replica may take sequences: not while it is lost, loads its model or is about to leave."""
        self.replicas[replica_id].is_available = is_available

    def route(self, commands: Sequence[AddSequence]) -> Route | None:
        """Choose the replica for all answers to one prompt, the first of which is the leader of the others.

        The caller gives the commands to that replica's manager before it calls the router again. Returns None if no
        replica is available.
        """
        leader, num_sequences = commands[0], len(commands)
        replicas = self._available()
        if not replicas:
            return None
        num_tokens, hashes = len(leader.prompt_token_ids), self._hashes(leader)
        speeds = self._speeds(replicas)
        length = self._mean_length(replicas)
        choices: list[_Choice] = []
        for replica in replicas:
            load, speed = replica.load(), speeds[replica.replica_id]
            before = load_before(load, replica.manager, leader.tenant, length)
            num_found = replica.num_found(hashes)
            num_cached = num_found + replica.num_expected(hashes, num_found)
            num_missing = num_tokens - num_cached * self._block_size
            ttft_s = predicted_ttft_s(replica, before, speed, length, num_sequences, num_missing)
            cost_s = ttft_s + DECODE_WEIGHT * decode_cost_s(load, speed, length, num_sequences, num_missing)
            choices.append(_Choice(replica, cost_s, ttft_s, load.num_running + load.num_waiting, num_found, num_cached))
        best = _best(choices)
        self._num_routes += 1
        best.replica.last_chosen = self._num_routes
        best.replica.add(RoutedPrompt(_ids(commands), hashes, num_tokens, best.num_found, leader.tenant))
        return Route(best.replica.replica_id, best.num_cached * self._block_size, best.ttft_s)

    def record(self, replica_id: int, commands: Sequence[AddSequence]) -> None:
        """Note that the caller has chosen the replica for all answers to one prompt. `rebalance` may move them later.

        The caller gives the commands to that replica's manager before it calls the router again.
        """
        leader, replica = commands[0], self.replicas[replica_id]
        hashes = self._hashes(leader)
        num_found = replica.num_found(hashes)
        replica.add(RoutedPrompt(_ids(commands), hashes, len(leader.prompt_token_ids), num_found, leader.tenant))

    def _hashes(self, leader: AddSequence) -> list[bytes]:
        """Return the hashes of the prompt's blocks that may be found in a prefix cache."""
        if leader.sampling.prompt_logprobs is not None:
            return []  # nothing is looked up, because all positions must be computed
        num_blocks = (len(leader.prompt_token_ids) - 1) // self._block_size  # the last token's logits are needed
        hashes = [*leader.block_hashes[:num_blocks]]
        salt = salted(leader.tenant, leader.adapter)
        continue_chain(hashes, salt, array("i", leader.prompt_token_ids), num_blocks, self._block_size)
        return hashes

    def rebalance(self, max_moves: int) -> list[Move]:
        """Return all of `find_moves`."""
        return [move for move in self.find_moves(max_moves) if move is not None]

    def find_moves(self, max_moves: int) -> Iterator[Move | None]:
        """Choose waiting sequences that should move to another replica, and note that they are there.

        A sequence moves if its predicted time to the first token becomes much shorter. It moves only once, so that none
        goes back and forth.

        Yields the move of each prompt that was checked, or None if it stays. A check takes time linear in the replicas,
        and in the tenants that wait there, so the caller may let other tasks run between two checks. The caller must
        carry out a move before it asks for the next one.
        """
        replicas = self._available()
        speeds, length = self._speeds(replicas), self._mean_length(replicas)
        loads = {replica.replica_id: replica.load() for replica in replicas}
        num_moves, num_looks = 0, LOOKS_PER_MOVE * max_moves  # how many are left
        for source in sorted(replicas, key=lambda each: loads[each.replica_id].num_prefill_tokens, reverse=True):
            if not loads[source.replica_id].num_waiting:
                continue
            # The work before the entry that is checked. Before the newest entry, this is all work.
            ahead = loads[source.replica_id].copy()
            looked_at = source.waiting()[: ceil(num_looks / 2)]  # so that something is left for the next source
            num_looks -= len(looked_at)
            for sent in looked_at:
                if num_moves == max_moves:
                    return
                if not source.is_waiting(sent):
                    continue  # it began, ended or moved while other tasks ran
                target = self._better_replica(sent, source, ahead, loads, speeds, length)
                if target is None:
                    yield None
                else:
                    num_moves += 1
                    yield Move(sent.sequence_ids, source.replica_id, target.replica_id)

    def _better_replica(
        self,
        sent: RoutedPrompt,
        source: Replica,
        ahead: Load,
        loads: dict[int, Load],
        speeds: dict[int, Speed],
        length: float,
    ) -> Replica | None:
        """Move one entry to the replica that computes it much sooner; return that replica, or None."""
        num_sequences, tenant = len(sent.sequence_ids), sent.tenant
        missing_here = sent.num_tokens - source.num_found(sent.hashes) * self._block_size
        ahead.add(tenant, -num_sequences, -sent.num_tokens, -missing_here)
        before = load_before(ahead, source.manager, tenant, length)
        here_s = predicted_ttft_s(source, before, speeds[source.replica_id], length, num_sequences, missing_here)
        best: tuple[float, Replica, int] | None = None
        for replica_id, load in loads.items():
            replica = self.replicas[replica_id]
            num_found = replica.num_found(sent.hashes)
            num_cached = num_found + replica.num_expected(sent.hashes, num_found)
            num_missing = sent.num_tokens - num_cached * self._block_size
            before = load_before(load, replica.manager, tenant, length)
            ttft_s = predicted_ttft_s(replica, before, speeds[replica_id], length, num_sequences, num_missing)
            if replica is not source and (best is None or ttft_s < best[0]):
                best = ttft_s, replica, num_missing
        if best is None or here_s - best[0] <= max(MIN_GAIN_S, MIN_GAIN_RATIO * best[0]):
            return None
        _, target, num_missing = best
        loads[source.replica_id].add(tenant, -num_sequences, -sent.num_tokens, -missing_here)
        loads[target.replica_id].add(tenant, num_sequences, sent.num_tokens, num_missing)
        source.remove(sent)
        num_found = target.num_found(sent.hashes)
        target.add(RoutedPrompt(sent.sequence_ids, sent.hashes, sent.num_tokens, num_found, tenant, is_moved=True))
        return target

    def _available(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.is_available]

    def _speeds(self, replicas: Iterable[Replica]) -> dict[int, Speed]:
        """Return the speed of each replica; for one that has not been measured, the mean of the others."""
        measured = {replica.replica_id: replica.speed() for replica in replicas}
        known = [speed for speed in measured.values() if speed is not None]
        mean = UNKNOWN_SPEED
        if known and len(known) < len(measured):
            columns = zip(*map(astuple, known), strict=True)
            mean = Speed(*(sum(column) / len(known) for column in columns))
        return {replica_id: speed or mean for replica_id, speed in measured.items()}

    @staticmethod
    def _mean_length(replicas: Iterable[Replica]) -> float:
        """Return the mean length of recent answers, in tokens: one for all replicas, because clients determine it."""
        known = [length for each in replicas if (length := each.manager.output_lengths.mean_length)]
        return sum(known) / len(known) if known else UNKNOWN_LENGTH


def _ids(commands: Sequence[AddSequence]) -> tuple[int, ...]:
    return tuple(command.sequence_id for command in commands)


def _best(choices: Sequence[_Choice]) -> _Choice:
    """Return the choice with the lowest cost.

    Among equal costs, the replica with more of the prompt in its cache is chosen, then the least loaded one, then the
    one that was chosen the longest time ago. Without the last rule, a server with little load would use one replica
    only.
    """
    limit_s = (1.0 + TIE_RATIO) * min(choice.cost_s for choice in choices)
    return min(
        (choice for choice in choices if choice.cost_s <= limit_s),
        key=lambda choice: (-choice.num_cached, choice.num_sequences, choice.replica.last_chosen),
    )


def predicted_ttft_s(
    replica: Replica, load: Load, speed: Speed, length: float, num_sequences: int, num_missing: int
) -> float:
    """Predict the time, in seconds, until answers that are added now have their first tokens.

    The steps in flight come first. Then the prompts before them must be computed; and if there are too few slots or
    blocks, running sequences must end first. Both happen at the same time, so the longer one counts.
    """
    manager, config = replica.manager, replica.manager.config
    prefill_s, base_s = speed.prefill_s, speed.step_s(load.num_running)
    in_flight_s = load.num_tokens_in_flight * prefill_s + load.num_steps_in_flight * base_s
    if in_flight_s:
        in_flight_s *= 1.0 - 0.5 / load.num_steps_in_flight  # on average, half of the first step is done
    limit = max(1, min(manager.prefill_limiter.prefill_limit(), manager.step_token_limit - load.num_running))
    queue_s = load.num_prefill_tokens * (prefill_s + base_s / limit)
    own_s = num_missing * prefill_s + ceil(num_missing / limit) * base_s
    # How many sequences must end first, and how often a sequence ends.
    answer_s = length * (base_s + prefill_s * min(limit, load.num_prefill_tokens))
    num_ends = load.num_waiting + load.num_running + num_sequences - config.max_num_seqs
    if num_ends > 0:  # then all slots will be taken, even if some are free now
        queue_s = max(queue_s, num_ends * answer_s / config.max_num_seqs)
    num_blocks = (load.num_queued_tokens + num_missing) / config.block_size - load.num_free_blocks
    if num_blocks > 0 and load.num_running and load.num_leased_blocks:
        num_ends = ceil(num_blocks * load.num_running / load.num_leased_blocks)
        queue_s = max(queue_s, num_ends * answer_s / load.num_running)
    return in_flight_s + queue_s + own_s


def decode_cost_s(load: Load, speed: Speed, length: float, num_sequences: int, num_missing: int) -> float:
    """Predict the time, in seconds, that answers added now take after their first tokens, summed over all sequences.

    Their own tokens each take a step. Each of the others waits for the prompt once, and in every step for the decodes.
    """
    num_others = load.num_running + load.num_waiting
    decodes_s = length * num_sequences * speed.decode_s
    own_s = num_sequences * length * speed.step_s(num_others + num_sequences)
    return own_s + num_others * (num_missing * speed.prefill_s + decodes_s)
