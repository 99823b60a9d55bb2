"""Drawing primitives that every `plot` method shares: one style, labelled axes, safe colours.

Colours are the eight of Okabe and Ito (2008); heat maps use perceptually even maps (viridis; for signed values a
blue–white–orange one centred on zero). matplotlib is imported when something is drawn, never before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

#: Okabe and Ito's palette, without yellow (too light on white); black last
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
#: dash patterns, so that curves differ in print too
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
#: what an axis shows whole numbers of
_COUNTED = ("layer", "head", "kernel", "depth (layers)", "step")
SEQUENTIAL = "viridis"
DIVERGING = "PuOr_r"

_STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#4D4D4D",
    "axes.titlesize": 11,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "figure.dpi": 110,
    "savefig.dpi": 200,
    "savefig.bbox": "tight",
    "pdf.fonttype": 42,
}


def style() -> AbstractContextManager[None]:
    """The project's matplotlib style, for the time of a `with` block; the user's own settings are not changed."""
    import matplotlib as mpl

    return mpl.rc_context(_STYLE)


def axes(ax: Any = None, *, size: tuple[float | int, float | int] = (6.4, 4.0)) -> Any:
    """`ax` itself, or new axes in the project's style."""
    if ax is not None:
        return ax
    import matplotlib.pyplot as plt

    with style():
        return plt.subplots(figsize=size, layout="constrained")[1]


def colour(index: int) -> str:
    """The `index`-th colour; they repeat after seven."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> Any:
    """The dash pattern of the `index`-th curve: with its colour, no pair repeats before the fiftieth."""
    return DASHES[(index + index // len(COLOURS)) % len(DASHES)]


def values(data: Any) -> Any:
    """A tensor, array or sequence as a numpy array of floats."""
    return torch.as_tensor(data).detach().cpu().double().numpy()


def curve(
    ax: Any,
    y: Any,
    x: Any = None,
    *,
    label: str | None = None,
    spread: Any = None,
    low: Any = None,
    high: Any = None,
    index: int | None = None,
    **keywords: Any,
) -> Any:
    """One curve [n] with a band of ±`spread` or from `low` to `high`; colour and dash follow the curve's number."""
    y = values(y)
    x = range(len(y)) if x is None else values(x)
    number = len(ax.lines) if index is None else index
    keywords = {"color": colour(number), "linestyle": dash(number), **keywords}
    if keywords.get("marker"):
        keywords = {"markersize": 3.5, **keywords}
    ax.plot(x, y, label=label, **keywords)
    if spread is not None:
        low, high = y - values(spread), y + values(spread)
    if low is not None and high is not None:
        ax.fill_between(x, values(low), values(high), color=keywords["color"], alpha=0.15, linewidth=0)
    return ax


def heatmap(
    ax: Any,
    matrix: Any,
    *,
    x: str,
    y: str,
    title: str | None = None,
    value: str | None = None,
    centred: bool = False,
    limits: tuple[float | int, float | int] | None = None,
    origin: str = "upper",
    colourbar: bool = True,
    **keywords: Any,
) -> Any:
    """A matrix [rows, columns] as colours; `centred` puts white at zero."""
    data = values(matrix)
    if limits is None and centred:
        reach = float(abs(data).max()) or 1.0
        limits = (-reach, reach)
    low, high = limits or (None, None)
    settings = {"cmap": DIVERGING if centred else SEQUENTIAL, "aspect": "auto", "interpolation": "nearest"}
    image = ax.imshow(data, vmin=low, vmax=high, origin=origin, **{**settings, **keywords})
    ax.grid(False)
    if colourbar:
        bar = ax.figure.colorbar(image, ax=ax)
        if value:
            bar.set_label(value)
    return finish(ax, x=x, y=y, title=title)


def scatter(
    ax: Any,
    x: Any,
    y: Any,
    *,
    label: str | None = None,
    index: int | None = None,
    values_colour: Any = None,
    **keywords: Any,
) -> Any:
    """Points [n] against [n]; `values_colour` [n] colours them by a third quantity."""
    number = len(ax.collections) if index is None else index
    if values_colour is not None:
        keywords = {"c": values(values_colour), "cmap": SEQUENTIAL, **keywords}
    elif "c" not in keywords:
        keywords = {"color": colour(number), **keywords}
    ax.scatter(values(x), values(y), label=label, **{"s": 22, "alpha": 0.8, "linewidths": 0, **keywords})
    return ax


def bars(ax: Any, heights: Any, labels: Sequence[str], **keywords: Any) -> Any:
    """One bar a label."""
    ax.bar(range(len(labels)), values(heights), color=keywords.pop("color", colour(0)), **keywords)
    ax.set_xticks(range(len(labels)), labels)
    return ax


def legend_outside(ax: Any, *, handles: Sequence[Any] | None = None, title: str | None = None) -> None:
    """The legend where it covers no data: below the axes in a figure that `axes` made; in the user's own figure, whose
    layout is theirs, where matplotlib finds most room."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    found, labels = ax.get_legend_handles_labels() if handles is None else (handles, [h.get_label() for h in handles])
    if not found:
        return
    figure = ax.figure
    alone = [other for other in figure.axes if other.get_label() != "<colorbar>"] == [ax]
    with style():
        if alone and isinstance(figure.get_layout_engine(), ConstrainedLayoutEngine):
            columns = max(1, min(len(found), 76 // (max(len(str(label)) for label in labels) + 8)))
            figure.legend(found, labels, title=title, loc="outside lower center", ncols=columns)
        else:
            ax.legend(found, labels, title=title)


def finish(
    ax: Any,
    *,
    x: str,
    y: str,
    title: str | None = None,
    legend: bool = False,
    xlim: tuple[float | int, float | int] | None = None,
    ylim: tuple[float | int, float | int] | None = None,
) -> Any:
    """Label the axes, and return them; see `legend_outside`."""
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    for axis, name in ((ax.xaxis, x), (ax.yaxis, y)):
        if name in _COUNTED and axis.get_scale() == "linear":
            axis.get_major_locator().set_params(integer=True)
    if title:
        ax.set_title(title)
    if legend:
        legend_outside(ax)
    if xlim:
        ax.set_xlim(*xlim)
    if ylim:
        ax.set_ylim(*ylim)
    return ax
