import asyncio
import os

import pytest

from servekit import AsyncLLM, RequestOutput, SamplingParams
from servekit.errors import InvalidRequest, WorkerNotReady

LONG = SamplingParams(max_tokens=30_000)  # five minutes, with steps of 10 ms


async def test_a_stream_grows_and_its_deltas_are_the_text() -> None:
    async with AsyncLLM("sim:step=1ms") as llm:
        outputs = [output async for output in llm.generate("a prompt", SamplingParams(max_tokens=20, n=2))]
        for index in range(2):
            assert "".join(output.outputs[index].delta for output in outputs) == outputs[-1].outputs[index].text
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        whole = [output async for output in llm.generate("a prompt", SamplingParams(max_tokens=20), stream=False)]
        assert len(whole) == 1 and whole[0].finished


async def test_abort_ends_a_request_with_what_it_has() -> None:
    async with AsyncLLM("sim:step=1ms") as llm:
        outputs: list[RequestOutput] = []
        async for output in llm.generate("a prompt", LONG, "one"):
            outputs.append(output)
            await llm.abort("one")
        assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, "abort")
        assert 0 < len(outputs[-1].outputs[0].text) < 30_000
        await llm.abort("one")  # it has ended


async def test_a_request_that_its_reader_leaves_is_ended() -> None:
    """The slot of one sequence is enough to show it: the next request gets it."""
    async with AsyncLLM("sim:step=10ms", max_num_seqs=1) as llm:
        answers = llm.generate("a prompt", LONG)
        async for _ in answers:
            break
        await answers.aclose()
        reading = asyncio.create_task(_read(llm, "cancelled"))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        async with asyncio.timeout(60):
            assert [output.finished async for output in llm.generate("a", SamplingParams(max_tokens=1))] == [True]


async def _read(llm: AsyncLLM, request_id: str) -> None:
    async for _ in llm.generate("a prompt", LONG, request_id):
        pass


async def test_an_id_is_of_one_request_at_a_time() -> None:
    async with AsyncLLM("sim:step=1ms") as llm:
        async for _ in llm.generate("a prompt", SamplingParams(max_tokens=100), "one"):
            with pytest.raises(InvalidRequest, match="'one'"):
                await _read(llm, "one")
            break


async def test_hundreds_of_requests_wait_for_room_in_a_queue_of_eight() -> None:
    async with AsyncLLM("sim:instant", max_num_seqs=2, max_num_queued_reqs=8) as llm:

        async def ask(number: int) -> str:
            answers = llm.generate(f"prompt {number}", SamplingParams(max_tokens=4), stream=False)
            return (await anext(answers)).outputs[0].text

        assert len(await asyncio.gather(*map(ask, range(300)))) == 300


async def test_an_engine_that_is_closed_or_not_started_says_so() -> None:
    llm = AsyncLLM("sim:instant")
    with pytest.raises(WorkerNotReady, match="not started"):
        await _read(llm, "one")
    async with llm:
        reading = asyncio.create_task(_read(llm, "one"))
        await asyncio.sleep(0)
    with pytest.raises(WorkerNotReady):
        await reading
    await llm.close()
    with pytest.raises(WorkerNotReady, match="closed"):
        await _read(llm, "two")


async def test_another_event_loop_may_not_use_it() -> None:
    async with AsyncLLM("sim:instant") as llm:
        with pytest.raises(WorkerNotReady, match="another event loop"):
            await asyncio.to_thread(asyncio.run, _read(llm, "one"))


async def test_a_forked_process_may_not_use_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with AsyncLLM("sim:instant") as llm:
        pid = os.getpid()
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: pid + 1)
            with pytest.raises(WorkerNotReady, match=f"belongs to process {pid}"):
                await _read(llm, "one")
            await llm.close()
        assert [output.finished async for output in llm.generate("a", SamplingParams(max_tokens=1))] == [True]
