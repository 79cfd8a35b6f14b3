"""Claims about how a request gets its model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from servekit.api import model_choice
from servekit.api.mirroring import Copy, keep_body
from servekit.api.schemas.json_body import encode
from servekit.engine.adapted_model import AdaptedModel
from servekit.engine.caller import ANONYMOUS, Caller
from servekit.engine.model_kind import GENERATE
from servekit.errors import InvalidRequest, WorkerNotReady


async def test_model_that_became_another_kind_while_a_request_waited_is_refused() -> None:
    use = SimpleNamespace(engine=SimpleNamespace(kind="embed"))

    class Model:
        name, kind = "a", GENERATE

        def begin_use(self, caller: Any) -> Any:
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
        name="a", kind=GENERATE, begin_use=lambda _: use if is_loaded else None, wait_for_use=wait_for_use
    )
    app = SimpleNamespace(state=SimpleNamespace(models=SimpleNamespace(find=lambda *_: model)))
    request = Request({"type": "http", "app": app, "state": state})
    assert await model_choice.engine_for(request, "a") is engine
    assert noted_while_waiting == ([] if is_loaded else [True]) and ("waits_for_model" in state) != is_loaded


async def test_a_copy_of_a_request_does_not_wait_until_its_model_is_loaded() -> None:
    model = SimpleNamespace(name="a", kind=GENERATE, begin_use=lambda _: None)  # nor may it call wait_for_use
    app = SimpleNamespace(state=SimpleNamespace(models=SimpleNamespace(find=lambda *_: model)))
    state: dict[str, Any] = {"caller": ANONYMOUS, "may_not_wait": True}
    with pytest.raises(WorkerNotReady, match="the model 'a' cannot be used at once"):
        await model_choice.engine_for(Request({"type": "http", "app": app, "state": state}), "a")


@pytest.mark.parametrize("mirrors", [{"alias": {"new": 100.0}}, {}])
async def test_request_is_copied_by_the_name_and_the_kind_that_its_route_knows(mirrors: Any) -> None:
    asked = []

    def mirror_of(*arguments: Any) -> str:
        asked.append(arguments)
        return "new"

    use = SimpleNamespace(engine=SimpleNamespace(kind=GENERATE))
    model = SimpleNamespace(name="a", kind=GENERATE, begin_use=lambda _: use)
    models = SimpleNamespace(has_choice=True, find=lambda *_: model, mirrored=lambda: mirrors, mirror_of=mirror_of)
    state: dict[str, Any] = {"caller": ANONYMOUS}
    app = SimpleNamespace(state=SimpleNamespace(models=models))
    request = Request({"type": "http", "app": app, "state": state, "path": "/api/chat"})
    keep_body(request, b"{}")
    await model_choice.engine_for(request, "alias")
    assert asked == ([("alias", ANONYMOUS, GENERATE)] if mirrors else [])
    assert state.get("mirrored") == (Copy("new", "/api/chat", b"{}") if mirrors else None)
    assert "body_to_copy" not in state


def test_the_key_of_a_long_conversation_is_made_of_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a conversation of 8 MB was encoded as a whole on the event loop, in 4 ms, to find its model."""
    encoded: list[bytes] = []
    monkeypatch.setattr(model_choice, "encode", lambda value: encoded.append(encode(value)) or encoded[-1])
    text = "a" * 2**23
    parts = {"role": "user", "content": [{"type": "text", "text": "b" * 2**12}] * 1000}
    many = [{"role": "system", "content": "c" * 100}] * 2**14
    for conversation in ([{"role": "user", "content": text}], [parts], many, [{"role": "user", "x" * 2**20: 1}]):
        key = model_choice._beginning(conversation)
        assert len(key) < 2**18 and key == model_choice._beginning(conversation)
    assert max(map(len, encoded)) < 2**18


def test_conversations_that_begin_alike_have_one_key_and_others_do_not() -> None:
    first = {"role": "user", "content": "a" * 2**17}
    key = model_choice._beginning([first])
    assert key == model_choice._beginning([first, {"role": "assistant", "content": "b"}, {"role": "user"}])
    assert key != model_choice._beginning([{"role": "user", "content": "a" * (2**17 + 1)}])
    assert key != model_choice._beginning([{"role": "user", "content": "b" + "a" * (2**17 - 1)}])
    short = [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "n": 1}]}]
    assert model_choice._beginning(short) == encode(short), "as in earlier versions, so that its model stays the same"


class WithAdapters:
    """A loaded model with the adapter `sql`."""

    kind = GENERATE

    def __init__(self, name: str) -> None:
        self.name = name
        self.adapter_paths = {"sql": f"/{name}/sql"}

    def adapters_for(self, caller: Caller) -> dict[str, str]:
        return self.adapter_paths


@pytest.mark.parametrize(("named", "path"), [("first", "/first/sql"), ("second", "/second/sql"), (None, "/first/sql")])
async def test_adapter_is_that_of_the_model_which_the_request_names(
    monkeypatch: pytest.MonkeyPatch, named: str | None, path: str
) -> None:
    served = {name: WithAdapters(name) for name in ("first", "second")}
    served["sql"] = WithAdapters("sql")  # a model with the adapter's name
    models = SimpleNamespace(
        has_choice=False, find=lambda name, *_: served[name], served=lambda _: list(served.values()), mirrored=dict
    )
    used: list[AdaptedModel] = []
    use = SimpleNamespace(engine=SimpleNamespace(kind=GENERATE))
    monkeypatch.setattr(AdaptedModel, "begin_use", lambda self, caller: used.append(self) or use)
    state: dict[str, Any] = {"caller": ANONYMOUS}
    request = Request({"type": "http", "app": SimpleNamespace(state=SimpleNamespace(models=models)), "state": state})
    await model_choice.engine_for(request, named, adapter=("adapter_id", "sql"))
    assert [each.path for each in used] == [path]


async def test_adapter_of_another_model_than_the_request_names_is_refused() -> None:
    served = {name: WithAdapters(name) for name in ("first", "second")}
    served["second"].adapter_paths = {}
    models = SimpleNamespace(find=lambda name, *_: served[name], served=lambda _: list(served.values()))
    state: dict[str, Any] = {"caller": ANONYMOUS}
    request = Request({"type": "http", "app": SimpleNamespace(state=SimpleNamespace(models=models)), "state": state})
    with pytest.raises(
        InvalidRequest, match="'sql' is an adapter of the model 'first', and the request names 'second'"
    ):
        await model_choice.engine_for(request, "second", adapter=("adapter_id", "sql"))
