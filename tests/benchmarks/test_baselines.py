import pytest

from benchmarks.baselines import torch_training
from benchmarks.baselines.model import WEIGHTS_VARIABLE
from benchmarks.digits import judge, prepare_requests


@pytest.mark.parametrize(("form", "worker"), [("json", "JsonWorker"), ("raw", "RawWorker")])
def test_mosec_answers_each_request_of_a_batch(
    form, worker, digits, weights, tmp_path, monkeypatch
):
    plain_mosec = pytest.importorskip("benchmarks.baselines.plain_mosec", exc_type=ImportError)
    weights.write(tmp_path / "1.safetensors")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path / "1.safetensors"))
    batch = prepare_requests(digits, weights, form, 5)
    one = getattr(plain_mosec, worker)()
    answers = one.forward([one.deserialize(request.body) for request in batch])
    for request, predictions in zip(batch, answers, strict=True):
        verdict = judge(one.serialize(predictions), request)
        assert (verdict.error, verdict.wrong_labels) == ("", 0)
    with pytest.raises(plain_mosec.ValidationError):
        one.deserialize(b"1")


def test_the_variant_with_the_smallest_median_counts():
    found = torch_training.summarise(
        {
            "eager": {"contiguous": [900.0, 700.0, 800.0]},
            "graph": {"contiguous": [300.0, 310.0, 320.0], "channels_last": [100.0, 400.0, 250.0]},
            "compile": {},
        }
    )
    assert found["eager_us"] == 800
    assert (found["graph_us"], found["graph_variant"]) == (250, "channels_last")
    assert found["graph_spread_us"] == [100, 400]
    assert found["medians_us"]["graph"] == {"contiguous": 310, "channels_last": 250}
    assert found["compile_us"] is found["compile_spread_us"] is found["compile_variant"] is None
    about = {"model": "lenet", "batch": 256, "precision": "tf32", "device": "a GPU", "torch": "2"}
    text = torch_training.table({**about, **found, "failed": {"compile: x": "no compiler"}})
    assert "(100.0..400.0)" in text
    assert "no compiler" in text
