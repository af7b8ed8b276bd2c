"""Weight files that are broken, hostile or replaced all the time, under a running service."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections import Counter
from types import SimpleNamespace

import pytest

from lenet.model import Model
from tests.faults.checks import NO_TRACE, cpu_s, resident_bytes, unharmed
from tests.faults.clients import ACCEPT, Known, ask, request

GIB = 1 << 30
REFUSED_WITHIN_S = 5.0
"""CPU time; to read 10 GB takes longer."""


class Executes:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def one_bit_flipped(path, content):
    changed = bytearray(content)
    changed[-5] ^= 1
    path.write_bytes(changed)


def pickled(path, _):
    path.write_bytes(pickle.dumps(Executes(str(path.parent / "executed"))))


def link_out_of_the_folder(path, content):
    outside = path.parents[2] / "outside.safetensors"
    outside.write_bytes(content)
    path.symlink_to(outside)


def sparse_10_gb(path, _):
    with path.open("wb") as file:
        file.truncate(10 * GIB)


def pipe(path, _):
    os.mkfifo(path)


def unreadable_device(path, _):
    path.symlink_to("/dev/zero")


KINDS = [
    one_bit_flipped,
    pickled,
    link_out_of_the_folder,
    sparse_10_gb,
    pipe,
    unreadable_device,
]


def _remove(path):
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    else:
        path.unlink()


def test_no_broken_file_replaces_the_served_version(start, tiny_weights, random_weights, tiny):
    service = start().ready()
    golden = random_weights(Model("lenet", tiny.blocks)).golden
    content = (tiny_weights / "lenet" / "1.safetensors").read_bytes()
    broken = tiny_weights / "lenet" / "9.safetensors"
    log = (r"9\.safetensors", r"reload: 0 replaced, 0 unchanged, 1 refused")
    # Labels of random weights have no meaning: only that the answer stays the same is checked.
    found = ask(service.port, request(golden.images.tobytes(), ACCEPT)).probabilities
    digit = SimpleNamespace(images=golden.images, labels=found.argmax(axis=1))
    with unharmed(service, digit, moved={}, log=log):
        for count, spoil in enumerate(KINDS, 1):
            spoil(broken, content)
            began_s = cpu_s(service.process.pid)
            service.signal(signal.SIGHUP)
            service.wait_for("reload: 0 replaced, 0 unchanged, 1 refused", count)
            assert cpu_s(service.process.pid) - began_s < REFUSED_WITHIN_S, spoil.__name__
            _remove(broken)
    refusals = [line for line in service.lines if "still serving version 1" in line]
    assert len(refusals) == len(KINDS)
    assert not (tiny_weights / "lenet" / "executed").exists()


async def _swap_folders(tmp_path, tiny_weights, random_weights, tiny, digits, start, swaps):
    """Replace the model's whole folder again and again, also in the middle of a reload.

    Returns: by how many bytes the service has grown since a quarter of the swaps.
    """
    folder, spare, away = tiny_weights / "lenet", tmp_path / "spare", tmp_path / "away"
    spare.mkdir()
    model = Model("lenet", tiny.blocks)
    weights = {"1": random_weights(model, 0), "2": random_weights(model, 1)}
    weights["2"].write(spare / "2.safetensors")
    expected = {version: digits.computed_by(file) for version, file in weights.items()}
    service, warm_bytes = start("--contexts", "2").ready(), 0
    known, answered = Known(service, digits, expected), Counter()

    async def ask_on():
        async with await known.connect() as connection:
            while not swapping.done():
                rows, images = known.choose(*range(1, 10))
                answer = await connection.ask(request(images.tobytes(), ACCEPT))
                known.judge(rows, answer)
                answered[answer.headers["x-model-version"]] += 1

    def swap():
        nonlocal warm_bytes
        for number in range(1, swaps + 1):
            folder.rename(away)
            service.signal(signal.SIGHUP)  # may find no folder, the old or the new one
            spare.rename(folder)
            away.rename(spare)
            service.signal(signal.SIGHUP)
            service.wait_for(r"version \d .* replaced version", number)
            if number == swaps // 4:
                warm_bytes = resident_bytes(service.process.pid)

    swapping = asyncio.create_task(asyncio.to_thread(swap))
    await asyncio.gather(swapping, ask_on(), ask_on())
    assert min(answered["1"], answered["2"]) > swaps / 4
    assert not NO_TRACE.search(service.log)
    for line in service.lines:
        assert "ERROR" not in line or "reload refused, still serving" in line
    return resident_bytes(service.process.pid) - warm_bytes


async def test_each_answer_is_of_one_version_when_the_folder_is_swapped_amid_reloads(
    tmp_path, tiny_weights, random_weights, tiny, digits, start
):
    await _swap_folders(tmp_path, tiny_weights, random_weights, tiny, digits, start, swaps=12)


@pytest.mark.long
async def test_a_thousand_reloads_under_load_cost_no_memory(
    tmp_path, tiny_weights, random_weights, tiny, digits, start
):
    grown = await _swap_folders(
        tmp_path, tiny_weights, random_weights, tiny, digits, start, swaps=1000
    )
    # A model of one layer has 31 KB: 750 that stay would be 23 MB. The allocator's noise is 2 MB.
    assert grown < 8 << 20
