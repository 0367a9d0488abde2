"""Is the suite on ``docs/testing.md`` one that passes, as it stands?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.mark.slow
def test_the_suite_on_the_page_passes(pytester: pytest.Pytester) -> None:
    files: dict[str, str] = {}
    for name, code in re.findall(r"```python\n# (\S+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL):
        files[name] = files.get(name, "") + code
    assert PAGE.read_text().count("```python") == PAGE.read_text().count("```python\n# ")
    pytester.makepyfile(**files)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=files["test_train"].count("\ndef test_") + 3)
