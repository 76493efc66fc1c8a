"""python -m tests.fuzz                                  all doors, 60 seconds each
python -m tests.fuzz packs http --seconds 3600 --seed 5
python -m tests.fuzz packs --seed 17 --count 1        the input that a fault names
"""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.doors import DOORS
from tests.fuzz.harness import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("doors", nargs="*", metavar="DOOR", help=", ".join(DOORS))
    parser.add_argument("--seconds", type=float, default=60.0, help="for each door")
    parser.add_argument("--count", type=int, help="inputs for each door, instead of seconds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first input")
    parser.add_argument("--reasons", action="store_true", help="list the reasons of refusals")
    given = parser.parse_args()
    faults = 0
    for name in given.doors or DOORS:
        limits = {"seconds": given.seconds} if given.count is None else {"count": given.count}
        report = run(name, DOORS[name], given.seed, **limits)
        print(report, flush=True)
        for reason, count in report.reasons.most_common() if given.reasons else ():
            print(f"  {count:7,} {reason}")
        for alike in report.kinds_of_faults().values():
            seed, _, text, *_ = alike[0]
            print(f"\n{len(alike)} times, as with {name} --seed {seed} --count 1:\n{text}")
        faults += len(report.faults)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
