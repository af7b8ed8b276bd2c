import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lenet.model import named
from trainer.errors import InvalidCheckpoint, InvalidDataset, TrainingDiverged
from trainer.loop import Checkpoint, accuracy, train
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd
from trainer.settings import Recipe

RECIPE = Recipe(
    model="lenet-6-16", epochs=3, batch=20, rate=0.03, validation_images=100, dropout=0.1
)


def new_network(recipe=RECIPE):
    model = named(recipe.model)
    tensors = initial_tensors(model, np.random.default_rng(recipe.seed))
    return Network(model, tensors, CpuOps(), recipe.dropout)


def run(dataset, folder, recipe=RECIPE, network=None):
    network = network or new_network(recipe)
    checkpoint = Checkpoint(folder, recipe, dataset.sha256)
    epochs = train(network, recipe, *dataset.hold_out(recipe.validation_images), checkpoint)
    return network, epochs, checkpoint


def assert_same(one, other):
    for name, value in one.tensors.items():
        np.testing.assert_array_equal(value, other.tensors[name])


@pytest.mark.parametrize("schedule", ["one-cycle", "step"])
def test_a_network_learns_and_says_how_each_epoch_went(tiny, tmp_path, capsys, schedule):
    recipe = RECIPE.model_copy(update={"schedule": schedule})
    network, epochs, _ = run(tiny, tmp_path, recipe)
    assert len(epochs) == 3
    assert epochs[-1].loss < epochs[0].loss
    assert epochs[-1].validation_accuracy > 0.7
    assert epochs[-1].validation_accuracy == accuracy(network, tiny.hold_out(100)[1])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("epoch 3 of 3: loss ")
    assert lines[2].endswith(f"validation {epochs[-1].validation_accuracy:.2%}")


def test_the_same_seed_gives_the_same_tensors_and_another_seed_others(tiny, tmp_path):
    first, second = (run(tiny, tmp_path / place)[0] for place in "ab")
    assert_same(first, second)
    other, _, _ = run(tiny, tmp_path, RECIPE.model_copy(update={"seed": 2}))
    assert (other.tensors["conv1.weight"] != first.tensors["conv1.weight"]).all()


class Interrupting(Network):
    """Ctrl-C in the middle of the third epoch."""

    steps = 0

    def backward(self):
        self.steps += 1
        if self.steps == 2 * 15 + 5:
            raise KeyboardInterrupt
        super().backward()


def test_an_interrupted_run_resumes_and_ends_with_the_same_tensors(tiny, tmp_path, capsys):
    whole, epochs, _ = run(tiny, tmp_path / "whole")
    fresh = new_network()
    interrupted = Interrupting(fresh.model, fresh.tensors, CpuOps(), RECIPE.dropout)
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "cut", network=interrupted)
    capsys.readouterr()
    resumed, all_epochs, _ = run(tiny, tmp_path / "cut")
    assert_same(whole, resumed)
    assert all_epochs == epochs
    assert capsys.readouterr().out.startswith("resumed after epoch 2 from ")


def test_a_finished_run_is_not_trained_again(tiny, tmp_path):
    first, _, checkpoint = run(tiny, tmp_path)
    again, _, _ = run(tiny, tmp_path)
    assert_same(first, again)
    checkpoint.discard()
    checkpoint.discard()
    assert list(tmp_path.iterdir()) == []


def test_another_recipe_or_dataset_has_another_checkpoint(tmp_path):
    paths = {
        Checkpoint(tmp_path, recipe, sha256).path
        for recipe in (RECIPE, RECIPE.model_copy(update={"rate": 0.04}))
        for sha256 in ("0" * 64, "1" * 64)
    }
    assert len(paths) == 4


def rewrite(path, tensors=None, **metadata):
    kept = load_file(path)
    save_file(kept if tensors is None else tensors, path, metadata)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"no checkpoint"), "cannot be read"),
        (lambda path: rewrite(path, run="another", epochs="[]"), "belongs to another run"),
        (lambda path: rewrite(path), "cannot be read"),
        (lambda path: rewrite(path, run="x", epochs="[[1, 2]]"), "cannot be read"),
        (lambda path: rewrite(path, run="x", epochs="{"), "cannot be read"),
    ],
)
def test_a_checkpoint_that_cannot_be_trusted_is_refused(tiny, tmp_path, damage, message):
    _, _, checkpoint = run(tiny, tmp_path, RECIPE.model_copy(update={"epochs": 1}))
    damage(checkpoint.path)
    with pytest.raises(InvalidCheckpoint, match=message) as caught:
        run(tiny, tmp_path, RECIPE.model_copy(update={"epochs": 1}))
    assert str(caught.value).startswith(str(checkpoint.path))
    assert "delete it" in str(caught.value)


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path):
    network = new_network()
    checkpoint = Checkpoint(tmp_path, RECIPE, "0" * 64)
    checkpoint.save(network, Sgd(network.parameters), [])
    other = new_network(RECIPE.model_copy(update={"model": "mlp"}))
    with pytest.raises(InvalidCheckpoint, match="other tensors"):
        checkpoint.resume(other, Sgd(other.parameters))


def test_a_loss_that_is_no_number_stops_with_its_step_and_keeps_the_last_epoch(tiny, tmp_path):
    recipe = RECIPE.model_copy(update={"rate": 100.0, "model": "lenet-classic"})
    with pytest.raises(TrainingDiverged, match=r"the loss is (nan|inf) at step \d+ of 45.*100.0"):
        run(tiny, tmp_path, recipe)


class Poisoned(Network):
    """A weight becomes NaN after the first epoch."""

    steps = 0

    def backward(self):
        super().backward()
        self.steps += 1
        if self.steps == 17:
            next(iter(self.parameters.values()))[...] = np.nan


def test_the_checkpoint_holds_the_last_good_epoch_when_training_diverges(tiny, tmp_path):
    fresh = new_network()
    poisoned = Poisoned(fresh.model, fresh.tensors, CpuOps(), RECIPE.dropout)
    with pytest.raises(TrainingDiverged, match="at step 18 of 45"):
        run(tiny, tmp_path, network=poisoned)
    network = new_network()
    checkpoint = Checkpoint(tmp_path, RECIPE, tiny.sha256)
    assert len(checkpoint.resume(network, Sgd(network.parameters))) == 1
    assert all(np.isfinite(value).all() for value in network.tensors.values())


def test_fewer_images_than_a_batch_are_refused(tiny, tmp_path):
    with pytest.raises(InvalidDataset, match="has 300 images, expected at least one batch of 301"):
        run(tiny, tmp_path, RECIPE.model_copy(update={"batch": 301}))


def test_accuracy_is_the_share_that_is_right():
    network = new_network()
    images = np.zeros((4, 28, 28), np.uint8)
    label = int(network.logits(images)[0].argmax())
    labels = np.array([label, label, label, (label + 1) % 10], np.uint8)
    assert accuracy(network, Digits(images, labels)) == 0.75
