"""Figures for papers, drawn by matplotlib from a summary and its arrays: `figures/NAME.png` and `.pdf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from posattn.errors import InputError
from posattn.reports import curves
from posattn.reports.learning import draw_accuracy, draw_lengths, draw_scores
from posattn.words import count

Draw = Callable[..., Any]

#: looks of the curves that stand in most figures, the same in each; others take the free ones of `_LOOKS`
_FIXED: dict[str, dict[str, Any]] = {
    "residual": {"color": "#0072B2", "linestyle": "--"},
    "energy": {"color": "#D55E00", "linestyle": "-"},
}


def draw_profiles(
    summary: Mapping[str, Any], arrays: Mapping[str, Any], ax: Any, chosen: Sequence[str] | None = None
) -> Any:
    """The measured influence and predicted profiles, without the first position, on a logarithmic axis.

    Without `chosen`, those predictions that the findings speak of: the nearest, `residual` and `energy`.

    Raises:
        InputError: a name in `chosen` that is no prediction of this run, or more of them than can be told apart.
    """
    from posattn import plotting

    names = curves.prominent(summary) if chosen is None else list(dict.fromkeys(chosen))
    profiles, best = summary["profiles"], curves.nearest(summary)
    if unknown := [name for name in names if name not in profiles]:
        raise InputError(f"there is no prediction {unknown[0]!r} in these results; there are: {', '.join(profiles)}")
    if len(names) > MOST_CURVES:
        raise InputError(f"{len(names)} curves cannot be told apart in one figure: choose at most {MOST_CURVES}")
    if summary.get("influence"):
        _draw_profile(ax, summary["influence"], "measured influence", {"color": "black", "linewidth": 2.6})
    for name, look in _looks(names).items():
        label = name.replace("_", " ") + (" (nearest)" if name == best and len(profiles) > 1 else "")
        _draw_profile(ax, profiles[name], label, {**look, "linewidth": 2.2 if name == best else 1.6})
    ax.set_yscale("log")
    binned = summary.get("binning")
    place = f"input position, in bins of {binned['width']}" if binned else "input position"
    plotting.finish(ax, x=place, y="share of influence on the last position")
    handles, labels = ax.get_legend_handles_labels()
    # plotly's and a paper's reader alike look for the dash: a line long enough to show it
    ax.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, handlelength=3.4)
    return ax


#: predictions of one figure that can still be told apart
MOST_CURVES = 8


def _draw_profile(ax: Any, curve: Sequence[float], label: str, look: Mapping[str, Any]) -> None:
    from posattn import plotting

    rest = np.asarray(curve, float)[1:]
    # plotting.curve's own dashes are for curves that come without a look
    plotting.curve(
        ax,
        rest / (rest.sum() or 1.0),
        np.arange(1, len(rest) + 1),
        label=label,
        **{"linestyle": "-", **look},
    )


def _looks(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Colour and dash of every name, none twice."""
    from posattn import plotting

    looks: dict[str, dict[str, Any]] = {}
    for name in names:
        free = [
            {"color": plotting.colour(i), "linestyle": plotting.dash(i + 1)} for i in range(len(plotting.COLOURS) * 7)
        ]
        taken = [*looks.values(), *(look for other, look in _FIXED.items() if other != name)]
        colours = {look["color"] for look in taken} | {"#000000"}
        others = [look for look in free if look["color"] not in colours] or [look for look in free if look not in taken]
        looks[name] = _FIXED.get(name) or others[0]
    return looks


def draw_mixing(summary: Mapping[str, Any], arrays: Mapping[str, Any], ax: Any) -> Any:
    """λ of each layer, both norms, with 95 % intervals over documents."""
    from posattn import plotting

    mixing = summary["mixing"]
    documents = mixing.get("documents") or 0
    for name, label in (("token", "token-wise"), ("frobenius", "Frobenius")):
        spread = mixing.get(f"{name}_std")
        half = 1.96 * np.asarray(spread) / documents**0.5 if spread and documents > 1 else None
        plotting.curve(ax, mixing[name], label=label, spread=half, marker="o")
    return plotting.finish(ax, x="layer", y="mixing coefficient λ", legend=True)


def draw_kernels(summary: Mapping[str, Any], arrays: Mapping[str, Any], ax: Any) -> Any:
    """The attention kernel averaged over layers (and heads), log10 of the weight."""
    from posattn import plotting

    kernels = np.asarray(arrays["kernels"], float)
    mean = kernels.mean(tuple(range(kernels.ndim - 2)))
    shown = np.where(np.tri(len(mean), dtype=bool), np.log10(np.maximum(mean, 1e-6)), np.nan)
    return plotting.heatmap(
        ax,
        shown,
        x="source position",
        y="target position",
        value="log10 of the mean weight",
        limits=(-4, 0),
        aspect="equal",
    )


def draw_plane(summary: Mapping[str, Any], arrays: Mapping[str, Any], ax: Any) -> Any:
    """Symbolic against positional score, a mark for each head, coloured by layer; the corners of purity γ."""
    from matplotlib.patches import Rectangle

    from posattn import plotting

    purity = summary["thresholds"]["purity"]
    for x, y in ((1 - purity, 0), (0, 1 - purity), (1 - purity, 1 - purity)):
        ax.add_patch(Rectangle((x, y), purity, purity, facecolor="#E8EEF3", edgecolor="none", zorder=0))
    layers = np.repeat(np.arange(len(summary["positional"])), len(summary["positional"][0]))
    dots = ax.scatter(
        np.ravel(summary["positional"]),
        np.ravel(summary["symbolic"]),
        c=layers,
        cmap=plotting.SEQUENTIAL,
        s=20,
        alpha=0.85,
    )
    ax.figure.colorbar(dots, ax=ax, label="layer")
    ax.set_aspect("equal")
    return plotting.finish(ax, x="positional score", y="symbolic score", xlim=(-0.03, 1.03), ylim=(-0.03, 1.03))


def draw_map(summary: Mapping[str, Any], arrays: Mapping[str, Any], ax: Any) -> Any:
    """The label of every head, layers against heads."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    from posattn import plotting

    labels = ("positional", "symbolic", "uniform", "mixed")
    colours = ("#0072B2", "#D55E00", "#009E73", "#D9D9D9")
    codes = np.array([[labels.index(label) for label in row] for row in summary["labels"]])
    ax.imshow(codes, cmap=ListedColormap(colours), vmin=0, vmax=3, aspect="auto", origin="lower")
    ax.grid(False)
    patches = [Patch(color=colour, label=label) for colour, label in zip(colours, labels, strict=True)]
    ax.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=4)
    return plotting.finish(ax, x="head", y="layer")


def draw_simulated(summary: Mapping[str, Any], arrays: Mapping[str, Any], ax: Any) -> Any:
    """The residual profile at every length, as a density over the context."""
    from posattn import plotting

    for n in summary["lengths"]:
        curve = summary["profiles"][str(n)]["residual"]
        x = np.asarray(curve["position"]) / max(n - 1, 1)
        plotting.curve(ax, np.asarray(curve["value"]) * n, x, label=count(int(n), "position"))
    ax.set_yscale("log")
    return plotting.finish(
        ax, x="position in the context (0 first, 1 last)", y="density of influence (1 = even share)", legend=True
    )


def draw_forces(summary: Mapping[str, Any], arrays: Mapping[str, Any], ax: Any) -> Any:
    """Shapley shares of the four forces at the shortest length."""
    from posattn import plotting

    part = next(iter(summary["forces"].values()))
    places = np.arange(len(part["quantities"]))
    for i, (force, shares) in enumerate(zip(part["forces"], part["shares"], strict=True)):
        ax.bar(places + 0.2 * (i - 1.5), shares, 0.2, label=force, color=plotting.colour(i))
    ax.axhline(0, color="#4D4D4D", linewidth=0.6)
    ax.set_xticks(places, [name.replace("_", " ") for name in part["quantities"]])
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=4)
    return plotting.finish(ax, x="", y="share of the change")


#: command -> name of the figure -> (how to draw it, which array it needs)
FIGURES: dict[str, dict[str, tuple[Draw, str | None]]] = {
    "profile": {
        "profiles": (draw_profiles, None),
        "mixing": (draw_mixing, None),
        "kernels": (draw_kernels, "kernels"),
    },
    "heads": {"plane": (draw_plane, None), "map": (draw_map, None)},
    "simulate": {"profiles": (draw_simulated, None), "forces": (draw_forces, None)},
    "train": {"accuracy": (draw_accuracy, None), "scores": (draw_scores, "positional")},
    "lengths": {"lengths": (draw_lengths, None)},
}


def names(summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[str]:
    """The figures that these results can give."""
    known = FIGURES.get(summary["command"], {})
    empty = {"forces"} if not summary.get("forces") else set()
    return [name for name, (_, needs) in known.items() if (needs is None or needs in arrays) and name not in empty]


#: figures of which the caller may choose the curves
CHOOSABLE = {("profile", "profiles")}


def write_figure(
    name: str,
    summary: Mapping[str, Any],
    arrays: Mapping[str, Any],
    *paths: Path,
    chosen: Sequence[str] | None = None,
) -> None:
    """Draw one figure and write it to every path, in the format of its suffix.

    Raises:
        InputError: no figure of that name, curves chosen of one that has no choice, or a format that matplotlib does
            not write.
    """
    if name not in (known := names(summary, arrays)):
        raise InputError(f"there is no figure {name!r} in these results; there are: {', '.join(known) or 'none'}")
    if chosen is not None and (summary["command"], name) not in CHOOSABLE:
        raise InputError(f"the figure {name} has no curves to choose from")
    from matplotlib.figure import Figure

    from posattn import plotting

    keywords = {} if chosen is None else {"chosen": chosen}
    with plotting.style():
        # no pyplot: nothing global is touched, and no window system is asked for
        figure = Figure(figsize=(6.4, 4.4), layout="constrained")
        FIGURES[summary["command"]][name][0](summary, arrays, figure.subplots(), **keywords)
        for path in paths:
            try:
                figure.savefig(path)
            except ValueError as error:
                raise InputError(f"cannot write {path}: {error}") from error


def write_figures(folder: Path, summary: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
    """All figures of the results into `folder/figures`, as PNG and PDF."""
    from posattn.reports.write import as_numpy

    arrays = as_numpy(arrays)
    known = names(summary, arrays)
    if known:
        (folder / "figures").mkdir()
    for name in known:
        write_figure(name, summary, arrays, folder / "figures" / f"{name}.png", folder / "figures" / f"{name}.pdf")
