"""Define every error of servekit in one tree: its cause, its HTTP status and its code.

    ServekitError
    ├─ RequestError          the request is at fault, or comes at the wrong time; the client can correct or repeat it
    │  ├─ InvalidRequest        400  the body is not what the endpoint accepts
    │  ├─ ContextTooLong        400  prompt plus answer can never fit into this server
    │  ├─ Unauthorized          401  there is no API key, or an unknown one
    │  ├─ Forbidden             403  the API key does not permit this
    │  ├─ ModelNotFound         404  the server has no model of that name
    │  ├─ RequestNotFound       404  no unfinished request has this id, or none that can be explained
    │  ├─ ObjectNotFound        404  the tenant has no file or batch of that id
    │  ├─ RequestTimeout        408  the headers or the body did not arrive in time
    │  ├─ ProfilerRefuses       409  in servekit.engine.profiling: a recording is running already, or none is
    │  ├─ RequestTooLarge       413  the body is over the size limit
    │  ├─ UnsupportedEncoding   415  the body is compressed
    │  ├─ RateLimited           429  the API key's own limit is reached
    │  ├─ HeadersTooLarge       431  the headers are over the size limit
    │  ├─ HttpFeatureUnsupported 501 the request uses a part of HTTP that the server does not implement
    │  ├─ QueueFull             503  the waiting queue is full
    │  ├─ TooManyConnections    503  the maximum number of connections is open
    │  ├─ HttpVersionUnsupported 505 the request is of another version of HTTP
    │  └─ DeadlineExceeded      504  the request's deadline passed before it could enter the queue
    ├─ WorkerError           a worker process failed, or a server that stands in its place
    │  ├─ WorkerNotReady        503  the model is still loading, or the server is shutting down
    │  ├─ WorkerLost            503  the worker process ended, and no other replaced it in time
    │  ├─ WorkerTimeout         503  the worker process did not answer in time
    │  ├─ HandshakeFailed       503  in servekit.protocol.handshake: a worker and a server do not accept each other
    │  ├─ RequestCrashesWorker  500  workers ended repeatedly while they computed this request
    │  ├─ RemoteFailed          502  the server of a remote model failed, or sent an invalid answer
    │  ├─ RemoteUnavailable     503  the server of a remote model cannot be reached, or is too busy
    │  └─ RemoteTimeout         504  the server of a remote model did not answer in time
    ├─ SandboxUnavailable    503  the process that renders chats and compiles grammars failed twice
    ├─ StorageFailed         507  files and batches cannot be written, or have no room left
    ├─ ConfigError           a setting is wrong, or does not fit the model; the process exits with code 2
    │  ├─ ModelNotDownloaded     in servekit.engine.hub: the model is not on this machine, and must not be downloaded
    │  └─ FileNotInRepository    in servekit.engine.hub: the model's repository has no file of that name
    ├─ RequestFailed         in servekit.client: a server refused a request of one of our clients, or did not answer
    ├─ StandardStreamFailed  in servekit.terminal: standard input or output cannot be used
    └─ InternalError         500  a bug in servekit

Every message gives the value, the limit and the remedy. `assert` is for programming errors inside servekit, these
classes are for errors of requests, settings, processes and devices.
"""

from __future__ import annotations

from typing import ClassVar


class ServekitError(Exception):
    """The root of the tree; `status`, `type` and `code` become the HTTP response."""

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
    """The request is at fault or comes at the wrong time; the client can correct or repeat it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(RequestError):
    """The body is not valid JSON, or not what the endpoint accepts."""

    code = "invalid_value"


class ContextTooLong(RequestError):
    """Prompt plus requested output exceed the longest sequence that this server can run."""

    code = "context_length_exceeded"


class Unauthorized(RequestError):
    """The request has no API key, or one that the server does not know."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The request's API key does not permit what it asks for."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ModelNotFound(RequestError):
    """The request names a model that is not served."""

    status = 404
    code = "model_not_found"


class RequestNotFound(RequestError):
    """The caller has no unfinished request with this id, or none that can be explained."""

    status = 404
    code = "request_not_found"


class ObjectNotFound(RequestError):
    """There is no file or batch of this id, or it belongs to another tenant."""

    status = 404
    code = "not_found"


class RequestTimeout(RequestError):
    """The headers or the body did not arrive in time."""

    status = 408
    code = "request_timeout"


class RequestTooLarge(RequestError):
    """The body is over the size limit."""

    status = 413
    code = "request_too_large"


class UnsupportedEncoding(RequestError):
    """The body is compressed, so its size is only known after unpacking it."""

    status = 415
    code = "unsupported_encoding"


class RateLimited(RequestError):
    """The limit of the request's API key is reached."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class HeadersTooLarge(RequestError):
    """The request line and headers are over the size limit."""

    status = 431
    code = "headers_too_large"


class HttpFeatureUnsupported(RequestError):
    """The request uses a part of HTTP that the server does not implement: a transfer coding."""

    status = 501
    code = "http_feature_unsupported"


class HttpVersionUnsupported(RequestError):
    """The request line names another version than HTTP/1.0 or HTTP/1.1."""

    status = 505
    code = "http_version_unsupported"


class DeadlineExceeded(RequestError):
    """The request's own deadline passed while its prompt was prepared."""

    status = 504
    code = "deadline_exceeded"


class QueueFull(RequestError):
    """Admitting the request would exceed the bound on the waiting queue."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class TooManyConnections(RequestError):
    """The maximum number of connections is open."""

    status = 503
    type = "overloaded_error"
    code = "too_many_connections"


class WorkerError(ServekitError):
    """A worker process failed, or a server that stands in its place; the client can repeat the request."""

    status = 503
    code = "worker_unavailable"


class WorkerNotReady(WorkerError):
    """No worker has the model loaded, or the server is shutting down."""


class WorkerLost(WorkerError):
    """The worker process ended while its sequences were running."""


class WorkerTimeout(WorkerError):
    """The worker process did not answer within its deadline."""


class RequestCrashesWorker(WorkerError):
    """Workers ended repeatedly while they computed this request; the last one computed nothing else."""

    status = 500
    code = "request_crashes_worker"


class RemoteFailed(WorkerError):
    """The server of a remote model failed while it answered, or sent an invalid answer."""

    status = 502
    code = "remote_failed"


class RemoteUnavailable(WorkerError):
    """The server of a remote model cannot be reached, refuses this server, or is too busy."""

    code = "remote_unavailable"


class RemoteTimeout(WorkerError):
    """The server of a remote model did not answer in time."""

    status = 504
    code = "remote_timeout"


def prompt_too_long(limit: int, min_tokens: int, param: str) -> ContextTooLong:
    """Return the error for a prompt that cannot fit, whatever its answer is. vLLM's clients know this text."""
    return ContextTooLong(
        f"This model's maximum context length is {limit} tokens. However, your prompt has at least {min_tokens}. "
        "Please reduce the length of the prompt (context_length_exceeded).",
        param=param,
    )


def shutting_down() -> WorkerNotReady:
    """Return the error for every request that the server can no longer serve because it is shutting down."""
    return WorkerNotReady("the server is shutting down; please send the request again", retry_after_s=5)


class SandboxUnavailable(ServekitError):
    """The process that renders chats and compiles grammars failed, and so did another try; the client can repeat."""

    status = 503
    code = "sandbox_unavailable"


class StorageFailed(ServekitError):
    """Files and batches cannot be written, because the disk or the tenant's share of the storage is full."""

    status = 507
    code = "storage_full"


class ConfigError(ServekitError):
    """A setting is wrong, or the model and the settings do not fit each other."""

    code = "invalid_config"


class InternalError(ServekitError):
    """A bug in servekit."""
