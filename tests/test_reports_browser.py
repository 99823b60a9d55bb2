"""The report in a real browser: every chart drawn, no error, no request, all of it usable by keyboard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posattn.reports.kit import Column, Fold, Link, Page, Section, Table, render
from posattn.reports.pages import PAGES
from posattn.reports.profile import profile_page
from tests.report_samples import HOSTILE, profile_arrays, profile_summary
from tests.test_reports import PAGES_TRIED
from tests.test_reports_words import lengths_summary

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.slow

#: where CI keeps the pictures
SHOTS = os.environ.get("POSATTN_SCREENSHOTS")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


def until(tab: Any, condition: str) -> None:
    """Wait until a JavaScript expression is true. (Playwright's own waiting evaluates text, which the page's policy
    forbids.)"""
    end = time.monotonic() + 120
    while not tab.evaluate(condition):
        assert time.monotonic() < end, condition
        tab.wait_for_timeout(50)


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Opens a page of ours; at the end there must have been no message, no error and no request."""
    contexts, troubles = [], []

    def open_page(page: Page, *, theme: str = "light", width: int = 1280) -> Any:
        path = tmp_path / "report.html"
        path.write_text(render(page), "utf-8")
        context = browser.new_context(color_scheme=theme, viewport={"width": width, "height": 900})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(180_000)  # the machine may be busy
        tab.on("console", lambda message: troubles.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        tab.on(
            "request",
            lambda request: (
                troubles.append(f"request: {request.url}")
                if not request.url.startswith(("file:", "data:", "blob:"))
                else None
            ),
        )
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready]")
        until(
            tab,
            "document.querySelectorAll('figure.chart:not([data-drawn])').length === "
            "document.querySelectorAll('details:not([open]) figure.chart:not([data-drawn])').length",
        )
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def sample_page() -> Page:
    return profile_page(
        profile_summary("u", 6, 128, massive=True, sink=True, warnings=["A warning."]), profile_arrays(6, 128)
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_every_chart_is_drawn_and_nothing_sticks_out(opened: Any, theme: str, width: int) -> None:
    tab = opened(sample_page(), theme=theme, width=width)
    # no button offers to send the data anywhere
    assert tab.evaluate("document.querySelectorAll('.modebar-btn').length > 0") == (width >= 500)
    assert tab.evaluate("document.querySelectorAll('.modebar-btn[data-title^=Share]').length") == 0
    assert tab.evaluate("document.querySelectorAll('figure.chart').length") == 5
    assert tab.evaluate("[...document.querySelectorAll('.plot')].every(p => p.querySelector('svg.main-svg'))")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background[4:-1].split(","))
    assert (brightness < 200) == (theme == "dark")
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        tab.screenshot(path=f"{SHOTS}/profile-{theme}-{width}.png", full_page=True)


@pytest.mark.parametrize("command", ["heads", "simulate", "compare"])
def test_the_other_reports_draw_all_their_charts(opened: Any, command: str) -> None:
    for theme, width in (("light", 1280), ("dark", 400)):
        tab = opened(PAGES[command](*PAGES_TRIED[command]), theme=theme, width=width)
        assert tab.evaluate("[...document.querySelectorAll('.plot')].every(p => p.querySelector('svg.main-svg'))")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        if SHOTS:
            Path(SHOTS).mkdir(parents=True, exist_ok=True)
            tab.screenshot(path=f"{SHOTS}/{command}-{theme}-{width}.png", full_page=True)


APART = """(([chart, one, other]) => {
  const found = (selector) => [...document.querySelectorAll(`#${chart} ${selector}`)];
  const boxes = (selector) => found(selector).map((e) => e.getBoundingClientRect());
  return boxes(one).flatMap((a) => boxes(other).map((b) =>
    a.width && b.width && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1)).filter(Boolean).length;
})"""


@pytest.mark.parametrize(
    ("command", "chart", "one", "other"),
    [
        ("heads", "plane-chart", ".legend", ".colorbar"),
        ("heads", "map-chart", ".xtitle", ".xtick text"),
        ("heads", "frequency-chart", ".xtitle", ".xtick text"),
        ("profile", "profiles-chart", ".legend", ".plot .xtick text"),
        ("profile", "profiles-chart", ".legendtext", ".legendlines"),
        ("profile", "mixing-positions", ".xtitle", ".xtick text"),
    ],
)
def test_nothing_overlaps_on_a_narrow_page(opened: Any, command: str, chart: str, one: str, other: str) -> None:
    page = sample_page() if command == "profile" else PAGES[command](*PAGES_TRIED[command])
    tab = opened(page, width=400)
    assert tab.evaluate(f"document.querySelectorAll('#{chart} {one}').length") > 0
    assert tab.evaluate(f"document.querySelectorAll('#{chart} {other}').length") > 0
    assert tab.evaluate(f"{APART}({[chart, one, other]})") == 0


@pytest.mark.parametrize("layers", [1, 2, 4, 12, 30])
def test_layers_are_counted_in_whole_numbers_that_do_not_touch(opened: Any, layers: int) -> None:
    for width in (1280, 400):
        tab = opened(profile_page(profile_summary("u", layers, 64, sink=True), profile_arrays(layers, 64)), width=width)
        for chart in ("mixing-chart", "first-chart", "mixing-positions"):
            axis = ".ytick" if chart == "mixing-positions" else ".xtick"
            shown = tab.evaluate(f"[...document.querySelectorAll('#{chart} {axis} text')].map(e => e.textContent)")
            assert shown
            assert all(text.isdigit() for text in shown), (chart, shown)
            boxes = tab.evaluate(
                f"[...document.querySelectorAll('#{chart} .xtick text')].map(e => e.getBoundingClientRect())"
                ".map(b => [b.left, b.right])"
            )
            assert all(right + 2 < left for (_, right), (left, _) in pairwise(sorted(boxes))), chart


def test_a_table_shows_all_its_rows_or_that_there_are_more(opened: Any) -> None:
    for width in (1280, 400):
        tab = opened(sample_page(), width=width)
        hidden = "[...document.querySelectorAll('.scroll:not(.tall)')].filter(e => e.scrollHeight > e.clientHeight + 1)"
        assert tab.evaluate(f"{hidden}.length") == 0
    long = Table("t", "Long", (Column("n"),), [[i] for i in range(80)])
    tab = opened(Page("heads", "Heads", "", (), (Section("s", "Heads", (long,)),)))
    assert tab.evaluate("document.querySelector('#t .scroll').clientHeight") < 600


def test_names_in_tables_are_broken_at_their_joints_only(opened: Any) -> None:
    tab = opened(sample_page(), width=400)
    tab.evaluate("document.querySelectorAll('tbody th').forEach(e => { e.style.overflowWrap = 'normal'; })")
    wide = (
        "[...document.querySelectorAll('tbody th')].filter(e => e.scrollWidth > e.clientWidth).map(e => e.textContent)"
    )
    assert tab.evaluate(wide) == []
    # a wide page does not break them at all
    tab = opened(sample_page())
    high = (
        "[...document.querySelectorAll('#documents-table tbody th, #shapes-table tbody th')].map(e => e.offsetHeight)"
    )
    assert max(tab.evaluate(high)) < 50


def test_curves_without_a_legend_of_their_own_have_one_by_label(opened: Any) -> None:
    summary = lengths_summary(True)
    summary["labels"] = [["symbolic", "positional"]]
    tab = opened(PAGES["lengths"](summary, {}))
    shown = tab.evaluate("[...document.querySelectorAll('#weights-chart .legendtext')].map(e => e.textContent)")
    assert shown == ["positional", "symbolic"]
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("#weights-chart [data-copy]")
    until(tab, "document.querySelector('#toast').textContent.includes('copied')")
    copied = tab.evaluate("navigator.clipboard.readText()")
    assert "L0H1" in copied
    assert "positional" not in copied


def test_what_belongs_together_stands_on_one_line(opened: Any) -> None:
    tab = opened(PAGES["heads"](*PAGES_TRIED["heads"]), width=400)
    for group in (".subtitle .whole", ".group .controls .whole"):
        assert tab.evaluate(f"document.querySelectorAll('{group}').length") > 0
        lines = f"[...document.querySelectorAll('{group}')].map(e => e.getClientRects().length)"
        assert set(tab.evaluate(lines)) == {1}


def test_an_axis_fits_the_curves_that_are_shown(opened: Any) -> None:
    # attention_only is not drawn at first: its depths must not press the others flat
    summary = profile_summary("u")
    summary["profiles"]["attention_only"] = [1 - 63e-9, *[1e-9] * 63]
    tab = opened(profile_page(summary, {}))
    low, high = tab.evaluate("document.querySelector('#profiles-chart .plot').layout.yaxis.range")
    assert high - low < 2.5


def test_a_head_is_opened_by_link_and_stepped_through(opened: Any) -> None:
    tab = opened(PAGES["heads"](*PAGES_TRIED["heads"]))
    name = "document.querySelector('#head dl dd').textContent"
    assert tab.evaluate(name) == "L0H0"
    tab.fill("#heads-table input", "L1H1")
    tab.click("#heads-table tbody a >> visible=true")
    until(tab, f"{name} === 'L1H1'")
    assert tab.evaluate("document.querySelector('#head select').value") == "layer 1"
    tab.click("#head [data-step='1']")
    until(tab, f"{name} === 'L1H2'")
    tab.click("#head [data-step='1']")
    tab.click("#head [data-step='1']")
    until(tab, f"{name} === 'L2H0'")


def test_controls_change_what_is_drawn(opened: Any) -> None:
    tab = opened(sample_page())
    points = "document.querySelector('#profiles-chart .plot').data[0].x.length"
    assert tab.evaluate(points) == 127  # without the first position
    tab.click("#profiles-chart >> text=all positions")
    until(tab, f"{points} === 128")
    kind = "document.querySelector('#profiles-chart .plot').layout.yaxis.type"
    assert tab.evaluate(kind) == "log"
    tab.click("#profiles-chart [data-log]")
    until(tab, f"{kind} === 'linear'")
    corner = "document.querySelector('#kernels-chart .plot').data[0].z[5][1]"
    before = tab.evaluate(corner)
    tab.select_option("#kernels-chart select", "layer 3")
    until(tab, f"{corner} !== {before}")


def test_tables_sort_and_filter_and_links_lead_to_what_they_name(opened: Any) -> None:
    rows = [[f"head {i}", float((i * 7) % 10), Link("see", f"fold-{i}")] for i in range(10)]
    table = Table(
        "t", "Heads", (Column("name", numeric=False), Column("score"), Column("", numeric=False)), rows, filterable=True
    )
    folds = tuple(
        Fold(f"fold-{i}", f"Head {i}", (Table(f"t{i}", "inner", (Column("x"),), [[1.0]]),)) for i in range(10)
    )
    tab = opened(Page("heads", "Heads", "", (), (Section("s", "Heads", (table, *folds)),)))
    first = "document.querySelector('#t tbody tr').cells[0].textContent"
    tab.click("#t th >> nth=1 >> button")
    assert tab.evaluate(first) == "head 0"
    tab.click("#t th >> nth=1 >> button")
    assert tab.evaluate(first) == "head 7"
    assert tab.get_attribute("#t thead th >> nth=1", "aria-sort") == "descending"
    tab.fill("#t input", "head 3")
    assert tab.evaluate("[...document.querySelectorAll('#t tbody tr')].filter(r => !r.hidden).length") == 1
    tab.click("#t >> text=see >> visible=true")
    until(tab, "document.querySelector('#fold-3').open")


def test_data_can_be_copied(opened: Any) -> None:
    tab = opened(sample_page())
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.click("#mixing-chart [data-copy]")
    until(tab, "document.querySelector('#toast').textContent.includes('copied')")
    text = tab.evaluate("navigator.clipboard.readText()")
    assert "token-wise" in text
    assert "0\t0.6" in text


def test_the_theme_button_overrides_the_system(opened: Any) -> None:
    tab = opened(sample_page(), theme="dark")
    ink = "document.querySelector('#mixing-chart .plot').layout.font.color"
    dark = tab.evaluate(ink)
    tab.click("#theme")
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    assert tab.evaluate(ink) != dark


def test_everything_that_can_be_used_is_reached_by_keyboard(opened: Any) -> None:
    tab = opened(sample_page())
    wanted = tab.evaluate(
        "document.querySelectorAll('main button, main select, main input, main a[href], main summary').length"
    )
    tab.evaluate("window.seen = new Set()")
    for _ in range(wanted + 60):
        tab.keyboard.press("Tab")
        tab.evaluate("document.activeElement.matches('main *') && seen.add(document.activeElement)")
    reached = tab.evaluate("[...seen].filter(e => e.matches('button, select, input, a[href], summary')).length")
    assert reached == wanted


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_serious_accessibility_finding(opened: Any, theme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python")
    tab = opened(sample_page(), theme=theme)
    # handed over through the protocol, which the page's own policy does not concern
    tab.evaluate((Path(axe.__file__).parent / "axe.min.js").read_text("utf-8"))
    violations = tab.evaluate(
        "axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes.slice(0, 3).map(n => n.html)]))"
    )
    assert [v for v in violations if v[0] in ("serious", "critical")] == []


def test_hostile_text_runs_nothing(opened: Any) -> None:
    summary = profile_summary("u", warnings=HOSTILE)
    for text in HOSTILE:
        summary["profiles"][text] = summary["profiles"]["half"]
        summary["comparison"][text] = summary["comparison"]["half"]
        summary["shape"][text] = summary["shape"]["half"]
    summary["provenance"]["model"] = HOSTILE[0]
    tab = opened(profile_page(summary, profile_arrays()))
    tab.hover("#profiles-chart .plot")
    tab.wait_for_timeout(200)
    assert tab.evaluate("window.__pwned === undefined")
    assert tab.evaluate("document.querySelectorAll('.plot img, .plot script').length") == 0


def test_paper_gets_the_light_colours_and_all_charts(opened: Any, tmp_path: Path) -> None:
    tab = opened(sample_page(), theme="dark")
    tab.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    tab.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate("document.documentElement.dataset.theme") is None
    tab.pdf(path=tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").stat().st_size > 20_000
