"""The tokens of many responses in flat arrays: what the analyses share, from a rollout bank or from a run's export."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..methods import SelectionSettings, get_method
from ..methods.divergence import topk_entropy
from ..prompts import PROMPT_COLUMNS
from ..training.export import METADATA_KEY, read_export
from .bank import RolloutBank

STUDENT_ENTROPY = "student_entropy"
_NO_MEASURE = ("step", "row", "token_ids", "loss_mask", "kept", "score", *PROMPT_COLUMNS)


@dataclass
class TokenTable:
    """
    N tokens of R responses, one after the other, and what methods keep of them.

    Args:
        token_ids (`numpy.ndarray` of shape `[N]`): Token ids.
        lengths (`numpy.ndarray` of shape `[R]`): Tokens of each response; they add up to N.
        trainable (`numpy.ndarray` of shape `[N]`): Tokens that a method may keep; those of tools are not.
        kept (`dict[str, numpy.ndarray]`): Method -> `[N]`, what it keeps.
        scores (`dict[str, numpy.ndarray]`): Method -> `[N]`, what ranked them, for methods that rank.
        measures (`dict[str, dict[str, numpy.ndarray]]`): Method -> name -> `[N]`, such as `semantic_divergence`.
        entropy (`numpy.ndarray` of shape `[N]`, *optional*): Entropy of the student over its K entries, in [0, 1].
        texts (`dict[str, list[str]]`): Kind of prompt -> its R texts, for reading.
        steps (`numpy.ndarray` of shape `[R]`): Global step at which each response was sampled.
        settings (`dict`): What is known of the run.
    """

    token_ids: np.ndarray
    lengths: np.ndarray
    trainable: np.ndarray
    kept: dict[str, np.ndarray]
    scores: dict[str, np.ndarray] = field(default_factory=dict)
    measures: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    entropy: np.ndarray | None = None
    texts: dict[str, list[str]] = field(default_factory=dict)
    steps: np.ndarray | None = None
    settings: dict = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def starts(self) -> np.ndarray:
        """Place of the first token of each response, `[R]`."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def responses(self) -> np.ndarray:
        """Which response each token belongs to, `[N]`."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def require_entropy(self) -> np.ndarray:
        """The student's entropy, `[N]`. Raises `ValueError` when it was not measured."""
        if self.entropy is None:
            methods = ", ".join(self.kept)
            raise ValueError(
                f"The student's entropy was not measured in this run of method {methods!r}, which does not ask for "
                "it; analyse a rollout bank (`crop-trl replay`), or a run of a method that scores the "
                "student, such as entropy, tip or ta-opd."
            )
        return self.entropy

    @classmethod
    def from_bank(
        cls, bank: RolloutBank, methods: Sequence[str] | None = None, settings: SelectionSettings | None = None
    ) -> "TokenTable":
        """
        Apply methods to a rollout bank.

        Args:
            bank ([`~crop_trl.analysis.bank.RolloutBank`]): Sampled responses with their signals.
            methods (`Sequence[str]`, *optional*): By default every method that ranks and whose signals the bank has.
            settings ([`~crop_trl.methods.SelectionSettings`], *optional*): Budget and settings of the methods.

        Raises:
            `ValueError`: unknown method, or a signal that it needs is not in the bank.
        """
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
            texts=bank.texts or {"original": bank.prompts},
            steps=np.full(len(lengths), bank.step),
            settings=bank.settings,
        )

    @classmethod
    def from_run(cls, folder: str | Path, steps: range | None = None) -> "TokenTable":
        """
        Read what a run exported (`selection_export_steps`).

        Args:
            folder (`str` or `Path`): The run's `output_dir`.
            steps (`range`, *optional*): Global steps to read; by default all.

        Raises:
            `ValueError`: nothing was exported there.
        """
        table = read_export(folder, steps)
        settings = json.loads(table.schema.metadata[METADATA_KEY])

        def flat(name):
            return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False)

        measures = {}
        for name in table.column_names:
            if name not in _NO_MEASURE and not table.column(name).null_count:
                measures[name] = flat(name).astype(np.float32)
        method = settings["method"]
        return cls(
            token_ids=flat("token_ids"),
            lengths=table.column("token_ids").combine_chunks().value_lengths().to_numpy().astype(np.int64),
            trainable=flat("loss_mask"),
            kept={method: flat("kept")},
            scores={method: flat("score").astype(np.float32)} if "score" in table.column_names else {},
            measures={method: measures},
            entropy=measures.get(STUDENT_ENTROPY),
            texts={k: table.column(k).to_pylist() for k in PROMPT_COLUMNS if k in table.column_names},
            steps=table.column("step").to_numpy(),
            settings=settings,
        )


def read_source(
    path: str | Path, methods: Sequence[str] | None = None, settings: SelectionSettings | None = None
) -> TokenTable:
    """
    Read a rollout bank (a file) or a run's export (a folder).

    Args:
        path (`str` or `Path`): Which one.
        methods (`Sequence[str]`, *optional*), settings (*optional*): Of a bank; a run has its own.

    Returns:
        [`TokenTable`]

    Raises:
        `ValueError`: it does not exist, or is neither.
    """
    path = Path(path)
    if path.is_dir():
        table = TokenTable.from_run(path)
        if methods is not None and not set(methods) <= set(table.kept):
            others = ", ".join(name for name in methods if name not in table.kept)
            raise ValueError(
                f"`methods` {others} cannot be applied to {str(path)!r}, a run of {', '.join(table.kept)}; give "
                "a rollout bank, which several methods can be applied to."
            )
        return table
    if not path.exists():
        raise ValueError(f"{str(path)!r} does not exist; give a run's output_dir or a rollout bank.")
    return TokenTable.from_bank(RolloutBank.load(path), methods, settings)
