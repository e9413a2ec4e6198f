"""
Prompts in, the target's own answers out: on-policy training data.

A drafter learns to say what its target would say, so every assistant turn of the source is thrown
away and written again by the target. Prompts can come from the target too: its chat template up to
the place where a user would write, continued by sampling.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from .generation_fields import ALONE, SET_ASIDE, WHOLE, check_generation_config, fields_set
from .growing_cache import growing_cache

# Tokens between two looks at which rows have finished.
_STRIDE = 32


@dataclass(frozen=True)
class SamplingOptions:
    """
    How answers are drawn.

    Attributes:
        temperature (`float`): 0 is greedy.
        top_p (`float`), top_k (`int`): 1.0 and 0 leave the distribution as it is.
        max_new_tokens (`int`): of one answer.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 512

    def generate_options(self) -> dict[str, Any]:
        """Keywords for the host's `generate`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        token_ids (`list[int]`): the answer, stop token included if it came.
        finish_reason (`str`): `"stop"` or `"length"`.
    """

    token_ids: list[int]
    finish_reason: str


def stop_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """
    What ends an answer. Raises `ValueError` if neither model nor tokenizer knows.
    """
    stops = target.generation_config.eos_token_id
    stops = tokenizer.eos_token_id if stops is None else stops
    if stops is None:
        raise ValueError(
            "Neither the target's generation config nor its tokenizer names an eos_token_id, so no "
            "answer would ever end. Set target.generation_config.eos_token_id."
        )
    return set(stops) if isinstance(stops, list | tuple) else {stops}


def check_prompt(prompt: list[int], config: PretrainedConfig, max_new_tokens: int) -> None:
    """
    Raises `ValueError` for a tokenised prompt that the target of a config cannot answer: no tokens,
    tokens that it does not embed, or no room for the answer in its context.
    """
    text = config.get_text_config(decoder=True)
    context = getattr(text, "max_position_embeddings", None)
    if not prompt:
        raise ValueError(
            "A prompt has no tokens. Give it some text, or use a chat template that begins with a "
            "token of its own."
        )
    if max(prompt) >= text.vocab_size:
        raise ValueError(
            f"A prompt has token {max(prompt)}, and the target knows {text.vocab_size} tokens. Its "
            "tokenizer belongs to another model."
        )
    if context is not None and len(prompt) + max_new_tokens > context:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {max_new_tokens} new ones do not fit into the "
            f"target's context of {context}. Shorten the prompt or lower max_new_tokens."
        )


@torch.no_grad()
def answer_batch(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[list[int]],
    options: SamplingOptions,
) -> list[Answer]:
    """
    The target's answers to a batch of tokenised prompts, in their order.

    Rows leave the batch when they have finished, so a few long answers do not cost like many;
    unless the target's generation config has fields that only a whole answer obeys, or one alone.

    Raises:
        `ValueError`: see [`check_prompt`] and [`check_generation_config`].
    """
    check_generation_config(target)
    for prompt in prompts:
        check_prompt(prompt, target.config, options.max_new_tokens)
    is_alone = bool(fields_set(target, ALONE))
    if is_alone and len(prompts) > 1:
        return [answer_batch(target, tokenizer, [p], options)[0] for p in prompts]
    stops, device = stop_token_ids(target, tokenizer), target.device
    width = max(map(len, prompts))
    pad = next(iter(stops))
    input_ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    rows, answers = list(range(len(prompts))), {}
    # Beams change places in the host's own caches only.
    cache = None if is_alone else growing_cache(target.config)
    is_whole = is_alone or bool(fields_set(target, WHOLE))
    while rows:
        room = width + options.max_new_tokens - input_ids.shape[1]
        output = target.generate(
            input_ids,
            attention_mask=mask,
            cache=cache,
            max_new_tokens=room if is_whole else min(_STRIDE, room),
            pad_token_id=pad,
            **SET_ASIDE,
            **options.generate_options(),
        )
        input_ids, cache = output.sequences, output.cache
        mask = torch.nn.functional.pad(mask, (0, input_ids.shape[1] - mask.shape[1]), value=1)
        is_open = []
        for place, row in enumerate(rows):
            written = input_ids[place, width:].tolist()
            end = next((i for i, token in enumerate(written) if token in stops), None)
            if end is not None:
                answers[row] = Answer(written[: end + 1], "stop")
            elif len(written) >= options.max_new_tokens:
                answers[row] = Answer(written, "length")
            else:
                is_open.append(place)
        if len(is_open) < len(rows):
            kept = torch.tensor(is_open, device=device, dtype=torch.long)
            rows = [rows[place] for place in is_open]
            input_ids, mask = input_ids[kept], mask[kept]
            if rows:
                cache.batch_select_indices(kept)
    return [answers[row] for row in range(len(prompts))]


def converse(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[dict[str, str]]],
    options: SamplingOptions,
    **template_options: Any,
) -> list[dict[str, Any]]:
    """
    Answer every user turn of a batch of conversations anew; turns of the assistant are not read.

    Returns:
        Prepared rows (see `data.py`): `messages`, `input_ids`, `assistant_spans` and
        `finish_reason`. The tokens are those that the target wrote, not its text tokenised again; a
        conversation ends with the first answer that reached its limit, and before a turn whose
        answer might not fit into the target's context.

    Raises:
        `ValueError`: see [`answer_batch`].
    """
    histories: list[list[dict[str, str]]] = [[] for _ in conversations]
    waiting = [questions_of(turns) for turns in conversations]
    rows: list[dict[str, Any]] = [{} for _ in conversations]
    while active := [i for i in range(len(rows)) if waiting[i]]:
        prompts = {}
        for i in active:
            histories[i] += waiting[i].pop(0)
            prompt = tokenizer.apply_chat_template(
                histories[i], add_generation_prompt=True, return_dict=False, **template_options
            )
            try:
                check_prompt(prompt, target.config, options.max_new_tokens)
            except ValueError:
                if not rows[i]:
                    raise
                # The answers before this turn are kept.
                waiting[i].clear()
            else:
                prompts[i] = prompt
        if not prompts:
            break
        answers = answer_batch(target, tokenizer, list(prompts.values()), options)
        for (i, prompt), answer in zip(prompts.items(), answers, strict=True):
            text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            histories[i].append({"role": "assistant", "content": text})
            span = [len(prompt), len(prompt) + len(answer.token_ids)]
            rows[i] = {
                "messages": list(histories[i]),
                "input_ids": prompt + answer.token_ids,
                "assistant_spans": [*_kept_spans(rows[i], prompt), span],
                "finish_reason": answer.finish_reason,
            }
            if answer.finish_reason == "length" or not text.strip():
                waiting[i].clear()
    return rows


def questions_of(turns: Sequence[dict[str, str]]) -> list[list[dict[str, str]]]:
    """What is put to the target one after the other: user turns, each with what leads to it."""
    questions: list[list[dict[str, str]]] = []
    leading: list[dict[str, str]] = []
    for turn in turns:
        if turn["role"] != "assistant":
            leading.append(turn)
        if turn["role"] == "user":
            questions.append(leading)
            leading = []
    return questions


def _kept_spans(row: dict[str, Any], prompt: list[int]) -> list[list[int]]:
    """Earlier answers that the next prompt repeats token by token; templates may rewrite them."""
    if not row:
        return []
    return [
        span for span in row["assistant_spans"] if prompt[: span[1]] == row["input_ids"][: span[1]]
    ]


def invent_prompts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    starters: Sequence[str],
    max_new_tokens: int = 96,
    temperature: float = 1.0,
) -> Iterator[str]:
    """
    User messages written by the target itself, one per starter; those without an end are left out.

    The target continues its own chat template from where a user's message begins. A starter is the
    beginning of the message and may be empty.

    Raises:
        `ValueError`: the chat template has no place for a user's message.
    """
    marker = "\N{OBJECT REPLACEMENT CHARACTER}"
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, return_dict=False
    )
    head, found, _ = rendered.partition(marker)
    if not found:
        raise ValueError(
            "The chat template does not render a user's message; give prompts instead."
        )
    prompts = [
        tokenizer(head + starter, add_special_tokens=False)["input_ids"] for starter in starters
    ]
    options = SamplingOptions(temperature, top_p=0.95, max_new_tokens=max_new_tokens)
    for starter, answer in zip(
        starters, answer_batch(target, tokenizer, prompts, options), strict=True
    ):
        if answer.finish_reason == "stop":
            text = (starter + tokenizer.decode(answer.token_ids, skip_special_tokens=True)).strip()
            if text:
                yield text
