import json

import pytest

from benchmarks.engine_report import Document, gpus_line, head, limits_line, line, merged, pool_line


def bucket(rows, precision="fp16", device_us=10.0):
    return {
        "rows": rows,
        "precision": precision,
        "device_us": device_us,
        "device_spread_us": [9.0, 12.0],
        "host_us": 20.0,
        "host_p99_us": 30.0,
        "images_per_s": 1e6 * rows / device_us,
        "max_error": 3e-4,
        "way": "whole",
        "torch": {"eager_us": 110.0, "graph_us": 47.0, "compile_us": None},
    }


def test_buckets_take_the_place_of_those_of_the_same_rows_and_precision_alone():
    before = {"buckets": [bucket(1), bucket(2), bucket(1, "fp32")]}
    after = merged(before, {"buckets": [bucket(16), bucket(2, device_us=5.0)]})
    assert [(one["precision"], one["rows"], one["device_us"]) for one in after["buckets"]] == [
        *(("fp16", 1, 10.0), ("fp16", 2, 5.0), ("fp16", 16, 10.0)),
        ("fp32", 1, 10.0),
    ]


def test_other_parts_are_replaced_as_a_whole():
    before = {"pool": {"contexts": 2, "rows": 256}, "workers": [1]}
    assert merged(before, {"pool": {"contexts": 4}}) == {"pool": {"contexts": 4}, "workers": [1]}


def test_what_another_tool_writes_meanwhile_stays(tmp_path):
    path = tmp_path / "new" / "engine.json"
    document = Document(path)
    document.keep({"device": "NVIDIA H200"})
    path.write_text(json.dumps({**json.loads(path.read_text()), "workers": [1, 2]}))
    document.keep({"buckets": [bucket(1)]})
    told = json.loads(path.read_text())
    assert told == document.content
    assert (told["device"], told["workers"], len(told["buckets"])) == ("NVIDIA H200", [1, 2], 1)


def test_a_document_that_nothing_is_added_to_is_not_written(tmp_path):
    Document(tmp_path / "engine.json")
    assert not list(tmp_path.iterdir())


def test_without_a_file_everything_is_kept_in_memory():
    document = Document(None)
    document.keep({"buckets": [bucket(1)]})
    document.keep({"buckets": [bucket(2)]})
    assert len(document.content["buckets"]) == 2


def test_a_line_compares_with_the_best_of_pytorch():
    cells = line(bucket(1)).split()
    assert cells[-3] == "4.7"  # 47 us of a CUDA graph over 10 us
    assert "-" in cells  # not compiled


def test_a_line_without_pytorch_compares_with_nothing():
    alone = bucket(1) | {"torch": {"eager_us": None, "graph_us": None, "compile_us": None}}
    assert line(alone).split()[-3] == "-"


@pytest.mark.parametrize(
    "large",
    [{}, {"device_us": 1234.5, "device_spread_us": [1200.0, 1300.0], "host_us": 9876.5}],
    ids=["small numbers", "large numbers"],
)
def test_the_lines_of_a_table_stand_below_its_head(large):
    columns = head("fp16").splitlines()[-1]
    found = line({**bucket(8192), **large})
    assert len(found) - len("whole") == len(columns) - len("way")
    assert len(found) <= 110


def test_rates_are_told_beside_their_limits():
    limits = {
        "copy_gb_s": 55.0,
        "matmul_tflops": 790.0,
        "copy_images_per_s": 70e6,
        "matmul_images_per_s": 172e6,
    }
    assert "55.0 GB/s (70 M images/s)" in limits_line(limits)
    found = {"contexts": 2, "rows": 4096, "images_per_s": 21e6}
    assert pool_line(found, limits).endswith("21.00 M images/s, 0.30 of the copy limit")
    assert pool_line(found, {}).endswith("21.00 M images/s")


def test_several_gpus_are_told_against_one():
    rates = {"one_gpu_images_per_s": 20e6, "images_per_s": 39e6, "ratio": 1.95}
    found = {"n": 2, "contexts": 2, "rows": 4096, "threads": rates}
    assert "39.00 M images/s, 1.95 of one GPU's 20.00 M" in gpus_line(found, "threads")
