"""Print, per kind of picture, how many digits the model `lenet` reads right.

    LENET_TEST_MNIST=FOLDER python -m tests.picture_kinds [--kinds open|aside|all|NAME ...]

Columns: right of all, wrong without a warning and with a probability above 0.95, refused, warned,
and the median of milliseconds. `--save FOLDER` writes contact sheets of 20 pictures a kind.
"""

import argparse
import io
import os
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from tests.picture_kinds import ASIDE, KINDS, NO_DIGITS, NUMBERS, OPEN, numbers, of_kind, outcome
from trainer.mnist import load


def save(name, pictures, folder):
    """The first 20 pictures, in two rows."""
    wide = Image.new("RGB", (1600, 320), "white")
    for i, ((body, _), _) in zip(range(20), pictures, strict=False):
        image = Image.open(io.BytesIO(body)).convert("RGBA")
        image.thumbnail((156, 156))
        wide.paste(image, (160 * (i % 10), 160 * (i // 10)), image)
    wide.save(folder / f"{name}.png")


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.picture_kinds",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--kinds", nargs="+", default=["open"], metavar="KIND")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--save", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    test = load(Path(os.environ["LENET_TEST_MNIST"])).test

    def draw(name):
        # Every kind has digits of its own.
        return test.images, test.labels, given.count, (given.seed, zlib.crc32(name.encode()))

    groups = {"open": list(OPEN), "aside": sorted(ASIDE), "all": list(KINDS)}
    names = [name for kind in given.kinds for name in groups.get(kind, [kind])]
    todo = [(name, of_kind(KINDS[name], *draw(name)), "one") for name in names]
    if given.kinds[0] in groups and given.kinds != ["aside"]:
        for name, kind in NUMBERS.items():
            todo.append((f"number_{name}", numbers(*draw(name), kinds=(kind,)), "several"))
        for name, make in NO_DIGITS.items():
            randoms = (np.random.default_rng((given.seed, i)) for i in range(given.count))
            pictures = map(lambda random, make=make: (make(random), []), randoms)
            todo.append((f"no_{name}", pictures, "one"))
    total = np.zeros(4, int)
    for name, pictures, digits in todo:
        if given.save:
            given.save.mkdir(parents=True, exist_ok=True)
            save(name, pictures, given.save)
            continue
        found = outcome(pictures, digits)
        warned = found.warned.total()
        row = np.array([found.right, found.sure_and_wrong, found.refused, warned])
        total += row * (name in KINDS)
        took_ms = np.median(found.took_ms)
        print(f"{name:34}{''.join(f'{n:7}' for n in row)} {took_ms:8.1f} ms", flush=True)
    of = given.count * len(names)
    if not given.save:
        print(f"{f'digits, of {of}':34}{''.join(f'{n:7}' for n in total)}")


if __name__ == "__main__":
    main()
