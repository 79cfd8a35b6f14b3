"""Claims about the metrics of GPUs, with a fake of NVML: it has the functions and the structures of the real one."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from servekit.observability import gpu_metrics
from servekit.observability.gpu_metrics import GpuCollector, load_nvml, read_gpus, watch_gpus


class FakeError(Exception):
    """NVMLError of the fake."""


class FakeNvml(ModuleType):
    """Two GPUs: the second one is a part of a GPU (MIG), of which the driver tells less."""

    NVMLError = FakeError
    NVML_TEMPERATURE_GPU = 0
    num_gpus = 2
    is_broken = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.is_broken:
            raise FakeError("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.is_broken:
            raise FakeError("Driver Not Loaded")
        return self.num_gpus

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda _: "NVIDIA H100",
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=20 * 2**30 + handle, total=80 * 2**30),
            "nvmlDeviceGetUtilizationRates": self.whole(lambda: SimpleNamespace(gpu=37, memory=12)),
            "nvmlDeviceGetPowerUsage": self.whole(lambda: 350_500),
            "nvmlDeviceGetTotalEnergyConsumption": self.whole(lambda: 9_000_000),
            "nvmlDeviceGetTemperature": lambda handle, sensor: 61 + handle,
        }
        if name not in answers:
            raise AttributeError(name)
        return answers[name]

    @staticmethod
    def whole(answer: Any) -> Any:
        def ask(handle: int) -> Any:
            if handle == 1:
                raise FakeError("Not Supported")
            return answer()

        return ask


def test_the_fake_has_the_names_of_the_real_package() -> None:
    import pynvml

    fake, used = FakeNvml("pynvml"), re.findall(r"\bnvml\.(\w+)", Path(gpu_metrics.__file__).read_text())
    for name in used:
        assert hasattr(pynvml, name) and hasattr(fake, name), name
    assert issubclass(pynvml.NVMLError, Exception)
    assert dict(pynvml.c_nvmlUtilization_t._fields_).keys() == {"gpu", "memory"}
    assert dict(pynvml.c_nvmlMemory_t._fields_).keys() >= {"used", "total"}


def test_units_are_bytes_watts_joules_and_fractions() -> None:
    first, second = read_gpus(FakeNvml("pynvml"))
    assert (first.memory_used_bytes, first.memory_total_bytes) == (20 * 2**30, 80 * 2**30)
    assert (first.utilization, first.power_watts, first.energy_joules) == (0.37, 350.5, 9000.0)
    assert second.utilization is None and second.temperature_celsius == 62


def test_what_a_gpu_does_not_tell_is_missing_and_not_zero() -> None:
    registry = CollectorRegistry()
    registry.register(GpuCollector(read_gpus(FakeNvml("pynvml"))))
    text = generate_latest(registry).decode()
    assert 'servekit_gpu_memory_used_bytes{gpu="1",gpu_name="NVIDIA H100",uuid="GPU-1"}' in text
    assert text.count("servekit_gpu_power_watts{") == 1
    assert 'servekit_gpu_energy_joules_total{gpu="0",gpu_name="NVIDIA H100",uuid="GPU-0"} 9000.0' in text


def test_without_gpus_there_are_no_metrics() -> None:
    registry = CollectorRegistry()
    registry.register(GpuCollector())
    assert generate_latest(registry) == b""


def test_without_the_package_or_the_driver_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # type: ignore[arg-type]
    assert load_nvml() is None
    fake = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert load_nvml() is fake
    fake.num_gpus = 0
    assert load_nvml() is None
    fake.is_broken = True
    assert load_nvml() is None


async def test_gpus_are_read_until_the_driver_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(GpuCollector):
        """Breaks the driver when it has got readings."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            received.append(len(value))
            fake.is_broken = bool(value)

    received: list[int] = []
    fake = FakeNvml("pynvml")
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(gpu_metrics, "READ_INTERVAL_S", 0.001)
    await asyncio.wait_for(watch_gpus(Watched()), 60)
    assert received == [0, 2, 0]
