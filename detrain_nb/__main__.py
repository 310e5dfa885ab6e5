"""``python -m detrain_nb``: the command ``detrain-nb``."""

import sys

from .cli import main

sys.exit(main())
