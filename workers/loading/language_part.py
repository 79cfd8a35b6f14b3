"""Models that take images or sound and text: build the part that reads and writes text, and leave out the others."""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

# Attributes of these models that hold the encoders of other inputs, and the layers that turn their results into
# embeddings.
_OTHER_PARTS = re.compile(
    r"vision|visual|image|video|audio|speech|sound|projector|connector|multi_modal|vqmodel|resampler|qformer|mlp1"
)
_MAPPINGS = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
_OTHER_CONFIGS = ("vision_config", "audio_config", "image_config", "vq_config")


def takes_more_than_text(config: Any) -> bool:
    """Whether the configuration is that of a model with parts for images or sound, of which the text part is served."""
    return _multimodal_class(config) is not None


def model_class_of(config: Any) -> Any:
    """Return the class that builds the model for text: `AutoModelForCausalLM`, or the language part of a larger one.

    Both have `from_pretrained`, and are built by `build`.
    """
    multimodal = _multimodal_class(config)
    return AutoModelForCausalLM if multimodal is None else _language_part(multimodal)


def build(config: Any, **options: Any) -> PreTrainedModel:
    """Return the model for text with weights that nothing has set; the options are those of `from_config`."""
    model_class = model_class_of(config)
    if model_class is AutoModelForCausalLM:
        model: PreTrainedModel = model_class.from_config(config, trust_remote_code=False, **options)
    else:
        model = model_class._from_config(config, **options)
    return model


def notice_of(config: Any, architecture: str) -> str:
    """Return what users should know about how the model is served; "" if there is nothing."""
    if not takes_more_than_text(config):
        return ""
    return f"{architecture} takes other inputs than text, too; servekit serves its language part, for text only"


def is_language_part(model: PreTrainedModel) -> bool:
    """Whether parts for other inputs were left out of the model."""
    return getattr(model, "is_language_part", False)


def is_multimodal(config: Any) -> bool:
    """Whether transformers has a class for the configuration that takes images or sound, and answers with text."""
    return any(type(config) in mapping for mapping in _MAPPINGS)


def _multimodal_class(config: Any) -> Any:
    """Return the class of a model that takes more than text; None if there is one for its text alone."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        has_other_parts = any(getattr(config, name, None) is not None for name in _OTHER_CONFIGS)
        # Some have a class for their text alone, which transformers chooses by itself.
        if not has_other_parts or isinstance(found, tuple) or found.config_class is not type(config):
            return None
    elif config.get_text_config() is config or hasattr(config, "talker_config"):  # a talker reads pickled files
        return None
    else:
        mapping = next((each for each in _MAPPINGS if type(config) in each), None)
        if mapping is None:
            return None
        found = mapping[type(config)]
    return found[0] if isinstance(found, tuple) else found


def _language_part(model_class: Any) -> Any:
    """Return a subclass without the parts for other inputs. Its parameters keep their names, as the files have them."""

    class LanguagePart(model_class):  # type: ignore[misc]
        """A model that takes text only."""

        is_language_part = True

        def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
            super().__init__(config, *arguments, **options)
            _remove_other_parts(self, self.get_decoder())

    # transformers finds the names in older files by these two.
    LanguagePart.__name__, LanguagePart.__module__ = model_class.__name__, model_class.__module__
    return LanguagePart


def _remove_other_parts(module: nn.Module, decoder: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if child is decoder:
            continue
        if any(part is decoder for part in child.modules()):
            _remove_other_parts(child, decoder)
        elif _OTHER_PARTS.search(name):
            setattr(module, name, None)
