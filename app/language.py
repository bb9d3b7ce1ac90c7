"""The language of the pages that stand before the page itself, the login and the loading page: the browser's own.

What was chosen in Settings lies in the browser, where only the page's modules read it.
"""

from typing import Literal

Language = Literal["en", "zh"]


def asked_for(accept_language: str) -> Language:
    """By the first one that the header names."""
    return "zh" if accept_language.strip().lower().startswith("zh") else "en"
