"""A griffe extension: it writes our docstrings in the form that griffe reads, before they are parsed."""

import re

import griffe

_SEVERAL = re.compile(r"(  )([*\w]+)((?:, [*\w]+)+): ")


def _one_name_each(lines):
    """Yield the lines, with `a, b: text` as an entry for `a` and one for `b` that refers to it."""
    rest = []
    for line in lines:
        if rest and not line.startswith("   "):  # the entry has ended
            yield from rest
            rest = []
        if several := _SEVERAL.match(line):
            indent, first, others = several.groups()
            rest = [f"{indent}{name}: see `{first}`." for name in others.removeprefix(", ").split(", ")]
            line = f"{indent}{first}: {line[several.end() :]}"
        yield line
    yield from rest


class Sections(griffe.Extension):
    """Rename the sections Example, and Args of named tuples; split entries of several arguments."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Change the docstring before it is parsed."""
        if not obj.docstring:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        if obj.is_class and any(str(base) == "NamedTuple" for base in obj.bases):
            text = re.sub(r"^Args:$", "Attributes:", text, flags=re.MULTILINE)
        obj.docstring.value = re.sub(
            r"(?<=^Args:\n)(?:  .*\n?|\n)+", lambda section: "\n".join(_one_name_each(section[0].split("\n"))), text, flags=re.MULTILINE
        )
