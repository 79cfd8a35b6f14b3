"""Submit a prediction to its engine, and turn the results into numbers."""

from __future__ import annotations

import math
from array import array
from base64 import b64encode
from collections.abc import Sequence

from starlette.requests import Request

from servekit.api.endpoint import caller_of
from servekit.api.key_accounts import RequestAccount
from servekit.api.responses.generation import CHARACTERS_PER_TOKEN, unless_disconnected
from servekit.engine.caller import Caller
from servekit.engine.interface import InferringEngine, PredictingEngine
from servekit.engine.prediction_state import PredictionState
from servekit.inference import InferenceRequest, Tensor
from servekit.prediction import Input, PredictionRequest
from servekit.protocol.prediction import Activation

NUMBERS_PER_TOKEN = 16  # of an answer: so many take about as long to encode as one token of a generation


async def compute(
    request: Request, engine: PredictingEngine, wanted: PredictionRequest
) -> tuple[PredictionState, Sequence[bytes]]:
    """Admit a prediction with its caller's tenant, and wait for its results: 32-bit floats for each input.

    Raises RequestError, WorkerError, or ClientDisconnect if the client leaves meanwhile.
    """
    account: RequestAccount | None = getattr(request.state, "account", None)
    if account is not None:
        await account.reserve(len(wanted.inputs), 0, sum(map(_estimated_tokens, wanted.inputs)))
    state = await unless_disconnected(request, engine.submit(wanted, caller_of(request)))
    request.state.prediction = state  # for the log
    try:
        if account is not None:
            await account.reserve(len(wanted.inputs), 0, state.num_tokens)
            account.charge_tokens(state.num_tokens)
        return state, await unless_disconnected(request, _results(state))
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
    return await unless_disconnected(request, _outputs(engine, wanted, caller_of(request)))


async def _outputs(engine: InferringEngine, wanted: InferenceRequest, caller: Caller) -> list[Tensor]:
    return await engine.infer(wanted, caller)


async def _results(state: PredictionState) -> Sequence[bytes]:
    return await state.results()


def _estimated_tokens(value: Input) -> int:
    if isinstance(value, str):
        return len(value) // CHARACTERS_PER_TOKEN
    if isinstance(value, tuple):
        return sum(map(len, value)) // CHARACTERS_PER_TOKEN
    return len(value) if isinstance(value, list) else 0


def floats(result: bytes) -> list[float]:
    """Return the numbers of one input."""
    return array("f", result).tolist()


def base64_of(result: bytes) -> str:
    """Return the numbers of one input as OpenAI's clients read them: base64 of 32-bit floats, the lowest byte first."""
    values = array("f", result)
    if array("H", [1]).tobytes() == b"\x00\x01":  # a big-endian machine
        values.byteswap()
    return b64encode(values.tobytes()).decode()


def num_described(results: Sequence[bytes]) -> int:
    """Return how long an answer with all these numbers is, in tokens of a generation."""
    return sum(map(len, results)) // (4 * NUMBERS_PER_TOKEN)


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
