"""Messages between an API process and the engine process arrive as they were sent."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from servekit import errors
from servekit.api.auth.keys import Key
from servekit.api.auth.rate_limits import Limits
from servekit.api_processes import messages as ms
from servekit.config import ServeConfig
from servekit.engine.caller import Caller
from servekit.engine.client_queue import TokenDelta
from servekit.engine.input_processor import PreparedPrompt
from servekit.engine.model_files import ChatTemplate
from servekit.engine.profiling import ProfilerRefuses
from servekit.protocol.lora import LoraAdapter
from servekit.protocol.messages import ModelInfo, TokenLogprobs, WorkerReady
from servekit.protocol.sampling_params import SamplingParams
from servekit.requests.generation import GenerationRequest, Prompt, Sampling
from servekit.scheduler.scheduler_config import SchedulerConfig
from servekit.scheduler.sequence import FinishReason

MODEL = ModelInfo("llama", 1, 100, 64, (2, 3), 1.0, 0, 1.0)
LIMITS = SchedulerConfig(
    num_blocks=4,
    block_size=16,
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    eos_token_ids=frozenset({2}),
)
READY = WorkerReady(MODEL, "cpu", "float32", 4, 8, 1.0)
KEY = Key(b"d" * 32, "tenant", Limits(requests_per_minute=5), -3, "metrics")
DELTAS = [
    (0, TokenDelta(1, 5, "", False)),
    (7, TokenDelta(0, 6, "text", True, FinishReason.STOP, "end", TokenLogprobs.of(-1.5, [1], [-1.5]))),
    (7, TokenDelta(0, None, "", False, FinishReason.DEADLINE, 9)),
]
FROM_ENGINE: list[Struct] = [
    ms.Start(ServeConfig(api_key="secret", api_processes=2), [KEY], 12),
    ms.Loaded("/model", ChatTemplate("{{ a }}", {"bos_token": "<s>"})),
    ms.EngineStatus("ready", "serving", True, READY, LIMITS),
    ms.AdapterChanges(3, {"sql": "/adapters/sql"}, ["old"]),
    ms.ReplaceKeys([KEY]),
    ms.Drain(),
    ms.Stop(True),
    ms.Output(DELTAS, [ms.SequenceTimes(7, 0, 3, 1, 0.5, 0.75, None)]),
    ms.PromptLogprobsPart(7, 0, [TokenLogprobs(-2.0)]),
    ms.RequestFailed(7, ms.Failure("WorkerLost", "gone", None, "worker_unavailable", 3)),
]
FROM_API_PROCESS: list[Struct] = [
    ms.Alive(12, 3),
    ms.Serving(),
    ms.CannotServe(ms.Failure("ConfigError", "no")),
    ms.AdaptersKnown(3),
    ms.ReleaseAdapter(4),
    ms.AddPrompt(3, b"\0\0\0\1", [SamplingParams(max_tokens=3, stop=("a",), seed=2**63 - 1)], [b"hash"]),
    ms.Abort(3),
    ms.ReleaseRequest(3),
    ms.ChargeTokens(2, 3),
    ms.UncountRequest(2),
    ms.RequestRefused("overloaded"),
    ms.RequestEnded("/generate", "POST", 200),
    ms.EventLoopLag(0.25),
    ms.CountRequest(question_id=1, account=2, digest=b"d", limits=KEY.limits),
    ms.ReserveOfKey(question_id=1, account=2, num_sequences=1, max_tokens=None, num_prompt_tokens=4),
    ms.ReservePlaces(
        question_id=1,
        request=3,
        options=ms.RequestOptions(num_prompts=2, param="prompt", max_tokens=None, deadline_ms=5),
        caller=Caller("tenant", "id", -1),
    ),
    ms.Submit(question_id=1, request=3, adapter=LoraAdapter(1, "/adapters/sql", "f", "sql")),
    ms.UseAdapter(question_id=1, use=4, name="sql", tenant="law"),
    ms.LoadAdapter(question_id=1, name="sql", path="/adapters/sql"),
    ms.UnloadAdapter(question_id=1, name="sql"),
    ms.AbortRequest(question_id=4, tenant="a", request_id="b"),
    ms.ProbeReadiness(question_id=1),
    ms.RenderMetrics(question_id=1),
    ms.DescribeEngine(question_id=1),
    ms.LookAtScheduler(question_id=1),
    ms.ProfileStart(question_id=1),
    ms.ProfileStop(question_id=1),
]


def arrives(message: Struct, kind: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_of_the_engine_process_arrive(message: Struct) -> None:
    assert arrives(message, ms.FromEngine) == message


@pytest.mark.parametrize("message", FROM_API_PROCESS, ids=lambda message: type(message).__name__)
def test_messages_of_an_api_process_arrive(message: Struct) -> None:
    assert arrives(message, ms.FromApiProcess) == message


def test_every_message_is_in_the_lists_above() -> None:
    assert set(map(type, FROM_ENGINE)) | {ms.Reply} == set(ms.FromEngine.__args__)
    assert set(map(type, FROM_API_PROCESS)) == set(ms.FromApiProcess.__args__)


def test_an_answer_of_any_type_arrives() -> None:
    answer = msgspec.msgpack.encode([{"a": 1}])
    reply = arrives(ms.Reply(4, msgspec.Raw(answer)), ms.FromEngine)
    assert msgspec.msgpack.decode(reply.answer, type=list[dict[str, Any]]) == [{"a": 1}]
    assert msgspec.msgpack.decode(arrives(ms.Reply(4), ms.FromEngine).answer) is None


def test_a_prompt_arrives() -> None:
    prompt = PreparedPrompt(array("i", [1, 2, 300_000]), [SamplingParams(max_tokens=1)], [b"a", b"b"])
    assert arrives(ms.AddPrompt.of(1, prompt), ms.FromApiProcess).prompt() == prompt


def test_options_that_the_engine_reads_arrive() -> None:
    request = GenerationRequest(
        prompts=[Prompt("text", "prompts[0]"), Prompt([1, 2], "prompts[1]")],
        sampling=Sampling(),
        max_tokens=4,
        n=2,
        best_of=3,
        logprobs=1,
        prompt_logprobs=2,
        priority=-5,
        ttft_ms=6,
        deadline_ms=7,
    )
    found = ms.RequestOptions.of(request).request()
    for name in ("max_tokens", "n", "best_of", "logprobs", "prompt_logprobs", "priority", "ttft_ms", "deadline_ms"):
        assert getattr(found, name) == getattr(request, name)
    assert found.num_sequences == request.num_sequences and found.prompts[0].param == "prompts[0]"


@pytest.mark.parametrize(
    "error",
    [
        errors.RateLimited("wait", retry_after_s=7),
        errors.InvalidRequest("wrong", param="n", code="grammar_failed"),
        errors.RequestCrashesWorker("crashed"),
        ProfilerRefuses("off"),
    ],
)
def test_errors_arrive_with_their_class_and_all_that_clients_see(error: errors.ServekitError) -> None:
    found = msgspec.convert(msgspec.to_builtins(ms.Failure.of(error)), ms.Failure).error()
    assert type(found) is type(error) and found.status == error.status
    assert (found.message, found.param, found.answer_code) == (error.message, error.param, error.answer_code)
    assert found.retry_after_s == error.retry_after_s


def test_a_mistake_of_ours_arrives_as_an_internal_error_without_its_text() -> None:
    found = ms.Failure.of(KeyError("secret")).error()
    assert type(found) is errors.InternalError and found.message == "internal error (KeyError)"
