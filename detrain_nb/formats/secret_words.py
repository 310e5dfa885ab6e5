"""Detection of likely secrets in other tools' files: by name, by prefix, or as the password of a URL."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from ..storage import has_password_of_user, shown

__all__ = ["SECRET_NAME", "may_be_secret", "warn_of_secrets"]

SECRET_NAME = re.compile(
    "(?:TOKEN|KEY)(?:_|$)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|_(?:AUTH|PASS|PAT|PWD)$", re.IGNORECASE
)
# Tokens of Hugging Face, GitHub, GitLab, OpenAI and AWS.
_TOKEN = re.compile(
    r"\bhf_[A-Za-z0-9]{30}|\bgh[oprsu]_[A-Za-z0-9]{30}|\bgithub_pat_\w{30}|\bglpat-[\w-]{20}|\bsk-[\w-]{40}"
    r"|\bAKIA[A-Z0-9]{16}",
    re.ASCII,
)
_GIVEN = re.compile(r"([-+]{0,2}[A-Za-z_][\w.-]*+)=(.*)", re.DOTALL | re.ASCII)


def may_be_secret(name: str, value: str) -> bool:
    """Return whether a variable or an option looks like a secret, by its name or its value."""
    return bool(SECRET_NAME.search(name.replace("-", "_")) or _TOKEN.search(value)) or has_password_of_user(value)


def warn_of_secrets(words: Sequence[str]) -> Iterator[str]:
    """Yield a warning for each argument that looks like a secret; they are kept, as the script needs them."""
    for before, text in itertools.pairwise(("", *words)):
        option = before if before.startswith("--") and "=" not in before and text[:2] != "--" else ""
        given = _GIVEN.fullmatch(text)
        if given and may_be_secret(given[1], given[2]):
            option = given[1]
        elif not may_be_secret(option, text):
            continue
        said = "its value may be a secret, and the spec contains it: have the script read a variable instead"
        yield f"{shown(option, most=60) or 'an argument'}: {said}"
