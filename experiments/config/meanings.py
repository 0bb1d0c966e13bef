"""What a docstring says of each parameter of its function: the help of methods, tasks and commands.

Signatures are read by `sparsify.registry`, docstrings (Google's style) by griffe. This stands here and not
there, for only help needs meanings, and the library is to be installed without griffe.
"""

from __future__ import annotations

from sparsify.registry import Registry


def meanings(registry: Registry, name: str) -> dict[str, str]:
    """The meaning of each parameter that the docstring describes; `a, b: ...` describes both.

    Raises:
        BrokenFile: the entry's file can't be read.
    """
    import griffe  # a tenth of a second, which only help takes

    found: dict[str, str] = {}
    for section in griffe.Docstring(registry.docstring(name)).parse("google", warnings=False):
        if isinstance(section, griffe.DocstringSectionParameters):
            for parameter in section.value:
                meaning = " ".join(parameter.description.split())
                found |= {key.strip(): meaning for key in parameter.name.split(",")}
    return found
