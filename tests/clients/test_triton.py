"""Triton's own client library, against the server that stands for Triton in tests.

The library is not a dependency of this repository: its extra `http` needs a release of greenlet that conflicts with
others. To run this: `pip install 'tritonclient[http]'` in a virtual environment with pytest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.triton_server import triton_server

httpclient: Any = pytest.importorskip("tritonclient.http")


def test_stand_in_speaks_the_protocol_as_the_client_library_does() -> None:
    with triton_server(loaded=(), is_explicit=True) as server:
        client = httpclient.InferenceServerClient(server.url.removeprefix("http://"))
        assert client.is_server_live() and client.is_server_ready()
        assert not client.is_model_ready("sum")
        with pytest.raises(httpclient.InferenceServerException, match="unknown model"):
            client.get_model_metadata("sum")
        client.load_model("sum")
        assert client.is_model_ready("sum")
        assert [each["name"] for each in client.get_model_metadata("sum")["inputs"]] == ["A", "B"]
        for is_binary in (True, False):
            inputs = []
            for name, values in (("A", [[1, 2]]), ("B", [[10, 20]])):
                given = httpclient.InferInput(name, [1, 2], "FP32")
                given.set_data_from_numpy(np.array(values, np.float32), binary_data=is_binary)
                inputs.append(given)
            wanted = [httpclient.InferRequestedOutput("SUM", binary_data=is_binary)]
            result = client.infer("sum", inputs, outputs=wanted)
            assert result.as_numpy("SUM").tolist() == [[11, 22]] and result.as_numpy("LARGEST") is None
        assert client.infer("sum", inputs).as_numpy("LARGEST").tolist() == [22]
        with pytest.raises(httpclient.InferenceServerException, match="expected 2 inputs but got 1"):
            client.infer("sum", inputs[:1])
        client.unload_model("sum")
        with pytest.raises(httpclient.InferenceServerException, match="unknown model"):
            client.infer("sum", inputs)
        client.load_model("lengths")
        text = httpclient.InferInput("TEXT", [2, 1], "BYTES")
        text.set_data_from_numpy(np.array([["blüe"], ["x"]], dtype=object))
        assert client.infer("lengths", [text]).as_numpy("LENGTH").tolist() == [[5], [1]]
        client.close()
