"""Define every setting of the server: its name, type, range, default and description.

`ServeConfig` is the single source of `--help`, the `SERVEKIT_*` environment variables, the TOML file and `/info`.
Precedence: command line > environment > TOML > default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from servekit.errors import ConfigError

DEMO_MODEL = "demo"
CPU_KV_CACHE_BYTES = 2**30  # of a worker on a CPU, by default
BATCHED_TOKENS = 2048  # of a step, by default
# On a CPU. It multiplies nearly at its full rate from some hundred rows on. With more prompts in a step, none would end
# earlier, and all would get their first tokens at its end (docs/performance.md, "Tokens of a step on a CPU").
CPU_BATCHED_TOKENS = 512
ENVIRONMENT_PREFIX = "SERVEKIT_"
SECRETS = frozenset({"api_key"})  # settings whose values never appear in logs, errors or answers

Positive = Annotated[int, Meta(ge=1, le=2**40)]
Seconds = Annotated[float, Meta(gt=0.0, le=86400.0)]
Milliseconds = Annotated[float, Meta(gt=0.0, le=60_000.0)]
# The names are those of vLLM; servekit/parsing/chat_format.py has the formats.
ReasoningParser = Literal["auto", "none", "deepseek_r1", "mistral", "openai_gptoss", "qwen3"]
ToolCallParser = Literal[
    "auto",
    "none",
    "deepseek_v3",
    "deepseek_v31",
    "glm45",
    "hermes",
    "llama3_json",
    "mistral",
    "openai",
    "pythonic",
    "qwen3_coder",
]

# Variables that Kubernetes sets in every container for a service whose name begins with `servekit`: the service's
# addresses, in several forms.
_SERVICE_LINK_NAME = re.compile(
    r"SERVEKIT_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)"
)
_SERVICE_LINK = re.compile(r"SERVEKIT_(\w+_)?PORT=(tcp|udp|sctp)://.*", re.DOTALL)


class ServeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a server. The defaults serve the embedded demo model to this machine only."""

    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="directory, GGUF file or Hugging Face id of the model (org/name or org/name@revision); demo is "
            "embedded in servekit, sim:SPEC is a simulated model",
        ),
    ] = DEMO_MODEL
    revision: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="branch, tag or commit of the model's repository at Hugging Face; by default main"),
    ] = None
    served_model_name: Annotated[
        str | None, Meta(description="model name in the API's answers and in metrics; by default the value of --model")
    ] = None
    models: Annotated[
        str | None,
        Meta(description="TOML file with several models to serve, in place of --model (docs/several_models.md)"),
    ] = None
    kind: Annotated[
        Literal["auto", "generate", "embed", "rerank", "classify"],
        Meta(
            description="what the model does: generate text, embed texts, rerank documents for a query, or classify "
            "texts or images; auto reads it in the model's files (docs/embeddings.md)"
        ),
    ] = "auto"
    host: Annotated[str, Meta(description="IP address or host name to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="TCP port to listen on; 0 selects a free port")] = 8000
    reuse_port: Annotated[
        bool,
        Meta(
            description="share the port with other servers on this machine (SO_REUSEPORT); the kernel distributes the "
            "connections"
        ),
    ] = False

    device: Annotated[
        str,
        Meta(
            pattern=r"^(auto|cpu|cuda(:\d+)?)$",
            description="device to run on; auto uses the first GPU, or the CPU if there is no GPU",
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(
            description="data type of weights and computation; auto is the checkpoint's type on a GPU; on a CPU it is "
            "bfloat16 if the checkpoint's is and the processor multiplies it, and otherwise float32 (exceptions: "
            "docs/models.md)"
        ),
    ] = "auto"
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=32,
            description="processes that compute each step together, each with a part of every layer (tensor "
            "parallelism); on GPUs, each on a device of its own",
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            le=32,
            description="stages among which the layers are divided, each with --tensor-parallel-size processes "
            "(pipeline parallelism); each stage computes another step at the same time",
        ),
    ] = 1
    data_parallel_size: Annotated[
        Annotated[int, Meta(ge=1, le=64)] | None,
        Meta(
            description="replicas: workers that each hold the whole model and compute different requests; on GPUs, "
            "each on a device of its own, and on a CPU the cores are divided among them; by default 1, or with "
            "--listen-workers only those that join",
        ),
    ] = None
    devices: Annotated[
        Annotated[str, Meta(pattern=r"^(cpu|cuda:\d+)(,(cpu|cuda:\d+))*$")] | None,
        Meta(
            description="devices of the workers, for example cuda:0,cuda:1; with ranks, one device for each rank, in "
            "the order replica, stage, tensor rank; replaces --device, and determines the number of replicas"
        ),
    ] = None
    load_format: Annotated[
        Literal["auto", "dummy"],
        Meta(description="auto reads the weights of the model; dummy uses random weights, for benchmarks"),
    ] = "auto"
    quantization: Annotated[
        Literal["int8", "int4", "w4a8", "fp8", "nf4"] | None,
        Meta(
            description="format to which unquantized weights are rounded while they are read (docs/quantization.md); "
            "by default weights keep the format of the checkpoint"
        ),
    ] = None
    quantization_group_size: Annotated[
        Annotated[int, Meta(ge=16, le=1024, multiple_of=16)] | None,
        Meta(description="weights that share a scale, with --quantization int4, w4a8 or nf4; by default 64"),
    ] = None

    max_model_len: Annotated[
        Positive | None,
        Meta(description="maximum tokens of a sequence, prompt plus output; by default the model's own limit"),
    ] = None
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536, description="maximum sequences that run at the same time")] = 256
    max_num_batched_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | None,
        Meta(
            description="maximum tokens of one step, prefill and decode together; by default 2048, and on a CPU 512, "
            "or --max-num-seqs if that is more"
        ),
    ] = None
    max_batch_delay_ms: Annotated[
        float,
        Meta(
            ge=0.0,
            le=10_000.0,
            description="maximum milliseconds that an input to an embedder, a reranker or a classifier waits for "
            "others while the worker is idle; a full batch does not wait",
        ),
    ] = 0.0
    max_image_pixels: Annotated[
        int,
        Meta(
            ge=1,
            le=2**30,
            description="maximum pixels of an image for a classifier, and of a batch of them; larger images are "
            "refused, and requests of more than 4 times as many in all; 32 times as many may wait",
        ),
    ] = 2**25
    block_size: Annotated[int, Meta(ge=1, le=4096, description="tokens per KV block")] = 16
    num_kv_blocks: Annotated[
        Positive | None, Meta(description="KV blocks in the pool; by default as many as fit into the KV cache memory")
    ] = None
    kv_cache_memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="memory for the KV cache of each worker, in bytes; by default 1 GiB on a CPU, and on a GPU "
            "what --gpu-memory-utilization leaves besides the weights"
        ),
    ] = None
    kv_offload_memory_bytes: Annotated[
        Positive | None,
        Meta(
            description="memory of the host, in bytes, in which each worker keeps KV blocks that leave the KV cache; "
            "they are loaded again when a prompt needs them; by default none are kept (docs/kv_offloading.md)"
        ),
    ] = None
    kv_offload_dir: Annotated[
        str | None,
        Meta(
            description="folder in which each worker also keeps these blocks, so that they survive a restart; needs "
            "--kv-offload-memory-bytes. The files contain data of prompts and answers"
        ),
    ] = None
    kv_offload_disk_bytes: Annotated[
        Positive, Meta(description="maximum bytes of the blocks of each worker in --kv-offload-dir")
    ] = 20 * 2**30
    prefill_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=63)] | None,
        Meta(
            description="how many of the replicas only compute prompts; they hand each sequence over to one of the "
            "others, which decode (docs/disaggregated_prefill.md); by default each replica does both. A worker that "
            "joins may have a --role of its own"
        ),
    ] = None
    kv_transfer_memory_bytes: Annotated[
        Positive,
        Meta(
            description="memory of the host, in bytes, for the KV blocks that each prefill replica hands over, with "
            "--prefill-replicas; each worker that joins has as much for blocks that it hands over, and for those that "
            "it takes over"
        ),
    ] = 2**30
    gpu_memory_utilization: Annotated[
        float, Meta(gt=0.0, le=1.0, description="fraction of the GPU's memory for weights and KV cache")
    ] = 0.9

    kv_cache_dtype: Annotated[
        Literal["auto", "fp8_e4m3", "int8"],
        Meta(
            description="data type of the KV cache; auto is the model's data type, int8 and fp8_e4m3 take one byte per "
            "number, plus four bytes for each head of a token; int8 is more exact"
        ),
    ] = "auto"

    speculative: Annotated[
        str,
        Meta(
            description="speculative decoding: the drafter, and the maximum number K of drafts for each step of a "
            "sequence; off, auto, ngram[:K], draft[:PATH][:K], self[:QUANTIZATION][:K], medusa[:PATH], eagle:PATH[:K], "
            "mtp[:K]; ngram+ before one of the last five tries prompt lookup first (docs/speculative_decoding.md)"
        ),
    ] = "off"
    lora: Annotated[
        str | None,
        Meta(
            description="LoRA adapters of the model, as NAME=PATH; requests name one as their model. The flag may be "
            "given several times; elsewhere, several are separated by commas (docs/lora.md)"
        ),
    ] = None
    enable_lora: Annotated[
        bool,
        Meta(
            description="let operators load LoRA adapters at run time, from any directory of the server: POST "
            "/v1/load_lora_adapter; if the server has API keys, this request needs one with admin = true"
        ),
    ] = False
    max_loras: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="maximum LoRA adapters that have requests at the same time; the worker reserves memory of "
            "--max-lora-rank for each",
        ),
    ] = 8
    max_lora_rank: Annotated[
        int,
        Meta(
            ge=1,
            le=512,
            description="maximum rank of a LoRA adapter; on a CPU, memory is reserved for the next multiple of 16",
        ),
    ] = 16
    max_steps_in_flight: Annotated[
        int,
        Meta(ge=1, le=4, description="maximum steps that are sent to the worker before it returns the first of them"),
    ] = 2
    enable_prefix_caching: Annotated[
        bool, Meta(description="reuse the KV cache of prompt prefixes that were computed before")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority", "shortest", "fair"],
        Meta(
            description="order of the waiting queue: fcfs by arrival, priority by lowest number, shortest by prompt "
            "length, fair by least served tenant"
        ),
    ] = "shortest"
    itl_target_ms: Annotated[
        Milliseconds | None,
        Meta(
            description="target inter-token latency, in milliseconds; the scheduler limits prefill to reach it; by "
            "default no limit"
        ),
    ] = None

    max_num_queued_reqs: Annotated[
        Positive, Meta(description="maximum sequences in the waiting queue; the server refuses more with 503")
    ] = 4096
    max_num_queued_tokens: Annotated[
        Positive, Meta(description="maximum prompt tokens in the waiting queue; the server refuses more with 503")
    ] = 2**22
    max_predicted_wait: Annotated[
        float,
        Meta(
            ge=0.0,
            le=86400.0,
            description="maximum predicted seconds that a request waits before it starts, except under priority and "
            "with speculative decoding; the server refuses more with 503; 0 for no limit",
        ),
    ] = 60.0
    price_per_hour: Annotated[
        Annotated[float, Meta(ge=0.0, le=1e6)] | None,
        Meta(
            description="price of one device for an hour, in any currency; with it, metrics and /info show what a "
            "million tokens cost, for models that generate text"
        ),
    ] = None
    max_client_batch_size: Annotated[
        int, Meta(ge=1, le=2**14, description="maximum answers per request: prompts times n or best_of")
    ] = 1024
    max_body_bytes: Annotated[Positive, Meta(description="maximum size of a request body, in bytes")] = 8 * 2**20
    max_total_body_bytes: Annotated[
        Positive,
        Meta(
            description="maximum memory for all request bodies and answers of predictions together, in bytes; the "
            "server refuses more with 503"
        ),
    ] = 2**28
    max_total_logprobs: Annotated[
        int,
        Meta(
            ge=2**22,
            le=2**40,
            description="maximum logprobs in the answers to all requests together, counted for the longest answers "
            "that they allow; the server refuses more with 503",
        ),
    ] = 2**23
    max_connections: Annotated[
        int, Meta(ge=1, le=1_000_000, description="maximum open connections; the server refuses more with 503")
    ] = 8192
    max_header_bytes: Annotated[
        int,
        Meta(ge=1024, le=2**20, description="maximum size of a request's first line and headers together, in bytes"),
    ] = 2**15
    header_timeout: Annotated[Seconds, Meta(description="maximum seconds to receive a request's headers")] = 5.0
    body_timeout: Annotated[Seconds, Meta(description="maximum seconds to receive a request's body")] = 30.0
    send_timeout: Annotated[
        Seconds,
        Meta(
            description="maximum seconds without progress while a client reads its answer; then the server closes the "
            "connection"
        ),
    ] = 30.0
    keep_alive_timeout: Annotated[
        Seconds,
        Meta(
            description="seconds to keep an idle connection open; set it longer than the load balancer's own idle "
            "timeout"
        ),
    ] = 75.0

    api_key: Annotated[
        str | None, Meta(description="API keys, separated by commas; without a key the server accepts every request")
    ] = None
    api_keys_file: Annotated[
        str | None, Meta(description="TOML file with API keys, their tenants and their limits (docs/security.md)")
    ] = None
    cors_origins: Annotated[
        str | None,
        Meta(
            description="origins of web pages that may use the API, separated by commas, or * for all; none by default"
        ),
    ] = None
    allowed_hosts: Annotated[
        str | None,
        Meta(
            description="accepted values of the Host header, separated by commas, or * for all; by default all, but "
            "only this machine's own names if the server listens on loopback without API keys"
        ),
    ] = None

    listen_workers: Annotated[
        str | None,
        Meta(
            description="address, unix:PATH or tcp://HOST:PORT, at which workers join (docs/workers.md); the server "
            "starts none itself without --data-parallel-size or --devices; needs --worker-key-file"
        ),
    ] = None
    worker_key_file: Annotated[
        str | None, Meta(description="file with the shared key that authenticates workers that join and the server")
    ] = None
    worker_tls_cert: Annotated[
        str | None, Meta(description="PEM file with the certificate chain for --listen-workers tcp://; turns TLS on")
    ] = None
    worker_tls_key: Annotated[str | None, Meta(description="PEM file with the private key of --worker-tls-cert")] = None

    placement: Annotated[
        Literal["local", "ray"],
        Meta(
            description="where the server starts its workers: local is this machine, ray the nodes of a Ray cluster "
            "(docs/ray.md)"
        ),
    ] = "local"
    ray_address: Annotated[
        str | None,
        Meta(
            description="address of the Ray cluster, HOST:PORT; by default the variable RAY_ADDRESS, or the cluster "
            "that this machine is part of"
        ),
    ] = None
    ray_num_cpus: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="CPUs of Ray that each worker reserves for each of its ranks; on a CPU also its threads",
        ),
    ] = 1
    ray_nodes_per_replica: Annotated[
        int,
        Meta(
            ge=1,
            le=1024,
            description="with --placement ray, maximum number of nodes for the ranks of one replica; each node gets "
            "the same number of ranks. If it is above 1, ranks exchange tensors over the network without encryption "
            "(docs/security.md)",
        ),
    ] = 1
    max_data_parallel_size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | None,
        Meta(
            description="with --placement ray, maximum number of replicas: more than --data-parallel-size are placed "
            "while requests would wait; by default as many as that"
        ),
    ] = None
    scale_target_wait: Annotated[
        Seconds, Meta(description="predicted seconds of waiting above which replicas are added")
    ] = 2.0
    scale_up_delay: Annotated[
        float, Meta(ge=0.0, le=86400.0, description="seconds for which more replicas are needed before they are added")
    ] = 5.0
    scale_down_delay: Annotated[
        float,
        Meta(ge=0.0, le=86400.0, description="seconds for which fewer replicas are enough before some are removed"),
    ] = 300.0

    step_timeout: Annotated[
        Seconds, Meta(description="maximum seconds for one step; the server replaces a worker that takes longer")
    ] = 300.0
    heartbeat_timeout: Annotated[
        Seconds,
        Meta(
            description="seconds without a heartbeat after which the server replaces a worker; ten times as long while "
            "it loads"
        ),
    ] = 3.0
    max_worker_restarts: Annotated[
        int, Meta(ge=0, le=1000, description="consecutive failed starts of a worker after which the server exits")
    ] = 5
    worker_restart_timeout: Annotated[
        Seconds, Meta(description="seconds without a worker after which requests fail with 503")
    ] = 300.0
    replica_restart_delay: Annotated[
        Seconds,
        Meta(
            description="seconds until a worker starts again in a replica whose worker could not be replaced; doubled "
            "after each failed start, up to ten times as long"
        ),
    ] = 60.0
    load_timeout: Annotated[Seconds, Meta(description="maximum seconds to load the model")] = 1800.0
    shutdown_timeout: Annotated[
        float, Meta(ge=0.0, le=86400.0, description="maximum seconds for running requests to finish after SIGTERM")
    ] = 30.0
    sse_keep_alive_interval: Annotated[
        int, Meta(ge=0, le=3600, description="seconds between keep-alive comments on an idle stream; 0 disables them")
    ] = 15
    stream_interval: Annotated[
        int, Meta(ge=1, le=4096, description="tokens per event of a stream; the first token is always sent alone")
    ] = 1
    chat_template: Annotated[
        str | None, Meta(description="file with a Jinja chat template that replaces the model's own")
    ] = None
    trust_request_chat_template: Annotated[
        bool, Meta(description="allow requests to carry their own chat template; the server renders it in a sandbox")
    ] = False
    reasoning_parser: Annotated[
        ReasoningParser,
        Meta(
            description="how the model marks its reasoning, which chats return in a field of its own; auto reads it in "
            "the chat template"
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        ToolCallParser,
        Meta(description="how the model writes tool calls; auto reads it in the chat template"),
    ] = "auto"
    sandbox_timeout: Annotated[
        float,
        Meta(
            gt=0.0,
            le=600.0,
            description="maximum seconds of processor time to render a chat template or compile a grammar",
        ),
    ] = 2.0
    sandbox_memory_bytes: Annotated[
        int,
        Meta(ge=2**24, le=2**40, description="maximum memory to render a chat template or compile a grammar, in bytes"),
    ] = 2**28
    cache_dir: Annotated[
        str | None,
        Meta(
            description="directory for all files that the server writes by itself: downloaded models, "
            "compiled kernels, temporary files; by default the user's cache directory and the system's temporary one"
        ),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="lowest level of log messages to write")
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"],
        Meta(description="text lines, or one JSON object per line; prompts and answers are never logged"),
    ] = "text"
    otlp_endpoint: Annotated[
        str | None,
        Meta(
            description="OTLP/HTTP endpoint for OpenTelemetry traces, such as http://host:4318; needs the otel extra "
            "(docs/operations.md)"
        ),
    ] = None
    api_processes: Annotated[
        int,
        Meta(
            ge=1,
            le=64,
            description="processes that serve HTTP, decode request bodies, tokenize and detokenize, in front of one "
            "engine process; with 1, the engine process does that itself",
        ),
    ] = 1
    batch_dir: Annotated[
        str | None,
        Meta(
            description="directory on a local disk for the files and batches of /v1/files and /v1/batches "
            "(docs/batches.md); without it these routes are off"
        ),
    ] = None
    batch_concurrency: Annotated[
        int, Meta(ge=1, le=4096, description="maximum lines of all batches that are computed at the same time")
    ] = 16
    batch_max_file_bytes: Annotated[
        Positive, Meta(description="maximum size of a file that is uploaded for a batch, in bytes")
    ] = 200 * 2**20
    batch_max_total_bytes: Annotated[
        Positive,
        Meta(description="maximum bytes of all files and answers in --batch-dir; one tenant may have half of it"),
    ] = 20 * 2**30
    batch_retention: Annotated[
        float,
        Meta(gt=0.0, le=365 * 86400.0, description="seconds after which files and ended batches are deleted"),
    ] = 30 * 86400.0
    ui: Annotated[bool, Meta(description="serve the web console at / and /ui and its live data at /ui/events")] = True
    journal: Annotated[
        str | None,
        Meta(description="file that records every scheduling decision, for servekit replay (docs/journal.md)"),
    ] = None
    journal_tokens: Annotated[
        bool, Meta(description="record the token ids of prompts and answers, too; by default only their numbers")
    ] = False
    journal_max_bytes: Annotated[
        int, Meta(ge=2**16, le=2**40, description="size of a journal file, in bytes, at which the next file begins")
    ] = 2**26
    journal_max_files: Annotated[
        int, Meta(ge=1, le=1000, description="number of journal files to keep: FILE, FILE.1, FILE.2 and so on")
    ] = 8
    profile: Annotated[
        str | None, Meta(description="directory for profiler traces of the worker; POST /profile/start starts a trace")
    ] = None

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model

    def batched_tokens(self, device: str) -> int:
        """The maximum tokens of a step of a worker on this device; "" gives the largest of all devices."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return min(BATCHED_TOKENS, max(CPU_BATCHED_TOKENS, self.max_num_seqs)) if device == "cpu" else BATCHED_TOKENS

    @property
    def has_adapters(self) -> bool:
        """Whether the model may have LoRA adapters."""
        return self.enable_lora or self.lora is not None

    @property
    def starts_workers(self) -> bool:
        """Whether the server starts workers as its children. With `listen_workers` only if a setting asks for some."""
        if self.placement != "local":
            return False
        return self.listen_workers is None or self.devices is not None or self.data_parallel_size is not None

    @property
    def lets_workers_join(self) -> bool:
        """Whether the server listens for workers that are not its children."""
        return self.listen_workers is not None or self.placement != "local"


# The settings that each model of a server has for itself. All others are of the whole server.
MODEL_SETTINGS = frozenset(
    {
        "model",
        "kind",
        "revision",
        "device",
        "dtype",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "devices",
        "load_format",
        "quantization",
        "quantization_group_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_batch_delay_ms",
        "max_image_pixels",
        "block_size",
        "num_kv_blocks",
        "kv_cache_memory_bytes",
        "kv_offload_memory_bytes",
        "kv_offload_dir",
        "kv_offload_disk_bytes",
        "prefill_replicas",
        "kv_transfer_memory_bytes",
        "gpu_memory_utilization",
        "kv_cache_dtype",
        "speculative",
        "lora",
        "enable_lora",
        "max_loras",
        "max_lora_rank",
        "max_steps_in_flight",
        "enable_prefix_caching",
        "scheduling_policy",
        "itl_target_ms",
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "max_predicted_wait",
        "price_per_hour",
        "max_client_batch_size",
        "step_timeout",
        "heartbeat_timeout",
        "max_worker_restarts",
        "worker_restart_timeout",
        "replica_restart_delay",
        "load_timeout",
        "stream_interval",
        "chat_template",
        "trust_request_chat_template",
        "reasoning_parser",
        "tool_call_parser",
        "journal",
        "profile",
    }
)


class Setting(Struct, frozen=True):
    """One field of `ServeConfig`, as `--help`, the environment and the documentation show it."""

    name: str
    default: Any
    description: str
    accepts: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value and has an opposite: `--x` and `--no-x`."""
        return isinstance(self.default, bool)

    @property
    def choices(self) -> list[str]:
        """The names that it takes, if it takes no other values."""
        return self.accepts.removeprefix("one of ").split(", ") if self.accepts.startswith("one of ") else []

    @property
    def environment_name(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()


def settings() -> list[Setting]:
    """Return every field of `ServeConfig`, in order."""
    described = msgspec.json.schema(ServeConfig)["$defs"]["ServeConfig"]["properties"]
    return [
        Setting(field.name, field.default, described[field.name]["description"], _accepts(described[field.name]))
        for field in msgspec.structs.fields(ServeConfig)
    ]


def _accepts(schema: Mapping[str, Any]) -> str:
    """Describe a field's JSON schema in words: `integer from 1 to 4096`, `one of auto, float32`."""
    schema = schema.get("anyOf", [schema])[0]
    if "enum" in schema:
        return "one of " + ", ".join(schema["enum"])
    if "pattern" in schema:
        return "auto, cpu, cuda or cuda:N" if "auto" in schema["pattern"] else "cpu or cuda:N, separated by commas"
    bounds = [
        f"{word} {schema[key]}"
        for key, word in (("minimum", "from"), ("exclusiveMinimum", "above"), ("maximum", "to"))
        if key in schema
    ]
    kind = "true or false" if schema["type"] == "boolean" else schema["type"]
    return " ".join([kind, *bounds])


def load_config(arguments: Mapping[str, Any], environment: Mapping[str, str], toml: bytes | None = None) -> ServeConfig:
    """Merge the four sources into one validated configuration.

    `arguments` holds the flags of the command line, as strings or booleans; `toml` is the content of the `--config`
    file. Raises ConfigError, which names the field and the accepted values.
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
        raise ConfigError(explain_setting(str(error), values)) from None


def ignored_variables(environment: Mapping[str, str]) -> list[str]:
    """Return a warning for each SERVEKIT_* variable that sets nothing: unknown names, and Kubernetes' service links."""
    names = [setting.environment_name for setting in settings()]
    ours = {name: value for name, value in environment.items() if name.startswith(ENVIRONMENT_PREFIX)}
    links = [name for name, value in ours.items() if _is_service_link(name, value)]
    warnings = [
        f"ignoring the unknown environment variable {name}; {advice(name, names)}"
        for name in ours
        if name not in names and name not in links
    ]
    if links:
        warnings.append(
            f"ignoring {', '.join(links)}: these are Kubernetes service links of a service whose name begins with "
            "servekit; to remove them, set enableServiceLinks: false in the pod's spec"
        )
    return warnings


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK_NAME.fullmatch(name) or _SERVICE_LINK.fullmatch(f"{name}={value}"))


def _read_toml(toml: bytes | None) -> dict[str, Any]:
    """Parse the config file; dashes and underscores in a name are equivalent. Raises ConfigError."""
    if toml is None:
        return {}
    try:
        table = msgspec.toml.decode(toml, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file is not valid TOML: {error}") from None
    return {name.replace("-", "_"): value for name, value in table.items()}


def explain_setting(message: str, values: Mapping[str, Any]) -> str:
    """Turn msgspec's `Expected ... - at $.field` into a message with the setting, its value and the accepted values."""
    _, _, path = message.partition(" - at `$.")
    known = {setting.name: setting for setting in settings()}
    if not path:
        unknown = message.split("`")[1]
        return f"unknown setting {unknown!r}; {advice(unknown, list(known))}"
    setting = known[path.rstrip("`")]
    value = "***" if setting.name in SECRETS else values[setting.name]
    return (
        f"{setting.name} = {value!r} is not accepted ({setting.flag}, {setting.environment_name}): "
        f"it takes {setting.accepts}; {setting.description}"
    )


# Settings of vLLM, SGLang and TGI that have another name here.
RENAMED_SETTINGS = {
    "allowed_origins": "cors_origins",
    "api_server_count": "api_processes",
    "chunked_prefill_size": "max_num_batched_tokens",
    "context_length": "max_model_len",
    "cors_allow_origin": "cors_origins",
    "cuda_memory_fraction": "gpu_memory_utilization",
    "disable_overlap_schedule": "max_steps_in_flight",
    "disable_radix_cache": "enable_prefix_caching",
    "hostname": "host",
    "hicache_size": "kv_offload_memory_bytes",
    "json_output": "log_format",
    "kv_buffer_size": "kv_transfer_memory_bytes",
    "kv_offloading_size": "kv_offload_memory_bytes",
    "lora_adapters": "lora",
    "lora_modules": "lora",
    "lora_paths": "lora",
    "max_batch_prefill_tokens": "max_num_batched_tokens",
    "max_batch_size": "max_num_seqs",
    "max_concurrent_requests": "max_num_queued_reqs",
    "max_input_length": "max_model_len",
    "max_input_tokens": "max_model_len",
    "max_loras_per_batch": "max_loras",
    "max_prefill_tokens": "max_num_batched_tokens",
    "max_queued_requests": "max_num_queued_reqs",
    "max_running_requests": "max_num_seqs",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_id": "model",
    "model_path": "model",
    "num_gpu_blocks_override": "num_kv_blocks",
    "num_shard": "tensor_parallel_size",
    "otlp_traces_endpoint": "otlp_endpoint",
    "page_size": "block_size",
    "payload_limit": "max_body_bytes",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "prefix_caching": "enable_prefix_caching",
    "quantize": "quantization",
    "schedule_policy": "scheduling_policy",
    "sharded": "tensor_parallel_size",
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "uvicorn_log_level": "log_level",
}

_PARALLELISM = (
    "--data-parallel-size gives each device the whole model; --tensor-parallel-size and --pipeline-parallel-size "
    "divide a model among devices of one machine"
)
_LORA = "--lora NAME=PATH loads a LoRA adapter, in PEFT's format (docs/lora.md)"
_SPECULATION = "--speculative chooses the drafter, its path and the number of drafts, as in --speculative draft:PATH:4"
_TOOLS = "tool calls need no other setting; --tool-call-parser chooses their form where the chat template does not tell"
_REASONING = (
    "reasoning has a field of its own; --reasoning-parser chooses its form where the chat template does not tell"
)
_OFFLOADING = "weights are not offloaded; --kv-offload-memory-bytes keeps KV blocks in the host's memory"
_TRUST = "code in a model's repository is never run; the architecture must be part of transformers"
_TOKENIZER = "the tokenizer is always the model's own tokenizer.json; put another one into the model's directory"
_DOWNLOADS = "--cache-dir or the variable HF_HOME sets the folder for downloads"
_TLS = "there is no TLS; put a reverse proxy in front (docs/security.md)"
_GRAPHS = "CUDA graphs are used wherever they can be, and cannot be turned off"
_ATTENTION = "the attention backend is selected for the device, there is no setting for it"
_GRAMMARS = "structured output is always available and uses llguidance"
_KIND = "--kind chooses between generate, embed, rerank and classify; by default the model's files do"
_IMAGES = "only text is supported: no images, audio or video yet"
_TRANSFER = (
    "--prefill-replicas N lets N of the replicas of --data-parallel-size compute prompts, and the others decode "
    "(docs/disaggregated_prefill.md)"
)
_SEED = "each request has its own seed parameter"
_ALWAYS = "this is always on"

# Settings of vLLM, SGLang and TGI without a single counterpart here: the missing feature, or the alternative.
EXPLAINED_SETTINGS = {
    "adapter_path": _LORA,
    "attention_backend": _ATTENTION,
    "convert": _KIND,
    "cpu_offload_gb": _OFFLOADING,
    "cuda_graph_max_bs": _GRAPHS,
    "cuda_graphs": _GRAPHS,
    "disable_cuda_graph": _GRAPHS,
    "disaggregation_mode": _TRANSFER,
    "distributed_executor_backend": _PARALLELISM,
    "download_dir": _DOWNLOADS,
    "draft_model": _SPECULATION,
    "enable_auto_tool_choice": _TOOLS,
    "enable_chunked_prefill": _ALWAYS,
    "enable_expert_parallel": _PARALLELISM,
    "enable_hierarchical_cache": _OFFLOADING,
    "enable_metrics": _ALWAYS,
    "enable_reasoning": _REASONING,
    "enforce_eager": _GRAPHS,
    "ep_size": _PARALLELISM,
    "grammar_backend": _GRAMMARS,
    "guided_decoding_backend": _GRAMMARS,
    "huggingface_hub_cache": _DOWNLOADS,
    "is_embedding": _KIND,
    "kv_transfer_config": _TRANSFER,
    "limit_mm_per_prompt": _IMAGES,
    "max_batch_total_tokens": "the KV cache bounds the tokens of a batch: --num-kv-blocks times --block-size",
    "max_total_tokens": "TGI's setting is --max-model-len here; SGLang's is --num-kv-blocks times --block-size",
    "nnodes": _PARALLELISM,
    "num_speculative_tokens": _SPECULATION,
    "random_seed": _SEED,
    "runner": _KIND,
    "seed": _SEED,
    "speculate": _SPECULATION,
    "speculative_algorithm": _SPECULATION,
    "speculative_config": _SPECULATION,
    "speculative_draft_model_path": _SPECULATION,
    "speculative_model": _SPECULATION,
    "ssl_certfile": _TLS,
    "ssl_keyfile": _TLS,
    "structured_outputs_config": _GRAMMARS,
    "swap_space": _OFFLOADING,
    "task": _KIND,
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_path": _TOKENIZER,
    "torchao_config": "--quantization rounds weights as they are read, and checkpoints bring their own format",
    "trust_remote_code": _TRUST,
}


def advice(name: str, known: Sequence[str]) -> str:
    """Say what to use instead of an unknown flag, variable or setting.

    `known` holds the valid names in the same spelling as `name`. Settings of other servers are explained by the two
    tables above. For everything else the nearest valid name is proposed. The cutoff of 0.7 is higher than difflib's
    0.6, with which a shared `--enable-` is enough to make two unrelated flags similar.
    """
    setting = name.removeprefix(ENVIRONMENT_PREFIX).lstrip("-").removeprefix("no-").replace("-", "_").lower()
    if setting in RENAMED_SETTINGS:
        return (
            f"the setting is called --{RENAMED_SETTINGS[setting].replace('_', '-')} here; see `servekit serve --help`"
        )
    if setting in EXPLAINED_SETTINGS:
        return EXPLAINED_SETTINGS[setting]
    close = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "see `servekit serve --help`"


def check_host_memory(config: ServeConfig, host_memory_bytes: int) -> None:
    """Raise ConfigError if the KV cache of a server on the CPU cannot fit into the machine's memory.

    The same for blocks that are handed over, wherever the model runs; on the CPU both are counted.

    With `device = "auto"` only the worker knows where the model runs; it checks its device's memory itself.
    """
    num_prefill, transfer = config.prefill_replicas or 0, config.kv_transfer_memory_bytes
    handed_over = 0 if config.lets_workers_join else num_prefill * transfer  # else it is on the workers' machines
    if handed_over > host_memory_bytes:
        raise ConfigError(
            f"kv_transfer_memory_bytes = {transfer} (--kv-transfer-memory-bytes), for each of {num_prefill} prefill "
            f"replicas, is more than this machine's memory of {host_memory_bytes} bytes; set less"
        )
    wanted = config.kv_cache_memory_bytes
    if not config.starts_workers or config.device != "cpu" or wanted is None or config.num_kv_blocks is not None:
        return
    num_workers = (config.data_parallel_size or 1) * config.tensor_parallel_size * config.pipeline_parallel_size
    if wanted * num_workers + handed_over > host_memory_bytes:
        each = f", for each of {num_workers} workers," if num_workers > 1 else ""
        and_blocks = f" with {handed_over} bytes for blocks that are handed over" if handed_over else ""
        raise ConfigError(
            f"kv_cache_memory_bytes = {wanted} (--kv-cache-memory-bytes){each}{and_blocks} is more than this "
            f"machine's memory of {host_memory_bytes} bytes; set less, or leave it out for the default"
        )


def doubts(config: ServeConfig) -> list[str]:
    """Return a warning for each combination of settings that is valid and probably a mistake."""
    found = []
    budget = config.batched_tokens("")
    if budget < config.max_num_seqs:
        found.append(
            f"max_num_batched_tokens = {budget} is less than max_num_seqs = {config.max_num_seqs}: a step computes at "
            f"most {budget} sequences, and the other running sequences wait for a later step"
        )
    has_keys = config.api_key is not None or config.api_keys_file is not None
    most = config.max_total_body_bytes // config.api_processes // (2 if has_keys else 1)
    if most < config.max_body_bytes:
        of_tenant = ", half of it for one tenant" if has_keys else ""
        of_process = f", divided among {config.api_processes} API processes" if config.api_processes > 1 else ""
        found.append(
            f"max_total_body_bytes = {config.max_total_body_bytes}{of_process}{of_tenant} is less than max_body_bytes "
            f"= {config.max_body_bytes}: request bodies over {most} bytes are refused with 413"
        )
    if config.scheduling_policy == "fair" and config.api_keys_file is None:
        found.append("scheduling_policy = 'fair' has no effect without api_keys_file: all requests have one tenant")
    if config.devices is not None and config.device != "auto":
        found.append(f"devices = {config.devices!r} places the workers; device = {config.device!r} has no effect")
    if not config.starts_workers and config.placement == "local" and config.device != "auto":
        found.append(
            f"device = {config.device!r} has no effect: with listen_workers the server starts no worker itself, and "
            "those that join have a --device of their own; data_parallel_size = 1 starts one"
        )
    scaling = ("scale_target_wait", "scale_up_delay", "scale_down_delay")
    unused = [name for name in scaling if getattr(config, name) != getattr(ServeConfig(), name)]
    if unused and config.max_data_parallel_size is None:
        found.append(
            f"{', '.join(unused)}: without effect, because the number of replicas changes only with placement = 'ray' "
            "and max_data_parallel_size"
        )
    if config.prefill_replicas is None and config.kv_transfer_memory_bytes != ServeConfig().kv_transfer_memory_bytes:
        found.append(
            f"kv_transfer_memory_bytes = {config.kv_transfer_memory_bytes} has no effect without prefill_replicas: no "
            "replica hands blocks over"
        )
    if config.load_format == "dummy":
        found.append("load_format = 'dummy': the weights are random, so the model's answers mean nothing")
    return found


def non_default(config: ServeConfig) -> dict[str, Any]:
    """Return the settings that differ from their defaults, without secrets; the server logs them at its start."""
    shown = redacted(config)
    return {setting.name: value for setting in settings() if (value := getattr(shown, setting.name)) != setting.default}


def redacted(config: ServeConfig) -> ServeConfig:
    """Return the configuration with `***` in place of each secret."""
    return replace(config, **{name: "***" for name in SECRETS if getattr(config, name) is not None})
