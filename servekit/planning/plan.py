"""Compute the plan that `servekit plan` prints."""

from __future__ import annotations

from msgspec import Struct

from servekit.planning.capacity import Capacity
from servekit.planning.demand import ServiceLevel
from servekit.planning.devices import Device
from servekit.planning.model_shape import ModelShape


class MemoryPlan(Struct, frozen=True, kw_only=True):
    """What lies in the memory of one device."""

    num_weight_bytes: int
    kv_bytes_per_token: int
    num_kv_tokens: int
    num_sequences: int  # of mean length that fit
    mean_length: int  # of prompt and answer together
    max_model_len: int


class PhasePlan(Struct, frozen=True, kw_only=True):
    """One kind of step."""

    name: str
    duration_s: float
    tokens_per_s: float
    flop_per_s: float
    arithmetic_intensity: float
    bound: str  # memory or arithmetic


class CostPlan(Struct, frozen=True, kw_only=True):
    """What the service costs, in the currency of the price."""

    num_devices: int
    num_replicas: int
    rate: float  # requests per second
    price_source: str = ""  # where the price of a device comes from, if the user gave none
    per_hour: float | None = None
    per_million_output_tokens: float | None = None
    break_even_requests_per_month: float | None = None  # from which on it is cheaper than the API
    is_ever_cheaper: bool | None = None  # whether these devices can serve as many


class Plan(Struct, frozen=True, kw_only=True):
    """Everything that the command prints."""

    model: str
    shape: ModelShape
    num_parameters: int
    device: Device
    weights: str
    memory: MemoryPlan
    flop_per_s: float  # of the device, in the format of the weights
    phases: tuple[PhasePlan, ...]
    service_level: ServiceLevel
    capacity: Capacity
    cost: CostPlan
