"""Generate the tables in docs/ from the code: settings, metrics, parameters with their APIs, and causes of time.

`python scripts/tables.py` writes them into the pages, between two comments. A test checks that they are up to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from servekit.api.schemas.anthropic import MessagesRequest
from servekit.api.schemas.native import GenerateRequest
from servekit.api.schemas.ollama import OllamaOptions
from servekit.api.schemas.openai import ChatCompletionRequest, CompletionRequest
from servekit.api.schemas.responses_api import ResponsesRequest
from servekit.api.schemas.tgi import TgiParameters
from servekit.config import ServeConfig, settings
from servekit.observability.cost import Cost
from servekit.observability.gpu_metrics import GpuCollector, GpuReading
from servekit.observability.journal import Journal, JournalCollector
from servekit.observability.metrics import (
    AdapterUsage,
    LoadMetrics,
    Metrics,
    PredictorStats,
    QueueUsage,
    RemoteStats,
    SchedulerStats,
)
from servekit.requests.time_causes import MEANINGS
from servekit.scheduler.draft_length import DraftLengths

DOCS = Path(__file__).parents[1] / "docs"

APIS: dict[str, tuple[type[msgspec.Struct], dict[str, str]]] = {
    # name: (schema, own names of parameters that the other APIs call by the name on the left)
    "`/generate`": (GenerateRequest, {}),
    "TGI's `parameters`": (
        TgiParameters,
        {
            "max_tokens": "max_new_tokens",
            "logprobs": "top_n_tokens",
            "prompt_logprobs": "decoder_input_details",
            "truncate_prompt_tokens": "truncate",
            "echo": "return_full_text",
        },
    ),
    "Ollama's `options`": (OllamaOptions, {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}),
    "`/v1/completions`": (CompletionRequest, {"grammar": "structured_outputs"}),
    "`/v1/chat/completions`": (ChatCompletionRequest, {"grammar": "structured_outputs"}),
    "`/v1/responses`": (ResponsesRequest, {"max_completion_tokens": "max_output_tokens"}),
    "`/v1/messages`": (MessagesRequest, {}),
}
NOT_PARAMETERS = {"prompt", "prompts", "messages", "system", "input", "instructions", "model"}


def settings_table() -> Iterator[str]:
    yield "| flag | takes | default | meaning |"
    yield "|---|---|---|---|"
    for setting in settings():
        flag = f"`{setting.flag}`" + (f", `--no-{setting.flag[2:]}`" if setting.is_switch else "")
        default = "" if setting.default is None else f"`{setting.default}`"
        yield f"| {flag} | {setting.accepts} | {default} | {setting.description} |"


def parameters_table() -> Iterator[str]:
    """Yield one row for each parameter; a cell has the API's own name where it differs."""
    columns = {api: _fields(kind) for api, (kind, _) in APIS.items()}
    own_names = {own for _, names in APIS.values() for own in names.values()}
    rows: dict[str, str] = {}  # name to meaning
    for fields in columns.values():
        rows |= {name: rows.get(name) or text for name, text in fields.items() if name not in own_names}
    yield f"| parameter | {' | '.join(APIS)} | meaning |"
    yield "|---" * (len(APIS) + 2) + "|"
    for name, meaning in rows.items():
        cells = [_cell(columns[api], name, names.get(name, name)) for api, (_, names) in APIS.items()]
        yield f"| `{name}` | {' | '.join(cells)} | {meaning} |"


def _fields(kind: type[msgspec.Struct]) -> dict[str, str]:
    properties: dict[str, Any] = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    fields = {name: field.get("description", "") for name, field in properties.items() if name not in NOT_PARAMETERS}
    # In TGI's API, `stream` stands beside the parameters.
    return fields | {"stream": ""} if kind is TgiParameters else fields


def _cell(fields: dict[str, str], name: str, own: str) -> str:
    if own not in fields:
        return ""
    if fields[own].startswith("refused:"):
        return "refused"
    return "✓" if own == name else f"`{own}`"


def metrics_table() -> Iterator[str]:
    """Yield one row for each metric of an idle server, without the label `model_name`, which nearly all have."""
    metrics = Metrics(ServeConfig(), "")
    metrics.watch_scheduler(lambda: [SchedulerStats(**dict.fromkeys(SchedulerStats.__struct_fields__, 1))])
    metrics.watch_drafts("ngram", lambda: [DraftLengths(1)])
    metrics.watch_queue(lambda: QueueUsage(1, 1))
    metrics.watch_log(lambda: 0)
    metrics.watch_cost(lambda: Cost(1.0, 1.0, 1.0))
    reading = GpuReading(
        index=0, name="", uuid="", memory_used_bytes=1, memory_total_bytes=1, utilization=1.0, power_watts=1.0,
        energy_joules=1.0, temperature_celsius=1.0,
    )  # fmt: skip
    metrics.registry.register(GpuCollector([reading]))
    metrics.watch_adapters(lambda: AdapterUsage(1, 1, {}), lambda: 0.0)
    metrics.adapters.label("")
    metrics.offloading(0)
    metrics.transfers(0)
    metrics.registry.register(JournalCollector([Journal(Path("journal"), 1, 1)], ""))
    LoadMetrics(metrics, lambda: "", lambda: 0, lambda: 0)
    metrics.watch_predictor(lambda: PredictorStats(**dict.fromkeys(PredictorStats.__struct_fields__, 1)))
    assert metrics.predictions
    metrics.watch_remote(lambda: RemoteStats("closed", 1, 1))
    assert metrics.remote
    metrics.http.request_refused("")
    metrics.http.request_ended("", "", 0)
    yield "| metric | type | labels | meaning |"
    yield "|---|---|---|---|"
    for family in sorted(metrics.registry.collect(), key=lambda family: family.name):
        labels = {"config_info": "some settings"}.get(family.name.removeprefix("servekit_")) or ", ".join(
            f"`{label}`" for label in family.samples[0].labels if label not in ("model_name", "le")
        )
        name = family.name + ("_total" if family.type == "counter" else "")
        yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


def causes_table() -> Iterator[str]:
    yield "| cause | what it means |"
    yield "|---|---|"
    for cause, meaning in MEANINGS.items():
        yield f"| `{cause}` | {meaning} |"


TABLES = {
    "explain.md": ("causes", causes_table),
    "metrics.md": ("metrics", metrics_table),
    "settings.md": ("settings", settings_table),
    "parameters.md": ("parameters", parameters_table),
}


def with_table(text: str, name: str, lines: Iterator[str], maker: str = "scripts/tables.py") -> str:
    """Return the page with a new table between its two comments."""
    begin, end = f"<!-- {name}: made by {maker} -->", f"<!-- end of {name} -->"
    table = "\n".join([begin, *lines, end])
    assert begin in text and end in text, f"the page has no place for the table {name}"
    return re.sub(re.escape(begin) + ".*" + re.escape(end), lambda _: table, text, flags=re.DOTALL)


def main() -> None:
    for page, (name, lines) in TABLES.items():
        file = DOCS / page
        file.write_text(with_table(file.read_text(), name, lines()))


if __name__ == "__main__":
    main()
