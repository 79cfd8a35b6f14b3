"""Read and check a model's configuration: config.json and generation_config.json, as transformers understands them.

Both files may come from an attacker, so every number that the manager will use is checked here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from servekit.errors import ConfigError
from servekit.protocol.messages import ModelInfo
from workers.loading.checkpoint import WEIGHTS
from workers.loading.language_part import is_multimodal, notice_of, takes_more_than_text
from workers.loading.refusals import EMBEDS, in_one_line, refusal

_SEQUENCE_TO_SEQUENCE = "an encoder with a decoder, and servekit serves decoders alone"
_OTHER_POSITIONS = {"kosmos-2.5"}


def read_config(path: Path) -> Any:
    """Return transformers' configuration of the model in `path`. No code of the model's directory is run.

    Raises ConfigError for a file that transformers cannot read, and for weights outside of the directory.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises various errors for a file that is not valid
        raise ConfigError(f"{path} holds no model configuration that can be served: {in_one_line(error)}") from None
    if getattr(config, "transformers_weights", WEIGHTS) not in (None, WEIGHTS):
        raise ConfigError(f"{path / 'config.json'} has transformers_weights; the weights must be in {WEIGHTS}")
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config  # or transformers would load its quantizer, which wants the format's library
    return config


def architecture_of(config: Any) -> str:
    """Return the class that config.json names, for example LlamaForCausalLM; else the model's type."""
    return str((config.architectures or [config.model_type])[0])


def check_is_decoder(config: Any) -> None:
    """Raise ConfigError for a model type that transformers has no causal language model for, and for encoders."""
    architecture = architecture_of(config)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or takes_more_than_text(config):
        if _is_encoder(config):
            raise refusal(
                architecture,
                "`is_decoder` is false in its config.json, so that each token attends to those after it, too",
                EMBEDS,
            )
        if getattr(config, "is_encoder_decoder", False):
            raise refusal(architecture, f"model type {config.model_type} is {_SEQUENCE_TO_SEQUENCE}")
        if config.model_type in _OTHER_POSITIONS:
            raise refusal(architecture, "it counts positions from its padding token on, and not from 0")
        if not hasattr(config.get_text_config(), "num_hidden_layers"):
            raise refusal(architecture, "its configuration has no number of layers (`num_hidden_layers`)")
        return
    if type(config) in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        raise refusal(architecture, f"model type {config.model_type} is {_SEQUENCE_TO_SEQUENCE}")
    if is_multimodal(config):
        raise refusal(architecture, "transformers does not keep its language part apart from the others")
    raise refusal(
        architecture,
        f"transformers has no class that generates text for model type {config.model_type}",
        "choose one of docs/architectures.md; models that embed, rerank or classify are served with --kind "
        "(docs/embeddings.md)",
    )


def _is_encoder(config: Any) -> bool:
    """Whether the configuration is that of an encoder like BERT, which transformers can use as a decoder, too.

    Types that have an encoder and a decoder set `is_decoder` themselves, for their decoder alone.
    """
    kind = type(config)
    can_be_both = kind in MODEL_FOR_MASKED_LM_MAPPING and kind not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    return can_be_both and getattr(config, "is_decoder", True) is False


def describe_model(
    config: Any, num_parameters: int, path: Path, max_model_len: int | None, quantization: str = ""
) -> ModelInfo:
    """Return what the manager needs to know of the model. Raises ConfigError, by name, for values out of range.

    `max_model_len` is what the operator asked for, in tokens; None takes the model's own context.
    """
    architecture = architecture_of(config)
    notice, config = notice_of(config, architecture), config.get_text_config()
    generation = _generation_config(path)
    max_model_len = _resolve_max_model_len(config, max_model_len)
    _check_rope(config, max_model_len, architecture)
    return ModelInfo(
        architecture=architecture,
        num_parameters=num_parameters,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=tuple(
            int(_within("eos_token_id", token_id, 0, 2**31 - 1))
            for token_id in _as_tuple(generation.eos_token_id) or _as_tuple(getattr(config, "eos_token_id", None))
        ),
        default_temperature=_within("temperature", _default_temperature(generation), 0, 100),
        default_top_k=int(_within("top_k", getattr(generation, "top_k", None) or 0, -1, 2**31 - 1)),
        default_top_p=_within("top_p", getattr(generation, "top_p", None) or 1.0, 0, 1),
        quantization=quantization,
        notice=notice,
    )


def _within(name: str, value: Any, minimum: float, maximum: float) -> float:
    """Return a number that the model's makers recommend. Raises ConfigError for one that no request could ask for."""
    if not isinstance(value, int | float) or not minimum <= value <= maximum:
        raise ConfigError(f"the model's {name} = {str(value)[:40]!r} is not a number from {minimum} to {maximum}")
    return value


def _resolve_max_model_len(config: Any, requested: int | None) -> int:
    # With the names of MPT and Bloom, whose positions have no limit of their own: what they were trained with.
    names = ("max_position_embeddings", "max_seq_len", "seq_length")
    trained: int | None = next((found for name in names if (found := getattr(config, name, None)) is not None), None)
    if trained is None and requested is None:
        raise ConfigError("config.json does not give the model's context length; set --max-model-len")
    if trained is not None and trained < 1:
        raise ConfigError(f"config.json gives a context length of {trained} tokens; it must be at least 1")
    if trained is not None and requested is not None and requested > trained:
        raise ConfigError(f"max_model_len = {requested} exceeds the model's context of {trained} tokens")
    return requested or trained or 0


def _check_rope(config: Any, max_model_len: int, architecture: str) -> None:
    """Refuse rotary positions that change when a longer sequence is in the same step.

    transformers chooses longrope's factors by the largest position of a whole forward pass, which here may belong to
    another sequence. Within the original context there is nothing to choose.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type"), *(v.get("rope_type") for v in parameters.values() if isinstance(v, dict))}
    original = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    if "longrope" in kinds and (original is None or max_model_len > original):
        raise refusal(
            architecture,
            f"its longrope positions depend on the longest sequence in a step beyond {original} tokens",
            f"--max-model-len {original} serves it",
        )


def _generation_config(path: Path) -> GenerationConfig:
    """Return the model's own defaults for generation, from its generation_config.json if it has one."""
    if not (path / "generation_config.json").exists():
        return GenerationConfig()
    try:
        return GenerationConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path / 'generation_config.json'}: {in_one_line(error)}") from None


def _default_temperature(generation: GenerationConfig) -> float:
    """Return the temperature that the model's makers recommend: 0 (greedy) only where they say so."""
    if generation.do_sample is False:
        return 0.0
    return 1.0 if generation.temperature is None else generation.temperature


def _as_tuple(token_ids: int | list[int] | None) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    return (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
