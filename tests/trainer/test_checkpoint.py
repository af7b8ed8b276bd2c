import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from lenet.model import named
from trainer.checkpoint import Checkpoint, Epoch, Snapshot
from trainer.errors import InvalidCheckpoint
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd
from trainer.settings import Recipe

RECIPE = Recipe(model="lenet")
HELD_OUT = Digits(np.zeros((2, 28, 28), np.uint8), np.array([0, 1], np.uint8))
EPOCHS = [Epoch(0.5, 0.8, 0.9), Epoch(0.25, 0.9, 0.95)]


def new_state(name="lenet", seed=0, ops=None):
    """A network and an optimizer with distinct numbers everywhere, and their snapshot."""
    model, ops = named(name), ops or CpuOps()
    network = Network(model, initial_tensors(model, np.random.default_rng(seed)), ops)
    sgd = Sgd(model, network.parameters, ops)
    change(network, sgd, seed)
    return network, sgd, Snapshot(network, sgd)


def change(network, sgd, seed):
    random = np.random.default_rng(seed)
    for arrays in (network.arrays, sgd.velocities):
        for value in arrays.values():
            value[...] = random.standard_normal(value.shape)


def values(network, sgd):
    arrays = [*network.arrays.items(), *sgd.velocities.items()]
    return [(name, value.tobytes()) for name, value in arrays]


def test_a_snapshot_that_is_interrupted_counts_for_nothing():
    class Interrupting(CpuOps):
        copies = 0

        def copy(self, source, target):
            self.copies += 1
            if self.copies == 4:
                raise KeyboardInterrupt
            super().copy(source, target)

    _, _, snapshot = new_state(ops=Interrupting())
    snapshot.take(EPOCHS[:1], (1.0, 0))
    with pytest.raises(KeyboardInterrupt):
        snapshot.take(EPOCHS, (4096.0, 7))
    assert snapshot.epochs == ()


def test_a_checkpoint_brings_tensors_velocities_and_epochs_into_another_process(tmp_path):
    network, sgd, snapshot = new_state()
    snapshot.take(EPOCHS, (4096.0, 7))
    saved = values(network, sgd)
    change(network, sgd, 1)  # what is saved is the snapshot
    Checkpoint(tmp_path, RECIPE, "0" * 64, HELD_OUT).save(snapshot)
    other, other_sgd, other_snapshot = new_state(seed=5)
    Checkpoint(tmp_path, RECIPE, "0" * 64, HELD_OUT).resume(other_snapshot)
    assert values(other, other_sgd) == saved
    assert other_snapshot.epochs == tuple(EPOCHS)
    assert other_snapshot.loss_scale == (4096.0, 7)
    change(other, other_sgd, 6)
    other_snapshot.restore()
    assert values(other, other_sgd) == saved


KILLED = """
import os, signal, sys
from pathlib import Path
from lenet.files import write_atomically
os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(Path(sys.argv[1]), b"half of a checkpoint")
"""


def test_a_finished_run_leaves_nothing_of_a_write_that_was_killed(tmp_path):
    snapshot = new_state()[2]
    recipe = RECIPE.model_copy(update={"model": "a[1].json"})
    ours, other = (Checkpoint(tmp_path, recipe, digit * 64, HELD_OUT) for digit in "01")
    other.save(snapshot)
    killed = subprocess.run([sys.executable, "-c", KILLED, ours.path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    ours.discard()
    assert list(tmp_path.iterdir()) == [other.path]


def rewrite(path, **metadata):
    save_file(load_file(path), path, {"loss_scale": "[1, 0]", **metadata})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"no checkpoint"), "cannot be read"),
        (lambda path: rewrite(path, run="another", epochs="[]"), "belongs to another run"),
        (lambda path: rewrite(path), "cannot be read"),
        (lambda path: rewrite(path, run="x", epochs="[[1, 2]]"), "cannot be read"),
        (lambda path: rewrite(path, run="x", epochs="[" * 100_000), "cannot be read"),
        (lambda path: rewrite(path, run="x", epochs=f"[[{10**400}, 1, 1]]"), "cannot be read"),
    ],
)
def test_a_checkpoint_that_cannot_be_trusted_is_refused(tmp_path, damage, message):
    network, sgd, snapshot = new_state()
    checkpoint = Checkpoint(tmp_path, RECIPE, "0" * 64, HELD_OUT)
    checkpoint.save(snapshot)
    change(network, sgd, 1)
    before = values(network, sgd)
    damage(checkpoint.path)
    with pytest.raises(InvalidCheckpoint, match=message) as caught:
        checkpoint.resume(snapshot)
    assert str(caught.value).startswith(str(checkpoint.path))
    assert "delete it" in str(caught.value)
    assert values(network, sgd) == before


def test_a_checkpoint_is_refused_when_other_images_are_held_out(tmp_path):
    network, sgd, snapshot = new_state()
    checkpoint = Checkpoint(tmp_path, RECIPE, "0" * 64, HELD_OUT)
    checkpoint.save(snapshot)
    change(network, sgd, 1)
    before = values(network, sgd)
    swapped = Digits(HELD_OUT.images, HELD_OUT.labels[::-1])
    other = Checkpoint(tmp_path, RECIPE, "0" * 64, swapped)
    with pytest.raises(InvalidCheckpoint, match="held out other images; delete it to train from"):
        other.resume(snapshot)
    assert values(network, sgd) == before
    with safe_open(checkpoint.path, "numpy") as file:
        run = file.metadata()["run"]
    rewrite(checkpoint.path, run=run, epochs="[]")  # as earlier versions wrote it
    with pytest.raises(InvalidCheckpoint, match="is of an earlier version, or"):
        checkpoint.resume(snapshot)
