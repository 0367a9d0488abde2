"""How do the package's docstrings become pages? A griffe extension, named in mkdocs.yml."""

import re

import griffe

import ddp_utils

ROLE = re.compile(r":(?:func|class|mod|meth|attr):`~?([\w.]+)`")


class Docstrings(griffe.Extension):
    """Let `Example:` hold doctests, and let Sphinx's roles be links."""

    def on_object(self, *, obj, **kwargs):
        """Rewrite one docstring before it is parsed."""
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            obj.docstring.value = ROLE.sub(_link, text)


def _link(role):
    name = role[1].rpartition(".")[2]
    return f"[`{name}`][ddp_utils.{name}]" if name in ddp_utils.__all__ else f"`{role[1]}`"
