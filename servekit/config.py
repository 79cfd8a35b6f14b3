"""Every setting of the server, once: its name, type, range, default and meaning.

`ServeConfig` is the single source of `--help`, of the `SERVEKIT_*` environment, of the TOML file and of `/info`.
Precedence: command line > environment > TOML > default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from servekit.errors import ConfigError

DEMO_MODEL = "demo"
ENVIRONMENT_PREFIX = "SERVEKIT_"
SECRETS = frozenset({"api_key"})  # settings that are never told

Positive = Annotated[int, Meta(ge=1, le=2**40)]
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]
Milliseconds = Annotated[float, Meta(gt=0.0, le=60_000.0)]

# What Kubernetes sets in every container for a service whose name begins with `servekit`: its addresses, in many forms.
_SERVICE_LINK_NAME = re.compile(
    r"SERVEKIT_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_LINK = re.compile(r"SERVEKIT_(\w+_)?PORT=(tcp|udp|sctp)://.*", re.DOTALL)


class ServeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the operator chooses. Defaults serve the embedded demo model on this machine only."""

    model: Annotated[
        str, Meta(min_length=1, description="local path or Hugging Face id; demo is embedded; sim:SPEC simulates one")
    ] = DEMO_MODEL
    served_model_name: Annotated[str | None, Meta(description="name to report; MODEL by default")] = None
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 picks a free one")] = 8000
    reuse_port: Annotated[
        bool, Meta(description="share the port with other servers that do; the kernel deals connections to them")
    ] = False

    device: Annotated[
        str,
        Meta(pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="where to run; auto takes the first GPU if there is one"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="auto is float32 on a CPU and the checkpoint's own on a GPU"),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="auto reads the model's weights; dummy needs none and makes up random ones, for benchmarks"),
    ] = "auto"

    max_model_len: Annotated[
        Positive | None, Meta(description="longest prompt plus output in tokens; the model's own by default")
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="sequences that may run at the same time")] = 256
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=1_048_576, description="tokens that one step may compute, prefill and decode together")
    ] = 2048
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens in one KV block")] = 16
    num_kv_blocks: Annotated[
        Positive | None, Meta(description="KV blocks in the pool; as many as the memory for them holds by default")
    ] = None
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(description="memory for the KV cache; by default what the GPU leaves, on a CPU 1 GiB"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0.0, le=1.0, description="share of the GPU's memory that weights and KV cache may take")
    ] = 0.9

    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3", "int8"],
        Meta(description="what keys and values are kept in; auto is the model's dtype, the others are a byte each"),
    ] = "auto"

    max_steps_in_flight: Annotated[
        int, Meta(ge=1, le=4, description="steps sent to the worker before the first of them is answered")
    ] = 2
    enable_prefix_caching: Annotated[
        bool, Meta(description="compute the KV of a shared beginning once; requests that repeat it skip it")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "shortest", "fair"],
        Meta(description="who is next: fcfs first come, priority lowest number, shortest prompt, fair least served"),
    ] = "shortest"
    itl_target_ms: Annotated[
        Milliseconds | None,
        Meta(description="milliseconds between two tokens of a stream, which prefill beside it is cut to keep"),
    ] = None

    max_num_queued_reqs: Annotated[Positive, Meta(description="sequences that may wait; more are refused with 503")] = (
        4096
    )
    max_num_queued_tokens: Annotated[
        Positive, Meta(description="prompt tokens that may wait for their first step; more are refused with 503")
    ] = 2**22
    max_client_batch_size: Annotated[
        int, Meta(ge=1, le=65536, description="answers that one request may have computed")
    ] = 1024
    max_body_bytes: Annotated[Positive, Meta(description="largest request body")] = 8 * 2**20
    max_total_body_bytes: Annotated[
        Positive,
        Meta(description="bytes of request bodies that may be held at the same time; more are refused with 503"),
    ] = 2**28
    max_connections: Annotated[
        int, Meta(ge=1, le=1_000_000, description="connections that may be open; more are refused with 503")
    ] = 8192
    max_header_bytes: Annotated[
        int, Meta(ge=1024, le=2**20, description="largest request head: its first line and its headers")
    ] = 2**15
    header_timeout: Annotated[Seconds, Meta(description="seconds that a connection gets to send a request's head")] = (
        5.0
    )
    body_timeout: Annotated[Seconds, Meta(description="seconds that a request gets to send its body")] = 30.0
    send_timeout: Annotated[
        Seconds, Meta(description="seconds that a client may leave its answer unread before it is given up")
    ] = 30.0
    keep_alive_timeout: Annotated[
        Seconds, Meta(description="seconds that an idle connection is kept; longer than the load balancers before it")
    ] = 75.0

    api_key: Annotated[
        str | None, Meta(description="keys that clients may show, separated by commas; without any, nobody needs one")
    ] = None
    api_keys_file: Annotated[
        str | None, Meta(description="TOML file with keys, their tenants and their limits (docs/security.md)")
    ] = None
    cors_origins: Annotated[
        str | None, Meta(description="origins whose pages may call, separated by commas, or *; none by default")
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Meta(description="names to answer to, separated by commas, or *; by default, without keys, this machine's own"),
    ] = None

    step_timeout: Annotated[
        Seconds, Meta(description="most seconds for a step; a worker that takes longer is replaced")
    ] = 300.0
    heartbeat_timeout: Annotated[
        Seconds, Meta(description="seconds of silence after which a worker is replaced; ten times that while it loads")
    ] = 3.0
    max_worker_restarts: Annotated[
        int, Meta(ge=0, le=1000, description="starts of a worker in a row that may fail before the server ends")
    ] = 5
    worker_restart_timeout: Annotated[
        Seconds, Meta(description="seconds without a worker after which those who wait are told so")
    ] = 300.0
    load_timeout: Annotated[Seconds, Meta(description="seconds that loading a model may take")] = 1800.0
    shutdown_timeout: Annotated[
        float, Meta(ge=0.0, le=86400.0, description="seconds that running requests get to finish after SIGTERM")
    ] = 30.0
    sse_keep_alive_interval: Annotated[
        int, Meta(ge=0, le=3600, description="seconds between comments on an idle stream; 0 sends none")
    ] = 15
    stream_interval: Annotated[
        int, Meta(ge=1, le=4096, description="tokens of an answer that a stream sends together, after its first")
    ] = 1
    chat_template: Annotated[
        str | None, Meta(description="file with a Jinja chat template to use instead of the model's own")
    ] = None
    trust_request_chat_template: Annotated[
        bool, Meta(description="let a request bring its own chat template; it runs in a sandbox")
    ] = False
    sandbox_timeout: Annotated[
        float, Meta(gt=0.0, le=600.0, description="seconds that rendering a chat or compiling a grammar may take")
    ] = 2.0
    sandbox_memory_bytes: Annotated[
        int, Meta(ge=2**24, le=2**40, description="memory that rendering a chat or compiling a grammar may take")
    ] = 2**29
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="how much to log")] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="lines to read, or one JSON object for each line; never prompts")
    ] = "text"
    otlp_endpoint: Annotated[
        str | None, Meta(description="where to send OpenTelemetry traces, http://host:4318; needs servekit[otel]")
    ] = None
    ui: Annotated[bool, Meta(description="serve the console at / and /ui, and what it shows at /ui/events")] = True
    profile: Annotated[
        str | None, Meta(description="directory for traces of the worker's steps; POST /profile/start begins one")
    ] = None

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model


class Setting(Struct, frozen=True):
    """One field of `ServeConfig` as a person meets it."""

    name: str
    default: Any
    description: str
    accepts: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value, but has an opposite: `--x` and `--no-x`."""
        return isinstance(self.default, bool)

    @property
    def environment_name(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def settings() -> list[Setting]:
    """Every field of `ServeConfig`, in order."""
    described = msgspec.json.schema(ServeConfig)["$defs"]["ServeConfig"]["properties"]
    return [
        Setting(field.name, field.default, described[field.name]["description"], _accepts(described[field.name]))
        for field in msgspec.structs.fields(ServeConfig)
    ]


def _accepts(schema: Mapping[str, Any]) -> str:
    """A field's JSON schema in words: `integer from 1 to 4096`, `one of auto, float32`."""
    schema = schema.get("anyOf", [schema])[0]
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if "pattern" in schema:
        return "auto, cpu, cuda or cuda:N"  # the one setting with a pattern
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
        if key in schema
    ]
    kind = "true or false" if schema["type"] == "boolean" else schema["type"]
    return " ".join([kind, *bounds])


def load_config(arguments: Mapping[str, Any], environment: Mapping[str, str], toml: bytes | None = None) -> ServeConfig:
    """Merge the four sources into one checked value.

    `arguments` holds what the command line named, as text or truth value; `toml` is the content of the `--config`
    file. Raises ConfigError that names the field and what is accepted.
    """
    names = {setting.environment_name: setting.name for setting in settings()}
    from_environment = {
        names[name]: value
        for name, value in environment.items()
        if name in names and not _is_service_link(name, value)  # such as SERVEKIT_PORT
    }
    values = {**_read_toml(toml), **from_environment, **arguments}
    try:
        return msgspec.convert(values, ServeConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(str(error), values)) from None


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """What to say of SERVEKIT_* variables that are no setting, or not meant as one: mistakes of people, not errors."""
    names = [setting.environment_name for setting in settings()]
    ours = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    links = [name for name, value in ours.items() if _is_service_link(name, value)]
    told = [
        f"ignoring the unknown environment variable {name}; {nearest(name, names)}"
        for name in ours
        if name not in names and name not in links
    ]
    if links:
        told.append(
            f"ignoring {', '.join(links)}: Kubernetes service links, made for a service whose name begins with "
            "servekit; enableServiceLinks: false in the pod's spec leaves them out"
        )
    return told


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK_NAME.fullmatch(name) or _SERVICE_LINK.fullmatch(f"{name}={value}"))


def _read_toml(toml: bytes | None) -> dict[str, Any]:
    """The file's settings; dashes and underscores are the same in a name."""
    if toml is None:
        return {}
    try:
        table = msgspec.toml.decode(toml, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file is not TOML: {error}") from None
    return {name.replace("-", "_"): value for name, value in table.items()}


def _explain(message: str, values: Mapping[str, Any]) -> str:
    """msgspec's `Expected ... - at $.field`, turned to name the setting and what it takes."""
    _, _, path = message.partition(" - at `$.")
    known = {setting.name: setting for setting in settings()}
    if not path:
        unknown = message.split("`")[1]
        return f"unknown setting {unknown!r}; {nearest(unknown, list(known))}"
    setting = known[path.rstrip("`")]
    value = "***" if setting.name in SECRETS else values[setting.name]
    return (
        f"{setting.name} = {value!r} is not accepted ({setting.flag}, {setting.environment_name}): "
        f"it takes {setting.accepts}; {setting.description}"
    )


def nearest(name: str, known: list[str]) -> str:
    """What to say to whoever misspelt a name."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "see `servekit serve --help`"


def doubts(config: ServeConfig) -> list[str]:
    """Settings that are allowed together and hardly meant together."""
    found = []
    if config.max_num_batched_tokens < config.max_num_seqs:
        found.append(
            f"max_num_batched_tokens = {config.max_num_batched_tokens} is less than max_num_seqs = "
            f"{config.max_num_seqs}: no more sequences than that get a token in a step, the others wait in their seats"
        )
    if config.max_total_body_bytes < config.max_body_bytes:
        found.append(
            f"max_total_body_bytes = {config.max_total_body_bytes} is less than max_body_bytes = "
            f"{config.max_body_bytes}: what is larger is refused with 503, also where nobody else asks"
        )
    if config.scheduling_policy == "fair" and config.api_keys_file is None:
        found.append("scheduling_policy = 'fair': without an api_keys_file all requests are one tenant's")
    if config.load_format == "dummy":
        found.append("load_format = 'dummy': the weights are random, and so is whatever the model says")
    return found


def non_default(config: ServeConfig) -> dict[str, Any]:
    """The settings that differ from their defaults: what a log should show first."""
    told = redacted(config)
    return {setting.name: value for setting in settings() if (value := getattr(told, setting.name)) != setting.default}


def redacted(config: ServeConfig) -> ServeConfig:
    """As others may see it."""
    return replace(config, **{name: "***" for name in SECRETS if getattr(config, name) is not None})
