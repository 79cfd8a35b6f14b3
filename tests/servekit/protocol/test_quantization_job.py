"""Claims about the arguments of `servekit quantize`: contradictions are refused before a model is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit.cli import main
from servekit.errors import ConfigError
from servekit.protocol.quantization_job import CALIBRATED, METHODS, SCHEMES, QuantizationJob

REFUSED = [
    ("--method gptq", "give one with --calibration FILE"),
    ("--method awq --scheme w8a16", "give one with --calibration FILE"),
    ("--method rtn --scheme w8a8 --group-size 64", "w8a8 has a scale for each row"),
    ("--method rtn --scheme fp8 --group-size 64", "fp8 has a scale for each row"),
    ("--method rtn --group-size 24", "multiple of 16"),
    ("--method rtn --group-size 2048", "from 16 to 1024"),
    ("--method rtn --scheme w4a8 --asymmetric", "w4a8 has no zero points"),
    ("--method rtn --scheme w8a8 --asymmetric", "w8a8 has no zero points"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_flags_that_contradict_each_other_are_refused_with_the_remedy(
    flags: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "no/such-model", str(tmp_path / "out"), *flags.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_simulated_model_has_no_weights_to_quantize(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quantize", "sim:h100-8b", str(tmp_path / "out"), "--method", "rtn"]) == 2
    assert "no weights" in capsys.readouterr().err


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_every_scheme(method: str, scheme: str) -> None:
    text = "text" if method in CALIBRATED else None
    job = QuantizationJob(model="a", output="b", method=method, scheme=scheme, calibration=text)  # type: ignore[arg-type]
    job.check()
    assert job.num_bits == int(scheme.replace("fp8", "w8")[1])
    assert job.scale_group_size == (128 if job.num_bits == 4 else None)
    assert job.has_zero_points == (scheme == "w4a16")


def test_symmetry_and_group_size_are_as_asked_for() -> None:
    job = QuantizationJob(model="a", output="b", method="rtn", group_size=32, is_symmetric=True)
    job.check()
    assert not job.has_zero_points and job.scale_group_size == 32
    eight = QuantizationJob(model="a", output="b", method="rtn", scheme="w8a16", group_size=64, is_symmetric=False)
    eight.check()
    assert eight.has_zero_points and eight.scale_group_size == 64
    with pytest.raises(ConfigError, match="--group-size 0"):
        QuantizationJob(model="a", output="b", method="rtn", group_size=0).check()
