"""Claims about how a request gets its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from servekit.api import model_choice
from servekit.engine.caller import ANONYMOUS
from servekit.engine.model_kind import GENERATE
from servekit.errors import InvalidRequest


async def test_model_that_became_another_kind_while_a_request_waited_is_refused() -> None:
    use = SimpleNamespace(engine=SimpleNamespace(kind="embed"))

    class Model:
        name, kind = "a", GENERATE

        def begin_use(self) -> Any:
            self.kind = "embed"
            return use

    models = SimpleNamespace(find=lambda *_: Model(), served=lambda _: [SimpleNamespace(name="b", kind=GENERATE)])
    state: dict[str, Any] = {"caller": ANONYMOUS}
    request = Request({"type": "http", "app": SimpleNamespace(state=SimpleNamespace(models=models)), "state": state})
    with pytest.raises(InvalidRequest, match=r"it generates no text\. Please name 'b'"):
        await model_choice.engine_for(request, "a")
    assert state["model_use"] is use, "the use ends with the request"


@pytest.mark.parametrize("is_loaded", [True, False])
async def test_a_request_notes_that_it_waits_until_its_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    noted_while_waiting = []
    state: dict[str, Any] = {"caller": ANONYMOUS}
    engine = SimpleNamespace(kind=GENERATE)
    use = SimpleNamespace(engine=engine)

    async def wait_for_use(_: Any) -> Any:
        noted_while_waiting.append("waits_for_model" in state)
        return use

    async def connected(_: Any, work: Any) -> Any:
        return await work

    monkeypatch.setattr(model_choice, "unless_disconnected", connected)
    model = SimpleNamespace(
        name="a", kind=GENERATE, begin_use=lambda: use if is_loaded else None, wait_for_use=wait_for_use
    )
    app = SimpleNamespace(state=SimpleNamespace(models=SimpleNamespace(find=lambda *_: model)))
    request = Request({"type": "http", "app": app, "state": state})
    assert await model_choice.engine_for(request, "a") is engine
    assert noted_while_waiting == ([] if is_loaded else [True]) and ("waits_for_model" in state) != is_loaded
