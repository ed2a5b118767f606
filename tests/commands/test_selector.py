"""`--selector FILE:NAME`: a method of a user's own, from a file that lies anywhere."""

import hashlib
import shutil
from pathlib import Path

import pytest

from crop_trl.methods import METHODS
from crop_trl.methods.selector_file import register_selector

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def table():
    methods = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(methods)


def test_a_function_or_a_method_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "elsewhere" / "mine.py"
    file.parent.mkdir()
    shutil.copy(ROOT / "examples" / "custom_selector.py", file)
    monkeypatch.chdir(file.parent)
    name, digest = register_selector("mine.py:surprise")
    assert name == "mine.py:surprise" and digest == hashlib.sha256(file.read_bytes()).hexdigest()
    assert METHODS[name].needs == ("teacher/original",)
    with file.open("a") as stream:
        stream.write('\n\nfrom crop_trl import Method\n\nboth = Method(needs=("student/original",), score=surprise)\n')
    changed, digest_then = register_selector(f"{file}:both")
    assert changed == "mine.py:both" and digest_then != digest
    assert METHODS[changed].needs == ("teacher/original", "student/original")


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("surprise", "'surprise' is not FILE:NAME, for example mine.py:surprise."),
        ("none.py:surprise", "there is no file 'none.py'; name the Python file that defines 'surprise'."),
        ("mine.txt:score", "'mine.txt' is no Python file; its name has to end in .py."),
        ("mine.py:scores", "'mine.py' defines no 'scores'."),
        ("mine.py:number", "must be a function of (signals, ctx) or a `Method`, got 3."),
        ("broken.py:score", "'broken.py' does not run (ModuleNotFoundError: No module named 'nowhere')."),
    ],
)
def test_what_is_no_selector(tmp_path, monkeypatch, spec, sentence):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "mine.txt"):
        Path(name).write_text("number = 3\n\ndef score(signals, ctx):\n    return 1\n")
    Path("broken.py").write_text("import nowhere\n")
    with pytest.raises(ValueError) as caught:
        register_selector(spec)
    assert str(caught.value).endswith(sentence) and set(METHODS) == set(dict(METHODS))
