"""What is counted for an answer in memory is about what it takes there."""

from __future__ import annotations

import json
from array import array

import pytest

from servekit.api.responses.prediction import answer_bytes, base64_of, floats
from servekit.protocol.prediction import Modality, PredictorInfo, PredictorKind
from servekit.requests.prediction import PredictionRequest

EMBEDDER = PredictorInfo(PredictorKind.EMBED, Modality.TEXT, "Bert", 1, 100, 512, dimensions=1024)


@pytest.mark.parametrize(("as_base64", "encode"), [(False, floats), (True, base64_of)])
def test_an_embedding_is_counted_as_its_encoding_takes(as_base64: bool, encode: object) -> None:
    assert callable(encode)
    result = array("f", [(-1) ** index / (3 + index) for index in range(1024)]).tobytes()
    taken = len(result) + len(json.dumps(encode(result), separators=(",", ":")))
    counted = answer_bytes(EMBEDDER, PredictionRequest(inputs=["a"], param="input"), as_base64)
    assert 0.9 * taken <= counted <= 1.5 * taken  # numbers have up to 22 digits as JSON, and most fewer


def test_fewer_dimensions_count_for_less() -> None:
    wanted = PredictionRequest(inputs=["a"], param="input", dimensions=256)
    whole = PredictionRequest(inputs=["a"], param="input")
    for as_base64 in (False, True):
        assert 4 * answer_bytes(EMBEDDER, wanted, as_base64) == answer_bytes(EMBEDDER, whole, as_base64)
