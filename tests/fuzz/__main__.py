"""``make fuzz``: every fuzzer at length, over all cores; exit code 1 if anything is found."""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor

from fuzz import FUZZERS, find

CHUNK = 50


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(FUZZERS)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0, help="times the usual number of cases")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    jobs = [
        (name, f"{args.seed}.{start}", min(CHUNK, num - start))
        for name in args.names or FUZZERS
        for num in [max(1, int(FUZZERS[name][1] * args.scale))]
        for start in range(0, num, CHUNK)
    ]
    faults: dict[tuple[str, str], str] = {}
    with ProcessPoolExecutor(args.jobs) as pool:
        for (name, *_), result in zip(jobs, pool.map(find, *zip(*jobs))):
            for problem, example in result.items():
                if (name, problem) not in faults:
                    print(f"{name}: {problem} | {example}", flush=True)
                faults.setdefault((name, problem), example)
    print(f"{sum(job[2] for job in jobs)} cases, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
