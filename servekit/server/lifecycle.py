"""Run the process that holds the engine, whether it serves HTTP itself or lets API processes do that."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator

import uvloop

from servekit import __version__
from servekit.config import ServeConfig, doubts, non_default
from servekit.engine.llm_engine import LLMEngine
from servekit.engine.make_engine import AnyEngine
from servekit.engine.predictor_engine import PredictorEngine
from servekit.models.several_models import SeveralModels
from servekit.observability.gpu_metrics import GpuCollector, watch_gpus
from servekit.observability.metrics import Metrics, SeveralModelsMetrics
from servekit.observability.process_metrics import Children, watch_event_loop, watch_processes
from servekit.protocol.logging import configure_logging, fields, logs_json, num_dropped_lines
from servekit.protocol.prediction import PredictorKind
from servekit.server.keys_file import KeysReload

log = logging.getLogger("servekit")

# New objects between two collections of the youngest generation, of these collections between two of the middle one,
# and of those between two of the oldest. A collection takes 0.5 to 1 µs for each object, so the first two take about 1
# and 5 ms. The oldest has no bound; almost nothing of a request is in cycles, so it is rarely collected.
GC_THRESHOLDS = (1_000, 5, 1_000)

MAX_BLOCKS_AT_ONCE = 2**14  # blocks of one sequence; sharing or releasing them takes up to 8 ms


def run_until_end(main: Callable[[], Coroutine[None, None, int]], config: ServeConfig) -> int:
    """Run `main` on an event loop of this process, with the log as the settings say. Returns its exit code."""
    configure_logging(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


@contextlib.contextmanager
def watching(
    metrics: Metrics | SeveralModelsMetrics,
    workers: Children,
    reload: KeysReload,
    num_dropped_lines_elsewhere: Callable[[], int] = lambda: 0,
    num_tasks_elsewhere: Callable[[], int] = lambda: 0,
) -> Iterator[None]:
    """Export metrics of the processes, their logs and their event loops, and read the keys file at each request.

    `elsewhere` is in API processes. Until the end of the block.
    """
    metrics.watch_log(lambda: num_dropped_lines() + num_dropped_lines_elsewhere())
    watch_processes(metrics.registry, workers)
    server = metrics.server
    lag = watch_event_loop(server.event_loop_lag, server.event_loop_tasks, num_tasks_elsewhere)
    gpus = GpuCollector()
    metrics.registry.register(gpus)
    tasks = [
        asyncio.create_task(lag, name="event loop lag"),
        asyncio.create_task(reload.run(), name="keys file"),
        asyncio.create_task(watch_gpus(gpus), name="GPU metrics"),
    ]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()


async def start_and_watch(engine: AnyEngine | SeveralModels, begin: Callable[[], Awaitable[str]]) -> None:
    """Start the engine, or several, then begin to serve, and return when it has ended. Raises its failure.

    `begin` returns the server's URL when clients are served.
    """
    is_one = isinstance(engine, AnyEngine)
    log.info("servekit %s: loading %s", __version__, engine.config.model if is_one else "several models")
    await engine.start()
    tune_garbage_collector()
    url = await begin()
    if isinstance(engine, AnyEngine):
        announce(engine, url)
    else:
        announce_models(engine, url)
    await engine.wait_until_failed()
    assert engine.failure is not None
    raise engine.failure


def tune_garbage_collector() -> None:
    """Keep the garbage collector from holding the event loop: it does not traverse the objects of the start.

    A full collection would traverse a hundred thousand objects of the imported modules, each time that requests have
    made some ten thousand.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def announce(engine: AnyEngine, url: str) -> None:
    """Log that the server is ready, and its main settings: as JSON in one entry, as text in several lines."""
    if isinstance(engine, PredictorEngine):
        announce_predictor(engine, url)
        return
    config, worker = engine.config, engine.worker
    assert worker is not None
    for doubt in (*doubts(config), *doubts_about_blocks(engine.scheduler_config.max_total_tokens, config.block_size)):
        log.warning("%s", doubt)
    if not logs_json():
        for line in describe(engine, url):
            log.info("%s", line)
        return
    settings = fields(
        settings=non_default(config),
        model=worker.model.architecture,
        dtype=worker.dtype,
        device=worker.device,
        num_kv_blocks=worker.num_blocks,
        block_size=config.block_size,
        kv_bytes_per_token=worker.kv_bytes_per_token,
        max_total_tokens=engine.scheduler_config.max_total_tokens,
        drafter=engine.speculative.name,
        max_drafts=engine.speculative.max_drafts,
    )
    log.info("ready at %s", url, extra=settings)


def doubts_about_blocks(max_total_tokens: int, block_size: int) -> list[str]:
    """Return a warning if the longest sequence has so many KV blocks that sharing them holds the event loop for long.

    One call shares or releases all blocks of a sequence: 0.1 to 0.5 µs for each.
    """
    num_blocks, larger = -(-max_total_tokens // block_size), block_size
    if num_blocks <= MAX_BLOCKS_AT_ONCE:
        return []
    while -(-max_total_tokens // larger) > MAX_BLOCKS_AT_ONCE:
        larger *= 2
    return [
        f"block_size = {block_size}: a sequence of {max_total_tokens:,} tokens, the longest one, has {num_blocks:,} KV "
        f"blocks, and the event loop is held for up to {num_blocks / 2000:.0f} ms when they are shared or released; "
        f"--block-size {larger} makes it less than 10 ms"
    ]


def announce_models(models: SeveralModels, url: str) -> None:
    """Log that a server with several models is ready, and what they are."""
    for model in models.models:
        entry, config = model.spec.entry, model.config
        for doubt in doubts(config):
            log.warning("the model %s: %s", model.name, doubt)
        names = f", also {', '.join(entry.aliases)}" if entry.aliases else ""
        log.info(
            "model %s: %s%s; kind %s, keep = %r, %s",
            *(model.name, config.model, names, model.kind, entry.keep, model.state),
        )
    log.info("ready at %s", url)


def announce_predictor(engine: PredictorEngine, url: str) -> None:
    """Log that a server of a model that generates nothing is ready."""
    config, ready = engine.config, engine.worker
    assert ready is not None
    if logs_json():
        described = fields(
            settings=non_default(config),
            kind=engine.kind,
            model=ready.model.architecture,
            dtype=ready.dtype,
            device=ready.device,
            max_model_len=ready.model.max_model_len,
        )
        log.info("ready at %s", url, extra=described)
        return
    for name, value in non_default(config).items():
        log.info("  %-24s %s", name, value)
    model = ready.model
    log.info("model: %s, %s on %s, kind %s", model.architecture, ready.dtype, ready.device, engine.kind)
    log.info("ready at %s; try:", url)
    key = "" if config.api_key is None and config.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    log.info("  curl %s%s%s", url, TRIES[engine.kind if model.vocab_size else "image"], key)


TRIES = {
    PredictorKind.EMBED: """/v1/embeddings -d '{"input": "What color is the sky?"}'""",
    PredictorKind.RERANK: """/v1/rerank -d '{"query": "sky color", "documents": ["The sky is blue.", "Fish swim."]}'""",
    PredictorKind.CLASSIFY: """/predict -d '{"input": "A wonderful film."}'""",
    "image": "/predict -F image=@FILE",
}


def describe(engine: LLMEngine, url: str) -> Iterator[str]:
    """Yield the lines that describe a ready server."""
    config, worker = engine.config, engine.worker
    assert worker is not None
    changed = non_default(config)
    if changed:
        yield "settings that differ from their defaults:"
    for name, value in changed.items():
        yield f"  {name:<24} {value}"
    num_tokens = worker.num_blocks * config.block_size
    cache_mib = num_tokens * worker.kv_bytes_per_token / 2**20
    yield f"model: {worker.model.architecture}, {worker.dtype} on {worker.device}"
    if worker.model.notice:
        yield f"  {worker.model.notice}"
    if engine.speculative.is_on:
        yield f"speculative decoding: {engine.speculative.name}, up to {engine.speculative.max_drafts} drafts"
    yield "KV cache:"
    yield f"  {'blocks':<24} {worker.num_blocks:,} of {config.block_size} tokens"
    yield f"  {'tokens':<24} {num_tokens:,} of {worker.kv_bytes_per_token:,} bytes, {cache_mib:,.1f} MiB in total"
    longest = engine.scheduler_config.max_total_tokens
    yield f"  {'longest sequences':<24} {num_tokens / longest:.1f} of {longest:,} tokens"
    if longest < worker.model.max_model_len:
        yield (
            f"  this is less than the model's context of {worker.model.max_model_len:,} tokens; "
            "raise --num-kv-blocks to use all of it"
        )
    yield f"ready at {url}; try:"
    key = "" if config.api_key is None and config.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    yield f"""  curl {url}/generate{key} -d '{{"prompt": "What color is the sky?"}}'"""
