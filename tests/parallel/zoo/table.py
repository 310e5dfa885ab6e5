"""What becomes of the zoo, as a table: python -m tests.parallel.zoo.table --layouts pp tp --only GPT-J Falcon"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence

from .everything import ENTRIES
from .trials import LAYOUTS, Trials


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layouts", nargs="+", choices=LAYOUTS, default=[each for each in LAYOUTS if each != "pp x tp"]
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ENTRIES, default=list(ENTRIES))
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--part", default="1/1", metavar="N/M", help="every Mth of them, from the Nth on")
    given = parser.parse_args(arguments)
    number, count = map(int, given.part.split("/"))
    names = given.only[number - 1 :: count]
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    print(f"{datetime.datetime.now():%Y-%m-%d %H:%M}, {commit.stdout.strip()}", flush=True)
    width = max(map(len, names))
    sums: dict[str, Counter[str]] = {layout: Counter() for layout in given.layouts}
    with Trials(given.device) as trials:
        for name in names:
            for layout in given.layouts:
                begun = time.monotonic()
                outcome = trials.run(name, layout, timeout_s=given.timeout_s)
                sums[layout][outcome.kind] += 1
                kind = outcome.kind if outcome.kind in ("right", "refused") else outcome.kind.upper()
                told = " ".join(outcome.told.split())
                took = time.monotonic() - begun
                print(f"{name:{width}}  {layout:8}  {took:4.1f} s  {kind:8} {told}".rstrip(), flush=True)
    for layout, counts in sums.items():
        print(f"{layout}: {', '.join(f'{count} {kind}' for kind, count in counts.most_common())}")


if __name__ == "__main__":
    sys.exit(main())
