"""One reference run for all comparisons: Ray, one rank, one rollout replica."""

from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.golden import OVERRIDES


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return runs.train(tmp_path_factory.mktemp("reference") / "run", *OVERRIDES)
