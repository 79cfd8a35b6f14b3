"""Define the messages between a worker and its mask process: frozen values, encoded as msgpack."""

from __future__ import annotations

from msgspec import Struct

# The shared memory begins with the number of the sequence that is worked on, so that a crash can be attributed. The
# masks follow. A slot has one mask, and if drafts are verified, one more for each draft.
HEADER_BYTES = 64


def mask_bytes(vocab_size: int) -> int:
    """Return the size of one mask: a bit for each token, the lowest first, in words of 32."""
    return 4 * -(-vocab_size // 32)


def num_common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Return how many tokens at the beginning of both are the same: the masks after these are the same, too."""
    num_same = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        num_same += 1
    return num_same


class Begin(Struct, frozen=True, array_like=True, gc=False):
    """Give the slot to a sequence; the state of the slot's earlier sequence is dropped."""

    sequence: int  # a number that the worker gives to no other sequence
    slot: int  # whose part of the shared memory is for its masks
    tenant: str
    group_id: int  # of the answers that share a budget
    grammar: int  # index into the message's `grammars`


class Ask(Struct, frozen=True, array_like=True, gc=False):
    """Compute the mask for the token after these, which follow the tokens of the sequence's earlier messages.

    Drafts are guesses at the tokens after these. A mask is also computed for the token after each draft, up to the
    first draft that the grammar forbids. They are not part of the sequence: a later message has the accepted ones among
    its `token_ids`.
    """

    sequence: int
    token_ids: tuple[int, ...]
    number: int = 0  # of the sequence's asks
    drafts: tuple[int, ...] = ()
    num_forced: int = 0  # without drafts, so many of the tokens that the grammar forces are the drafts


class AskMasks(Struct, frozen=True, array_like=True):
    """The masks that a step needs. The process answers the last `Ask` of each sequence, in any order.

    It may have begun to answer an earlier one before it reads the last one. Then it answers both.
    """

    asks: tuple[Ask, ...]
    begins: tuple[Begin, ...] = ()
    grammars: tuple[str, ...] = ()  # each text once, also if several sequences begin with it


class Mask(Struct, frozen=True, array_like=True, gc=False):
    """The sequence's masks are in the shared memory; or, with an error, the sequence must end.

    `is_slow`: this process follows no sequence of its tenant any longer, because a piece of work for it took too long.
    """

    sequence: int
    error: str = ""
    is_slow: bool = False
    number: int = 0  # of the ask that is answered
    num_drafts: int = 0  # so many of the drafts are allowed, and the masks after them are there, too
    forced: tuple[int, ...] = ()  # tokens that the grammar forces next; not more than there may be drafts


class Ready(Struct, frozen=True, tag="ready"):
    """The first message of a process: it has read the tokenizer, or cannot use it."""

    refusal: str = ""


class Masks(Struct, frozen=True, tag="masks"):
    """Answers, in the order in which they were computed."""

    masks: tuple[Mask, ...]


FromMaskProcess = Ready | Masks
