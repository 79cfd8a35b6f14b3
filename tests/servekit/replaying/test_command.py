"""Claims about `servekit replay` with other settings, with a journal of a workload manager without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from servekit.cli import main
from tests.servekit.replaying.services import CONFIG, requests, serve


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 requests, which wait for slots."""
    path = tmp_path_factory.mktemp("replay") / "journal"
    serve(path, CONFIG, requests(60, 40.0))
    return path


def test_the_table_has_what_happened_and_what_would_have(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(journal), "--max-num-seqs", "4", "--scheduling-policy", "shortest"]) == 0
    text = capsys.readouterr().out
    assert "60 requests; --scheduling-policy fcfs → shortest, --max-num-seqs 8 → 4" in text
    for title in ("tokens/s", "TTFT p50", "ITL p99", "preemptions", "cached prompt", "requests that wait, mean"):
        assert title in text
    assert "fitted to the journal, sim:step=" in text and "never fit" not in text


def test_json_has_all_figures_of_both(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(journal), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["changes"] == {} and found["happened"] == pytest.approx(found["replayed"], rel=1e-4)
    assert main(["replay", str(journal), "--json", "--model", "sim:step=100ms"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["replayed"]["itl_p50_s"] == pytest.approx(0.1) and found["step_time_error"] is None


def test_the_page_has_both_runs_and_needs_no_other_file(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(journal), "--max-num-seqs", "2", "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "replay.html").read_text()
    data = json.loads(page.partition("const DATA = ")[2].partition(";\n")[0])
    assert [chart["name"] for chart in data["charts"]][:2] == ["requests that wait", "requests that run"]
    running = data["charts"][1]
    assert max(running["happened"]) == 8 and max(running["replayed"]) == 2
    assert "https://" not in page and "src=" not in page and page.count("http://") == page.count("http://www.w3.org/")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "demo"], "use sim:SPEC"),
        (["--num-kv-blocks", "1"], "none of its requests fits"),
        (["--scheduling-policy", "magic"], "invalid choice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    journal: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["replay", str(journal), *arguments])
    except SystemExit as refused:
        code = refused.code
    assert code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({"enable_prefix_caching": False}, ["--enable-prefix-caching"], "without the prefix cache"),
        ({"max_drafts": 2}, ["--max-num-seqs", "4"], "speculative decoding"),
        ({"has_kv_connector": True}, ["--max-num-seqs", "4"], "offloaded KV blocks"),
        ({"pipeline_parallel_size": 2, "max_steps_in_flight": 3}, ["--max-steps-in-flight", "1"], "pipeline"),
    ],
)
def test_what_a_journal_cannot_tell_is_refused(
    tmp_path: Path, changes: dict[str, Any], arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(tmp_path / "journal", replace(CONFIG, **changes), requests(3, 14.0))
    assert main(["replay", str(tmp_path / "journal"), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_journal_without_requests_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve(tmp_path / "journal", CONFIG, [])
    assert main(["replay", str(tmp_path / "journal"), "--max-num-seqs", "4"]) == 2
    assert "it has no requests" in capsys.readouterr().err
