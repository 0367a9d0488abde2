"""Which installed plugins does pytest load in a rank? Those that its parent has found.

Looking for them is a quarter of the time that a rank needs for a small test: pytest reads the
metadata of everything that is installed, and that twice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

import pytest

__all__ = ["arguments_for_rank", "found_by"]

_handed: dict[str, str] = {}
"""Names of plugins and of their modules, to be registered when this module is."""


def found_by(config: pytest.Config) -> dict[str, str] | None:
    """Return the names and modules of the installed plugins; None if one is no module."""
    manager = config.pluginmanager
    found: dict[str, str] = {}
    for plugin, _ in manager.list_plugin_distinfo():
        name = manager.get_name(plugin)
        if not isinstance(plugin, ModuleType):
            return None
        if name is not None:
            found[name] = plugin.__name__
    return found


@contextmanager
def arguments_for_rank(plugins: Mapping[str, str] | None) -> Iterator[list[str]]:
    """Give pytest's arguments for a configuration made inside the block, with these plugins.

    Where they cannot be handed over, pytest looks for them once more: that is so in a rank that
    was not forked from pytest, where importing them is still to be done, and asserts rewritten.
    """
    if plugins is None or not all(module in sys.modules for module in plugins.values()):
        yield []
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        for name, module in plugins.items():
            patch.setitem(_handed, name, module)
        # The parent has seen to what an ini file requires; pytest could not tell any more.
        yield ["-p", __name__, "-o", "required_plugins="]


def pytest_plugin_registered(plugin: object, manager: pytest.PytestPluginManager) -> None:
    """Register the plugins where pytest would: before it reads the command line."""
    if plugin is sys.modules[__name__]:
        for name, module in _handed.items():
            if not manager.hasplugin(name):
                manager.register(sys.modules[module], name)
