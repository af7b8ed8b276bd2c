import json

from benchmarks.costly_bodies import main


def test_single_images_are_measured_alone_and_beside_a_costly_body(tmp_path):
    path = tmp_path / "costly.json"
    kind = "16 megapixels"
    assert main(["--kinds", kind, "--rounds=1", "--duration=1", f"--json={path}"]) == 0
    found = json.loads(path.read_text())["kinds"][kind]
    assert found["quiet_p99"][0] >= found["quiet_p50"][0] > 0
    assert found["beside_p99"][0] >= found["beside_p50"][0] > 0
    assert sum(found["bodies"]) > 0
