"""Mistakes on the command line: one line that says what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from servekit import __version__
from servekit.cli import main


def test_the_version_is_printed_by_a_command_and_by_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"{__version__}\n" * 2


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("serv", "did you mean servekit serve?"),
        ("docter", "did you mean servekit doctor?"),
        ("Qwen/Qwen2.5-0.5B", "to serve a model: servekit serve Qwen/Qwen2.5-0.5B"),
        ("model-Q4_K_M.gguf", "to serve a model: servekit serve model-Q4_K_M.gguf"),
        ("zzz", "the commands are serve, doctor,"),
    ],
)
def test_an_unknown_command_gets_advice(word: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"servekit: unknown command {word!r}; ") and advice in error
    assert len(error.splitlines()) == 1


def test_a_folder_in_the_place_of_a_command_is_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["my-model"]) == 2
    assert "servekit serve my-model" in capsys.readouterr().err
