"""Who may use which model, and how a request finds one, without any process."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from servekit.api.app import create_app
from servekit.api.auth.keys import parse_keys_file
from servekit.config import ServeConfig
from servekit.engine.adapted_model import adapted_models
from servekit.engine.caller import Caller
from servekit.engine.model_kind import GENERATE
from servekit.errors import ConfigError, InvalidRequest, ModelNotFound, QueueFull, WorkerNotReady
from servekit.models import several_models
from servekit.models.model_file import ModelFile, ModelSpec, parse_model_file
from servekit.models.read_file import estimated_bytes, with_kinds
from servekit.models.several_models import SeveralModels
from tests.support.asgi import Answer, ask, bearer

KEYS = """
[[key]]
key = "of-search"
tenant = "search"
[[key]]
key = "of-law"
tenant = "law"
[[key]]
key = "of-operator"
tenant = "operator"
admin = true
"""
MODELS = """
[[model]]
id = "open"
model = "sim:instant"
keep = "on_demand"
[[model]]
id = "secret"
aliases = ["hidden"]
model = "sim:instant"
keep = "on_demand"
tenants = ["law"]
[[alias]]
name = "both"
models = { open = 1, secret = 1 }
"""
CONFIG = ServeConfig(api_keys_file="keys.toml", models="models.toml")
LAW, SEARCH = Caller("law"), Caller("search")


def parsed(text: str = MODELS) -> ModelFile:
    return with_kinds(parse_model_file(text.encode(), "models.toml", CONFIG, "cpu"), "models.toml")


@pytest.fixture
def models() -> SeveralModels:
    return SeveralModels(CONFIG, parsed())


@pytest.fixture
def app(models: SeveralModels) -> Starlette:
    return create_app(models, parse_keys_file(KEYS.encode(), "keys.toml"))


async def post(app: Starlette, path: str, key: str, **fields: Any) -> Answer:
    return await ask(app, "POST", path, bearer(key), body=json.dumps(fields).encode())


async def test_key_gets_for_a_model_that_it_may_not_use_what_an_unknown_model_gets(app: Starlette) -> None:
    for name in ("secret", "hidden", "both"):
        hidden = await post(app, "/v1/completions", "of-search", model=name, prompt="x")
        unknown = await post(app, "/v1/completions", "of-search", model="nothing", prompt="x")
        assert hidden.status == unknown.status == 404
        assert hidden.body == unknown.body.replace(b"nothing", name.encode()), "the same answer, but for the name"
        assert "secret" not in hidden.error["message"].partition("does not exist")[2]
    listed = json.loads((await ask(app, "GET", "/v1/models", bearer("of-search"))).body)["data"]
    assert [each["id"] for each in listed] == ["open"]
    assert (await ask(app, "GET", "/v1/models/secret", bearer("of-search"))).status == 404
    listed = json.loads((await ask(app, "GET", "/v1/models", bearer("of-law"))).body)["data"]
    assert [each["id"] for each in listed] == ["open", "secret"]
    for path in ("/ui/state?model=secret", "/info?model=secret"):
        scope_path, _, query = path.partition("?")
        answer = await ask_with_query(app, scope_path, query, "of-search")
        assert answer.status == 404


async def ask_with_query(app: Starlette, path: str, query: str, key: str) -> Answer:
    async def with_query(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "query_string": query.encode()}, receive, send)

    return await ask(with_query, "GET", path, bearer(key))  # type: ignore[arg-type]


async def test_only_admin_keys_manage_models(app: Starlette) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/v1/models/open/load", {}),
        ("/v1/models/open/unload", {}),
        ("/v1/aliases/both", {"models": {"open": 1}}),
    ]
    for path, fields in calls:
        assert (await post(app, path, "of-law", **fields)).status == 403
    assert (await ask(app, "GET", "/v1/aliases", bearer("of-law"))).status == 403
    answer = await post(app, "/v1/models/secret/unload", "of-operator")
    assert answer.status == 200 and json.loads(answer.body) == {"id": "secret", "state": "cold"}
    assert (await post(app, "/v1/models/nothing/load", "of-operator")).status == 404


async def test_alias_is_divided_anew_by_one_call_and_rolled_back_by_another(
    app: Starlette, models: SeveralModels
) -> None:
    callers = [Caller("law", request_id=f"r{number}") for number in range(50)]
    answer = await post(app, "/v1/aliases/canary", "of-operator", models={"open": 0, "secret": 1})
    assert answer.status == 200 and json.loads(answer.body)["aliases"]["canary"] == {"open": 0.0, "secret": 1.0}
    assert {models.find("canary", caller).name for caller in callers} == {"secret"}
    await post(app, "/v1/aliases/canary", "of-operator", models={"open": 1})
    assert {models.find("canary", caller).name for caller in callers} == {"open"}
    for name, weights in (("open", {"open": 1}), ("new", {"none": 1}), ("new", {"open": 0}), ("new", {"open": -1})):
        assert (await post(app, f"/v1/aliases/{name}", "of-operator", models=weights)).status == 400
    assert "new" not in models.divided()


async def test_rollback_keeps_what_requests_stay_at_their_model_by(app: Starlette) -> None:
    async def listed() -> Any:
        return json.loads((await ask(app, "GET", "/v1/aliases", bearer("of-operator"))).body)["sticky"]

    await post(app, "/v1/aliases/canary", "of-operator", models={"open": 1, "secret": 9}, sticky="conversation")
    assert await listed() == {"both": "key", "canary": "conversation"}
    await post(app, "/v1/aliases/canary", "of-operator", models={"open": 1})
    assert await listed() == {"both": "key", "canary": "conversation"}
    await post(app, "/v1/aliases/canary", "of-operator", models={"open": 1}, sticky="key")
    assert await listed() == {"both": "key", "canary": "key"}


async def test_operators_remove_an_alias() -> None:
    models = SeveralModels(CONFIG, parsed('default = "both"\n' + MODELS))
    app = create_app(models, parse_keys_file(KEYS.encode(), "keys.toml"))
    await post(app, "/v1/aliases/canary", "of-operator", models={"open": 1})
    assert (await ask(app, "DELETE", "/v1/aliases/canary", bearer("of-law"))).status == 403
    answer = await ask(app, "DELETE", "/v1/aliases/canary", bearer("of-operator"))
    assert answer.status == 200 and list(json.loads(answer.body)["aliases"]) == ["both"]
    with pytest.raises(ModelNotFound):
        models.find("canary", LAW)
    for name, status in (("canary", 404), ("open", 404), ("both", 400)):
        answer = await ask(app, "DELETE", f"/v1/aliases/{name}", bearer("of-operator"))
        assert answer.status == status, "it is gone, or the name of a model, or what requests without a name get"
    assert b"change its weights with POST /v1/aliases/both instead" in answer.body
    models.replace_file(parsed())
    assert (await ask(app, "DELETE", "/v1/aliases/both", bearer("of-operator"))).status == 200


def test_key_keeps_its_model_and_anonymous_requests_are_divided_one_by_one() -> None:
    models = SeveralModels(CONFIG, parsed(MODELS.replace('tenants = ["law"]', "")))
    for tenant in ("law", "search"):
        names = {models.find("both", Caller(tenant, request_id=str(number))).name for number in range(30)}
        assert len(names) == 1
    assert len({models.find("both", Caller(request_id=str(number))).name for number in range(30)}) == 2


def test_name_of_any_model_is_the_default_one(models: SeveralModels) -> None:
    for name in (None, "", "dummy", "tgi", "open"):
        assert models.find(name, SEARCH).name == "open"
    with pytest.raises(ModelNotFound, match="This server has 'open', 'secret', 'hidden', 'both'"):
        models.find("OPEN", LAW)


PACKED = """
[memory]
"cuda:0" = 100
"cuda:1" = 100
[[model]]
id = "own"
model = "sim:instant"
memory_bytes = 60
keep = "dedicated"
[[model]]
id = "a"
model = "sim:instant"
memory_bytes = 50
keep = "on_demand"
[[model]]
id = "b"
model = "sim:instant"
memory_bytes = 70
keep = "on_demand"
[[model]]
id = "kept"
model = "sim:instant"
memory_bytes = 30
"""


async def test_what_is_loaded_is_what_the_packing_said(caplog: pytest.LogCaptureFixture) -> None:
    file = parsed(PACKED)
    first, second = file.device_uses
    assert [[each.name for each in use.models] for use in (first, second)] == [["own"], ["a", "b", "kept"]]
    models = SeveralModels(CONFIG, file)
    with caplog.at_level("INFO", logger="servekit"):
        await models.start()
    try:
        assert {model.name for model in models.models if model.state == "ready"} == {"own", "kept"}
        for use in (first, second):
            assert models.residency.free(use.device) == use.shared_bytes
            assert all(line in caplog.messages for line in use.lines())
        for name in ("a", "b"):  # they take turns
            loaded = await models.load_model(name)
            assert models.residency.memory(name) == {"cuda:1": loaded.spec.workers.memory_bytes}  # type: ignore[union-attr]
        assert second.on_demand_bytes > (second.shared_bytes or 0)
        assert {model.name for model in models.models if model.state == "ready"} == {"own", "kept", "b"}
        with pytest.raises(InvalidRequest, match="stays loaded"):
            models.unload_model("own")
    finally:
        await models.stop()


async def test_memory_that_a_worker_has_measured_takes_the_place_of_the_estimate() -> None:
    text = "[memory]\ncpu = 8_000_000_000\n" + MODELS.replace("sim:instant", "demo").replace("tenants", "#")
    text = text.replace('id = "secret"', 'id = "secret"\nmemory_bytes = 1').replace(
        'id = "open"', 'id = "open"\nkv_cache_memory_bytes = 20_000_000'
    )
    file = with_kinds(parse_model_file(text.encode(), "models.toml", CONFIG, "cpu", estimated_bytes), "models.toml")
    estimates = {spec.id: spec.memory["cpu"] for spec in file.models}
    assert estimates["secret"] == 1 and 4e8 < estimates["open"] < 5e8
    models = SeveralModels(CONFIG, file)
    try:
        for name in estimates:
            await models.load_model(name)
        measured = models.residency.memory("open")["cpu"]
        assert measured != estimates["open"] and 1e8 < measured < 2e9
        assert models.residency.memory("secret") == {"cpu": 1}, "what was declared stays"
        models.replace_file(file)
        assert models.residency.memory("open") == {"cpu": measured}, "the estimate is no news"
    finally:
        await models.stop()


class Measuring:
    """Stands for the engine of a loaded model, whose worker has measured its memory."""

    kind = GENERATE
    state = "ready"
    failure = None
    max_prompt_tokens = 10
    worker = SimpleNamespace(memory_bytes=500)

    def __init__(self, spec: ModelSpec, may_start: asyncio.Event) -> None:
        self.config = spec.config
        self._may_start = may_start

    async def start(self) -> None:
        await self._may_start.wait()

    async def wait_until_failed(self) -> None:
        await asyncio.Event().wait()

    def fail_all(self, error: Exception) -> None: ...

    async def stop(self, graceful: bool = True) -> None: ...

    async def probe_readiness(self) -> bool:
        return False  # its worker is being replaced


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let all engines be such, which start when the event is set."""
    may_start = asyncio.Event()
    monkeypatch.setattr(SeveralModels, "_make_engine", lambda _, model: Measuring(model.spec, may_start))
    return may_start


ESTIMATED = """
[memory]
"cuda:0" = 100
[[model]]
id = "a"
model = "sim:instant"
device = "cuda:0"
keep = "on_demand"
"""


def estimated(text: str = ESTIMATED) -> ModelFile:
    return with_kinds(parse_model_file(text.encode(), "models.toml", CONFIG, "cuda:0", lambda _: 10), "models.toml")


async def test_model_that_takes_more_than_there_is_can_be_loaded_after_the_file_was_read_again(
    measuring: asyncio.Event, caplog: pytest.LogCaptureFixture
) -> None:
    measuring.set()
    models = SeveralModels(CONFIG, estimated())
    try:
        await models.load_model("a")
        assert models.residency.memory("a") == {"cuda:0": 100}
        assert "takes 500 bytes of cuda:0, and only 100 of them are counted" in caplog.text
        models.replace_file(estimated())
        models.unload_model("a")
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await models.load_model("a")
    finally:
        await models.stop()


async def test_memory_of_a_load_during_which_the_file_was_read_again_is_not_noted(measuring: asyncio.Event) -> None:
    models = SeveralModels(CONFIG, estimated())
    try:
        loading = asyncio.create_task(models.load_model("a"))
        await asyncio.sleep(0.01)
        models.replace_file(estimated(ESTIMATED.replace("cuda:0", "cuda:1")))
        measuring.set()
        await loading
        assert models.residency.memory("a") == {"cuda:0": 10}, "it runs where it was loaded"
        assert models.residency.free("cuda:1") == 100
    finally:
        await models.stop()


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_model_that_loads_for_longer_than_a_request_may_wait_is_loaded_all_the_same(
    measuring: asyncio.Event,
) -> None:
    clock = Clock()
    models = SeveralModels(CONFIG, estimated("max_load_wait = 60\n" + ESTIMATED), clock)
    model = models.find("a", LAW)
    try:
        loading = asyncio.create_task(models.load_model("a"))
        await asyncio.sleep(0)
        clock.now_s = 100.0  # the operator's call waits for longer than requests may
        measuring.set()
        await loading
        models.unload_model("a")
        await asyncio.sleep(0.01)
        assert model.state == "cold"
        measuring.clear()
        with pytest.raises(QueueFull, match=r"would take 100 s .* may wait for 60 s") as refused:
            await model.wait_for_use(LAW)
        assert refused.value.retry_after_s == 40, "then the rest of the load is short enough to wait for it"
        await asyncio.sleep(0)
        assert model.state == "loading"
        clock.now_s += 40.0
        waiting = asyncio.create_task(model.wait_for_use(LAW))
        await asyncio.sleep(0)
        measuring.set()
        (await waiting).release()
    finally:
        await models.stop()


async def test_operator_loads_a_model_at_once_that_requests_may_not_wait_for(measuring: asyncio.Event) -> None:
    clock = Clock()
    models = SeveralModels(CONFIG, estimated("max_load_wait = 60\n" + ESTIMATED), clock)
    try:
        for _ in range(2):
            measuring.clear()
            loading = asyncio.create_task(models.load_model("a"))
            await asyncio.sleep(0)
            clock.now_s += 100.0
            measuring.set()
            await loading
            models.unload_model("a")
            await asyncio.sleep(0.01)
    finally:
        await models.stop()


async def test_first_load_is_tried_though_requests_may_wait_for_less_than_a_load_is_assumed_to_take(
    measuring: asyncio.Event,
) -> None:
    models = SeveralModels(CONFIG, estimated())
    models.replace_file(estimated("max_load_wait = 2\n" + ESTIMATED))
    measuring.set()
    try:
        (await models.find("a", LAW).wait_for_use(LAW)).release()
    finally:
        await models.stop()


@pytest.mark.parametrize("remedy", ["operator", "settings", "none"])
async def test_failed_model_is_tried_at_once_when_an_operator_loads_it_or_its_settings_have_changed(
    measuring: asyncio.Event, monkeypatch: pytest.MonkeyPatch, remedy: str
) -> None:
    async def fail(_: Measuring) -> None:
        raise ConfigError("no such file")

    clock = Clock()
    models = SeveralModels(CONFIG, estimated(), clock)
    model = models.find("a", LAW)
    measuring.set()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Measuring, "start", fail)
            for _ in range(2):
                with pytest.raises(WorkerNotReady, match="no such file"):
                    await models.load_model("a")
        assert model.state == "failed"
        with pytest.raises(WorkerNotReady, match="no such file") as refused:
            await model.wait_for_use(LAW)
        assert refused.value.retry_after_s == 30, "a load of 30 s, which is longer than the backoff of 5 s"
        if remedy == "operator":
            assert (await models.load_model("a")).state == "ready"
            return
        models.replace_file(estimated(ESTIMATED + ("max_model_len = 7\n" if remedy == "settings" else "")))
        if remedy == "settings":
            (await model.wait_for_use(LAW)).release()
        else:
            with pytest.raises(WorkerNotReady, match="no such file"):
                await model.wait_for_use(LAW)
    finally:
        await models.stop()


class Cyclic(Measuring):
    """An engine that refers to itself, as real ones do: counting references does not free it."""

    def __init__(self, spec: ModelSpec, may_start: asyncio.Event) -> None:
        super().__init__(spec, may_start)
        self._itself = self
        self._ended = asyncio.Event()

    async def wait_until_failed(self) -> None:
        await self._ended.wait()

    async def stop(self, graceful: bool = True) -> None:
        self._ended.set()


async def test_memory_of_a_model_that_has_made_room_is_freed(
    measuring: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's own collector is set up so that it hardly ever looks at objects that have lived for long."""
    monkeypatch.setattr(SeveralModels, "_make_engine", lambda _, model: Cyclic(model.spec, measuring))
    monkeypatch.setattr(several_models, "COLLECT_DELAY_S", 0.01)
    models = SeveralModels(CONFIG, estimated())
    measuring.set()
    gc.disable()
    try:
        engine: Any = (await models.load_model("a")).engine
        is_freed = asyncio.Event()
        weakref.finalize(engine, is_freed.set)
        del engine
        models.unload_model("a")
        await asyncio.wait_for(is_freed.wait(), 60)
    finally:
        gc.enable()
        await models.stop()


async def test_requests_that_wait_for_a_model_are_refused_when_the_server_drains(measuring: asyncio.Event) -> None:
    models = SeveralModels(CONFIG, estimated())
    try:
        waiting = asyncio.create_task(models.find("a", LAW).wait_for_use(LAW))
        await asyncio.sleep(0)
        models.drain(admits_requests=True)
        await asyncio.sleep(0.01)
        assert not waiting.done(), "with --reuse-port, requests on open connections are still served"
        models.drain()
        with pytest.raises(WorkerNotReady, match="shutting down"):
            await asyncio.wait_for(waiting, 5)
    finally:
        await models.stop()


async def test_request_whose_time_ends_when_its_model_is_removed_is_told_that_there_is_no_such_model(
    measuring: asyncio.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (
        ESTIMATED
        + "memory_bytes = 60\n"
        + ESTIMATED.partition("100\n")[2].replace('"a"', '"b"')
        + "memory_bytes = 60\n"
    )
    limits: list[asyncio.Timeout] = []

    def limit(_: float) -> asyncio.Timeout:
        limits.append(asyncio.timeout(None))
        return limits[-1]

    measuring.set()
    models = SeveralModels(CONFIG, estimated(both))
    try:
        await models.load_model("a")
        use = await models.find("a", LAW).wait_for_use(LAW)
        monkeypatch.setattr(several_models, "pause_tolerant_timeout", limit)
        waiting = asyncio.create_task(models.find("b", LAW).wait_for_use(LAW))
        await asyncio.sleep(0.01)
        assert models.find("b", LAW).state == "waiting"
        limits[0].reschedule(asyncio.get_running_loop().time())
        asyncio.get_running_loop().call_soon(models.replace_file, estimated(ESTIMATED + "memory_bytes = 60\n"))
        with pytest.raises(ModelNotFound, match="is no longer in the models file"):
            await asyncio.wait_for(waiting, 5)
        use.release()
    finally:
        await models.stop()


@pytest.mark.parametrize("is_kept", [True, False])
async def test_model_that_recovers_makes_a_server_unready_only_if_it_should_be_loaded(
    measuring: asyncio.Event, is_kept: bool
) -> None:
    measuring.set()
    models = SeveralModels(CONFIG, estimated(ESTIMATED.replace("on_demand", "always" if is_kept else "on_demand")))
    try:
        await models.start()
        await models.load_model("a")
        assert await models.probe_readiness() is not is_kept
    finally:
        await models.stop()


async def test_no_tenant_takes_all_places_of_those_that_wait_for_a_model(measuring: asyncio.Event) -> None:
    models = SeveralModels(CONFIG, estimated(ESTIMATED + "max_num_queued_reqs = 4\n"))
    model = models.find("a", LAW)
    try:
        waiting = [asyncio.create_task(model.wait_for_use(SEARCH)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match=r"2 requests wait .*, 2 of them for your API key.*the limit is 4"):
            await model.wait_for_use(SEARCH)
        waiting.append(asyncio.create_task(model.wait_for_use(LAW)))
        operators = asyncio.create_task(models.load_model("a"))
        await asyncio.sleep(0)
        measuring.set()
        for each in waiting:
            (await each).release()
        await operators
        assert model.places.total == 0
        models.replace_file(estimated(ESTIMATED + "max_num_queued_reqs = 6\n"))
        assert model.places.limit == 6
    finally:
        await models.stop()


async def test_new_file_adds_removes_and_renames_models(models: SeveralModels) -> None:
    first = models.find("open", LAW)
    text = (
        MODELS.replace('id = "secret"', 'id = "new"').replace("secret = 1", "new = 3").replace('["law"]', '["search"]')
    )
    models.replace_file(parsed(text))
    assert models.find("open", LAW) is first, "what stays is the same"
    assert models.find("hidden", SEARCH).name == "new"
    assert [each.name for each in models.served(SEARCH)] == ["open", "new"]
    assert [each.name for each in models.served(LAW)] == ["open"]
    for name in ("secret", "new"):
        with pytest.raises(ModelNotFound):
            models.find(name, LAW)
    assert models.divided() == {"both": {"open": 1.0, "new": 3.0}}


def test_metrics_have_each_family_once(models: SeveralModels) -> None:
    models.find("secret", LAW)
    lines = models.metrics.render().decode().splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for name in ("open", "secret"):
        assert f'servekit_model_state{{model_name="{name}",state="cold"}} 1.0' in lines
    samples = [line.rpartition(" ")[0] for line in lines if not line.startswith("#")]
    assert len(samples) == len(set(samples))


KINDS = """
default = "chat"
[[model]]
id = "chat"
model = "sim:instant"
keep = "on_demand"
[[model]]
id = "embedder"
model = "sim:instant"
kind = "embed"
keep = "on_demand"
tenants = ["law"]
[[model]]
id = "other-embedder"
model = "sim:instant"
kind = "embed"
keep = "on_demand"
"""


async def test_request_without_a_name_gets_the_first_model_of_its_kind_that_it_may_use() -> None:
    models = SeveralModels(CONFIG, parsed(KINDS))
    assert [each.kind for each in models.models] == ["generate", "embed", "embed"]
    for kind, of_law, of_search in (
        (None, "chat", "chat"),
        ("generate", "chat", "chat"),
        ("embed", "embedder", "other-embedder"),
        ("rerank", "chat", "chat"),
    ):
        assert (models.find(None, LAW, kind=kind).name, models.find("", SEARCH, kind=kind).name) == (
            of_law,
            of_search,
        )
    assert models.find("chat", LAW, kind="embed").name == "chat", "a name is a name"


def test_request_without_a_name_is_copied_only_if_the_default_alias_is_of_its_kind() -> None:
    text = KINDS.replace('default = "chat"', 'default = "try"').replace("tenants", "#")
    split = """[[model]]
id = "new"
model = "sim:instant"
keep = "on_demand"
[[alias]]
name = "try"
models = { chat = 1 }
mirror = "new"
"""
    models = SeveralModels(CONFIG, parsed(text + split))
    for name in (None, "", "try"):
        assert models.mirror_of(name, LAW, "generate") == "new"
    assert models.mirror_of(None, LAW, "embed") is None and models.mirror_of("chat", LAW, "generate") is None


async def test_server_says_whether_requests_wait_until_a_model_is_loaded(measuring: asyncio.Event) -> None:
    models = SeveralModels(CONFIG, estimated())
    try:
        loading = asyncio.create_task(models.load_model("a"))
        await asyncio.sleep(0.01)
        assert models.has_waiting
        measuring.set()
        await loading
        assert not models.has_waiting
    finally:
        await models.stop()


async def test_refusal_of_a_model_of_another_kind_names_those_that_the_key_may_use() -> None:
    app = create_app(SeveralModels(CONFIG, parsed(KINDS)), parse_keys_file(KEYS.encode(), "keys.toml"))
    for key, names in (("of-law", "'embedder', 'other-embedder'"), ("of-search", "'other-embedder'")):
        answer = await post(app, "/v1/embeddings", key, model="chat", input="x")
        assert answer.status == 400 and answer.error["code"] == "not_supported"
        assert f"generates text; it computes no embeddings. Please name {names}." in answer.error["message"]
    answer = await post(app, "/v1/completions", "of-law", model="embedder", prompt="x")
    assert answer.status == 400 and "it generates no text. Please name 'chat'." in answer.error["message"]


@pytest.mark.parametrize("setting", ['lora = "a=/a"', "enable_lora = true"])
def test_adapters_of_a_model_that_generates_no_text_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"'other-embedder': (lora|enable_lora) = .* takes no LoRA adapters"):
        parsed(KINDS + setting)


async def test_alias_stands_for_models_of_one_kind() -> None:
    with pytest.raises(ConfigError, match="alias 'mixed': its models must be of one kind"):
        parsed(KINDS + '[[alias]]\nname = "mixed"\nmodels = { chat = 1, embedder = 1 }\n')
    app = create_app(SeveralModels(CONFIG, parsed(KINDS)), parse_keys_file(KEYS.encode(), "keys.toml"))
    answer = await post(app, "/v1/aliases/mixed", "of-operator", models={"chat": 1, "embedder": 1})
    assert answer.status == 400 and "'chat' of kind generate and 'embedder' of kind embed" in answer.error["message"]


def test_setting_that_a_kind_cannot_have_is_refused_with_the_models_name() -> None:
    with pytest.raises(ConfigError, match=r"models\.toml: the model 'embedder': quantization = 'int4'"):
        parsed(KINDS.replace('kind = "embed"\n', 'kind = "embed"\nquantization = "int4"\n', 1))
    with pytest.raises(ConfigError, match="kind"):
        parsed(KINDS.replace('kind = "embed"', 'kind = "embedding"'))


ADAPTERS = """
[[model]]
id = "base"
aliases = ["other-name"]
model = "sim:instant"
keep = "on_demand"
lora = "sql=/sql,law=/law"
"""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('id = "second"\nmodel = "demo"\nlora = "law=/x"', "'second': the adapter 'law' .* of an adapter of 'base'"),
        ('id = "second"\nmodel = "demo"\nlora = "base=/x"', "'second': the adapter 'base' .* has the name of a model"),
        ('id = "second"\nmodel = "demo"\nlora = "other-name=/x"', "the adapter 'other-name' .* of an alias"),
        ('id = "law"\nmodel = "demo"', "'base': the adapter 'law' .* has the name of a model"),
        ('id = "dummy"\nmodel = "demo"', "'dummy' cannot be the name of a model, because it stands for any model"),
        ('id = "x"\naliases = ["tgi"]\nmodel = "demo"', "'tgi' cannot be the name of an alias"),
        ('id = "x"\nmodel = "demo"\n[[alias]]\nname = "sql"\nmodels = { x = 1 }', "adapter 'sql' .* of an alias"),
    ],
)
def test_each_name_stands_for_one_model_alias_or_adapter(more: str, message: str) -> None:
    parsed(ADAPTERS)
    with pytest.raises(ConfigError, match=message):
        parsed(ADAPTERS + "[[model]]\n" + more)


@pytest.mark.parametrize("name", ["sql", "base", "other-name", "dummy"])
def test_alias_that_an_operator_makes_hides_no_other_name(name: str) -> None:
    models = SeveralModels(CONFIG, parsed(ADAPTERS))
    with pytest.raises(InvalidRequest, match="choose another name"):
        models.divide(name, {"base": 1.0}, "key")
    models.divide("free", {"base": 1.0}, "key")


def test_refusal_of_an_unknown_name_lists_the_adapters_that_the_caller_may_use() -> None:
    second = '[[model]]\nid = "second"\nmodel = "demo"\nlora = "of-law=/x"\nkeep = "on_demand"\ntenants = ["law"]\n'
    models = SeveralModels(CONFIG, parsed(ADAPTERS + second))
    for caller, names in (
        (LAW, "'base', 'second', 'other-name', 'sql', 'law', 'of-law'"),
        (SEARCH, "'base', 'other-name', 'sql', 'law'"),
    ):
        with pytest.raises(ModelNotFound, match=rf"This server has {names}\."):
            models.find("nothing", caller)


def test_adapter_is_there_only_for_its_tenants() -> None:
    models = SeveralModels(CONFIG, parsed(ADAPTERS + 'adapter_tenants = { law = ["law"] }\n'))
    assert models.find("law", LAW).name == "law" and models.find("sql", SEARCH).name == "sql"
    with pytest.raises(ModelNotFound, match=r"This server has 'base', 'other-name', 'sql'\."):
        models.find("law", SEARCH)
    for caller, names in ((LAW, ["sql", "law"]), (SEARCH, ["sql"])):
        assert [each.name for each in adapted_models(models.served(caller), caller)] == names


async def test_request_that_waits_for_a_model_which_leaves_the_file_is_told_so(measuring: asyncio.Event) -> None:
    models = SeveralModels(CONFIG, estimated())
    try:
        waiting = asyncio.create_task(models.find("a", LAW).wait_for_use(LAW))
        await asyncio.sleep(0)
        models.replace_file(estimated(ESTIMATED.replace('"a"', '"b"')))
        with pytest.raises(ModelNotFound, match="'a' is no longer in the models file"):
            await waiting
    finally:
        measuring.set()
        await models.stop()
