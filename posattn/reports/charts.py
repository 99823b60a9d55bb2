"""Charts as plotly figures in plain data, for `kit.Chart`; nothing here knows a model or a hook.

Long curves are averaged over blocks and large grids over tiles, so that a report stays small at any context length.
Grids travel as one byte a cell (254 steps between `low` and `high`, 255 for nothing).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: the most points of a curve and tiles along an edge of a grid
CURVE_POINTS = 512
GRID_TILES = 96
#: colours of the predicted profiles, the same in every chart
VARIANT_COLOURS = {
    "residual": "@c0",
    "attention_only": "@c1",
    "half": "@c2",
    "positional": "@c3",
    "positional_content": "@c5",
    "energy": "@c6",
    "projection+no-op": "@c4",
}


def colour_of(name: str, index: int = 0) -> str:
    """The colour token of a curve: fixed for the known variants, by number for others."""
    if name in ("influence", "measured"):
        return "@measured"
    return VARIANT_COLOURS.get(name, f"@c{index % 8}")


#: dash patterns of plotly, so that more curves than colours differ, and all of them in print
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def style(index: int) -> dict[str, Any]:
    """Colour token and dash of the `index`-th curve of a chart: 48 pairs before one repeats."""
    return {"colour": f"@c{index % 8}", "dash": DASHES[(index % 8 + index // 8) % len(DASHES)]}


def blocks(values: Any, points: int = CURVE_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Positions and values of a curve with at most `points` points: block means, at the blocks' middles."""
    values = np.asarray(values, dtype=float)
    if len(values) <= points:
        return np.arange(len(values)), values
    edges = np.linspace(0, len(values), points + 1).astype(int)
    return (edges[:-1] + edges[1:] - 1) / 2, np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def line(
    name: str,
    y: Any,
    x: Any = None,
    *,
    colour: str,
    width: float = 2,
    dash: str = "solid",
    hover: str = "%{y:.4f}",
    markers: bool = False,
    step: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """One curve; `x` defaults to 0, 1, 2 ..., and then long curves are shortened."""
    if x is None:
        x, y = blocks(y)
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        "name": name,
        "x": list(x),
        "y": [None if v is None else float(v) for v in y],
        "line": {"color": colour, "width": width, "dash": dash, **({"shape": "hvh"} if step else {})},
        "marker": {"color": colour, "size": 6},
        "hovertemplate": hover + "<extra>%{fullData.name}</extra>",
        **more,
    }


def band(
    x: Sequence[Any], low: Sequence[float], high: Sequence[float], colour: str, opacity: float = 0.18
) -> dict[str, Any]:
    """A shaded interval around a curve."""
    return {
        "type": "scatter",
        "x": [*x, *reversed(x)],
        "y": [*map(float, high), *reversed([float(v) for v in low])],
        "fill": "toself",
        "fillcolor": colour,
        "opacity": opacity,
        "line": {"width": 0, "color": colour},
        "hoverinfo": "skip",
        "showlegend": False,
        "meta": "band",
        "mode": "lines",
    }


def bars(
    name: str, x: Sequence[Any], y: Sequence[float], *, colour: str, hover: str = "%{y:.3f}", **more: Any
) -> dict[str, Any]:
    return {
        "type": "bar",
        "name": name,
        "x": list(x),
        "y": [float(v) for v in y],
        "marker": {"color": colour},
        "hovertemplate": hover + "<extra>%{fullData.name}</extra>",
        **more,
    }


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with two titles; `xaxis` and `yaxis` in `more` are added to them."""
    layout: dict[str, Any] = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}}
    for name, value in more.items():
        layout[name] = {**layout.get(name, {}), **value} if isinstance(value, Mapping) and name in layout else value
    return layout


def tiles(matrix: Any, most: int = GRID_TILES, causal: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row centres, column centres and tile means of a matrix; with `causal` only cells j <= i count."""
    matrix = np.asarray(matrix, dtype=float)
    weight = np.tril(np.ones_like(matrix)) if causal else np.ones_like(matrix)
    row, column = (np.linspace(0, n, min(n, most) + 1).astype(int) for n in matrix.shape)

    def add(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.add.reduceat(values, row[:-1], 0), column[:-1], 1)

    count = add(weight)
    with np.errstate(invalid="ignore"):
        mean = np.where(count > 0, add(matrix * weight) / np.maximum(count, 1), np.nan)
    return (row[:-1] + row[1:] - 1) / 2, (column[:-1] + column[1:] - 1) / 2, mean


def pack(grid: np.ndarray, low: float, high: float) -> dict[str, Any]:
    """A grid as bytes between `low` and `high`; NaN becomes nothing."""
    grid = np.asarray(grid, dtype=float)
    scaled = np.clip((grid - low) / ((high - low) or 1.0), 0, 1) * 254
    data = np.where(np.isnan(scaled), 255, np.rint(np.nan_to_num(scaled))).astype(np.uint8)
    return {
        "packed": base64.b64encode(data.tobytes()).decode(),
        "rows": grid.shape[0],
        "columns": grid.shape[1],
        "low": float(low),
        "high": float(high),
    }


#: the smallest weight that a kernel's colours tell apart
_FLOOR = -4.0


def kernel_view(kernel: Any, most: int = GRID_TILES) -> dict[str, Any]:
    """A causal attention kernel [N,N] as a heat map of log10 weight."""
    rows, columns, mean = tiles(kernel, most, causal=True)
    with np.errstate(divide="ignore"):
        grid = np.where(np.isnan(mean), np.nan, np.maximum(np.log10(mean), _FLOOR))
    ticks = np.arange(_FLOOR, 0.5)
    trace = {
        "type": "heatmap",
        "z": pack(grid, _FLOOR, 0.0),
        "x": columns.tolist(),
        "y": rows.tolist(),
        "zmin": _FLOOR,
        "zmax": 0,
        "power": True,
        "colorscale": "@sequential",
        "colorbar": {
            "title": {"text": "weight", "side": "right"},
            "tickvals": ticks.tolist(),
            "ticktext": [f"{10**t:.0%}" if t >= -2 else f"{10**t:.{int(-t) - 2}%}" for t in ticks],
            "thickness": 14,
            "outlinewidth": 0,
        },
        "hovertemplate": "target %{y}, source %{x}: %{customdata:.2%}<extra></extra>",
    }
    layout = axes(
        "source position j",
        "target position i",
        yaxis={"autorange": "reversed", "scaleanchor": "x", "constrain": "domain", "showgrid": False},
        xaxis={"constrain": "domain", "showgrid": False},
    )
    return {"traces": [trace], "layout": {**layout, "hovermode": "closest", "showlegend": False}}


def grid_view(
    matrix: Any,
    x: str,
    y: str,
    *,
    value: str,
    low: float | None = None,
    high: float | None = None,
    hover: str = "",
    scale: str = "@sequential",
    format: str = ".3f",
) -> dict[str, Any]:
    """A plain heat map of rows against columns, rows counted upwards."""
    rows, columns, mean = tiles(matrix, most=256)
    finite = mean[np.isfinite(mean)]
    low = float(finite.min()) if low is None and finite.size else (low or 0.0)
    high = float(finite.max()) if high is None and finite.size else (high or 1.0)
    trace = {
        "type": "heatmap",
        "z": pack(mean, low, high),
        "x": columns.tolist(),
        "y": rows.tolist(),
        "zmin": low,
        "zmax": high,
        "colorscale": scale,
        "colorbar": {"title": {"text": value, "side": "right"}, "thickness": 14, "outlinewidth": 0},
        "hovertemplate": hover or f"{y} %{{y}}, {x} %{{x}}: %{{z:{format}}}<extra></extra>",
    }
    layout = axes(x, y, xaxis={"showgrid": False}, yaxis={"showgrid": False})
    return {"traces": [trace], "layout": {**layout, "hovermode": "closest", "showlegend": False}}
