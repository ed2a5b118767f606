"""The tokens of many responses in flat arrays: what the analyses share, from a rollout bank or from a run's export."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from ..methods import SelectionSettings, get_method
from ..methods.divergence import topk_entropy
from ..training.export import METADATA_KEY, SAID, read_export
from .bank import RolloutBank

STUDENT_ENTROPY = "student_entropy"
_NO_MEASURE = ("token_ids", "loss_mask", "kept", "score")


@dataclass
class TokenTable:
    """N tokens of R responses, one after the other, and what methods keep of them."""

    token_ids: np.ndarray  # [N]
    lengths: np.ndarray  # [R], adding up to N
    trainable: np.ndarray  # [N]: what a method may keep, so not the tokens of tools
    kept: dict[str, np.ndarray]  # method -> [N]
    scores: dict[str, np.ndarray] = field(default_factory=dict)  # method -> [N], for methods that rank
    measures: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # method -> name -> [N]
    entropy: np.ndarray | None = None  # [N]: of the student over its K entries, in [0, 1]
    rows: list[dict] = field(default_factory=list)  # what the dataset says of each response, as in a bank
    steps: np.ndarray | None = None  # [R]: global step at which each response was sampled
    settings: dict = field(default_factory=dict)  # what is known of the run

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def starts(self) -> np.ndarray:
        """Place of the first token of each response, `[R]`."""
        return np.cumsum(self.lengths) - self.lengths

    def span(self, response: int) -> slice:
        """Where the tokens of a response stand."""
        return slice(int(self.starts[response]), int(self.starts[response] + self.lengths[response]))

    @property
    def responses(self) -> np.ndarray:
        """Which response each token belongs to, `[N]`."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def only(self, chosen: np.ndarray) -> "TokenTable":
        """Some of the responses; `chosen` is a bool for each, `[R]`."""
        tokens = chosen[self.responses]

        def cut(values: dict) -> dict:
            return {name: value[tokens] for name, value in values.items()}

        return replace(
            self,
            token_ids=self.token_ids[tokens],
            lengths=self.lengths[chosen],
            trainable=self.trainable[tokens],
            kept=cut(self.kept),
            scores=cut(self.scores),
            measures={name: cut(values) for name, values in self.measures.items()},
            entropy=None if self.entropy is None else self.entropy[tokens],
            rows=[self.rows[place] for place in np.flatnonzero(chosen)],
            steps=None if self.steps is None else self.steps[chosen],
        )

    @classmethod
    def from_bank(
        cls, bank: RolloutBank, methods: Iterable[str] | None = None, settings: SelectionSettings | None = None
    ) -> "TokenTable":
        """Apply methods to a bank, by default all that rank and whose signals it has."""
        if methods is None:
            methods = [name for name in bank.runnable_methods() if get_method(name).score is not None]
        mask = bank.loss_mask.bool()
        positions = np.arange(1, mask.size(1) + 1)
        lengths = (mask.numpy() * positions).max(axis=1, initial=0)
        real = positions[None] <= lengths[:, None]

        def flat(value):
            return value.detach().cpu().numpy()[real]

        kept, scores, measures = {}, {}, {}
        for name in methods:
            selection = bank.select(name, settings)
            kept[name] = flat(selection.mask)
            if selection.scores is not None:
                scores[name] = flat(selection.scores)
            measures[name] = {key: flat(value) for key, value in selection.measures.items()}
        student = bank.signals.get("student/original")
        return cls(
            token_ids=flat(bank.completion_ids),
            lengths=lengths,
            trainable=flat(mask),
            kept=kept,
            scores=scores,
            measures=measures,
            entropy=None if student is None else flat(topk_entropy(student)),
            rows=bank.rows,
            steps=np.full(len(lengths), bank.step),
            settings={**bank.settings, "counterfactuals": bank.signals.most("counterfactual")},
        )

    @classmethod
    def from_run(cls, folder: str | Path, steps: Sequence[int] | None = None) -> "TokenTable":
        """Read what a run exported (`selection_export_steps`) to its `output_dir`. Raises `ValueError` for nothing."""
        import pyarrow as pa

        table = read_export(folder, steps)
        settings = json.loads(table.schema.metadata[METADATA_KEY])

        def flat(name):
            return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)

        measures, rows = {}, [{"prompts": {}} for _ in range(len(table))]
        for column in table.schema:
            if pa.types.is_string(column.type):
                for row, text in zip(rows, table.column(column.name).to_pylist()):
                    if column.name.startswith(SAID):
                        row[column.name.removeprefix(SAID)] = text
                    elif text is not None:
                        row["prompts"][column.name] = [text]
            elif pa.types.is_list(column.type) and column.name not in _NO_MEASURE:
                if not table.column(column.name).null_count:
                    measures[column.name] = flat(column.name).astype(np.float32)
        method = settings["method"]
        return cls(
            token_ids=flat("token_ids"),
            lengths=table.column("token_ids").combine_chunks().value_lengths().to_numpy().astype(np.int64),
            trainable=flat("loss_mask"),
            kept={method: flat("kept")},
            scores={method: flat("score").astype(np.float32)} if "score" in table.column_names else {},
            measures={method: measures},
            entropy=measures.get(STUDENT_ENTROPY),
            rows=rows,
            steps=table.column("step").to_numpy(),
            settings=settings,
        )


def read_source(
    path: str | Path, methods: Sequence[str] | None = None, settings: SelectionSettings | None = None
) -> TokenTable:
    """Read a rollout bank (a file), to which `methods` are applied, or a run's export (a folder)."""
    path = Path(path)
    if path.is_dir():
        table = TokenTable.from_run(path)
        if methods is not None and not set(methods) <= set(table.kept):
            raise ValueError(f"`methods` can be applied to a rollout bank alone, and {str(path)!r} is a run.")
        return table
    if not path.exists():
        raise ValueError(f"{str(path)!r} does not exist; give a run's output_dir or a rollout bank.")
    return TokenTable.from_bank(RolloutBank.load(path), methods, settings)


def load_tokenizer(given: str | None, source: str, settings: Mapping[str, Any]):
    """The tokenizer that is asked for, else that of a run's folder, else the one named in the settings."""
    named = given or settings.get("model_name_or_path") or settings.get("tokenizer")
    if given is None and (Path(source) / "tokenizer_config.json").is_file():
        named = source
    if not named:
        raise ValueError(f"`--tokenizer` is not set and {source!r} names none; give the student's folder or name.")
    try:
        return AutoTokenizer.from_pretrained(named)
    except (OSError, ValueError) as error:
        raise ValueError(f"No tokenizer can be loaded from {named!r}; give the student's as `--tokenizer`.") from error
