"""The probes against plain formulas on a toy model, and what must not change a result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posattn.errors import HookError, InputError, NothingMeasuredError
from posattn.probes.kernel import KernelProbe, Kernels
from posattn.probes.measure import Measurement, measurement
from posattn.probes.mixing import Mixing, MixingProbe
from posattn.probes.session import attach
from posattn.probes.statistics import Aligner, Moments, Sums
from tests.toy import Toy


def _tokens(documents: int, length: int, seed: int = 0, vocab: int = 23) -> torch.Tensor:
    return torch.randint(0, vocab, (documents, length), generator=torch.Generator().manual_seed(seed))


def _run(model, batches, per_head=False):
    with attach(model, MixingProbe(), KernelProbe(per_head)) as session, torch.no_grad():
        for batch in batches:
            model(*batch) if isinstance(batch, tuple) else model(batch)
    return measurement(session)


def _expected(model, documents):
    """λ and kernels document by document, in float64, from the formulas as written."""
    seen = []

    def observer(layer, record, batch):
        seen.append({"layer": layer, **{k: v.double() for k, v in record.items()}})

    out = []
    for document in documents:
        seen.clear()
        with model.observe(("resid_pre", "attn_out", "pattern"), observer), torch.no_grad():
            model(document[None])
        x = torch.stack([s["resid_pre"][0] for s in seen])
        a = torch.stack([s["attn_out"][0] for s in seen])
        position = a.norm(dim=-1) / (x.norm(dim=-1) + a.norm(dim=-1))
        size = (x.flatten(1).norm(dim=-1), a.flatten(1).norm(dim=-1))
        share = x.norm(dim=-1).square() / size[0].square()[:, None]
        out.append(
            {
                "position": position,
                "token": position.mean(-1),
                "frobenius": size[1] / (size[0] + size[1]),
                "largest": share.max(-1).values,
                "pattern": torch.stack([s["pattern"][0] for s in seen]),
            }
        )
    return {key: torch.stack([o[key] for o in out]) for key in out[0]}


def _assert_same(a: Measurement, b: Measurement, tolerance: float = 1e-6) -> None:
    for name in ("token", "frobenius", "per_position", "token_std", "frobenius_std", "largest_position_share"):
        torch.testing.assert_close(getattr(a.mixing, name), getattr(b.mixing, name), atol=tolerance, rtol=0)
    for name in ("kernels", "row_mass", "sink_mass", "counts"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), atol=tolerance, rtol=0)
    assert a.documents == b.documents


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_probes_give_the_formulas(per_head: bool, sinks: bool) -> None:
    model = Toy(sinks=sinks)
    tokens = _tokens(5, 9)
    result = _run(model, tokens.split(2), per_head)
    expected = _expected(model, tokens)
    torch.testing.assert_close(result.mixing.token, expected["token"].mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.token_std, expected["token"].std(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.frobenius, expected["frobenius"].mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.frobenius_std, expected["frobenius"].std(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.per_position, expected["position"].mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.largest_position_share, expected["largest"].mean(0), atol=1e-6, rtol=0)
    pattern = expected["pattern"].mean(0)
    missing = 1 - pattern.sum(-1).mean(-1)
    torch.testing.assert_close(result.sink_mass, missing if sinks else torch.zeros(3, 4).double(), atol=1e-6, rtol=0)
    pattern = pattern if per_head else pattern.mean(1)
    raw = result.kernels.double() * result.row_mass[..., None]
    torch.testing.assert_close(raw, pattern, atol=1e-6, rtol=0)
    torch.testing.assert_close(result.kernels.sum(-1), torch.ones_like(result.kernels[..., 0]), atol=1e-6, rtol=0)
    assert result.documents == 5
    assert result.counts.tolist() == [5] * 9
    assert any("sinks" in warning for warning in result.warnings) == sinks


@given(
    documents=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    seed=st.integers(0, 99),
    per_head=st.booleans(),
    sinks=st.booleans(),
)
def test_batches_and_order_change_nothing(documents, sizes, seed, per_head, sinks) -> None:
    model = Toy(sinks=sinks)
    model.module.double()  # what is left is the probes' own rounding
    tokens = _tokens(documents, 6, seed)
    whole = _run(model, [tokens], per_head)
    shuffled = tokens[torch.randperm(documents, generator=torch.Generator().manual_seed(seed))]
    batches, first = [], 0
    while first < documents:  # batches of all sizes, the last one short
        size = sizes[len(batches) % len(sizes)]
        batches.append(shuffled[first : first + size])
        first += size
    _assert_same(_run(model, batches, per_head), whole, 1e-7)


@given(seed=st.integers(0, 99), left=st.booleans(), per_head=st.booleans(), sinks=st.booleans())
def test_padding_changes_nothing(seed, left, per_head, sinks) -> None:
    model = Toy(sinks=sinks)
    model.module.double()
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (4,), generator=generator).tolist()
    rows = [_tokens(1, n, seed + i)[0] for i, n in enumerate(lengths)]
    width = max(lengths) + 2
    padded = torch.zeros(4, width, dtype=torch.long)
    mask = torch.zeros(4, width, dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        padded[i, where], mask[i, where] = row, True
    plain = _run(model, [row[None] for row in rows], per_head)
    _assert_same(_run(model, [(padded[:3], mask[:3]), (padded[3:], mask[3:])], per_head), plain, 1e-7)
    assert plain.counts.tolist() == [sum(n > i for n in lengths) for i in range(max(lengths))]


@pytest.mark.parametrize("garbage", [float("nan"), 7.0, float("inf")])
def test_padding_may_hold_anything(garbage: float) -> None:
    model = Toy()
    clean, dirty = (MixingProbe(), KernelProbe()), (MixingProbe(), KernelProbe())
    mask = torch.tensor([[False, False, True, True, True], [True, True, True, True, False]])
    tokens = _tokens(2, 5)

    class Dirt(Toy):
        def _run(self, embeddings, mask, tokens):
            inner = self._observers
            pads = ~mask

            def spoil(observer):
                def show(layer, record, batch):
                    record = {key: value.clone() for key, value in record.items()}
                    for value in (record["resid_pre"], record["attn_out"]):
                        value[pads] = garbage
                    pattern = record["pattern"]
                    pattern[pads[:, None, :].expand(pattern.shape[:3])] = garbage
                    pattern.transpose(2, 3)[pads[:, None, :].expand(pattern.shape[:3])] = garbage
                    observer(layer, record, batch)

                return show

            self._observers = [(points, spoil(o), layers) for points, o, layers in inner]
            try:
                return super()._run(embeddings, mask, tokens)
            finally:
                self._observers = inner

    spoiled = Dirt(model.module)
    for m, probes in ((model, clean), (spoiled, dirty)):
        with attach(m, *probes), torch.no_grad():
            m(tokens, mask)
    for a, b in zip(clean, dirty, strict=True):
        for name, tensor in a.state_tensors().items():
            torch.testing.assert_close(b.state_tensors()[name], tensor)


def test_merge_and_state_are_the_whole() -> None:
    model = Toy(sinks=True)
    tokens = _tokens(7, 6)
    whole = _run(model, [tokens])
    parts = []
    for part, length in ((tokens[:3], 6), (tokens[3:], 6)):
        probes = (MixingProbe(), KernelProbe())
        with attach(model, *probes), torch.no_grad():
            model(part[:, :length])
        parts.append(probes)
    restored = (MixingProbe(), KernelProbe())
    for probe, (source, other) in zip(restored, zip(*parts, strict=True), strict=True):
        probe.load_state(source.state_tensors())
        probe.merge(other)
    with attach(model, *restored) as session:
        pass
    _assert_same(measurement(session), whole)
    for empty, full in zip((MixingProbe(), KernelProbe()), restored, strict=True):
        empty.merge(full)
        assert empty.documents == 7
        with pytest.raises(NothingMeasuredError):
            type(full)().result(model)


def test_merge_refuses_other_settings() -> None:
    with pytest.raises(InputError, match="per_head"):
        KernelProbe().merge(KernelProbe(per_head=True))


def test_longer_documents_extend_the_positions() -> None:
    model = Toy()
    short, long = _tokens(2, 4, 1), _tokens(3, 8, 2)
    for order in ([short, long], [long, short]):
        result = _run(model, order)
        assert result.counts.tolist() == [5] * 4 + [3] * 4
        expected = _expected(model, [*short[:, :4], *long[:, :4]])["position"].mean(0)
        torch.testing.assert_close(result.mixing.per_position[:, :4], expected, atol=1e-6, rtol=0)
        assert any("differ in length" in w for w in result.warnings)


def test_an_interrupted_pass_leaves_no_trace() -> None:
    model = Toy()
    tokens = _tokens(4, 6)

    def explode(layer, record, batch):
        if layer == 1:
            raise RuntimeError("out of memory")

    with attach(model, MixingProbe(), KernelProbe()) as session, torch.no_grad():
        model(tokens[:2])
        # entered before the probes' observer would see layer 1
        with pytest.raises(RuntimeError), model.observe(("resid_pre",), explode):
            model(tokens[2:])
        model(tokens[2:])
    _assert_same(measurement(session), _run(model, [tokens]))


def test_probes_work_in_inference_mode_and_go_on_outside_it() -> None:
    model = Toy()
    tokens = _tokens(4, 6)
    with attach(model, MixingProbe(), KernelProbe()) as session:
        with torch.inference_mode():
            model(tokens[:2])
        model(tokens[2:])
    _assert_same(measurement(session), _run(model, [tokens]))


def test_nested_sessions_measure_their_own() -> None:
    model = Toy()
    tokens = _tokens(4, 6)
    with attach(model, MixingProbe(), KernelProbe()) as outer, torch.no_grad():
        model(tokens[:2])
        with attach(model, MixingProbe(), KernelProbe()) as inner:
            model(tokens[2:])
    assert (outer.documents, inner.documents) == (4, 2)
    _assert_same(measurement(outer), _run(model, [tokens]))
    _assert_same(measurement(inner), _run(model, [tokens[2:]]))
    assert model._observers == []


def test_zero_over_zero_is_zero() -> None:
    model = Toy()
    with torch.no_grad():
        model.module.output.zero_()
        model.module.embedding.zero_()
        model.module.positions.zero_()
        model.module.down.zero_()
    result = _run(model, [_tokens(2, 5)])
    assert float(result.mixing.token.abs().max()) == 0.0
    assert float(result.mixing.frobenius.abs().max()) == 0.0


def test_a_massive_position_is_reported() -> None:
    model = Toy()
    with torch.no_grad():
        model.module.positions[0] += 300.0
    result = _run(model, [_tokens(2, 8)])
    assert float(result.mixing.largest_position_share.min()) > 0.9
    assert any("one position holds most" in warning and "position 0" in warning for warning in result.warnings)
    assert float((result.mixing.token / result.mixing.frobenius).max()) > 10


def test_half_precision_is_summed_in_single() -> None:
    model, tokens = Toy(), _tokens(6, 40)
    model.module.bfloat16()
    result = _run(model, tokens.split(2))
    expected = _expected(model, tokens)  # float64 sums of what the bfloat16 model computes
    torch.testing.assert_close(result.mixing.token, expected["token"].mean(0), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.mixing.frobenius, expected["frobenius"].mean(0), atol=1e-6, rtol=0)
    pattern = expected["pattern"].mean((0, 2))
    mass = pattern.sum(-1)
    assert float((mass - 1).abs().max()) > 1e-4  # the rows as the model has them do not sum to 1
    torch.testing.assert_close(result.row_mass, mass, atol=1e-6, rtol=0)
    torch.testing.assert_close(result.kernels.double(), pattern / mass[..., None], atol=1e-6, rtol=0)


def test_wrong_use_is_refused() -> None:
    model = Toy()
    with pytest.raises(InputError, match="at least one probe"):
        attach(model)
    with pytest.raises(InputError, match="share a name"):
        attach(model, KernelProbe(), KernelProbe(True))
    with attach(model, MixingProbe(), KernelProbe()) as session:
        pass
    with pytest.raises(NothingMeasuredError):
        session.results()
    probe = MixingProbe()
    with attach(model, probe):
        model(_tokens(1, 4))
    with pytest.raises(InputError, match="3 layers"), attach(Toy(layers=2), probe):
        pass


def test_a_tensor_of_the_wrong_shape_is_named() -> None:
    class Wrong(Toy):
        def observe(self, points, observer, layers=None):
            def show(layer, record, batch):
                observer(layer, {key: value[:, 1:] for key, value in record.items()}, batch)

            return super().observe(points, show, layers)

    model = Wrong()
    for probe in (MixingProbe(), KernelProbe()):
        with pytest.raises(HookError, match="layer 0"), attach(model, probe):
            model(_tokens(1, 4))


def test_results_round_trip(tmp_path) -> None:
    result = _run(Toy(), [_tokens(3, 5)])
    back = Measurement.load(result.save(tmp_path / "m.safetensors"))
    _assert_same(back, result, 0.0)
    assert back.warnings == result.warnings
    assert back.provenance == result.provenance
    assert isinstance(back.mixing, Mixing)
    table = result.to_dataframe()
    token = table[table["quantity"] == "token"]["value"].tolist()
    assert token == pytest.approx(result.mixing.token.tolist())
    assert len(table[table["quantity"] == "per_position"]) == 3 * 5
    rows = result.to_dataframe(kernels=True)
    assert rows["value"].tolist() == pytest.approx(result.kernels[:, -1].flatten().tolist())


def test_results_are_drawn() -> None:
    import matplotlib.pyplot as plt

    result = _run(Toy(), [_tokens(3, 5)], per_head=True)
    for ax in (result.plot(), result.plot_kernel(1), result.plot_kernel(1, head=2)):
        assert ax.get_xlabel()
        assert ax.get_ylabel()
    assert isinstance(result, Measurement)
    assert isinstance(
        Kernels(result.kernels, result.row_mass, result.sink_mass, result.counts, result.documents), Kernels
    )
    plt.close("all")


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6),
    offset=st.sampled_from([0.0, 1e6]),
    seed=st.integers(0, 99),
)
def test_moments_are_those_of_all_data(sizes, offset, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = [offset + torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]
    masks = [torch.rand(n, 3, generator=generator) > 0.3 for n in sizes]
    moments, left, right = Moments((3,)), Moments((3,)), Moments((3,))
    for i, (values, valid) in enumerate(zip(data, masks, strict=True)):
        moments.update(values.where(valid, torch.nan), valid)
        (left if i % 2 else right).update(values, valid)
    left.merge(right)
    state, left = left.state("x"), Moments((3,))
    left.load(state, "x")
    values, valid = torch.cat(data), torch.cat(masks)
    for j in range(3):
        column = values[valid[:, j], j]
        for found in (moments, left):
            assert found.count[j] == len(column)
            if len(column):
                torch.testing.assert_close(found.mean[j], column.mean(), rtol=1e-12, atol=1e-12)
            if len(column) > 1:
                torch.testing.assert_close(found.std[j], column.std(), rtol=1e-8, atol=1e-8)


def test_sums_do_not_lose_small_terms(monkeypatch) -> None:
    import posattn.probes.statistics as statistics

    terms = [torch.tensor([1.0])] + [torch.tensor([1e-8])] * 1000
    for dtype in (torch.float64, torch.float32):  # float32: as on a device without float64
        monkeypatch.setattr(statistics, "accumulator", lambda device, dtype=dtype: dtype)
        sums, other = Sums(), Sums()
        for term in terms[:500]:
            sums.add(term)
        for term in terms[500:]:
            other.add(term)
        sums.merge(other)
        assert sums.total is not None
        assert float(sums.total) == pytest.approx(1 + 1e-5, abs=1.2e-7 if dtype == torch.float32 else 1e-12)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 60))
def test_large_terms_are_added_a_few_rows_at_a_time(heads: int, rows: int, at_once: int) -> None:
    import posattn.probes.statistics as statistics

    terms = [torch.randn(heads, rows, rows) for _ in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "_WIDENED", at_once)
        sums = Sums(grow_axes=2)
        for term in (terms[0][:, :1, :1], *terms):
            sums.add(term)
    expected = sum(term.double() for term in terms)
    expected[:, :1, :1] += terms[0][:, :1, :1]
    torch.testing.assert_close(sums.value, expected, rtol=1e-12, atol=1e-12)


def test_aligner_handles_gaps() -> None:
    mask = torch.tensor([[False, True, False, True], [True, True, True, False]])
    alignment = Aligner()(mask)
    values = torch.tensor([[torch.nan, 1.0, torch.nan, 2.0], [3.0, 4.0, 5.0, torch.nan]])
    assert alignment.rows(values).tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]]
    assert alignment.counts().tolist() == [2.0, 2.0, 1.0]
