"""Draft by prompt lookup: the tokens that followed the newest tokens at an earlier place may follow again.

Texts repeat themselves where a model copies, quotes, edits or lists. Then the continuation of the newest earlier
occurrence is often right, and it costs no computation on the device. Saxena, "Prompt Lookup Decoding", 2023; Yang et
al., "Inference with Reference: Lossless Acceleration of Large Language Models", 2023.
"""

from __future__ import annotations

from array import array

import numpy as np

from servekit.protocol.messages import StepPlan
from workers.speculation.drafter import Drafter, DraftRequest

# How many of the newest tokens are looked up. Longer n-grams are looked up first, because their continuation is right
# more often.
LENGTHS = (4, 2)
MIN_PLACES = 256  # of an index
FEW = 16  # so many n-grams are entered one by one; for more of them, numpy is faster
_MASK64 = 2**64 - 1
# Odd numbers without a pattern: the fractions of the golden ratio and of the square roots of 2, 3 and 5.
_FACTORS = (0x9E3779B97F4A7C15, 0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B)


class NgramDrafter(Drafter):
    """Keeps the tokens of each slot's sequence with an index of their n-grams: at most 40 bytes for each token.

    A sequence takes 4 to 5 bytes a token for its tokens, and 8 to 16 for each index. They are freed when the slot is
    assigned anew.
    """

    is_same_on_all_ranks = True  # all ranks know the same tokens

    def __init__(self) -> None:
        self._texts: dict[int, IndexedText] = {}  # by slot

    def begin(self, plan: StepPlan) -> None:
        for assignment in plan.slot_assignments:
            self._texts[assignment.slot] = IndexedText(assignment.sampling.prediction)

    def commit(self, slot: int, start: int, token_ids: tuple[int, ...]) -> None:
        self._texts[slot].replace(start, token_ids)

    def propose(self, requests: list[DraftRequest]) -> list[tuple[int, ...]]:
        return [self._texts[request.slot].continuation(request.max_drafts) for request in requests]


class IndexedText:
    """The tokens of one sequence, and where each n-gram of them stood last.

    An index is a table of places without chains: an n-gram has one place, given by its hash, which holds the position
    after its newest occurrence. An n-gram with the same place replaces it. So an entry may be lost or of other
    tokens, and the tokens are compared before it is used. In turn an entry takes 4 bytes, and all n-grams of a long
    prompt are entered by a few operations of numpy.

    The n-grams are entered when a continuation is asked for, so a sequence without drafts has tokens only.

    A text that the client expects to be repeated can stand before the sequence. What the sequence says itself is newer.
    """

    __slots__ = ("_begin", "_indexes", "_num_indexed", "_shift", "_tokens")

    def __init__(self, before: tuple[int, ...] = ()) -> None:
        self._tokens = array("i", before)
        self._begin = len(before)  # of the sequence
        self._indexes: list[array[int]] = []  # of each of LENGTHS; 0 is no entry
        self._shift = 64  # a place is what remains of a hash of 64 bits
        self._num_indexed = 0  # n-grams that end before this position are entered

    def replace(self, start: int, token_ids: tuple[int, ...]) -> None:
        """Replace all tokens at positions from `start` on by these. Tokens in a gap before `start` are unknown."""
        tokens, start = self._tokens, self._begin + start
        del tokens[start:]
        self._num_indexed = min(self._num_indexed, start)
        tokens.extend([-1] * (start - len(tokens)))
        tokens.extend(token_ids)

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """Return `max_tokens` tokens that may come next, or none.

        They are the tokens that followed an earlier occurrence of the newest tokens. If this continuation reaches the
        end of the text, it continues from its own beginning, because the text has begun to repeat itself.
        """
        tokens, num_tokens = self._tokens, len(self._tokens)
        self._index_all_but_newest()
        for length, index in zip(LENGTHS, self._indexes, strict=False):
            if num_tokens <= length:
                continue
            newest = tokens[num_tokens - length :]
            begin = index[self._place(newest)]
            # Entries from before a `replace` may lie after the end.
            if 0 < begin < num_tokens and tokens[begin - length : begin] == newest:
                followed = tokens[begin : begin + max_tokens]
                return tuple((followed * -(-max_tokens // len(followed)))[:max_tokens])
        return ()

    def _index_all_but_newest(self) -> None:
        """Enter all n-grams but the newest ones, which are to be looked up."""
        num_tokens = len(self._tokens)
        if not self._indexes or num_tokens > len(self._indexes[0]) // 2:
            self._make_indexes(num_tokens)
        for length, index in zip(LENGTHS, self._indexes, strict=True):
            self._enter(index, length, max(length, self._num_indexed), num_tokens)
        self._num_indexed = max(self._num_indexed, num_tokens)

    def _make_indexes(self, num_tokens: int) -> None:
        """Make empty indexes of two to four places for each token. The next ones are at least twice as large."""
        bits = max(MIN_PLACES, 2 * num_tokens).bit_length()
        self._indexes = [array("i", bytes(4 << bits)) for _ in LENGTHS]
        self._shift = 64 - bits
        self._num_indexed = 0

    def _enter(self, index: array[int], length: int, first: int, stop: int) -> None:
        """Enter the n-grams that end before the positions from `first` to `stop`. Later ones replace earlier ones."""
        tokens = self._tokens
        if stop - first <= FEW:
            for position in range(first, stop):
                index[self._place(tokens[position - length : position])] = position
            return
        of_text = np.frombuffer(tokens, dtype=np.int32)[first - length : stop - 1].astype(np.uint64)
        hashes = np.zeros(stop - first, dtype=np.uint64)
        for number in range(length):
            hashes += of_text[number : number + stop - first] * np.uint64(_FACTORS[number])
        # If a place is written several times, the last value stays.
        np.frombuffer(index, dtype=np.int32)[hashes >> np.uint64(self._shift)] = np.arange(first, stop, dtype=np.int32)

    def _place(self, ngram: array[int]) -> int:
        """Return an n-gram's place in the index; `_enter` computes the same for many."""
        hashed = 0
        for token_id, factor in zip(ngram, _FACTORS, strict=False):
            hashed += token_id * factor
        return (hashed & _MASK64) >> self._shift
