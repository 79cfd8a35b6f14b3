"""Parse the file that lists the models of a server. This is pure: the caller reads the file.

The settings of a model have the names of the server's flags. A setting that a model's entry leaves out has the value of
the server's own setting. `kind` is one of them: `auto` until the caller has looked at the model's own files
(read_file.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from servekit.config import MODEL_SETTINGS, ServeConfig, explain_setting
from servekit.errors import ConfigError
from servekit.models.names import Split
from servekit.models.packing import DeviceUse, Keep, Workers, check_dedicated, device_uses, place
from servekit.remote.settings import (
    FIXED_OF_VLLM,
    OpenAISettings,
    PredictorServerSettings,
    ServerSettings,
    TritonSettings,
    VllmSettings,
)
from servekit.remote.settings import TAKES as REMOTE_TAKES
from servekit.requests.inference import INFER

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:/-]{1,200}\Z")]
Tenant = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
Bytes = Annotated[int, Meta(ge=0, le=2**60)]

Converted = TypeVar("Converted", bound=Struct)

# By the API of the model's server: what `remote` is, with an example of an address.
REMOTE_KINDS: dict[str, tuple[type[ServerSettings], str]] = {
    "openai": (OpenAISettings, "http://gpu-7:8000/v1"),
    "triton": (TritonSettings, "http://triton:8000"),
}
# What models on other servers do besides: these kinds are remote if their entry has `remote`.
REMOTE_PREDICTORS: dict[str, tuple[type[ServerSettings], str]] = {
    "embed": (PredictorServerSettings, "http://gpu-7:8000/v1"),
    "rerank": (PredictorServerSettings, "http://gpu-7:8000/v1"),
}
KINDS = ("auto", "generate", "embed", "rerank", "classify")  # kinds of models that this server runs itself
# The settings that a remote model can have. All other settings are about how a model is computed.
REMOTE_MODEL_SETTINGS = ("model", "max_model_len", "max_num_queued_reqs", "max_client_batch_size", "stream_interval")
OF_GENERATION = ("max_model_len", "stream_interval")
# The settings that a model of kind `vllm` can have, and the flag of `vllm serve` that each one becomes. Settings
# without a flag are used by this server itself.
VLLM_FLAGS = {
    "model": None,
    "device": None,
    "devices": None,
    "load_timeout": None,
    "max_num_queued_reqs": None,
    "max_client_batch_size": None,
    "stream_interval": None,
    "revision": "--revision",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "tensor_parallel_size": "--tensor-parallel-size",
    "pipeline_parallel_size": "--pipeline-parallel-size",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "kv_cache_memory_bytes": "--kv-cache-memory-bytes",
}
_DEVICE = re.compile(r"cpu|cuda:\d+")
_TAKES = {
    "id": "1 to 200 letters, digits, '.', '_', ':', '/' and '-'",
    "aliases": "a list of names, each of 1 to 200 letters, digits, '.', '_', ':', '/' and '-'",
    "keep": "'always', 'on_demand' or 'dedicated'",
    "memory_bytes": "an integer from 0 to 2**60: the bytes that each worker of the model takes on its device",
    "tenants": "a list of tenants, each of 1 to 64 letters, digits, '.', '_' and '-'",
    "adapter_tenants": "a table of adapters and their tenants, such as { sql = ['search'] }",
    "models": "a table of ids and weights, such as { a = 90, b = 10 }",
    "sticky": "'key' or 'conversation'",
    "mirror": "the id of a model",
    "mirror_percent": "a number from 0 to 100: of the requests that are copied",
    "name": "1 to 200 letters, digits, '.', '_', ':', '/' and '-'",
    "default": "the id or an alias of a model",
    "max_load_wait": "a number above 0 up to 86400: seconds",
    "memory": "a table of devices and bytes, such as { cpu = 16_000_000_000 }",
}


class ModelEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a `[[model]]` entry says besides settings."""

    id: Name
    aliases: list[Name] = []
    keep: Keep = "always"
    memory_bytes: Bytes | None = None  # of one worker, on its device
    tenants: list[Tenant] | None = None  # tenants that may use it; None: all tenants
    adapter_tenants: Mapping[Name, list[Tenant]] = {}  # that may use an adapter; those missing are for all of these

    @property
    def is_kept(self) -> bool:
        """Whether it stays loaded."""
        return self.keep != "on_demand"


class ModelSpec(Struct, frozen=True, kw_only=True):
    """One model: how it is named, who may use it, where it runs, and the settings of its engine."""

    entry: ModelEntry
    config: ServeConfig
    workers: Workers | None  # None: it runs on another server
    server: ServerSettings | None = None  # that runs it; None: this server's own engine

    @property
    def id(self) -> str:
        """The name of the model in answers."""
        return self.entry.id

    @property
    def kind(self) -> str:
        """What the model does."""
        return INFER if isinstance(self.server, TritonSettings) else self.config.kind

    @property
    def memory(self) -> Mapping[str, int]:
        """What it takes on each device, in bytes."""
        return {} if self.workers is None else self.workers.memory


class _Alias(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An `[[alias]]` entry."""

    name: Name
    models: Mapping[Name, Annotated[float, Meta(ge=0.0, le=1e6)]]
    sticky: Literal["key", "conversation"] = "key"
    mirror: Name | None = None
    mirror_percent: Annotated[float, Meta(ge=0.0, le=100.0)] = 100.0


class _Top(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file says besides its entries."""

    default: Name | None = None
    max_load_wait: Annotated[float, Meta(gt=0.0, le=86400.0)] = 300.0
    memory: Mapping[str, Bytes] = {}


class ModelFile(Struct, frozen=True, kw_only=True):
    """All models of a server."""

    models: Sequence[ModelSpec]
    splits: Mapping[str, Split] = {}
    default: str  # the model of a request that names none
    memory: Mapping[str, int] = {}  # memory for models, by device; a device that is missing has no limit
    max_load_wait_s: float = 300.0  # how long a request may wait until its model is loaded

    @property
    def device_uses(self) -> list[DeviceUse]:
        """What each device holds."""
        return device_uses([spec.workers for spec in self.models if spec.workers is not None], self.memory)

    @property
    def aliases(self) -> dict[str, str]:
        """The id of each alias that is not divided."""
        return {alias: spec.id for spec in self.models for alias in spec.entry.aliases}


def no_estimate(_: ServeConfig) -> int | None:
    """Return None: no model's memory is known."""
    return None


def parse_model_file(
    toml: bytes, path: str, base: ServeConfig, device: str, estimate: Callable[[ServeConfig], int | None] = no_estimate
) -> ModelFile:
    """Parse the file that was read from `path`.

    `base` has the server's settings, and `device` is the meaning of auto. `estimate` returns the bytes that a worker of
    a model takes, or None if that is not known. It is called only if this number is needed and the file does not give
    it. Raises ConfigError that names the file, the entry and the field.
    """
    try:
        table = msgspec.toml.decode(toml, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a valid TOML file: {error}") from None
    entries, aliases = (_entries(table, name, path) for name in ("model", "alias"))
    if not entries:
        raise ConfigError(f"{path}: the file must have one or more [[model]] entries")
    top = _convert({key: value for key, value in table.items() if key not in ("model", "alias")}, _Top, path)
    if not top.memory:
        estimate = no_estimate
    specs = [
        _parse_model(entry, f"{path}: [[model]] {number}", base, device, estimate)
        for number, entry in enumerate(entries, 1)
    ]
    splits: dict[str, Split] = {}
    for number, entry in enumerate(aliases, 1):
        alias = _convert(entry, _Alias, f"{path}: [[alias]] {number}")
        if alias.name in splits:
            raise ConfigError(f"{path}: [[alias]] {number}: the name {alias.name!r} is given twice")
        splits[alias.name] = Split(alias.models, alias.sticky, alias.mirror, alias.mirror_percent)
    return make_model_file(
        specs, path, splits=splits, default=top.default, memory=top.memory, max_load_wait_s=top.max_load_wait
    )


def make_model_file(
    specs: Sequence[ModelSpec],
    where: str,
    *,
    splits: Mapping[str, Split] | None = None,
    default: str | None = None,
    memory: Mapping[str, int] | None = None,
    max_load_wait_s: float = 300.0,
) -> ModelFile:
    """Return the models of a server, if they fit each other. Raises ConfigError."""
    splits, memory = splits or {}, memory or {}
    taken: dict[str, str] = {}
    for spec in specs:
        for name in (spec.id, *spec.entry.aliases):
            if name in taken:
                owners = " and of ".join(map(repr, dict.fromkeys((taken[name], spec.id))))
                raise ConfigError(
                    f"{where}: the name {name!r} is given twice, as an id or an alias of {owners}; names must differ"
                )
            taken[name] = spec.id
    for name, split in splits.items():
        if name in taken:
            raise ConfigError(f"{where}: the alias {name!r} is the name of the model {taken[name]!r}, too")
        check_split(f"{where}: the alias {name!r}", split, {spec.id for spec in specs})
    default = specs[0].id if default is None else default
    if default not in taken and default not in splits:
        raise ConfigError(f"{where}: default = {default!r} is not the name of a model; there are {_list(taken)}")
    for device in memory:
        if not _DEVICE.fullmatch(device):
            raise ConfigError(f"{where}: [memory] {device!r} is not a device; use cpu, cuda:0, cuda:1 and so on")
    specs = _place(specs, where, memory)
    _check_memory(specs, where, memory)
    return ModelFile(models=specs, splits=splits, default=default, memory=memory, max_load_wait_s=max_load_wait_s)


def check_split(where: str, split: Split, ids: set[str]) -> None:
    """Raise ConfigError if an alias names models that do not exist, or gives none of them a weight."""
    for name in split.ids:
        if name not in ids:
            raise ConfigError(f"{where}: {name!r} is not the id of a model; there are {_list(ids)}")
    if split.mirror is not None and split.models.get(split.mirror):
        raise ConfigError(
            f"{where}: {split.mirror!r} is its mirror and one of its models; it would get requests twice, so leave it "
            "out of models, or give it the weight 0"
        )
    if not any(split.models.values()):
        raise ConfigError(f"{where}: models needs at least one weight above 0")


def check_kinds(where: str, split: Split, kinds: Mapping[str, str]) -> None:
    """Raise ConfigError if an alias divides requests among models that do different things. `kinds` is by id."""
    found = {kinds[name]: name for name in split.ids}
    if len(found) > 1:
        described = " and ".join(f"{name!r} of kind {kind}" for kind, name in found.items())
        raise ConfigError(f"{where}: its models must be of one kind, and there are {described}")


def make_spec(entry: ModelEntry, config: ServeConfig, device: str, memory_bytes: int | None = None) -> ModelSpec:
    """Return a model with its workers. `device` is what auto stands for, and `memory_bytes` an estimate."""
    num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
    if config.devices is not None:
        devices = config.devices.split(",")
    else:
        first = {"auto": device, "cuda": "cuda:0"}.get(config.device, config.device)
        num_workers = (config.data_parallel_size or 1) * num_ranks
        if first == "cpu" or ":" in config.device:
            devices = [first] * num_workers
        else:
            devices = [f"cuda:{number}" for number in range(num_workers)]
    workers = Workers(
        name=entry.id,
        keep=entry.keep,
        memory_bytes=(memory_bytes if entry.memory_bytes is None else entry.memory_bytes) or 0,
        num_replicas=max(1, len(devices) // num_ranks),
        num_ranks=num_ranks,
        devices=tuple(devices),
    )
    return ModelSpec(entry=entry, config=config, workers=workers)


def _place(specs: Sequence[ModelSpec], where: str, capacity: Mapping[str, int]) -> list[ModelSpec]:
    """Choose the devices of models that name none, if [memory] has devices to choose from. Raises ConfigError."""
    gpus = [device for device in capacity if device != "cpu"]
    # A model without a device runs on a GPU, or if there is none in [memory], on the CPU.
    auto = {"auto": gpus or list(capacity), "cuda": gpus}
    candidates: dict[str, Sequence[str]] = {}
    workers: list[Workers] = []
    for spec in specs:
        if spec.workers is None:
            continue
        found = auto.get(spec.config.device, []) if spec.config.devices is None else []
        is_known = spec.entry.memory_bytes is not None or spec.workers.memory_bytes > 0
        # With one GPU there is nothing to choose. A GPU without a limit in [memory] is no reason to move a model to the
        # CPU.
        has_choice = len(gpus) > 1 or spec.workers.devices[0] in capacity
        if found and has_choice and is_known and set(found) != set(spec.workers.devices):
            candidates[spec.id] = found
        workers.append(replace(spec.workers, devices=()) if spec.id in candidates else spec.workers)
    try:
        placed = {each.name: each for each in place(workers, capacity, candidates)}
        check_dedicated(list(placed.values()))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    return [
        replace(spec, workers=placed[spec.id], config=_on(spec.config, placed[spec.id].devices))
        if spec.id in candidates
        else spec
        for spec in specs
    ]


def _on(config: ServeConfig, devices: Sequence[str]) -> ServeConfig:
    """Return the settings with the devices that were chosen."""
    return replace(config, device=devices[0]) if len(devices) == 1 else replace(config, devices=",".join(devices))


def _take_remote(entry: dict[str, Any], where: str) -> ServerSettings | None:
    """Remove the settings of the model's server from an entry, and return them; None if this server runs the model.

    Raises ConfigError.
    """
    kind = entry.get("kind")
    known = REMOTE_KINDS | REMOTE_PREDICTORS
    if not isinstance(kind, str) or kind not in known:
        if "remote" in entry:
            kinds = " or ".join(map(repr, known))
            raise ConfigError(f"{where}: remote is for models of another server; set kind = {kinds}, or leave it out")
        return None
    if kind in REMOTE_PREDICTORS and "remote" not in entry:
        return None
    settings, example = known[kind]
    remote = entry.pop("remote", None)
    if not isinstance(remote, dict):
        raise ConfigError(
            f"{where}: kind = {kind!r} needs the server's address, such as remote = {{ url = {example!r} }}"
        )
    if "memory_bytes" in entry:
        raise ConfigError(f"{where}: memory_bytes is only for models that this server runs; leave it out")
    for name in entry:
        if name in MODEL_SETTINGS and name not in REMOTE_MODEL_SETTINGS and name != "kind":
            raise ConfigError(
                f"{where}: {name} is a setting of models that this server runs, and this one runs on another server; "
                "leave it out, and set it there"
            )
        if kind != "openai" and name in OF_GENERATION:
            raise ConfigError(f"{where}: {name} is a setting of models that generate text; leave it out")
    if kind not in REMOTE_PREDICTORS:
        del entry["kind"]  # it says how the server is asked; what the model does follows from that
    remote = {name.replace("-", "_"): value for name, value in remote.items()}
    return _convert(remote, settings, f"{where}: remote")


def _take_vllm(entry: dict[str, Any], where: str) -> VllmSettings | None:
    """Remove the settings of vLLM from an entry, and return them as flags; None if the model is of another kind.

    Raises ConfigError.
    """
    if entry.get("kind") != "vllm":
        if "vllm" in entry:
            raise ConfigError(f"{where}: vllm is for models that vLLM serves; set kind = 'vllm', or leave it out")
        return None
    del entry["kind"]
    given = entry.pop("vllm", {})
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: vllm must be a table, such as vllm = {{ command = ['/opt/vllm/bin/vllm'] }}")
    given = {name.replace("-", "_"): value for name, value in given.items()}
    for name in FIXED_OF_VLLM:
        if name in given:
            raise ConfigError(f"{where}: vllm: {name} is for servers that are not started by this one; leave it out")
    for name in entry:
        if name in MODEL_SETTINGS and name not in VLLM_FLAGS:
            raise ConfigError(
                f"{where}: {name} is a setting of servekit's own engine, and vLLM serves this model; leave it out, and "
                "use vLLM's flags: vllm = { arguments = [...] }"
            )
    settings = _convert(given, VllmSettings, f"{where}: vllm")
    flags = [f"{flag}={entry[name]}" for name, flag in VLLM_FLAGS.items() if flag is not None and name in entry]
    return replace(settings, arguments=[*flags, *settings.arguments])


def _parse_model(
    entry: Any, where: str, base: ServeConfig, device: str, estimate: Callable[[ServeConfig], int | None]
) -> ModelSpec:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: it must be a table")
    entry = {name.replace("-", "_"): value for name, value in entry.items()}
    if isinstance(entry.get("id"), str):
        where += f" ({entry['id'][:64]!r})"
    vllm = _take_vllm(entry, where)
    remote = _take_remote(entry, where)
    own = {name: entry.pop(name) for name in list(entry) if name in ModelEntry.__struct_fields__}
    for name in entry:
        if name not in MODEL_SETTINGS:
            raise ConfigError(f"{where}: {_explain_unknown(name)}")
    if "id" not in own:
        raise ConfigError(f"{where}: it has no id, which is the name that requests use")
    if "model" not in entry:
        raise ConfigError(f"{where}: it has no model, which is a directory, a GGUF file or a Hugging Face id")
    values = {**msgspec.structs.asdict(base), **entry, "served_model_name": own["id"], "models": None}
    if (remote is not None or vllm is not None) and "kind" not in entry:
        values["kind"] = "generate"
    elif isinstance(kind := values["kind"], str) and kind not in KINDS:
        raise ConfigError(f"{where}: kind = {kind[:64]!r} must be one of {', '.join((*KINDS, *REMOTE_KINDS, 'vllm'))}")
    try:
        config = msgspec.convert(values, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {explain_setting(str(error), values)}") from None
    own_entry = _convert(own, ModelEntry, where)
    if own_entry.adapter_tenants and not (config.has_adapters and remote is None and vllm is None):
        raise ConfigError(f"{where}: adapter_tenants is for models with adapters; set lora or enable_lora, too")
    adapters = {entry.partition("=")[0] for entry in (config.lora or "").split(",")}
    unknown = [name for name in own_entry.adapter_tenants if name not in adapters]
    if unknown and not config.enable_lora:  # all tenants could use the one that was meant
        raise ConfigError(
            f"{where}: adapter_tenants names {unknown[0]!r}, which is not an adapter of lora: "
            f"{', '.join(map(repr, sorted(adapters)))}"
        )
    if remote is not None:
        return ModelSpec(entry=own_entry, config=config, workers=None, server=remote)
    known = estimate(config) if vllm is None and own_entry.memory_bytes is None else None
    return replace(make_spec(own_entry, config, device, known), server=vllm)


def _entries(table: Mapping[str, Any], name: str, path: str) -> list[Any]:
    entries = table.get(name, [])
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: {name} must be written as [[{name}]], once for each")
    return entries


def _convert(value: Any, kind: type[Converted], where: str) -> Converted:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        if "unknown field" in message:
            name = message.split("`")[1]
            raise ConfigError(
                f"{where}: unknown field {name!r}; the known ones are {', '.join(kind.__struct_fields__)}"
            ) from None
        if "missing required field" in message:
            raise ConfigError(f"{where}: the field {message.split('`')[1]!r} is missing") from None
        field = re.search(r"at `\$\.(\w+)|at `\$\[", message)
        takes = REMOTE_TAKES if issubclass(kind, ServerSettings) else _TAKES
        if field is None or field[1] not in takes:
            raise ConfigError(f"{where}: {message}") from None
        raise ConfigError(f"{where}: {field[1]} must be {takes[field[1]]}") from None


def _explain_unknown(name: str) -> str:
    if name in ServeConfig.__struct_fields__:
        return f"{name} is a setting of the whole server; set it on the command line or in --config"
    known = [*ModelEntry.__struct_fields__, *sorted(MODEL_SETTINGS)]
    close = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"unknown field {name!r}; " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}")


def _check_memory(specs: Sequence[ModelSpec], where: str, memory: Mapping[str, int]) -> None:
    kept = dict.fromkeys(memory, 0)
    for spec in specs:
        for device, need in spec.memory.items():
            if device not in memory:
                continue
            if spec.entry.memory_bytes is None and not need:
                raise ConfigError(
                    f"{where}: the model {spec.id!r} is on {device}, whose memory is limited in [memory], and its "
                    "files do not say how much it takes; set memory_bytes"
                )
            if need > memory[device]:
                raise ConfigError(
                    f"{where}: the model {spec.id!r} takes {need:,} bytes on {device} {_source([spec])}, and "
                    f"[memory] gives {memory[device]:,}; give more, or use a smaller model"
                )
            if spec.entry.is_kept:
                kept[device] += need
    for device, need in kept.items():
        on_device = [spec for spec in specs if spec.entry.is_kept and device in spec.memory]
        if need > memory[device]:
            raise ConfigError(
                f"{where}: the models with keep = 'always' take {need:,} bytes on {device} {_source(on_device)}, and "
                f"[memory] gives {memory[device]:,}; give more, or set keep = 'on_demand' for some"
            )
        for spec in specs:
            if not spec.entry.is_kept and spec.memory.get(device, 0) > memory[device] - need:
                raise ConfigError(
                    f"{where}: the model {spec.id!r} takes {spec.memory[device]:,} bytes on {device}, and the "
                    f"models with keep = 'always' leave {memory[device] - need:,} of {memory[device]:,} "
                    f"{_source([*on_device, spec])}, so it could never be loaded; give more in [memory], or set "
                    "keep = 'on_demand' for more models"
                )


def _source(specs: Sequence[ModelSpec]) -> str:
    """Return where the memory of models is known from, for an error message."""
    estimated = [spec.id for spec in specs if spec.entry.memory_bytes is None]
    if not estimated:
        return "(memory_bytes)"
    if len(specs) == 1:
        return "(estimated from the files; set memory_bytes to give the exact value)"
    return f"(estimated from the files for {_list(estimated)}; set memory_bytes to give the exact values)"


def _list(names: Any) -> str:
    return ", ".join(map(repr, sorted(names)))
