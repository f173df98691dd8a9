"""How checkpoints are asked to read pages."""

import pytest

from data.errors import PromptError
from data.processor import Processor
from data.reading import TASKS, Reading
from families import FAMILIES


def test_what_a_checkpoint_is_asked():
    processor = Processor.from_pretrained("checkpoints/ocelli-shapes")
    assert processor.reading == Reading() and set(processor.reading.prompts) == set(TASKS)
    with pytest.raises(PromptError):
        processor.reading.prompt("poem")
    processor.tokenizer.add_special_tokens({"additional_special_tokens": ["<doctag>", "<fcel>"]})
    del processor.reading
    assert processor.reading.form == "doctags" and "docling" in processor.reading.prompt("page")


def test_families_name_tasks_and_forms_that_there_are():
    for family in FAMILIES.values():
        for kind, reading in getattr(family, "READING", {}).items():
            assert kind in family.MODEL_TYPES and reading.form in ("markdown", "doctags")
            assert reading.prompts.keys() <= set(TASKS) and reading.prompts["page"]
