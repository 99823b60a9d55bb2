"""What `test_distributed.py` runs in several processes: a program for torchrun.

torchrun --nproc-per-node K tests/distributed_worker.py OUT CASE [CHECKPOINT] [--resume] [--die RANK AFTER]
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from posattn.distributed import leave, start
from tests import families

LENGTH = 10


def case(name: str) -> tuple[Any, Any]:
    """Model and documents: seven of them, some padded ("sinks"), or one for many processes ("few")."""
    from posattn.models.loading import as_plain
    from posattn.tokens import load_tokens

    model = as_plain(families.tiny("gpt_oss" if name == "sinks" else "llama_grouped"))
    ids = families.tokens(1 if name == "few" else 7, LENGTH)
    mask = None
    if name == "sinks":
        mask = torch.ones(7, LENGTH, dtype=torch.bool)
        mask[2, :4] = False
        mask[6, 5:] = False
    return model, load_tokens(ids, model, batch_size=2, mask=mask)


def results(name: str, checkpoint: Path | None = None, resume: bool = False, before: Any = None) -> dict[str, Tensor]:
    """Everything that documents are shared for, as named tensors."""
    from posattn.heads.ablation import ablation_study
    from posattn.heads.rotary import rotary_usage
    from posattn.heads.scores import score_heads
    from posattn.influence.gradients import influence
    from posattn.probes.contribution import ContributionProbe
    from posattn.probes.measure import measure

    model, tokens = case(name)
    if before is not None:
        before(model)
    probe = ContributionProbe()
    m = measure(
        model,
        tokens,
        checkpoint=checkpoint,
        resume=resume,
        progress=False,
        probes=[probe],
        bins=3 if name == "sinks" else None,
        checkpoint_every=1,
    )
    found = {
        "mixing": m.mixing.token,
        "frobenius": m.mixing.frobenius,
        "mixing_std": m.mixing.token_std,
        "per_position": m.mixing.per_position,
        "kernels": m.kernels,
        "sink": m.sink_mass,
        "counts": m.counts,
        "documents": torch.tensor([m.documents, m.mixing.documents, probe.documents]),
        **{f"contribution_{key}": value for key, value in probe.result(model).kernels.items()},
    }
    i = influence(model, tokens)
    found |= {"influence": i.profile, "influence_documents": i.per_document, "chosen": i.chosen}
    if name != "sinks":
        for level in ("keys", "tokens"):
            h = score_heads(model, tokens, level=level, bootstrap=20, per_frequency=level == "keys")
            found |= {f"{level}_{key}": getattr(h, key) for key in ("positional", "symbolic", "document_entropy")}
            found |= {f"{level}_{key}": value for key, value in h.evidence.measured.items()}
            found[f"{level}_interval"] = h.positional_interval
            found[f"{level}_evidence_counts"] = torch.tensor(list(h.evidence.queries.values()))
            if level == "keys":
                found |= {"share": h.distance_share, "frequency": h.frequency_positional}
        classes = {"some": [(0, 1), (1, 0)], "one": ["L1H2"]}
        for mode in ("zero", "mean", "position_mean"):
            a = ablation_study(
                model, tokens, classes, mode=mode, factors=(0.5, 1), base=LENGTH, controls=2, bootstrap=20
            )
            figures = ("baseline", "loss", "control", "late_loss", "increase", "excess_interval")
            found |= {f"ablation_{mode}_{key}": getattr(a, key) for key in figures}
        u = rotary_usage(model, tokens)
        found |= {f"rotary_{key}": getattr(u, key) for key in ("energy", "variance_share", "real_attention", "offset")}
    return {key: value.contiguous() for key, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("case")
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--die", type=int, nargs=2, default=(-1, 0))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with start() as here:

        def dies(model: Any) -> None:
            """This process is killed in its pass number `after` (two passes are the self-check's)."""
            rank, after = arguments.die
            if here.rank != rank:
                return
            passes = []

            def count(module: Any, args: Any, keywords: Any) -> None:
                passes.append(1)
                if len(passes) > after:
                    os.kill(os.getpid(), signal.SIGKILL)

            model.module.register_forward_pre_hook(count, with_kwargs=True)

        found = results(arguments.case, arguments.checkpoint, arguments.resume, dies)
        save_file(found, arguments.out / f"{here.rank}of{here.size}.safetensors")


if __name__ == "__main__":
    main()
    leave(0)
