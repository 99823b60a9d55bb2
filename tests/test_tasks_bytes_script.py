from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripts import load_script

train_bytes = load_script("scripts/train_bytes.py")


@settings(deadline=None, max_examples=8)
@given(st.binary(max_size=6))
def test_ngram_probabilities_sum_to_one(context):
    train = [b"the cat sat on the mat", b"a cat and a hat", b"the end"]
    before = train_bytes.ngram_bits(train, [context]) * len(context) if context else 0.0
    whole = [train_bytes.ngram_bits(train, [context + bytes([b])]) * (len(context) + 1) for b in range(256)]
    assert np.exp2(before - np.array(whole)).sum() == pytest.approx(1.0, abs=1e-9)


def test_ngram_learns_and_backs_off():
    train = [b"abcabcabcabcabcabc" * 20]
    seen, unseen = train_bytes.ngram_bits(train, [b"abcabcabc"]), train_bytes.ngram_bits(train, [b"zzzzzz"])
    assert seen < 2 < unseen < 20


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 90), context=st.sampled_from([8, 16]))
def test_windows_score_every_byte_once_in_order(size, context):
    data = bytes(range(size))
    scored = [t for tokens, count in train_bytes.windows([data], context) for t in tokens[len(tokens) - count :]]
    assert bytes(scored) == data
    assert all(len(tokens) <= context for tokens, _ in train_bytes.windows([data], context))


def test_held_out_text_is_not_trained_on():
    shared = "x" * 10 + "this paragraph of some length occurs in several documents of the text " * 2
    documents = [
        {"kind": "topic", "name": f"t{i}", "text": f"{shared}\n\nown words {i} " + f"{i} " * 200} for i in range(30)
    ]
    parts = train_bytes.split(documents)
    assert len(parts["test"]) == 6
    assert all(shared.encode() in d for d in parts["test"])
    assert not any(shared.encode() in d for d in parts["train"] + parts["valid"])
    assert parts["train"]


@settings(deadline=None, max_examples=30)
@given(st.text(max_size=40))
def test_tokenizer_is_bytes_and_round_trips(text):
    tokenizer = train_bytes.tokenizer(64)
    ids = tokenizer(text)["input_ids"]
    assert ids == [train_bytes.BOS, *text.encode()] or "<|bos|>" in text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text or "<|bos|>" in text
