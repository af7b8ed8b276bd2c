import errno
import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from lenet.cpu import CpuBackend, CpuPlan
from lenet.model import IDENTITY, ConvBlock, DenseBlock, Model, Pool, named
from lenet.weightfile import Training, WeightFile
from trainer import export as module
from trainer.errors import ExportRefused
from trainer.export import export_onnx, export_weights, fold
from trainer.network import Network, initial_tensors
from trainer.ops_cpu import CpuOps

MIXED = Model(
    "mixed",
    (
        ConvBlock(4, (3, 3), stride=(2, 1), padding=(1, 0), batch_norm=True, pool=Pool("max")),
        ConvBlock(3, (3, 3)),
        DenseBlock(8, batch_norm=True, activation=IDENTITY),
        DenseBlock(10, activation=IDENTITY),
    ),
)


def random_tensors(model, dtype):
    """Initial weights and batch norm as training might leave it."""
    random = np.random.default_rng(0)
    tensors = initial_tensors(model, random, dtype)
    for name, value in tensors.items():
        if name.endswith(".variance"):
            value[:] = random.uniform(0.01, 4, value.shape)
        elif not name.endswith(".weight"):
            value[:] = random.standard_normal(value.shape)
    return tensors


@pytest.mark.parametrize("model", [named("lenet"), MIXED], ids=["lenet", "mixed"])
def test_the_folded_network_computes_the_same(model):
    tensors = random_tensors(model, np.float64)
    images = np.random.default_rng(1).integers(0, 256, (64, 28, 28)).astype(np.uint8)
    ops = CpuOps(np.float64)
    unfolded = Network(model, tensors, ops).logits(images)
    folded = Network(model.folded, fold(model, tensors), ops).logits(images)
    difference = np.abs(folded - unfolded).max(axis=1) / np.abs(unfolded).max(axis=1)
    assert difference.max() <= 1e-13


TRAINING = Training(
    dataset_sha256="0" * 64,
    seed=1,
    command="python -m trainer fit",
    epochs=1,
    accuracy=0.0,
    labels=tuple("0123456789"),
)


def network_of(name):
    return Network(named(name), random_tensors(named(name), np.float32), CpuOps())


def export(dataset, folder, name="lenet"):
    return export_weights(network_of(name), dataset.test, TRAINING, folder, CpuBackend())


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_the_written_file_is_what_was_trained_without_batch_norm(tiny, tmp_path, name):
    exported = export(tiny, tmp_path / name, name)
    assert exported.path == tmp_path / name / "1.safetensors"
    assert [path.name for path in exported.path.parent.iterdir()] == ["1.safetensors"]
    read = WeightFile.read(exported.path)
    assert read.model == named(name).folded
    assert read.tensors.keys() == named(name).folded.parameters().keys()
    logits = CpuBackend().plan(read, 60).logits(tiny.test.images)
    trained = network_of(name).logits(tiny.test.images)
    assert (logits.argmax(axis=1) == trained.argmax(axis=1)).all()
    right = int((logits.argmax(axis=1) == tiny.test.labels).sum())
    assert exported.errors == 60 - right
    assert read.training.accuracy == right / 60
    assert hashlib.sha256(exported.path.read_bytes()).hexdigest() == exported.weights.digest()


def test_each_export_takes_the_next_free_version(tiny, tmp_path):
    (tmp_path / "7.safetensors").write_bytes(b"")
    (tmp_path / "draft.safetensors").write_bytes(b"")
    assert export(tiny, tmp_path, "mlp").path.name == "8.safetensors"
    assert export(tiny, tmp_path, "lenet-6-16").path.name == "9.safetensors"


def test_the_bytes_of_the_last_version_are_not_written_again(tiny, tmp_path):
    first = export(tiny, tmp_path, "mlp")
    second = export(tiny, tmp_path, "mlp")
    assert (first.new, second.new) == (True, False)
    assert second.path == first.path
    assert [path.name for path in tmp_path.iterdir()] == ["1.safetensors"]
    # An older version with these bytes is not what would be served.
    assert export(tiny, tmp_path, "lenet-6-16").path.name == "2.safetensors"
    assert export(tiny, tmp_path, "mlp").path.name == "3.safetensors"


@pytest.fixture
def without_links(monkeypatch):
    def hardlink_to(path, target):
        raise PermissionError(errno.EPERM, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "hardlink_to", hardlink_to)


@pytest.mark.usefixtures("without_links")
def test_a_version_is_published_where_the_file_system_has_no_links(tiny, tmp_path):
    assert export(tiny, tmp_path, "mlp").path.name == "1.safetensors"
    assert export(tiny, tmp_path, "lenet-6-16").path.name == "2.safetensors"
    assert WeightFile.read(tmp_path / "1.safetensors").model == named("mlp").folded
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / ".3.lock").touch()  # another run is about to publish this version
    assert export(tiny, tmp_path, "mlp").path.name == "4.safetensors"


@pytest.mark.usefixtures("without_links")
def test_no_version_is_there_when_it_is_interrupted_before_it_is_whole(tiny, tmp_path, monkeypatch):
    replace_ = Path.replace

    def interrupted(path, target):
        if target.parent != tmp_path:
            return replace_(path, target)
        assert not target.exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(tiny, tmp_path, "mlp")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "factor", "message"),
    [(10, 1.001, "golden image .*differ by 0.001 relative"), (60, np.nan, "test .*differ by nan")],
)
def test_nothing_is_written_when_the_backend_disagrees(
    tiny, tmp_path, monkeypatch, rows, factor, message
):
    logits = CpuPlan.logits

    def distorted(plan, images):
        return logits(plan, images) * np.float32(factor if len(images) == rows else 1)

    monkeypatch.setattr(CpuPlan, "logits", distorted)
    with pytest.raises(ExportRefused, match=f"{message}.*no file was written"):
        export(tiny, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folding_that_is_wrong_is_refused(tiny, tmp_path, monkeypatch):
    right = module.fold

    def wrong(model, tensors):
        folded = right(model, tensors)
        folded["conv2.bias"] += 0.01
        return folded

    monkeypatch.setattr(module, "fold", wrong)
    with pytest.raises(ExportRefused, match="test image"):
        export(tiny, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_onnx_model_computes_what_the_weight_file_does(tiny, tmp_path):
    weights = export(tiny, tmp_path).weights
    path = tmp_path / "new" / "model.onnx"
    export_onnx(weights, path, CpuBackend())
    assert [entry.name for entry in path.parent.iterdir()] == ["model.onnx"]
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": weights.golden.images})
    np.testing.assert_allclose(logits, weights.golden.logits, rtol=1e-4, atol=1e-5)


def test_no_onnx_model_is_written_when_it_disagrees(tiny, tmp_path):
    weights = export(tiny, tmp_path).weights
    logits = weights.golden.logits.copy()
    logits[3] += 1
    weights = replace(weights, golden=replace(weights.golden, logits=logits))
    with pytest.raises(ExportRefused, match="golden image 3"):
        export_onnx(weights, tmp_path / "model.onnx", CpuBackend())
    assert not (tmp_path / "model.onnx").exists()
