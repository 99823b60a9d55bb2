"""The page of reproduced figures is what its script writes, and what it writes agrees with what was published."""

from __future__ import annotations

import re

from tests.scripts import ROOT, load_script

reproduced = load_script("scripts/reproduced.py")


def rows(lines: list[str]) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_page_is_what_the_script_writes() -> None:
    assert reproduced.PAGE.read_text("utf-8") == reproduced.page()
    assert "reproduced.md" in (ROOT / "mkdocs.yml").read_text("utf-8")


def test_curves_agree_with_their_references() -> None:
    found = rows(reproduced.rollouts())
    assert len(found) == 5
    for _, _, reference, ours, difference in found:
        assert reference == ours
        assert difference == "below 10⁻¹²"


def test_the_digitised_panel_and_ours_lie_equally_far_from_the_measured_one() -> None:
    found = {row[0]: row[1:] for row in rows(reproduced.figure())}
    theirs, ours = found["b: residual rollout, W1 to the measured panel d"]
    assert theirs == ours == "0.079"
    assert found["b: residual rollout, largest difference in a position"][1] == "below 10⁻⁵"


def test_no_head_exceeds_its_bound_and_bounds_agree_to_the_digits_given() -> None:
    for _, _, theirs, bound, exact in rows(reproduced.bounds()):
        assert abs(float(bound) - float(theirs)) <= 0.6 * 10 ** -len(theirs.split(".")[1])
        assert float(exact) <= float(bound)


def test_published_examples_are_solved() -> None:
    found = rows(reproduced.examples())
    assert [row[0] for row in found] == ["number", "letter"]
    assert all(row[2] == row[3] for row in found)


def test_every_section_names_its_source_or_that_it_is_ours() -> None:
    for section in re.split(r"^## ", reproduced.page(), flags=re.M)[1:]:
        assert re.search(r"arxiv\.org|theory/learning\.md", section), section[:60]
