"""Define the Grafana dashboard deploy/grafana/servekit.json: its panels, their order and their metrics.

`python scripts/dashboard.py` writes the file. A test checks that it is up to date and that all of its metrics exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "servekit.json"

WIDTH = 24  # of Grafana's grid
TILE_WIDTH, TILE_HEIGHT, GRAPH_WIDTH, GRAPH_HEIGHT = 3, 4, 8, 8
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PLACE = 'job=~"$job",instance=~"$instance"'  # the labels of process metrics
SERVER = f'{PLACE},model_name=~"$model_name"'
ROUTINE = 'handler!~"/health|/ready|/metrics"'
BY_REPLICA = "instance, model_name, replica"
REPLICA, GPU = "{{instance}} {{model_name}} {{replica}}", "{{instance}} GPU {{gpu}}"
QUANTILES = (0.5, 0.95, 0.99)


def rate(name: str, more: str = "", where: str = SERVER) -> str:
    return f"rate(servekit_{name}{{{where}{',' if more else ''}{more}}}[$__rate_interval])"


def total(name: str, more: str = "") -> str:
    return f"sum({rate(name, more)})"


def by(label: str, name: str, more: str = "") -> str:
    return f"sum by ({label}) ({rate(name, more)})"


def gauge(name: str) -> str:
    return f"sum(servekit_{name}{{{SERVER}}})"


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) ({rate(name + '_bucket')}))"


def process(name: str) -> str:
    return f"{name}{{{PLACE}}}"


def of_replica(name: str) -> str:
    return f"sum by ({BY_REPLICA}) ({name}{{{SERVER}}})"


def of_both(name: str, form: str) -> tuple[tuple[str, str], ...]:
    """Return curves of one process metric for the server and for its workers."""
    server, worker = (form.format(expression=process(each)) for each in (name, f"servekit_worker_{name}"))
    return (server, "{{instance}}"), (worker, "{{instance}} worker {{replica}}")


@dataclass(frozen=True)
class Panel:
    """A tile (`stat`) or a graph; `curves` are pairs of expression and legend."""

    title: str
    text: str
    curves: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    maximum: float | None = None

    @property
    def description(self) -> str:
        """Return what the panel shows, with the names of its metrics."""
        found = re.findall(
            r"\b(?:servekit_\w+|process_\w+|up\b)", " ".join(expression for expression, _ in self.curves)
        )
        return f"{self.text} Metrics: {', '.join(f'`{name}`' for name in dict.fromkeys(found))}."


def tile(title: str, text: str, expression: str, unit: str) -> Panel:
    return Panel(title, text, ((expression, title),), unit, kind="stat")


def quantiles(title: str, text: str, name: str) -> Panel:
    return Panel(title, text, tuple((quantile(share, name), f"p{share * 100:g}") for share in QUANTILES), "s")


def ratio(part: str, whole: str) -> str:
    """Return an expression that is 0, not empty, while `part` has no series yet."""
    return f"({part} or vector(0)) / {whole}"


ROWS: dict[str, list[Panel]] = {
    "At a glance": [
        tile("Requests/s", "Requests, without probes and scrapes.", total("http_requests_total", ROUTINE), "reqps"),
        tile("Input tokens/s", "Prompt tokens of admitted requests.", total("prompt_tokens_total"), "short"),
        tile("Output tokens/s", "Generated tokens.", total("generation_tokens_total"), "short"),
        tile(
            "Error ratio",
            "Share of answers with a 5xx status, without probes.",
            ratio(total("http_requests_total", f'{ROUTINE},status=~"5.."'), total("http_requests_total", ROUTINE)),
            "percentunit",
        ),
        tile("TTFT p95", "From arrival to the first token.", quantile(0.95, "time_to_first_token_seconds"), "s"),
        tile("ITL p95", "Between two tokens of a sequence.", quantile(0.95, "inter_token_latency_seconds"), "s"),
        tile("E2E p95", "From arrival to the end.", quantile(0.95, "e2e_request_latency_seconds"), "s"),
        tile("Unreachable", "Servers that cannot be scraped.", f"count({process('up')} == 0) or vector(0)", "short"),
    ],
    "Latency": [
        quantiles("Time to first token", "From arrival to the first token.", "time_to_first_token_seconds"),
        quantiles("Inter-token latency", "Between two tokens of a sequence.", "inter_token_latency_seconds"),
        quantiles(
            "End to end", "From arrival to the end of the sequence, for every reason.", "e2e_request_latency_seconds"
        ),
        Panel(
            "Phases, p95",
            "The time of a request by phase.",
            tuple((quantile(0.95, f"request_{phase}_time_seconds"), phase) for phase in ("queue", "prefill", "decode")),
            "s",
        ),
        quantiles(
            "Time per output token",
            "Mean of each request, without the first token.",
            "request_time_per_output_token_seconds",
        ),
        Panel(
            "Lengths, p50 and p95",
            "Lengths of prompts and of answers.",
            tuple(
                (quantile(share, f"request_{what}_tokens"), f"{what} p{share * 100:g}")
                for what in ("prompt", "generation")
                for share in (0.5, 0.95)
            ),
        ),
    ],
    "Queue and batch": [
        Panel(
            "Sequences",
            "Running sequences, and waiting ones by reason; the limit is max_num_queued_reqs.",
            (
                (gauge("num_requests_running"), "running"),
                (f"sum by (reason) (servekit_num_requests_waiting_by_reason{{{SERVER}}})", "waiting: {{reason}}"),
                (gauge("num_requests_waiting_limit"), "limit of waiting"),
            ),
        ),
        Panel(
            "Prompt tokens waiting",
            "Prompt tokens of sequences that wait for their first step; the limit is max_num_queued_tokens.",
            ((gauge("num_tokens_waiting"), "waiting"), (gauge("num_tokens_waiting_limit"), "limit")),
        ),
        Panel(
            "Newest step",
            "Its sequences, and its decode and prefill tokens.",
            (
                (gauge("scheduler_batch_size"), "sequences"),
                (f"sum by (phase) (servekit_scheduler_batch_tokens{{{SERVER}}})", "{{phase}} tokens"),
            ),
        ),
        Panel(
            "Tokens in a step",
            "Steps close to max_num_batched_tokens are limited by prefill.",
            tuple((quantile(share, "iteration_tokens"), f"p{share * 100:g}") for share in QUANTILES),
        ),
        Panel(
            "Finished sequences",
            "Sequences that ended, by reason.",
            ((by("finished_reason", "request_success_total"), "{{finished_reason}}"),),
            "ops",
        ),
        Panel(
            "Prefill allowed",
            "Prefill tokens that the next step may contain: less than max_num_batched_tokens while the scheduler "
            "limits prefill for --itl-target-ms.",
            ((gauge("prefill_limit_tokens"), "prefill"), (gauge("step_token_limit"), "whole step")),
        ),
    ],
    "KV cache": [
        Panel(
            "KV use",
            "Share of the KV blocks in use; blocks that are only cached count as free.",
            ((f"max by (instance) (servekit_kv_cache_usage_perc{{{SERVER}}})", "{{instance}}"),),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "KV blocks", "Blocks in the pool.", ((gauge("kv_blocks_total"), "all"), (gauge("kv_blocks_free"), "free"))
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their blocks to an older one and are computed again.",
            ((total("num_preemptions_total"), "preemptions"),),
            "ops",
        ),
        Panel(
            "Prefix cache",
            "Share of prompt tokens found in the prefix cache.",
            ((ratio(total("prefix_cache_hits_total"), total("prefix_cache_queries_total")), "hit ratio"),),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Prompt tokens",
            "Prompt tokens of admitted requests, and those that were cached and not computed.",
            ((total("prompt_tokens_total"), "all"), (total("prefix_cache_hits_total"), "cached")),
        ),
    ],
    "Speculative decoding": [
        Panel(
            "Accepted drafts",
            "Share of the verified drafts that were accepted.",
            (
                (
                    ratio(total("spec_decode_num_accepted_tokens_total"), total("spec_decode_num_draft_tokens_total")),
                    "all",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Accepted drafts by position",
            "Share of the drafts at each position of a span that were accepted; 0 is the first.",
            (
                (
                    f"{by('position', 'spec_decode_num_accepted_tokens_per_pos_total')} / "
                    f"{by('position', 'spec_decode_num_draft_tokens_per_pos_total')}",
                    "{{position}}",
                ),
            ),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Tokens per step",
            "Mean tokens that a step with drafts gives a sequence.",
            (
                (
                    f"1 + {total('spec_decode_num_accepted_tokens_total')} / {total('spec_decode_num_drafts_total')}",
                    "tokens",
                ),
            ),
        ),
    ],
    "Scheduler overhead": [
        quantiles("Step", "Execution time of a step in the worker.", "step_duration_seconds"),
        quantiles(
            "Overhead of a step",
            "Time of planning and communication that is not overlapped with execution.",
            "step_overhead_seconds",
        ),
        quantiles(
            "Round trip", "Transport to and from an idle worker: two queues and two wake-ups.", "ipc_roundtrip_seconds"
        ),
        quantiles("Event-loop lag", "Delay of timers.", "api_event_loop_lag_seconds"),
        Panel("Steps/s", "Executed steps.", ((total("scheduler_steps_total"), "steps"),), "ops"),
        Panel(
            "Idle",
            "Share of the time without any sequence.",
            ((f"avg({rate('scheduler_idle_seconds_total')})", "idle"),),
            "percentunit",
            maximum=1,
        ),
    ],
    "Workers": [
        Panel(
            "Alive",
            "Workers that respond, and servers that drain.",
            ((gauge("workers_alive"), "workers"), (gauge("draining"), "draining")),
        ),
        Panel(
            "Replacements",
            "Workers that ended, hung or did not start, by cause.",
            (
                (
                    f"sum by (cause) (increase(servekit_worker_restarts_total{{{SERVER}}}[$__rate_interval]))",
                    "{{cause}}",
                ),
            ),
        ),
        quantiles("Recovery", "From the loss of a worker until its replacement is ready.", "worker_recovery_seconds"),
        Panel(
            "Suspected sequences",
            "Sequences that run alone, because workers were lost while they ran.",
            ((gauge("num_requests_suspected"), "suspected"),),
        ),
        Panel(
            "Stale results",
            "Results of replaced workers, which are dropped.",
            ((total("stale_results_total"), "stale results"),),
            "ops",
        ),
    ],
    "By replica": [
        Panel(
            "Waiting sequences",
            "Sequences that wait, by replica; servers and replicas are added by their number.",
            ((of_replica("servekit_num_requests_waiting"), REPLICA),),
        ),
        Panel(
            "Predicted wait",
            "How long a request that comes now waits in each replica; it goes to the one that is free first.",
            ((of_replica("servekit_predicted_wait_seconds"), REPLICA),),
            "s",
        ),
        Panel(
            "KV use of replicas",
            "Share of the KV blocks in use.",
            ((of_replica("servekit_kv_cache_usage_perc"), REPLICA),),
            "percentunit",
            maximum=1,
        ),
        Panel(
            "Mean step",
            "Mean execution time of a step. A replica that is much slower than others may share its device.",
            (
                (
                    f"sum by ({BY_REPLICA}) ({rate('step_duration_seconds_sum')}) / "
                    f"sum by ({BY_REPLICA}) ({rate('step_duration_seconds_count')})",
                    REPLICA,
                ),
            ),
            "s",
        ),
        Panel(
            "Alive by node",
            "Workers that respond, by the node of their server, where Prometheus adds that label.",
            ((f"sum by (node) (servekit_workers_alive{{{SERVER}}})", "{{node}}"),),
        ),
    ],
    "GPUs and cost": [
        Panel(
            "GPU memory",
            "Memory of each GPU in use, and all of it.",
            (
                (process("servekit_gpu_memory_used_bytes"), GPU),
                (process("servekit_gpu_memory_total_bytes"), f"{GPU} all"),
            ),
            "bytes",
        ),
        Panel(
            "GPU utilization",
            "Share of the time in which a kernel ran.",
            ((process("servekit_gpu_utilization_perc"), GPU),),
            "percentunit",
            maximum=1,
        ),
        Panel("GPU power", "Power of each GPU.", ((process("servekit_gpu_power_watts"), GPU),), "watt"),
        Panel(
            "GPU temperature",
            "Temperature of each GPU.",
            ((process("servekit_gpu_temperature_celsius"), GPU),),
            "celsius",
        ),
        Panel(
            "Energy of a million tokens",
            "Energy of all GPUs for a million tokens of prompts and answers.",
            (
                (
                    f"1e6 * sum(rate({process('servekit_gpu_energy_joules_total')}[$__rate_interval])) / "
                    f"({total('prompt_tokens_total')} + {total('generation_tokens_total')})",
                    "energy",
                ),
            ),
            "joule",
        ),
        Panel(
            "Cost of a million tokens",
            "What prompts and answers cost, by model, with --price-per-hour; in its currency.",
            (
                (
                    f"1e6 * {by('model_name', 'cost_total')} / "
                    f"({by('model_name', 'prompt_tokens_total')} + {by('model_name', 'generation_tokens_total')})",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Cost of an hour",
            "What the devices that are in use cost in an hour, with --price-per-hour; in its currency.",
            ((f"sum by (model_name) (servekit_cost_per_hour{{{SERVER}}})", "{{model_name}}"),),
        ),
    ],
    "HTTP": [
        Panel(
            "By route",
            "All requests, by route.",
            ((by("handler, method", "http_requests_total"), "{{method}} {{handler}}"),),
            "reqps",
        ),
        Panel(
            "By status",
            "499 is a client that disconnected before its answer began.",
            ((by("status", "http_requests_total", ROUTINE), "{{status}}"),),
            "reqps",
        ),
        Panel(
            "Refused",
            "Refused requests, by error code.",
            ((by("reason", "admission_rejections_total"), "{{reason}}"),),
            "reqps",
        ),
    ],
    "Process": [
        Panel(
            "Memory",
            "Resident memory of the server and its worker.",
            of_both("process_resident_memory_bytes", "{expression}"),
            "bytes",
        ),
        Panel(
            "File descriptors",
            "Open files, and their limit.",
            ((process("process_open_fds"), "{{instance}}"), (process("process_max_fds"), "{{instance}} limit")),
        ),
        Panel(
            "CPU",
            "Busy cores of the server and its worker.",
            of_both("process_cpu_seconds_total", "rate({expression}[$__rate_interval])"),
        ),
        Panel(
            "Version", "Running versions.", ((f"count by (version) ({process('servekit_build_info')})", "{{version}}"),)
        ),
        Panel(
            "Settings",
            "Scheduler settings of each server.",
            ((f"servekit_config_info{{{SERVER}}}", "{{instance}}: {{scheduling_policy}}, {{max_num_seqs}} sequences"),),
        ),
    ],
}


def panels() -> Iterator[dict[str, Any]]:
    """Yield the panels with a heading for each row, laid out from left to right."""
    number, y = 0, 0
    for heading, row in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": heading,
            "collapsed": False,
            "panels": [],
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
        }
        x, y = 0, y + 1
        for panel in row:
            width, height = (TILE_WIDTH, TILE_HEIGHT) if panel.kind == "stat" else (GRAPH_WIDTH, GRAPH_HEIGHT)
            if x + width > WIDTH:
                x, y = 0, y + height
            number += 1
            yield _panel(panel, number, {"h": height, "w": width, "x": x, "y": y})
            x += width
        y += height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    limits = {"min": 0} | ({} if panel.maximum is None else {"max": panel.maximum})
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, **limits}, "overrides": []},
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}}
        if panel.kind == "stat"
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.curves)
        ],
    }


def variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    for name, query in {
        "job": "label_values(servekit_build_info, job)",
        "model_name": 'label_values(servekit_config_info{job=~"$job"}, model_name)',
        "instance": 'label_values(servekit_build_info{job=~"$job"}, instance)',
    }.items():
        yield {
            "name": name,
            "type": "query",
            "datasource": DATASOURCE,
            "definition": query,
            "refresh": 2,
            "sort": 1,
            "query": {"query": query, "refId": name},
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }


def dashboard() -> dict[str, Any]:
    return {
        "uid": "servekit",
        "title": "servekit",
        "tags": ["servekit"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(variables())},
        "panels": list(panels()),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
