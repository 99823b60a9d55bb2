"""The fast rollouts against the definition: torch and numba in this process, Triton in its interpreter (a process of
its own, because triton decides when it is imported) and, where there is a CUDA device, compiled.

As a program (`python tests/test_fast_kernels.py OUT.json`) it runs the Triton cases and writes their errors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from posattn.errors import InputError
from posattn.rollout import fast, triton_kernels
from posattn.rollout.dense import rollout

ROOT = Path(__file__).parent.parent
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EPS = 1.2e-7  # of float32 at 1


class Case(NamedTuple):
    batch: tuple[int, ...]
    layers: int
    n: int
    layout: str  # contiguous, transposed, sliced, expanded, stacked
    mixing: str  # random, zero, one, ends

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.batch)) or 'single'}-T{self.layers}-N{self.n}-{self.layout}-{self.mixing}"


CASES = [
    Case((), 1, 1, "contiguous", "random"),
    Case((2,), 3, 1, "contiguous", "ends"),
    Case((), 2, 7, "contiguous", "random"),
    Case((3,), 4, 33, "contiguous", "random"),
    Case((2,), 3, 33, "transposed", "random"),
    Case((2,), 3, 33, "sliced", "random"),
    Case((2, 2), 2, 17, "expanded", "random"),
    Case((2, 2), 3, 40, "stacked", "random"),
    Case((2,), 3, 24, "contiguous", "zero"),
    Case((), 3, 24, "contiguous", "one"),
    Case((2,), 4, 33, "contiguous", "ends"),
    Case((), 3, 70, "contiguous", "random"),
]
LONG = [
    Case((), 3, 130, "contiguous", "random"),
    Case((), 3, 300, "contiguous", "random"),
    Case((2,), 3, 257, "transposed", "ends"),
]


def make(case: Case, dtype: torch.dtype, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """λ [..., T] and lower triangular A [..., T, N, N] in the layout of the case."""
    batch, layers, n, layout, kind = case
    generator = torch.Generator().manual_seed(n + 1000 * layers)
    stored = (1, *batch[1:]) if layout == "expanded" else batch
    logits = 3 * torch.randn(*stored, layers, n, n, generator=generator, dtype=torch.float64)
    a = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1).to(device, dtype)
    if layout == "transposed":
        a = a.mT.contiguous().mT
    elif layout == "sliced":  # every second entry of a larger tensor, whose other entries are NaN
        wide = torch.full((*batch, 2 * layers, n, 2 * n + 3), torch.nan, dtype=dtype, device=device)
        wide[..., ::2, :, 3::2] = a
        a = wide[..., ::2, :, 3::2]
    elif layout == "expanded":
        a = a.expand(*batch, layers, n, n)
    elif layout == "stacked":  # layers outermost, as a list of per-layer tensors stacked in front would be
        a = a.movedim(-3, 0).contiguous().movedim(0, -3)
    lam = torch.rand(*batch, layers, generator=generator, dtype=torch.float64)
    if kind in ("zero", "one"):
        lam = torch.full_like(lam, float(kind == "one"))
    elif kind == "ends":
        lam[..., 0], lam[..., -1] = 0.0, 1.0
    return lam.to(device, torch.float64 if dtype == torch.float64 else torch.float32), a


def reference(lam: torch.Tensor, a: torch.Tensor, renormalise: bool = False) -> torch.Tensor:
    """The definition, float64: R is built and multiplied."""
    lam, a = lam.double().cpu(), a.double().cpu()
    if renormalise:
        a = a / a.sum(-1, keepdim=True)
    eye = torch.eye(a.shape[-1], dtype=torch.float64)
    p = eye
    for t in range(a.shape[-3]):
        weight = lam[..., t, None, None]
        p = ((1 - weight) * eye + weight * a[..., t, :, :]) @ p
    return p.expand(*torch.broadcast_shapes(p.shape[:-2], lam.shape[:-1]), *p.shape[-2:])


def plain(lam: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """The plain loop, in the kernels' own dtype."""
    p = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    for t in range(a.shape[-3]):
        weight = lam[..., t, None, None].to(a.dtype)
        p = (1 - weight) * p + weight * (a[..., t, :, :] @ p)
    return p


def queries_of(n: int) -> dict[str, torch.Tensor]:
    few = torch.tensor([n // 2, 0, n - 1])
    return {"last": torch.tensor([n - 1]), "middle": torch.tensor([n // 2]), "few": few, "all": torch.arange(n)}


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    assert x.shape == y.shape
    error = (x.double().cpu() - y.double().cpu()).abs().max()
    return float("inf") if error.isnan() else float(error)


def limit(dtype: torch.dtype, plain_error: float) -> float:
    """The error budget: 1e-6 in float32, never more than twice the plain loop's, plus the rounding of a few sums."""
    if dtype == torch.float64:  # the plain loop can be the reference itself, to the bit
        return 2 * plain_error + 2e-15
    twice = 2 * plain_error + EPS
    return twice if dtype != torch.float32 else min(twice, 1e-6)


# ---- torch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_torch_implementations_equal_the_definition(case: Case, dtype: str) -> None:
    lam, a = make(case, DTYPES[dtype])
    expected = reference(lam, a)
    bound = limit(DTYPES[dtype], distance(plain(lam, a), expected))

    whole = fast.rollout_matmul(lam, a)
    assert whole.dtype == (torch.float64 if dtype == "f64" else torch.float32)
    assert distance(whole, expected) <= bound
    assert (whole.triu(1) == 0).all()
    every = fast.rollout_matmul(lam, a, every=True)
    assert every.shape[-3] == case.layers + 1
    assert distance(every[..., -1, :, :], expected) <= bound
    assert distance(every[..., 1, :, :], reference(lam[..., :1], a[..., :1, :, :])) <= bound
    for rows in queries_of(case.n).values():
        assert distance(fast.rollout_rows(lam, a, rows), expected[..., rows, :]) <= bound


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("case", LONG, ids=str)
def test_the_row_product_of_long_kernels(case: Case, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_BATCHED_FROM", 1)
    monkeypatch.setattr(fast, "_LOOP_FROM", 1)
    lam, a = make(case, DTYPES[dtype])
    expected = reference(lam, a)
    bound = limit(DTYPES[dtype], distance(plain(lam, a), expected))
    for row in (0, case.n // 2, case.n - 1):
        got = fast.rollout_rows(lam, a, torch.tensor([row]))
        assert distance(got, expected[..., [row], :]) <= bound


def test_lambda_zero_is_the_identity_and_one_is_the_product_exactly() -> None:
    lam, a = make(Case((2,), 3, 24, "contiguous", "zero"), torch.float32)
    eye = torch.eye(24).expand(2, 24, 24)
    assert torch.equal(fast.rollout_matmul(lam, a), eye)
    assert torch.equal(fast.rollout_rows(lam, a, torch.arange(24)), eye)


def test_leading_dimensions_broadcast() -> None:
    lam, a = make(Case((4,), 3, 20, "contiguous", "random"), torch.float32)
    shared = a[0]
    for out in (fast.rollout_matmul(lam, shared), fast.rollout_rows(lam, shared, torch.arange(20))):
        assert out.shape == (4, 20, 20)
        assert distance(out, reference(lam, shared.expand_as(a))) <= 1e-6


def test_what_lies_above_the_diagonal_blocks_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_block", lambda n, device: (8, 8))
    for start in (1, 1000):  # the loop over entries, the batched products
        monkeypatch.setattr(fast, "_LOOP_FROM", start)
        lam, a = make(Case((2,), 4, 30, "contiguous", "random"), torch.float32)
        poisoned = a.clone()
        block = torch.arange(30) // (8 if start == 1000 else 128)
        poisoned[..., block[:, None] < block[None, :]] = torch.nan
        rows = torch.tensor([29])
        assert torch.equal(fast.rollout_rows(lam, poisoned, rows), fast.rollout_rows(lam, a, rows))
        if start == 1000:
            assert torch.equal(fast.rollout_matmul(lam, poisoned), fast.rollout_matmul(lam, a))


@pytest.mark.parametrize("batch", [(), (2,)])
def test_gradients(batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_block", lambda n, device: (2, 3))
    layers, n = 2, 4
    lam, a = make(Case(batch, layers, n, "contiguous", "random"), torch.float64)
    lam.requires_grad_()
    a.requires_grad_()
    rows = torch.tensor([3, 0, 2])
    check = torch.autograd.gradcheck
    assert check(lambda lam, a: fast.rollout_matmul(lam, a.tril()), (lam, a))
    assert check(lambda lam, a: fast.rollout_matmul(lam, a.tril(), every=True), (lam, a))
    assert check(lambda lam, a: fast.rollout_rows(lam, a.tril(), rows), (lam, a))
    if not batch:  # kernels that several λ share get the sum of their gradients
        many = torch.rand(3, layers, dtype=torch.float64, requires_grad=True)
        assert check(lambda lam, a: fast.rollout_rows(lam, a.tril(), rows), (many, a))


def test_gradients_equal_those_of_the_plain_loop_in_float32() -> None:
    lam, a = make(Case((2,), 3, 150, "contiguous", "random"), torch.float32)
    weight = torch.randn(2, 150, 150)
    found = []
    for function in (plain, fast.rollout_matmul, lambda lam, a: fast.rollout_rows(lam, a, torch.arange(150))):
        x, y = lam.clone().requires_grad_(), a.clone().requires_grad_()
        (function(x, y) * weight).sum().backward()
        found.append((x.grad, y.grad.tril()))
    for grads in found[1:]:
        for got, wanted in zip(grads, found[0], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


# ---- numba ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *LONG], ids=str)
def test_numba_equals_the_definition(case: Case, dtype: str) -> None:
    numba_kernels = pytest.importorskip("posattn.rollout.numba_kernels")
    lam, a = make(case, DTYPES[dtype])
    expected = reference(lam, a)
    bound = 2e-15 * case.layers if dtype == "f64" else 1e-6  # sums are float32 whatever the kernels' dtype
    threads = torch.get_num_threads()
    try:
        for threads_now in (1, 2, 3):
            torch.set_num_threads(threads_now)
            for rows in queries_of(case.n).values():
                got = numba_kernels.rollout_numba(lam, a, rows)
                assert got.dtype == (torch.float64 if dtype == "f64" else torch.float32)
                assert distance(got, expected[..., rows, :]) <= bound
    finally:
        torch.set_num_threads(threads)


def test_numba_broadcasts_and_reads_no_line_above_the_diagonal() -> None:
    numba_kernels = pytest.importorskip("posattn.rollout.numba_kernels")
    lam, a = make(Case((2, 3), 3, 100, "contiguous", "random"), torch.float32)
    rows = torch.tensor([99, 40])
    shared = a[0]
    got = numba_kernels.rollout_numba(lam, shared, rows)
    assert distance(got, reference(lam, shared.expand_as(a))[..., rows, :]) <= 1e-6
    got = numba_kernels.rollout_numba(lam[0, 0], a, rows)
    assert distance(got, reference(lam[0, 0].expand_as(lam), a)[..., rows, :]) <= 1e-6
    poisoned = a.clone()
    row, column = torch.arange(100)[:, None], torch.arange(100)
    poisoned[..., column >= (row + 8 + 15) // 16 * 16] = torch.nan  # eight rows together, lines of 16 numbers
    assert torch.equal(numba_kernels.rollout_numba(lam, poisoned, rows), numba_kernels.rollout_numba(lam, a, rows))
    assert numba_kernels.rollout_numba(lam, a, rows[:0]).shape == (2, 3, 0, 100)


@pytest.mark.parametrize(("dtype", "n"), [("f64", 512), ("f64", 1024), ("f32", 1024), ("bf16", 2048), ("bf16", 2050)])
def test_numba_where_rows_begin_with_a_page(dtype: str, n: int) -> None:
    numba_kernels = pytest.importorskip("posattn.rollout.numba_kernels")
    lam, a = make(Case((), 4, n, "contiguous", "random"), DTYPES[dtype])
    expected = reference(lam, a)
    threads = torch.get_num_threads()
    try:
        for threads_now in (1, 2, 7):
            torch.set_num_threads(threads_now)
            for rows in (torch.tensor([n - 1]), torch.tensor([n // 2, 0, n - 1, 77])):
                got = numba_kernels.rollout_numba(lam, a, rows)
                assert distance(got, expected[..., rows, :]) <= (1e-14 if dtype == "f64" else 1e-6)
                assert torch.equal(got, numba_kernels.rollout_numba(lam, a, rows))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16"])
def test_a_block_of_numba_leaves_the_columns_after_it_alone(dtype: str) -> None:
    """They belong to the block after it, whose sums another thread may be gathering."""
    numba_kernels = pytest.importorskip("posattn.rollout.numba_kernels")
    a = torch.ones(64, 64).to(DTYPES[dtype])
    words = a.view(torch.uint32) if dtype == "bf16" else a
    columns = 2 if dtype == "bf16" else 1
    v = torch.ones(2, 64, dtype=torch.float64 if dtype == "f64" else torch.float32)
    for begin, end in ((0, 8), (8, 24), (3, 19) if columns == 1 else (2, 18), (20, 44), (40, 64)):
        sums = torch.zeros(2, columns, 64 // columns, dtype=v.dtype)
        numba_kernels._multiply(words.numpy(), v.numpy(), begin, end, False, sums.numpy())
        total = sums.mT.reshape(2, 64)
        expected = (end - torch.arange(end).clamp(min=begin)).to(v.dtype)
        assert (total[:, :end] >= expected).all()  # a line of memory may reach beyond the diagonal
        assert (total[:, end:] == 0).all()


def test_numba_where_pairs_of_bfloat16_lie_across_words() -> None:
    numba_kernels = pytest.importorskip("posattn.rollout.numba_kernels")
    lam, a = make(Case((2,), 3, 40, "contiguous", "random"), torch.bfloat16)
    shifted = torch.empty(a.numel() + 1, dtype=a.dtype)[1:].view_as(a).copy_(a)
    assert shifted.storage_offset() == 1
    rows = torch.tensor([39, 12])
    got = numba_kernels.rollout_numba(lam, shifted, rows)
    assert distance(got, reference(lam, a)[..., rows, :]) <= 1e-6


def test_numba_takes_only_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    numba_kernels = pytest.importorskip("posattn.rollout.numba_kernels")
    lam, a = make(CASES[2], torch.float32)
    last = torch.tensor([6])
    with pytest.raises(InputError, match="gradient"):
        numba_kernels.rollout_numba(lam, a.clone().requires_grad_(), last)
    with pytest.raises(InputError, match="on the CPU"):
        numba_kernels.rollout_numba(lam, a.to("meta"), last)
    with pytest.raises(InputError, match="causal"):
        rollout(lam, a.flip((-1, -2)), impl="numba")
    # chosen by itself only where it is compiled already, and never where a gradient is wanted
    assert rollout(lam, a).impl == "numba"
    assert rollout(lam, a.clone().requires_grad_()).impl == "rows"
    monkeypatch.delitem(sys.modules, "posattn.rollout.numba_kernels")
    assert rollout(lam, a).impl == "rows"


def test_numba_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "posattn.rollout.numba_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(InputError, match="pip install numba"):
        rollout(*make(CASES[2], torch.float32), impl="numba")


def test_numba_from_several_threads_at_once() -> None:
    numba_kernels = pytest.importorskip("posattn.rollout.numba_kernels")
    lam, a = make(Case((), 3, 300, "contiguous", "random"), torch.float32)
    last = torch.tensor([299])
    alone = numba_kernels.rollout_numba(lam, a, last)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: numba_kernels.rollout_numba(lam, a, last), range(40)))
    assert all(torch.equal(got, alone) for got in found)


# ---- triton ---------------------------------------------------------------------------------------------------------

#: the default tiles, and small ones that a few dozen positions fill several times
SMALL = {
    "whole": [None, triton_kernels.WholeConfig(32, 16, 16, 4, 1)],
    "rows": [None, triton_kernels.RowsConfig(16, 32, 4, 2)],
}


def triton_errors(case: Case, dtype: torch.dtype, device: str, small: bool) -> dict[str, tuple[float, float]]:
    """For each form of the kernels: how far it is from the definition, and how far it may be."""
    found = {}
    lam, a = make(case, dtype, device)
    loop = distance(plain(lam, a), reference(lam, a))
    for renormalise in (False, True) if dtype != torch.float32 else (False,):
        expected = reference(lam, a, renormalise)
        bound = limit(dtype, loop)
        for config in SMALL["whole"] if small else [None]:
            got = triton_kernels.rollout_triton(lam, a, renormalise=renormalise, config=config)
            found[f"whole {config} {renormalise=}"] = (distance(got, expected), bound)
            found[f"above the diagonal {config} {renormalise=}"] = (float(got.triu(1).abs().max()), 0.0)
        for name, rows in queries_of(case.n).items():
            if name == "all" and case.n > 40:
                continue
            for config in SMALL["rows"] if small and name in ("last", "few") else [None]:
                got = triton_kernels.rollout_triton(lam, a, rows.to(device), renormalise=renormalise, config=config)
                # sums are float32 whatever the kernels' dtype
                found[f"rows {name} {config} {renormalise=}"] = (
                    distance(got, expected[..., rows, :]),
                    min(bound, 1e-6),
                )
    if dtype != torch.float32:  # as they are stored for some rows, widened for the whole P
        expected = reference(lam, a, renormalise=True)
        for queries in ("last", "all"):
            got = rollout(lam, a, queries, impl="triton").profile
            rows = queries_of(case.n)[queries].tolist()
            found[f"public {queries}"] = (distance(got, expected[..., rows, :]), 1e-6)
    return found


#: the interpreter is slow: every case in float32, the layouts and lengths that differ most in half precision
HALF_CASES = [CASES[i] for i in (1, 3, 4, 6, 10)]
INTERPRETED_CASES = [
    *((case, "f32") for case in CASES),
    *((case, dtype) for dtype in ("bf16", "f16") for case in HALF_CASES),
]


def test_triton_takes_only_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    lam, a = make(CASES[2], torch.float32)
    pytest.importorskip("triton")
    with pytest.raises(InputError, match="float64"):
        triton_kernels.rollout_triton(lam, a.double())
    if not triton_kernels._kernels().INTERPRETED:
        with pytest.raises(InputError, match="CUDA"):
            triton_kernels.rollout_triton(lam, a)


def test_triton_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_kernels._kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(InputError, match="pip install"):
        triton_kernels.rollout_triton(*make(CASES[2], torch.float32))
    triton_kernels._kernels.cache_clear()


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, tuple[float, float]]]:
    """The errors of the Triton cases, found by one process that runs them in triton's interpreter."""
    pytest.importorskip("triton")
    out = tmp_path_factory.mktemp("triton") / "errors.json"
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, str(out)], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), INTERPRETED_CASES, ids=str)
def test_triton_in_the_interpreter(
    case: Case, dtype: str, interpreted: dict[str, dict[str, tuple[float, float]]]
) -> None:
    worse = {name: pair for name, pair in interpreted[f"{case} {dtype}"].items() if not pair[0] <= pair[1]}
    assert not worse


@pytest.mark.slow
def test_triton_refuses_gradients_and_too_much_is_done_in_turns(interpreted: dict[str, dict[str, list[float]]]) -> None:
    assert interpreted["other"]["refuses gradients"] == [0.0, 0.0]
    found, bound = interpreted["other"]["queries in turns"]
    assert found <= bound


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(
    "case",
    [
        *HALF_CASES, Case((2, 2), 3, 48, "stacked", "random"), Case((2,), 4, 300, "contiguous", "random"),
        Case((3,), 5, 1024, "contiguous", "random"), Case((), 3, 2049, "contiguous", "ends"),
    ],
    ids=str,
)  # fmt: skip
def test_triton_on_cuda(case: Case, dtype: str) -> None:
    errors = triton_errors(case, DTYPES[dtype], "cuda", small=case.n == 300)
    worse = {name: pair for name, pair in errors.items() if not pair[0] <= pair[1]}
    assert not worse


@pytest.mark.cuda
def test_triton_rows_are_the_same_from_run_to_run() -> None:
    lam, a = make(Case((8,), 16, 1000, "contiguous", "random"), torch.bfloat16, "cuda")
    rows = torch.tensor([999], device="cuda")
    first = triton_kernels.rollout_triton(lam, a, rows)
    assert all(torch.equal(first, triton_kernels.rollout_triton(lam, a, rows)) for _ in range(20))


def main(out: str) -> None:
    torch.set_num_threads(1)
    results = {
        f"{case} {dtype}": triton_errors(case, DTYPES[dtype], "cpu", small=case.n > 30 and dtype != "f16")
        for case, dtype in INTERPRETED_CASES
    }
    lam, a = make(CASES[2], torch.float32)
    try:
        triton_kernels.rollout_triton(lam, a.requires_grad_())
        refused = 1.0
    except InputError:
        refused = 0.0
    triton_kernels.MAX_QUERIES = 3
    lam, a = make(CASES[2], torch.float32)
    got = triton_kernels.rollout_triton(lam, a, torch.arange(7), config=triton_kernels.RowsConfig(16, 16, 4, 1))
    results["other"] = {
        "refuses gradients": (refused, 0.0),
        "queries in turns": (distance(got, reference(lam, a)), 1e-6),
    }
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
