"""A word-level tokenizer with a handful of words: token counts can be read off the text."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "system", "user", "assistant", ":"]
TEMPLATE = (
    "{{ bos_token }} {% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def word_tokenizer(*, adds_bos: bool = False, eos: str | None = "<eos>", template: str | None = TEMPLATE) -> Any:
    vocabulary = {word: index for index, word in enumerate(["<unk>", "<bos>", "<eos>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=eos, unk_token="<unk>")
    tokenizer.chat_template = template
    return tokenizer
