"""The Python door: generate, chat, stream, stop strings and aborts, on a tiny model that writes bytes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest

import pytest

from shardwise import LLM, SamplingParams
from tests.tiny import save_text_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = save_text_model(tmp_path_factory.mktemp("model"))
    with LLM(path, threads=1, kv_tokens=2048) as llm:
        yield llm


LONG = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True)


def test_one_or_many_prompts_of_text_or_ids(llm: LLM) -> None:
    """Guards the shapes that a caller may pass, and the order of what comes back."""
    texts = ["one", "two, three", "four"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    many = llm.generate(texts, LONG)
    assert [output.index for output in many] == [0, 1, 2]
    assert [output.token_ids for output in llm.generate(ids, LONG)] == [output.token_ids for output in many]
    assert llm.generate("one", LONG)[0].token_ids == many[0].token_ids
    assert llm.generate(ids[1], LONG)[0].token_ids == many[1].token_ids
    assert llm.generate([], LONG) == []
    each = [SamplingParams(max_tokens=length) for length in (1, 2, 3)]
    assert [len(output.token_ids) for output in llm.generate(texts, each)] == [1, 2, 3]
    with pytest.raises(ValueError, match="3 prompts need one SamplingParams or 3, not 2"):
        llm.generate(texts, each[:2])


def test_a_bad_prompt_starts_nothing(llm: LLM) -> None:
    """Guards against half a batch being run when one of its prompts can't be."""
    with pytest.raises(ValueError, match="prompt 1: "):
        llm.generate(["fine", "", "fine too"], LONG)
    assert not llm._replicas.has_work


def test_stream_equals_generate(llm: LLM) -> None:
    """C23, C26, C32: streamed pieces join to the text, without half characters unless they are real."""
    for seed in range(6):
        params = SamplingParams(max_tokens=40, temperature=1.5, seed=seed, stop=("zzzz",))
        whole = llm.generate("héllo ✨", params)[0]
        pieces = list(llm.stream("héllo ✨", params))
        assert "".join(piece.text for piece in pieces) == whole.text
        assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1].finish_reason == whole.finish_reason


def test_stop_string_over_several_tokens(llm: LLM) -> None:
    """C23: a stop string of several tokens ends the text before it, streamed or not, and nothing of it leaks."""
    text = llm.generate("tell me", LONG)[0].text
    stop = text[10:14]
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True, stop=(stop,))
    output = llm.generate("tell me", params)[0]
    assert output.finish_reason == "stop"
    assert output.text == text[: text.index(stop)]
    shown = ""
    for piece in llm.stream("tell me", params):
        shown += piece.text
        assert text.startswith(shown)
        assert stop not in shown
    assert shown == output.text


def test_stop_token_is_not_text(llm: LLM) -> None:
    """Guards what is returned at a stop token: its id, but not its text."""
    free = llm.generate("tell me", LONG)[0]
    token = free.token_ids[7]
    first = free.token_ids.index(token)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True, stop_token_ids=(token,))
    output = llm.generate("tell me", params)[0]
    assert output.finish_reason == "stop"
    assert output.token_ids == free.token_ids[: first + 1]
    assert output.text == llm.tokenizer.decode(free.token_ids[:first])


def test_exactly_max_tokens(llm: LLM) -> None:
    """C28, C37: never a token more than asked for, and a huge wish ends at the context."""
    assert [len(llm.generate("x", SamplingParams(max_tokens=n, ignore_eos=True))[0].token_ids) for n in (1, 7)] == [
        1,
        7,
    ]
    output = llm.generate("x", SamplingParams(max_tokens=10**9, ignore_eos=True))[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == llm.plan.max_model_len - 1


def test_chat_uses_the_template_once(llm: LLM) -> None:
    """C38, C39: the template's special tokens are ids, not text, come once, and its refusals carry its message."""
    (output,) = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=2))
    assert output.prompt == "<s>user: hi</s><s>assistant:"
    assert output.prompt_token_ids.count(257) == 2
    assert output.prompt_token_ids[0] == 257
    with pytest.raises(ValueError, match="no system role here"):
        llm.chat([{"role": "system", "content": "hi"}])
    two = llm.chat([[{"role": "user", "content": text}] for text in ("a", "b")], SamplingParams(max_tokens=2))
    assert [answer.index for answer in two] == [0, 1]


def test_end_tokens_are_a_union(llm: LLM) -> None:
    """C58: the model's, its generation config's and the tokenizer's end tokens all end a request."""
    assert llm.tokenizer.eos == {258}
    assert llm.eos == {258} | llm.source.eos


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    """Guards against a request that goes on computing when nobody listens any more."""
    stream = llm.stream("go on", LONG)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm._replicas.has_work
    (engine,) = llm._replicas.engines
    assert engine.scheduler.num_running == 0
    assert llm.generate("one", LONG)[0].token_ids == llm.generate("one", LONG)[0].token_ids


def test_a_stream_that_nobody_reads_is_dropped(llm: LLM) -> None:
    """Guards against a request that runs on, and whose pieces are kept, for a stream that was never advanced."""
    stream = llm.stream("go on", LONG)
    assert llm._replicas.has_work
    del stream
    assert not llm._replicas.has_work
    assert (llm._open, llm._inbox, llm._parts) == ({}, {}, {})
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.stream("", LONG)


def test_unseeded_requests_differ(llm: LLM) -> None:
    """Guards against a fixed hidden seed: two unseeded samples of 40 tokens are not the same."""
    params = SamplingParams(max_tokens=40, temperature=2.0, ignore_eos=True)
    first, second = llm.generate(["same", "same"], params)
    assert first.token_ids != second.token_ids


def test_streams_side_by_side(llm: LLM) -> None:
    """Guards requests that are read in turn: each gets its own pieces, none is lost."""
    alone = [llm.generate(text, LONG)[0].text for text in ("left", "right")]
    streams = [llm.stream(text, LONG) for text in ("left", "right")]
    texts = ["", ""]
    for pair in zip_longest(*streams):  # a step whose text is still uncertain brings no piece
        for index, piece in enumerate(pair):
            texts[index] += piece.text if piece is not None else ""
    assert texts == alone


def test_prefix_hits_change_nothing(llm: LLM) -> None:
    """Guards the prefix cache end to end: the second time a long prompt is answered the same, from cached blocks."""
    prompt = "A long beginning that fills several blocks of the cache. " * 2
    first = llm.generate(prompt, LONG)[0]
    (engine,) = llm._replicas.engines
    assert engine.scheduler.cached_tokens(tuple(first.prompt_token_ids)) >= 96
    assert llm.generate(prompt, LONG)[0].token_ids == first.token_ids
