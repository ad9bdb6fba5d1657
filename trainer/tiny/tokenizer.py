"""The character-level tokenizer of the small models.

One token per printable ASCII character and per newline, so that a text has exactly one tokenization and a sampled id
sequence decodes to exactly one text. Turns are opened by a special token of their role and closed by the end token:

    <user>Calculate 57 + 65.<assistant>122<eos>
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ROLES = {"system": "<system>", "user": "<user>", "assistant": "<assistant>", "tool": "<tool>"}
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY = [PAD, EOS, UNK, *ROLES.values(), *CHARACTERS]
"""Token id = position in this list."""

# Only an assistant's turn ends with <eos>: it is what the policy has to produce, and where the reward model reads its score.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}"
    "{{ raise_exception('unknown role ' + message['role']) }}"
    "{%- endif -%}"
    "{{ '<' + message['role'] + '>' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ '<eos>' }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}"
)


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer that `AutoTokenizer` and vLLM load after `save_pretrained`; `max_length` in tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        additional_special_tokens=list(ROLES.values()),
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
