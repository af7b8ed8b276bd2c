"""The limits that docs/operations.md states, as numbers."""

from __future__ import annotations

import re

from tests.service_process import PROJECT

_NUMBER = re.compile(r"(?<![\w.-])(\d[\d,]*)(?: (KiB|MiB|s|ms)\b)?")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "s": 1, "ms": 1e-3}


def limits() -> dict[str, str]:
    """The second cell of each row of its table, by the first."""
    text = (PROJECT / "docs/operations.md").read_text()
    table = text.partition("\n## Limits\n")[2].partition("\n#")[0]
    return dict(re.findall(r"^\| (.*?) \| (.*?) \| .*\|$", table, re.MULTILINE)[2:])


def documented(begin: str) -> list[float]:
    """The numbers of the row that begins so, in bytes and seconds."""
    (value,) = (value for limit, value in limits().items() if limit.startswith(begin))
    found = _NUMBER.findall(value)
    return [int(number.replace(",", "")) * _UNITS[unit] for number, unit in found]
