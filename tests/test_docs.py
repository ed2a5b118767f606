"""README and docs/: links lead somewhere, commands name what exists, snippets run."""

import ast
import contextlib
import functools
import io
import os
import re
import runpy
import shlex
import sys
from configparser import ConfigParser
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from crop_trl import METHODS, CROPConfig
from crop_trl.commands import COMMANDS
from crop_trl.commands.launch import OPTIONS, launch_file

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "benchmarks/README.md", ROOT / "examples/tiny_math/README.md", *ROOT.glob("docs/*.md")]
)
FENCE = re.compile(r"^(?:<!-- (?P<mark>.+?) -->\n)?```(?P<language>\w*)\n(?P<code>(?:.*\n)*?)```$", re.MULTILINE)
SETUP = ConfigParser()
SETUP.read(ROOT / "setup.cfg")
OURS = ("python", "pytest", "accelerate", "pip", "crop-trl")
# Programs of others, whose options are theirs.
FOREIGN = {"export", "echo", "jq", "printf", "mkdir", "curl", "vllm", "wandb", "cd", "ssh", "sbatch"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[re.Match]:
    """Fenced blocks of a page in these languages."""
    return [found for found in FENCE.finditer(path.read_text()) if found["language"] in languages]


def commands(path: Path) -> list[list[str]]:
    """Shell commands of a page in words, without variables set before them and without comments."""
    # Commands within a sentence, in backticks, name scripts as well.
    program = r"(?:python |pytest |crop-trl \w|accelerate launch [^`]*\.py)"
    inline = re.findall(rf"(?<!`)`({program}[^`]*)`(?!`)", path.read_text().replace("\n", " "))

    def lines(*languages):
        whole = (block["code"].replace("\\\n", " ") for block in blocks(path, *languages))
        return [line for code in whole for line in code.splitlines()]

    # A block without a language may hold anything.
    unmarked = [line for line in lines("") if line.split(" ")[0] in OURS]
    found = []
    for line in [*lines("bash", "sh"), *unmarked, *inline]:
        words = shlex.split(line, comments=True)
        for part in " ".join(shlex.quote(word) for word in words).split(" '&&' "):
            words = shlex.split(part)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append(words)
    return found


@functools.cache
def options_of(script: str) -> frozenset[str]:
    """Options that the `--help` of a script, or of a command (`crop-trl NAME`), lists."""
    printed, argv, path, methods = io.StringIO(), sys.argv, list(sys.path), dict(METHODS)
    sys.argv = [script, "--help"]
    sys.path.insert(0, str((ROOT / script).parent))
    try:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
            if script.startswith("crop-trl "):
                import_module(f"crop_trl.commands.{script.split()[1].replace('-', '_')}").main(["--help"])
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = argv, path
        # One of the scripts registers a method.
        METHODS.clear()
        METHODS.update(methods)
    return frozenset(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", printed.getvalue()))


def check_script(words: list[str]) -> None:
    script, *arguments = words
    known = set(options_of(script))
    if script == "crop-trl train":
        # What the launcher takes.
        known |= {f"--{name}" for name in ("accelerate_config", *OPTIONS)}
    if "--model_name_or_path" in known:
        # Taken by TrlParser before its parser sees it.
        known.add("--config")
    for place, word in enumerate(arguments):
        if word == "--":
            break
        if re.match(r"--?[A-Za-z]", word):
            option = word.partition("=")[0]
            assert option in known or option.replace("-", "_") in known, f"{script} has no option {option}"
            if option == "--config":
                assert (ROOT / arguments[place + 1]).is_file(), f"{arguments[place + 1]} does not exist"
            if option == "--accelerate_config" and arguments[place + 1] != "NAME":
                assert launch_file(arguments[place + 1])
            if option == "--selector" and arguments[place + 1] != "FILE:NAME":
                file, _, name = arguments[place + 1].partition(":")
                assert re.search(rf"^(def )?{name}( = |\()", (ROOT / file).read_text(), re.MULTILINE)
            if option == "--method":
                assert arguments[place + 1] in {*METHODS, "base"}


def check_command(words: list[str]) -> None:
    """Raise `AssertionError` unless program, script, files and options exist."""
    program, *arguments = words
    if program == "accelerate":
        assert arguments[0] == "launch"
        # What the reader fills in is written in capitals.
        args = launch_command_parser().parse_args([re.sub(r"^[A-Z_]+$", "0", word) for word in arguments[1:]])
        if args.config_file:
            assert (ROOT / args.config_file).is_file(), f"{args.config_file} does not exist"
        if args.module:
            return check_command(["python", "-m", args.training_script, *args.training_script_args])
        assert (ROOT / args.training_script).is_file(), f"{args.training_script} does not exist"
        check_script([args.training_script, *args.training_script_args])
    elif program == "crop-trl" or arguments[:1] == ["-m"] and arguments[1].startswith("crop_trl.commands."):
        name, *arguments = arguments if program == "crop-trl" else [arguments[1].rpartition(".")[2], *arguments[2:]]
        assert name in COMMANDS or name == "--help", f"crop-trl has no command {name}"
        if name in COMMANDS:
            check_script([f"crop-trl {name}", *arguments])
    elif program in ("python", "python3"):
        if arguments[0] != "-m" and arguments[0] != "-":
            assert (ROOT / arguments[0]).is_file(), f"{arguments[0]} does not exist"
            check_script(arguments)
    elif program == "pytest":
        markers = {line.partition(":")[0].strip() for line in SETUP["tool:pytest"]["markers"].strip().splitlines()}
        for place, word in enumerate(arguments):
            if word == "-m":
                assert set(re.findall(r"\w+", arguments[place + 1])) - {"not", "or", "and"} <= markers
            elif word.startswith("tests/"):
                assert (ROOT / word).exists()
    elif program == "pip":
        extras = set(SETUP["options.extras_require"])
        for named in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
            assert set(named.split(",")) <= extras, f"no such extra: {named}"
    else:
        assert program in FOREIGN or program in (".", "..."), f"who knows {program}?"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_name_what_exists(path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    wrong = []
    for words in commands(path):
        # Messages that a page tells of, and what follows a shortened command.
        if words[0].startswith("-") or words[0] == "...":
            continue
        try:
            check_command([word for word in words if word != "..."])
        except AssertionError as error:
            wrong.append(f"{' '.join(words)[:100]}: {str(error).splitlines()[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "code"),
    [pytest.param(p, b["code"], id=name_of(p)) for p in PAGES for b in blocks(p, "bash") if b["mark"] == "run"],
)
def test_commands_that_take_seconds_are_run(path, code, tmp_path, monkeypatch):
    for name in ("examples", "benchmarks", "accelerate_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for line in code.replace("\\\n", " ").splitlines():
        program, script, *arguments = shlex.split(line, comments=True)
        if program == "crop-trl":
            assert not import_module(f"crop_trl.commands.{script}").main(arguments)
            continue
        assert program == "python"
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.syspath_prepend(str((ROOT / script).parent))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            assert not ended.code


def anchors(path: Path) -> set[str]:
    """Anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"`", "", h)).strip().lower().replace(" ", "-") for h in headings}


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    missing = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        if not goal.exists() or (anchor and anchor not in anchors(goal)):
            missing.append(target)
    assert not missing


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_snippets_name_fields_that_exist(path):
    known = {field.name for field in fields(CROPConfig)}
    for block in blocks(path, "python"):
        for node in ast.walk(ast.parse(block["code"])):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("CROPConfig", "config"):
                named = {keyword.arg for keyword in node.keywords if keyword.arg}
                assert named <= known, named - known


def test_the_pages_first_method_has_fifteen_lines_and_trains(tmp_path, monkeypatch, capsys):
    """A student that teaches itself, as the page has it and nothing else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    code = blocks(ROOT / "docs" / "extending.md", "python")[0]["code"]
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    before, names = dict(METHODS), {"__name__": "page"}
    try:
        exec(code, names)
    finally:
        METHODS.clear()
        METHODS.update(before)
    trainer = names["trainer"]
    logged = [entry for entry in trainer.state.log_history if "selection/retention_ratio" in entry]
    assert trainer.state.global_step == 2 and all(0.1 < entry["selection/retention_ratio"] < 0.3 for entry in logged)
    (row,) = trainer.train_dataset.select([0])
    assert row["told_prompt"][0]["content"].endswith(f"The answer is {row['answer']}.")


def test_the_page_on_methods_has_every_row_and_its_passes():
    found = {}
    for line in (ROOT / "docs" / "methods.md").read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        passes = re.findall(r"\d", " ".join(cells[2:4] if len(cells) > 3 and cells[3].isdigit() else cells[2:3]))
        if len(cells) == 5 and len(passes) == 2:
            found |= dict.fromkeys(re.findall(r"`([\w-]+)`", cells[0]), tuple(map(int, passes)))
    readers = {name: [need.split("/")[0] for need in method.needs] for name, method in METHODS.items()}
    expected = {name: (who.count("teacher"), who.count("student")) for name, who in readers.items()}
    assert found == {**expected, "base": (0, 0)}


def test_the_snippets_on_extending_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    methods, environment = dict(METHODS), dict(os.environ)
    names = {"__name__": "page"}
    try:
        for block in blocks(ROOT / "docs" / "extending.md", "python"):
            exec(block["code"], names)
    finally:
        METHODS.clear()
        METHODS.update(methods)
        os.environ.clear()
        os.environ.update(environment)
    assert names["selection"].mask.tolist() == [[False, True, False]]
    assert names["trainer"].state.global_step == 2
    # 16 responses a step, each with a place.
    assert len(names["places"].places) == 32 and all(0 <= place <= 1 for place in names["places"].places)
    logged = [entry for entry in names["trainer"].state.log_history if "rewards/short_answer/mean" in entry]
    assert logged and all(entry["reward"] == 0 for entry in logged)
    assert names["table"].kept["certainty"].any()
    assert (tmp_path / "runs/extended/categories.png").stat().st_size > 10_000
