"""A tokenizer of one token per character, with marks for turns and chat templates."""

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

USER, ASSISTANT, END, PAD, MASK = "<u>", "<a>", "<e>", "<p>", "<m>"

PLAIN = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}<e>{% endif %}"
    "{% if m.role == 'user' %}<u>{{ m.content }}<e>{% endif %}"
    "{% if m.role == 'assistant' %}<a>{{ m.content }}<e> {% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
MARKED = PLAIN.replace(
    "<a>{{ m.content }}<e> ", "<a>{%- generation -%}{{ m.content }}<e>{%- endgeneration %} "
)
# Earlier answers are shortened once another turn follows, as thinking is dropped by Qwen's.
REWRITING = PLAIN.replace(
    "<a>{{ m.content }}<e> ", "<a>{{ m.content if loop.last else m.content[:1] }}<e> "
)
THINKING = PLAIN.replace(
    "{% if add_generation_prompt %}<a>", "{% if add_generation_prompt %}<a>{{ enable_thinking }}"
)


def make_tokenizer(template=PLAIN):
    """80 ids; `<e>` ends an answer."""
    characters = [USER, ASSISTANT, END, PAD, MASK, *string.ascii_letters, *string.digits]
    characters += list(" .,?!:;'-+*/=")
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([USER, ASSISTANT, END, PAD, MASK])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=".", eos_token=END, pad_token=PAD
    )
    fast.chat_template = template
    return fast
