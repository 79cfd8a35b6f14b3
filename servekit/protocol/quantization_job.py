"""Define the job of `servekit quantize` for the process that does the work, and check it without the model."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from servekit.errors import ConfigError

Method = Literal["rtn", "gptq", "awq"]
SchemeName = Literal["w4a16", "w4a8", "w8a16", "w8a8", "fp8"]

METHODS: tuple[Method, ...] = ("rtn", "gptq", "awq")
CALIBRATED: tuple[Method, ...] = ("gptq", "awq")
SCHEMES: tuple[SchemeName, ...] = ("w4a16", "w4a8", "w8a16", "w8a8", "fp8")
WITH_GROUPS: tuple[SchemeName, ...] = ("w4a16", "w4a8", "w8a16")
# vLLM reads zero points for weights alone only.
WITH_ZERO_POINTS: tuple[SchemeName, ...] = ("w4a16", "w8a16")
GROUP_SIZE = 128  # of four-bit weights; those of eight bits have a scale for each row
GROUP_SIZE_STEP, MAX_GROUP_SIZE = 16, 1024


class QuantizationJob(Struct, frozen=True, kw_only=True):
    """An unquantized checkpoint, where the quantized one goes, and how its numbers are found."""

    model: str  # directory
    output: str  # directory, which must not exist, or be empty
    method: Method
    scheme: SchemeName = "w4a16"
    group_size: int | None = None  # None: GROUP_SIZE with four bits, one scale for each row with eight
    is_symmetric: bool | None = None  # None: zero points for w4a16, and none otherwise
    calibration: str | None = None  # file of texts
    num_samples: int = 128
    max_length: int = 512  # tokens of each sample
    seed: int = 0
    dampening: float = 0.01  # of GPTQ
    activation_order: bool = True  # of GPTQ

    def check(self) -> None:
        """Raise ConfigError for arguments that contradict each other, or lack one."""
        if self.method in CALIBRATED and self.calibration is None:
            raise ConfigError(
                f"--method {self.method} measures the inputs of each layer while the model reads a text; give one with "
                "--calibration FILE, or choose --method rtn"
            )
        if self.group_size is not None and self.scheme not in WITH_GROUPS:
            raise ConfigError(
                f"--group-size {self.group_size}: {self.scheme} has a scale for each row and no groups; leave it out"
            )
        is_size = self.group_size is None or (
            self.group_size % GROUP_SIZE_STEP == 0 and 0 < self.group_size <= MAX_GROUP_SIZE
        )
        if not is_size:
            raise ConfigError(
                f"--group-size {self.group_size} is not a multiple of {GROUP_SIZE_STEP} from {GROUP_SIZE_STEP} to "
                f"{MAX_GROUP_SIZE}"
            )
        if self.is_symmetric is False and self.scheme not in WITH_ZERO_POINTS:
            raise ConfigError(
                f"--asymmetric: {self.scheme} has no zero points; leave it out, or choose --scheme w4a16 or w8a16"
            )

    @property
    def num_bits(self) -> int:
        return 4 if self.scheme.startswith("w4") else 8

    @property
    def has_zero_points(self) -> bool:
        return self.scheme == "w4a16" if self.is_symmetric is None else not self.is_symmetric

    @property
    def scale_group_size(self) -> int | None:
        """How many neighbours in a row share a scale; None: all of them."""
        return self.group_size or (GROUP_SIZE if self.num_bits == 4 else None)
