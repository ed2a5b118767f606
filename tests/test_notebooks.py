"""The notebooks run from top to bottom, and what is kept of their outputs reads well."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
import torch
import yaml
from huggingface_hub import HfApi
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NAMES = ["crop_quickstart", "crop_colab", "selectors_tour", "make_triplets"]
# Places in which projects, packages and home folders lie on machines of any kind.
MACHINE_PATH = re.compile(
    r"(?<![\w.:/<])/(home|root|tmp|opt|usr|mnt|var|content|srv|data|work\w*|Users)/|\b[A-Z]:\\\\|site-packages"
)


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook) -> str:
    """All that a notebook's cells show as text."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    shown = [output.text for output in outputs if output.output_type == "stream"]
    for output in outputs:
        shown += [value for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join(shown)


def test_every_notebook_is_tested():
    assert sorted(NAMES) == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_kept_outputs_read_well(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < 1_000_000
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) / 2
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) or "text/html" in output.get("data", {}) for output in outputs)
    everything = texts(notebook) + "".join(cell.source for cell in notebook.cells)
    assert not MACHINE_PATH.search(everything)
    # No machine's name for its environment either.
    assert set(notebook.metadata) == {"kernelspec", "language_info"} and notebook.metadata.kernelspec.name == "python3"
    for cell in notebook.cells:
        assert len(cell.source.splitlines()) <= 40
    # Nobody's environment is changed outside Colab.
    assert all('"google.colab" in sys.modules' in cell.source for cell in cells if "pip install" in cell.source)


def test_the_project_lies_with_one_owner():
    pages = {name: code_cells(read(name))[0].source for name in NAMES}
    said = {name: re.findall(r'^OWNER = "([\w-]+)"$', source, re.MULTILINE) for name, source in pages.items()}
    said |= {
        name: re.findall(r"github\.com/([\w-]+)/crop_trl", (ROOT / name).read_text())
        for name in ("setup.cfg", "README.md")
    }
    assert all("github.com/{OWNER}/crop_trl" in source for source in pages.values())
    assert all(said.values()) and len({owner for owners in said.values() for owner in owners}) == 1, said


@pytest.mark.parametrize("name", NAMES)
def test_outside_of_the_project_it_says_so(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = code_cells(read(name))[0].source.splitlines()
    source = "\n".join(line for line in lines if not line.strip().startswith("!"))
    with pytest.raises(FileNotFoundError, match="is not in the project; start Jupyter in its `notebooks/`"):
        exec(source, {})


def test_machine_paths_are_found():
    for text in ("in /home/me/crop", "File '/tmp/x'", "(/workspace/a)", r"C:\\Users", "/content/crop_trl/x"):
        assert MACHINE_PATH.search(text)
    for text in ("runs/tmp/x", "http://host/home/page", "examples/tiny_math/data/train.jsonl", "</data/", "and/or"):
        assert not MACHINE_PATH.search(text)


def test_the_quickstart_has_the_settings_of_the_example():
    (cell,) = [cell for cell in code_cells(read("crop_quickstart")) if "CROPConfig(\n" in cell.source]
    calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if getattr(call.func, "id", "") == "CROPConfig"]
    here = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    example = yaml.safe_load((ROOT / "examples/configs/tiny_math.yaml").read_text())
    assert {name for name in here.keys() & example.keys() if here[name] != example[name]} == {
        "output_dir",
    }
    script = {"reward", "dataset_name", "eval_dataset_name", "prompt_template", "num_counterfactuals"}
    models = {"model_name_or_path", "teacher_model_name_or_path"}
    assert example.keys() - here.keys() == {*script, *models, "selection_export_steps", "world"}


def execute(name: str, folder: Path, monkeypatch) -> str:
    """Run a notebook in a copy of the project, so that what it writes goes there; returns what it shows."""
    (folder / "notebooks").mkdir()
    for path in (ROOT / "notebooks").glob("*.py"):
        (folder / "notebooks" / path.name).symlink_to(path)
    (folder / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for key in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(key, raising=False)
    notebook = read(name)
    for cell in code_cells(notebook):
        cell.outputs = []
    place = {"metadata": {"path": str(folder / "notebooks")}}
    NotebookClient(notebook, timeout=3000, kernel_name="python3", resources=place).execute()
    return texts(notebook)


@pytest.fixture
def without_gpu_and_hub(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_make_triplets(tmp_path, monkeypatch, without_gpu_and_hub):
    shown = execute("make_triplets", tmp_path, monkeypatch)
    assert "18 of 18 problems finished" in shown
    assert "16 of 18 records kept (left out: 2 without validation_passed)" in shown
    assert (tmp_path / "runs/triplets-stand-in/review.html").exists()


def test_selectors_tour(tmp_path, monkeypatch, without_gpu_and_hub):
    shown = execute("selectors_tour", tmp_path, monkeypatch)
    assert "64 answers" in shown and "teacher/negative" in shown
    assert (tmp_path / "runs/tour/bank.safetensors").exists() and (tmp_path / "runs/tour/view.html").exists()


@pytest.mark.slow
def test_quickstart_learns(tmp_path, monkeypatch, without_gpu_and_hub):
    shown = execute("crop_quickstart", tmp_path, monkeypatch)
    before, after = re.search(r"([\d.]+) before, ([\d.]+) after 40 steps", shown).groups()
    assert float(after) > float(before) + 0.03
    assert (tmp_path / "runs/quickstart/model.safetensors").exists()
    assert (tmp_path / "runs/quickstart/view.html").exists()


@pytest.mark.slow
def test_colab_notebook_falls_back_to_the_embedded_task(tmp_path, monkeypatch, without_gpu_and_hub):
    shown = execute("crop_colab", tmp_path, monkeypatch)
    assert "no GPU or no hub: the embedded task on the CPU" in shown
    assert re.search(r"accuracy on 64 held-out problems: [\d.]+ before, [\d.]+ after 10 steps", shown)
    assert (tmp_path / "runs/colab/view.html").exists()


@pytest.mark.gpu
def test_colab_notebook_on_a_gpu(tmp_path, monkeypatch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    try:
        HfApi().model_info("Qwen/Qwen3-0.6B", timeout=10)
    except Exception:
        pytest.skip("needs the hub, or its files in the cache")
    shown = execute("crop_colab", tmp_path, monkeypatch)
    assert "Qwen3-0.6B and Qwen3-1.7B on the GPU" in shown
    assert re.search(r"accuracy on 32 held-out problems: [\d.]+ before, [\d.]+ after 10 steps", shown)
