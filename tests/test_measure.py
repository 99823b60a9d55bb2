"""The measuring loop: checkpoints, kill -9 and resume, what is refused, memory."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posattn.errors import CheckpointError, InputError, NothingMeasuredError, SelfCheckError
from posattn.probes.measure import Measurement, measure
from posattn.probes.mixing import MixingProbe
from posattn.results import read_tensors, write_tensors
from posattn.tokens import Tokens, load_tokens
from tests.test_probes import _assert_same, _run, _tokens
from tests.toy import Toy


def _measure(model, tokens, **options):
    return measure(model, tokens, progress=False, **{"check": False, **options})


def test_measure_is_the_session_over_all_batches() -> None:
    model = Toy(sinks=True)
    tokens = load_tokens(_tokens(7, 6), model, batch_size=3)
    for per_head in (False, True):
        result = _measure(model, tokens, per_head=per_head)
        _assert_same(result, _run(model, [tokens.tokens], per_head))
        assert result.per_head == per_head
    facts = result.provenance
    assert facts["model"] == "toy"
    assert facts["tokens"]["documents"] == 7
    assert facts["kernel_rows"].startswith("renormalised")
    assert facts["versions"]["torch"]


def test_the_first_documents_are_checked() -> None:
    class Lying(Toy):
        def observe(self, points, observer, layers=None):
            def show(layer, record, batch):
                wrong = {"attn_out": record["attn_out"] * 1.5} if "attn_out" in record and layer == 1 else {}
                observer(layer, {**record, **wrong}, batch)

            return super().observe(points, show, layers)

    result = measure(Toy(), _tokens(3, 6), progress=False)
    assert result.provenance["self_check"]
    with pytest.raises(SelfCheckError, match="layer 1"):
        measure(Lying(), _tokens(3, 6), progress=False)
    assert measure(Lying(), _tokens(3, 6), progress=False, check=False).provenance["self_check"] is None


def test_padded_tokens_are_measured_like_unpadded_ones() -> None:
    model = Toy()
    ids, mask = _tokens(4, 8), torch.ones(4, 8, dtype=torch.bool)
    mask[1, :3] = mask[2, 6:] = False
    result = _measure(model, load_tokens(ids, model, mask=mask, batch_size=3))
    _assert_same(result, _run(model, [row[m][None] for row, m in zip(ids, mask, strict=True)]))


@given(documents=st.integers(1, 7), first=st.integers(1, 3), second=st.integers(1, 3), stop=st.integers(1, 6))
def test_a_run_can_be_continued_with_any_batch_size(tmp_path_factory, documents, first, second, stop) -> None:
    path = tmp_path_factory.mktemp("c") / "run.safetensors"
    model = Toy()
    model.module.double()  # batches of another size round differently in the model itself
    ids = _tokens(documents, 5)

    class Enough(Exception):
        pass

    class Stopping(MixingProbe):
        name = "stopping"
        seen = 0

        def update(self, layer, record, batch):
            super().update(layer, record, batch)
            self.seen += layer == 0
            if self.seen > stop:
                raise Enough

    try:
        _measure(
            model, Tokens(ids, batch_size=first), checkpoint=path, checkpoint_every=1, probes=[probe := Stopping()]
        )
    except Enough:
        assert path.exists()
    again = Stopping()
    again.seen = -100
    result = _measure(
        model, Tokens(ids, batch_size=second), checkpoint=path, checkpoint_every=1, resume=True, probes=[again]
    )
    _assert_same(result, _run(model, [ids]))
    assert again.documents == documents
    assert probe.documents <= documents


KILLED = """
import sys, time, torch
from posattn.probes.measure import measure
from posattn.probes.mixing import MixingProbe
from posattn.tokens import Tokens
from tests.test_probes import _tokens
from tests.toy import Toy

torch.set_num_threads(1)

class Slow(MixingProbe):
    name = "slow"
    def update(self, layer, record, batch):
        super().update(layer, record, batch)
        time.sleep(float(sys.argv[2]))

measure(Toy(), Tokens(_tokens(40, 6), batch_size=2), checkpoint=sys.argv[1], checkpoint_every=1, resume=True,
        progress=False, check=False, probes=[Slow()])
"""


@pytest.mark.slow
def test_kill_and_resume_gives_the_uninterrupted_result(tmp_path) -> None:
    path, whole = tmp_path / "run.safetensors", tmp_path / "whole.safetensors"

    def start(target: Path, pause: float) -> subprocess.Popen:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        folder = Path(__file__).parent.parent
        return subprocess.Popen([sys.executable, "-c", KILLED, str(target), str(pause)], cwd=folder, env=environment)

    for _ in range(2):
        process = start(path, 0.05)
        before = path.stat().st_mtime_ns if path.exists() else 0
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (path.exists() and path.stat().st_mtime_ns > before):
            time.sleep(0.01)
        time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL  # it was killed in the middle, not after the end
    assert 0 < read_tensors(path)[1]["documents"] < 40
    assert start(path, 0.0).wait(120) == 0
    measure(Toy(), Tokens(_tokens(40, 6), batch_size=2), checkpoint=whole, progress=False, check=False, probes=[Slow()])
    (tensors, header), (expected, expected_header) = read_tensors(path), read_tensors(whole)
    assert header == expected_header
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


class Slow(MixingProbe):
    name = "slow"


def test_a_foreign_checkpoint_is_refused(tmp_path) -> None:
    model, tokens = Toy(), load_tokens(_tokens(4, 6), Toy(), batch_size=2)
    path = tmp_path / "run.safetensors"
    result = _measure(model, tokens, checkpoint=path)
    with pytest.raises(InputError, match="resume=True"):
        _measure(model, tokens, checkpoint=path)
    with pytest.raises(InputError, match="is a folder"):
        _measure(model, tokens, checkpoint=tmp_path)
    _assert_same(_measure(model, tokens, checkpoint=path, resume=True), result, 0.0)  # nothing left to do

    other = load_tokens(_tokens(4, 6, seed=5), model)
    for options, words in (
        ({"model": Toy(seed=1)}, "of another model"),
        ({"tokens": other}, "on other documents"),
        ({"per_head": True}, "with other settings"),
        ({"probes": [Extra()]}, "with other settings"),
    ):
        run = {"model": model, "tokens": tokens, **options}
        with pytest.raises(CheckpointError, match=words):
            _measure(checkpoint=path, resume=True, **run)

    shorter = load_tokens(_tokens(3, 4), model)
    for options, words in (
        ({"tokens": shorter}, r"on other documents \(documents 4, not 3; length 6, not 4\): remove it"),
        ({"model": Toy(seed=1)}, r"of another model \(their weights differ\)"),
        ({"per_head": True}, r"with other settings \(kernel: per_head False, not True\)"),
        ({"probes": [Extra()]}, r"with other settings \(extra none, not "),
    ):
        run = {"model": model, "tokens": tokens, **options}
        with pytest.raises(CheckpointError, match=words) as caught:
            _measure(checkpoint=path, resume=True, **run)
        assert "fingerprint" not in str(caught.value)

    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CheckpointError, match="truncated"):
        _measure(model, tokens, checkpoint=path, resume=True)
    result.save(path)
    with pytest.raises(CheckpointError, match="Measurement, not a checkpoint"):
        _measure(model, tokens, checkpoint=path, resume=True)
    write_tensors(path, {}, {})
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        _measure(model, tokens, checkpoint=path, resume=True)


class Extra(MixingProbe):
    name = "extra"


def test_extra_probes_run_along() -> None:
    extra, model = Extra(), Toy()
    result = _measure(model, _tokens(5, 6), probes=[extra])
    torch.testing.assert_close(extra.result(model).token, result.mixing.token)


def test_wrong_use_is_refused() -> None:
    model = Toy()
    with pytest.raises(InputError, match="needs a checkpoint"):
        _measure(model, _tokens(2, 4), resume=True)
    with pytest.raises(InputError, match="checkpoint_every"):
        _measure(model, _tokens(2, 4), checkpoint_every=0)
    with pytest.raises(NothingMeasuredError, match="no samples left"):
        _measure(model, Tokens(_tokens(1, 4)[:0]))


def test_too_few_documents_are_mentioned() -> None:
    tokens = Tokens(_tokens(2, 4), facts={"samples_asked": 5, "skipped_too_short": 1})
    assert "Only 2 of the 5 documents asked for were found (1 was too short)." in _measure(Toy(), tokens).warnings


def test_warnings_count_one_as_one() -> None:
    model = Toy(layers=1)
    with torch.no_grad():
        model.module.positions[0] += 300.0
    one = Tokens(_tokens(1, 4), facts={"samples_asked": 2, "skipped_too_short": 0})
    said = list(_measure(model, one).warnings)
    assert "Only 1 of the 2 documents asked for was found." in said
    assert any(line.startswith("In 1 of 1 layer one position holds") for line in said)
    said += list(_run(model, [_tokens(2, 4), _tokens(1, 8)]).warnings)
    assert any("3 reach the first position, 1 the last" in line for line in said)
    wrong = [line for line in said if re.search(r"\b1 (?:layers|documents|positions|reach|were)\b", line)]
    assert wrong == []


def test_progress_goes_to_stderr(capsys) -> None:
    measure(Toy(), _tokens(2, 4), check=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "measuring toy: 2 of 2 documents" in captured.err


def test_memory_does_not_grow_with_the_number_of_batches(tmp_path) -> None:
    path = tmp_path / "run.safetensors"
    sizes = []
    for documents in (4, 32):
        _measure(Toy(), load_tokens(_tokens(documents, 6), Toy(), batch_size=2), checkpoint=path, checkpoint_every=1)
        sizes.append(path.stat().st_size)
        path.unlink()
    assert abs(sizes[1] - sizes[0]) < 16  # only the number of documents has more digits


def test_a_measurement_is_loaded_as_itself(tmp_path) -> None:
    result = _measure(Toy(), _tokens(2, 4))
    assert isinstance(Measurement.load(result.save(tmp_path / "m.safetensors")), Measurement)
