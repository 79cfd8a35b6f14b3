"""The pure parts of benchmarks/gpu: floors, records, tables, and the grouping of stages into commands."""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from pathlib import Path

import pytest
import torch

import benchmarks.gpu
from benchmarks.gpu import requirements, tables
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.parsing import counts, step_while_all_run, summary_line, union_length
from benchmarks.gpu.processes import lives, run_to_end
from benchmarks.gpu.records import Record, Recorder, latest, parse, read_all
from benchmarks.gpu.shapes import GOALS, SHAPES, Ceilings, decode_floor_s, prefill_floor_s, visible_pairs
from benchmarks.gpu.stages import FAILED, FINE, SKIPPED, STAGES, commands
from benchmarks.gpu.tables import TABLES, markdown, outcome, page
from benchmarks.gpu.timing import COLD_BYTES, bandwidth, num_copies

LLAMA = SHAPES["llama-3-8b"]
H200 = Ceilings(bytes_per_s=4.3e12, flops=790e12)


@pytest.mark.parametrize(
    ("name", "num_parameters"),
    [("llama-3-8b", 8_030_261_248), ("qwen2.5-1.5b", 1_543_714_304), ("qwen2.5-0.5b", 494_032_768)],
)
def test_shapes_have_as_many_parameters_as_the_published_models(name: str, num_parameters: int) -> None:
    assert SHAPES[name].num_parameters == num_parameters


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 3.52), (32, 4.49), (128, 7.49), (256, 11.48)])
def test_the_floor_of_a_decode_step_is_the_one_calculated_by_hand(batch: int, milliseconds: float) -> None:
    assert 1e3 * decode_floor_s(LLAMA, batch, 1024, H200) == pytest.approx(milliseconds, abs=0.01)


def test_with_many_short_sequences_the_floor_is_the_multiplications() -> None:
    multiplied = LLAMA.multiplied_in_layers + LLAMA.multiplied_in_head
    assert decode_floor_s(LLAMA, 1024, 1, H200) == pytest.approx(2 * 1024 * multiplied / H200.flops)


def test_the_floor_of_prefill_counts_half_of_the_pairs_of_tokens() -> None:
    chunk = 8192
    linear = 2 * chunk * LLAMA.multiplied_in_layers + 2 * LLAMA.multiplied_in_head
    pairs = visible_pairs(chunk, chunk) * 4 * LLAMA.num_layers * LLAMA.num_heads * LLAMA.head_dim
    assert prefill_floor_s(LLAMA, chunk, H200) * H200.flops == pytest.approx(linear + pairs, rel=1e-3)
    assert chunk / prefill_floor_s(LLAMA, chunk, H200) * 0.6 == pytest.approx(29_400, rel=0.02)


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 9), (7, 7), (3, 8)])
def test_visible_pairs_are_as_many_as_counted(num_queries: int, num_keys: int) -> None:
    counted = sum(key <= num_keys - num_queries + query for query in range(num_queries) for key in range(num_keys))
    assert visible_pairs(num_queries, num_keys) == counted


def test_goals_are_for_shapes_that_are_measured() -> None:
    assert {name for name, _, _ in GOALS} <= SHAPES.keys()


def test_commands_contain_every_stage_once_in_order_within_the_limit() -> None:
    grouped = commands(STAGES, 9.0)
    assert [stage for command in grouped for stage in command] == list(STAGES)
    assert "steps" in [stage.name for stage in grouped[0]], "the most important stages come first"
    assert all(sum(stage.minutes for stage in command) <= 9.0 for command in grouped)
    assert len(grouped) <= 3, "everything fits into three commands of ten minutes"
    assert sum(stage.minutes for stage in STAGES) <= 25.0


def test_a_stage_longer_than_the_limit_is_a_command_of_its_own() -> None:
    assert [len(command) for command in commands(STAGES[:3], 0.1)] == [1, 1, 1]


def test_exit_codes_of_stages_are_not_pythons_own() -> None:
    assert {FINE, SKIPPED, FAILED}.isdisjoint({1, 2})


def test_missing_packages_are_named_before_the_first_stage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "REQUIRED_BY_ALL_STAGES", ("json", "no_such_module"))
    assert main(["--out", str(tmp_path / "out"), "--stages", "steps"]) == 2
    assert capsys.readouterr().err.strip() == "no_such_module cannot be imported: pip install no_such_module"
    assert not (tmp_path / "out").exists()


STARTS_ANOTHER = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(other.pid, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize(("sleeps_s", "limit_s", "code"), [("0", 60.0, 0), ("600", 2.0, None)])
def test_all_processes_of_a_stage_end_with_it_even_in_another_process_group(
    tmp_path: Path, sleeps_s: str, limit_s: float, code: int | None
) -> None:
    with (tmp_path / "log.txt").open("wb") as log:
        assert run_to_end([sys.executable, "-c", STARTS_ANOTHER, sleeps_s], log, limit_s) == code
    started = (tmp_path / "log.txt").read_text().split()
    assert started or code is None  # on a slow machine nothing may have been started before the limit
    assert not any(lives(int(pid)) for pid in started)


@pytest.mark.parametrize("num_bytes", [1, 2**16, 2**22 - 1, 2**22, 2**27, 2**40])
def test_a_bandwidth_is_reported_only_if_no_cache_holds_the_inputs(num_bytes: int) -> None:
    device = torch.device("cuda")
    figures = bandwidth(num_bytes, 1e-3, H200, device)
    assert bool(figures) == (num_copies(num_bytes, device) * num_bytes >= COLD_BYTES) == (num_bytes >= 2**22)


def test_every_stage_has_its_module() -> None:
    for stage in STAGES:
        assert (Path(tables.__file__).parent / f"{stage.module}.py").exists()


def record(stage: str, table: str, run: str = "1", **fields: object) -> Record:
    return {"run": run, "stage": stage, "table": table, **fields}


def test_a_line_that_was_cut_off_is_skipped() -> None:
    whole = json.dumps(record("steps", "steps"))
    assert list(parse([whole, whole[:-5], "", "[]", "{}"])) == [record("steps", "steps")]


def test_the_last_run_of_a_stage_counts(tmp_path: Path) -> None:
    for run, batch in (("20260102", 2), ("20260101", 1)):
        Recorder(tmp_path, run, "steps").write("steps", {"batch": batch})
    Recorder(tmp_path, "20260101", "tokens").write("tokens", {"model": "llama"})
    kept = latest(read_all(tmp_path))
    assert [(each["stage"], each.get("batch")) for each in kept] == [("tokens", None), ("steps", 2)]


def test_tables_have_no_empty_columns() -> None:
    row = {"shape": "llama-3-8b", "what": "decode", "batch": 128, "step_s": 0.01, "share": 0.7512, "goal": 0.75}
    assert markdown(TABLES["steps"], [record("steps", "steps", **row)]).splitlines() == [
        "| shape | | sequences | a step, ms | of the floor | goal | |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
        "| llama-3-8b | decode | 128 | 10.00 | 75 % | 75 % | met |",
    ]


def test_rows_show_whether_they_met_their_goal_failed_or_were_skipped() -> None:
    assert outcome({"share": 0.74, "goal": 0.75}) == "**missed**"
    assert outcome({"share": 0.75, "goal": 0.75}) == "met"
    assert outcome({"share": 0.75, "goal": None}) == ""
    assert outcome({"share": 0.75, "goal": 0.5, "failed": "a|b\nc"}) == "**failed**: a/b c"
    assert outcome({"skipped": "no vllm"}) == "skipped: no vllm"


def test_the_page_shows_stages_that_failed_were_cut_off_or_not_started() -> None:
    machine = {"device": "A GPU", "memory_bytes": 2**37, "num_cores": 16, "python": "3.12", "versions": {"torch": "2"}}
    records = [
        record("steps", "machine", **machine, commit="abc", command="python -m benchmarks.gpu"),
        record("command", "stages", name="steps", question="?", outcome="**cut off**"),
        record("command", "stages", name="tokens", question="?", outcome="done", seconds=4.2),
        record("command", "stages", run="2", name="tokens", question="?", outcome="not begun: 0.1 minutes were left"),
        record("command", "stages", name="vllm", question="?", outcome="not begun: 0.1 minutes were left"),
        record("steps", "steps", shape="tiny", batch=1, failed="RuntimeError: no"),
        record("vllm", "stage", skipped="vLLM cannot be imported: pip install vllm"),
    ]
    text = page(records)
    assert "`python -m benchmarks.gpu`: A GPU, 128 GiB, 16 cores, Python 3.12, torch 2, commit abc." in text
    assert "| steps | ? | | **cut off** |" in text and "| tokens | ? | 4 | done |" in text
    assert "| vllm | ? | | not begun: 0.1 minutes were left |" in text
    assert "**failed**: RuntimeError: no" in text and "skipped: vLLM cannot be imported" in text


def test_the_tables_can_be_written_again_from_the_records_of_several_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run, shape in (("1", "llama-3-8b"), ("2", "tiny")):
        Recorder(tmp_path, run, "steps" if run == "1" else "memory").write("steps", {"shape": shape, "step_s": 0.5})
    assert main(["--out", str(tmp_path), "--stages"]) == 0
    tables_text = capsys.readouterr().out
    assert "| llama-3-8b | 500.00 |" in tables_text and "| tiny | 500.00 |" in tables_text
    assert (tmp_path / "tables.md").read_text().strip() == tables_text.strip()


def test_overlapping_intervals_are_counted_once() -> None:
    assert union_length([(5, 6), (0, 2), (1, 3), (1, 2), (3, 4)]) == 5
    assert union_length([]) == 0


def test_step_times_are_measured_while_all_sequences_run() -> None:
    first = [0.0, 1.0, 2.0, 4.0, 6.0, 8.0]  # alone until 2, and slower from then on
    second = [2.0, 4.0, 6.0, 8.0, 9.0]
    assert step_while_all_run([first, second]) == 2.0
    with pytest.raises(ValueError, match="no time at which all of them ran"):
        step_while_all_run([[0.0, 1.0], [1.0, 2.0]])


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("....\n\n1 failed, 12 passed, 2 skipped in 3.10s\n", {"failed_tests": 1, "passed": 12, "skipped_tests": 2}),
        ("===== 4 passed in 65.15s (0:01:05) =====\n", {"passed": 4}),
        ("E   ImportError\n2 errors in 0.31s\n", {"errors": 2}),
        ("ended after 60 s", {}),
        ("", {}),
    ],
)
def test_pytests_last_line_is_parsed(output: str, expected: dict[str, int]) -> None:
    assert counts(summary_line(output)) == expected


def test_every_module_imports_but_for_packages_that_only_a_gpu_needs() -> None:
    """A stage runs in a process of its own, after minutes: a name that is not there would be noticed only then."""
    for module in pkgutil.iter_modules(benchmarks.gpu.__path__):
        try:
            importlib.import_module(f"benchmarks.gpu.{module.name}")
        except ModuleNotFoundError as error:
            if error.name not in ("triton", "vllm"):
                raise
