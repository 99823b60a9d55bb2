"""What a measurement will need, from the model's shape alone: memory and time before anything is loaded.

Parameters are counted exactly, by building the model without storage. Memory is what is held at once:

    weights      every parameter in the model's dtype
    statistics   float64 running sums: [T,N,N] a kernel (H of them per head, M = N/bins instead of N when binned), and
                 what the layers of one unfinished pass have left (float32)
    pass         the widest moment of a forward pass: one layer's activations, its attention weights where they are
                 written down (eager attention holds three copies), and the logits
    check        the self-check of two documents, which compares patterns
    influence    the activations of all layers at once, which a gradient needs

and the peak is weights + statistics + the largest of the other three. Time counts floating point operations (two a
parameter and token, four N²·H·d a layer for attention, four forward passes for a gradient) and divides them by the rate
that a matrix product reaches on this machine at this moment, times `EFFICIENCY`. Both are estimates: memory is
meant to be right within a factor of two, time within a factor of a few.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posattn.errors import InputError, UnsupportedModelError
from posattn.words import count

if TYPE_CHECKING:
    from posattn.models.base import Model

#: share of a large matrix product's rate that whole models reach
EFFICIENCY = 0.4
#: fewer bins than these would say little of a profile
LEAST_BINS = 32
#: share of the free memory that a job may take
ROOM = 0.9
#: memory is estimated within this factor, so a job that needs more than so many times what is free cannot run
UNSURE = 2
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model that decide what measuring it costs. `hidden` is the MLP's width.

    `interface`: it uses transformers' attention interface, as the plain adapter and thus streaming need it.
    """

    name: str
    parameters: int
    layers: int
    heads: int
    key_heads: int
    head_dim: int
    width: int
    hidden: int
    vocabulary: int
    context: int | None
    interface: bool = True


@dataclasses.dataclass(frozen=True)
class Job:
    """What is asked for. `bins` and `streamed` as in `posattn.measure` (streamed: by the plain adapter).

    `contributions`: what patterns are needed for, and `logits`: means by distance, both as `posattn profile` does.
    """

    length: int = 256
    samples: int = 64
    batch_size: int = 8
    dtype: str = "float32"
    per_head: bool = False
    influence: bool = True
    contributions: bool = True
    logits: bool = False
    streamed: bool = False
    bins: int | None = None
    processes: int = 1


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes by part and at the peak, seconds (NaN when no rate was measured), and what is free."""

    shape: Shape
    job: Job
    memory: dict[str, int]
    peak: int
    free: int
    operations: float
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the peak stays within what is free."""
        return self.peak <= ROOM * self.free

    @property
    def hopeless(self) -> bool:
        """Whether it cannot fit, even if it needs only half of the estimate."""
        return self.peak > UNSURE * self.free

    def lines(self) -> list[str]:
        """The estimate in words."""
        job, shape = self.job, self.shape
        parts = ", ".join(f"{name} {size(value)}" for name, value in self.memory.items() if value)
        return [
            f"{shape.name}: {shape.parameters / 1e6:.4g} million parameters in {job.dtype}, "
            f"{count(shape.layers, 'layer')}, {count(shape.heads, 'head')}, {count(job.samples, 'document')} of "
            f"{count(job.length, 'token')}, {job.batch_size} at a time",
            f"memory: about {size(self.peak)} of {size(self.free)} free ({parts})",
            f"time: about {duration(self.seconds)} ({self.operations:.2g} floating point operations)",
        ]


def size(number: float) -> str:
    """Bytes in words."""
    for unit in _UNITS[:-1]:
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """Seconds in words."""
    if seconds != seconds:
        return "unknown"
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{max(seconds, 1):.0f} seconds" if seconds >= 1 else "a second"


def shape_from_config(source: str | os.PathLike[str]) -> Shape:
    """The shape of a model from its configuration: a folder, a `.gguf` file, `bundled:NAME` or a hub name. No weights
    are read.

    Raises:
        InputError: no such `.gguf` file.
        UnsupportedModelError: there is no configuration, or no causal language model of its kind.
    """
    import transformers

    from posattn.models.loading import gguf_folder, quiet

    name = os.fspath(source)
    place: str | Path = name
    keywords = {}
    if name.endswith(".gguf"):
        path = Path(name).expanduser()
        place, keywords = gguf_folder(path), {"gguf_file": path.name}
    elif name.startswith("bundled:"):
        from posattn.models.bundled import bundled_path

        place = bundled_path(name)
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(str(place), **keywords)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:  # upstream raises whatever it meets
            line = " ".join(str(error).split())[:200]
            raise UnsupportedModelError(f"the configuration of {name} cannot be read: {line}") from error
    return shape_from_model(model, name)


def shape_from_model(model: Any, name: str) -> Shape:
    """The shape of a transformers model, with or without storage."""
    from posattn.models._reading import text_config

    config = text_config(model.config)

    def first(*names: str) -> int | None:
        values = (getattr(config, field, None) for field in names)
        return next((int(v) for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)

    heads = first("num_attention_heads", "n_head", "n_heads")
    width = first("hidden_size", "n_embd", "d_model")
    layers = first("num_hidden_layers", "n_layer", "n_layers")
    if heads is None or width is None or layers is None:
        raise UnsupportedModelError(f"the configuration of {name} does not say how many layers and heads there are")
    return Shape(
        name=name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=layers,
        heads=heads,
        key_heads=first("num_key_value_heads") or heads,
        head_dim=first("head_dim") or width // heads,
        width=width,
        hidden=first("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size") or 4 * width,
        vocabulary=first("vocab_size") or 1,
        context=first("max_position_embeddings", "n_positions", "max_seq_len"),
        interface=_interface(model),
    )


def shape_of(model: Model) -> Shape:
    """The shape of a loaded model; its weights hold their memory already and count as none. The MLP is taken to be four
    times as wide as the residual stream."""
    widest = max(model.layers, key=lambda layer: layer.n_heads)
    return Shape(
        name=model.name,
        parameters=0,
        layers=model.n_layers,
        heads=widest.n_heads,
        key_heads=widest.n_key_heads,
        head_dim=widest.head_dim,
        width=model.d_model,
        hidden=4 * model.d_model,
        vocabulary=model.vocab_size,
        context=model.context,
        interface=_interface(model.module),
    )


def _interface(module: Any) -> bool:
    """Whether a model uses transformers' attention interface; a bridge is asked about the model inside it."""
    return bool(getattr(type(getattr(module, "original_model", module)), "_supports_attention_backend", True))


def estimate(shape: Shape, job: Job, free: int, rate: float | None = None) -> Estimate:
    """Memory and time of `job`; `free` bytes, `rate` floating point operations a second (None: no time).

    Raises:
        InputError: the length is beyond the model's context, or the dtype is unknown.
    """
    found = getattr(torch, job.dtype, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"unknown dtype {job.dtype!r}: choose float32, bfloat16, float16 or float64")
    if shape.context is not None and job.length > shape.context:
        raise InputError(
            f"length {job.length} is beyond the context of {shape.name}, {shape.context} tokens: "
            f"use --length {shape.context}"
        )
    b, n, t, h = min(job.batch_size, job.samples), job.length, shape.layers, shape.heads
    item = found.itemsize
    wide = max(item, 4)
    side = n if job.bins is None else -(-n // job.bins)
    kernels = t * side**2 * (h if job.per_head else 1)
    statistics = 12 * kernels  # float64 sums, and float32 parts of the pass that is not finished
    if job.contributions:
        statistics += 4 * 12 * t * n**2  # energy, key, projection, value norm
    pattern = b * h * n**2
    streaming = job.streamed and not job.per_head and not job.contributions
    layer = b * n * (8 * shape.width + 3 * shape.hidden + 4 * h * shape.head_dim) * item
    if job.logits:
        statistics += 4 * 8 * t * h * n
    logits = b * n * shape.vocabulary * item
    attention = 0 if streaming else pattern * (2 * item + wide)
    # five temporaries of a block of `posattn.models.tiles`
    blocks = 5 * 4 * min(2**21, n * n * h // shape.key_heads) if streaming else 0
    if job.logits:  # five temporaries of a tile of `posattn.probes.positional`
        blocks = max(blocks, 5 * 4 * min(2**22, n * n * h))
    # `PlainModel.run` makes one position's logits
    run = max(layer + attention + blocks, 0 if job.streamed else logits)
    checked = min(2, job.samples) * h * n**2
    if streaming:
        checked = min(checked, 2**26)
    memory = {
        "weights": shape.parameters * item,
        "statistics": statistics,
        "pass": run,
        "check": checked * (3 * item + 2 * wide),
        "influence": 0,
    }
    if job.influence:
        kept = t * (b * n * (8 * shape.width + 3 * shape.hidden + 3 * h * shape.head_dim) * item)
        kept += 0 if job.streamed else t * pattern * (item + wide)
        memory["influence"] = kept + 3 * logits
    peak = memory["weights"] + memory["statistics"] + max(memory[name] for name in ("pass", "check", "influence"))
    documents = -(-job.samples // job.processes)
    once = 2 * shape.parameters * n + 4 * t * h * shape.head_dim * n**2
    per_document = once * (5 if job.influence else 1)
    if job.contributions:
        per_document += t * (2 * h * h * n**2 + 4 * n * h * shape.head_dim * shape.width)
    per_document += (job.streamed + 2 * job.logits) * 2 * t * h * shape.head_dim * n**2
    operations = float(per_document * documents)
    seconds = float("nan") if rate is None else operations / (rate * EFFICIENCY)
    return Estimate(shape, job, memory, peak * job.processes, free, operations, seconds)


def nearest(shape: Shape, job: Job, free: int, rate: float | None = None) -> Estimate | None:
    """The first that fits of the settings that change the job ever more; None when none does."""
    for other in _easier(shape, job):
        found = estimate(shape, other, free, rate)
        if found.fits:
            return found
    return None


def _streamed(shape: Shape, job: Job) -> Iterator[Job]:
    """The same job through the plain adapter with ever coarser bins, where that is possible and changes anything."""
    if not shape.interface or job.per_head:
        return
    width = 1 if job.bins is None or not job.streamed else 2 * job.bins
    while job.length >= LEAST_BINS * width:
        yield dataclasses.replace(job, streamed=True, contributions=False, bins=width)
        width = max(16, 2 * width)


def _easier(shape: Shape, job: Job) -> Iterator[Job]:
    batch = job.batch_size
    while batch > 1:
        batch = max(1, batch // 2)
        yield dataclasses.replace(job, batch_size=batch)
    job = dataclasses.replace(job, batch_size=1)
    narrow = dataclasses.replace(job, dtype="bfloat16") if job.dtype in ("float32", "float64") else job
    yield narrow
    for influence in (True, False) if job.influence else (False,):
        for other in (job, narrow):
            other = dataclasses.replace(other, influence=influence)
            yield other
            yield from _streamed(shape, other)
    length = job.length
    while length > 2:
        length //= 2
        yield dataclasses.replace(job, length=length)
        yield dataclasses.replace(narrow, length=length)


def advice(shape: Shape, job: Job, free: int) -> str:
    """Why a job does not fit, and the nearest one that does, as options of the command line."""
    asked = estimate(shape, job, free)
    largest = max(asked.memory, key=lambda name: asked.memory[name])
    reason = (
        f"{shape.name} does not fit: it needs about {size(asked.peak)}, mostly {largest} "
        f"({size(asked.memory[largest])}), and {size(free)} are free"
    )
    other = nearest(shape, job, free)
    if other is None:
        return f"{reason}; no setting of posattn makes it fit: use a larger machine, or a device map"
    options = [f"--{name.replace('_', '-')} {getattr(other.job, name)}" for name in ("batch_size", "dtype", "length")
               if getattr(other.job, name) != getattr(job, name)]  # fmt: skip
    options += [f"--adapter plain --bins {other.job.bins}"] if other.job.bins != job.bins else []
    options += ["--no-influence"] if job.influence and not other.job.influence else []
    return f"{reason}; {' '.join(options)} would need about {size(other.peak)}"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device (for the CPU: main memory)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # all there is: better than nothing


def matmul_rate(device: torch.device, dtype: str, seconds: float = 0.2) -> float:
    """Floating point operations a second of a matrix product, measured for about `seconds`."""
    side = 4096 if device.type == "cuda" else 512
    a = torch.randn(side, side, device=device, dtype=getattr(torch, dtype))
    torch.mm(a, a)  # the first is slower
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        count += 1
    return 2 * side**3 * count / (time.perf_counter() - begun)
