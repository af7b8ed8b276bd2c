"""Weight files that are broken or hostile, under a running service."""

from __future__ import annotations

import os
import pickle
import signal
from types import SimpleNamespace

from lenet.model import Model
from tests.faults.checks import cpu_s, unharmed
from tests.faults.clients import ACCEPT, ask, request

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
