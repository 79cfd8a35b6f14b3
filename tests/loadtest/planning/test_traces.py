"""Test traces: requests follow the trace, and errors name their place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.planning.plan import Plan, Request
from loadtest.planning.planner import make_plan
from loadtest.planning.text import TextGenerator
from loadtest.planning.traces import Entry, Trace

MOONCAKE = [
    {"timestamp": 1000, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]},
    {"timestamp": 1500, "input_length": 1536, "output_length": 0, "hash_ids": [46, 47, 49]},
    {"timestamp": 4000, "input_length": 1025, "output_length": 7, "hash_ids": [46, 47]},
    {"timestamp": 4000, "input_length": 600, "output_length": 1, "hash_ids": []},
]
BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,Conversation log
118,ChatGPT,17,0,17,API log
"""
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": "What is a fork?"},
            {"from": "gpt", "value": "x" * 40},
            {"from": "human", "value": "And a spoon?"},
            {"from": "gpt", "value": "y" * 8},
            {"from": "human", "value": "Thanks."},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "I begin."}]},
    {"id": "c", "conversations": [{"from": "gpt", "value": "Hello!"}, {"from": "user", "value": "Hi\u2028there."}]},
]


def json_lines(records: Sequence[object]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def entries(text: str, characters_per_token: float = 1.0, **parameters: object) -> list[Entry]:
    trace = Trace(file="file", **parameters)  # type: ignore[arg-type]
    source = TextGenerator(np.random.default_rng(0), characters_per_token)
    return list(trace.parse(text.splitlines(keepends=True), source, np.random.default_rng(1)))


def planned(
    folder: Path, text: str, arrivals: str = "trace", parameters: str = "", num_requests: int | None = None
) -> list[Request]:
    (folder / "trace").write_text(text)
    return make_plan(arrivals, f"trace:{folder / 'trace'}{parameters}", num_requests=num_requests).requests


@pytest.mark.parametrize("characters_per_token", [1.0, 4.4, 3.99])
def test_equal_hash_ids_are_equal_text_and_others_are_not(characters_per_token: float) -> None:
    first, second, third, none = (each.turns[0].prompt for each in entries(json_lines(MOONCAKE), characters_per_token))
    shared = int(1024 * characters_per_token)
    assert first[:shared] == second[:shared] == third[:shared]
    assert first[shared + 4 :][:20] != second[shared + 4 :][:20]
    assert first[:12] != none[:12]
    lengths = [len(each) / characters_per_token for each in (first, second, third, none)]
    np.testing.assert_allclose(lengths, [1300, 1536, 1025, 600], atol=1)


def test_a_block_has_the_same_text_at_every_position() -> None:
    lines = [{"input_length": 1024, "output_length": 1, "hash_ids": ids} for ids in ([1, 2], [2, 1], [1, 3])]
    one, two, three = (each.turns[0].prompt for each in entries(json_lines(lines)))
    assert one == two[512:] + two[:512]
    assert three[:512] == one[:512] and three[512:524] != one[512:524]


def test_unhashed_text_is_unique_to_its_prompt(tmp_path: Path) -> None:
    line = {"timestamp": 0, "input_length": 600, "output_length": 1}
    hashed = [{**line, "hash_ids": [hash_id]} for hash_id in range(100)]
    prompts = [each.prompt for each in planned(tmp_path, json_lines([*[line] * 50, *hashed]))]
    assert len({prompt[:30] for prompt in prompts}) == 150


def test_mooncake_times_are_milliseconds_and_empty_answers_become_one_token(tmp_path: Path) -> None:
    asked = planned(tmp_path, json_lines(MOONCAKE))
    assert [each.intended_s for each in asked] == [0.0, 0.5, 3.0, 3.0], "from the first one on"
    assert [each.max_tokens for each in asked] == [52, 1, 7, 1]
    assert [each.group for each in asked] == [46, 46, 46, None]


def test_burstgpt_times_are_seconds_and_speed_divides_them(tmp_path: Path) -> None:
    asked = planned(tmp_path, BURSTGPT, "trace:10")
    np.testing.assert_allclose([each.intended_s for each in asked], [0, 4.05, 11.3])  # type: ignore[arg-type]
    assert [each.max_tokens for each in asked] == [18, 230, 1]
    turns = [each.turns[0] for each in entries(BURSTGPT)]
    assert [len(turn.prompt) for turn in turns] == [472, 1087, 17]


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpt_turns_follow_each_other_with_the_lengths_of_the_answers(as_lines: bool) -> None:
    text = json_lines(SHAREGPT) if as_lines else json.dumps(SHAREGPT, indent=1)
    first, last = entries(text, 4.0, think=2.0)
    assert [turn.prompt for turn in first.turns] == ["Be brief.\n\nWhat is a fork?", "And a spoon?", "Thanks."]
    assert [turn.max_tokens for turn in first.turns] == [10, 2, 128], "40 and 8 characters at 4 a token, and not said"
    assert first.turns[0].think_s == 0 < first.turns[1].think_s
    assert [turn.prompt for turn in last.turns] == ["Hi\u2028there."]
    assert first.start_s is None
    assert [len(each.turns) for each in entries(text, turns=1)] == [1, 1]


def test_sharegpt_conversations_need_arrivals(tmp_path: Path) -> None:
    asked = planned(tmp_path, json.dumps(SHAREGPT), "constant:2")
    assert [(each.intended_s, each.follows) for each in asked] == [(0.0, None), (None, 0), (None, 1), (0.5, None)]
    assert len(planned(tmp_path, json.dumps(SHAREGPT), "closed:8")) == 4
    with pytest.raises(LoadTestError, match="request 1 has no time; use other --arrivals"):
        planned(tmp_path, json.dumps(SHAREGPT))


def test_plain_lines_set_their_fields_and_the_rest_is_drawn(tmp_path: Path) -> None:
    lines = [{"prompt": "One", "timestamp": 1e9}, {"prompt": "Two", "max_tokens": 3, "timestamp": 1e9 + 0.5}]
    asked = planned(tmp_path, "\n" + json_lines(lines) + "\n\n", parameters=",output=9")
    assert [(each.prompt, each.max_tokens, each.intended_s) for each in asked] == [("One", 9, 0.0), ("Two", 3, 0.5)]


def test_output_length_is_an_alias_of_max_tokens_and_prompts_are_kept(tmp_path: Path) -> None:
    lines = [{"prompt": "One", "input_length": 900, "output_length": 7}, {"prompt": "Two", "output_length": 0}]
    asked = planned(tmp_path, json_lines(lines), arrivals="burst")
    assert [(each.prompt, each.max_tokens) for each in asked] == [("One", 7), ("Two", 1)]
    with pytest.raises(LoadTestError, match="max_tokens is 3 but output_length is 4; keep one"):
        entries(json_lines([{"prompt": "a", "max_tokens": 3, "output_length": 4}]))


@pytest.mark.parametrize("text", ["", "\n \n", "[]", "Timestamp,Request tokens,Response tokens\n"])
def test_a_trace_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    for arrivals in ("trace", "poisson:5"):
        with pytest.raises(LoadTestError, match="the file has no prompts"):
            planned(tmp_path, text, arrivals)


def test_batch_lines_are_prompts_or_messages_in_one_text() -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    bodies = [
        {"model": "m", "prompt": "Say it.", "max_tokens": 4},
        {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 6},
    ]
    lines = [{"custom_id": str(i), "method": "POST", "url": "/v1", "body": body} for i, body in enumerate(bodies)]
    turns = [each.turns[0] for each in entries(json_lines(lines))]
    assert [(turn.prompt, turn.max_tokens) for turn in turns] == [("Say it.", 4), ("Be kind.\n\nHello", 128), ("Hi", 6)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            json_lines([MOONCAKE[0], {"input_length": 0, "output_length": 1}]),
            "line 2 (read as mooncake): Expected `int` >=",
        ),
        (json_lines([MOONCAKE[0]]) + "\n{oops\n", "line 3 (read as mooncake): JSON is malformed"),
        (BURSTGPT + "\n9,GPT-4,many,1,1,API log\n", "line 6 (read as burstgpt): Expected `int`, got `str`"),
        (BURSTGPT + "9,GPT-4\n", "line 5 (read as burstgpt): Object missing required field `Request tokens`"),
        (BURSTGPT + "nan,GPT-4,1,1,2,API log\n", "line 5 (read as burstgpt): the timestamp is nan"),
        (json.dumps([*SHAREGPT, {"id": "d"}]), "entry 4 (read as sharegpt): Object missing required field"),
        ("[{]", "its beginning: JSON is malformed"),
        (json_lines([{"prompt": ["a", "b"]}]), "line 1 (read as jsonl): Expected `str`, got `array`"),
        (json_lines([{"prompt": ""}]), "line 1 (read as jsonl): Expected `str` of length >= 1"),
        (json_lines([{"body": {"model": "m"}}]), "line 1 (read as batch): body has neither"),
        (
            json_lines([{"text": "a", "n": 1}]),
            "line 1: its fields (text, n) match no known format; known are jsonl by",
        ),
        ("a,b\n1,2\n", "line 2: its fields (a, b)"),
        ("[3]", "entry 1: its fields ()"),
    ],
)
def test_errors_in_a_trace_name_the_line(text: str, says: str) -> None:
    with pytest.raises(LoadTestError) as error:
        entries(text)
    assert str(error.value).startswith(f"trace file, {says}")


def test_entries_before_an_error_in_a_trace_are_usable(tmp_path: Path) -> None:
    """A trace is read as far as it is asked for."""
    assert len(planned(tmp_path, json_lines(MOONCAKE[:2]) + "{oops", num_requests=2)) == 2


def test_a_named_format_is_not_guessed() -> None:
    both = json_lines([{"prompt": "a", "body": {"prompt": "b"}}])
    assert entries(both, format="batch")[0].turns[0].prompt == "b"
    with pytest.raises(LoadTestError, match="read as mooncake"):
        entries(both, format="mooncake")
    with pytest.raises(LoadTestError, match="Invalid enum value 'moon'"):
        make_plan("trace", "trace:file,format=moon")


def test_times_that_go_back_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="request 2 is earlier than the one before"):
        planned(tmp_path, json_lines([MOONCAKE[1], MOONCAKE[0]]))


def test_a_trace_is_never_repeated_to_reach_a_number(tmp_path: Path) -> None:
    text = json_lines(MOONCAKE)
    for arrivals in ("poisson:5", "closed:2", "burst"):
        with pytest.raises(LoadTestError, match="the trace ends after 4 starts"):
            planned(tmp_path, text, arrivals, num_requests=5)
        assert len(planned(tmp_path, text, arrivals, num_requests=4)) == 4
    assert len(planned(tmp_path, text, "burst")) == len(planned(tmp_path, text, "closed:2")) == 4
    assert len(planned(tmp_path, text, num_requests=5)) == 4, "at its own times it ends when it ends"


def test_a_trace_is_cut_at_the_duration(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(json_lines(MOONCAKE))
    plan: Plan = make_plan("trace:2", f"trace:{tmp_path / 'trace'}", duration_s=1.5)
    assert [each.intended_s for each in plan.requests] == [0.0, 0.25]
    assert plan.duration_s == 1.5 and plan.num_clients is None


@pytest.mark.parametrize(
    ("content", "says"), [(None, "No such file"), (b"\xff\xfe\x00", "can't decode"), (b"", "no prompts")]
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "trace").write_bytes(content)
    with pytest.raises(LoadTestError, match=says) as error:
        make_plan("trace", f"trace:{tmp_path / 'trace'}")
    assert str(tmp_path) in str(error.value)


def test_a_byte_order_mark_is_not_part_of_the_first_record(tmp_path: Path) -> None:
    (tmp_path / "trace").write_bytes(b"\xef\xbb\xbf" + BURSTGPT.replace("\n", "\r\n").encode())
    assert len(make_plan("trace", f"trace:{tmp_path / 'trace'}").requests) == 3
