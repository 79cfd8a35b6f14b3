"""`servekit plan --models`: print on which device each model of a model file is."""

from __future__ import annotations

from typing import Any

from servekit.laboratory.report import as_json
from servekit.models.model_file import ModelFile
from servekit.models.packing import DeviceUse


def describe_devices(file: ModelFile, as_json_array: bool) -> str:
    """Return what each device holds, as text or as a JSON array."""
    uses = file.device_uses
    if as_json_array:
        return as_json([_described(use) for use in uses])
    remote = [f"{spec.id}: on another server" for spec in file.models if spec.workers is None]
    return "\n".join([*(line for use in uses for line in use.lines()), *remote])


def _described(use: DeviceUse) -> dict[str, Any]:
    models = [
        {
            "id": each.name,
            "keep": each.keep,
            "num_workers": each.devices.count(use.device),
            "memory_bytes": each.memory[use.device],
        }
        for each in use.models
    ]
    return {
        "device": use.device,
        "memory_bytes": use.memory_bytes,
        "kept_bytes": use.kept_bytes,
        "shared_bytes": use.shared_bytes,
        "on_demand_bytes": use.on_demand_bytes,
        "models": models,
    }
