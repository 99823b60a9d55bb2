"""The measuring loop: documents in, a `Measurement` out.

Every batch is one forward pass with the probes attached; what is kept are running statistics only, so memory does not
grow with the number of documents. With several processes (`posattn.distributed`) each measures its share of the
documents and all end with the merged statistics. With `checkpoint`, the statistics and the number of documents done
are written atomically every few batches; `resume=True` goes on from there, after checking that the model (down to a
sample of its weights), the documents and the settings are the same, and gives what an uninterrupted run gives.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from posattn.distributed import world
from posattn.errors import CheckpointError, InputError, NothingMeasuredError
from posattn.interrupts import advice
from posattn.models.base import Model
from posattn.probes.base import Probe
from posattn.probes.kernel import KernelProbe, Kernels, last_rows
from posattn.probes.mixing import Mixing, MixingProbe
from posattn.probes.session import Session, as_a_model, attach
from posattn.probes.streamed import BinnedKernels, StreamedKernelProbe
from posattn.progress import bar, note
from posattn.results import Provenance, Result, provenance, read_tensors, write_tensors
from posattn.tokens import Tokens, load_tokens
from posattn.words import count, percent, plural

if TYPE_CHECKING:
    import pandas as pd

#: a position that holds more of ‖X‖_F² than this makes the Frobenius λ a statement about that position
MASSIVE_SHARE = 0.5
#: how far the rows of a kernel without a sink may be from summing to 1 before it is mentioned
ROW_TOLERANCE = 1e-2
_HEADER = "measure"


@dataclasses.dataclass(frozen=True, eq=False)
class Measurement(Result):
    """What a run measured: mixing, kernels with rows that sum to 1, and what the reader must know (`warnings`).

    `kernels` [T,N,N], or [T,H,N,N] when measured per head; `row_mass` what their rows summed to before they were
    renormalised; `sink_mass` [T,H] the mean mass in each head's sink; `counts` [N] documents that reach each position.
    Binned, [T,M,M]: `binning` then holds the `width` of a bin in positions, the `bound` on the rollout's error in total
    variation, and how far rows stray from their bins (`strays`, see `posattn.probes.streamed`); `counts` are of rows.
    """

    kind: ClassVar[str] = "measurement"

    mixing: Mixing
    kernels: Float[Tensor, "t *h n n"]
    row_mass: Float[Tensor, "t *h n"]
    sink_mass: Float[Tensor, "t h"]
    counts: Int[Tensor, " n"]
    documents: int
    warnings: tuple[str, ...]
    provenance: Provenance
    binning: dict[str, Any] | None = None

    @property
    def per_head(self) -> bool:
        """Whether the heads were kept apart."""
        return self.kernels.dim() == 4

    def to_dataframe(self, kernels: bool = False) -> pd.DataFrame:
        """The mixing table; with `kernels=True` the last row of each kernel (layer, head, position, value) instead."""
        return last_rows(self.kernels) if kernels else self.mixing.to_dataframe()

    def plot(self, ax: Any = None) -> Any:
        """λ against the layer. Kernels are drawn by `plot_kernel`."""
        return self.mixing.plot(ax)

    def plot_kernel(self, layer: int, head: int | None = None, ax: Any = None) -> Any:
        """One kernel as a heat map (the mean over heads unless `head` is given)."""
        shown = Kernels(self.kernels, self.row_mass, self.sink_mass, self.counts, self.documents)
        return shown.plot(ax, layer=layer, head=head)


def measure(
    model: Any,
    tokens: Tokens | Int[Tensor, "m n"],
    per_head: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool = True,
    probes: Sequence[Probe] = (),
    *,
    check: bool = True,
    checkpoint_every: int = 8,
    streamed: bool | None = None,
    bins: int | None = None,
) -> Measurement:
    """Measure mixing and kernels over all documents.

    Args:
        model: a `posattn` model or a live TransformerLens model.
        tokens: from `load_tokens`, or token ids [M,N].
        per_head: keep the heads' kernels apart.
        checkpoint: file to write the state to every `checkpoint_every` batches and at the end.
        resume: go on from the checkpoint if it exists (a missing one means: start from the beginning).
        progress: show on stderr how far it is (the first process, where there are several): a bar on a terminal, else
            a line now and then.
        probes: further probes to run along; read them with `probe.result(model)` afterwards.
        check: verify on the first two documents that the hooks see what the model computes.
        streamed: add the kernels up tile by tile instead of reading patterns; by default where the model comes through
            the plain adapter and heads are not kept apart.
        bins: coarse kernels of so many neighbouring positions each (streamed only), see `posattn.probes.streamed`.

    Raises:
        CheckpointError: the checkpoint is unreadable, or belongs to another model, other tokens or other settings.
        InputError: the checkpoint exists and `resume` is False.
        SelfCheckError: what the hooks see is not what the model computes.
        NothingMeasuredError: no document went through.
    """
    model = as_a_model(model)
    tokens = tokens if isinstance(tokens, Tokens) else load_tokens(tokens, model)
    if checkpoint_every < 1:
        raise InputError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    if not tokens.documents:
        raise NothingMeasuredError("there are no documents to measure: no samples left")
    session = attach(model, MixingProbe(), _kernel_probe(model, per_head, streamed, bins), *probes)
    here = world()
    every, tokens = tokens, tokens.part(here.share(tokens.documents))
    identity = _identity(model, tokens, session.probes)
    path = None if checkpoint is None else here.own_path(Path(checkpoint))
    described = every.describe()
    done = _resume(path, resume, session.probes, identity, described)
    if progress and here.main and resume and path is not None:
        if done:
            note(f"going on from document {done} of {tokens.documents} ({path})")
        elif not path.exists():
            note(f"nothing to resume in {path}: measuring from the beginning")

    checked = None
    if check and done < tokens.documents:
        from posattn.models.check import self_check

        # two documents say what a whole batch would, for less memory: the check keeps more than a measurement does
        ids, mask = next(tokens.batches(batch_size=2, start=done))
        checked = self_check(model, ids.to(model.device), None if mask is None else mask.to(model.device))

    run = getattr(model, "run", model)  # a pass whose logits nobody reads, where the adapter has one
    shown = (f"measuring {model.name}", tokens.documents, done, "document", progress and here.main)
    with advice(lambda: _how_to_go_on(path)), session, torch.no_grad(), bar(*shown) as advance:
        for number, (ids, mask) in enumerate(tokens.batches(start=done), start=1):
            run(ids.to(model.device), None if mask is None else mask.to(model.device))
            done += len(ids)
            if path is not None and (number % checkpoint_every == 0 or done == tokens.documents):
                _save(path, session.probes, identity, done, described)
            advance(len(ids))
    here.merge(session.probes)
    facts = provenance(
        **describe_model(model),
        tokens=described,
        seed=every.facts.get("seed"),
        **({} if here.size == 1 else {"processes": here.size}),
        per_head=per_head,
        self_check=checked,
        **({} if bins is None else {"bins": bins}),
    )
    return measurement(session, facts)


def measurement(session: Session, facts: Provenance | None = None) -> Measurement:
    """What a session with a `MixingProbe` and a `KernelProbe` has measured so far, as a `Measurement`.

    Raises:
        InputError: the session lacks one of the two probes.
        NothingMeasuredError: no document went through.
    """
    results = {
        probe.name: probe.result(session.model) for probe in session.probes if probe.name in ("mixing", "kernel")
    }
    mixing, kernels = results.get("mixing"), results.get("kernel")
    if not isinstance(mixing, Mixing) or not isinstance(kernels, Kernels):
        raise InputError("a measurement needs both a MixingProbe and a KernelProbe in the session")
    facts = provenance(**describe_model(session.model)) if facts is None else facts
    facts = {**facts, "kernel_rows": "renormalised to sum to 1"}
    return Measurement(
        mixing=mixing,
        kernels=kernels.kernels,
        row_mass=kernels.row_mass,
        sink_mass=kernels.sink_mass,
        counts=kernels.counts,
        documents=min(mixing.documents, kernels.documents),
        warnings=tuple(_warnings(mixing, kernels, facts)),
        provenance=facts,
        binning=_binning(mixing, kernels),
    )


def _binning(mixing: Mixing, kernels: Kernels) -> dict[str, Any] | None:
    if not isinstance(kernels, BinnedKernels):
        return None
    bound, strays = kernels.binning_error(mixing.token), float(kernels.strays.mean())
    return {"width": kernels.width, "bins": kernels.kernels.shape[-1], "bound": bound, "strays": strays}


def _kernel_probe(model: Model, per_head: bool, streamed: bool | None, bins: int | None) -> KernelProbe:
    if streamed is None:
        streamed = bins is not None or (model.adapter == "plain" and not per_head)
    if streamed and per_head:
        raise InputError("streamed and binned kernels are means over heads: leave per_head out")
    if bins is not None and not streamed:
        raise InputError("bins needs streamed kernels")
    return StreamedKernelProbe(bins) if streamed else KernelProbe(per_head)


def describe_model(model: Model) -> dict[str, Any]:
    """A model's part of the provenance, as JSON values."""
    return {
        "model": model.name,
        "revision": model.revision,
        "family": model.family,
        "adapter": model.adapter,
        "processing": model.processing,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def weights_fingerprint(model: Model) -> str:
    """SHA-256 over the shapes and the first numbers of every parameter: tells models apart that share a name."""
    digest = hashlib.sha256()
    samples = []
    for name, parameter in sorted(model.module.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}".encode())
        if parameter.is_meta:  # offloaded: its numbers are not here
            continue
        row = parameter.detach()[(0,) * max(parameter.dim() - 1, 0)] if parameter.numel() else parameter.detach()
        samples.append(row.reshape(-1)[:16].cpu().double())
    if samples:
        digest.update(torch.cat(samples).numpy().tobytes())
    return digest.hexdigest()


def _warnings(mixing: Mixing, kernels: Kernels, facts: Provenance) -> Iterator[str]:
    """What changes how the numbers should be read, in words."""
    massive = [t for t, share in enumerate(mixing.largest_position_share.tolist()) if share > MASSIVE_SHARE]
    if massive:
        t = int(mixing.largest_position_share.argmax())
        at = int(mixing.stream_share[t].argmax())
        yield (
            f"In {len(massive)} of {count(len(mixing.token), 'layer')} one position holds most of the residual "
            f"stream's energy (layer {t}: {percent(mixing.largest_position_share[t])}, mostly position {at}). "
            f"The Frobenius λ describes that position there; in layer {t} it is {float(mixing.frobenius[t]):.3g} "
            f"where the token-wise λ is {float(mixing.token[t]):.3g}."
        )
    if bool((kernels.sink_mass > 0).any()):
        t = int(kernels.sink_mass.mean(-1).argmax())
        yield (
            f"The model has attention sinks: up to {percent(kernels.sink_mass[t].mean())} of a layer's attention "
            f"(layer {t}) goes nowhere. Kernel rows were renormalised to sum to 1."
        )
    without = kernels.sink_mass.sum(-1) == 0
    if bool(without.any()):
        off = float((kernels.row_mass[without] - 1).abs().max())
        if off > ROW_TOLERANCE:
            yield (
                f"Attention rows of layers without a sink are off from summing to 1 by up to {off:.2g}; "
                "they were renormalised."
            )
    if int(kernels.counts.min()) < int(kernels.counts.max()):
        most, fewest = int(kernels.counts.max()), int(kernels.counts.min())
        yield (
            f"The documents differ in length: {most} {plural(most, 'reaches')} the first position, {fewest} the last."
        )
    if isinstance(kernels, BinnedKernels):
        binning = _binning(mixing, kernels)
        assert binning is not None
        bound = binning["bound"]
        says = f"is off by at most {bound:.2g}" if bound < 1 else "has no useful bound"
        yield (
            f"Kernels are binned, {count(kernels.width, 'position')} a bin: profiles are of bins, and the first one "
            "stands where tables speak of the first position. A row strays from its bin's mean by "
            f"{binning['strays']:.2g} on average (total variation); the rollout {says}."
        )
    asked, used = (facts.get("tokens") or {}).get("samples_asked"), kernels.documents
    if asked is not None and used < asked:
        skipped = facts["tokens"].get("skipped_too_short", 0)
        short = f" ({skipped} {plural(skipped, 'was')} too short)" if skipped else ""
        yield f"Only {used} of the {asked} documents asked for {plural(used, 'was')} found{short}."


# ---- checkpoints -------------------------------------------------------------------------------------------------


def _identity(model: Model, tokens: Tokens, probes: Sequence[Probe]) -> dict[str, dict[str, Any]]:
    """What a checkpoint must share with the run that continues it. The batch size may differ."""
    return {
        "model": {
            **{key: value for key, value in describe_model(model).items() if key != "device"},
            "weights": weights_fingerprint(model),
        },
        "tokens": {"fingerprint": tokens.fingerprint()},
        "settings": {probe.name: probe.settings() for probe in probes},
    }


#: parts of an identity, as a sentence names them
_OTHER = {"model": "of another model", "tokens": "on other documents", "settings": "with other settings"}
#: what says nothing to a reader (fingerprints), or follows from what else is said
_UNSAID = {"weights", "fingerprint", "samples_asked", "documents_read", "skipped_too_short", "bos_token_id"}


def _differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """In which facts a checkpoint differs from this run: "length 64, not 32". Fingerprints are left out."""
    found = []
    for key in sorted({**mine, **theirs}):
        one, other = theirs.get(key), mine.get(key)
        if one == other or key in _UNSAID:
            continue
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += [f"{key}: {inner}" for inner in _differences(one, other)]
        else:
            found.append(f"{key} {'none' if one is None else one}, not {'none' if other is None else other}")
    return found


def _save(
    path: Path, probes: Sequence[Probe], identity: dict[str, dict[str, Any]], done: int, tokens: dict[str, Any]
) -> None:
    tensors = {f"{probe.name}/{key}": value for probe in probes for key, value in probe.state_tensors().items()}
    write_tensors(path, tensors, {"class": _HEADER, "identity": identity, "documents": done, "tokens": tokens})


def _how_to_go_on(path: Path | None) -> str:
    """What an interrupted measurement has left."""
    if path is None:
        return ""
    if not path.is_file():
        return f"nothing was saved in {path} yet"
    return f"what was measured is in {path}: add --resume to go on"


def _resume(
    path: Path | None,
    resume: bool,
    probes: Sequence[Probe],
    identity: dict[str, dict[str, Any]],
    tokens: dict[str, Any],
) -> int:
    """Load the checkpoint into the probes; how many documents it has done. `tokens` describes those of this run."""
    if path is None:
        if resume:
            raise InputError("to resume needs a checkpoint to go on from (--checkpoint FILE, or checkpoint=)")
        return 0
    if not path.exists():
        return 0
    if path.is_dir():
        raise InputError(f"the checkpoint {path} is a folder: name a file")
    if not resume:
        raise InputError(f"the checkpoint {path} exists: go on from it (--resume, or resume=True), or remove it")
    tensors, header = read_tensors(path)
    if header.get("class") != _HEADER:
        raise CheckpointError(f"{path} is a {header.get('class')}, not a checkpoint of measure")
    for part, mine in identity.items():
        theirs = header["identity"].get(part, {})
        if mine != theirs:
            # documents are told apart by a fingerprint, and described by what is said of them
            told = (header.get("tokens", {}), tokens) if part == "tokens" else (theirs, mine)
            found = _differences(*told)
            why = f" ({'; '.join(found)})" if found else " (their weights differ)" if part == "model" else ""
            raise CheckpointError(
                f"{path} belongs to a run {_OTHER[part]}{why}: remove it, or keep this run's state in another file"
            )
    for probe in probes:
        probe.load_state(
            {key.split("/", 1)[1]: value for key, value in tensors.items() if key.startswith(f"{probe.name}/")}
        )
    return int(header["documents"])
