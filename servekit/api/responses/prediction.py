"""Submit a prediction to its engine, and turn the results into numbers."""

from __future__ import annotations

import asyncio
import math
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from servekit.api.body_budget import BodyBudget
from servekit.api.body_decoder import BodyDecoder, unpack
from servekit.api.endpoint import caller_of
from servekit.api.key_accounts import RequestAccount
from servekit.api.responses.generation import CHARACTERS_PER_TOKEN, unless_disconnected
from servekit.api.responses.http import LongResponse, respond, respond_at_length
from servekit.api.responses.long_json import ITEMS_PER_PIECE, ItemList, LongJson
from servekit.api.schemas.packed_body import MAX_INLINE_BYTES, Refusal
from servekit.api.schemas.predictions import InferAnswer, InferResponse
from servekit.engine.caller import Caller
from servekit.engine.interface import InferringEngine, PredictingEngine
from servekit.engine.prediction_state import PredictionState
from servekit.errors import RemoteFailed
from servekit.protocol.prediction import Activation, PredictorInfo, PredictorKind
from servekit.requests.inference import DecodeOutputs, InferenceRequest, Tensor
from servekit.requests.prediction import Input, PredictionRequest

MANY_INPUTS = 2**8
BYTES_PER_NUMBER = 24  # of an answer: four as they are computed, and up to twenty as JSON
BYTES_PER_BASE64_NUMBER = 12  # four as they are computed, and less than six as base64, with room for a copy of a piece
BYTES_PER_SCORE = 48  # the same, with the names of its fields
NUMBERS_PER_PIECE = 2**14  # that are encoded at a time, which takes a millisecond or less
NUMBERS_PER_TOKEN = 16  # of an answer: so many take about as long to encode as one token of a generation


async def compute(
    request: Request, engine: PredictingEngine, wanted: PredictionRequest, *, as_base64: bool = False
) -> tuple[PredictionState, Sequence[bytes]]:
    """Admit a prediction with its caller's tenant, and wait for its results: 32-bit floats for each input.

    The memory of the answer is counted first, and held until it is written. `as_base64`: it has embeddings as base64.

    Raises RequestError, WorkerError, or ClientDisconnect if the client leaves meanwhile.
    """
    if len(wanted.inputs) > MANY_INPUTS:
        await asyncio.sleep(0)  # to make them took milliseconds, and so does to look at each of them
    account: RequestAccount | None = getattr(request.state, "account", None)
    if account is not None:
        await account.reserve(len(wanted.inputs), 0, sum(map(_estimated_tokens, wanted.inputs)))
    budget: BodyBudget = request.state.body_budget
    budget.hold_answer(request, len(wanted.inputs) * answer_bytes(engine.model, wanted, as_base64))
    state = await unless_disconnected(request, engine.submit(wanted, caller_of(request)))
    request.state.prediction = state  # for the log
    try:
        if account is not None:
            await account.reserve(len(wanted.inputs), 0, state.num_tokens)
            account.charge_tokens(state.num_tokens)
        num_estimated, results = state.num_tokens, await unless_disconnected(request, _results(state))
        if account is not None:  # another server may have counted more than were estimated here
            account.charge_tokens(max(num_estimated, state.num_tokens))
        return state, results
    finally:
        state.abort()


async def infer(request: Request, engine: InferringEngine, wanted: InferenceRequest) -> list[Tensor]:
    """Compute tensors for the caller's tenant. Tokens of texts are estimated: only the model's server counts them.

    Raises RequestError, WorkerError, or ClientDisconnect if the client leaves meanwhile.
    """
    account: RequestAccount | None = getattr(request.state, "account", None)
    if account is not None:
        num_tokens = sum(map(_estimated_tokens, wanted.texts))
        await account.reserve(wanted.num_inputs, 0, num_tokens)
        account.charge_tokens(num_tokens)
    caller, decoder = caller_of(request), request.app.state.body_decoder
    decode = partial(_decode_outputs, decoder, caller.tenant)
    outputs = await unless_disconnected(request, _outputs(engine, wanted, caller, decode))
    budget: BodyBudget = request.state.body_budget
    budget.hold_answer(request, 2 * sum(len(tensor.data) for tensor in outputs))  # as they came, and in the answer
    return outputs


async def _outputs(
    engine: InferringEngine, wanted: InferenceRequest, caller: Caller, decode: DecodeOutputs
) -> list[Tensor]:
    return await engine.infer(wanted, caller, decode)


async def _decode_outputs(decoder: BodyDecoder, tenant: str, answer: bytearray) -> list[Tensor]:
    """Decode the answer of a model's server in the process for large bodies.

    Raises RemoteFailed if it is not valid, and what `BodyDecoder.decode` raises.
    """
    packed = await decoder.decode(answer, [InferAnswer], 0, tenant, is_answer=True)
    if isinstance(packed, Refusal):
        why = packed.message.replace("the request body", "it", 1)
        raise RemoteFailed(f"the model's server sent an invalid answer: {why}")
    unpacked, _ = await unpack(packed)
    outputs: list[Tensor] = unpacked.outputs
    return outputs


async def respond_with_tensors(model: str, outputs: list[Tensor]) -> Response:
    """Respond with the outputs of a model of kind infer. Large ones are joined in a thread, in pieces."""
    if sum(len(tensor.data) for tensor in outputs) <= MAX_INLINE_BYTES:
        return respond(InferResponse(model, outputs))
    long_json = LongJson()
    marked = [replace(tensor, data=long_json.raw(memoryview(tensor.data))) for tensor in outputs]
    return LongResponse(await asyncio.to_thread(long_json.pieces, InferResponse(model, marked)))


async def _results(state: PredictionState) -> Sequence[bytes]:
    return await state.results()


def answer_bytes(model: PredictorInfo, wanted: PredictionRequest, as_base64: bool) -> int:
    """Return what the answer to one input takes in memory: an embedding, a score for each label, or one score."""
    if model.kind is PredictorKind.EMBED:
        bytes_per_number = BYTES_PER_BASE64_NUMBER if as_base64 else BYTES_PER_NUMBER
        return bytes_per_number * min(model.dimensions, wanted.dimensions or model.dimensions)
    return sum(BYTES_PER_SCORE + len(label) for label in model.labels or ("",))


def _estimated_tokens(value: Input) -> int:
    if isinstance(value, str):
        return len(value) // CHARACTERS_PER_TOKEN
    if isinstance(value, tuple):
        return sum(map(len, value)) // CHARACTERS_PER_TOKEN
    return len(value) if isinstance(value, list | array) else 0


def floats(result: bytes) -> list[float]:
    """Return the numbers of one input."""
    return array("f", result).tolist()


def base64_of(result: bytes) -> str:
    """Return the numbers of one input as OpenAI's clients read them: base64 of 32-bit floats, the lowest byte first."""
    values = array("f", result)
    if array("H", [1]).tobytes() == b"\x00\x01":  # a big-endian machine
        values.byteswap()
    return b64encode(values.tobytes()).decode()


async def respond_with(make: Callable[[ItemList], Any], results: Sequence[bytes]) -> Response:
    """Respond with `make(items)`, which calls `items` for the list with all these numbers."""
    num_tokens = sum(map(len, results)) // (4 * NUMBERS_PER_TOKEN)
    items_per_piece = max(1, min(ITEMS_PER_PIECE, 4 * NUMBERS_PER_PIECE // max(1, len(results[0]))))
    return await respond_at_length(make, num_tokens, items_per_piece)


def scores_of(logits: Sequence[float], activation: Activation) -> list[float]:
    """Return the scores of a model's own numbers."""
    match activation:
        case Activation.SIGMOID:
            return [_sigmoid(value) for value in logits]
        case Activation.SOFTMAX:
            highest = max(logits)
            powers = [math.exp(value - highest) for value in logits]
            total = sum(powers)
            return [power / total for power in powers]
        case _:
            return list(logits)


def _sigmoid(value: float) -> float:
    power = math.exp(-abs(value))  # at most 1: a large negative number does not overflow
    return (1.0 if value >= 0 else power) / (1.0 + power)
