"""Tokens: the documents a measurement reads, as one tensor of fixed length.

A measurement averages over documents at each position, so every row of the tensor is one document and every row is
equally long: a document gives its first `length` tokens, shorter documents are skipped (and counted), nothing is
padded. `pack=True` joins all documents (an end-of-text token between them where the tokenizer has one) and cuts the
stream into rows instead. One plain text file is one document; it is always cut into consecutive rows unless
`separator` says where its documents end.

BOS policy (recorded by `Tokens.describe`): `bos=True` puts the tokenizer's beginning-of-sequence token first in every
row, `bos=False` never does, and `bos=None` does what the model's tokenizer does by itself when it is asked to encode
a text with its special tokens (a model whose adapter knows better says so in `prepends_bos`). The BOS token counts as
one of the `length` tokens. No other special token is ever added.

The order of documents is a permutation drawn from `seed`; from a streamed data set it is `datasets`' own buffered
shuffle with that seed. The same arguments always give the same tokens.

This module knows no model: `model` is anything with `tokenizer`, `vocab_size` and `context`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from posattn.errors import DataError, InputError
from posattn.progress import reached

LENGTH = 256
SAMPLES = 64
_SHUFFLE_BUFFER = 1000
_TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}


class TokenBatch(NamedTuple):
    """A batch to feed to a model: `model(*batch)`. `mask` is None when every position is a real token."""

    tokens: Int[Tensor, "b n"]
    mask: Bool[Tensor, "b n"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Documents as token ids [M,N]; iterating gives `TokenBatch`es of at most `batch_size` rows.

    `mask` [M,N] is True at real tokens, or None when there is no padding. `facts` says where the tokens came from.
    """

    tokens: Int[Tensor, "m n"]
    mask: Bool[Tensor, "m n"] | None = None
    batch_size: int = 8
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def documents(self) -> int:
        """How many rows there are."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """How many positions a row has, padding included."""
        return self.tokens.shape[1]

    def __len__(self) -> int:
        return -(-self.documents // self.batch_size)

    def __iter__(self) -> Iterator[TokenBatch]:
        return self.batches()

    def batches(self, batch_size: int | None = None, start: int = 0) -> Iterator[TokenBatch]:
        """Batches of `batch_size` rows from row `start` on; the last may be short."""
        step = batch_size or self.batch_size
        for first in range(start, self.documents, step):
            reached(first, self.documents, "document")
            rows = slice(first, first + step)
            yield TokenBatch(self.tokens[rows], None if self.mask is None else self.mask[rows])
        reached(self.documents, self.documents, "document")

    def part(self, rows: slice) -> Tokens:
        """Some of the documents, with the facts of all."""
        mask = None if self.mask is None else self.mask[rows]
        return dataclasses.replace(self, tokens=self.tokens[rows], mask=mask)

    def fingerprint(self) -> str:
        """SHA-256 over shape, ids and mask: equal exactly when the measured input is equal."""
        digest = hashlib.sha256(repr(tuple(self.tokens.shape)).encode())
        digest.update(self.tokens.cpu().contiguous().numpy().tobytes())
        if self.mask is not None and not bool(self.mask.all()):
            digest.update(self.mask.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def describe(self) -> dict[str, Any]:
        """Provenance as JSON values: source, documents, skipped, asked for, length, BOS policy, seed, fingerprint."""
        return {
            **self.facts,
            "documents": self.documents,
            "length": self.length,
            "padded": self.mask is not None,
            "fingerprint": self.fingerprint(),
        }


def load_tokens(
    source: str | os.PathLike[str] | Tensor | Tokens,
    model: Any,
    length: int | None = None,
    samples: int | None = None,
    batch_size: int = 8,
    bos: bool | None = None,
    seed: int = 0,
    *,
    mask: Bool[Tensor, "m n"] | None = None,
    field: str = "text",
    separator: str | None = None,
    pack: bool = False,
    split: str = "train",
    subset: str | None = None,
) -> Tokens:
    """Read documents and turn them into rows of `length` tokens.

    Args:
        source: `"bundled:python-docs"` (CPython's language topics, one topic one document); a text file; a `.jsonl`
            file; a `.parquet`, `.arrow` or `.csv` file; `"hf:name"`, a data set read in streaming; or token ids [M,N].
        model: whose tokenizer, vocabulary and context apply.
        length: tokens per row; 256 when None, and for a tensor its own width.
        samples: at most so many rows; 64 when None, and for a tensor all of them.
        bos: see the module docstring. A tensor is taken as it is: `bos=True` is refused.
        mask: True at real tokens, for a tensor that holds padding.
        field: the column or key that holds the text.
        separator: what ends a document in a plain text file; None: the file is one document, cut into rows.
        pack: join the documents and cut the stream into rows.
        split, subset: which part of an `hf:` data set.

    Raises:
        InputError: an argument is out of range, or `length` exceeds the model's context.
        DataError: nothing to read: missing file, empty text, every document too short, ids outside the vocabulary,
            text without a tokenizer.
    """
    for name, value in (("length", length), ("samples", samples), ("batch_size", batch_size)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    if isinstance(source, Tokens):
        return source
    if isinstance(source, Tensor):
        return _from_tensor(source, model, length, samples, batch_size, bos, mask)
    if mask is not None:
        raise InputError("a mask goes with a tensor of token ids; documents read from text are not padded")

    length = LENGTH if length is None else length
    samples = SAMPLES if samples is None else samples
    _check_context(length, model)
    tokenizer = _tokenizer(model, source)
    first, policy = _bos(tokenizer, model, bos)
    reader = _open(str(source), field, separator, split, subset, seed)
    end = getattr(tokenizer, "eos_token_id", None)
    rows, skipped, read = _rows(
        reader.documents, tokenizer, length, samples, first, end, pack=pack or reader.one, cut_only=reader.one
    )
    if not rows:
        if read == 0:
            raise DataError(f"{source} holds no text: nothing to measure")
        what = "the text is" if reader.one or pack else f"all {read} documents are"
        raise DataError(f"{source}: {what} shorter than the length of {length} tokens; ask for a smaller length")
    tokens = torch.tensor(rows, dtype=torch.long)
    _check_known(tokens, model, tokenizer, str(source))
    _check_vocabulary(tokens, model, f"{source}, as its tokenizer gives it,")
    facts = {
        "source": reader.label,
        "samples_asked": samples,
        "documents_read": read,
        "skipped_too_short": skipped,
        "layout": "rows of one text" if reader.one else "packed" if pack else "one document a row",
        "bos": policy,
        "bos_token_id": first,
        "seed": seed,
        **({} if reader.field is None else {"field": reader.field}),
    }
    return Tokens(tokens, None, batch_size, facts)


def _from_tensor(
    ids: Tensor,
    model: Any,
    length: int | None,
    samples: int | None,
    batch_size: int,
    bos: bool | None,
    mask: Tensor | None,
) -> Tokens:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise InputError(f"token ids must be integers, got {ids.dtype}")
    ids = ids.detach().long()
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2:
        raise InputError(f"token ids must have shape [documents, length], got {list(ids.shape)}")
    if bos:
        raise InputError("bos=True with a tensor: the ids are taken as they are; put the BOS token in yourself")
    if ids.numel() == 0:
        raise DataError(f"the tensor of token ids is empty (shape {list(ids.shape)}): nothing to measure")
    if length is not None and ids.shape[1] < length:
        raise DataError(f"the rows hold {ids.shape[1]} tokens, shorter than the length of {length}")
    if mask is not None:
        mask = mask.detach().bool()
        mask = mask[None] if mask.dim() == 1 else mask
        if mask.shape != ids.shape:
            raise InputError(f"mask {list(mask.shape)} does not fit the token ids {list(ids.shape)}")
        if not bool(mask.any(-1).all()):
            raise DataError("the mask leaves some documents without a single real token")
    ids, mask = ids[:samples, :length], None if mask is None else mask[:samples, :length]
    longest = ids.shape[1] if mask is None else int(mask.sum(-1).max())
    _check_context(longest, model)
    _check_vocabulary(ids if mask is None else ids[mask], model, "the tensor of token ids")
    facts = {"source": "tensor", "bos": "as given", "skipped_too_short": 0}
    return Tokens(ids, mask, batch_size, facts)


# ---- the model's facts -------------------------------------------------------------------------------------------


def _fact(model: Any, *names: str) -> Any:
    """The first of `names` that the model or its config has: a live TransformerLens object keeps them in `cfg`."""
    for holder in (model, getattr(model, "cfg", None)):
        for name in names:
            value = getattr(holder, name, None) if holder is not None else None
            if value is not None:
                return value
    return None


def _check_context(length: int, model: Any) -> None:
    context = _fact(model, "context", "n_ctx")
    if isinstance(context, int) and length > context:
        raise InputError(f"length {length} is beyond the model's context of {context} tokens")


def _check_vocabulary(ids: Tensor, model: Any, what: str) -> None:
    size = _fact(model, "vocab_size", "d_vocab")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or (isinstance(size, int) and high >= size):
        wrong = low if low < 0 else high
        raise DataError(f"{what} holds token id {wrong}, outside the model's vocabulary of {size}")


def _check_known(ids: Tensor, model: Any, tokenizer: Any, source: str) -> None:
    """Refuse words that the model has no token for: the tokenizer of a task puts them beyond the vocabulary."""
    size, unknown = _fact(model, "vocab_size", "d_vocab"), getattr(tokenizer, "unk_token_id", None)
    if isinstance(size, int) and isinstance(unknown, int) and unknown >= size and bool((ids == unknown).any()):
        raise DataError(
            f"{source} holds words that the model has no token for. A model that was trained on a task reads samples "
            "of that task: leave out --text, or give it a text in the task's tokens"
        )


def _tokenizer(model: Any, source: object) -> Any:
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise DataError(
            f"the model has no tokenizer, so {source} cannot be read as text: put the tokenizer's files into the "
            "model's folder (in Python a tensor of token ids does without)"
        )
    return tokenizer


def _bos(tokenizer: Any, model: Any, bos: bool | None) -> tuple[int | None, str]:
    """The token to put first (None: none), and the policy in words."""
    token = getattr(tokenizer, "bos_token_id", None)
    if bos is True:
        if token is None:
            raise InputError("bos=True, but the model's tokenizer has no BOS token")
        return token, "added (asked for)"
    if bos is False:
        return None, "not added (asked for)"
    if token is None:
        return None, "not added (the tokenizer has no BOS token)"
    known = getattr(model, "prepends_bos", None)
    if known is None:
        ids = tokenizer("a")["input_ids"]
        known = bool(ids) and ids[0] == token
    return (token, "added (as the tokenizer does)") if known else (None, "not added (the tokenizer does not)")


# ---- reading documents -------------------------------------------------------------------------------------------


class _Reader(NamedTuple):
    documents: Iterable[str]
    label: str
    field: str | None = None
    one: bool = False  # one long text, to be cut into rows


def check_source(source: str) -> None:
    """Refuse a source of text that cannot be read, as far as that shows without reading it.

    Raises:
        DataError: a missing or empty file, a folder, a built-in text or a data set without a (known) name.
    """
    if source.startswith("bundled:"):
        if source != "bundled:python-docs":
            raise DataError(f"unknown source {source}: the built-in text is bundled:python-docs")
        return
    if source.startswith("hf:"):
        if not source[3:].strip(" /"):
            raise DataError(f"{source!r} names no data set: write hf: and its name on the hub, as hf:owner/name")
        return
    if not source.strip():
        raise DataError("the source of text has no name: give a file, hf:owner/name, or bundled:python-docs")
    path = Path(source)
    if path.is_dir():
        raise DataError(f"{source} is a folder: name a text, .jsonl, .parquet, .arrow or .csv file")
    if not path.is_file():
        raise DataError(
            f"no such file: {source} (a data set is written hf:NAME, the built-in text bundled:python-docs)"
        )
    if path.stat().st_size == 0:
        raise DataError(f"{source} is empty: nothing to measure")


def _open(source: str, field: str, separator: str | None, split: str, subset: str | None, seed: int) -> _Reader:
    check_source(source)
    if source.startswith("bundled:"):
        return _bundled(source, seed)
    if source.startswith("hf:"):
        return _streamed(source, source[3:], {"name": subset}, split, field, seed)
    path = Path(source)
    suffix = path.suffix.lower()
    if suffix in (".jsonl", ".ndjson"):
        return _Reader(_json_lines(path, field, seed), source, field)
    if suffix in _TABLES:
        return _streamed(source, _TABLES[suffix], {"data_files": str(path)}, "train", field, seed)
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise _not_utf8(source, error) from error
    if not text.strip():
        raise DataError(f"{source} holds no text: nothing to measure")
    if separator is None:
        return _Reader([text], source, one=True)
    return _Reader(_shuffled([part for part in text.split(separator) if part.strip()], seed), source)


def _bundled(source: str, seed: int) -> _Reader:
    import platform
    from pydoc_data.topics import topics

    documents = [topics[name] for name in sorted(topics)]
    return _Reader(_shuffled(documents, seed), f"{source} (CPython {platform.python_version()})")


def _order(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def _shuffled(documents: list[str], seed: int) -> list[str]:
    return [documents[i] for i in _order(len(documents), seed)]


def _json_lines(path: Path, field: str, seed: int) -> Iterator[str]:
    """Documents of a JSONL file in shuffled order; only the lines' offsets are kept in memory."""
    starts = []
    with open(path, "rb") as file:
        position = 0
        for line in file:
            if line.strip():
                starts.append((position, len(starts) + 1))
            position += len(line)
    with open(path, "rb") as file:
        for index in _order(len(starts), seed):
            position, number = starts[index]
            file.seek(position)
            try:
                record = json.loads(file.readline())
            except UnicodeDecodeError as error:
                raise _not_utf8(f"{path}, record {number}", error) from error
            except ValueError as error:
                raise DataError(f"{path}, record {number} is not JSON: {error}") from error
            yield _text(record, field, f"{path}, record {number}")


def _not_utf8(what: str, error: Exception) -> DataError:
    if isinstance(error, UnicodeDecodeError):
        return DataError(f"{what} is not UTF-8 (byte {error.start}): save it as UTF-8")
    return DataError(f"{what} cannot be read: {getattr(error, 'strerror', None) or error}")


def _text(record: Any, field: str, where: str) -> str:
    if not isinstance(record, dict) or field not in record:
        has = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise DataError(f"{where} has no field {field!r} (it has: {has}): say which holds the text, with --field NAME")
    value = record[field]
    if not isinstance(value, str):
        raise DataError(f"{where}: field {field!r} holds {type(value).__name__}, not text")
    return value


def _streamed(label: str, name: str, options: dict[str, Any], split: str, field: str, seed: int) -> _Reader:
    import datasets

    try:
        with _quiet(datasets.logging):
            stream = datasets.load_dataset(name, split=split, streaming=True, **options)
            rows = iter(stream.shuffle(seed=seed, buffer_size=_SHUFFLE_BUFFER))
            head = next(rows, None)
    except Exception as error:  # datasets raises many kinds, from many libraries: the user needs one line
        if (encoding := _encoding_error(error)) is not None:
            raise _not_utf8(label, encoding) from error
        reason = str(error).strip().splitlines()
        raise DataError(f"cannot read {label}: {reason[0] if reason else type(error).__name__}") from error
    if head is None:
        raise DataError(f"{label} holds no documents")
    records = itertools.chain([head], rows)
    return _Reader((_text(row, field, f"a row of {label}") for row in records), label, field)


def _encoding_error(error: BaseException | None) -> UnicodeDecodeError | None:
    """The one that is behind this error, if one is."""
    while error is not None and not isinstance(error, UnicodeDecodeError):
        error = error.__cause__ or error.__context__
    return error


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep a library from logging what we are about to raise."""
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _rows(
    documents: Iterable[str],
    tokenizer: Any,
    length: int,
    samples: int,
    first: int | None,
    end: int | None,
    *,
    pack: bool,
    cut_only: bool,
) -> tuple[list[list[int]], int, int]:
    """Rows of ids, how many documents were too short, and how many non-empty ones were read."""
    head = [] if first is None else [first]
    body = length - len(head)
    rows: list[list[int]] = []
    skipped = read = 0
    stream: list[int] = []
    for text in documents:
        if len(rows) >= samples:
            break
        if not text.strip():
            continue
        read += 1
        # verbose=False: a long document is cut below, the tokenizer need not warn of its length
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not pack:
            if len(ids) < body:
                skipped += 1
            else:
                rows.append(head + ids[:body])
            continue
        stream.extend(ids)
        if end is not None and not cut_only:
            stream.append(end)
        whole = len(stream) // body if body else samples
        taken = min(whole, samples - len(rows))
        rows.extend(head + stream[i * body : (i + 1) * body] for i in range(taken))
        stream = stream[taken * body :]
    return rows, skipped, read
