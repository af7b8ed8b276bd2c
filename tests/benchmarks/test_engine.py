"""The whole command without a GPU: the CPU backend and fakes where a device is needed."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

from benchmarks import engine
from benchmarks.engine import digits, exact, main
from benchmarks.peers.torch_training import PeerMissing, summarise
from benchmarks.servers import ServerFailed
from lenet import reference
from lenet.cpu import CpuBackend
from lenet.errors import BackendUnavailable

PEER = summarise({"eager": {"contiguous": [110.0]}, "graph": {"contiguous": [47.0]}, "compile": {}})
LIMITS = {
    "copy_gb_s": 55.0,
    "matmul_tflops": 790.0,
    "copy_images_per_s": 70e6,
    "matmul_images_per_s": 172e6,
}
WHERE = {"device": "NVIDIA H200", "date": "2026-11-20", "commit": "abc1234"}


class Plan:
    """The CPU backend's, with what an engine's plan tells besides."""

    def __init__(self, plan):
        self._plan, self._images = plan, None
        self.replays = 0
        self.measured_us, self.strategy = {"whole": 25.0, "layers": 36.0}, "whole"

    def run(self, images):
        self._images = images
        return self._plan.run(images)

    def run_in_place(self, rows):
        return self._plan.run(self._images[:rows])

    def replay(self):
        self.replays += 1


class Engine:
    """Notes the plans it made."""

    stream = None

    def __init__(self):
        self.plans = {}

    def plan(self, weights, batch):
        self.plans[batch] = Plan(CpuBackend().plan(weights, batch))
        return self.plans[batch]


@pytest.fixture
def opened(monkeypatch):
    """(device, precision, engine) of each engine that is opened; the rest is there, too."""
    found = []

    @contextmanager
    def open_cuda(device, precision="fp16"):
        found.append((device, precision, Engine()))
        yield found[-1][2]

    def timer(call, count):
        for _ in range(count):
            call()
        return 12.5 * count

    monkeypatch.setattr(engine, "open_cuda", open_cuda)
    monkeypatch.setattr(engine, "cupy_timer", lambda stream: timer)
    monkeypatch.setattr(engine, "host_us", lambda call: [call() is None or 20.0, 22.0])
    monkeypatch.setattr(engine, "limits", lambda model: LIMITS)
    monkeypatch.setattr(engine, "_provenance", lambda asked: WHERE)
    monkeypatch.setattr(engine, "measure", lambda *asked: PEER)
    monkeypatch.setattr(engine, "POOL_ROWS", (1, 2))
    return found


@pytest.fixture
def command(tmp_path, random_weights, tiny):
    """`command(*arguments)`: the exit code and the JSON."""
    path = tmp_path / "1.safetensors"
    random_weights(tiny).write(path)
    told = tmp_path / "engine.json"

    def run(*arguments):
        code = main([f"--weights={path}", f"--json={told}", "--duration=0.000001", *arguments])
        return code, json.loads(told.read_text()) if told.exists() else None

    return run


def test_the_file_has_what_it_is_read_for(opened, command, capsys, monkeypatch):
    started = {"no_cache": 14.0, "warm_cache": 4.0}
    monkeypatch.setattr("benchmarks.engine_cold.cold_start_s", lambda: started)
    code, told = command("--rows", "1", "3", "--precisions", "fp16", "fp32")
    assert code == 0
    assert WHERE.items() <= told.items()
    assert told["limits"] == LIMITS
    assert told["cold_start_s"] == started
    assert set(told["pool"]) == {"contexts", "rows", "images_per_s"}
    assert told["pool"]["contexts"] == 2
    assert told["pool"] in told["pool_all"]
    assert [(found["precision"], found["rows"]) for found in told["buckets"]] == [
        *(("fp16", 1), ("fp16", 3), ("fp32", 1), ("fp32", 3)),
    ]
    bucket = told["buckets"][1]
    assert (bucket["device_us"], bucket["images_per_s"]) == (12.5, 3e6 / 12.5)
    assert bucket["host_us"] == 20
    assert (bucket["torch"]["eager_us"], bucket["torch"]["graph_us"]) == (110, 47)
    assert bucket["torch"]["compile_us"] is None
    assert bucket["max_error"] < 1e-5
    assert bucket["ways_us"][bucket["way"]] == 25
    out = capsys.readouterr().out
    assert "the service is ready after 4.0 s, warm cache" in out
    assert "3.8" in out  # 47 over 12.5


def test_every_bucket_is_made_in_every_precision_before_and_after_the_peer(
    opened, command, monkeypatch
):
    asked = []

    def measure(weights, images, expected, precision, ways, report):
        plan = opened[-1][2].plans[len(images)]
        asked.append((precision, len(images), ways, plan.replays))
        assert len(expected) == len(images)
        return PEER

    monkeypatch.setattr(engine, "measure", measure)
    code, _ = command("--only", "buckets", "--rows", "1", "65", "--compile-buckets", "65")
    assert code == 0
    assert [(device, precision) for device, precision, _ in opened] == [
        *((0, "fp16"), (0, "tf32"), (0, "fp32"))
    ]
    assert [(rows, ways) for _, rows, ways, _ in asked[:2]] == [
        *((1, ("eager", "graph")), (65, ("eager", "graph", "compile")))
    ]
    for _, rows, _, replays in asked[:2]:
        assert opened[0][2].plans[rows].replays == 2 * replays > 0


def test_a_wrong_row_shows_as_an_error(opened, command, monkeypatch):
    class Wrong(Engine):
        def plan(self, weights, batch):
            plan = super().plan(weights, batch)
            run = plan.run

            def wrong(images):
                result = run(images)
                result.probabilities[-1] += 0.25
                return result

            plan.run = wrong
            return plan

    @contextmanager
    def open_cuda(device, precision):
        yield Wrong()

    monkeypatch.setattr(engine, "open_cuda", open_cuda)
    _, told = command("--only", "buckets", "--rows", "70", "--precisions", "fp16")
    assert told["buckets"][0]["max_error"] == pytest.approx(0.25, abs=1e-5)


def test_without_pytorch_ours_is_measured_all_the_same(opened, command, monkeypatch, capsys):
    def measure(*asked):
        raise PeerMissing("PyTorch is not installed")

    monkeypatch.setattr(engine, "measure", measure)
    code, told = command("--only", "buckets", "--rows", "1", "2", "--precisions", "fp16")
    assert code == 1
    assert [found["device_us"] for found in told["buckets"]] == [12.5, 12.5]
    assert set(told["buckets"][0]["torch"].values()) == {None}
    assert capsys.readouterr().err == "PyTorch is not installed\n"


def test_several_gpus_run_at_the_best_rows_of_the_pool(opened, command, monkeypatch, capsys):
    def measure_gpus(open_backend, path, gpus, count, rows, duration_s):
        rates = {"one_gpu_images_per_s": 20e6, "images_per_s": 39e6, "ratio": 1.95}
        found = {"n": gpus, "contexts": count, "rows": rows}
        return {**found, "threads": rates, "processes": rates}

    monkeypatch.setattr(engine, "measure_gpus", measure_gpus)
    code, told = command("--only", "gpus", "pool", "--gpus", "2")
    assert code == 0
    assert told["gpus"]["rows"] == told["pool"]["rows"]
    assert (told["gpus"]["n"], told["gpus"]["contexts"]) == (2, 2)
    assert "processes: 39.00 M images/s" in capsys.readouterr().out


def test_a_service_that_does_not_start_is_told(opened, command, monkeypatch, capsys):
    def cold_start_s():
        raise ServerFailed("it did not become ready")

    monkeypatch.setattr("benchmarks.engine_cold.cold_start_s", cold_start_s)
    code, told = command("--only", "cold")
    assert code == 1
    assert "cold_start_s" not in told
    assert capsys.readouterr().err == "it did not become ready\n"


def test_a_picture_is_drawn_of_the_file_alone(command, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(engine, "draw", lambda content, path: drawn.append((content, path)))
    (tmp_path / "engine.json").write_text('{"buckets": []}')
    code, told = command("--only", "figure", f"--figure={tmp_path / 'engine.png'}")
    assert code == 0
    assert told == {"buckets": []}
    assert drawn == [(told, tmp_path / "engine.png")]


def test_a_picture_needs_a_place(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        command("--only", "figure")
    assert stopped.value.code == 2
    assert "--figure PATH" in capsys.readouterr().err


def test_a_picture_of_nothing_is_told(command, tmp_path, capsys):
    code, _ = command("--only", "figure", f"--figure={tmp_path / 'engine.png'}")
    assert code == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_without_a_gpu_one_sentence_says_so(command, monkeypatch, capsys):
    def devices():
        raise BackendUnavailable("there is no NVIDIA GPU here")

    monkeypatch.setattr("lenet.cuda.device.devices", devices)
    code, told = command("--rows", "1")
    assert (code, told) == (2, None)
    assert capsys.readouterr() == ("", "there is no NVIDIA GPU here\n")


def test_more_gpus_than_there_are_are_refused(command, monkeypatch, capsys):
    monkeypatch.setattr("lenet.cuda.device.devices", lambda: 1)
    code, told = command("--gpus", "2")
    assert (code, told) == (2, None)
    assert capsys.readouterr().err == "--gpus is 2, and there are 1 GPUs here\n"


def test_a_file_that_is_no_json_is_told_and_kept(opened, tmp_path, capsys):
    path = tmp_path / "engine.json"
    path.write_text("not JSON")
    assert main([f"--json={path}", "--only", "limits"]) == 2
    assert "Expecting value" in capsys.readouterr().err
    assert path.read_text() == "not JSON"


def test_the_digits_are_the_references_to_judge(random_weights):
    weights = random_weights("mlp")
    images = digits(weights, 5)
    assert (images.shape, images.dtype) == ((5, 28, 28), np.uint8)
    assert len({image.tobytes() for image in images}) == 5
    own = reference.softmax(reference.logits(weights.model, weights.tensors, images))
    np.testing.assert_allclose(exact(weights, images), own, atol=1e-5)
