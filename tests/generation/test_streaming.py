"""Every accepted token reaches the streamer once, in order, as it is accepted."""

import threading

import torch
from test_stopping import GAMMA, PROMPT, character_tokenizer, unstopped
from transformers import TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from tiny import make_drafter, make_scripted, make_target


class Recorder(BaseStreamer):
    """Keeps every value and whether the end was announced."""

    def __init__(self):
        self.values, self.has_ended = [], False

    def put(self, value):
        assert not self.has_ended
        self.values.append(value.clone())

    def end(self):
        assert not self.has_ended
        self.has_ended = True


def generate(streamer, num_right=GAMMA, assistant=True, **options):
    drafter = make_scripted(make_drafter(block_size=GAMMA), unstopped(), num_right)
    return make_target("qwen3").generate(
        PROMPT,
        max_new_tokens=24,
        do_sample=False,
        streamer=streamer,
        assistant_model=drafter if assistant else None,
        **options,
    )


def test_the_calls_are_those_of_plain_decoding():
    """B022, B030: same values and shapes, one token a call, nothing behind the stop token."""
    for eos in (None, int(unstopped()[0, 10])):
        plain = Recorder()
        expected = generate(plain, assistant=False, eos_token_id=eos)
        for num_right in range(GAMMA + 1):
            recorder = Recorder()
            output = generate(recorder, num_right, eos_token_id=eos)
            assert torch.equal(output, expected)
            assert recorder.has_ended
            assert len(recorder.values) == len(plain.values)
            for value, wanted in zip(recorder.values, plain.values, strict=True):
                assert torch.equal(value, wanted)


def test_tokens_arrive_while_generating():
    """B030: a round's tokens are out before the next draft."""
    recorder, counts = Recorder(), []
    drafter = make_scripted(make_drafter(block_size=GAMMA), unstopped(), 2)
    draft = drafter.draft

    def counting(*args, **kwargs):
        counts.append(len(recorder.values))
        return draft(*args, **kwargs)

    drafter.draft = counting
    make_target("qwen3").generate(
        PROMPT, max_new_tokens=14, do_sample=False, streamer=recorder, assistant_model=drafter
    )
    # The last token is left to the target alone, so there is nothing to draft for it.
    assert counts == [2, 5, 8, 11]


def test_text_streamers(capsys):
    """B030: the host's own streamers print and yield the text."""
    tokenizer = character_tokenizer()
    text = tokenizer.decode(unstopped()[0, 6:])
    generate(TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.strip() == text.strip()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    thread = threading.Thread(target=generate, args=(streamer,))
    thread.start()
    assert "".join(streamer) == text
    thread.join()


def test_custom_generate_streams_too():
    """The host hands no streamer to a callable, so the callable is made with it."""
    recorder = Recorder()
    drafter = make_scripted(make_drafter(block_size=GAMMA), unstopped(), 3)
    output = make_target("qwen3").generate(
        PROMPT,
        max_new_tokens=24,
        do_sample=False,
        custom_generate=drafter.custom_generate(streamer=recorder),
    )
    assert torch.equal(torch.cat(recorder.values), output[0, 6:])
    assert recorder.has_ended
