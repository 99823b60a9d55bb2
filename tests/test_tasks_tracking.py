from __future__ import annotations

import copy

import pytest
import torch

from posattn.errors import DataError, InputError
from posattn.heads.rotary import rotary_usage
from posattn.heads.scores import score_heads
from posattn.models.loading import as_model
from posattn.tasks.tracking import Dynamics, Emergence, HeadTracker, PurityRelation, combine, purity
from posattn.tasks.training import TrainingConfig, accuracy, build_model, load_snapshot, train

CONFIG = {
    "task_parameters": {"targets": 3, "pre_targets": 2, "max_hops": 2, "letters": 5},
    "model": {"layers": 2, "heads": 2, "d_model": 16},
    "schedule_steps": 40,
    "batch": 8,
    "warmup": 4,
    "every": 4,
    "eval_samples": 32,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    config = TrainingConfig(steps=12, **CONFIG)
    folder = tmp_path_factory.mktemp("run")
    tracker = HeadTracker.for_task(config.make_task(), every=4, prompts=6)
    run = train(config, tracker, folder, snapshots=[0, 8], progress=False)
    return config, folder, tracker, run


def test_tracking_leaves_training_alone(tracked):
    config, _, _, run = tracked
    plain = train(config, progress=False)
    for a, b in zip(plain.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for mine, other in zip(run.curves, plain.curves, strict=True):
        assert {k: mine[k] for k in other} == other
        assert "positional" in mine


def test_tracker_equals_score_heads_and_rotary_usage(tracked):
    _, _, tracker, run = tracked
    model = as_model(copy.deepcopy(run.model))
    prompts = torch.stack(tracker.documents)
    scores = score_heads(model, prompts, evidence=False, companions=False, bootstrap=0)
    usage = rotary_usage(model, prompts, queries="last", scores=False)
    record = run.curves[-1]
    for name in ("positional", "symbolic", "entropy"):
        assert torch.allclose(torch.tensor(record[name], dtype=torch.float64), getattr(scores, name), atol=1e-5)
    assert torch.allclose(torch.tensor(record["frequency_id"], dtype=torch.float64), usage.layer_id, atol=1e-4)


def test_kill_and_resume_gives_the_same_tracked_curves(tracked, tmp_path):
    config, _, tracker, whole = tracked

    class Killed(Exception):
        pass

    def dying(model, step):
        record = tracker(model, step)
        if step == 8:
            raise Killed
        return record

    with pytest.raises(Killed):
        train(config, dying, tmp_path / "run", save_every=5, progress=False)
    fresh = HeadTracker.for_task(config.make_task(), every=4, prompts=6)
    resumed = train(config, fresh, tmp_path / "run", resume=True, progress=False)
    assert resumed.curves == whole.curves


def test_users_own_loop_and_saved_checkpoints(tracked):
    config, folder, _, run = tracked
    samples = config.make_task().generate(32, seed=1)
    model = build_model(config).train()
    tracker = HeadTracker(samples[:6], every=2, accuracy=lambda m: accuracy(m, samples))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = torch.get_rng_state()
    for step in range(4):
        found = tracker(model, step)
        assert bool(found) == (step % 2 == 0)
        assert model.training
        assert torch.equal(torch.get_rng_state(), state)
        optimizer.zero_grad()
        model(samples.tokens).logits.square().mean().backward()
        optimizer.step()
        state = torch.get_rng_state()
    assert tracker.result().steps == (0, 2)
    assert torch.isfinite(tracker.result().accuracy).all()
    assert not torch.equal(tracker.result().positional[0, 0], tracker.result().positional[0, 1])
    # the same prompts over snapshots on disk, given as functions that load them
    later = HeadTracker.for_task(config.make_task(), every=4, prompts=6, frequencies=False)
    paths = [folder / "snapshots" / f"step-{s:06d}.safetensors" for s in (8, 0)]
    dynamics = later.follow((load_snapshot(p)[2], lambda p=p: load_snapshot(p)[0]) for p in paths)
    assert dynamics.steps == (0, 8)
    assert torch.isnan(dynamics.frequency_id).all()
    expected = torch.tensor(run.curves[2]["positional"], dtype=torch.float64)
    assert torch.allclose(dynamics.positional[0, 1], expected, atol=0.02)  # weights stored as float16


def _records(gamma_by_step, accuracies):
    return [
        {
            "step": 10 * i,
            "accuracy": a,
            "accuracy_by_hops": {"1": a, "2": a / 2},
            "eval_loss": 1.0 - a,
            "positional": [[1 - g, 0.5]],
            "symbolic": [[g, 0.5]],
            "entropy": [[1.0, 1.0]],
            "frequency_id": [3.0],
        }
        for i, (g, a) in enumerate(zip(gamma_by_step, accuracies, strict=True))
    ]


def test_emergence_and_relation_on_known_curves(tmp_path):
    gammas = [0.4, 0.1, 0.4, 0.1, 0.05]  # pure, mixed again, then pure for good
    runs = {f"seed {i}": _records(gammas, [0.1, 0.5, 0.92, 0.95, 1.0]) for i in range(3)}
    dynamics = Dynamics.from_records(runs)
    emergence = dynamics.emergence()
    head = [r for r in emergence.rows if r["run"] == "seed 0" and r["event"] == "positional"]
    assert [(r["layer"], r["head"], r["first"], r["stays"]) for r in head] == [(0, 0, 10, 30)]
    assert emergence.step("seed 1", "accuracy ≥ 0.9") == 20
    assert emergence.step("seed 1", "accuracy ≥ 0.99") == 40
    assert emergence.lag("seed 1") == -10
    assert emergence.step("seed 1", "accuracy, 2 hops ≥ 0.5") == 40
    assert not any(r["event"] == "symbolic" for r in emergence.rows)
    assert dynamics.counts()[0].tolist() == [[0, 0, 0, 2], [1, 0, 0, 1], [0, 0, 0, 2], [1, 0, 0, 1], [1, 0, 0, 1]]
    relation = dynamics.relation()
    assert relation.values["pure_heads"].tolist() == pytest.approx([0.57735] * 3, abs=1e-4)
    assert relation.intervals["lag"].tolist() == [-10, -10]
    single = Dynamics.from_records({"one": runs["seed 0"]}).relation()
    assert torch.isnan(single.intervals["lag"]).all()
    frame = relation.to_dataframe()
    assert set(frame["run"]) == {*runs, "mean"}
    for result, kind in ((dynamics, Dynamics), (emergence, Emergence), (relation, PurityRelation)):
        loaded = kind.load(result.save(tmp_path / "r.safetensors"))
        assert loaded.to_dataframe().equals(result.to_dataframe())
        assert result.plot().get_xlabel()
    assert len(dynamics.to_dataframe()) == 3 * 5 * 2
    assert len(dynamics.curves_dataframe()) == 15


def test_combine_keeps_common_steps():
    a = Dynamics.from_records({"a": _records([0.1] * 3, [0.1] * 3)})
    b = Dynamics.from_records({"b": _records([0.2] * 5, [0.2] * 5)})
    both = combine([a, b])
    assert both.runs == ("a", "b")
    assert both.steps == (0, 10, 20)
    assert both.accuracy[1, 0] == 0.2
    with pytest.raises(DataError, match="one name"):
        combine([a, a])


def test_purity_is_the_distance_to_the_nearest_corner():
    points = [(1.0, 0.0), (0.1, 0.95), (0.9, 0.7), (0.5, 0.5)]
    found = purity(torch.tensor([p for p, _ in points]), torch.tensor([s for _, s in points]))
    assert found.tolist() == pytest.approx([0.0, 0.1, 0.3, 0.5])
    even = torch.ones(1)
    assert purity(even, even).tolist() == [0.0]
    assert purity(even, even, uniform=False).tolist() == [1.0]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: HeadTracker(torch.tensor([[1, 2, 3]]), every=0), InputError, "every must be"),
        (lambda: HeadTracker(torch.tensor([[1, 2]])), DataError, "three"),
        (lambda: HeadTracker(torch.tensor([[1, 1, 3]])), DataError, "over and over"),
        (lambda: HeadTracker(torch.tensor([[1, 2, 3]])).result(), DataError, "nothing has been tracked"),
        (lambda: Dynamics.from_records({}), DataError, "no run"),
        (lambda: Dynamics.from_records({"a": _records([0.1], [0.1])}).relation(0.7), InputError, "purity"),
        (
            lambda: Dynamics.from_records({"a": _records([0.1], [0.1])[:1], "b": _records([0.1] * 2, [0.1] * 2)[1:]}),
            DataError,
            "no step in common",
        ),
    ],
)
def test_wrong_use(make, error, message):
    with pytest.raises(error, match=message):
        make()
