"""Turn committed tokens into text and put it into clients' queues; end sequences at stop strings.

A sequence ends here or in the workload manager, whichever finds the reason first. Here it ends at a stop string, or
when its API key may have no more tokens. Methods that end sequences return `Finish` commands. The caller must apply
them to the workload manager; for a sequence that ended there, Finish does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from servekit.engine.client_queue import TokenDelta
from servekit.engine.request_registry import RequestRegistry
from servekit.engine.request_state import RequestState, SequenceOutput
from servekit.errors import InvalidRequest, ServekitError
from servekit.observability.observer import Observer
from servekit.scheduler.commands import Finish
from servekit.scheduler.sequence import FinishReason, Sequence
from servekit.scheduler.step import SequenceToken

log = logging.getLogger("servekit")


class OutputProcessor:
    """Delivers the output of all sequences in a registry, and removes sequences from it when they end."""

    def __init__(self, registry: RequestRegistry, observers: list[Observer], is_special: Callable[[int], bool]) -> None:
        self._registry = registry
        self._observers = observers
        self._is_special = is_special  # whether a token id is that of a special token

    def add(self, request: RequestState, output: SequenceOutput) -> None:
        """Deliver the tokens of this request's sequence from now on."""
        self._registry.add(request, output)
        if not output.is_probe:
            for observer in self._observers:
                observer.sequence_admitted(output.sequence)

    def process(self, tokens: list[SequenceToken], now_s: float) -> tuple[list[Finish], int]:
        """Deliver the tokens of one commit.

        Returns commands for sequences that ended at a stop string, or failed; and how many tokens were delivered, which
        are all but those after a stop string.
        """
        commands: list[Finish] = []
        num_delivered = 0
        first_token_latencies_s: list[float] = []
        inter_token_latencies_s: list[float] = []
        find_output = self._registry.output
        for token in tokens:
            output = find_output(token.sequence.sequence_id)
            if output is None:
                continue  # ended by a stop string, at an earlier token of its span or of an earlier result
            if token.failure is not None:
                error = f"the answer could not follow its grammar: {token.failure}"
                output.queue.fail(InvalidRequest(error, param="grammar", code="grammar_failed"))
                commands.append(self._end(output, FinishReason.ERROR, now_s))
                continue
            if output.first_token_s is None:
                output.first_token_s = now_s
                if not output.is_probe:
                    first_token_latencies_s.append(now_s - output.sequence.arrival_s)
            elif output.last_token_s is not None:
                inter_token_latencies_s.append(now_s - output.last_token_s)
            output.last_token_s = now_s
            num_delivered += 1
            reason = self._deliver(output, token)
            if reason is not None:
                commands.append(self._end(output, reason, now_s))
        if first_token_latencies_s or inter_token_latencies_s:
            for observer in self._observers:
                observer.tokens_delivered(first_token_latencies_s, inter_token_latencies_s, now_s)
        return commands, num_delivered

    def _deliver(self, output: SequenceOutput, token: SequenceToken) -> FinishReason | None:
        """Put a token and its text into the client's queue. Returns why the sequence ends, if it does."""
        detokenizer, token_id, reason = output.detokenizer, token.token_id, token.finish_reason
        if reason is None and output.count_token is not None and not output.count_token():
            reason = FinishReason.LENGTH
        if reason is None:
            text = detokenizer.feed(token_id)
        else:
            # The token that stops a sequence is part of its text only if the request asks for it.
            is_in_text = reason is not FinishReason.STOP or token.sequence.sampling.include_stop
            text = detokenizer.text_of(token_id, is_in_text, is_last=True)
        stop_reason: str | int | None = token.sequence.stop_token_id
        if detokenizer.stop_string is not None:
            reason, stop_reason = FinishReason.STOP, detokenizer.stop_string
        special = self._is_special(token_id)
        output.num_tokens += 1
        output.queue.put(TokenDelta(output.index, token_id, text, special, reason, stop_reason, token.logprobs))
        return reason

    def expire(self, sequences: list[Sequence], now_s: float) -> None:
        """Deliver the end of sequences whose deadline has passed, with the text that was still held back."""
        for sequence in sequences:
            output = self._registry.output(sequence.sequence_id)
            if output is not None:
                text = output.detokenizer.finish()
                output.queue.put(TokenDelta(output.index, None, text, False, FinishReason.DEADLINE))
                self._end(output, FinishReason.DEADLINE, now_s)

    def abort(self, request: RequestState, now_s: float) -> list[Finish]:
        """End the unfinished sequences of a request whose client no longer reads."""
        return [self._end(output, FinishReason.ABORT, now_s) for output in self._registry.unfinished(request)]

    def cancel(self, request: RequestState, now_s: float) -> list[Finish]:
        """End the unfinished sequences of a request whose client still reads, and deliver the text held back."""
        commands = []
        for output in self._registry.unfinished(request):
            text = output.detokenizer.finish()
            output.queue.put(TokenDelta(output.index, None, text, False, FinishReason.ABORT))
            commands.append(self._end(output, FinishReason.ABORT, now_s))
        return commands

    def fail_request_of(self, sequence_id: int, error: ServekitError, now_s: float) -> list[Finish]:
        """Report an error to the client of an unfinished sequence, and end all sequences of its request."""
        return self._fail(self._registry.unfinished_siblings(sequence_id), error, now_s)

    def fail_all(self, error: ServekitError, now_s: float) -> list[Finish]:
        """Report an error to all clients, and end all sequences."""
        return self._fail(list(self._registry.outputs), error, now_s)

    def _fail(self, outputs: list[SequenceOutput], error: ServekitError, now_s: float) -> list[Finish]:
        for output in outputs:
            output.queue.fail(error)
        return [self._end(output, FinishReason.ERROR, now_s) for output in outputs]

    def _end(self, output: SequenceOutput, reason: FinishReason, now_s: float) -> Finish:
        sequence = output.sequence
        output.ended_s = now_s
        self._registry.remove(sequence.sequence_id)
        log.debug("request %s: %s ended: %s", output.request_id, sequence, reason)
        if not output.is_probe:
            for observer in self._observers:
                observer.sequence_ended(
                    sequence, reason, output.num_tokens, output.first_token_s, output.last_token_s, now_s
                )
        return Finish(sequence.sequence_id, reason, output.num_tokens)
