"""Teachers of every source on two processes, however they share the work, against one."""

import pytest
import torch
from safetensors.torch import load_file
from test_distributed import arrangements, launch

pytestmark = pytest.mark.multiprocess

OWN = ["student", "initial+adapter", "average", "average+adapter", "average+resumed"]
CASES = {
    "ddp": [*OWN, "initial", "named"],
    "zero2": OWN,
    # `whole`: small weights stay on every process, as they do by default.
    "zero3": [*OWN, "average+whole", "named", "sharded"],
    "fsdp2": [*OWN, "named", "sharded"],
}


def run(folder, config: str | None, processes: int, cases: list[str]) -> dict[str, torch.Tensor]:
    arguments = ["--output", str(folder), "--per-device", str(8 // processes), "--cases", *cases]
    launch(config, processes, ["teachers.py", *arguments])
    return load_file(folder / "result.safetensors")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    cases = ["student", "initial", "initial+adapter", "average", "average+adapter", "named"]
    return run(tmp_path_factory.mktemp("one"), None, 1, cases)


@arrangements(*CASES)
def test_teachers_of_two_processes_are_those_of_one(tmp_path, one, config):
    """Of teachers by name each process has rows for one alone, and goes along with the other where it is sharded."""
    two, apart = run(tmp_path, config, 2, CASES[config]), {}
    for case in CASES[config]:
        assert two[f"{case}/processes"] == 2
        source, adapter = case.split("+")[0].replace("sharded", "named"), "+adapter" * case.endswith("+adapter")
        for name in ("loss", "gap", "weights", *(["average"] if source == "average" else [])):
            theirs = one[f"{source}{adapter}/{name}"]
            apart[case, name] = float((two[f"{case}/{name}"] - theirs).norm() / theirs.norm())
    assert max(apart.values()) < 1e-4, apart
