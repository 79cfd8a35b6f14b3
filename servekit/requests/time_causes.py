"""Where the wall time of a request goes: the closed set of causes, and the times of stages outside the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum

MIN_BLOCKED_S = 1e-3  # a write that takes less has not waited for the client
MAX_BLOCKED_WRITES = 64  # that are remembered, of one request


class TimeCause(StrEnum):
    """What a request was doing, or waited for. At any time it is one of these (docs/explain.md)."""

    BODY = "body"
    MODEL = "model"
    ADMISSION = "admission"
    TEMPLATE = "template"
    TOKENIZING = "tokenizing"
    GRAMMAR = "grammar"
    NEXT_STEP = "next_step"
    SLOTS = "slots"
    MEMORY = "memory"
    STEP_TOKENS = "step_tokens"
    ADMISSION_RATE = "admission_rate"
    SHARED_PROMPT = "shared_prompt"
    QUARANTINE = "quarantine"
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    RECOMPUTE = "recompute"
    WORKER_LOSS = "worker_loss"
    HAND_OVER = "hand_over"
    DETOKENIZING = "detokenizing"
    WRITING = "writing"
    CLIENT_NOT_READING = "client_not_reading"


MEANINGS: dict[TimeCause, str] = {
    TimeCause.BODY: "the request's head was there; its body was read, decoded and checked",
    TimeCause.MODEL: "the model was not loaded",
    TimeCause.ADMISSION: "limits were checked, places in the queue taken, blocks hashed, and the sequences added",
    TimeCause.TEMPLATE: "the chat was rendered",
    TimeCause.TOKENIZING: "prompts were encoded",
    TimeCause.GRAMMAR: "the grammar was compiled",
    TimeCause.NEXT_STEP: "its next step was not planned yet, or had to wait for the step before it",
    TimeCause.SLOTS: "all slots were taken",
    TimeCause.MEMORY: "KV blocks were lacking",
    TimeCause.STEP_TOKENS: "steps had no token left for it",
    TimeCause.ADMISSION_RATE: "the step had admitted as many sequences as one step may",
    TimeCause.SHARED_PROMPT: "another answer to the same prompt computed the prompt",
    TimeCause.QUARANTINE: "a sequence that may crash workers ran alone",
    TimeCause.QUEUE: "it was in the queue; why is no longer known, or known to the engine process only",
    TimeCause.PREFILL: "steps computed parts of its prompt",
    TimeCause.DECODE: "steps computed its tokens, and those of others",
    TimeCause.PREEMPTED: "it had lost its slot and blocks, and waited for others",
    TimeCause.RECOMPUTE: "steps computed again what was lost by preemption or with a worker",
    TimeCause.WORKER_LOSS: "its worker was lost, and it waited for another one",
    TimeCause.HAND_OVER: "a prefill replica had computed its prompt, and it waited for a decode replica",
    TimeCause.DETOKENIZING: "its last token became text, and was taken from its queue",
    TimeCause.WRITING: "the answer was formatted and written",
    TimeCause.CLIENT_NOT_READING: "the connection took no more bytes, because the client did not read",
}


class RequestTimes:
    """The times of a request's stages before its sequences are added, and after their ends.

    Each mark says what the time since the mark before it was for. The clock is the engine's.
    """

    __slots__ = ("answered_s", "blocked", "blocked_s", "clock", "marks", "started_s")

    def __init__(self, clock: Callable[[], float], started_s: float) -> None:
        self.clock = clock
        self.started_s = started_s
        self.marks: list[tuple[TimeCause, float]] = []  # (cause, until when)
        self.answered_s: float | None = None  # when the last token was taken from the client's queue
        # (begin, end) of the last writes that waited for the client.
        self.blocked: deque[tuple[float, float]] = deque(maxlen=MAX_BLOCKED_WRITES)
        self.blocked_s = 0.0  # in all

    def mark(self, cause: TimeCause) -> None:
        """The time since the last mark was for this."""
        self.marks.append((cause, self.clock()))

    def answered(self) -> None:
        """The last token was taken from the client's queue."""
        self.answered_s = self.clock()

    def written(self, began_s: float) -> None:
        """A write has ended that began at this time."""
        now_s = self.clock()
        if now_s - began_s >= MIN_BLOCKED_S:
            self.blocked.append((began_s, now_s))
            self.blocked_s += now_s - began_s
