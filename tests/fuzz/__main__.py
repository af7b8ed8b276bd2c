"""Fuzz one parser: `make fuzz TARGET=json FUZZ_S=600`.

With atheris installed (Linux on x86-64: `pip install -e '.[dev,fuzz]'`), inputs are chosen by the
coverage that they reach; without it the corpus is mutated blindly. New inputs are kept in
`build/fuzz/TARGET`, and an input that fails in `build/fuzz/TARGET-crash-*`: run it again by
`python -m tests.fuzz TARGET --run FILE`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from contextlib import ExitStack, closing
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy is loaded

from tests.fuzz.target import (
    CORPUS,
    LARGEST_INPUT_BYTES,
    MODULES,
    corpus,
    load,
    mutated,
    run_bounded,
    run_traced,
)

WORK = Path(__file__).parents[2] / "build" / "fuzz"

HEADROOM_BYTES = 1 << 30
"""Address space beyond what the process has when it begins: a case that wants more fails."""


def main() -> int:
    """Run the command; exits with 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=sorted((*MODULES, "cost")))
    parser.add_argument("--list", action="store_true", help="print the targets")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--run", type=Path, nargs="+", metavar="FILE", help="run these once")
    parser.add_argument("--minimise", action="store_true", help="copy there what adds coverage")
    arguments = parser.parse_args()
    if arguments.list:
        print(*MODULES, "cost")
        return 0
    if arguments.target is None:
        parser.error("expected a target, see --list")
    warnings.simplefilter("error")
    name: str = arguments.target
    if name == "cost":
        return _search_costs(arguments.seconds)
    if arguments.run:
        with closing(load(name)) as target:
            for path in arguments.run:
                print(path)
                run_traced(target, path.read_bytes())
        return 0
    if arguments.minimise:
        _keep_what_adds(name)
        return 0
    try:
        import atheris
    except ImportError:
        print("atheris is not installed (pip install -e '.[dev,fuzz]'): mutating blindly")
        return _mutate_blindly(name, arguments.seconds)
    # In memory, if there is such a folder: thousands of files are written in a second.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        tempfile.tempdir = folder
        child = os.fork()  # libFuzzer ends the process that it runs in
        if not child:
            _with_atheris(atheris, name, arguments.seconds)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _search_costs(seconds: float) -> int:
    """Search in each parser for its share of the time; 1 if one takes more than its limit."""
    from tests.fuzz.cost import cpu_s, parsers, seeds

    failed = 0
    WORK.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        searches = parsers(stack)
        for name, search in searches.items():
            end_s = time.monotonic() + seconds / len(searches)
            found = seeds(name)
            for data in found[:2]:
                cpu_s(search.parse, data)  # imports
            search.go(found, lambda end_s=end_s: time.monotonic() < end_s, cpu_s)  # type: ignore[misc]
            cost_us, data = search.worst[0]
            path = WORK / f"cost-{name.replace(' ', '-')}"
            path.write_bytes(data)
            above = cost_us > search.limit_us
            failed |= above
            advice = f", expected at most {search.limit_us}: see {path}" if above else ""
            print(f"{name:20} {cost_us:8.3f} us a byte {len(data):6} bytes{advice}", flush=True)
    return failed


def _limit_memory() -> None:
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _with_atheris(atheris: object, name: str, seconds: float) -> None:
    """Ends the process, with 77 if a case failed."""
    with atheris.instrument_imports(include=list(MODULES[name][2])):  # type: ignore[attr-defined]
        target = load(name)
    work = WORK / name
    work.mkdir(parents=True, exist_ok=True)
    seeds = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    options = [
        f"-max_len={target.max_bytes}",
        f"-artifact_prefix={WORK}/{name}-",
        "-timeout=10",
        "-print_final_stats=1",
        "-verbosity=1",
        f"-max_total_time={seconds:.0f}",
        *(str(work), *seeds),
    ]
    _limit_memory()

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        change = _bytes_mutation(atheris, max_bytes, rng)
        found = change(data) if rng.random() < 0.2 else target.mutate(data, rng, change)
        return found[:max_bytes]

    def run(data: bytes) -> None:
        run_bounded(target, data)

    atheris.Setup([sys.argv[0], *options], run, custom_mutator=mutate)  # type: ignore[attr-defined]
    atheris.Fuzz()  # type: ignore[attr-defined]


def _bytes_mutation(atheris: object, max_bytes: int, rng: random.Random):  # type: ignore[no-untyped-def]
    def change(data: bytes) -> bytes:
        if rng.random() < 0.3:
            return mutated(data, rng, max_bytes)
        # It needs a byte to change.
        found: bytes = atheris.Mutate(data or b"\0", max_bytes)  # type: ignore[attr-defined]
        return found

    return change


def _keep_what_adds(name: str) -> None:
    """Copy to the corpus the smallest inputs that reach lines and branches that it does not."""
    import coverage

    ours = ("lenet", "service", "trainer", "wire")
    places = [one.replace(".", "/") for one in MODULES[name][2] if one.startswith(ours)]
    files = [f"*/{place}{end}" for place in places for end in (".py", "/*.py")]
    measured = coverage.Coverage(data_file=None, config_file=False, branch=True, include=files)
    found = sorted((WORK / name).glob("*"), key=lambda path: path.stat().st_size)
    reached = kept = 0
    # Code that runs once on import is measured, too.
    with measured.collect(), closing(load(name)) as target:
        for path in (*sorted((CORPUS / name).iterdir()), *found):
            data = path.read_bytes()
            if len(data) > LARGEST_INPUT_BYTES:
                continue
            target.run(data)
            measured.stop()
            lines = measured.get_data()
            arcs = sum(len(lines.arcs(file) or ()) for file in lines.measured_files())
            measured.start()
            if arcs > reached and path.parent != CORPUS / name:
                kept += 1
                (CORPUS / name / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
            reached = max(arcs, reached)
    print(f"{name}: {kept} of {len(found)} inputs kept")
    measured.report(show_missing=True)


def _mutate_blindly(name: str, seconds: float) -> int:
    inputs, rng = corpus(name), random.Random(0)
    end_s, runs = time.monotonic() + seconds, 0
    with closing(load(name)) as target:
        _limit_memory()
        while time.monotonic() < end_s:
            data = rng.choice(inputs)
            for _ in range(rng.choice((1, 1, 2, 4))):
                data = target.mutate(data, rng, lambda data: mutated(data, rng, target.max_bytes))
            data = data[: target.max_bytes]
            runs += 1
            try:
                run_bounded(target, data)
            except Exception:
                WORK.mkdir(parents=True, exist_ok=True)
                path = WORK / f"{name}-crash-{time.time_ns()}"
                path.write_bytes(data)
                print(f"failed, see {path}", file=sys.stderr)
                raise
    print(f"{name}: {runs} runs in {seconds:.0f} s, all as expected")
    return 0


if __name__ == "__main__":
    sys.exit(main())
