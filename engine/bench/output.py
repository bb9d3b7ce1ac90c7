"""Results as a table for people and one line of JSON for scripts."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_WIDTH = 44


def flat(figures: Mapping[str, Any], separator: str = " ") -> dict[str, Any]:
    """{"a": {"1": x}, "b": y} -> {"a 1": x, "b": y}, to any depth."""
    return dict(_pairs(figures, "", separator))


def _pairs(figures: Mapping[str, Any], prefix: str, separator: str) -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _pairs(value, f"{prefix}{name}{separator}", separator)
        else:
            yield prefix + name, value


def print_result(result: Mapping[str, Any]) -> None:
    """The last line is JSON."""
    for name, value in flat(result).items():
        shown = f"{value:,.2f}" if isinstance(value, float) else str(value)
        print(f"{name:<{_WIDTH}} {shown:>16}")
    print(json.dumps(result))
