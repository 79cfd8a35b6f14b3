"""Request bodies as large and as hostile as the server lets them be: many small things, few large ones, deep ones."""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from servekit.api.schemas.packed_body import MAX_INLINE_BYTES, MAX_SHORT_BYTES

NUM_BYTES = 8 * 2**20 - 4096  # --max-body-bytes, with room for what is around the items
SMALL_BYTES = MAX_INLINE_BYTES - 256  # of a body that is decoded on the event loop
SHORT_BYTES = MAX_SHORT_BYTES - 4096  # of what a large body may have beside its texts
BOUNDARY = "b"
JSON = "application/json"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


class Shape(Struct, frozen=True):
    """A body of a route. `make` takes about how many bytes it should have."""

    path: str
    make: Callable[[int], bytes]
    content_type: str = JSON


def filled(path: str, before: str, item: str, after: str) -> Shape:
    """Return a body of as many items as fit, separated by commas."""

    def make(num_bytes: int) -> bytes:
        num_items = (num_bytes - len(before) - len(after)) // (len(item.encode()) + 1)
        return (before + ",".join([item] * num_items) + after).encode()

    return Shape(path, make)


def long_text(path: str, before: str, text: str, after: str) -> Shape:
    """Return a body with one text that is as long as fits."""
    return Shape(path, lambda num_bytes: (before + text * (num_bytes // len(text.encode())) + after).encode())


def fixed(path: str, body: Callable[[], bytes]) -> Shape:
    """Return a body that has its own length."""
    return Shape(path, lambda _: body())


def numbered_keys(path: str, before: str, after: str) -> Shape:
    """Return a body with an object that has as many different keys as fit."""

    def make(num_bytes: int) -> bytes:
        keys = (f'"{number:07x}":0' for number in range(num_bytes // 12))
        return (before + ",".join(keys) + after).encode()

    return Shape(path, make)


def deep(path: str, before: str, after: str, opening: str = "[", closing: str = "]") -> Shape:
    """Return a body with one value that is nested as deeply as fits."""

    def make(num_bytes: int) -> bytes:
        levels = num_bytes // len(opening + closing)
        return (before + opening * levels + "0" * (opening[-1] == ":") + closing * levels + after).encode()

    return Shape(path, make)


def form(path: str, head: Callable[[int], bytes], content: Callable[[int], bytes], num_parts: int = 1) -> Shape:
    """Return a form. `head` is the header of a part, by its number."""

    def make(num_bytes: int) -> bytes:
        parts = [
            b"--%b\r\n%b\r\n\r\n%b\r\n" % (BOUNDARY.encode(), head(number), content(num_bytes // num_parts))
            for number in range(num_parts)
        ]
        return b"".join(parts) + b"--%b--\r\n" % BOUNDARY.encode()

    return Shape(path, make, FORM)


def _disposition(name: str, more: str = "") -> Callable[[int], bytes]:
    return lambda _: f'Content-Disposition: form-data; name="{name}"{more}'.encode()


TOOL_CALL = '{"id":"a","type":"function","function":{"name":"a","arguments":"{}"}}'
_CHAT = '{"model":"demo","messages":['
_COMPLETION = '{"model":"demo","prompt":'

# Bodies that a model which generates text refuses, most of them for their length.
SHAPES: dict[str, Shape] = {
    "prompts of one token": filled("/v1/completions", _COMPLETION + "[", "[1]", "]}"),
    "10,000 prompts": fixed(
        "/v1/completions", lambda: (_COMPLETION + "[" + ",".join(["[1]"] * 10_000) + "]}").encode()
    ),
    "prompts of one letter": filled("/v1/completions", _COMPLETION + "[", '"a"', "]}"),
    "token ids": filled("/v1/completions", _COMPLETION + "[", "1", "]}"),
    "one long prompt": long_text("/generate", '{"prompt":"', "a ", '"}'),
    "escapes": long_text("/generate", '{"prompt":"', r"\u00e9", '"}'),
    "messages": filled("/v1/chat/completions", _CHAT, '{"role":"user","content":"a"}', "]}"),
    "content parts": filled(
        "/v1/chat/completions", _CHAT + '{"role":"user","content":[', '{"type":"text","text":"a"}', "]}]}"
    ),
    "tool calls": filled("/v1/chat/completions", _CHAT + '{"role":"assistant","tool_calls":[', TOOL_CALL, "]}]}"),
    "images of a chat": filled(
        "/v1/chat/completions", _CHAT + '{"role":"user","content":[', '{"type":"image_url","image_url":"a"}', "]}]}"
    ),
    "a schema": filled("/v1/completions", _COMPLETION + '"a","guided_json":{"enum":[', "{}", "]}}"),
    "arrays in a schema": filled("/generate", '{"prompt":"a","grammar":{"type":"json_schema","value":[', "[]", "]}}"),
    "choices": filled("/generate", '{"prompt":"a","grammar":{"type":"choice","value":[', '"a"', "]}}"),
    "unknown fields": numbered_keys("/generate", '{"prompt":"a",', "}"),
    "unknown fields of a completion": numbered_keys("/v1/completions", _COMPLETION + '"a",', "}"),
    "deep lists": deep("/v1/completions", _COMPLETION + '"a","x":', "}"),
    "deep objects": deep("/v1/chat/completions", _CHAT + '],"x":', "}", '{"a":', "}"),
    "shallow lists": filled("/v1/completions", _COMPLETION + '"a","x":[', "[" * 60 + "]" * 60, "]}"),
    "biases": filled("/generate", '{"prompt":"a","logit_bias":{', '"1":1', "}}"),
    "stop strings": filled("/generate", '{"prompt":"a","stop":[', '"a"', "]}"),
    "prompts of /generate": filled("/generate", '{"prompts":[', '"a"', "]}"),
    "tokens to detokenize": filled("/detokenize", '{"model":"demo","tokens":[', "1", "]}"),
    "text to tokenize": long_text("/tokenize", '{"model":"demo","prompt":"', "a ", '"}'),
    "items of a response": filled("/v1/responses", '{"model":"demo","input":[', '{"role":"user","content":"a"}', "]}"),
    "parts of a response": filled(
        "/v1/responses",
        '{"model":"demo","input":[{"role":"user","content":[',
        '{"type":"input_text","text":"a"}',
        "]}]}",
    ),
    "tools of a response": filled(
        "/v1/responses", '{"model":"demo","input":"a","tools":[', '{"type":"function","name":"a"}', "]}"
    ),
    "metadata of a response": numbered_keys("/v1/responses", '{"model":"demo","input":"a","metadata":{', "}}"),
    "a long response": long_text("/v1/responses", '{"model":"demo","input":"', "漢字", '"}'),
    "messages of Anthropic": filled(
        "/v1/messages", '{"model":"demo","max_tokens":1,"messages":[', '{"role":"user","content":"a"}', "]}"
    ),
    "blocks of Anthropic": filled(
        "/v1/messages",
        '{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":[',
        '{"type":"text","text":"a"}',
        "]}]}",
    ),
    "deep results of Anthropic": deep(
        "/v1/messages",
        '{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":',
        "}]}",
        '[{"type":"tool_result","tool_use_id":"a","content":',
        "}]",
    ),
    "tools of Anthropic": filled(
        "/v1/messages",
        '{"model":"demo","max_tokens":1,"messages":[{"role":"user","content":"a"}],"tools":[',
        '{"name":"a"}',
        "]}",
    ),
    "messages to count": filled(
        "/v1/messages/count_tokens", '{"model":"demo","messages":[', '{"role":"user","content":"a"}', "]}"
    ),
    "messages of Ollama": filled("/api/chat", '{"model":"demo","messages":[', '{"role":"user","content":"a"}', "]}"),
    "images of Ollama": filled(
        "/api/chat", '{"model":"demo","messages":[{"role":"user","content":"a","images":[', '"a"', "]}]}"
    ),
    "tool calls of Ollama": filled(
        "/api/chat",
        '{"model":"demo","messages":[{"role":"assistant","tool_calls":[',
        '{"function":{"name":"a"}}',
        "]}]}",
    ),
    "options of Ollama": numbered_keys("/api/generate", '{"model":"demo","prompt":"a","options":{', "}}"),
    "context of Ollama": filled("/api/generate", '{"model":"demo","prompt":"a","context":[', "1", "]}"),
    "a long prompt of Ollama": long_text("/api/generate", '{"model":"demo","stream":false,"prompt":"', "漢字", '"}'),
    "inputs to embed": filled("/v1/embeddings", '{"input":[', '"a"', "]}"),
    "documents to rank": filled("/v1/rerank", '{"query":"a","documents":[', '{"text":"a"}', "]}"),
    "texts to score": filled("/score", '{"text_1":"a","text_2":[', '"a"', "]}"),
    "images to classify": filled("/predict", '{"image":[', '"aGk="', "]}"),
    "numbers of a tensor": filled(
        "/predict", '{"tensors":[{"name":"a","shape":[1],"datatype":"FP32","data":[', "1", "]}]}"
    ),
    "tensors": filled("/predict", '{"tensors":[', '{"name":"a","shape":[1],"datatype":"FP32","data":[1]}', "]}"),
    "shape of a tensor": filled(
        "/predict", '{"tensors":[{"name":"a","datatype":"FP32","data":[1],"shape":[', "1", "]}]}"
    ),
    "an image in a form": form(
        "/predict", _disposition("image", '; filename="a.png"'), lambda num_bytes: bytes(num_bytes)
    ),
    "a form without line ends": form("/predict", _disposition("image"), lambda num_bytes: b"\r" * num_bytes),
    "a form of almost boundaries": form(
        "/predict", _disposition("image"), lambda num_bytes: b"\r\n--" * (num_bytes // 4)
    ),
    "a form's long field": form("/predict", _disposition("model"), lambda num_bytes: b"a" * num_bytes),
    "a form's header of letters": form(
        "/predict", lambda _: b"Content-Disposition: form-data; " + b"a" * 8000, lambda _: b""
    ),
    "16 headers of spaces": form(
        "/predict",
        lambda number: b'Content-Disposition: form-data; name="%d"' % number + b" " * 8000,
        lambda _: b"a",
        num_parts=16,
    ),
    "a file of requests": form("/v1/files", _disposition("file", '; filename="a"'), lambda num_bytes: b"a" * num_bytes),
    "a file of line ends": form("/v1/files", _disposition("file"), lambda num_bytes: b"\r\n" * (num_bytes // 2)),
    "a file's header of letters": form(
        "/v1/files", lambda _: b"Content-Disposition: form-data; " + b"a" * 8000, lambda _: b""
    ),
    "a LoRA adapter": long_text("/v1/load_lora_adapter", '{"lora_name":"a","lora_path":"', "a", '"}'),
    "an adapter to unload": long_text("/v1/unload_lora_adapter", '{"lora_name":"', "a", '"}'),
    "weights of an alias": numbered_keys("/v1/aliases/a", '{"models":{', "}}"),
    "a batch": numbered_keys("/v1/batches", '{"input_file_id":"a","metadata":{', "}}"),
    "a name to show": long_text("/api/show", '{"model":"', "a", '"}'),
    "a request to abort": numbered_keys("/abort_request", '{"rid":"a",', "}"),
    "tools of a large chat": fixed(
        "/v1/chat/completions",
        lambda: _padded(
            filled(
                "",
                _CHAT + '{"role":"user","content":"a"}],"tools":[',
                '{"type":"function","function":{"name":"a"}}',
                "]}",
            ).make(SHORT_BYTES // 2)
        ),
    ),
    "lists beside a large chat": fixed(
        "/v1/chat/completions",
        lambda: _padded(
            filled("", _CHAT + '{"role":"user","content":"a"}],"chat_template_kwargs":{"a":[', "[]", "]}}").make(
                SHORT_BYTES
            )
        ),
    ),
}


def _padded(body: bytes) -> bytes:
    """Return the body with so much white space that it is a large one."""
    return body.ljust(MAX_INLINE_BYTES + 1)


def small_shapes() -> dict[str, Shape]:
    """Return the shapes that can be as long as a body that is decoded on the event loop, in that length."""

    def smaller(shape: Shape) -> Shape:
        return Shape(shape.path, lambda _: shape.make(SMALL_BYTES), shape.content_type)

    def is_small(shape: Shape) -> bool:
        return SMALL_BYTES // 2 < len(shape.make(SMALL_BYTES)) <= MAX_INLINE_BYTES

    return {f"{name}, 64 KiB": smaller(shape) for name, shape in SHAPES.items() if is_small(shape)}


# Bodies that are served. They are no attacks on the model, so only the event loop is measured beside them.
SERVED: dict[str, Shape] = {
    "1,000 prompts of 1,300 tokens": fixed(
        "/v1/completions",
        lambda: (
            '{"model":"demo","max_tokens":1,"prompt":[' + ",".join(["[" + ",".join(["123"] * 1300) + "]"] * 1000) + "]}"
        ).encode(),
    ),
    "1,000 texts": fixed(
        "/v1/completions", lambda: json.dumps({"model": "demo", "max_tokens": 1, "prompt": ["a b "] * 1000}).encode()
    ),
    "a chat in Chinese": long_text("/v1/chat/completions", _CHAT + '{"role":"user","content":"', "漢字", '"}]}'),
    "a rendered chat": long_text("/v1/chat/completions", _CHAT + '{"role":"assistant","content":"', "漢字", '"}]}'),
    "long messages": filled(
        "/v1/chat/completions", _CHAT, '{"role":"assistant","content":"' + "漢字" * 2500 + '"}', "]}"
    ),
    "a truncated text": long_text(
        "/v1/completions", '{"model":"demo","max_tokens":4,"truncate_prompt_tokens":100,"prompt":"', "a b ", '"}'
    ),
    "128 answers": fixed("/v1/completions", lambda: b'{"model":"demo","prompt":"a","n":128,"max_tokens":4}'),
}

# Bodies that are served only with a long context.
LONG_CONTEXT = ("--max-model-len", str(2**18), "--num-kv-blocks", str(2**15))
NUM_LONG = 200_000
_numbers = itertools.count(100)  # so that no prompt begins like one before it
LONG: dict[str, Shape] = {
    "200,000 token ids": fixed("/v1/completions", lambda: _long_prompt(next(_numbers) % 200)),
    "200,000 token ids that are cached": fixed("/v1/completions", lambda: _long_prompt(0)),
    "a text of 200,000 tokens": fixed(
        "/v1/completions",
        lambda: b'{"model":"demo","max_tokens":1,"prompt":"%d' % next(_numbers) + b" a" * (NUM_LONG - 8) + b'"}',
    ),
}


def _long_prompt(first: int) -> bytes:
    token_ids = b",".join([b"%d" % first, *[b"123"] * (NUM_LONG - 1)])
    return b'{"model":"demo","max_tokens":1,"prompt":[' + token_ids + b"]}"


# -- models that embed, rerank and classify ----------------------------------------------------------------------------

NUM_DIMENSIONS = 4096
_PREDICTOR = """
[[model]]
id = "{id}"
model = "{path}"
device = "cpu"
dtype = "float32"
"""


def predictor_models(folder: Path) -> Path:
    """Write small random models, and the file that names them. Return the file."""
    import torch

    from tests.support.predictor_checkpoints import make_classifier, make_embedder, make_image_classifier

    if not (folder / "models.toml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        weights = {"linear.weight": torch.randn(NUM_DIMENSIONS, 32), "linear.bias": torch.zeros(NUM_DIMENSIONS)}
        pooling = {"type": "Pooling", "pooling_mode_mean_tokens": True}
        dense = {
            "type": "Dense",
            "activation_function": "torch.nn.modules.linear.Identity",
            "weights": weights,
        }
        make_embedder(folder / "embed", "bert", [pooling, dense])
        make_classifier(folder / "rank", labels=["LABEL_0"])
        make_classifier(folder / "classify")
        make_image_classifier(folder / "see")
        entries = (_PREDICTOR.format(id=name, path=folder / name) for name in ("embed", "rank", "classify", "see"))
        (folder / "models.toml").write_text("".join(entries))
    return folder / "models.toml"


def _json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def _image(kilobytes: int, seed: int) -> str:
    """Return base64 of a file that is an image, with padding behind it."""
    from tests.support.predictor_checkpoints import make_image

    file = make_image(seed=seed)
    padding = Random(seed).randbytes(max(0, 3 * 2**10 * kilobytes // 4 - len(file)))
    return base64.b64encode(file + padding).decode()


# Bodies for such models, most of which are served.
PREDICTED: dict[str, Shape] = {
    "1,024 embeddings of 4,096 numbers": fixed(
        "/v1/embeddings", lambda: _json(model="embed", input=["fish swim"] * 1024)
    ),
    "the same as base64": fixed(
        "/v1/embeddings", lambda: _json(model="embed", input=["fish swim"] * 1024, encoding_format="base64")
    ),
    "1,000 texts of 8 KB": fixed(
        "/v1/embeddings", lambda: _json(model="embed", input=["fish swim " * 800] * 1000, truncate_prompt_tokens=-1)
    ),
    "one text to embed": fixed(
        "/v1/embeddings", lambda: _json(model="embed", input="fish swim " * 800_000, truncate_prompt_tokens=-1)
    ),
    "4 million token ids to embed": Shape(
        "/v1/embeddings",
        lambda num_bytes: (
            b'{"model":"embed","truncate_prompt_tokens":-1,"input":[1' + b",1" * (num_bytes // 2 - 40) + b"]}"
        ),
    ),
    "1,000 lists of 4,000 token ids": fixed(
        "/v1/embeddings", lambda: _json(model="embed", input=[[1] * 2700] * 1000, truncate_prompt_tokens=-1)
    ),
    "2 million inputs": filled("/v1/embeddings", '{"model":"embed","input":[', '"a"', "]}"),
    "16,384 inputs": fixed("/v1/embeddings", lambda: _json(model="embed", input=["a" * 10] * 2**14)),
    "mixed inputs": filled("/v1/embeddings", '{"model":"embed","input":["a",', "1", "]}"),
    "inputs of TEI": filled("/embed", '{"model":"embed","inputs":[', '"a"', "]}"),
    "inputs of Ollama": filled("/api/embed", '{"model":"embed","input":[', '"a"', "]}"),
    "1,000 documents of 8 KB": fixed(
        "/v1/rerank",
        lambda: _json(model="rank", query="fish", documents=["fish swim " * 800] * 1000, return_documents=True),
    ),
    "one document": fixed(
        "/v1/rerank", lambda: _json(model="rank", query="fish", documents=["\1" * 1_300_000], return_documents=True)
    ),
    "1,000 documents and a long query": fixed(
        "/v1/rerank", lambda: _json(model="rank", query="fish " * 100_000, documents=["swim"] * 1000)
    ),
    "documents of one letter": filled("/v1/rerank", '{"model":"rank","query":"a","documents":[', '"a"', "]}"),
    "1,000 pairs": fixed("/score", lambda: _json(model="rank", text_1=["fish"] * 1000, text_2=["swim " * 1000] * 1000)),
    "1,024 texts to classify": fixed(
        "/predict", lambda: _json(model="classify", input=["fish swim " * 500] * 1024, truncate=True)
    ),
    "1,000 images": fixed("/predict", lambda: _json(model="see", image=[_image(7, seed=1)] * 1000)),
    "16,384 images": fixed("/predict", lambda: _json(model="see", image=["aGk="] * 2**14)),
    "one image": fixed("/predict", lambda: _json(model="see", image=_image(8180, seed=2))),
    "one image in a form": Shape(
        "/predict",
        lambda num_bytes: (
            b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nsee\r\n'
            b'--b\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n'
            + base64.b64decode(_image(8180, seed=3)).ljust(num_bytes, b"a")
            + b"\r\n--b--\r\n"
        ),
        FORM,
    ),
    "a tensor for a classifier": filled(
        "/predict", '{"model":"classify","tensors":[{"name":"a","shape":[1],"datatype":"FP32","data":[', "1", "]}]}"
    ),
}
