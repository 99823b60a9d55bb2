"""Training transformers' GPT-J on a task, so that its heads can be followed while they form.

Algorithm. `schedule_steps x batch` balanced samples are generated once from the seed; step s uses rows
[s batch, (s+1) batch). The loss is the cross-entropy of the answer at the last position only. AdamW with a linear
warm-up and a linear decay to zero at `schedule_steps`; `steps` may stop earlier, and is then a prefix of the full run.
Every `every` steps the model is evaluated on samples of another seed, and whatever an `evaluate` callback
returns is added to the
record. The order of the data is a function of seed and step alone, and a checkpoint holds weights, optimiser moments
and the random state of the dropout, so a resumed run gives the curve of an uninterrupted one.

On CUDA a step can be captured once as a graph and replayed (`graph=True`): the models are so small that launching
kernels one by one would take most of the time.

Facts (presets, optimiser, schedule): arXiv 2605.31558.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from posattn.errors import CheckpointError, InputError
from posattn.interrupts import Held, Terminated
from posattn.models.loading import placement, quiet
from posattn.progress import note, reached
from posattn.results import read_tensors, write_tensors
from posattn.tasks import Samples, Task, make_task
from posattn.words import count

#: Model presets: layers, heads, width and rotary dimensions of the GPT-J (arXiv 2605.31558: "paper").
PRESETS: dict[str, dict[str, int]] = {
    "paper": {"layers": 12, "heads": 1, "d_model": 128},
    "seed": {"layers": 6, "heads": 8, "d_model": 128},
}

Evaluate = Callable[[Any, int], dict[str, Any]]
#: Positions the model's rotary table covers; weights do not depend on it.
CONTEXT = 8192
_STATE = "training.safetensors"
_CURVES = "curves.jsonl"


class GraphCaptureError(RuntimeError):
    """The CUDA graph of a training step could not be captured; the process should train without one."""


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides a run. JSON-able; two runs with equal configs give equal curves on the same machine.

    Raises:
        InputError: an unknown task or preset, or a number out of range.
    """

    task: str = "number"
    task_parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    preset: str = "paper"
    steps: int = 6750
    schedule_steps: int | None = None
    batch: int = 64
    learning_rate: float = 3e-4
    warmup: int = 750
    weight_decay: float = 1e-4
    betas: tuple[float, float] = (0.95, 0.999)
    dropout: float = 0.1
    seed: int = 0
    every: int = 50
    eval_samples: int = 1024
    autocast: bool = False
    model: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.preset not in PRESETS:
            raise InputError(f"unknown preset '{self.preset}': choose from {', '.join(PRESETS)}")
        for name in ("steps", "batch", "every", "eval_samples"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise InputError(f"dropout must lie in [0, 1), not {self.dropout}")
        if not 0 < self.learning_rate < math.inf or self.warmup < 0:
            raise InputError("the learning rate must be a number above 0 and the warm-up not negative")
        if self.seed < 0:
            raise InputError(f"a seed must not be negative, got {self.seed}")
        unknown = sorted(set(self.model) - {"layers", "heads", "d_model"})
        if unknown:
            raise InputError(f"a preset has no size '{unknown[0]}': it has layers, heads, d_model")
        if self.shape["d_model"] % (2 * self.shape["heads"]):
            raise InputError(f"d_model {self.shape['d_model']} must be an even multiple of {self.shape['heads']} heads")
        make_task(self.task, **self.task_parameters)

    @property
    def shape(self) -> dict[str, int]:
        return {**PRESETS[self.preset], **self.model}

    @property
    def total(self) -> int:
        """Steps of the learning-rate schedule and of the data set: 6750 unless set or exceeded."""
        return max(self.schedule_steps or 6750, self.steps)

    def make_task(self) -> Task:
        return make_task(self.task, **self.task_parameters)

    def rate(self, step: int) -> float:
        """Learning rate of 0-based `step`: linear warm-up, then linear to zero at `total`."""
        if step < self.warmup:
            return self.learning_rate * step / max(1, self.warmup)
        return self.learning_rate * max(0.0, (self.total - step) / max(1, self.total - self.warmup))

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> TrainingConfig:
        """A config from what `dataclasses.asdict` and JSON made of one."""
        return cls(**{**facts, "betas": tuple(facts["betas"])})

    def identity(self) -> dict[str, Any]:
        """What must agree between a checkpoint and the run that resumes it (the number of steps may grow
        within a schedule)."""
        facts = json.loads(json.dumps(dataclasses.asdict(self)))
        facts.pop("steps")
        facts["schedule_steps"] = self.total
        return facts


@dataclasses.dataclass(frozen=True, eq=False)
class TrainingRun:
    """A finished or stopped run: the model (in eval mode), its curve, and how far it came.

    curves: one record per evaluated step with step, loss, learning_rate, accuracy, accuracy_by_hops and what
    `evaluate` added.
    """

    model: Any
    config: TrainingConfig
    curves: list[dict[str, Any]]
    step: int
    stopped: str = ""

    @property
    def converged(self) -> bool:
        """Whether the last measured accuracy is at least .99."""
        return bool(self.curves) and self.curves[-1]["accuracy"] >= 0.99


def build_model(config: TrainingConfig) -> Any:
    """A freshly initialised GPT-J for the config, decided by its seed (float32, CPU)."""
    from transformers import GPTJConfig, GPTJForCausalLM

    shape = config.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        settings: dict[str, Any] = {
            "vocab_size": config.make_task().vocabulary_size,
            "n_positions": CONTEXT,
            "n_embd": shape["d_model"],
            "n_layer": shape["layers"],
            "n_head": shape["heads"],
            "rotary_dim": shape["d_model"] // shape["heads"],
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
            "attn_implementation": "sdpa",
        }
        return GPTJForCausalLM(GPTJConfig(**settings))


def answer_logits(model: Any, tokens: Int[Tensor, "batch length"]) -> Tensor:
    """Logits `[batch, vocabulary]` at the last position; the output layer runs there only."""
    length = tokens.shape[1]
    # an explicit mask: the library's shortcuts for "no mask" ask the device for values, which a graph cannot capture
    mask = torch.full((length, length), torch.finfo(torch.float32).min, device=tokens.device).triu(1)[None, None]
    hidden = model.transformer(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, -1])


@torch.no_grad()
def accuracy(model: Any, samples: Samples, batch: int = 1024) -> dict[str, Any]:
    """Share of samples whose arg-max token is the answer, overall and by number of hops, and the mean loss in nats."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    right, losses = [], []
    try:
        for start in range(0, len(samples), batch):
            part = samples[slice(start, start + batch)]
            logits = answer_logits(model, part.tokens.to(device)).float()
            right.append(logits.argmax(-1).cpu() == part.answers)
            losses.append(torch.nn.functional.cross_entropy(logits, part.answers.to(device), reduction="none").cpu())
    finally:
        model.train(training)
    hit = torch.cat(right).double()
    by_hops = {str(int(h)): hit[samples.hops == h].mean().item() for h in samples.hops.unique()}
    return {
        "accuracy": hit.mean().item(),
        "accuracy_by_hops": by_hops,
        "eval_loss": torch.cat(losses).double().mean().item(),
    }


def log_steps(last: int, every: int = 250, first: int = 50) -> list[int]:
    """Sparse checkpoint steps: 0, doublings of `first` up to `every`, then every `every` steps, and the last."""
    steps = {0, last}
    step = first
    while step < every:
        steps.add(step)
        step *= 2
    return sorted(s for s in steps | set(range(every, last + 1, every)) if s <= last)


def saved_step(folder: str | Path) -> int | None:
    """The step of the state that a run has left in its folder; None without a state that can be read."""
    try:
        return int(read_tensors(Path(folder) / _STATE)[1]["step"])
    except (CheckpointError, KeyError, OSError):
        return None


def train(
    config: TrainingConfig,
    evaluate: Evaluate | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    device: str | torch.device = "cpu",
    save_every: int = 500,
    snapshots: Sequence[int] = (),
    on_snapshot: Callable[[Any, int], None] | None = None,
    max_seconds: float | None = None,
    graph: bool = False,
    progress: bool = True,
) -> TrainingRun:
    """Train a model on a task.

    evaluate: called with (model in eval mode, step) at every `config.every` steps; its dict joins the record.
    out: folder for `curves.jsonl`, the resumable state and snapshots; nothing is written without it.
    resume: continue from the state in `out` when there is one.
    snapshots: steps at which the weights are saved as float16 (`snapshots/step-000250.safetensors`) and
    `on_snapshot` is called.
    max_seconds: stop cleanly after this much wall-clock time.
    Ctrl-C ends a run after the step it is in, with its state saved in `out`; a second one at once, with the state that
    was saved last.

    Raises:
        InputError: `out` holds a run already and `resume` is off, a device is asked for that is not there, or
            `max_seconds` is not above 0.
        CheckpointError: the state in `out` belongs to another task or config, or cannot be read.
        GraphCaptureError: `graph` and the capture failed.
    """
    device, _ = placement(device)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"training runs on the CPU or on CUDA, not on {device.type}: use device='cpu'")
    if max_seconds is not None and not max_seconds > 0:
        raise InputError(f"max_seconds must be above 0, not {max_seconds}")
    folder = Path(out) if out is not None else None
    state = folder / _STATE if folder else None
    if state and state.exists() and not resume:
        raise InputError(f"{folder} already holds a training run: resume it or choose another folder")
    started = time.monotonic()
    task = config.make_task()
    data = task.generate(config.total * config.batch, seed=config.seed)
    held_out = task.generate(config.eval_samples, seed=config.seed + 1_000_003)
    tokens, answers = data.tokens.to(device), data.answers.to(device)

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed + 1)
        model = build_model(config).to(device).train()
        stepper = _Stepper(
            model, config, tokens[: config.batch], answers[: config.batch], graph and device.type == "cuda"
        )
        step, curves, losses = 0, [], []
        if state and state.exists():
            step, curves, losses = _restore(state, model, stepper.optimizer, config)
            if progress:
                note(f"going on from step {step} of {config.steps} ({folder})")
        elif folder:
            if progress and resume:
                note(f"nothing to resume in {folder}: training from the beginning")
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _CURVES).unlink(missing_ok=True)
            (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=1) + "\n")
        if folder and curves:
            (folder / _CURVES).write_text("".join(json.dumps(r) + "\n" for r in curves))

        stopped = ""
        wanted = set(snapshots)
        done = bool(curves) and curves[-1]["step"] == step  # a resumed run has evaluated this step already
        # an interrupt waits until a step is whole: its state can be saved, and gone on from, to the bit
        with Held() as held:
            try:
                while True:
                    held.release()
                    reached(step, config.steps, "step")
                    if not done and (step % config.every == 0 or step == config.steps):
                        with held.at_once():
                            record = _evaluate(model, config, held_out, step, losses, evaluate)
                        losses = []
                        curves.append(record)
                        if folder:
                            with open(folder / _CURVES, "a") as file:
                                file.write(json.dumps(record) + "\n")
                        if progress:
                            note(
                                f"{config.task} step {step}/{config.steps} loss {record['loss']:.4f} accuracy "
                                f"{record['accuracy']:.3f} {time.monotonic() - started:.0f} s"
                            )
                    if not done and step in wanted:
                        if folder:
                            _snapshot(folder / "snapshots" / f"step-{step:06d}.safetensors", model, config, step)
                        if on_snapshot:
                            on_snapshot(model, step)
                    if step >= config.steps:
                        break
                    if max_seconds is not None and time.monotonic() - started > max_seconds:
                        stopped = (
                            f"time limit of {max_seconds:g} s reached after {step} of {count(config.steps, 'step')}"
                        )
                        break
                    if state and not done and step and step % save_every == 0:
                        _save(state, model, stepper.optimizer, config, step, curves, losses)
                    done = False
                    rows = slice(step * config.batch, (step + 1) * config.batch)
                    losses.append(stepper(tokens[rows], answers[rows], config.rate(step)))
                    step += 1
            except (KeyboardInterrupt, Terminated):
                if state and not held.torn:
                    _save(state, model, stepper.optimizer, config, step, curves, losses)
                raise
        if stopped and (not curves or curves[-1]["step"] != step):
            record = _evaluate(model, config, held_out, step, losses, evaluate)
            final = [*curves, record]  # measured off the grid: part of this run, but not of a resumed one
        else:
            final = curves
        if state:
            _save(state, model, stepper.optimizer, config, step, curves, losses)
    if progress and stopped:
        note(stopped)
    return TrainingRun(model.eval(), config, final, step, stopped)


class _Stepper:
    """One optimisation step, eager or as a replayed CUDA graph. Returns the loss (a tensor on the device)."""

    def __init__(self, model: Any, config: TrainingConfig, tokens: Tensor, answers: Tensor, graph: bool) -> None:
        self.model, self.config = model, config
        cuda = tokens.device.type == "cuda"
        if cuda:
            torch.backends.cuda.matmul.allow_tf32 = True
        rate = torch.tensor(0.0, device=tokens.device) if graph else 0.0
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=rate,
            betas=config.betas,
            weight_decay=config.weight_decay,
            fused=True,
            capturable=graph,
        )
        self.graph: Any = None
        if graph:
            try:
                self._capture(tokens, answers)
            except Exception as error:
                raise GraphCaptureError(f"{type(error).__name__}: {error}") from error

    def _step(self, tokens: Tensor, answers: Tensor) -> Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.config.autocast):
            logits = answer_logits(self.model, tokens)
        loss = torch.nn.functional.cross_entropy(logits.float(), answers)
        self.optimizer.zero_grad(set_to_none=self.graph is None)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def _capture(self, tokens: Tensor, answers: Tensor) -> None:
        weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        random = torch.cuda.get_rng_state(tokens.device)
        self.tokens, self.answers = tokens.clone(), answers.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step(self.tokens, self.answers)
        torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = answer_logits(self.model, self.tokens)
            self.loss = torch.nn.functional.cross_entropy(logits.float(), self.answers)
            self.loss.backward()
            self.optimizer.step()
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        self.graph = graph
        graph.replay()
        torch.cuda.synchronize()
        # the warm-up trained: put everything back as it was
        self.model.load_state_dict(weights)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()
        for moments in self.optimizer.state.values():
            for value in moments.values():
                value.zero_()
        torch.cuda.set_rng_state(random, tokens.device)

    def __call__(self, tokens: Tensor, answers: Tensor, rate: float) -> Tensor:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.graph is None:
            return self._step(tokens, answers)
        self.tokens.copy_(tokens)
        self.answers.copy_(answers)
        self.graph.replay()
        return self.loss.detach().clone()


def _evaluate(
    model: Any, config: TrainingConfig, held_out: Samples, step: int, losses: list[Any], evaluate: Evaluate | None
) -> dict[str, Any]:
    mean = float(torch.stack([torch.as_tensor(x) for x in losses]).double().mean()) if losses else math.nan
    record: dict[str, Any] = {
        "step": step,
        "loss": mean,
        "learning_rate": config.rate(step),
        **accuracy(model, held_out),
    }
    if math.isnan(mean):
        record["loss"] = record["eval_loss"]
    if evaluate is not None:
        devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
        model.eval()
        # whatever a callback draws must not move the dropout's random state
        with torch.random.fork_rng(devices=devices):
            record.update(evaluate(model, step))
        model.train()
    return record


def _snapshot(path: Path, model: Any, config: TrainingConfig, step: int) -> None:
    weights = {k: v.half() if v.is_floating_point() else v for k, v in model.state_dict().items()}
    write_tensors(path, weights, {"kind": "snapshot", "step": step, "config": dataclasses.asdict(config)})


def load_snapshot(path: str | Path) -> tuple[Any, TrainingConfig, int]:
    """The model (float32, eval mode), config and step of a saved snapshot.

    Raises:
        CheckpointError: the file cannot be read or is no snapshot.
    """
    weights, header = read_tensors(path)
    if header.get("kind") != "snapshot":
        raise CheckpointError(f"{path} is no training snapshot")
    config = TrainingConfig.from_json(header["config"])
    model = build_model(config)
    model.load_state_dict({k: v.float() for k, v in weights.items()})
    return model.eval(), config, header["step"]


def _save(
    path: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    config: TrainingConfig,
    step: int,
    curves: list[dict[str, Any]],
    losses: list[Any],
) -> None:
    tensors = {f"model.{k}": v for k, v in model.state_dict().items()}
    for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
        tensors |= {f"optimizer.{i}.{k}": torch.as_tensor(v) for k, v in optimizer.state.get(parameter, {}).items()}
    device = next(model.parameters()).device
    tensors["random.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)
    tensors["losses"] = torch.stack([torch.as_tensor(x) for x in losses]).cpu() if losses else torch.zeros(0)
    header = {"kind": "training", "step": step, "config": config.identity(), "curves": curves}
    write_tensors(path, tensors, header)


def _restore(
    path: Path, model: Any, optimizer: torch.optim.Optimizer, config: TrainingConfig
) -> tuple[int, list[dict[str, Any]], list[Any]]:
    tensors, header = read_tensors(path)
    if header.get("kind") != "training":
        raise CheckpointError(f"{path} is no training state")
    theirs, ours = header["config"], config.identity()
    if theirs["task"] != ours["task"]:
        raise CheckpointError(f"{path} is a checkpoint of task '{theirs['task']}', not of '{ours['task']}'")
    differs = [k for k in ours if theirs.get(k) != ours[k]]
    if differs:
        raise CheckpointError(
            f"{path} was trained with {differs[0]} = {theirs.get(differs[0])}, not {ours[differs[0]]}: nothing "
            f"to resume"
        )
    model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
    for i, parameter in enumerate(optimizer.param_groups[0]["params"]):
        prefix = f"optimizer.{i}."
        for name, value in ((k[len(prefix) :], v) for k, v in tensors.items() if k.startswith(prefix)):
            state = optimizer.state[parameter]
            if name in state:  # a captured graph holds these very tensors
                state[name].copy_(value)
            else:
                state[name] = value.to(parameter.device)
    torch.set_rng_state(tensors["random.cpu"])
    device = next(model.parameters()).device
    if device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], device)
    return header["step"], header["curves"], list(tensors["losses"].to(device))


def save_model(model: Any, config: TrainingConfig, folder: str | Path, facts: dict[str, Any] | None = None) -> Path:
    """Write the model as a transformers folder (float16) with its task's tokenizer and `posattn_task.json`."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    task = config.make_task()
    stored = build_model(config)
    stored.load_state_dict({k: v.detach().cpu().float() for k, v in model.state_dict().items()})
    with quiet():
        stored.half().save_pretrained(target)
        task.tokenizer().save_pretrained(target)
    tokens = target / "tokenizer_config.json"  # the class name that transformers 4 and 5 both know
    named = json.loads(tokens.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokens.write_text(json.dumps(named, indent=1) + "\n")
    described = {
        "task": task.name,
        "parameters": task.parameters,
        "training": dataclasses.asdict(config),
        **(facts or {}),
    }
    (target / "posattn_task.json").write_text(json.dumps(described, indent=1) + "\n")
    return target
