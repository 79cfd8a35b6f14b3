"""The demo model's own byte-level BPE tokenizer, learned from the generated corpus.

Two thousand tokens cover a corpus this small, and keep the embedding, which is most of a tiny
model, within a tenth of its weights.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

VOCABULARY_SIZE = 2048
MAX_LENGTH = 2048

BOS = "<bos>"
EOS = "<eos>"
PAD = "<pad>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = [PAD, BOS, EOS, SYSTEM, USER, ASSISTANT]

# Words keep the space before them; digits stand alone, so that a number is spelled the same way
# wherever it occurs and counting is a matter of digits.
WORDS = Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s")

# Every turn ends with the one end-of-sequence token, so generation needs no second stop token. Tools are offered in a
# turn of their own, each as its name and parameters: descriptions and types would be many tokens, and this model makes
# nothing of them. Calls have the form of Hermes and Qwen. The tags are ordinary text: as tokens of their own they would
# change the tokenizer, and so what all other texts are split into. Results are a sentence, so that an answer copies
# what stands behind the same word.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>Tools:' }}"
    "{% for tool in tools %}"
    "{% set parameters = tool['function']['parameters'] or {} %}"
    "{{ '\n' + tool['function']['name'] + '(' + (parameters['properties'] or {})|join(', ') + ')' }}"
    "{% endfor %}"
    "{{ eos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>The result is ' + message['content'] + '.' + eos_token }}"
    "{% elif message['tool_calls'] %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] %}"
    "{{ '\n' if message['content'] or not loop.first }}"
    "{{ '<tool_call>\n{\"name\": ' + call['function']['name']|tojson + ', \"arguments\": ' }}"
    "{{ call['function']['arguments']|tojson + '}\n</tool_call>' }}"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def learn_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges from the texts; the same texts always give the same tokenizer."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(WORDS, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    """Write the tokenizer and its chat template where `AutoTokenizer` looks for them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        # The name that every release of transformers knows.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
