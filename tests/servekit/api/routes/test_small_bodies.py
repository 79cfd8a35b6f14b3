"""Bodies that are decoded on the event loop are small: a larger one would hold it for more than a few milliseconds."""

import json

import pytest

from servekit.api.schemas.packed_body import MAX_INLINE_BYTES
from tests.support.asgi import ask, make_app


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/aliases/chat"])
async def test_a_large_body_is_refused_where_small_ones_are_decoded_on_the_event_loop(path: str) -> None:
    body = json.dumps({"lora_name": "a", "lora_path": "b" * MAX_INLINE_BYTES}).encode()
    answer = await ask(make_app(), "POST", path, body=body)
    assert answer.status == 413 and f"the limit is {MAX_INLINE_BYTES} on this route" in answer.error["message"]
