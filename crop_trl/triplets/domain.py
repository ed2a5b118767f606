"""What problems and answers are in a domain: mathematics, coding, open questions, or one of the user's own.

A domain is a YAML file of `domains/`, or one like it. Its words fill the templates, its answer types go into the form
of the critic's answer, and its patterns into the checks without a model. The ledger knows a request by what the model
reads, so a changed domain asks anew only what reads differently.
"""

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from ..files import read_yaml
from .reading import Determinacy, Evaluation, GeneratorAnswer, critic_form, evaluation_form, request_schema

DOMAINS = Path(__file__).parent / "domains"
MATHEMATICS = DOMAINS / "mathematics.yaml"


class Domain(BaseModel):
    """What a domain's file says; `domains/mathematics.yaml` explains each key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer_types: dict[str, str | None] = Field(min_length=1)
    determinacy: dict[Determinacy, str | None]
    verbatim: dict[str, re.Pattern]
    latex: bool
    ignored_in_answers: re.Pattern
    words: dict[str, str]

    @field_validator("determinacy", "words")
    @classmethod
    def _whole(cls, given: dict[str, Any], field: ValidationInfo) -> dict[str, Any]:
        for name in read_yaml(MATHEMATICS)[field.field_name]:
            if name not in given:
                raise ValueError(f"{name} is missing")
        return given

    @cached_property
    def evaluation(self) -> type[Evaluation]:
        """The form of the critic's evaluation of a candidate."""
        return evaluation_form(self.answer_types)

    @cached_property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schema that goes with each kind of request."""
        forms = {"generator": GeneratorAnswer, "critic": critic_form(self.evaluation)}
        return {kind: request_schema(form) for kind, form in forms.items()}

    @cached_property
    def schema_digests(self) -> dict[str, str]:
        """What tells the forms of the answers apart in the ledger."""
        texts = {kind: json.dumps(schema, sort_keys=True) for kind, schema in self.schemas.items()}
        return {kind: hashlib.sha256(text.encode()).hexdigest() for kind, text in texts.items()}

    @cached_property
    def placeholders(self) -> dict[str, str]:
        """What stands for the domain's placeholders in the templates."""
        listed = {
            key: ", ".join(f"{name} ({meaning})" if meaning else name for name, meaning in names.items())
            for key, names in (("answer_types", self.answer_types), ("determinacy", self.determinacy))
        }
        return self.words | listed

    def folded_answer(self, answer: str | None) -> str | None:
        """An answer to compare with others of the same problem."""
        return answer and self.ignored_in_answers.sub("", answer).casefold()


def load_domain(source: str) -> Domain:
    """A domain by its name (`mathematics`) or its file. Raises `ValueError` with what is wrong in it."""
    shipped = {path.stem: path for path in DOMAINS.glob("*.yaml")}
    path = shipped.get(source, Path(source))
    if not path.is_file():
        raise ValueError(f"`domain` {source!r} is no file and none of {', '.join(sorted(shipped))}; give one of them.")
    try:
        return Domain.model_validate(read_yaml(path))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        wrong = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ValueError(f"`domain` {source!r} is not whole ({wrong}); see how {MATHEMATICS} has it.") from None
