"""Two ranks that draft with heads or with an MTP layer answer what one process answers without drafts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.support.draft_heads import MTP_MODELS, add_mtp_layer, make_eagle3_head, make_medusa_heads
from tests.support.forked_ranks import run_ranks
from tests.support.inprocess import InProcessEngine, load
from tests.support.tiny_models import _LLAMA_LIKE, WIDE_ARCHITECTURES, make_model
from tests.workers.speculation.rank_process import Answered, answer, run_rank

pytestmark = pytest.mark.long  # two processes, and hundreds of messages between them

TIMEOUT_S = 300


@pytest.mark.parametrize("method", ["eagle", "mtp", "medusa"])
def test_ranks_with_drafts_answer_what_one_process_answers(method: str, tmp_path: Path) -> None:
    model, head = tmp_path / "model", tmp_path / "head"
    if method == "eagle":
        make_eagle3_head(head, make_model(model, *WIDE_ARCHITECTURES["llama_wide"]).config, draft_vocab_size=60)
    elif method == "medusa":
        make_medusa_heads(head, make_model(model, *WIDE_ARCHITECTURES["llama_wide"]).config, scale=0.0)
    else:
        make_model(model, "glm4_moe", {**_LLAMA_LIKE, **MTP_MODELS["glm4_moe"]})
        add_mtp_layer(model)
    run_ranks(run_rank, 2, str(tmp_path), method, str(model), str(head), timeout_s=TIMEOUT_S)
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    of_ranks = [msgspec.msgpack.decode(file.read_bytes(), type=Answered) for file in files]
    alone = answer(InProcessEngine(load(model), num_blocks=200))
    assert of_ranks[0].answers == of_ranks[1].answers == alone.answers
    assert any(of_ranks[0].drafts)
    assert of_ranks[0].num_accepted == of_ranks[1].num_accepted
    if method == "medusa":
        assert of_ranks[0].num_accepted > 4, "these heads guess the newest token again, and one answer repeats a token"
