"""Code blocks of the README and the documentation: Python runs, commands parse; links lead somewhere."""

from __future__ import annotations

import ast
import builtins
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [body for name, body in _BLOCK.findall(page.read_text("utf-8")) if name == language]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for number, body in enumerate(blocks(page, "python"), start=1):
        exec(compile(body, f"{page.name}, block {number}", "exec"), names)


def loose_names(body: str) -> set[str]:
    """What a block uses and neither makes nor imports itself."""
    nodes = list(ast.walk(ast.parse(body)))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            made |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return used - made - set(dir(builtins))


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_block_that_is_pasted_alone_has_what_it_imports(page: Path) -> None:
    # a block of the tutorial, or of a chapter of theory, may go on with what an earlier one has made; not a recipe
    alone = page.name in ("README.md", "howto.md")
    imported = {"posattn", "torch", "math", "plt", "np", "pd"}
    for number, body in enumerate(blocks(page, "python"), start=1):
        missing = loose_names(body) if alone else loose_names(body) & imported
        assert missing == set(), f"{page.name}, block {number}: {missing}"


def commands() -> list[tuple[str, str]]:
    return [
        (str(page.relative_to(ROOT)), line.split("#")[0].strip())
        for page in PAGES
        for body in [*blocks(page, "sh"), *blocks(page, "bash")]
        for line in body.replace("\\\n", " ").splitlines()
        if line.startswith("posattn ")
    ]


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: value)
def test_commands_are_ones_that_posattn_takes(page: str, line: str) -> None:
    import typer

    from posattn.cli import app

    group = typer.main.get_command(app)
    name, *arguments = shlex.split(line)[1:]
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments)  # parses, and runs nothing


def test_make_targets_that_are_named_exist() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for body in blocks(page, "sh"):
            for target in re.findall(r"^make ([a-z-]+)", body, re.M):
                assert target in known, f"{page.name}: make {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text("utf-8"))
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), target


def test_every_command_is_in_the_readme() -> None:
    from posattn.cli import COMMANDS

    text = (ROOT / "README.md").read_text("utf-8")
    for name in COMMANDS:
        assert f"posattn {name}" in text, name
