from __future__ import annotations

import json

import pytest
import torch

from posattn.errors import CheckpointError, InputError
from posattn.tasks import make_task
from posattn.tasks.training import TrainingConfig, accuracy, build_model, load_snapshot, log_steps, save_model, train

TINY = {
    "task_parameters": {"targets": 3, "pre_targets": 2, "max_hops": 2, "letters": 5},
    "model": {"layers": 2, "heads": 2, "d_model": 16},
    "schedule_steps": 40,
    "batch": 8,
    "warmup": 4,
    "every": 4,
    "eval_samples": 32,
    "learning_rate": 1e-2,
}


def test_kill_and_resume_gives_the_same_curves_and_weights(tmp_path):
    config = TrainingConfig(steps=16, **TINY)
    whole = train(config, progress=False)

    class Killed(Exception):
        pass

    def kill(model, step):
        torch.rand(3)  # a callback that draws random numbers changes nothing
        if step == 12:
            raise Killed
        return {}

    with pytest.raises(Killed):
        train(config, kill, tmp_path / "run", save_every=5, progress=False)
    resumed = train(config, lambda *_: {}, tmp_path / "run", resume=True, progress=False)
    assert resumed.curves == whole.curves
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [json.loads(x) for x in (tmp_path / "run" / "curves.jsonl").read_text().splitlines()] == whole.curves


def test_a_short_run_is_a_prefix_of_the_long_one():
    short = train(TrainingConfig(steps=8, **TINY), progress=False)
    long = train(TrainingConfig(steps=12, **TINY), progress=False)
    assert long.curves[: len(short.curves)] == short.curves


def test_seed_changes_the_run():
    a = train(TrainingConfig(steps=4, **TINY), progress=False)
    b = train(TrainingConfig(steps=4, seed=1, **TINY), progress=False)
    assert a.curves != b.curves


@pytest.mark.slow
def test_a_small_task_is_learned():
    config = TrainingConfig(
        task="index",
        task_parameters={"items": 4, "letters": 4},
        model={"layers": 2, "heads": 2, "d_model": 32},
        steps=400,
        schedule_steps=400,
        batch=64,
        warmup=20,
        every=100,
        eval_samples=256,
        learning_rate=5e-3,
        dropout=0.0,
    )
    run = train(config, progress=False)
    assert run.converged
    assert run.curves[0]["accuracy"] < 0.6


def test_learning_rate_schedule():
    config = TrainingConfig(learning_rate=1.0)
    assert config.rate(0) == 0
    assert config.rate(375) == pytest.approx(0.5)
    assert config.rate(750) == pytest.approx(1.0)
    assert config.rate(3750) == pytest.approx(0.5)
    assert config.rate(6750) == 0


def test_paper_preset_is_the_published_architecture():
    model = build_model(TrainingConfig())
    assert (model.config.n_layer, model.config.n_head, model.config.n_embd, model.config.rotary_dim) == (
        12,
        1,
        128,
        128,
    )
    assert model.config.vocab_size == 136
    assert sum(p.numel() for p in model.parameters()) * 2 < 5e6


def test_time_limit_stops_cleanly_and_says_so(tmp_path):
    run = train(TrainingConfig(steps=16, **TINY), out=tmp_path / "run", max_seconds=1e-9, progress=False)
    assert run.step == 0
    assert "of 16 steps" in run.stopped
    assert not run.converged
    resumed = train(TrainingConfig(steps=16, **TINY), out=tmp_path / "run", resume=True, progress=False)
    assert resumed.curves == train(TrainingConfig(steps=16, **TINY), progress=False).curves


def test_snapshots_and_saved_model(tmp_path):
    run = train(TrainingConfig(steps=4, **TINY), out=tmp_path / "run", snapshots=[0, 4], progress=False)
    model, config, step = load_snapshot(tmp_path / "run" / "snapshots" / "step-000004.safetensors")
    assert step == 4
    assert config == run.config
    samples = config.make_task().generate(16)
    with torch.no_grad():
        assert torch.allclose(model(samples.tokens).logits, run.model(samples.tokens).logits, atol=2e-3)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_model(run.model, config, tmp_path / "model")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    text = config.make_task().decode(samples.tokens[0])
    assert AutoTokenizer.from_pretrained(tmp_path / "model")(text)["input_ids"] == samples.tokens[0].tolist()
    with torch.no_grad():
        assert torch.allclose(stored(samples.tokens).logits, model(samples.tokens).logits, atol=1e-4)
    facts = json.loads((tmp_path / "model" / "posattn_task.json").read_text())
    assert make_task(facts["task"], **facts["parameters"]) == config.make_task()


def test_accuracy_counts_the_answer_at_the_last_position():
    config = TrainingConfig(**TINY)
    model = build_model(config).eval()
    samples = config.make_task().generate(40)
    with torch.no_grad():
        guess = model(samples.tokens).logits[:, -1].argmax(-1)
    found = accuracy(model, samples)
    assert found["accuracy"] == pytest.approx((guess == samples.answers).double().mean().item())
    assert set(found["accuracy_by_hops"]) == {"1", "2"}


def test_checkpoint_of_another_task_or_config(tmp_path):
    train(TrainingConfig(steps=1, **TINY), out=tmp_path, progress=False)
    with pytest.raises(InputError, match="already holds a training run"):
        train(TrainingConfig(steps=1, **TINY), out=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="task 'number', not of 'index'"):
        train(
            TrainingConfig(steps=1, task="index", **{**TINY, "task_parameters": {}}),
            out=tmp_path,
            resume=True,
            progress=False,
        )
    with pytest.raises(CheckpointError, match="learning_rate"):
        train(TrainingConfig(steps=1, **{**TINY, "learning_rate": 0.5}), out=tmp_path, resume=True, progress=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"preset": "huge"}, "unknown preset 'huge'"),
        ({"task": "words"}, "unknown task"),
        ({"task_parameters": {"max_hops": 30}}, "too small for 30 hops"),
        ({"dropout": 1.5}, "dropout"),
        ({"steps": 0}, "steps must be"),
        ({"seed": -1}, "seed must not be negative"),
        ({"learning_rate": float("nan")}, "number above 0"),
        ({"model": {"heads": 5}}, "even multiple"),
        ({"model": {"width": 5}}, "no size 'width'"),
    ],
)
def test_wrong_configs(wrong, message):
    with pytest.raises(InputError, match=message):
        TrainingConfig(**wrong)


def test_log_steps():
    assert log_steps(800) == [0, 50, 100, 200, 250, 500, 750, 800]
