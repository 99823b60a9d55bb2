"""Ctrl-C and SIGTERM: nothing is left behind, a state that can be gone on from, and words on how."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from posattn.cli import main
from posattn.interrupts import Held, Terminated, terminable
from posattn.tasks.training import TrainingConfig, _Stepper, train
from tests.test_tasks_training import TINY

ROOT = Path(__file__).parent.parent
SIMULATE = ["simulate", "--layers", "2", "--length", "8", "--quiet", "--out"]
TRAIN = "train number --targets 3 --pre-targets 2 --hops 2 --letters 5 --layers 1 --heads 1 --d-model 8 --steps 6 "
TRAIN += "--every 2 --prompts 2"


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


# ---- a command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "says"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_leaves_nothing_behind_and_is_said(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
    says: str,
) -> None:
    import posattn.commands.simulate as command

    def signalled(*arguments: Any) -> None:
        (arguments[2] / "half.csv").write_text("half")
        assert [path.name[:5] for path in tmp_path.iterdir()] == [".run."]
        kill(number)
        raise AssertionError("it went on")

    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    monkeypatch.setattr(command, "simulate_into", signalled)
    assert main([*SIMULATE, str(tmp_path / "run")]) == code
    assert capsys.readouterr().err == f"posattn: {says}\n"
    assert list(tmp_path.iterdir()) == []
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_sigterm_while_cleaning_up_does_not_stop_that(tmp_path: Path) -> None:
    def work() -> None:
        try:
            kill(signal.SIGTERM)
        finally:
            kill(signal.SIGTERM)
            (tmp_path / "cleaned").write_text("")

    with pytest.raises(Terminated), terminable():
        work()
    assert (tmp_path / "cleaned").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_is_left_alone_where_it_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []

    def look() -> None:
        with terminable():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun ends the others by SIGTERM
    look()
    monkeypatch.delenv("WORLD_SIZE")
    assert found == [signal.SIG_DFL] * 2
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        look()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert found[2] is signal.SIG_IGN
    look()
    assert callable(found[3])


def test_a_forked_process_is_ended_as_ever() -> None:
    program = (
        "import os, signal, time\n"
        "from posattn.interrupts import terminable\n"
        "with terminable():\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(9)\n"
        "    print(os.WTERMSIG(os.waitpid(child, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == f"{int(signal.SIGTERM)}\n"


@pytest.mark.parametrize("where", ["typer", "posattn.commands.heads", "posattn.errors"])
def test_an_interrupt_while_things_are_imported_is_one_line(where: str) -> None:
    program = (
        "import sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {where!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        "sys.argv = ['posattn', 'models']\n"
        "from posattn.__main__ import run\n"
        "sys.exit(run())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "posattn: interrupted\n")


def test_the_installed_command_begins_there() -> None:
    assert 'posattn = "posattn.__main__:run"' in (ROOT / "pyproject.toml").read_text()


# ---- held back ---------------------------------------------------------------------------------------------------


def test_a_held_signal_waits_and_a_second_one_does_not() -> None:
    with Held() as held:
        kill(signal.SIGINT)  # nothing yet
        with pytest.raises(KeyboardInterrupt):
            held.release()
        held.release()
        assert not held.torn
        with held.at_once(), pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)
        assert not held.torn
        kill(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            kill(signal.SIGINT)
        assert held.torn
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# ---- training ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole() -> Any:
    return train(TrainingConfig(steps=12, **TINY), lambda *_: {}, progress=False)


@pytest.mark.parametrize("step", [0, 1, 4, 7, 12])
@pytest.mark.parametrize("where", ["step", "evaluation"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_training_goes_on_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any, step: int, where: str, number: int
) -> None:
    config, calls = TrainingConfig(steps=12, **TINY), []
    if (where == "step" and step == 12) or (where == "evaluation" and step % config.every):
        pytest.skip("there is none")

    def evaluated(model: Any, at: int) -> dict[str, Any]:
        if where == "evaluation" and at == step:
            torch.rand(3)
            kill(number)
        return {}

    def stepped(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if where == "step" and len(calls) == step + 1:
            kill(number)
        return take(self, *arguments)

    take = _Stepper.__call__
    monkeypatch.setattr(_Stepper, "__call__", stepped)
    with pytest.raises((KeyboardInterrupt, Terminated)), terminable():
        train(config, evaluated, tmp_path / "run", save_every=500, progress=False)
    monkeypatch.setattr(_Stepper, "__call__", take)
    resumed = train(config, lambda *_: {}, tmp_path / "run", resume=True, progress=False)
    assert resumed.curves == whole.curves
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_was_torn_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(self: Any, *arguments: Any) -> Any:
        kill(signal.SIGINT)
        kill(signal.SIGINT)

    monkeypatch.setattr(_Stepper, "__call__", twice)
    with pytest.raises(KeyboardInterrupt):
        train(TrainingConfig(steps=12, **TINY), None, tmp_path / "run", progress=False)
    assert not (tmp_path / "run" / "training.safetensors").exists()


@pytest.mark.parametrize(("signals", "said"), [(1, "the state after 3 steps is in {}"), (2, "nothing was saved")])
def test_the_command_says_what_there_is_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], signals: int, said: str
) -> None:
    calls = []

    def stepped(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            for _ in range(signals):
                kill(signal.SIGINT)
        return take(self, *arguments)

    take, out = _Stepper.__call__, tmp_path / "run"
    state = tmp_path / "run.training" / "seed-0"
    monkeypatch.setattr(_Stepper, "__call__", stepped)
    arguments = [*TRAIN.split(), "--out", str(out)]
    assert main(arguments) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"posattn: interrupted; {said.format(state)}")
    assert ("add --resume to go on" in last) == (signals == 1)
    monkeypatch.setattr(_Stepper, "__call__", take)
    assert main([*arguments, "--resume"]) == 0
    error = capsys.readouterr().err
    assert (f"going on from step 3 of 6 ({state})" in error) == (signals == 1)
    assert (f"nothing to resume in {state}: training from the beginning" in error) == (signals == 2)
    assert "model shards" not in error  # upstream's progress is not ours


# ---- measuring ---------------------------------------------------------------------------------------------------


def test_an_interrupted_measurement_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from posattn.probes import measure as measuring

    def saved(*arguments: Any) -> None:
        save(*arguments)
        kill(signal.SIGINT)

    save, state = measuring._save, tmp_path / "state"
    monkeypatch.setattr(measuring, "_save", saved)
    arguments = [
        "profile",
        "bundled:numbers",
        "--samples",
        "18",
        "--batch-size",
        "2",
        "--no-influence",
        "--device",
        "cpu",
    ]
    arguments += ["--checkpoint", str(state), "--out", str(tmp_path / "run")]
    assert main([*arguments, "--resume"]) == 130
    error = capsys.readouterr().err
    assert f"nothing to resume in {state}: measuring from the beginning" in error
    assert error.endswith(f"posattn: interrupted; what was measured is in {state}: add --resume to go on\n")
    monkeypatch.setattr(measuring, "_save", save)
    assert main([*arguments, "--resume"]) == 0
    assert f"going on from document 16 of 18 ({state})" in capsys.readouterr().err
