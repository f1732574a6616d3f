"""Let tests import the modules that the benchmark scripts share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.benchmarks.scripts import BENCHMARKS
from tests.harness import start_server


@pytest.fixture(autouse=True, scope="module")
def _shared_modules() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        start_server()
        yield
