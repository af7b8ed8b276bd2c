import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from benchmarks.peers import torch_training
from benchmarks.peers.torch_training import PeerMissing, main, measure, summarise, table
from lenet.errors import InvalidModel

ROUNDS_US = {
    "eager": {"contiguous, foreach SGD": [900.0, 700.0, 800.0]},
    "graph": {"contiguous": [300.0, 310.0, 320.0], "channels_last": [100.0, 400.0, 250.0]},
    "compile": {},
}
MEASURED = {
    "model": "lenet",
    "batch": 256,
    "precision": "tf32",
    "device": "NVIDIA H200",
    "torch": "2.11.0",
    "failed": {"compile: reduce-overhead": "RuntimeError: no compiler"},
}


@pytest.fixture
def no_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


def test_without_pytorch_one_sentence_says_so(no_torch):
    with pytest.raises(PeerMissing, match="pip install torch"):
        measure("lenet", 256, "tf32")


def test_without_pytorch_the_command_measures_nothing(no_torch, capsys):
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert "PyTorch is not installed" in err


def test_without_a_gpu_one_sentence_says_so(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is a peer, not a dependency: absent here")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PeerMissing, match="no GPU"):
        measure("lenet", 256, "tf32")


def test_an_unknown_architecture_is_refused(no_torch):
    with pytest.raises(InvalidModel, match="alexnet"):
        measure("alexnet", 256, "tf32")


def test_a_variant_that_fails_is_told_and_does_not_stop_the_others(monkeypatch):
    def training_step(model, batch, precision, variant):
        if variant.optimizer == "foreach":
            raise RuntimeError("out of memory")

    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "a GPU")
    torch = SimpleNamespace(
        cuda=cuda, compiler=SimpleNamespace(reset=lambda: None), __version__="2"
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(torch_training, "settings", lambda precision: nullcontext())
    monkeypatch.setattr(torch_training, "training_step", training_step)
    monkeypatch.setattr(torch_training, "_time_us", lambda step, guessing: [3.0, 1.0, 2.0])
    lines = []
    found = measure("mlp", 64, "fp32", ["eager"], lines.append)
    assert found["eager_us"] == 2
    assert found["eager_variant"] == "contiguous, fused SGD"
    assert found["failed"] == {"eager: contiguous, foreach SGD": "RuntimeError: out of memory"}
    assert found["graph_us"] is None
    assert [line.split(", after")[0] for line in lines] == [
        "eager: contiguous, fused SGD: 2.0 us",
        "eager: contiguous, foreach SGD: failed",
    ]


def test_the_variant_with_the_least_median_counts():
    found = summarise(ROUNDS_US)
    assert found["eager_us"] == 800
    assert found["graph_us"] == 250
    assert found["graph_variant"] == "channels_last"
    assert found["graph_spread_us"] == [100, 400]
    assert found["medians_us"]["graph"] == {"contiguous": 310, "channels_last": 250}


def test_a_way_in_which_nothing_worked_has_no_number():
    found = summarise(ROUNDS_US)
    assert found["compile_us"] is found["compile_spread_us"] is found["compile_variant"] is None
    text = table({**MEASURED, **found})
    assert "no compiler" in text
    assert "(100.0..400.0)" in text


@pytest.mark.parametrize(("compiled", "code"), [({}, 1), ({"reduce-overhead": [90.0]}, 0)])
def test_a_way_without_a_number_shows_in_the_exit_code_and_in_the_file(
    compiled, code, monkeypatch, tmp_path
):
    found = {**MEASURED, **summarise({**ROUNDS_US, "compile": compiled})}
    monkeypatch.setattr(torch_training, "measure", lambda *asked: found)
    path = tmp_path / "torch.json"
    assert main(["--json", str(path)]) == code
    assert '"graph_us": 250.0' in path.read_text()
