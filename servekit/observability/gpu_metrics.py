"""Measure the GPUs of this machine with NVML, the driver's library for management.

It needs the package nvidia-ml-py (the extra `nvml`) and a driver. Without them there are no such metrics.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from servekit.aio.daemon_thread import run_in_daemon_thread

log = logging.getLogger("servekit")

READ_INTERVAL_S = 5.0
MILLI = 1e-3


class GpuReading(Struct, frozen=True, kw_only=True):
    """One GPU at one moment. What the driver does not tell is None."""

    index: int
    name: str
    uuid: str
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    utilization: float | None  # share of the last second or so in which a kernel ran
    power_watts: float | None
    energy_joules: float | None  # since the driver was loaded
    temperature_celsius: float | None


def load_nvml(_: None = None) -> Any:
    """Return NVML's bindings, initialized; None if there is no package, no driver or no GPU."""
    try:
        import pynvml as nvml  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return nvml if nvml.nvmlDeviceGetCount() else None
    except nvml.NVMLError:
        return None


def read_gpus(nvml: Any) -> list[GpuReading]:
    """Read all GPUs that this process may see. A GPU that is lost is left out."""
    readings = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:
            continue
        memory = _ask(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        rates = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        power = _ask(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        energy = _ask(nvml, nvml.nvmlDeviceGetTotalEnergyConsumption, handle)
        readings.append(
            GpuReading(
                index=index,
                name=name,
                uuid=uuid,
                memory_used_bytes=None if memory is None else memory.used,
                memory_total_bytes=None if memory is None else memory.total,
                utilization=None if rates is None else rates.gpu / 100,
                power_watts=None if power is None else power * MILLI,
                energy_joules=None if energy is None else energy * MILLI,
                temperature_celsius=_ask(nvml, nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            )
        )
    return readings


def _ask(nvml: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of NVML; None if this GPU or this driver does not have it, as with MIG."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return None


class GpuCollector(Collector):
    """Exports the newest readings. They are made elsewhere: the driver may take long to answer."""

    def __init__(self, readings: Sequence[GpuReading] = ()) -> None:
        self.readings = readings

    def collect(self) -> Iterator[Metric]:
        for kind, name, text, field in (
            (GaugeMetricFamily, "gpu_memory_used_bytes", "Memory of the GPU that is in use.", "memory_used_bytes"),
            (GaugeMetricFamily, "gpu_memory_total_bytes", "Memory of the GPU.", "memory_total_bytes"),
            (
                GaugeMetricFamily,
                "gpu_utilization_perc",
                "Fraction of the last second or so in which a kernel ran on the GPU, 0 to 1. It does not tell how much "
                "of the GPU the kernel used.",
                "utilization",
            ),
            (GaugeMetricFamily, "gpu_power_watts", "Power that the GPU draws.", "power_watts"),
            (
                CounterMetricFamily,
                "gpu_energy_joules",
                "Energy that the GPU has drawn since its driver was loaded.",
                "energy_joules",
            ),
            (GaugeMetricFamily, "gpu_temperature_celsius", "Temperature of the GPU.", "temperature_celsius"),
        ):
            family = kind(f"servekit_{name}", text, labels=["gpu", "uuid", "gpu_name"])
            for each in self.readings:
                value = getattr(each, field)
                if value is not None:
                    family.add_metric([str(each.index), each.uuid, each.name], value)
            if family.samples:
                yield family


async def watch_gpus(collector: GpuCollector) -> None:
    """Read the GPUs every five seconds, until cancelled. Ends at once if there are none."""
    nvml = await run_in_daemon_thread(load_nvml, None)
    if nvml is None:
        return
    while True:
        try:
            collector.readings = await run_in_daemon_thread(read_gpus, nvml)
        except nvml.NVMLError as error:  # the driver was unloaded, for example
            collector.readings = ()
            log.warning("the GPUs cannot be measured any more: %s", error)
            return
        await asyncio.sleep(READ_INTERVAL_S)
