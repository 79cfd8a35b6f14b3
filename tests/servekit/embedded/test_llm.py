"""LLM, with a simulated device; what needs a real model is at the end."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from servekit import LLM, RequestOutput, SamplingParams
from servekit.errors import ContextTooLong, InvalidRequest, WorkerNotReady

SHORT = SamplingParams(max_tokens=8, seed=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("sim:instant", max_num_seqs=16, max_num_queued_reqs=32, max_model_len=512) as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_the_answers_have_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(100)]
    outputs = llm.generate(prompts, SHORT)
    assert [output.prompt for output in outputs] == prompts
    assert [output.prompt_token_ids for output in outputs] == [list(prompt.encode()) for prompt in prompts]
    assert texts(outputs) == [text for prompt in prompts for text in texts(llm.generate(prompt, SHORT))]


def test_an_output_has_the_names_of_vllm(llm: LLM) -> None:
    (output,) = llm.generate("a prompt", SamplingParams(max_tokens=5, n=2))
    answer = output.outputs[1]
    assert output.finished and output.request_id and output.prompt_logprobs is None
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (1, "length", None)
    assert bytes(answer.token_ids).decode() == answer.text and len(answer.text) == 5
    assert answer.logprobs is None and answer.cumulative_logprob is None
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (8, 10)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count) for count in (1, 2, 3)]
    assert [len(text) for text in texts(llm.generate(["a", "b", "c"], params))] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="2 prompts and 3 sampling_params"):
        llm.generate(["a", "b"], params)


def test_prompts_may_be_token_ids_or_an_iterator(llm: LLM) -> None:
    outputs = llm.generate(iter([[97, 98], {"prompt_token_ids": [97, 98]}, {"prompt": "ab"}]), SHORT)
    assert len(set(texts(outputs))) == 1
    assert [output.prompt for output in outputs] == [None, None, "ab"]
    assert llm.generate([], SHORT) == []


def test_more_answers_than_the_queue_holds_wait_for_room(llm: LLM) -> None:
    """32 sequences may wait. Each request asks for 20, and some 40 requests are on their way."""
    outputs = llm.generate(["a prompt"] * 60, SamplingParams(max_tokens=4, n=20))
    assert [len(output.outputs) for output in outputs] == [20] * 60


def test_a_prompt_that_fails_ends_the_others(llm: LLM) -> None:
    limit = llm.generate("a")[0].usage.total_tokens  # without max_tokens, as many as fit
    with pytest.raises(ContextTooLong):
        llm.generate(["a"] * 50 + ["b" * (limit + 1)] + ["c"] * 50, SHORT)
    assert texts(llm.generate("a", SHORT))


def test_threads_may_call_at_the_same_time(llm: LLM) -> None:
    results: dict[str, list[str]] = {}

    def call(name: str) -> None:
        results[name] = texts(llm.generate([f"{name} {number}" for number in range(100)], SHORT))

    threads = [threading.Thread(target=call, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "abc":
        assert results[name] == texts(llm.generate([f"{name} {number}" for number in range(100)], SHORT))


async def test_it_works_where_an_event_loop_runs(llm: LLM) -> None:
    """As in a notebook, whose cells run on the kernel's event loop."""
    assert asyncio.get_running_loop().is_running()
    assert len(texts(llm.generate(["a", "b"], SHORT))) == 2


def test_two_engines_live_side_by_side(llm: LLM) -> None:
    with LLM("sim:instant") as other:
        assert texts(other.generate("a", SHORT)) == texts(llm.generate("a", SHORT))
    with pytest.raises(WorkerNotReady, match="closed"):
        other.generate("a", SHORT)
    other.close()
    assert texts(llm.generate("a", SHORT))


def event_loop_threads() -> set[threading.Thread]:
    """The threads that run engines. Their pools may get more threads at any time."""
    return {thread for thread in threading.enumerate() if thread.name == "servekit"}


def test_a_model_that_cannot_be_loaded_leaves_no_thread(llm: LLM) -> None:
    before = event_loop_threads()
    with pytest.raises(Exception, match="no-such-model"):
        LLM("/no-such-model")
    assert event_loop_threads() == before


def test_options_of_a_chat_are_checked(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"):
        llm.chat([{"role": "user", "content": "Hello"}], SHORT, tool_choice="sometimes")
    with pytest.raises(InvalidRequest, match="messages"):
        llm.chat([{"content": "Hello"}], SHORT)


# -- with the demo model ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> Iterator[LLM]:
    with LLM("demo", device="cpu") as llm:
        yield llm


GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
QUESTION: dict[str, Any] = {"role": "user", "content": "What color is the sky?"}


def test_a_conversation_is_answered(demo: LLM) -> None:
    (output,) = demo.chat([QUESTION], GREEDY)
    assert output.outputs[0].text == "The sky is blue."
    assert output.outputs[0].finish_reason == "stop"
    assert output.prompt is not None and "What color is the sky?" in output.prompt
    assert texts(demo.chat([[QUESTION], [QUESTION]], GREEDY)) == ["The sky is blue."] * 2


def test_logprobs_have_the_form_of_vllm(demo: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1)
    (output,) = demo.generate("What color is the sky?", params)
    (answer,) = output.outputs
    assert answer.logprobs is not None and answer.cumulative_logprob is not None
    own = [answer.logprobs[position][token_id] for position, token_id in enumerate(answer.token_ids)]
    assert "".join(each.decoded_token for each in own) == answer.text
    assert {each.rank for each in own} == {1}  # greedy
    assert answer.cumulative_logprob == pytest.approx(sum(each.logprob for each in own))
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None


def test_a_grammar_holds(demo: LLM) -> None:
    params = SamplingParams(
        temperature=1.0, seed=3, max_tokens=20, grammar={"type": "choice", "value": ["red", "blue"]}
    )  # type: ignore[arg-type]
    assert set(texts(demo.generate(["The sky is"] * 4, params))) <= {"red", "blue"}


def test_the_best_of_several_answers_comes_first(demo: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=5, max_tokens=8, n=2, best_of=6, logprobs=0)
    (output,) = demo.generate("What color is the sky?", params)
    means = [each.cumulative_logprob / len(each.token_ids) for each in output.outputs if each.cumulative_logprob]
    assert len(means) == 2 and means[0] >= means[1]


@pytest.mark.parametrize("city", ["Paris", "Rome"])
def test_a_tool_is_called(demo: LLM, city: str) -> None:
    query = {"query": {"enum": ["weather in Paris", "weather in Rome"]}}
    parameters = {"type": "object", "properties": query, "required": ["query"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "search", "parameters": parameters}}]
    question = {"role": "user", "content": f"What is the weather in {city}?"}
    params = SamplingParams(temperature=0.0, max_tokens=100)
    (output,) = demo.chat([question], params, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = output.outputs[0].tool_calls
    assert (call.function.name, call.function.arguments) == ("search", f'{{"query": "weather in {city}"}}')
    assert output.outputs[0].text == ""
