"""Name everything that can go wrong, who caused it, and what the caller is told.

    ServekitError
    ├─ RequestError          the caller's doing
    │  ├─ InvalidRequest        400  the body is not what the endpoint takes
    │  ├─ ContextTooLong        400  prompt plus answer can never fit this server
    │  ├─ Unauthorized          401  no key, or one that the server does not know
    │  ├─ Forbidden             403  the key is not for this
    │  ├─ ModelNotFound         404  the server has no model of that name
    │  ├─ RequestTimeout        408  the head or the body did not come in time
    │  ├─ ProfilerRefuses       409  of servekit.profiling: steps are recorded already, or are not
    │  ├─ RequestTooLarge       413  the body is over the size limit
    │  ├─ UnsupportedEncoding   415  the body is compressed
    │  ├─ RateLimited           429  the key's own limit is reached
    │  ├─ HeadersTooLarge       431  the request's head is over the size limit
    │  ├─ DeadlineExceeded      504  the request's own deadline passed before it was ready to wait
    │  ├─ QueueFull             503  too much is waiting already; try again later
    │  └─ TooManyConnections    503  as many connections are open as may be
    ├─ WorkerError           a process's doing
    │  ├─ WorkerNotReady        503  the model is still loading, or the server is going down
    │  ├─ WorkerLost            503  the worker process ended, and no other took its place
    │  ├─ WorkerTimeout         503  the worker process did not answer in time
    │  └─ RequestCrashesWorker  500  workers ended again and again over this very request
    ├─ ConfigError           the operator's doing; the process ends with exit code 2
    ├─ ServerTrouble         of servekit.terminal: a server that was asked does not answer, or not what was asked
    └─ InternalError         our bug, 500

Every message gives the value, the limit, and the remedy. `assert` is for our own mistakes, these are for the world's.
"""

from __future__ import annotations

from typing import ClassVar


class ServekitError(Exception):
    """The root of the tree; `status`, `type` and `code` become the HTTP answer."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, param: str | None = None, code: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.answer_code = code or self.code
        self.retry_after_s = retry_after_s


class RequestError(ServekitError):
    """The caller can mend it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(RequestError):
    """The body is not valid JSON, or not what the endpoint takes."""

    code = "invalid_value"


class ContextTooLong(RequestError):
    """Prompt plus requested output exceed what this server can ever hold."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The request shows no key, or one that the server does not know."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The request's key does not open what it asks for."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class RequestTimeout(RequestError):
    """The head or the body did not come in time."""

    status = 408
    code = "request_timeout"


class RequestTooLarge(RequestError):
    """The body is over the size limit."""

    status = 413
    code = "request_too_large"


class UnsupportedEncoding(RequestError):
    """The body is compressed; what it grows to would be known only by unpacking it."""

    status = 415
    code = "unsupported_encoding"


class RateLimited(RequestError):
    """The limit of the request's own key is reached."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class HeadersTooLarge(RequestError):
    """The request's head is over the size limit."""

    status = 431
    code = "headers_too_large"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed while it was made ready."""

    status = 504
    code = "deadline_exceeded"


class QueueFull(RequestError):
    """Admitting the request would exceed the bound on waiting requests."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class TooManyConnections(RequestError):
    """As many connections are open as may be."""

    status = 503
    type = "overloaded_error"
    code = "too_many_connections"


class WorkerError(ServekitError):
    """A worker process failed its client; trying again can help."""

    status = 503
    code = "worker_unavailable"


class WorkerNotReady(WorkerError):
    """No worker has a model loaded, or the server is going down."""


class WorkerLost(WorkerError):
    """The worker process ended while its sequences were running."""


class WorkerTimeout(WorkerError):
    """The worker process did not answer within its deadline."""


class RequestCrashesWorker(WorkerError):
    """Workers ended again and again while they computed this request, the last one while it computed nothing else."""

    status = 500
    code = "request_crashes_worker"


def shutting_down() -> WorkerNotReady:
    """What everybody is told while the server ends, wherever their request has come to."""
    return WorkerNotReady("the server is shutting down; please send the request again", retry_after_s=5)


class ConfigError(ServekitError):
    """A setting is wrong, or the model and the settings do not fit each other."""

    code = "invalid_config"


class InternalError(ServekitError):
    """A bug of ours that a client happened to meet."""
