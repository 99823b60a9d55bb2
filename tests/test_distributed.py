"""Several processes give what one gives; a killed one ends all; the checkpoints go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from posattn.distributed import World, asked, start, world
from posattn.errors import InputError
from tests import families
from tests.distributed_worker import results

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "tests" / "distributed_worker.py"
ALONE = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def together(processes: int, *command: str, timeout: int = 560) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key not in ALONE}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.run(
        [*launcher, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout, check=False
    )


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_without_overlap_or_loss(documents: int, processes: int) -> None:
    rows = [range(documents)[World(rank, processes).share(documents)] for rank in range(processes)]
    assert [i for part in rows for i in part] == list(range(documents))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_alone_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    assert asked() == (0, 1)
    with start() as here:
        assert here == world() == World()
        assert here.main
    assert here.gather("x") == ["x"]
    assert here.own_path(Path("a")) == Path("a")
    rows = torch.arange(3)
    assert here.concatenate(rows) is rows
    assert World(1, 3).own_path(Path("d/a.st")) == Path("d/a.st.1of3")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(InputError, match="RANK"):
        asked()


def assert_same(processes: int, folder: Path, expected: dict[str, Any]) -> None:
    for rank in range(processes):
        found = load_file(folder / f"{rank}of{processes}.safetensors")
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name].double(), value.double(), rtol=1e-6, atol=1e-6, equal_nan=True, msg=lambda m, n=name: n + m
            )


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "case"), [(2, "heads"), (3, "heads"), (2, "sinks"), (3, "sinks"), (3, "few")])
def test_several_processes_give_what_one_gives(processes: int, case: str, tmp_path: Path) -> None:
    expected = results(case)
    assert expected["documents"].tolist() == [1 if case == "few" else 7] * 3
    done = together(processes, str(WORKER), str(tmp_path), case)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(processes, tmp_path, expected)


@pytest.mark.slow
def test_one_killed_ends_all_and_resume_finishes(tmp_path: Path) -> None:
    state = tmp_path / "state"
    killed = together(2, str(WORKER), str(tmp_path), "sinks", str(state), "--die", "1", "4")
    assert killed.returncode != 0
    assert "SIGKILL" in killed.stderr or "Signal 9" in killed.stderr
    assert not list(tmp_path.glob("*.safetensors"))
    assert (tmp_path / "state.1of2").exists()  # it had measured something
    done = together(2, str(WORKER), str(tmp_path), "sinks", str(state), "--resume")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same(2, tmp_path, results("sinks"))


@pytest.mark.slow
def test_profile_on_the_command_line(tmp_path: Path) -> None:
    families.tiny("llama_grouped", vocab_size=300).save_pretrained(tmp_path / "m")
    _tokenizer(tmp_path / "m")
    options = ["--length", "12", "--samples", "5", "--batch-size", "2", "--device", "cpu", "-q"]
    found = {}
    for processes in (1, 2):
        out = tmp_path / f"out{processes}"
        command = ["-m", "posattn", "profile", str(tmp_path / "m"), *options, "--out", str(out)]
        done = together(processes, *command)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.count("report:") == 1
        found[processes] = json.loads((out / "summary.json").read_text())
    for name, curve in found[1]["profiles"].items():
        torch.testing.assert_close(torch.tensor(found[2]["profiles"][name]), torch.tensor(curve), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        torch.tensor(found[2]["influence"]), torch.tensor(found[1]["influence"]), rtol=1e-5, atol=1e-6
    )
    assert found[2]["provenance"]["processes"] == 2
    wrong = together(2, "-m", "posattn", "profile", str(tmp_path / "none"), *options, "--out", str(tmp_path / "o"))
    assert wrong.returncode != 0
    assert "posattn, process" in wrong.stderr
    assert not (tmp_path / "o").exists()


def _tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, into a model's folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
