"""Settings of a model that runs on another server: the table `remote` of its entry in the model file."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(gt=0.0, le=3600.0)]

# The form of each field, for error messages.
TAKES = {
    "url": "an address such as 'https://api.example.com/v1' or 'http://triton:8000', without user, query and fragment",
    "api_key_env": "the name of an environment variable, which has the API key",
    "dialect": "'openai', 'vllm' or 'tgi', and for models that embed or rerank 'openai', 'vllm' or 'tei'",
    "proxy": "the address of an HTTP proxy such as 'http://proxy:3128', without a user",
    "max_connections": "an integer from 1 to 4096",
    "connect_timeout": "a number above 0 up to 3600: seconds",
    "first_token_timeout": "a number above 0 up to 3600: seconds",
    "token_timeout": "a number above 0 up to 3600: seconds",
    "max_retries": "an integer from 0 to 10: of one request",
    "retry_ratio": "a number from 0 to 1: retries for each request, on average",
    "failures_to_open": "an integer from 1 to 1000: failures in a row",
    "cooldown": "a number above 0 up to 3600: seconds",
    "command": "a list of texts: the program that starts vLLM, such as ['/opt/vllm/bin/vllm']",
    "arguments": "a list of texts: flags of `vllm serve`, such as ['--enforce-eager']",
    "environment": "a table of names and texts, such as { VLLM_CPU_KVCACHE_SPACE = '4' }",
    "answer_timeout": "a number above 0 up to 3600: seconds",
    "max_batch_size": "an integer from 1 to 1024: inputs in one request to the server",
    "load_timeout": "a number above 0 up to 3600: seconds",
    "model_control_mode": "'none' or 'explicit', as the server's own --model-control-mode",
}


class ServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the server of a model is, and how often it is asked. Subclasses add what their kind of server needs."""

    url: Annotated[str, Meta(pattern=r"^https?://[^\s/?#@\\]+(/[^\s?#\\]*)?\Z", max_length=2048)]
    api_key_env: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}\Z")] | None = None
    proxy: Annotated[str, Meta(pattern=r"^https?://[^\s/?#@\\]+/?\Z", max_length=2048)] | None = None
    max_connections: Annotated[int, Meta(ge=1, le=4096)] = 64
    connect_timeout: Seconds = 5.0
    max_retries: Annotated[int, Meta(ge=0, le=10)] = 2  # of one request, before any of its answer has come
    retry_ratio: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.2  # retries for each request, over all of a tenant
    # Failures in a row at a tenant's requests that open its circuit breaker.
    failures_to_open: Annotated[int, Meta(ge=1, le=1000)] = 5
    cooldown: Seconds = 5.0  # that it stays open; doubled after each failed probe, up to a minute

    # The name of the setting that bounds the wait for a connection, and then the wait for the first part of the answer.
    first_answer_setting: ClassVar[str]

    @property
    def first_answer_timeout_s(self) -> float:
        """The value of that setting."""
        value: float = getattr(self, self.first_answer_setting)
        return value


class OpenAISettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that speaks OpenAI's API: kind `openai`."""

    # vllm: the server takes vLLM's parameters besides OpenAI's, as SGLang and servekit do, too.
    # tgi: the server takes fewer than OpenAI's, and max_tokens in the place of max_completion_tokens.
    dialect: Literal["openai", "vllm", "tgi"] = "openai"
    first_token_timeout: Seconds = 120.0  # for a connection, and then again for the first piece of the answer
    token_timeout: Seconds = 60.0  # for each further piece

    first_answer_setting: ClassVar[str] = "first_token_timeout"


class TritonSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that speaks KServe's protocol V2: kind `triton`."""

    answer_timeout: Seconds = 60.0  # for a connection, and then again for the whole answer
    load_timeout: Seconds = 300.0  # until the server has loaded the model
    # explicit: the model is loaded there when it is loaded here, and unloaded there when it is unloaded here.
    model_control_mode: Literal["none", "explicit"] = "none"

    first_answer_setting: ClassVar[str] = "answer_timeout"


PredictorDialect = Literal["openai", "vllm", "tei"]


class PredictorServerSettings(ServerSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A server that computes embeddings or scores documents: kinds `embed` and `rerank`, with `remote`."""

    # vllm: the server takes vLLM's parameters, too. tei: it is text-embeddings-inference, with its own routes.
    dialect: PredictorDialect = "openai"
    answer_timeout: Seconds = 60.0  # for a connection, and then again for the whole answer
    max_batch_size: Annotated[int, Meta(ge=1, le=1024)] = 32  # inputs of one request; text-embeddings-inference's limit

    first_answer_setting: ClassVar[str] = "answer_timeout"


class VllmSettings(OpenAISettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this server starts vLLM and sends requests to it: kind `vllm`."""

    url: str = "http://vllm/v1"  # the host name is never resolved: requests go through a socket file
    dialect: Literal["openai", "vllm", "tgi"] = "vllm"
    command: Annotated[tuple[str, ...], Meta(min_length=1)] = ("vllm",)  # the program, with arguments before `serve`
    arguments: list[str] = []  # of `vllm serve`
    environment: dict[str, str] = {}


# Fields that have a fixed value because this server starts vLLM itself.
FIXED_OF_VLLM = ("url", "dialect", "api_key_env", "proxy")
