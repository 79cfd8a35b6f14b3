"""The HTTP API of a server's models. `create_app` puts its routes and layers together.

To add a route, add a handler to a module of servekit/api/routes/ and a line to that module's ENDPOINTS; a new module is
also added to the list here.

This code is not in the package's `__init__`: the process that decodes large bodies imports the schemas, but no engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from servekit.api import docs_page, openapi
from servekit.api.auth.keys import Key, Keyring, parse_api_key
from servekit.api.batch_runner import BatchRunner
from servekit.api.batch_storage import BatchStorage
from servekit.api.body_budget import BodyBudget
from servekit.api.body_decoder import BodyDecoder
from servekit.api.endpoint import Endpoint
from servekit.api.error_handlers import exception_handlers
from servekit.api.explanations import Explanations
from servekit.api.key_accounts import KeyAccounts, LocalKeyAccounts
from servekit.api.middleware.metrics import RequestMetrics
from servekit.api.middleware.stack import add_access_layers
from servekit.api.mirroring import Mirroring
from servekit.api.refusal_rate_limit import RefusalRateLimit
from servekit.api.responses.sse import KeepAlive
from servekit.api.routes import (
    anthropic,
    batches,
    console,
    explain,
    files,
    health,
    live,
    lora,
    native,
    ollama,
    openai,
    predictions,
    profile,
    responses_api,
    shared_paths,
    tgi,
    tokenize,
)
from servekit.api.routes import (
    models as model_routes,
)
from servekit.config import ServeConfig
from servekit.engine.interface import Models
from servekit.observability.request_trace import RequestTrace
from servekit.shared_budget import SharedBudget

ENDPOINTS: list[Endpoint] = [
    *shared_paths.ENDPOINTS,
    *native.ENDPOINTS,
    *tgi.ENDPOINTS,
    *openai.ENDPOINTS,
    *predictions.ENDPOINTS,
    *ollama.ENDPOINTS,
    *files.ENDPOINTS,
    *batches.ENDPOINTS,
    *responses_api.ENDPOINTS,
    *model_routes.ENDPOINTS,
    *lora.ENDPOINTS,
    *anthropic.ENDPOINTS,
    *tokenize.ENDPOINTS,
    *health.ENDPOINTS,
    *profile.ENDPOINTS,
    *explain.ENDPOINTS,
    *live.ENDPOINTS,
]


def create_app(
    models: Models,
    keys_of_file: Sequence[Key] = (),
    record: Callable[[RequestTrace], None] | None = None,
    accounts: KeyAccounts | None = None,
    created_s: int | None = None,
) -> Starlette:
    """Return the application for the models of a server, which may be one engine.

    Clients need a key if there are any: those of --api-key, and `keys_of_file`, which were read from --api-keys-file.
    `record` receives a trace of each request that has ended. `accounts` counts what each key uses, by default in this
    process. `created_s` is when the server began, in seconds since 1970, by default now. Raises ConfigError.
    """
    config = models.config
    assert keys_of_file or config.api_keys_file is None, "the keys file was not read, so no key would be needed"
    keyring = Keyring(_all_keys(config, keys_of_file))
    endpoints = [endpoint for endpoint in ENDPOINTS if config.ui or endpoint not in live.ENDPOINTS]
    app = Starlette(
        routes=[
            *(console.routes() if config.ui else ()),
            *(Route(endpoint.path, _Handler(endpoint), methods=[endpoint.method]) for endpoint in endpoints),
            *openapi.routes(endpoints),
            *docs_page.routes(endpoints),
        ],
        exception_handlers=exception_handlers(endpoints),
    )
    app.router.redirect_slashes = False  # the redirect would repeat the client's own Host header
    app.state.models = models
    app.state.body_decoder = BodyDecoder(config.sandbox_memory_bytes)
    app.state.refusal_rate_limit = RefusalRateLimit()
    app.state.keep_alive = KeepAlive(config.sse_keep_alive_interval)
    app.state.feeds = live.Feeds(models)
    app.state.keyring = keyring
    app.state.explanations = Explanations()
    app.state.created_s = int(time.time()) if created_s is None else created_s  # `created` of the model at /v1/models
    # With several API processes, each has its part of the memory for request bodies.
    bodies = BodyBudget(app.build_middleware_stack(), config.max_total_body_bytes // config.api_processes)
    app.state.uploads = SharedBudget(files.MAX_UPLOADS)
    app.state.batch_endpoints = tuple(endpoint.path for endpoint in endpoints if endpoint.in_batches)
    app.state.batch_storage = app.state.batch_runner = None
    if config.batch_dir is not None:
        app.state.batch_storage = storage = BatchStorage(config)
        app.state.batch_runner = BatchRunner(models, keyring, storage, bodies, {"app": app})
    app.state.mirroring = Mirroring(bodies, models, {"app": app}) if models.has_choice else None
    # These layers are outside Starlette's own middleware, so that its 404 and 500 answers pass through them, too.
    app.middleware_stack = RequestMetrics(
        add_access_layers(
            app.state.mirroring or bodies,
            config,
            keyring,
            accounts or LocalKeyAccounts(),
            {(method, each.path) for each in endpoints if each.is_public for method in (each.method, "HEAD")},
            is_open=console.is_open if config.ui else _is_never_open,
        ),
        models,
        app.routes,
        app.state.explanations,
        record,
    )
    return app


async def start(app: Starlette) -> None:
    """Start what runs alongside the requests: the process that decodes large bodies, and the batches."""
    await app.state.body_decoder.start()
    if app.state.batch_runner is not None:
        app.state.batch_runner.start()


async def stop(app: Starlette) -> None:
    """End it, before the engine stops. What batches have not answered is left for the next start."""
    if app.state.batch_runner is not None:
        await app.state.batch_runner.stop()
        await app.state.batch_storage.stop()
    if app.state.mirroring is not None:
        await app.state.mirroring.stop()
    await app.state.body_decoder.stop()


class _Handler:
    """An endpoint as a plain ASGI application.

    For a function, Starlette would add an exception layer to each route, in addition to the one around all routes. That
    layer takes a kilobyte for each open stream.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._handler = endpoint.handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._handler(Request(scope, receive, send))
        await response(scope, receive, send)


def replace_keys(app: Starlette, keys_of_file: Sequence[Key]) -> None:
    """Use these keys in place of the file's old ones from the next request on.

    Running requests continue: their cost is bounded. A stream of the live feed has no bound, so it ends when its key is
    removed.
    """
    assert keys_of_file, "without any key, no key would be needed"
    app.state.keyring.keys = _all_keys(app.state.models.config, keys_of_file)


def _all_keys(config: ServeConfig, keys_of_file: Sequence[Key]) -> list[Key]:
    keys_of_setting = [] if config.api_key is None else parse_api_key(config.api_key)
    return [*keys_of_setting, *keys_of_file]


def _is_never_open(_: Scope) -> bool:
    return False
