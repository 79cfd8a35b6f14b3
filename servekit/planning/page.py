"""Write a plan as one HTML page that needs no server and no other file."""

from __future__ import annotations

from servekit.laboratory.page import fill_template
from servekit.planning.plan import Plan


def as_page(plan: Plan, sections: list[str]) -> str:
    """Write a page with pictures of memory, roofline, goodput and latencies, and the text of the terminal."""
    memory, device, capacity = plan.memory, plan.device, plan.capacity
    kv_bytes = memory.num_kv_tokens * memory.kv_bytes_per_token
    data: dict[str, object] = {
        "title": f"{plan.model} on {device.name}",
        "memory": [
            ["weights", memory.num_weight_bytes],
            ["keys and values", kv_bytes],
            ["not used", max(0, device.memory_bytes - memory.num_weight_bytes - kv_bytes)],
        ],
        "roof": {"bytes_per_s": device.bytes_per_s, "flop_per_s": plan.flop_per_s},
        "steps": [[each.name, each.arithmetic_intensity, each.flop_per_s] for each in plan.phases],
        "slo_rate": capacity.slo_rate,
        "max_rate": capacity.max_rate,
        "points": [
            {
                "rate": point.rate,
                "goodput": point.goodput,
                "error": point.goodput_error,
                "ttft_s": [point.summary.ttft_p50_s, point.summary.ttft_p99_s],
                "itl_s": [point.summary.itl_p50_s, point.summary.itl_p99_s],
            }
            for point in capacity.points
        ],
        "sections": sections,
    }
    return fill_template(__package__, "page.html", data)
