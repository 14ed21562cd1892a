"""Programs judged per second in the sandbox, by a number of workers.

python benchmarks/bench_sandbox.py --workers 2 --programs 400
"""

from __future__ import annotations

import argparse
import os
import threading
import time

from counterpoise.tasks.sandbox import KINDS, Program, Sandbox

PROGRAM = Program(
    "def f(x):\n    return 2 * x", tuple(f"assert f({k}) == {2 * k}" for k in range(3))
)


def judge(sandbox: Sandbox, num: int) -> None:
    for _ in range(num):
        assert sandbox.run(PROGRAM) == [None] * 3


def rate(num_workers: int, num_programs: int, kind: str) -> float:
    """Programs per second; the threads wait, the work is done by the sandboxes."""
    sandboxes = [Sandbox(kind=kind) for _ in range(num_workers)]
    share = num_programs // num_workers
    for sandbox in sandboxes:
        judge(sandbox, 5)
    threads = [threading.Thread(target=judge, args=(one, share)) for one in sandboxes]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    for sandbox in sandboxes:
        sandbox.close()
    return share * num_workers / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--programs", type=int, default=400)
    parser.add_argument("--sandbox", choices=KINDS, default=KINDS[0])
    args = parser.parse_args()
    number = rate(args.workers, args.programs, args.sandbox)
    load = os.getloadavg()[0]
    print(
        f"{number:.0f} programs per second, {args.workers} workers, {args.sandbox},"
        f" {os.cpu_count()} cores, load {load:.1f}"
    )


if __name__ == "__main__":
    main()
