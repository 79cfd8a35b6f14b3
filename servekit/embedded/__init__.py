"""Use the engine inside a Python program, without HTTP: `LLM`, `AsyncLLM`, their arguments and results.

May import the schemas and the collectors of servekit.api, engine, and everything below it. From the bottom up:
settings, sampling_params, prompts, conversation and progress; outputs; async_llm, which runs an engine on the event
loop of its caller; event_loop_thread; llm, which runs an AsyncLLM on a thread of its own.
"""

from servekit.embedded.async_llm import AsyncLLM
from servekit.embedded.llm import LLM
from servekit.embedded.outputs import CompletionOutput, Logprob, RequestOutput
from servekit.embedded.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "Logprob", "RequestOutput", "SamplingParams"]
