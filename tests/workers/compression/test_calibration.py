"""Claims about the calibration samples: which text they are of, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from servekit.errors import ConfigError
from workers.compression.calibration import read_calibration

MODEL = Path(__file__).parents[3] / "servekit" / "assets" / "demo_model"
LINES = [f"The {word} is number {number}." for number, word in enumerate(["cat", "dog", "sky", "sea"] * 50)]


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def decoded(samples: list[object]) -> str:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    return str(tokenizer.decode([token for sample in samples for token in sample[0].tolist()]))  # type: ignore[index]


def test_samples_are_of_all_lines_in_an_order_of_the_seed(tmp_path: Path) -> None:
    file = write(tmp_path / "text.txt", [*LINES, "", "  "])
    samples = read_calibration(file, MODEL, 1000, 64, seed=0)
    assert {sample.shape for sample in samples[:-1]} == {(1, 64)} and samples[-1].shape[1] <= 64
    text = decoded(samples)  # type: ignore[arg-type]
    assert all(line in text for line in LINES)
    again, other = (read_calibration(file, MODEL, 1000, 64, seed) for seed in (0, 1))
    assert decoded(again) == text  # type: ignore[arg-type]
    assert decoded(other) != text  # type: ignore[arg-type]


def test_lines_of_json_have_a_text_and_may_have_more(tmp_path: Path) -> None:
    plain = write(tmp_path / "text.txt", LINES)
    objects = write(tmp_path / "text.jsonl", [json.dumps({"text": line, "source": 7}) for line in LINES])
    found, expected = (decoded(read_calibration(file, MODEL, 9, 50, 3)) for file in (objects, plain))  # type: ignore[arg-type]
    assert found == expected


def test_no_more_samples_are_made_than_asked_for(tmp_path: Path) -> None:
    samples = read_calibration(write(tmp_path / "text.txt", LINES), MODEL, 3, 40, seed=0)
    assert [sample.shape for sample in samples] == [(1, 40)] * 3


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.txt", b"too short\n", "calibration needs 64 at least"),
        ("text.txt", b"\xff\xfe", "not UTF-8"),
        ("text.jsonl", b'{"prompt": "a"}\n', "line 1: .*text"),
        ("text.jsonl", b'{"text": "a"}\n\n[1\n', "line 3: "),
        ("text.jsonl", b'{"text": 7}\n', "line 1: "),
        ("text.jsonl", b"[" * 100_000, "line 1: "),
    ],
)
def test_a_file_that_holds_no_text_is_refused_with_its_line(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_calibration(tmp_path / name, MODEL, 8, 64, seed=0)


def test_a_missing_file_and_a_missing_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_calibration(tmp_path / "none.txt", MODEL, 8, 64, seed=0)
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        read_calibration(write(tmp_path / "text.txt", LINES), tmp_path, 8, 64, seed=0)
