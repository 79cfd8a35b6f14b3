"""A table of invalid requests, each with the status of its answer.

Grouped by kind; the bodies are bytes wherever a JSON library would not write them. What looks evil and is nothing but
odd stands here too, with 200: that it is served is the claim.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

Json = dict[str, Any]

CANARY = "canary-in-the-prompt"  # in every prompt; it must be in no log


@dataclass(frozen=True, eq=False)
class Api:
    """A route, a minimal body for it, and where the parameters are in that body."""

    path: str
    least: Json
    inside: str | None = None

    def body(self, fields: Json) -> bytes:
        if self.inside:
            return json.dumps(self.least | {self.inside: self.least[self.inside] | fields}).encode()
        return json.dumps(self.least | fields).encode()

    def raw(self, field: str, value: str) -> bytes:
        """Return the body with a value given as JSON text."""
        return self.body({field: "@"}).replace(b'"@"', value.encode("utf-8", "surrogatepass"))


@dataclass(frozen=True)
class BadInput:
    """One request, and the answer that it must get."""

    kind: str
    path: str
    content: bytes
    status: int = 400
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    limit_s: float = 1.0

    def __str__(self) -> str:
        return f"{self.kind}: {self.method} {self.path[:80]} {self.content[:200]!r}"


NATIVE = Api("/generate", {"prompt": CANARY, "max_tokens": 1})
STREAM = Api("/generate_stream", {"prompt": CANARY, "max_tokens": 1})
BASIC = Api("/basic_generate", {"prompt": CANARY, "max_tokens": 1})
TGI = Api("/", {"inputs": CANARY, "parameters": {"max_new_tokens": 1}}, "parameters")
TGI_STREAM = Api("/generate_stream", {"inputs": CANARY, "parameters": {"max_new_tokens": 1}}, "parameters")
COMPLETIONS = Api("/v1/completions", {"prompt": CANARY, "max_tokens": 1})
CHAT = Api("/v1/chat/completions", {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 1})
RESPONSES = Api("/v1/responses", {"input": CANARY, "max_output_tokens": 1})
MESSAGES = Api("/v1/messages", {"messages": [{"role": "user", "content": CANARY}], "max_tokens": 1})
TOKENIZE = Api("/tokenize", {"prompt": CANARY})
DETOKENIZE = Api("/detokenize", {"tokens": [1]})
APIS = [NATIVE, STREAM, BASIC, TGI, TGI_STREAM, COMPLETIONS, CHAT, RESPONSES, MESSAGES]

# -- numbers -----------------------------------------------------------------------------------------------------------

INT31 = 2**31
# field: (the nearest below its range, the nearest above it)
FLOATS: dict[str, tuple[float, float]] = {
    "temperature": (-0.001, 100.001),
    "top_p": (0, 1.001),
    "min_p": (-0.001, 1.001),
    "typical_p": (0, 1.001),
    "repetition_penalty": (0, 10.001),
    "presence_penalty": (-2.001, 2.001),
    "frequency_penalty": (-2.001, 2.001),
}
INTEGERS = {
    "top_k": (-2, INT31),
    "min_tokens": (-1, 2),  # one is all that max_tokens leaves room for
    "seed": (-(2**63) - 1, 2**63),
    "priority": (-1, 1),  # the server's policy knows none
    "ttft_ms": (0, 24 * 3600 * 1000 + 1),
    "deadline_ms": (0, 24 * 3600 * 1000 + 1),
    "stream_interval": (0, 4097),
    "max_drafts": (-1, 17),
}
NUMBERS = FLOATS | INTEGERS
OWN_INTEGERS = {
    NATIVE: {
        "max_tokens": (0, 2049),
        "n": (0, 129),
        "best_of": (0, 129),
        "logprobs": (-1, 21),
        "prompt_logprobs": (-1, 21),
    },
    TGI: {"max_new_tokens": (0, 2049), "best_of": (0, 129), "top_n_tokens": (-1, 21), "truncate": (0, INT31)},
    COMPLETIONS: {
        "max_tokens": (0, 2049),
        "n": (0, 129),
        "best_of": (0, 129),
        "logprobs": (-1, 21),
        "prompt_logprobs": (-1, 21),
        "truncate_prompt_tokens": (0, INT31),
    },
    RESPONSES: {"max_output_tokens": (0, 2049)},
    MESSAGES: {"max_tokens": (0, 2049)},
    CHAT: {
        "max_tokens": (0, 2049),
        "max_completion_tokens": (0, 2049),
        "n": (0, 129),
        "prompt_logprobs": (-1, 21),
        "truncate_prompt_tokens": (0, INT31),
    },
}
HUGE = [10**6, 2**63, 2**64, -(2**63), 10**30]
NO_NUMBERS = ["NaN", "Infinity", "1e400", "-1e400", '"1"', '""', "true", "[]", "[1]", "{}", "01", "1.", "+1"]


def numbers() -> Iterator[BadInput]:
    for api, own in OWN_INTEGERS.items():
        for name, (below, above) in (NUMBERS | own).items():
            outside = [below, above, *(value for value in HUGE if value <= below or value >= above)]
            wrong = [json.dumps(value) for value in outside] + NO_NUMBERS
            if name not in FLOATS:
                wrong += ["1.5", "1.0", "1e0"]
            for value in wrong:
                yield BadInput(f"{name} = {value}", api.path, api.raw(name, value), limit_s=0.05)


EXTREMES: list[Json] = [
    {"temperature": 1e-320},
    {"temperature": 1e-40},
    {"temperature": 100, "top_p": 1e-320},
    {"temperature": 1, "top_k": INT31 - 1, "min_p": 1.0},
    {"temperature": 1, "typical_p": 1e-320},
    {"temperature": 1, "repetition_penalty": 1e-320},
    {"temperature": 0, "repetition_penalty": 1e-40, "presence_penalty": 2, "frequency_penalty": -2},
    {"temperature": 1e-40, "repetition_penalty": 10, "logit_bias": {"5": -100, "6": 100}},
    {"temperature": -0.0, "seed": -(2**63)},
    {"seed": 2**63 - 1, "n": 3},
    {"min_p": 1, "top_p": 1e-320, "typical_p": 1e-320, "top_k": 1, "temperature": 1e-320},
    {"logprobs": 20, "prompt_logprobs": 20, "temperature": 1e-320},
    {"allowed_token_ids": [0], "logit_bias": {"0": -100}},
]


def extremes() -> Iterator[BadInput]:
    """Valid values for which a division might overflow."""
    for fields in EXTREMES:
        yield BadInput("extreme", NATIVE.path, NATIVE.body({"max_tokens": 4, "ignore_eos": True, **fields}), 200)


# -- texts, lists and maps ---------------------------------------------------------------------------------------------

SURROGATES = ['"\\ud800"', '"\\udfff"', '"a\\ud83d"', '"\\ude00\\ud83d"', '"\\ud83dx"']
COMMON: dict[str, list[Any]] = {
    "stop": ["", [""], ["a", ""], ["x"] * 17, "x" * 257, ["x" * 257], 1, [1], [None], {"a": "b"}, [["a"]], True],
    "stop_token_ids": [[-1], [1.5], ["1"], [2**31], [2**64], [None], [True], [[1]], 1, "1", {}, [1] * 257],
    "logit_bias": [
        {str(i): 1 for i in range(301)},
        {"x": 1},
        {"": 1},
        {"-1": 1},
        {"1.5": 1},
        {" 1": 1},
        {"1e3": 1},
        {str(2**31): 1},
        {str(2**64): 1},
        {"999999": 1},
        {"1": 100.001},
        {"1": -100.001},
        {"1": "1"},
        {"1": None},
        {"1": True},
        {"1": [1]},
        {"1": {}},
        [],
        [[1, 1]],
        1,
        "1",
    ],
    "allowed_token_ids": [[], [-1], [1.5], ["a"], [999999], [2**40], [None], 3, {}, [1] * 1025],
    "bad_words": ["a", [""], [1], [None], ["x" * 257], ["x"] * 65, ["word " * 40] * 20, {}, [["a"]], 1],
    "include_stop_str_in_output": [1, "true", [], {}],
    "ignore_eos": [0, "false", [], {}],
    "skip_special_tokens": [1, "yes", [], {}],
}
OWN: dict[Api, Json] = {
    NATIVE: {
        "prompt": [1, 1.5, True, [], ["a"], [1], {}],
        "prompts": [[], "a", ["a"], [1], {}],  # beside `prompt`
        "grammar": ["a", [], {}, {"type": "regex"}, {"type": "xml", "value": "a"}, {"type": "regex", "value": 1}],
        "stream": [1, "true", [], {}],
        "messages": [[{"role": "user", "content": "a"}]],
        "temprature": [1],
        "x" * 10**6: [1],
        "unknown": ["x" * 10**6, [[1]] * 10**5],
    },
    TGI: {
        "watermark": [True, 1],
        "adapter_id": ["a", "", 1],
        "details": [1, "true", []],
        "do_sample": [1, "true"],
        "decoder_input_details": [1, "true"],
        "return_full_text": [1, "false"],
        "max_tokens": [1],
        "grammar": ["a", {}, {"type": "regex"}, {"type": "json", "value": [1]}, {"type": "choice", "value": []}],
        "unknown": ["x" * 10**6],
    },
    COMPLETIONS: {
        "prompt": [
            None, 1, 1.5, True, {}, [], [[]], ["a", 1], [1, "a"], [["a"]], [[1], "a"], [-1], [1.5], [None], [True],
            [2**40], [2**64], [99999], [[1], [-1]], [[[1]]], [1] * 3000, ["a"] * 1025, [[1]] * 70000,
        ],
        "echo": [1, "true"],
        "suffix": ["a", 1],
        "add_special_tokens": [1, "true"],
        "model": ["gpt-9", 1, [], "../../etc/passwd", "x" * 10**5, "\x00"],
        "stream_options": [{}, [], 1, {"include_usage": 1}],
        "use_beam_search": [True, 1],
        "prompt_embeds": ["AAAA", {"a": 1}, [1.0]],
        "logits_processors": [["os.system"], "x"],
        "structured_outputs": [{}, [], "a", {"regexp": "a"}, {"choice": []}, {"choice": [1]}, {"regex": 1}],
        "guided_choice": [[], "a", [1]],
        "guided_json": [1, [], True],
    },
    CHAT: {
        "messages": [
            None, [], {}, "a", [1], [None], [[]], [{}], ["a"],
            [{"role": 1, "content": "a"}],
            [{"role": None, "content": "a"}],
            [{"role": "", "content": "a"}],
            [{"role": "x" * 65, "content": "a"}],
            [{"content": "a"}],
            [{"role": "user", "content": 1}],
            [{"role": "user", "content": {"text": "a"}}],
            [{"role": "user", "content": ["a"]}],
            [{"role": "user", "content": [{}]}],
            [{"role": "user", "content": [{"type": 1}]}],
            [{"role": "user", "content": [{"type": "text"}]}],
            [{"role": "user", "content": [{"type": "text", "text": 1}]}],
            [{"role": "user", "content": [{"type": "x" * 65, "text": "a"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}]}],
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "AAAA"}}]}],
            [{"role": "user", "content": [{"type": "file", "file": {"file_id": "a"}}]}],
            [{"role": "user", "content": "a", "tool_calls": {}}],
            [{"role": "user", "content": "a", "tool_calls": [1]}],
            [{"role": "user", "content": "a", "name": 1}],
            [{"role": "user", "content": "word " * 3000}],
            [{"role": "user", "content": "a"}] * 3000,
        ],
        "tools": [[{"type": "function"}], {"a": 1}, "x"],
        "tool_choice": ["required", {"type": "function"}],
        "functions": [[{}], "x"],
        "modalities": [["audio"], ["text", "audio"], "text", [1]],
        "top_logprobs": [0, 21, -1, "1"],  # without logprobs
        "logprobs": [1, "true", []],
        "response_format": [
            {}, [], "json", {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}},
            {"type": "regex"}, {"type": "json_schema", "json_schema": {"schema": []}}, {"type": "regex", "value": 1},
        ],
        "chat_template_kwargs": [[], "a", 1, [["a", 1]]],
        "add_generation_prompt": [1, "true"],
        "continue_final_message": [1, "true"],
        "model": ["gpt-9", 1],
    },
    TOKENIZE: {"prompt": [None, 1, [], {}, "word " * 3000 * 40], "model": ["gpt-9", 1], "add_special_tokens": [1]},
    DETOKENIZE: {
        "tokens": [None, 1, "a", {}, [-1], [1.5], ["1"], [None], [99999], [2**31], [2**40], [2**64], [[1]], [True]],
        "model": ["gpt-9"],
        "skip_special_tokens": [1, "true"],
    },
}  # fmt: skip


def shapes() -> Iterator[BadInput]:
    for api in (NATIVE, TGI, COMPLETIONS, CHAT):
        for name, values in COMMON.items():
            for value in values:
                yield BadInput(f"{name} = {value!r}"[:80], api.path, api.body({name: value}))
        for text in SURROGATES:
            for name in ("stop", "bad_words"):
                yield BadInput(f"{name} = {text}", api.path, api.raw(name, text))
    for api, own in OWN.items():
        for name, values in own.items():
            for value in values:
                status = 404 if name == "model" and isinstance(value, str) else 400
                yield BadInput(f"{name[:40]} = {value!r}"[:80], api.path, api.body({name: value}), status)


def explosions() -> Iterator[BadInput]:
    """Each number is valid, but all of them together are not."""
    too_much: list[tuple[Api, Json]] = [
        (NATIVE, {"prompts": ["a"] * 9, "prompt": None, "n": 128}),
        (NATIVE, {"prompts": ["a"] * 65537, "prompt": None}),
        (NATIVE, {"prompt": None, "prompts": ["word " * 5000] * 3}),
        (NATIVE, {"n": 3, "best_of": 2}),
        (NATIVE, {"min_tokens": 5, "max_tokens": 4}),
        (NATIVE, {"n": 128, "logprobs": 20, "prompt": None, "prompts": ["a"] * 8, "max_tokens": 2000}),
        (STREAM, {"n": 2}),
        (STREAM, {"best_of": 2}),
        (STREAM, {"prompt": None, "prompts": ["a"]}),
        (BASIC, {"logprobs": 1}),
        (BASIC, {"ttft_ms": 5}),
        (TGI_STREAM, {"best_of": 2}),
        (COMPLETIONS, {"prompt": ["a"] * 9, "n": 128}),
        (COMPLETIONS, {"prompt": [[1]] * 1024, "best_of": 128}),
        (COMPLETIONS, {"stream": True, "best_of": 3}),
        (COMPLETIONS, {"prompt": ["word " * 5000] * 3}),
        (COMPLETIONS, {"guided_regex": "a", "guided_json": {}}),
        (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["b"]}}),
        (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}),
        (CHAT, {"n": 129}),
    ]
    for api, fields in too_much:
        yield BadInput("together too much", api.path, api.body(fields))


# -- what is no JSON, or more than JSON --------------------------------------------------------------------------------


def bytes_of_all_kinds() -> Iterator[BadInput]:
    for api in [*APIS, TOKENIZE, DETOKENIZE]:
        whole = api.body({})
        no_json = {
            "empty": b"",
            "blank": b" \n",
            "null": b"null",
            "number": b"1",
            "text": b'"prompt"',
            "list": b"[]",
            "list of a body": b"[" + whole + b"]",
            "two bodies": whole + whole,
            "tail": whole + b"x",
            "NUL at the end": whole + b"\0",
            "BOM": b"\xef\xbb\xbf" + whole,
            "UTF-16": whole.decode().encode("utf-16"),
            "UTF-32": whole.decode().encode("utf-32"),
            "latin-1": whole.replace(b"canary", b"\xe9\xff"),
            "overlong UTF-8": whole[:2] + b"\xc0\xae" + whole[2:],
            "surrogate in UTF-8": whole[:2] + b"\xed\xa0\x80" + whole[2:],
            "cut": whole[:-1],
            "cut in the middle": whole[: len(whole) // 2],
            "single quotes": whole.replace(b'"', b"'"),
            "comment": b"/* a */" + whole,
            "trailing comma": whole[:-1] + b",}",
            "form": b"prompt=a&max_tokens=1",
            "XML": b"<prompt>a</prompt>",
            "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
            "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03",
            "control characters": b'{"prompt": "a\x01b\x1f"}',
            "raw newline in a text": b'{"prompt": "a\nb"}',
            "bad escape": b'{"prompt": "\\x41"}',
            "bad unicode escape": b'{"prompt": "\\u12"}',
            "lone surrogate": b'{"prompt": "\\ud800", "inputs": "\\ud800", "tokens": "\\ud800"}',
            "depth bomb": b"[" * 10**5,
            "deep objects": b'{"a":' * 10**5,
            "balanced bomb": b"[" * 10**5 + b"]" * 10**5,
            "bomb behind an unknown key": whole[:-1] + b', "x": ' + b"[" * 10**5,
            "65 levels": whole[:-1] + b', "x": ' + b"[" * 64 + b"]" * 64 + b"}",
            "990 levels": whole[:-1] + b', "x": ' + b'{"a":' * 989 + b"1" + b"}" * 989 + b"}",
            "10^6 digits": whole[:-1] + b', "seed": ' + b"9" * 10**6 + b"}",
        }
        for name, content in no_json.items():
            if api in (TGI, TGI_STREAM, TOKENIZE, DETOKENIZE) and name == "10^6 digits":
                continue  # they have no seed, or elsewhere
            if api is DETOKENIZE and name == "latin-1":
                continue  # it has no text
            yield BadInput(f"no body: {name}", api.path, content)
    for api in (NATIVE, CHAT):
        yield BadInput("9 MB", api.path, api.body({})[:-1] + b" " * 9_000_000 + b"}", 413)
    for content_type in ("application/xml", "multipart/form-data; boundary=x", "text/plain; charset=utf-16", "x" * 200):
        headers = {"Content-Type": content_type}
        yield BadInput("other content", NATIVE.path, b'--x\r\n\r\n{"prompt": "a"}\r\n--x--', headers=headers)
    for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip", "evil"):
        yield BadInput("compressed", CHAT.path, CHAT.body({}), 415, headers={"Content-Encoding": encoding})
    odd = {
        "a field twice": b'{"prompt": "a", "prompt": "%s", "max_tokens": 1}' % CANARY.encode(),
        "NUL in a text": NATIVE.raw("prompt", '"a\\u0000b"'),
        "noncharacters": NATIVE.raw("prompt", '"\\uffff\\ufffe\\ufdd0"'),
        "right to left": NATIVE.raw("prompt", '"\\u202eabc\\u2066"'),
        "an escape sequence": NATIVE.raw("prompt", '"\\u001b[2J\\r\\nHTTP/1.1 200 OK"'),
        "a special token by name": NATIVE.raw("prompt", '"<s></s><|endoftext|><|im_start|>system"'),
        "64 levels": COMPLETIONS.body({})[:-1] + b', "x": ' + b"[" * 63 + b"]" * 63 + b"}",
    }
    for name, content in odd.items():
        yield BadInput(f"odd: {name}", COMPLETIONS.path if b'"x"' in content else NATIVE.path, content, 200)


def routes() -> Iterator[BadInput]:
    for path in (
        "/nowhere", "/v1", "/v1/", "/v1/moderations", "/v1/models/gpt-9", "/v1/models/" + "x" * 2000, "/v1/models/%00",
        "/%2e%2e/%2e%2e/etc/passwd", "/generate%00", "/generate%0d%0aX-Evil:%201", "/GENERATE",
        "/invocations", "/docs/%2e%2e/%2e%2e/etc/passwd", "/docs//etc/passwd", "/" + "x" * 8000,
        "/%ff%fe", "/\u202e", "/<script>alert(1)</script>", "/{{7*7}}", "/v1/models/{{7*7}}",
    ):  # fmt: skip
        for method in ("GET", "POST"):
            is_model = path.startswith("/v1/models/")
            status = 405 if is_model and method == "POST" else 404
            yield BadInput("no such route", quote(path, safe="/%"), b"{}" if method == "POST" else b"", status, method)
    for path in ("/generate", "/basic_generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"):
            yield BadInput("no such method", path, b"", 405, method)
    for path in ("/health", "/ready", "/version", "/info", "/metrics", "/v1/models", "/docs", "/openapi.json"):
        for method in ("POST", "PUT", "DELETE"):
            yield BadInput("no such method", path, b"{}", 405, method)
    for query in (
        "", "x", "prompt=a&prompt=b", "prompt=a&temprature=1", "prompt=a&temperature=hot", "temperature=1",
        "prompt=a&temperature=NaN", "prompt=a&temperature=1e400", "prompt=a&temperature=-1", "prompt=a&top_p=0",
        "prompt=a&seed=9223372036854775808", "prompt=a&seed=1.5", "prompt=a&seed=", "prompt=a&seed=0x10",
        "prompt=a&max_tokens=0", "prompt=a&max_tokens=1&max_tokens=2", "prompt=a&max_tokens=2049", "prompts=a",
        "prompt=a&n=2", "prompt=a&best_of=2", "prompt=a&n=0", "prompt=a&stream=maybe", "prompt=a&ignore_eos=2",
        "prompt=a&logit_bias=1", "prompt=a&logit_bias={", "prompt=a&logit_bias=[]", 'prompt=a&logit_bias={"x":1}',
        "prompt=a&logit_bias=" + "[" * 9000, "prompt=a&logit_bias=" + '{"1":' * 1000, "prompt=a&stop=",
        "prompt=a" + "&stop=x" * 17, "prompt=a&stop_token_ids=a", "prompt=a&stop_token_ids=-1", "prompt=a&grammar=a",
        'prompt=a&grammar={"type":"xml"}', 'prompt=a&grammar={"type":"regex"}', "prompt=a&bad_words=",
        "prompt=a&allowed_token_ids=99999", "prompt=a&inputs=b", "prompt=" + "word+" * 3000, "prompt=a&" + "x" * 9000,
        "prompt=a&priority=3", "prompt=a&ttft_ms=0", "prompt=a&deadline_ms=1e9", "prompt=a&logprobs=21",
        "prompt=a&seed=" + "9" * 9000, "prompt=a&seed=%D9%A3", "prompt=a&%00=1", "prompt=a&%ff=1", "prompt[]=a",
    ):  # fmt: skip
        yield BadInput("query", "/generate_stream?" + quote(query, safe="=&%+"), b"", method="GET")


# -- templates and grammars --------------------------------------------------------------------------------------------

INJECTIONS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].system('id') }}",
    "{{ self.__init__.__globals__ }}",
    "{{ config.items() }}",
    "{{ request.application.__globals__ }}",
    "{{ ''|attr('__class__')|attr('__base__') }}",
    "{{ [].__class__.__base__.__subclasses__()[132]('id', shell=True) }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__['__builtins__']['__import__']('os') }}",
    "{% for c in ().__class__.__bases__ %}{{ c.__subclasses__() }}{% endfor %}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ messages.append(1) }}{{ messages.__class__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__code__ }}",
    "{{ '%s'.__mod__.__self__.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{% set x = ''.__doc__.__class__ %}{{ x.mro() }}",
]


def templates() -> Iterator[BadInput]:
    for payload in INJECTIONS:
        yield BadInput("template", CHAT.path, CHAT.body({"chat_template": payload}))
    for name, value in {
        "chat_template": INJECTIONS[1],
        "tokenize": True,
        "conversations": [[{"role": "user", "content": "a"}]],
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": {"name": "a"}}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "return_assistant_tokens_mask": True,
        "self": 1,
    }.items():
        yield BadInput(f"template variable {name}", CHAT.path, CHAT.body({"chat_template_kwargs": {name: value}}))
    for payload in INJECTIONS:  # a text in a conversation is a text
        messages = [{"role": "user", "content": payload}]
        yield BadInput("template in a text", CHAT.path, CHAT.body({"messages": messages}), 200)


# kind: texts that cannot be compiled, or only in a time or a memory that nobody grants
EVIL = {
    "regex": [
        "(", ")", "[", "a[", "*", "+a", "a{2,1}", "a{1000000}", "(a{1000}){1000}",
        "(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", r"(a)\1", r"\p{Nope}", r"\8", "(?P<n", "(?P=n)", "[z-a]",
        "(?i", r"\x{110000}", r"\u{d800}", "(?1)", "(?(1)a|b)", "(?>a+)b", "[a", "a{-1}",
        "(" * 5000 + "a" + ")" * 5000, "(a|" * 3000 + "b" + ")" * 3000, "x" * 65_537, "[^\\s\\S]",
    ],
    "json_schema": [
        "", "[]", "1", "null", "false", "{", '{"type": "nope"}', '{"type": 1}', '{"type": []}', '{"enum": []}',
        '{"$ref": "#/nowhere"}', '{"$ref": "http://127.0.0.1:1/a.json"}', '{"$ref": "file:///etc/passwd"}',
        '{"$ref": "#"}', '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}', '{"pattern": "("}',
        '{"type": "string", "pattern": "(?=a)b"}', '{"type": "string", "minLength": 5, "maxLength": 1}',
        '{"type": "integer", "minimum": 5, "maximum": 1}', '{"type": "array", "minItems": 5, "maxItems": 1}',
        '{"type": "string", "maxLength": -1}', '{"type": "string", "format": "nope"}', '{"not": {}}', '{"if": {}}',
        '{"type": "object", "properties": 1}', '{"type": "object", "required": "a"}', '{"anyOf": []}',
        '{"type": "object", "patternProperties": {"(": {}}}', '{"dependentRequired": 1}', '{"const": NaN, "enum": []}',
        '{"type": "array", "uniqueItems": true}', '{"unevaluatedProperties": false}', '{"contains": {}}',
        '{"items": ' * 5000 + "{}" + "}" * 5000, '{"anyOf": [' * 5000, '{"type": "number", "multipleOf": 0}',
        '{"type": "integer", "multipleOf": 100003}',
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3000)}})[:65_000],
    ],
    "ebnf": [
        "", "start", "start: (", "start: nowhere", "start: /(/", 'start: "a', "start: start", "start: start start",
        "start: a\na: b\nb: a", "start: A\nA: A", "begin: 'a'", "%import os", "start: /(?=a)b/", 'start: "a"{5,1}',
        'start: ("a"{1000}){1000}', "start: " + "(" * 5000 + '"a"' + ")" * 5000, "%llguidance {",
        "start: %json {", 'start: %regex {"substring_words": 1}', "start: <[999999]>", "start: @nowhere", "\0",
        "start: \ud7ff",
        "start: " + " | ".join(f"r{i}" for i in range(9000)),
    ],
    "choice": [[], [1], [None], [["a"]], "a", {}, ["x" * 65_537]],
}  # fmt: skip
# What would be evil to a backtracking engine, and is none here: it must be served, and soon.
HARMLESS = {
    "regex": [
        "(a+)+$", "(a|a)*b", "(a|aa)+$", "(.*a){12}", "^(([a-z])+.)+[A-Z]([a-z])+$", "([a-zA-Z]+)*", "(.*)*",
        "(a*)*b", "(x+x+)+y", "((((a*)*)*)*)*", "(\\d+)*\\.\\d", "(([^x])+)+z", "a{0,1000}", "", "[\\s\\S]*",
        "(x+x+)+y" * 1000, "a{0,100000}b{0,100000}", "(.{0,1000}){0,1000}", "a**", "\\", "[[:nope:]]",
    ],
    "json_schema": [
        '{"type": "string", "pattern": "(a+)+$"}', "{}", "true", '{"type": "array", "items": {"$ref": "#"}}',
        '{"x-guidance": {"lenient": true}, "type": "object"}', '{"allOf": []}',
        '{"type": "array", "minItems": 1000000, "items": {"type": "array", "minItems": 1000000}}',
    ],
    "ebnf": ['start: "a" start | "b"', "start: /(a+)+b/", 'start: (("a"*)*)*'],
    "choice": [["a"], ["<s>", "</s>"], [""], ["\0", "\u202e"]],
}  # fmt: skip


def grammars() -> Iterator[BadInput]:
    for table, status in ((EVIL, 400), (HARMLESS, 200)):
        for kind, values in table.items():
            for value in values:
                fields = {"grammar": {"type": kind, "value": value}, "max_tokens": 3}
                # A compiler that is killed for it takes --sandbox-timeout, and a moment to come back.
                yield BadInput(f"{kind} {value!r}"[:90], NATIVE.path, NATIVE.body(fields), status, limit_s=4.0)


GROUPS = (numbers, extremes, shapes, explosions, bytes_of_all_kinds, routes, templates, grammars)
