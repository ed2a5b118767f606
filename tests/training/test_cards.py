"""The README of a trained model says what was trained and how, and what a run's page says too."""

import ast
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCard
from peft import LoraConfig
from tiny import make_model, make_tokenizer, make_trainer

import crop_trl
from crop_trl.training.cards import PAPER, card_table, code_span, hub_name, method_card, model_card, public_name

ROOT = Path(__file__).parents[2]
AUTHORS = ("Enhan Li", "Junhao He", "Hongyang Du")


def save_models(folder: Path) -> tuple[str, str]:
    """A student and a teacher with their tokenizer, in folders of their own."""
    for name, model in (("student", make_model(0)), ("teacher", make_model(1, hidden=48))):
        model.save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)
    return str(folder / "student"), str(folder / "teacher")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    student, teacher = save_models(folder)
    trainer = make_trainer(
        folder / "my-model",
        student,
        teacher,
        method="tip",
        retention_ratio=0.35,
        max_steps=2,
        save_strategy="steps",
        save_steps=1,
        run_settings={"dataset_name": str(folder / "triplets.jsonl"), "note": "a | b\nc"},
    )
    trainer.train()
    trainer.save_model()
    return folder, trainer


def test_a_model_says_what_it_was_trained_on_and_how(run):
    folder, trainer = run
    text = (folder / "my-model" / "README.md").read_text()
    card = ModelCard(text)
    assert card.data.tags == ["crop", "generated_from_trainer", "trl"] and card.data.model_name == "my-model"
    described = card.data.to_dict()
    assert described["library_name"] == "transformers" and not {"datasets", "base_model"} & set(described)
    intro = card.text.split("##")[0]
    assert "`student`" in intro and "`teacher`" in intro and "`triplets.jsonl`" in intro
    assert "| Method | tip |" in text and "| Kept tokens | 0.35 of each response, at least 1 |" in text
    assert "| Steps | 2 of 2 |" in text and "| Prompts per step | 2 |" in text and "| Seed | 42 |" in text
    assert "| Rewards (weight) | none |" in text and "| Precision | fp32 |" in text and "0.01, constant" in text
    for name in ("trl", "transformers", "torch", "datasets", "tokenizers"):
        assert f"- {name} {version(name)}\n" in text
    assert f"- crop_trl {crop_trl.__version__}\n" in text
    assert PAPER["title"] in text and PAPER["citation"] in text
    assert "{{" not in text.replace(PAPER["citation"], "") and "{%" not in text


def test_it_says_the_same_as_the_page_of_the_run(run):
    folder, trainer = run
    rows = method_card(trainer.args, trainer.run_settings)
    assert rows["Teacher"] == "teacher" and rows["Dataset name"] == "triplets.jsonl"
    text = (folder / "my-model" / "README.md").read_text()
    assert card_table(rows) in text and "| Note | a \\| b c |" in text


def test_checkpoints_have_their_own_and_no_path_of_the_machine_is_told(run):
    folder, trainer = run
    assert "| Steps | 1 of 2 |" in (folder / "my-model" / "checkpoint-1" / "README.md").read_text()
    trainer.save_model(str(folder / "elsewhere"))
    found = sorted(str(path.relative_to(folder)) for path in folder.glob("**/README.md"))
    folders = ["elsewhere", "my-model/README.md", "my-model/checkpoint-1", "my-model/checkpoint-2"]
    assert [path.startswith(name) for path, name in zip(found, folders, strict=True)] == [True] * 4
    assert all(str(folder) not in path.read_text() for path in folder.glob("**/README.md"))


def test_a_user_may_name_data_and_tags(run):
    folder, trainer = run
    trainer.create_model_card(model_name="named", dataset_name="someone/triplets", tags="mine")
    card = ModelCard.load(folder / "my-model" / "README.md")
    assert card.data.datasets == "someone/triplets" and "mine" in card.data.tags and card.data.model_name == "named"
    assert "`someone/triplets`" in card.text and "# named" in card.text


def test_an_adapter_has_it_instead_of_that_of_another_library(tmp_path):
    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    trainer = make_trainer(tmp_path / "out", method="opd", peft_config=adapter)
    trainer.train()
    trainer.save_model()
    card = ModelCard.load(tmp_path / "out" / "README.md")
    described = card.data.to_dict()
    assert described["library_name"] == "peft" and "lora" in described["tags"]
    assert "| Weights | LORA adapter |" in card.text and "| Kept tokens | all |" in card.text
    assert "A model, trained by" in card.text and "| Teacher | Qwen3ForCausalLM |" in card.text


def test_names_for_others_to_read():
    assert public_name("/home/me/models/teacher") == "teacher" and public_name(Path("/data/x.jsonl")) == "x.jsonl"
    assert public_name("Qwen/Qwen3-1.7B") == "Qwen/Qwen3-1.7B" and public_name(None) is None
    assert public_name("~/data/x.jsonl") == "x.jsonl"
    assert "secret" not in public_name("https://me:secret@host/data.jsonl?token=secret&key=secret&revision=main")


def test_only_what_can_be_on_the_hub_is_said_to_be():
    for name in ("gpt2", "Qwen/Qwen3-1.7B"):
        assert hub_name(name) == name
    for name in (
        "models/v1/student",
        "./gone",
        "/gone",
        "data/x.jsonl",
        "a/b c",
        "ユーザ/データ",
        "",
        None,
        "tests/..",
    ):
        assert hub_name(name) is None


@pytest.mark.parametrize("name", ["x`y", "``", "two\nlines", "{{ 7*7 }}", "<b>", "a: {b}", "'a' \"b\"", "[a](b)"])
def test_odd_names_break_no_card(run, name):
    folder, trainer = run
    card = ModelCard(str(model_card(trainer, model_name=name, dataset_name=name)))
    one_line = " ".join(name.split())
    assert card.data.model_name == one_line and "datasets" not in card.data.to_dict()
    assert f"on the prompts of {code_span(name)}." in card.text and len(card.text.split("\n# ")) == 2
    (line,) = [line for line in card.text.splitlines() if "pipeline(" in line]
    (call,) = ast.parse(line).body
    assert call.value.keywords[0].value.value == one_line


def test_the_folder_one_is_in_has_a_name(run, monkeypatch):
    folder, trainer = run
    monkeypatch.chdir(folder / "my-model")
    monkeypatch.setattr(trainer.args, "output_dir", ".")
    assert model_card(trainer, None).data.model_name == "my-model"


def test_the_paper_is_cited_alike_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["version"] == crop_trl.__version__
    assert citation["license"] == "Apache-2.0"
    (paper,) = citation["references"]
    assert paper["title"] == PAPER["title"]
    authors = [f"{author['given-names']} {author['family-names']}" for author in paper["authors"]]
    assert authors == list(AUTHORS)
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert paper["title"] in readme and ", ".join(AUTHORS) in readme
    bibtex = PAPER["citation"].replace("{CROP}", "CROP")
    assert paper["title"] in bibtex and " and ".join(", ".join(a.split()[::-1]) for a in AUTHORS) in bibtex
