"""Figures: a legend covers no data, in a figure of ours as in one of the user's, and every plot uses the same parts."""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch

import posattn
from posattn import plotting

SOURCE = Path(plotting.__file__).parent


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def legend_of(ax):
    """The one legend that belongs to `ax`, wherever it is."""
    found = [*ax.figure.legends, *([ax.get_legend()] if ax.get_legend() else [])]
    assert len(found) == 1
    return found[0]


def covers(ax) -> bool:
    """Whether the drawn legend lies over the axes, or leaves the figure."""
    ax.figure.canvas.draw()
    box, inside = legend_of(ax).get_window_extent(), ax.get_window_extent()
    assert box.width > 0
    whole = ax.figure.bbox
    assert box.x0 >= whole.x0 - 1
    assert box.x1 <= whole.x1 + 1
    assert box.y0 >= whole.y0 - 1
    return bool(box.overlaps(inside))


def kernels(layers: int = 6, n: int = 40) -> torch.Tensor:
    weights = torch.rand(layers, n, n).tril()
    return weights / weights.sum(-1, keepdim=True)


PLOTS = {
    "rollout": lambda: posattn.rollout(0.3, kernels(), depth="every"),
    "simulate": lambda: posattn.simulate("bloom-176b", 32, queries=[3, 9, 31]),
    "depth": lambda: posattn.depth_theory("bloom-176b", 32),
    "forces": lambda: posattn.force_shares("bloom-176b", 32),
}


@pytest.mark.parametrize("name", PLOTS)
def test_the_legend_of_a_result_is_beside_the_data(name: str) -> None:
    ax = PLOTS[name]().plot()
    assert not covers(ax)
    assert ax.get_ylabel()


@pytest.mark.parametrize("count", [1, 2, 7, 12])
@pytest.mark.parametrize("width", [3, 20, 60])
def test_any_legend_stays_in_the_figure_and_off_the_axes(count: int, width: int) -> None:
    ax = plotting.axes()
    for i in range(count):
        plotting.curve(ax, torch.rand(50), label=f"{i:02d}" + "x" * (width - 2))
    assert not covers(plotting.finish(ax, x="step", y="y", legend=True))


def test_a_colour_bar_does_not_count_as_axes_of_the_user() -> None:
    ax = plotting.axes()
    plotting.heatmap(ax, torch.rand(3, 4), x="head", y="layer", value="weight")
    plotting.legend_outside(ax, handles=[Patch(color="red", label="one"), Patch(color="blue", label="two")])
    assert not covers(ax)


def test_in_the_users_figure_the_legend_stays_with_its_axes() -> None:
    left, right = Figure(figsize=(8, 3), layout="constrained").subplots(1, 2)
    for ax in (left, right):
        plotting.curve(ax, torch.rand(9), label="a")
        plotting.finish(ax, x="x", y="y", legend=True)
        assert ax.get_legend() is not None
    assert not left.figure.legends


def test_nothing_to_tell_apart_has_no_legend() -> None:
    ax = plotting.finish(plotting.axes(), x="x", y="y", legend=True)
    assert not ax.figure.legends
    assert ax.get_legend() is None


def test_layers_and_heads_have_whole_numbers_on_their_axes() -> None:
    ax = plotting.heatmap(plotting.axes(), torch.rand(2, 3), x="head", y="layer")
    ax.figure.canvas.draw()
    for axis in (ax.xaxis, ax.yaxis):
        assert all(float(place).is_integer() for place in axis.get_ticklocs())


def test_every_plot_goes_through_these_parts() -> None:
    """No other module makes axes or places a legend (the pictures of a report have a layout of their own)."""
    allowed = {"plotting.py", "reports/figures.py"}
    for path in SOURCE.rglob("*.py"):
        if path.relative_to(SOURCE).as_posix() not in allowed:
            assert not re.search(r"plt\.subplots|\.legend\(", path.read_text("utf-8")), path
