"""Claims about `servekit lab`: what it prints, refuses and writes, and what a real engine does with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servekit.cli import main
from servekit.laboratory.ablation import ABLATIONS
from servekit.laboratory.batching import MODES
from servekit.laboratory.command import LabOptions, lab


def test_it_prints_one_row_for_each_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--workload", "textbook"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines if line.startswith("|")}
    assert list(rows)[2:] == list(MODES) and "| 170 " in " ".join(rows["static"].split())
    assert "800" in lines[-2]


@pytest.mark.parametrize("name", ABLATIONS)
def test_each_experiment_prints_a_table(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", name, "--requests", "16"]) == 0
    assert capsys.readouterr().out.count("\n|") >= 4


def test_json_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--json", "--modes", "static,chunked", "--requests", "16"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["mode"] for run in runs] == ["static", "chunked"] and runs[0]["summary"]["num_requests"] == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modes", "batched"], "one-by-one, static"),
        (["speed"], "kv-cache, chunks"),
        (["--workload", "mail"], "textbook, chat"),
        (["--model", "demo"], "--real"),
        (["--load", "0"], "--load 0"),
        (["chunks", "--modes", "static"], "leave --modes out"),
        (["--kv-tokens", "10"], "--max-model-len"),
        (["--block-size", "5000"], "smaller blocks"),
        (["--max-delay-ms", "-1"], "'-1' is below 0\n"),
        (["--max-model-len", "100"], "at least as many"),
        (["--no-paged", "--kv-tokens", "2", "--block-size", "1", "--max-model-len", "1024", "--slots", "0"], "0"),
        (["--out", "/dev/null/x"], "--out"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["lab", "--requests", "16", *arguments])
    except SystemExit as ended:  # by argparse
        code = ended.code if isinstance(ended.code, int) else 1
    assert code == 2 and words in capsys.readouterr().err


def test_the_page_has_all_runs_and_no_address(tmp_path: Path) -> None:
    assert lab(LabOptions(requests=16, out=tmp_path)) == 0
    page = (tmp_path / "lab.html").read_text()
    assert all(f'"name":"{mode}, virtual"' in page for mode in MODES)
    assert "http" not in page.replace("http://www.w3.org/", "").replace("http-equiv", ""), "it needs no other file"


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_page_of_an_ablation_has_its_runs_and_the_figures_of_its_table(name: str, tmp_path: Path) -> None:
    assert lab(LabOptions(ablation=name, requests=16, out=tmp_path)) == 0
    page = (tmp_path / "lab.html").read_text()
    data = json.loads(page.partition("const DATA = ")[2].partition(";\n")[0])
    first, last = (data["runs"][number] for number in (data["first"], -1))
    assert first["name"] != last["name"] and len(data["runs"]) > 1
    if name == "kv-cache":
        assert (first["name"], last["name"]) == ("200 tokens, with", "200 tokens, without")
    assert all(len(run["figures"]) == len(ABLATIONS[name].figures) == len(data["figures"]) for run in data["runs"])
    assert all(request["slot"] < run["num_slots"] for run in data["runs"] for request in run["requests"])


def test_the_default_cache_holds_the_longest_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--max-model-len", "5000", "--json", "--requests", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["num_kv_tokens"] == 5000


def test_a_real_engine_serves_all_requests_with_the_steps_of_virtual_time(capsys: pytest.CaptureFixture[str]) -> None:
    """With the simulated model behind the real engine, whose steps take 5 ms."""
    modes = ("static", "chunked")
    options = LabOptions(real=True, model="sim:step=5ms", modes=modes, requests=16, as_json=True)
    assert lab(options) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["mode"], run["how"]) for run in runs] == [(mode, how) for mode in modes for how in ("real", "virtual")]
    for real, virtual in (runs[:2], runs[2:]):
        assert real["summary"]["num_output_tokens"] == virtual["summary"]["num_output_tokens"]
        assert real["summary"]["tokens_per_s"] > 0 and real["summary"]["num_requests"] == 16
    static, chunked = runs[0]["summary"], runs[2]["summary"]
    assert chunked["idle_slot_share"] < static["idle_slot_share"]


def test_the_table_in_the_documentation_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "--workload", "textbook", "--requests", "256"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    page = (Path(__file__).parents[3] / "docs" / "laboratory.md").read_text()
    assert "\n".join(table) in page
