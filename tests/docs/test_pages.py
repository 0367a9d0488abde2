"""Do the pages tell the truth? Their code runs, their links lead somewhere, nothing is missing."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from diffs import RETROFIT, changed_lines, shown_diff
from raised import CLASSES, covers, raised

import ddp_utils
from ddp_utils.ground.settings import VARIABLES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])
SCRIPTS = {"index.md": 3, "starting.md": 2}
"""Pages whose Python blocks are whole scripts, and how many lines each prints."""

STEPS = sorted(path.name for path in RETROFIT.glob("step*.py"))
SHAPES = ("classifier", "gan", "language_model")
PAIRS = list(itertools.pairwise(STEPS))
PAIRS += [(f"{shape}_before.py", f"{shape}_after.py") for shape in SHAPES]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```(?:python|py|pycon)\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_with_code_is_run_by_some_test(page: Path) -> None:
    if not python_blocks(page) or page.name in SCRIPTS:
        return
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    elsewhere = [text for text in tests if f'"{page.name}"' in text and "SCRIPTS =" not in text]
    assert elsewhere, f"nobody runs {page.name}"


@pytest.mark.parametrize("name", [pytest.param("index.md", marks=pytest.mark.slow), "starting.md"])
def test_scripts_on_pages_run_on_one_process_and_on_two_ranks(name, script) -> None:
    for number, block in enumerate(python_blocks(DOCS / name)):
        page = script(block, f"block_{number}.py")
        for nproc in ("1", "2"):
            done = page.run(DDP_UTILS_NPROC=nproc)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("\n") == SCRIPTS[name], "each line is printed once"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_images_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
    targets += re.findall(r'(?:src|href|srcset)="(?!https?:|#)([^"#]+)"', page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_errors_page_has_every_class() -> None:
    headings = re.findall(r"^## (\w+)$", (DOCS / "errors.md").read_text(), re.M)
    assert sorted(headings) == sorted(CLASSES)


def test_the_errors_page_has_every_message() -> None:
    page = (DOCS / "errors.md").read_text()
    texts: dict[str, list[str]] = {}
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        kind = section.split("\n", 1)[0]
        texts[kind] = re.findall(r"^\| `(.+?)` ", section, re.M)
    missing = [
        f"{each.kind} ({each.place}): {each.message}"
        for each in raised()
        if not any(covers(text, each.message) for text in texts[each.kind])
    ]
    assert missing == []


def test_the_messages_on_the_errors_page_are_in_the_source() -> None:
    source = "\n".join(_words(path) for path in (ROOT / "ddp_utils").rglob("*.py"))
    page = (DOCS / "errors.md").read_text()
    pieces = [
        piece.strip(" .…)(:=,")
        for text in re.findall(r"^\| `(.+?)` ", page, re.M)
        for piece in re.split(r"…|\d+(?:, \d+)*", text)
    ]
    assert [piece for piece in pieces if len(piece) > 8 and piece not in source] == []


def _words(path: Path) -> str:
    """Return all text constants of a module; the parts of a formatted one keep their order."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return "\n".join(n.value for n in nodes if isinstance(n, ast.Constant) and type(n.value) is str)


def test_the_variables_page_has_every_variable() -> None:
    rows = re.findall(
        r"^\| `(DDP_UTILS_\w+)` \| (.+?) \| \S+(?: \w+\))? \| (.+) \|$",
        (DOCS / "variables.md").read_text(),
        re.M,
    )
    told = {name: (takes.replace(r"\|", "|"), meaning) for name, takes, meaning in rows}
    assert told == {v.name: (v.accepts, v.meaning) for v in VARIABLES}


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_the_guide_shows_what_the_examples_change(before: str, after: str) -> None:
    assert shown_diff(before, after) in (DOCS / "retrofit.md").read_text()
    assert changed_lines(before, after) <= (5 if before.startswith("step") else 20)


def test_the_reference_has_every_name() -> None:
    listed = re.findall(r"members: \[(.+)\]", (DOCS / "reference.md").read_text())
    names = [name for line in listed for name in line.split(", ")]
    assert sorted(names) == sorted(ddp_utils.__all__)


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_both_readmes_show_the_same_diff_and_the_same_names() -> None:
    english, chinese = ((ROOT / name).read_text() for name in ("README.md", "README.zh.md"))
    diffs = [re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S) for text in (english, chinese)]
    assert diffs[0] == diffs[1] != []
    for pattern in (r"DDP_UTILS_[A-Z_]+", r"docs/\w+\.md"):
        assert set(re.findall(pattern, chinese)) == set(re.findall(pattern, english))
    assert {v.name for v in VARIABLES} <= set(re.findall(r"DDP_UTILS_[A-Z_]+", english))
