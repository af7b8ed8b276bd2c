import json

import numpy as np
import pytest

from benchmarks.fine_tuning import hand, main
from tests.trainer.conftest import idx_bytes, synthetic_digits
from trainer.mnist import FILES, Digits


def test_the_hand_crosses_sevens_and_leaves_what_it_was_given():
    images = np.zeros((2, 28, 28), np.uint8)
    images[:, 6:22, 14] = 255  # a stroke downwards
    before = images.copy()
    seven, four = hand(Digits(images, np.array([7, 4], np.uint8))).images
    np.testing.assert_array_equal(images, before)
    assert [row for row in range(28) if np.count_nonzero(seven[row]) > 2] == [14, 15, 16]
    columns = [np.flatnonzero(four[row]).tolist() for row in (6, 14, 20)]
    assert columns == [[18, 19], [14, 15], [11, 12]]  # two pixels wide, higher rows further right


@pytest.mark.process
def test_the_file_a_fresh_and_a_fine_tuned_network_are_compared(tmp_path):
    parts = synthetic_digits(200, 0), synthetic_digits(50, 1)
    arrays = [array for part in parts for array in (part.images, part.labels)]
    for file, array in zip(FILES, arrays, strict=True):
        (tmp_path / file.name).write_bytes(idx_bytes(array))
    out = tmp_path / "found.json"
    given = ["--data", str(tmp_path), "--images", "100", "--seeds", "2", "--epochs", "1"]
    assert main([*given, "--rates", "0.001", "--commit", "none", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["percent of the test images"]
    assert found.keys() - {"file"} == {
        f"{kind}, 100 images"
        for kind in ("afresh", "fine-tuned", "afresh, 1 epochs", "fine-tuned, rate 0.001, 1 epochs")
    }
    assert len(found["fine-tuned, 100 images"]["values"]) == 2
