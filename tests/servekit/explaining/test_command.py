"""Claims about `servekit explain`, with journals of a workload manager without a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from servekit.cli import main
from servekit.observability.journal import Journal
from servekit.protocol.sampling_params import SamplingParams
from servekit.scheduler.commands import AddSequence, Commit, Finish, Plan
from servekit.scheduler.sequence import FinishReason
from tests.support.scheduler import make_manager, make_prompt, make_worker


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sequences, of which two wait for the one seat; the last one is aborted while it waits."""
    path = tmp_path_factory.mktemp("explain") / "journal"
    recording = Journal(path, 2**30, 1)
    recording.open()
    manager = recording.make_manager(make_manager(max_num_seqs=1, max_steps_in_flight=1).config)
    worker, now_s = make_worker(manager), 10.0
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    manager.apply(Plan(now_s))
    for number in range(3):
        prompt = tuple(make_prompt(number, 6))
        manager.apply(AddSequence(sequence_id=number, prompt_token_ids=prompt, sampling=sampling, arrival_s=9.5))
    while (plan := manager.apply(Plan(now_s))) is not None:
        if now_s == 16.0:
            manager.apply(Finish(2, FinishReason.ABORT))
        now_s += 1.0
        manager.apply(Commit(worker.execute(plan), now_s))
    recording.close()
    return path


def explained(journal: Path, sequence_id: int, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["explain", str(journal), str(sequence_id), "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_the_journal_tells_what_the_server_could_tell(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(journal, 1, capsys)
    assert found["wall_time_s"] == 8.5 and found["finish_reason"] == "length" and found["is_finished"]
    assert found["causes"] == {"admission": 0.5, "slots": 4.0, "prefill": 1.0, "decode": 3.0}
    aborted = explained(journal, 2, capsys)
    assert aborted["finish_reason"] == "abort" and aborted["causes"] == {"admission": 0.5, "slots": 6.0}


def test_the_text_has_causes_and_intervals(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(journal), "1"]) == 0
    text = capsys.readouterr().out
    assert "sequence 1: 8,500.0 ms, length" in text and "all slots were taken" in text
    assert "max_num_seqs, queue: fcfs" in text and "3 steps, with 0 others" in text
    assert "1 step, 6 tokens" in text


def test_the_page_has_the_picture_and_needs_no_other_file(
    journal: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(journal), "1", "--out", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "explain.html").read_text()
    assert '"cause":"slots"' in page and "https://" not in page and "src=" not in page
    assert page.count("http://") == page.count("http://www.w3.org/")
    (tmp_path / "file").touch()
    assert main(["explain", str(journal), "1", "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err


def test_a_sequence_that_is_not_there_is_refused_with_those_that_are(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", str(journal), "77"]) == 2
    assert "sequences 0 to 2" in capsys.readouterr().err


def test_the_id_of_a_request_is_refused_and_the_error_says_where_the_number_of_its_sequence_is(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(journal), "my-request"])
    assert ended.value.code == 2 and "take sequence_id of" in capsys.readouterr().err
