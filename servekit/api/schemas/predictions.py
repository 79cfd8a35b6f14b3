"""Define the bodies of the routes that embed, rerank and classify.

`/v1/embeddings` is OpenAI's; `/v1/rerank` is Cohere's and Jina's; `/score` is vLLM's; bodies with `inputs` or `texts`
are those of text-embeddings-inference; `/api/embed` and `/api/embeddings` are Ollama's. `/predict` is servekit's own.
"""

from __future__ import annotations

from abc import abstractmethod
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from servekit.api.schemas.common_fields import MAX_PROMPTS, Count, Milliseconds, TokenId, described
from servekit.errors import InvalidRequest
from servekit.requests.inference import InferenceRequest, Tensor
from servekit.requests.prediction import ImageInput, Input, PredictionRequest

Texts = str | list[str]
Model = Annotated[str | None, described("the served model's name")]
Truncate = Annotated[bool | None, described("cut inputs that are too long, in place of refusing them")]


class PredictionFields(Struct, kw_only=True):
    """Fields that all of these bodies may have."""

    priority: Annotated[
        Annotated[int, Meta(ge=-1000, le=1000)] | None,
        described("a lower number runs sooner; a level is worth ten seconds of waiting"),
    ] = None
    deadline_ms: Annotated[Milliseconds | None, described("end the request if it is not finished after this time")] = (
        None
    )

    @abstractmethod
    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest for what no type can express."""

    def check(self) -> None:
        """Raise InvalidRequest for what no type can express."""
        self.to_prediction_request()

    def _request(self, inputs: list[Input], param: str, **more: Any) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest for no inputs, or too many."""
        if not inputs:
            raise InvalidRequest(f"{param} is empty; it needs at least one input", param=param)
        if len(inputs) > MAX_PROMPTS:
            raise InvalidRequest(f"{param} has {len(inputs)} inputs; the limit is {MAX_PROMPTS}", param=param)
        return PredictionRequest(
            inputs=inputs, param=param, priority=self.priority or 0, deadline_ms=self.deadline_ms, **more
        )


# -- embeddings --------------------------------------------------------------------------------------------------------


class EmbeddingsRequest(PredictionFields, kw_only=True):
    """The body of /v1/embeddings."""

    # msgspec allows one array type in a union, so `inputs_of` checks what the list contains.
    input: Annotated[
        str | list[str | TokenId | list[TokenId]], described("a text, token ids, or a list of either; not empty")
    ]
    model: Model = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None, described("numbers, or base64 of 32-bit floats; default: float")
    ] = None
    dimensions: Annotated[
        Count | None, described("numbers of each embedding, the first ones; for models that were trained for that")
    ] = None
    user: Annotated[str | None, described("ignored")] = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        described("keep only the first tokens of longer inputs, so many or for -1 as many as the model takes"),
    ] = None
    prompt_name: Annotated[
        str | None, described("of the model's prompts, the one to put before each input; default: the model's own")
    ] = None

    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        truncate = self.truncate_prompt_tokens
        if truncate == 0:
            raise InvalidRequest(
                "truncate_prompt_tokens is 0; it takes -1, or 1 and more", param="truncate_prompt_tokens"
            )
        return self._request(
            inputs_of(self.input, "input"),
            "input",
            dimensions=self.dimensions,
            prompt_name=self.prompt_name,
            truncates=truncate is not None,
            max_tokens=None if truncate == -1 else truncate,
        )


class Embedding(Struct):
    """The embedding of one input."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class PredictionUsage(Struct):
    """The tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(Struct):
    """The embeddings of all inputs, in order."""

    data: list[Embedding]
    model: str
    usage: PredictionUsage
    object: str = "list"


class TeiEmbedRequest(PredictionFields, kw_only=True):
    """The body of /embed, in the format of text-embeddings-inference."""

    inputs: Annotated[Texts, described("a text or a list of texts")]
    model: Model = None
    truncate: Truncate = None
    prompt_name: Annotated[str | None, described("of the model's prompts, the one to put before each input")] = None
    dimensions: Count | None = None

    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        return self._request(
            _texts(self.inputs),
            "inputs",
            truncates=bool(self.truncate),
            prompt_name=self.prompt_name,
            dimensions=self.dimensions,
        )


class OllamaEmbedRequest(PredictionFields, kw_only=True):
    """The body of /api/embed."""

    model: str
    input: Annotated[Texts, described("a text or a list of texts")]
    truncate: Annotated[bool | None, described("cut inputs that are too long; default: true")] = None
    dimensions: Count | None = None
    options: Annotated[dict[str, Raw] | None, described("ignored")] = None
    keep_alive: Annotated[str | int | None, described("ignored")] = None

    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        return self._request(
            _texts(self.input), "input", truncates=self.truncate is not False, dimensions=self.dimensions
        )


class OllamaEmbedResponse(Struct):
    """The embeddings of all inputs, in order. Durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(PredictionFields, kw_only=True):
    """The body of /api/embeddings, an older form of /api/embed."""

    model: str
    prompt: str
    options: Annotated[dict[str, Raw] | None, described("ignored")] = None
    keep_alive: Annotated[str | int | None, described("ignored")] = None

    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        return self._request([self.prompt], "prompt", truncates=True)


class OllamaEmbeddingsResponse(Struct):
    """The embedding of the prompt."""

    embedding: list[float]


# -- reranking ---------------------------------------------------------------------------------------------------------


class Document(Struct):
    """A document as an object."""

    text: str


class RerankRequest(PredictionFields, kw_only=True):
    """The body of /v1/rerank and /rerank. With `texts` in place of `documents`, it is text-embeddings-inference's."""

    query: str
    documents: list[str | Document] | None = None
    texts: Annotated[list[str] | None, described("the documents, in the format of text-embeddings-inference")] = None
    model: Model = None
    top_n: Annotated[Count | None, described("return only so many documents, the best ones")] = None
    return_documents: Annotated[bool | None, described("return the documents' texts, too")] = None
    return_text: Annotated[bool | None, described("the same, with `texts`")] = None
    raw_scores: Annotated[bool | None, described("return the model's own numbers, without its activation")] = None
    truncate: Annotated[bool | None, described("cut pairs that are too long; default: true")] = None
    max_tokens_per_doc: Annotated[Count | None, described("keep only so many tokens of each pair")] = None

    def __post_init__(self) -> None:
        if self.documents is not None:
            self.documents = [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def texts_of_documents(self) -> list[str]:
        """The documents' texts."""
        given: Any = self.texts if self.documents is None else self.documents
        return given or []

    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        param = "texts" if self.documents is None and self.texts is not None else "documents"
        return self._request(
            [(self.query, text) for text in self.texts_of_documents],
            param,
            truncates=self.truncate is not False,
            max_tokens=self.max_tokens_per_doc,
            raw_scores=bool(self.raw_scores),
        )


class RerankResult(Struct, omit_defaults=True):
    """One document, by its index in the request."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankUsage(Struct):
    """The tokens of all pairs."""

    total_tokens: int


class RerankResponse(Struct):
    """The documents, the most relevant first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage


class TeiRank(Struct, omit_defaults=True):
    """One document, by its index in the request, in the format of text-embeddings-inference."""

    index: int
    score: float
    text: str | None = None


class ScoreRequest(PredictionFields, kw_only=True):
    """The body of /score: one text with each of others, or two lists of the same length."""

    text_1: Texts
    text_2: Texts
    model: Model = None
    truncate_prompt_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None,
        described("keep only so many tokens of longer pairs, or for -1 as many as the model takes"),
    ] = None

    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        first = [self.text_1] if isinstance(self.text_1, str) else self.text_1
        second = [self.text_2] if isinstance(self.text_2, str) else self.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                f"text_1 has {len(first)} texts, and text_2 has {len(second)}; send one text_1, or as many of both",
                param="text_2",
            )
        truncate = self.truncate_prompt_tokens
        return self._request(
            list(zip(first, second, strict=True)),
            "text_2",
            truncates=truncate is not None,
            max_tokens=None if truncate is None or truncate < 1 else truncate,
        )


class Score(Struct):
    """The score of one pair."""

    index: int
    score: float
    object: str = "score"


class ScoreResponse(Struct):
    """The scores of all pairs, in order."""

    id: str
    created: int
    model: str
    data: list[Score]
    usage: PredictionUsage
    object: str = "list"


# -- classification ----------------------------------------------------------------------------------------------------


class PredictRequest(PredictionFields, kw_only=True):
    """The body of /predict: `input` has texts, `image` has images, `inputs` is text-embeddings-inference's.

    `tensors` is for models of a Triton server.
    """

    model: Model = None
    input: Annotated[Texts | None, described("a text or a list of texts")] = None
    image: Annotated[Texts | None, described("an image or a list of images: base64 of a file, or a data URL")] = None
    inputs: Annotated[Texts | None, described("texts, in the format of text-embeddings-inference")] = None
    top_k: Annotated[Count | None, described("return only so many labels, the likeliest ones; default: all")] = None
    raw_scores: Annotated[bool | None, described("return the model's own numbers, without softmax or sigmoid")] = None
    truncate: Truncate = None
    tensors: Annotated[
        list[Tensor] | None, described("inputs of a model of kind infer, in the format of KServe's protocol V2")
    ] = None
    outputs: Annotated[
        list[str] | None, described("names of the tensors to return, of a model of kind infer; default: all")
    ] = None

    def check(self) -> None:
        """Raise InvalidRequest for what no type can express."""
        if self.tensors is None:
            self.to_prediction_request()
            return
        for name in ("input", "image", "inputs"):
            if getattr(self, name) is not None:
                raise InvalidRequest(f"send one of tensors and {name}: tensors are the whole input", param="tensors")

    def to_inference_request(self) -> InferenceRequest:
        """Return the request for a model of kind infer. Raises InvalidRequest for fields of other kinds."""
        for name in ("image", "inputs", "top_k", "raw_scores", "truncate"):
            if getattr(self, name) is not None:
                raise InvalidRequest(
                    f"the model computes tensors, and {name} is for models that classify; send tensors, or a text as "
                    "input",
                    param=name,
                    code="not_supported",
                )
        if bool(self.tensors) == (self.input is not None):
            raise InvalidRequest("send one of tensors and input", param="tensors")
        texts = [] if self.input is None else list(_listed(self.input))
        if len(texts) > MAX_PROMPTS or (self.input is not None and not texts):
            raise InvalidRequest(f"input has {len(texts)} texts; it takes 1 to {MAX_PROMPTS}", param="input")
        return InferenceRequest(
            tensors=self.tensors or [], texts=texts, output_names=self.outputs or [], deadline_ms=self.deadline_ms
        )

    def to_prediction_request(self) -> PredictionRequest:
        """Return the request in the form that all APIs share. Raises InvalidRequest."""
        if self.tensors is not None:
            raise InvalidRequest(
                "tensors are for models of kind infer, and the model classifies; send input or image",
                param="tensors",
                code="not_supported",
            )
        given = {name: getattr(self, name) for name in ("input", "image", "inputs") if getattr(self, name) is not None}
        if len(given) != 1:
            raise InvalidRequest("send one of input, image and inputs: texts, or images", param="input")
        ((param, value),) = given.items()
        inputs = _texts(value)
        if param == "image":
            inputs = [ImageInput(ascii_of(text), is_base64=True) for text in _listed(value)]
        return self._request(inputs, param, truncates=bool(self.truncate))


class InferAnswer(Struct):
    """The answer of a server of KServe's protocol V2 to an inference. Large ones are decoded like request bodies."""

    outputs: list[Tensor]


class LabelScore(Struct):
    """One label, and how likely it is."""

    label: str
    score: float


class Prediction(Struct):
    """The likeliest label of one input, and the scores of all of them, the likeliest first."""

    label: str
    score: float
    scores: list[LabelScore]


class PredictResponse(Struct):
    """The predictions of all inputs, in order."""

    model: str
    predictions: list[Prediction]
    usage: PredictionUsage


class InferResponse(Struct):
    """The tensors that a model of kind infer returned."""

    model: str
    outputs: list[Tensor]


def image_request(data: memoryview, wanted: PredictRequest) -> PredictionRequest:
    """Return the request for an image that was uploaded in a form, whose other fields are in `wanted`."""
    return PredictionRequest(
        inputs=[ImageInput(data, is_base64=False)],
        param="image",
        priority=wanted.priority or 0,
        deadline_ms=wanted.deadline_ms,
    )


# -- inputs ------------------------------------------------------------------------------------------------------------


def inputs_of(value: Any, param: str) -> list[Input]:
    """Return the inputs of a text, of token ids, or of a list of either. Raises InvalidRequest."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, array):  # of a large body; to make a list of millions would hold the event loop
        return [value]
    kinds = set(map(type, value))
    if len(kinds) > 1:
        raise InvalidRequest(f"{param} mixes texts and token ids; send one kind", param=param)
    if kinds == {int}:
        return [value]
    if kinds <= {list, array} and not all(value):
        raise InvalidRequest(f"{param} has an empty list of token ids", param=param)
    return list(value)


def ascii_of(text: str | memoryview) -> memoryview:
    """Return the bytes of base64; those of a large body are bytes already. Other characters than ASCII become `?`."""
    return text if isinstance(text, memoryview) else memoryview(text.encode("ascii", "replace"))


def _listed(value: Texts) -> Sequence[str]:
    return [value] if isinstance(value, str | memoryview) else value


def _texts(value: Texts) -> list[Input]:
    return list(_listed(value))
