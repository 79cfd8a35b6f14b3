"""A server whose model is divided among two processes: clients see no difference, even if one of them is killed."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.server_process import ONE_THREAD, serving

pytestmark = pytest.mark.long

FIELDS = {"max_tokens": 150, "ignore_eos": True, "temperature": 0.0}
PROMPTS = [f"Count from {number}." for number in range(6)]
DIGITS = {"type": "json_schema", "value": {"type": "object", "properties": {"n": {"type": "integer"}}}}


def test_a_divided_model_answers_as_an_undivided_one_also_when_a_rank_is_killed(tmp_path: Path) -> None:
    with serving(log=tmp_path / "one", environment=ONE_THREAD) as server:
        expected = [server.generate(prompt, **FIELDS)["generated_text"] for prompt in PROMPTS]
        constrained = server.generate("A number:", max_tokens=30, temperature=0.0, grammar=DIGITS)["generated_text"]
    arguments = ("--tensor-parallel-size", "2")
    with (
        serving(*arguments, log=tmp_path / "two", environment=ONE_THREAD) as server,
        ThreadPoolExecutor(len(PROMPTS)) as threads,
    ):
        ranks = server.worker_pids()
        assert len(ranks) == 2
        answers = threads.map(lambda prompt: server.generate(prompt, **FIELDS)["generated_text"], PROMPTS)
        while server.metric("servekit_generation_tokens_total") < 50:
            pass
        os.kill(ranks[1], signal.SIGKILL)
        assert list(answers) == expected
        assert server.generate("A number:", max_tokens=30, temperature=0.0, grammar=DIGITS)["generated_text"] == (
            constrained
        )
        assert server.metric("servekit_worker_restarts_total") == 1
        assert not set(server.worker_pids()) & set(ranks), "the other rank is replaced, too"
