"""`servekit plan`: print what a model needs on a device, and what a service would achieve and cost."""

from __future__ import annotations

import json
from math import ceil, floor, log2
from pathlib import Path
from statistics import mean
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from servekit.config import ServeConfig
from servekit.engine.hub import ModelNotDownloaded, download_file, split_revision
from servekit.engine.model_files import find_model
from servekit.errors import ConfigError
from servekit.laboratory.page import write_page
from servekit.laboratory.report import as_json, as_table, counted
from servekit.laboratory.virtual_run import LabSettings, StepDurations
from servekit.observability.journal import read_header
from servekit.planning.capacity import Capacity, measure_capacity
from servekit.planning.demand import SLO_SHARE, Demand, make_requests, parse_service_level
from servekit.planning.devices import GIGA, Device, find_device
from servekit.planning.model_shape import ModelShape, read_shape
from servekit.planning.page import as_page
from servekit.planning.plan import CostPlan, MemoryPlan, PhasePlan, Plan
from servekit.planning.roofline import (
    COMPUTES_IN,
    KV_BYTES,
    WEIGHT_BITS,
    Layout,
    Roofline,
    make_roofline,
)
from servekit.replaying.command import read_run
from servekit.simulation.model import is_simulated, parse_simulated

MEMORY_UTILIZATION = 0.9  # of the device, as `--gpu-memory-utilization` has it
MAX_SLOTS = 256  # as `--max-num-seqs` has it
BLOCK_SIZE = 16
SEEDS = (0, 1, 2)
MIN_TURNS = 3  # of every slot in a simulated run: fewer show the beginning and the end, not the service
SECONDS_PER_HOUR = 3600
HOURS_PER_MONTH = 730
FIGURES = ("tokens_per_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s")


class PlanOptions(Struct, frozen=True, kw_only=True):
    """The arguments of the command."""

    model: str
    device: str = "h100"
    devices_file: Path | None = None
    weights: str | None = None
    kv_cache: str = "bfloat16"
    tensor_parallel_size: int = 1
    prompt_tokens: int = 1000
    output_tokens: int = 200
    max_model_len: int | None = None
    rate: float | None = None
    slo: str = "ttft:1s,tpot:50ms"
    price_per_hour: float | None = None
    api_price: float | None = None
    trace: Path | None = None  # a journal, from whose requests lengths are drawn
    step_times: str | None = None  # sim:SPEC, in place of those of the data sheet
    requests: int | None = None  # of each simulated run; by default so many that each slot has several
    out: Path | None = None
    as_json: bool = False


def plan(options: PlanOptions) -> int:
    """Run the command and return the exit code. Raises ConfigError."""
    result = make_plan(options)
    print(as_json(result) if options.as_json else "\n\n".join(as_texts(result, options)))
    if options.out is not None:
        write_page(options.out / "plan.html", as_page(result, as_texts(result, options)))
    return 0


def make_plan(options: PlanOptions) -> Plan:
    """Compute the plan. Raises ConfigError."""
    device = find_device(options.device, options.devices_file)
    lengths = () if options.trace is None else _recorded_lengths(options.trace)
    if lengths:
        options = replace(
            options,
            prompt_tokens=round(mean(prompt for prompt, _ in lengths)),
            output_tokens=round(mean(output for _, output in lengths)),
            max_model_len=options.max_model_len or max(map(sum, lengths)),
        )
    config, checkpoint_bytes = _read_model(options.model)
    shape = read_shape(config)
    _check(options, shape)
    weights = options.weights or _stored_format(config)
    if weights not in WEIGHT_BITS and checkpoint_bytes is None:
        raise ConfigError(
            f"the weights are stored as {weights}, and their files are not here; say with --weights how they are kept"
        )
    layout = Layout(
        shape=shape,
        weight_format=weights,
        kv_format=options.kv_cache,
        tensor_parallel_size=options.tensor_parallel_size,
        num_weight_bytes_known=checkpoint_bytes if options.weights is None else None,
    )
    memory = _memory(options, layout, device)
    roofline = make_roofline(layout, device)
    service_level = parse_service_level(options.slo)
    num_slots = min(MAX_SLOTS, max(1, memory.num_sequences))
    demand = Demand(
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        max_length=memory.max_model_len,
        num_requests=options.requests or MIN_TURNS * num_slots,
        lengths=lengths,
    )
    settings = LabSettings(
        num_slots=num_slots,
        num_kv_tokens=memory.num_kv_tokens,
        block_size=BLOCK_SIZE,
        max_model_len=memory.max_model_len,
        chunk_tokens=ServeConfig(max_num_seqs=MAX_SLOTS).batched_tokens("cpu" if device.is_cpu else ""),
        has_prefix_cache=False,
    )
    capacity = measure_capacity(
        lambda rate, seed: make_requests(demand, rate, seed),
        settings,
        roofline if options.step_times is None else _measured_step_times(options.step_times),
        service_level,
        SEEDS,
    )
    return Plan(
        model=options.model,
        shape=shape,
        num_parameters=shape.num_parameters,
        device=device,
        weights=weights,
        memory=memory,
        flop_per_s=device.flop_per_s(COMPUTES_IN.get(weights, "bfloat16")),
        phases=_phases(options, roofline, memory),
        service_level=service_level,
        capacity=capacity,
        cost=_cost(options, device, capacity),
    )


def _recorded_lengths(path: Path) -> tuple[tuple[int, int], ...]:
    """The lengths of prompts and answers in a journal. Raises ConfigError."""
    requests = read_run(path, read_header(path).config).requests.values()
    lengths = tuple((each.prompt_length, each.num_output_tokens) for each in requests if each.num_output_tokens)
    if not lengths:
        raise ConfigError(f"--trace {path}: no request of it has a token of an answer")
    return lengths


def _measured_step_times(spec: str) -> StepDurations:
    if not is_simulated(spec):
        raise ConfigError(f"--step-times {spec}: write them as sim:SPEC (docs/simulated_model.md)")
    return parse_simulated(spec)


def _read_model(model: str) -> tuple[dict[str, Any], int | None]:
    """Return a model's configuration, and the size of its weights if they are on this machine. Downloads no weights."""
    path = Path(model)
    if is_simulated(model):
        raise ConfigError(f"model {model!r} is simulated and has no configuration; give a config.json")
    if path.suffix != ".json":
        try:
            path = find_model(model, may_download=False) / "config.json"
        except ModelNotDownloaded:
            path = download_file(*_file_of(model))
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: this is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: this is not a model's configuration")
    return config, _weight_bytes(path.parent)


def _weight_bytes(directory: Path) -> int | None:
    """The size of a checkpoint's weights; None if they are not there."""
    files = [each for each in directory.glob("*.safetensors") if not each.name.startswith("consolidated")]
    return sum(each.stat().st_size for each in files or directory.glob("*.gguf")) or None


def _file_of(model: str) -> tuple[str, str, str | None]:
    name, revision = split_revision(model, None)
    return name, "config.json", revision


def _stored_format(config: dict[str, Any]) -> str:
    """How a configuration says that its weights are stored."""
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        return str(quantization.get("quant_method") or "quantized")
    named = config.get("dtype") or config.get("torch_dtype")
    return "float32" if named == "float32" else "bfloat16"  # float16 takes and computes as much


def _check(options: PlanOptions, shape: ModelShape) -> None:
    if options.weights is not None and options.weights not in WEIGHT_BITS:
        raise ConfigError(f"--weights {options.weights}: unknown; use one of {', '.join(WEIGHT_BITS)}")
    if options.kv_cache not in KV_BYTES:
        raise ConfigError(f"--kv-cache {options.kv_cache}: unknown; use one of {', '.join(KV_BYTES)}")
    if options.rate is not None and options.rate <= 0:
        raise ConfigError("--rate 0: give the requests per second that the service must serve")
    if shape.num_heads % options.tensor_parallel_size:
        raise ConfigError(
            f"--tensor-parallel-size {options.tensor_parallel_size}: the model has {shape.num_heads} heads, which "
            "this many ranks cannot divide"
        )


def _memory(options: PlanOptions, layout: Layout, device: Device) -> MemoryPlan:
    usable = floor(MEMORY_UTILIZATION * device.memory_bytes)
    left = usable - layout.num_weight_bytes
    num_kv_tokens = layout.num_kv_blocks(left, BLOCK_SIZE) * BLOCK_SIZE
    if num_kv_tokens < BLOCK_SIZE:
        total = layout.num_weight_bytes * layout.tensor_parallel_size
        ranks = 2 ** ceil(log2(total / usable))  # heads are shared by powers of two
        raise ConfigError(
            f"the weights take {layout.num_weight_bytes / GIGA:.1f} GB, and {device.name} has {usable / GIGA:.1f} GB "
            f"for weights and KV cache; use --tensor-parallel-size {max(ranks, 2 * layout.tensor_parallel_size)}, or "
            "weights of fewer bits: --weights int4"
        )
    mean_length = options.prompt_tokens + options.output_tokens
    longest = options.max_model_len or min(layout.shape.max_model_len or 8 * mean_length, 8 * mean_length)
    max_model_len = min(longest, num_kv_tokens)
    if mean_length > max_model_len:
        raise ConfigError(
            f"requests have {mean_length} tokens on average, and the longest sequence is {max_model_len}; shorten "
            "them, or raise --max-model-len"
        )
    return MemoryPlan(
        num_weight_bytes=layout.num_weight_bytes,
        kv_bytes_per_token=layout.kv_bytes_per_token,
        num_kv_tokens=num_kv_tokens,
        num_sequences=num_kv_tokens // mean_length,
        mean_length=mean_length,
        max_model_len=max_model_len,
    )


def _phases(options: PlanOptions, roofline: Roofline, memory: MemoryPlan) -> tuple[PhasePlan, ...]:
    context = roofline.num_attended(options.prompt_tokens + options.output_tokens / 2)
    largest = max(1, min(MAX_SLOTS, memory.num_sequences))
    prompt = options.prompt_tokens
    steps = [("prefill of one prompt", prompt, 1, 0.0, roofline.num_pairs(0, prompt))]
    steps += [
        (f"decode, batch of {size}", size, size, size * context, 0.0) for size in sorted({1, min(8, largest), largest})
    ]
    phases = []
    for name, num_tokens, num_sampled, num_context, num_pairs in steps:
        step = roofline.step(num_tokens, num_sampled, num_context, num_pairs)
        phases.append(
            PhasePlan(
                name=name,
                duration_s=step.duration_s,
                tokens_per_s=num_tokens / step.duration_s,
                flop_per_s=step.flop / step.duration_s,
                arithmetic_intensity=step.arithmetic_intensity,
                bound="memory" if step.is_memory_bound else "arithmetic",
            )
        )
    return tuple(phases)


def _cost(options: PlanOptions, device: Device, capacity: Capacity) -> CostPlan:
    rate = options.rate if options.rate is not None else capacity.slo_rate
    if not capacity.slo_rate:
        return CostPlan(num_devices=0, num_replicas=0, rate=rate)
    num_replicas = ceil(rate / capacity.slo_rate - 1e-9)
    num_devices = num_replicas * options.tensor_parallel_size
    price, price_source = options.price_per_hour, ""
    if price is None:
        price, price_source = device.price_per_hour, device.price_source
    per_hour = None if price is None else num_devices * price
    tokens_per_hour = rate * options.output_tokens * SECONDS_PER_HOUR
    per_month = num_replicas * capacity.slo_rate * SECONDS_PER_HOUR * HOURS_PER_MONTH
    break_even = None
    if per_hour is not None and options.api_price:
        tokens = options.prompt_tokens + options.output_tokens
        break_even = per_hour * HOURS_PER_MONTH / (options.api_price * tokens / 1e6)
    return CostPlan(
        num_devices=num_devices,
        num_replicas=num_replicas,
        rate=rate,
        price_source=price_source,
        per_hour=per_hour,
        per_million_output_tokens=None if per_hour is None else 1e6 * per_hour / tokens_per_hour,
        break_even_requests_per_month=break_even,
        is_ever_cheaper=None if break_even is None else break_even <= per_month,
    )


# -- text -------------------------------------------------------------------------------------------------------------


def as_texts(result: Plan, options: PlanOptions) -> list[str]:
    """Write a plan for a terminal: model and memory, steps, the service, its cost."""
    return [_model_text(result, options), _phase_text(result), _capacity_text(result), _cost_text(result)]


def _model_text(result: Plan, options: PlanOptions) -> str:
    shape, memory = result.shape, result.memory
    ranks = options.tensor_parallel_size
    where = f"{result.device.name}" if ranks == 1 else f"{ranks} x {result.device.name}, each"
    lines = [
        f"{result.model} ({shape.model_type}): {shape.num_parameters / 1e9:.2f} billion parameters"
        + (f", {shape.num_active_parameters / 1e9:.2f} for one token" if shape.num_experts else ""),
        f"on {where}:",
        f"  weights, {result.weights:<14}{memory.num_weight_bytes / GIGA:10,.2f} GB",
        f"  KV cache, {options.kv_cache:<13}{memory.kv_bytes_per_token:10,} bytes for each token",
        f"  room for{'':<14}{memory.num_kv_tokens:10,} tokens: {memory.num_sequences:,} sequences of "
        f"{memory.mean_length:,}",
    ]
    if shape.num_window_layers:
        lines.append(
            f"  ({shape.num_window_layers} of {shape.num_layers} layers attend to a window of {shape.window:,} tokens; "
            "servekit keeps the keys and values of all tokens)"
        )
    if shape.latent_dim:
        latent = shape.num_layers * shape.latent_dim * KV_BYTES[options.kv_cache]
        lines.append(f"  (latent attention: {latent:,} bytes would do; servekit keeps whole keys and values)")
    return "\n".join(lines)


def _phase_text(result: Plan) -> str:
    balance = result.device.flop_per_s("bfloat16") / result.device.bytes_per_s
    lines = [f"{'a step':<26}{'duration':>10}{'tokens/s':>12}{'FLOP/byte':>12}  bound by"]
    lines += [
        f"{phase.name:<26}{1e3 * phase.duration_s:>7.1f} ms{phase.tokens_per_s:>12,.0f}"
        f"{phase.arithmetic_intensity:>12,.1f}  {phase.bound}"
        for phase in result.phases
    ]
    return "\n".join([*lines, f"(the device: {balance:.0f} FLOP of bfloat16 for each byte)"])


def _capacity_text(result: Plan) -> str:
    capacity, level = result.capacity, result.service_level
    rows = []
    for point in capacity.points:
        error = f" ± {point.goodput_error:.2f}" if point.goodput_error else ""
        rows.append((f"{point.rate:.2f}, of these in time {point.goodput:.2f}{error}", point.summary))
    limits = f"TTFT {1e3 * level.ttft_s:.0f} ms, TPOT {1e3 * level.tpot_s:.0f} ms"
    return (
        f"one replica, simulated: at most {capacity.max_rate:.2f} requests/s; "
        f"{capacity.slo_rate:.2f} with {SLO_SHARE:.0%} within {limits}\n\n" + as_table("requests/s", rows, FIGURES)
    )


def _cost_text(result: Plan) -> str:
    cost = result.cost
    if not cost.num_replicas:
        return (
            "No rate keeps the service level on this device: relax --slo, or take a faster device or a smaller model."
        )
    replicas, devices = counted(cost.num_replicas, "replica"), counted(cost.num_devices, "device")
    text = f"for {cost.rate:.2f} requests/s: {replicas}, {devices}"
    if cost.per_hour is not None and cost.per_million_output_tokens is not None:
        text += f"; {cost.per_hour:,.2f} an hour, {cost.per_million_output_tokens:,.2f} for a million output tokens"
        if cost.price_source:
            text += f"\n(price of a device: {cost.price_source}; --price-per-hour takes yours)"
    if cost.break_even_requests_per_month is not None:
        break_even = f"{cost.break_even_requests_per_month:,.0f} requests a month"
        if cost.is_ever_cheaper:
            text += f"\ncheaper than the API from {break_even} on"
        else:
            text += f"\nthe API is cheaper: these devices would have to serve {break_even}, and cannot"
    return text
