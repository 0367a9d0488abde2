"""Is the house in order? Imports go down, names are where the front door says they are."""

from __future__ import annotations

import ast
import configparser
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import ddp_utils

PACKAGE = Path(ddp_utils.__file__).parent
FLOORS = (
    ("ground",),
    ("world",),
    ("stores", "rendezvous", "process_group"),
    ("callsite",),
    ("talk",),
    ("agree",),
    ("data",),
    ("models",),
    ("start",),
    ("launching", "doctor", "explain", "testing", "__main__"),
)
HEIGHT = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
)
LONG = 40
"""Lines of code, docstring aside, above which a function needs a reason."""
LONG_FOR_A_REASON: dict[str, str] = {}


def source_of(module: str) -> ast.Module:
    path = PACKAGE.parent / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def imports_of(module: str) -> Iterator[str]:
    """Yield the package's modules that a module imports, wherever in it, types aside."""
    for node in _running(source_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("ddp_utils."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ddp_utils"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a tree without what only type checkers read."""
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)):
            yield child
            yield from _running(child)


def height_of(module: str) -> int:
    return HEIGHT[module.split(".")[1]]


def test_every_room_has_a_floor() -> None:
    assert {module.split(".")[1] for module in MODULES} == set(HEIGHT)


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_and_never_up(module: str) -> None:
    up = [
        other
        for other in imports_of(module)
        if other != "ddp_utils" and height_of(other) > height_of(module)
    ]
    assert up == []


def test_imports_never_go_in_a_circle() -> None:
    TopologicalSorter({module: set(imports_of(module)) - {module} for module in MODULES}).prepare()


def test_the_front_door_names_what_it_opens() -> None:
    homes = {name: home for home, names in ddp_utils._WHERE.items() for name in names.split()}
    assert sorted(homes) == sorted(ddp_utils.__all__)
    assert len(set(ddp_utils.__all__)) == len(ddp_utils.__all__)
    for name, home in homes.items():
        module = importlib.import_module(f"ddp_utils.{home}")
        assert name in module.__all__, f"{name} is not in __all__ of {home}"
        assert getattr(ddp_utils, name) is getattr(module, name)


def test_the_front_door_tells_type_checkers_the_same() -> None:
    door = ast.parse((PACKAGE / "__init__.py").read_text())
    typed = next(node for node in door.body if isinstance(node, ast.If))
    found = {
        alias.name: node.module
        for node in typed.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {
        n: f"ddp_utils.{home}" for home, names in ddp_utils._WHERE.items() for n in names.split()
    }
    assert found == homes


def test_no_module_hides_a_public_name() -> None:
    rooms = {path.stem for path in PACKAGE.iterdir()}
    assert rooms & set(ddp_utils.__all__) == set(), "importing it would replace the function"


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_its_question_and_its_names(module: str) -> None:
    tree = source_of(module)
    docstring = ast.get_docstring(tree)
    assert docstring, "no docstring"
    first = docstring.split("\n\n")[0]
    assert "?" in first or module.count(".") == 1 or first.endswith("."), first
    if not module.endswith("__main__"):
        imported = importlib.import_module(module)
        assert [n for n in getattr(imported, "__all__", []) if not hasattr(imported, n)] == []


@pytest.mark.parametrize("module", MODULES)
def test_what_a_module_takes_from_another_is_meant_to_be_taken(module: str) -> None:
    taken = [
        f"{node.module}.{alias.name}"
        for node in _running(source_of(module))
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if f"{node.module}.{alias.name}" not in MODULES
        and not alias.name.isupper()  # constants are plain to see
        and alias.name not in importlib.import_module(node.module).__all__
    ]
    assert taken == [], "not in __all__ of the module that it comes from"


@pytest.mark.parametrize("name", sorted(ddp_utils.__all__))
def test_every_public_name_is_explained(name: str) -> None:
    thing = getattr(ddp_utils, name)
    docstring = thing.__doc__ or ""
    assert docstring.strip()
    if not isinstance(thing, type):
        assert ">>>" in docstring, "no example"


def test_functions_are_short() -> None:
    long = {
        node.name: f"{module}: {_length(node)} lines"
        for module in MODULES
        for node in ast.walk(source_of(module))
        if isinstance(node, ast.FunctionDef) and _length(node) > LONG
    }
    assert long.keys() == LONG_FOR_A_REASON.keys(), long


def _length(function: ast.FunctionDef) -> int:
    """Return a function's lines from its first statement on, the docstring aside."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_importing_the_package_imports_nothing_heavy() -> None:
    script = "import sys, ddp_utils; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert _python(script) == "[]"


def test_importing_all_of_it_does_nothing_but_define() -> None:
    script = f"""
import os, sys, signal, threading, multiprocessing, importlib, logging
import torch, torch.distributed
def state():
    handlers = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return (dict(os.environ), list(sys.argv), handlers, threading.active_count(),
            multiprocessing.get_start_method(allow_none=True), logging.root.handlers[:],
            logging.root.level, torch.get_num_threads())
before = state()
for module in {[m for m in MODULES if not m.endswith("__main__")]!r}:
    importlib.import_module(module)
print(state() == before)
"""
    assert _python(script) == "True"


def _python(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_private_names_of_torch_are_in_one_module_only() -> None:
    reaching = []
    for module in MODULES:
        if module == "ddp_utils.ground._torch_private":
            continue
        for node in ast.walk(source_of(module)):
            if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr):
                owner = ast.unparse(node.value)
                if re.match(r"(torch|dist|nn|np|multiprocessing|mp)\b", owner):
                    reaching.append(f"{module}:{node.lineno}: {owner}.{node.attr}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                private = [a.name for a in node.names if a.name.startswith("_")]
                if private or "._" in str(node.module):
                    reaching.append(f"{module}:{node.lineno}: from {node.module} {private}")
    assert reaching == []


def test_setup_has_the_extras_and_the_few_requirements() -> None:
    setup = configparser.ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    assert [re.split(r"[<>=]", name)[0] for name in required] == [
        "torch",
        "numpy",
        "typing-extensions",
    ]
    assert set(setup["options.extras_require"]) >= {"notebook", "test", "examples", "bench", "docs"}
    assert not (PACKAGE / "utils.py").exists()


def test_only_three_packages_are_imported_at_run_time() -> None:
    allowed = {"torch", "numpy", "typing_extensions", "ddp_utils", *sys.stdlib_module_names}
    optional = {"cloudpickle", "pytest", "_pytest", "coverage"}  # where the user has them
    strange = set()
    for module in MODULES:
        for node in ast.walk(source_of(module)):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            strange |= {name.split(".")[0] for name in names} - allowed - optional
    assert strange == set()
