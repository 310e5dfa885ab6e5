"""The imports of a rank, done once in the process from which its interpreter is forked."""

from __future__ import annotations

import os
import sys

EXTRA_PATH_VARIABLE = "DETRAIN_NB_EXTRA_PATH"  # folders with code that the node lacks, searched last
OLDEST_TORCH = (2, 9, 1)


def preload() -> None:
    """Import what every interpreter needs; exit with one clear line when torch is missing or too old."""
    extra = os.environ.get(EXTRA_PATH_VARIABLE, "").split(os.pathsep)
    sys.path += [path for path in extra if path and path not in sys.path]
    try:
        import torch
    except ImportError as exc:
        sys.exit(f"torch is missing in {sys.executable} ({exc}): install it there with pip install torch")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:3] if part.isdigit())
    if version < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        sys.exit(f"torch {torch.__version__} in {sys.executable} is too old: torch>={oldest} is needed")
    try:
        import torch.distributed.run

        from ..cell import interpreter  # noqa: F401  imports IPython and what a rank uses
    except ImportError as exc:
        sys.exit(f"{sys.executable} cannot run a rank ({exc}): install detrain_nb there with pip")
