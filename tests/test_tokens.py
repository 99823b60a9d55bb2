"""Reading documents: every source, the rows it gives, and one line for everything that can be wrong."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posattn.errors import DataError, InputError, PosattnError
from posattn.tokens import Tokens, load_tokens
from tests.toy import ByteTokenizer, Toy


def _model(**options) -> Toy:
    return Toy(tokenizer=ByteTokenizer(**options))


def _jsonl(path, texts, field="text"):
    path.write_text("".join(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts)))
    return path


def _ids(text: str) -> list[int]:
    return list(ByteTokenizer()(text)["input_ids"])


TEXTS = ["first document here", "tiny", "the second one is longer", "x" * 30, "", "another document"]


def test_bundled_documents_are_topics() -> None:
    from pydoc_data.topics import topics

    tokens = load_tokens("bundled:python-docs", _model(), length=32, samples=10, batch_size=4)
    assert tokens.tokens.shape == (10, 32)
    assert tokens.mask is None
    heads = {tuple(_ids(text)[:32]) for text in topics.values()}
    assert {tuple(row) for row in tokens.tokens.tolist()} <= heads
    assert [len(batch.tokens) for batch in tokens] == [4, 4, 2]
    assert len(tokens) == 3
    facts = tokens.describe()
    assert facts["documents"] == 10
    assert facts["source"].startswith("bundled:python-docs (CPython 3.")
    assert json.loads(json.dumps(facts)) == facts


def test_the_seed_decides_the_documents() -> None:
    def load(seed):
        return load_tokens("bundled:python-docs", _model(), length=32, samples=5, seed=seed)

    assert torch.equal(load(0).tokens, load(0).tokens)
    assert load(0).fingerprint() == load(0).fingerprint() != load(1).fingerprint()


def test_short_documents_are_skipped_and_counted(tmp_path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", TEXTS)
    tokens = load_tokens(path, _model(), length=12, samples=10)
    assert sorted(map(tuple, tokens.tokens.tolist())) == sorted(
        tuple(_ids(text)[:12]) for text in TEXTS if len(text) >= 12
    )
    facts = tokens.describe()
    assert (facts["skipped_too_short"], facts["documents_read"], facts["samples_asked"]) == (1, 5, 10)


def test_jsonl_field(tmp_path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", TEXTS, "body")
    assert load_tokens(path, _model(), length=12, field="body").documents == 4
    with pytest.raises(DataError, match=r"record \d has no field 'text' \(it has: body, id\)"):
        load_tokens(path, _model(), length=12)
    with pytest.raises(DataError, match="field 'id' holds int"):
        load_tokens(path, _model(), length=12, field="id")


def test_a_text_file_is_cut_or_separated(tmp_path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("abcdefghij\n\nklmnopqrst\n\nuv")
    cut = load_tokens(path, _model(), length=7, samples=9)
    assert cut.tokens.flatten().tolist() == _ids(path.read_text())[:21]
    assert cut.describe()["layout"] == "rows of one text"
    parts = load_tokens(path, _model(), length=7, separator="\n\n")
    assert {tuple(row) for row in parts.tokens.tolist()} == {tuple(_ids("abcdefg")), tuple(_ids("klmnopq"))}


def test_packing_joins_documents_with_the_end_token(tmp_path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ["abc", "defg"])
    tokens = load_tokens(path, _model(), length=4, pack=True)
    streams = [[*_ids(a), 2, *_ids(b), 2] for a, b in (("abc", "defg"), ("defg", "abc"))]
    assert tokens.tokens.flatten().tolist() in [stream[:8] for stream in streams]
    assert tokens.describe()["layout"] == "packed"


@pytest.mark.parametrize(
    ("adds", "bos", "first", "policy"),
    [
        (False, None, None, "not added (the tokenizer does not)"),
        (True, None, 1, "added (as the tokenizer does)"),
        (True, False, None, "not added (asked for)"),
        (False, True, 1, "added (asked for)"),
    ],
)
@pytest.mark.parametrize("pack", [False, True])
def test_bos_policy(tmp_path, adds, bos, first, policy, pack) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ["abcdefgh"])
    tokens = load_tokens(path, _model(adds_bos=adds), length=4, bos=bos, pack=pack)
    expected = _ids("abcdefgh") if first is None else [1, *_ids("abcdefgh")]
    assert tokens.tokens[0].tolist() == expected[:4]
    assert tokens.describe()["bos"] == policy
    assert tokens.describe()["bos_token_id"] == first


def test_a_model_may_know_better_about_bos(tmp_path) -> None:
    model = _model(adds_bos=True)
    model.prepends_bos = False
    path = _jsonl(tmp_path / "a.jsonl", ["abcdefgh"])
    assert load_tokens(path, model, length=4).tokens[0].tolist() == _ids("abcd")


@pytest.mark.parametrize("kind", ["csv", "parquet", "arrow"])
def test_tables_are_streamed(tmp_path, kind) -> None:
    import datasets

    table = datasets.Dataset.from_dict({"text": [text for text in TEXTS if text]})
    path = tmp_path / f"a.{kind}"
    if kind == "arrow":
        import pyarrow as pa

        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.data.schema) as writer:
            writer.write_table(table.data.table)
    else:
        (table.to_csv if kind == "csv" else table.to_parquet)(str(path))
    tokens = load_tokens(path, _model(), length=12)
    assert sorted(map(tuple, tokens.tokens.tolist())) == sorted(
        tuple(_ids(text)[:12]) for text in TEXTS if len(text) >= 12
    )
    assert torch.equal(tokens.tokens, load_tokens(path, _model(), length=12).tokens)
    with pytest.raises(DataError, match="no field 'body'"):
        load_tokens(path, _model(), length=12, field="body")


def test_tensors_are_taken_as_they_are() -> None:
    ids = torch.arange(12).view(3, 4)
    tokens = load_tokens(ids, Toy())
    assert torch.equal(tokens.tokens, ids)
    assert torch.equal(load_tokens(ids, Toy(), length=2, samples=2).tokens, ids[:2, :2])
    assert torch.equal(load_tokens(ids[0].int(), Toy()).tokens, ids[:1])
    assert load_tokens(tokens, Toy()) is tokens
    mask = torch.tensor([[True, True, True, False]] * 3)
    padded = load_tokens(ids, Toy(), mask=mask, batch_size=2)
    assert padded.mask is not None
    assert [None if batch.mask is None else batch.mask.shape[0] for batch in padded] == [2, 1]
    assert padded.fingerprint() != tokens.fingerprint()


def _wrong_cases(folder):
    empty, blank, short = folder / "empty.txt", folder / "blank.txt", folder / "short.txt"
    empty.write_text("")
    blank.write_text("  \n\n ")
    short.write_text("abc")
    binary = folder / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00\x81")
    latin, latin_lines, latin_table = folder / "latin.txt", folder / "latin.jsonl", folder / "latin.csv"
    latin.write_bytes("Grüße".encode("latin-1"))
    latin_lines.write_bytes('{"text": "Grüße"}\n'.encode("latin-1"))
    latin_table.write_bytes("text\nGrüße\n".encode("latin-1"))
    shorts = _jsonl(folder / "shorts.jsonl", ["abc", "de"])
    blanks = folder / "blanks.jsonl"
    blanks.write_text("\n\n")
    broken = folder / "broken.jsonl"
    broken.write_text('{"text": "abc')
    listed = folder / "list.jsonl"
    listed.write_text("[1, 2]\n")
    table = folder / "broken.parquet"
    table.write_text("not a table")
    ids = torch.arange(8).view(2, 4)
    toy = _model()
    return {
        "missing": (folder / "no.txt", toy, {"length": 4}, DataError, "no such file"),
        "empty": (empty, toy, {"length": 4}, DataError, "is empty"),
        "blank": (blank, toy, {"length": 4}, DataError, "no text"),
        "blank jsonl": (blanks, toy, {"length": 4}, DataError, "no text"),
        "short": (short, toy, {"length": 16}, DataError, "shorter than the length of 16"),
        "all short": (shorts, toy, {"length": 16}, DataError, "all 2 documents are shorter"),
        "binary": (binary, toy, {"length": 4}, DataError, "is not UTF-8 .*save it as UTF-8"),
        "latin": (latin, toy, {"length": 4}, DataError, r"is not UTF-8 \(byte 2\): save it as UTF-8"),
        "latin lines": (latin_lines, toy, {"length": 4}, DataError, "record 1 is not UTF-8 .*save it as UTF-8"),
        "latin table": (latin_table, toy, {"length": 4}, DataError, "is not UTF-8 .*save it as UTF-8"),
        "field": (shorts, toy, {"length": 2, "field": "body"}, DataError, r"\(it has: text, id\): .*with --field NAME"),
        "broken": (broken, toy, {"length": 4}, DataError, "not JSON"),
        "no object": (listed, toy, {"length": 4}, DataError, "no field 'text'"),
        "broken table": (table, toy, {"length": 4}, DataError, "cannot read"),
        "folder": (folder, toy, {"length": 4}, DataError, "is a folder"),
        "bundled": ("bundled:poems", toy, {"length": 4}, DataError, "bundled:python-docs"),
        "context": ("bundled:python-docs", toy, {"length": 65}, InputError, "context of 64"),
        "tensor context": (torch.zeros(1, 65).long(), toy, {}, InputError, "context of 64"),
        "no samples": ("bundled:python-docs", toy, {"length": 4, "samples": 0}, InputError, "samples"),
        "length": ("bundled:python-docs", toy, {"length": 0}, InputError, "length"),
        "batch": (ids, toy, {"batch_size": 0}, InputError, "batch_size"),
        "vocabulary": (ids + 20, toy, {}, DataError, "token id 27, outside the model's vocabulary of 23"),
        "negative": (ids - 1, toy, {}, DataError, "token id -1"),
        "text vocabulary": (short, _model(vocab=120), {"length": 2}, DataError, "outside the model's vocabulary"),
        "no tokenizer": (
            short,
            Toy(),
            {"length": 4},
            DataError,
            "no tokenizer.*put the tokenizer's files into the model's folder",
        ),
        "no bos": (short, _model(bos=None), {"length": 2, "bos": True}, InputError, "no BOS token"),
        "floats": (ids.float(), toy, {}, InputError, "integers"),
        "dimensions": (ids[None], toy, {}, InputError, "shape"),
        "no rows": (ids[:0], toy, {}, DataError, "empty"),
        "narrow": (ids, toy, {"length": 5}, DataError, "shorter than the length of 5"),
        "tensor bos": (ids, toy, {"bos": True}, InputError, "bos=True"),
        "mask shape": (ids, toy, {"mask": torch.ones(2, 3).bool()}, InputError, "does not fit"),
        "mask empty": (ids, toy, {"mask": torch.zeros(2, 4).bool()}, DataError, "without a single real token"),
        "mask text": (short, toy, {"mask": torch.ones(1, 2).bool()}, InputError, "a tensor of token ids"),
        "hub": ("hf:nobody/nothing", toy, {"length": 4}, DataError, "cannot read hf:nobody/nothing"),
    }


def test_wrong_input_is_one_line(tmp_path, subtests) -> None:
    for name, (source, model, options, error, words) in _wrong_cases(tmp_path).items():
        with subtests.test(name):
            _check_refusal(source, model, options, error, words)


def _check_refusal(source, model, options, error, words) -> None:
    with pytest.raises(error, match=words) as caught:
        load_tokens(source, model, **options)
    assert isinstance(caught.value, PosattnError)
    assert "\n" not in str(caught.value)


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8),
    length=st.integers(1, 12),
    seed=st.integers(0, 5),
    bos=st.booleans(),
)
def test_rows_are_whole_documents_heads(tmp_path_factory, lengths, length, seed, bos) -> None:
    texts = [chr(97 + i) * n for i, n in enumerate(lengths)]
    path = _jsonl(tmp_path_factory.mktemp("t") / "a.jsonl", texts)
    need = max(length - bos, 1)
    fitting = [t for t in texts if len(t) >= length - bos and t]
    if not fitting:
        with pytest.raises(DataError):
            load_tokens(path, _model(), length=length, seed=seed, bos=bos)
        return
    tokens = load_tokens(path, _model(), length=length, seed=seed, bos=bos)
    assert isinstance(tokens, Tokens)
    head = [1] if bos else []
    assert sorted(tokens.tokens.tolist()) == sorted((head + _ids(t[:need]))[:length] for t in fitting)
