"""Messages between a worker and its mask process: frozen values, encoded as msgpack."""

from __future__ import annotations

from msgspec import Struct

# The shared memory begins with the number of the sequence that is worked on, so that a crash can be attributed. The
# masks follow, one for each slot.
HEADER_BYTES = 64


def mask_bytes(vocab_size: int) -> int:
    """Return the size of one mask: a bit for each token, the lowest first, in words of 32."""
    return 4 * -(-vocab_size // 32)


class Begin(Struct, frozen=True, array_like=True, gc=False):
    """A sequence has the slot from here on; the state of the slot's earlier sequence is dropped."""

    sequence: int  # a number that the worker gives to no other sequence
    slot: int  # the row of the shared memory for its masks
    tenant: str
    group_id: int  # of the answers that share a budget
    grammar: int  # index into the message's `grammars`


class Ask(Struct, frozen=True, array_like=True, gc=False):
    """Compute the mask for the token after these, which follow the tokens of the sequence's earlier messages."""

    sequence: int
    token_ids: tuple[int, ...]


class AskMasks(Struct, frozen=True, array_like=True):
    """The masks that a step needs. The process answers each `Ask` with one `Mask`, in any order."""

    asks: tuple[Ask, ...]
    begins: tuple[Begin, ...] = ()
    grammars: tuple[str, ...] = ()  # each text once, also if several sequences begin with it


class Mask(Struct, frozen=True, array_like=True, gc=False):
    """The sequence's mask is in its row of the shared memory; or, with an error, the sequence must end.

    `is_slow`: this process follows no sequence of its tenant any longer, because a piece of work for it took too long.
    """

    sequence: int
    error: str = ""
    is_slow: bool = False


class Ready(Struct, frozen=True, tag="ready"):
    """The first message of a process: it has read the tokenizer, or cannot use it."""

    refusal: str = ""


class Masks(Struct, frozen=True, tag="masks"):
    """Answers, in the order in which they were computed."""

    masks: tuple[Mask, ...]


FromMaskProcess = Ready | Masks
