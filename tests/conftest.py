"""What holds in every test: shapes and types are checked at run time, one thread, fixed seeds, warnings are errors."""

from __future__ import annotations

import os
import shutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
os.environ.setdefault("MPLBACKEND", "Agg")

from jaxtyping import install_import_hook

import tests.typechecking  # noqa: F401  (the hook takes it from the package `tests`)

# Before anything imports posattn: from here on each annotated call in it is checked, shapes included.
install_import_hook("posattn", "tests.typechecking.check")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

hypothesis.settings.register_profile(
    "tests", deadline=None, max_examples=30, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("tests"), derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "tests")

#: Warnings of other libraries that we can do nothing about: what it says, where it is raised, why it does no harm.
THIRD_PARTY_WARNINGS = [
    # transformers and torch announce renamed internals on import or on the first trace
    "ignore::FutureWarning:transformers.*",
    "ignore::DeprecationWarning:transformers.*",
    "ignore::DeprecationWarning:torch.*",
    "ignore::FutureWarning:torch.*",
    # transformer-lens 3 still uses names that its own dependencies deprecated
    "ignore::DeprecationWarning:transformer_lens.*",
    "ignore::FutureWarning:transformer_lens.*",
    # compiled helpers of other packages announce a missing __module__ when they are imported
    "ignore:builtin type .* has no __module__ attribute:DeprecationWarning",
]


def pytest_configure(config: pytest.Config) -> None:
    for line in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; tests of pages are skipped only where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on this machine")
