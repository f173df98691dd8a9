"""The model card: README.md with the metadata that the Hub reads."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from huggingface_hub import ModelCardData

from models.config import VLMConfig

_BODY = """# {name}

{summary}

| | |
|---|---|
| parameters | {parameters:,} |
| vision | {layers} layers of {width}, tiles of {image} px in patches of {patch} px, {tokens} tokens a tile |
| language | {text_layers} layers of {text_width}, {heads} heads over {kv_heads}, {vocab:,} tokens |

## Training data

{training_data}

## Evaluation

{evaluation}

## Use

{use}"""
_USE = """In Ocelli:

```bash
python generate.py picture.png -q "What is in the picture?" --model {repo_id}
```

```python
from models import VisionLanguageModel

model = VisionLanguageModel.from_pretrained("{repo_id}")
```

In transformers, unconverted:

```python
from transformers import pipeline

answer = pipeline("image-text-to-text", model="{repo_id}")
content = [{{"type": "image", "url": "picture.png"}}, {{"type": "text", "text": "What is in the picture?"}}]
print(answer(text=[{{"role": "user", "content": content}}], return_full_text=False)[0]["generated_text"])
```
"""
_USE_BARE = """The repository holds the model alone, without a processor for pictures and text. In Ocelli:

```python
from models import VisionLanguageModel

model = VisionLanguageModel.from_pretrained("{repo_id}")
```

In transformers, unconverted:

```python
from transformers import AutoModelForImageTextToText

model = AutoModelForImageTextToText.from_pretrained("{repo_id}")
```
"""


def model_card(
    repo_id: str,
    config: VLMConfig,
    parameters: int,
    summary: str = "A vision-language model in the Idefics3 / SmolVLM layout, made with Ocelli.",
    training_data: str = "Not stated.",
    evaluation: Sequence[Mapping[str, object]] | str | None = None,
    with_processor: bool = True,
    **metadata,
) -> str:
    """The text of a model card.

    Args:
        repo_id: where the model is (to be) found; used in the commands.
        config: of the model.
        parameters: how many it has.
        summary: what it is, a sentence or two.
        training_data: what it was trained on.
        evaluation: rows of a table, each {column: value} with the same columns; or Markdown; or None.
        with_processor: whether the repository has one: without, the card shows how to load the model only.
        metadata: further fields of `huggingface_hub.ModelCardData`: license, language, datasets,
            base_model, …
    """
    tags = ["ocelli", "vision-language", *metadata.pop("tags", [])]
    front = {
        "library_name": "transformers",
        "pipeline_tag": "image-text-to-text",
        "language": "en",
    } | metadata
    vision, text = config.vision, config.text
    body = _BODY.format(
        name=repo_id.rsplit("/", 1)[-1],
        use=(_USE if with_processor else _USE_BARE).format(repo_id=repo_id),
        summary=summary,
        parameters=parameters,
        layers=vision.num_hidden_layers,
        width=vision.hidden_size,
        image=vision.image_size,
        patch=vision.patch_size,
        tokens=config.tokens_per_tile,
        text_layers=text.num_hidden_layers,
        text_width=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        vocab=text.vocab_size,
        training_data=training_data,
        evaluation=_table(evaluation),
    )
    return f"---\n{ModelCardData(tags=tags, **front)}\n---\n\n{body}"


def addressed(card: str, repo_id: str) -> str:
    """A card of `model_card` that was made for a folder or another repository, with `repo_id` in its title
    and commands; any other card as it is."""
    found = re.search(r'^model = VisionLanguageModel\.from_pretrained\("(.+)"\)$', card, re.MULTILINE)
    if found is None:
        return card
    old = found[1]
    for place in ('("{}")', 'model="{}"', " --model {}\n"):
        card = card.replace(place.format(old), place.format(repo_id))
    title = "\n# {}\n"
    return card.replace(title.format(old.rsplit("/", 1)[-1]), title.format(repo_id.rsplit("/", 1)[-1]), 1)


def public_name(source: str) -> str:
    """What a card calls a model or a dataset: of a path on this machine the last part alone."""
    path = os.path.expanduser(source)
    is_path = os.path.exists(path) or source.startswith(("/", "./", "../", "~")) or source.count("/") > 1
    return os.path.basename(os.path.abspath(path)) if is_path and "://" not in source else source


def _table(evaluation: Sequence[Mapping[str, object]] | str | None) -> str:
    if not evaluation:
        return "None yet."
    if isinstance(evaluation, str):
        return evaluation
    columns = list(evaluation[0])
    rows = [[row[column] for column in columns] for row in evaluation]
    lines: list[Sequence[object]] = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
