import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors import safe_open

from lenet.model import named
from trainer import loop
from trainer.checkpoint import Checkpoint
from trainer.errors import TrainingDiverged
from trainer.loop import find_fault, train
from trainer.loop import run_of as run_of_recipe
from trainer.mnist import Digits
from trainer.network import Network, initial_tensors, no_hook
from trainer.ops_cpu import CpuOps
from trainer.optimizer import Sgd, rates
from trainer.settings import Recipe

RECIPE = Recipe(
    model="lenet-6-16", epochs=3, batch=20, rate=0.03, validation_images=100, dropout=0.1
)
STEPS = 15
"""Those of an epoch of the 300 images that remain to be trained on."""


def new_network(recipe=RECIPE, ops=None, kind=Network):
    model = named(recipe.model)
    tensors = initial_tensors(model, np.random.default_rng(recipe.seed))
    return kind(model, tensors, ops or CpuOps(), recipe.dropout)


def run(dataset, folder, recipe=RECIPE, network=None, **options):
    network = network or new_network(recipe)
    training, validation = dataset.hold_out(recipe.validation_images)
    checkpoint = Checkpoint(folder, recipe, dataset.sha256, validation)
    epochs, _ = train(network, recipe, training, validation, checkpoint, **options)
    return network, epochs, checkpoint


def assert_same(one, other):
    for name, value in one.tensors.items():
        np.testing.assert_array_equal(value, other.tensors[name])


class Overflowing(CpuOps):
    """Claims three overflows in the first epoch and two in the last."""

    def __init__(self):
        super().__init__()
        self.read = iter((3, 3, 5))

    def skipped(self, state):
        return next(self.read)

    def loss_scale(self, state):
        return 512.0, 7


def test_an_epoch_says_how_many_of_its_steps_were_skipped(tiny, tmp_path, capsys):
    records = []
    run(tiny, tmp_path, network=new_network(ops=Overflowing()), record=records.append)
    assert [record["skipped_steps"] for record in records] == [3, 0, 2]
    said = ", 2 steps skipped: a gradient overflowed, the loss scale is now 512"
    assert capsys.readouterr().out.endswith(f"{said}\n")


def test_a_run_is_what_its_recipe_says(tiny):
    recipe = RECIPE.model_copy(update={"seed": 5, "shear": 3.0, "elastic": 1.5, "batch": 30})
    found = run_of_recipe(recipe, tiny.train)
    assert (found.digits, found.batch, found.seed) == (tiny.train, 30, 5)
    assert (found.steps_per_epoch, found.steps) == (13, 39)
    limits = found.limits
    assert (limits.rotation, limits.scale, limits.shear) == (recipe.rotation, recipe.scale, 3.0)
    assert (limits.shift, limits.elastic) == (recipe.shift, 1.5)
    np.testing.assert_array_equal(found.rates, rates("one-cycle", 39, 0.03))


class Interrupting(Network):
    """Ctrl-C in the middle of the third epoch."""

    steps = 0

    def backward(self, hook=no_hook):
        self.steps += 1
        if self.steps == 2 * STEPS + 5:
            raise KeyboardInterrupt
        super().backward(hook)


def test_an_interrupted_run_resumes_and_ends_with_the_same_tensors(tiny, tmp_path, capsys):
    whole, epochs, _ = run(tiny, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "cut", network=new_network(kind=Interrupting))
    capsys.readouterr()
    resumed, all_epochs, _ = run(tiny, tmp_path / "cut")
    assert_same(whole, resumed)
    assert all_epochs == epochs
    assert capsys.readouterr().out.startswith("resumed after epoch 2 from ")


def test_a_finished_run_is_not_trained_again(tiny, tmp_path):
    first, epochs, checkpoint = run(tiny, tmp_path)
    network = new_network(kind=Interrupting)
    network.steps = 2 * STEPS + 4
    again, same, _ = run(tiny, tmp_path, network=network)
    assert_same(first, again)
    assert same == epochs
    checkpoint.discard()
    checkpoint.discard()
    assert list(tmp_path.iterdir()) == []


class Remembering(Network):
    """Keeps its tensors after each epoch, of `STEPS` steps."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.after, self.steps = [], 0
        end_step = self.ops.end_step

        def ended(state):
            end_step(state)
            self.steps += 1
            if self.steps % STEPS == 0:
                self.after.append(SimpleNamespace(tensors=self.tensors))

        self.ops.end_step = ended


@pytest.mark.parametrize(("epochs", "expected"), [(6, [3, 6]), (7, [3, 6, 7])])
def test_a_checkpoint_is_written_when_ten_seconds_have_passed_and_at_the_end(
    tiny, tmp_path, monkeypatch, epochs, expected
):
    saved = []
    monkeypatch.setattr(Checkpoint, "save", lambda _, snapshot: saved.append(len(snapshot.epochs)))
    recipe = RECIPE.model_copy(update={"epochs": epochs, "model": "mlp"})
    checkpoint = Checkpoint(tmp_path, recipe, tiny.sha256, tiny.hold_out(100)[1])
    clock = itertools.count(100.0, 4.0).__next__
    _, seconds = train(new_network(recipe), recipe, *tiny.hold_out(100), checkpoint, clock=clock)
    assert saved == expected
    assert seconds == 4.0 * epochs


@pytest.mark.parametrize(("target", "expected"), [(57.0, 3), (57.001, 4), (50, 1), (None, 5)])
def test_training_stops_after_the_first_epoch_that_reaches_the_target(
    tiny, tmp_path, monkeypatch, target, expected
):
    # The first is the warm-up before the first step; its result is not used.
    accuracies = iter([1.0, 0.5, 0.5699, 0.57, 0.6, 0.7, 0.0])
    monkeypatch.setattr(loop, "accuracy", lambda *_: next(accuracies))
    recipe = RECIPE.model_copy(update={"epochs": 5, "model": "mlp"})
    _, epochs, _ = run(tiny, tmp_path, recipe, target=target)
    assert len(epochs) == expected
    # The target was reached: nothing is trained when the same command is given again.
    _, again, _ = run(tiny, tmp_path, recipe, target=target)
    assert again == epochs


@pytest.mark.parametrize(
    ("patience", "count", "best"), [(1, 3, 2), (2, 4, 2), (3, 8, 8), (9, 8, 8)]
)
def test_training_stops_without_a_better_epoch_and_ends_as_it_was_after_the_best(
    tiny, tmp_path, monkeypatch, patience, count, best
):
    def scripted():
        found = iter([0.0, 0.5, 0.6, 0.6, 0.59, 0.7, 0.69, 0.7, 0.71])
        monkeypatch.setattr(loop, "accuracy", lambda *_: next(found))

    recipe = RECIPE.model_copy(update={"epochs": 8, "model": "mlp", "schedule": "step"})
    network = new_network(recipe, kind=Remembering)
    scripted()
    trained, epochs, _ = run(tiny, tmp_path, recipe, network, patience=patience)
    assert len(epochs) == count
    assert_same(trained, network.after[best - 1])
    # The end is kept: nothing is trained when the same command is given again.
    scripted()
    again, same, _ = run(tiny, tmp_path, recipe, patience=patience)
    assert same == epochs
    assert_same(again, trained)


def test_an_image_of_a_rare_class_weighs_more_where_weights_are_balanced(digits):
    images = digits(300, 0)
    rare = Digits(images.images, np.repeat(np.array([0, 1, 2], np.uint8), [30, 90, 180]))
    found = run_of_recipe(RECIPE.model_copy(update={"class_weights": "balanced"}), rare)
    assert found.class_weights.tolist() == pytest.approx([300 / 90, 300 / 270, 300 / 540])
    assert found.class_weights[rare.labels].mean() == pytest.approx(1)
    assert run_of_recipe(RECIPE, rare).class_weights is None


class Spoiling(CpuOps):
    """`method` puts a NaN into what it computes in `step`. Counts replays of captured steps."""

    def __init__(self, method, step, readback_steps=1):
        super().__init__()
        self.readback_steps, self.replays = readback_steps, 0
        compute = getattr(self, method)

        def spoiled(*arguments):
            result = compute(*arguments)
            if self.state.step == step:
                if method == "sgd_step":
                    array = arguments[0][0].parameter
                elif method == "softmax_cross_entropy":
                    array = self.state.losses[step : step + 1]
                else:
                    array = result[0] if isinstance(result, tuple) else result
                array.flat[-1] = np.nan
            return result

        setattr(self, method, spoiled)

    def start(self, run, step=0, loss_scale=None):
        self.state = super().start(run, step)
        return self.state

    def capture(self, step):
        def replay():
            self.replays += 1
            step()

        return replay


def contents(folder):
    """The contents of the folder's only checkpoint."""
    (path,) = folder.glob("*.safetensors")
    with safe_open(path, "numpy") as file:
        tensors = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
        return tensors, file.metadata()


@pytest.mark.parametrize("readback_steps", [1, 4, 1000])
def test_diverging_names_step_and_layer_and_keeps_the_last_good_epoch(
    tiny, tmp_path, readback_steps
):
    ops = Spoiling("convolution_weight_gradient", 20, readback_steps)
    with pytest.raises(TrainingDiverged) as caught:
        run(tiny, tmp_path, network=new_network(ops=ops))
    assert str(caught.value) == (
        "the loss is nan at step 22 of 45, expected a finite number; "
        "first in conv2's gradient at step 21; try a --rate lower than 0.03"
    )
    # Training stops at the first read of a loss that is not finite.
    assert ops.replays == {1: 22, 4: 23, 1000: 30}[readback_steps]
    # The checkpoint equals that of an interruption in the same epoch.
    interrupted = new_network(kind=Interrupting)
    interrupted.steps = STEPS
    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "cut", network=interrupted)
    kept, cut = (contents(tmp_path / place) for place in (".", "cut"))
    assert kept == cut


def test_a_loss_that_is_finite_but_huge_is_a_divergence(tiny, tmp_path):
    recipe = RECIPE.model_copy(update={"model": "mlp", "rate": 5.0})
    said = (
        r"the loss is \d{3,} at step \d+ of 45, expected at most 100; try a --rate lower than 5.0"
    )
    with pytest.raises(TrainingDiverged, match=said):
        run(tiny, tmp_path, recipe)


@pytest.mark.parametrize(
    ("method", "found"),
    [
        ("dense", "dense1's output"),
        ("dense_weight_gradient", "dense2's gradient"),
        ("epilogue_backward", "dense2.bias's gradient"),
        ("sgd_step", "dense1.weight"),
        ("softmax_cross_entropy", "the loss itself"),
    ],
)
def test_the_first_array_that_is_not_finite_is_found_with_its_step(digits, run_of, method, found):
    model, ops = named("mlp"), Spoiling(method, 3)
    network = Network(model, initial_tensors(model, np.random.default_rng(0)), ops)
    optimizer = Sgd(model, network.parameters, ops)
    fault = find_fault(network, optimizer, run_of(digits(40, 0), 20, [0.01] * 9), 0, 5)
    assert fault == f"{found} at step 4"
