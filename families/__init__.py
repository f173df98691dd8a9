"""Families of checkpoints: one file for each, with all that is its own.

A family is a module of functions, and one more entry in FAMILIES. Everything else finds it by the config of
a model, `FAMILIES[config.family]`, or by a config.json (`models.checkpoints.load.choose_family`), and knows
none by name:

    NAME, TITLE                    what `VLMConfig.family` says; what people read
    recognises(config)             whether a config.json is of this family
    read_config(config, generation, stored) -> VLMConfig
                                   from config.json, generation_config.json and the headers of stored tensors
                                   (either may be {})
    tensor_map(stored names, config)
                                   our tensor's name -> `StoredTensor`; without names, as they are written for
                                   a model of this config
    IGNORABLE                      stored tensors (a regular expression) that may be left out
    positions(config, height, width)
                                   what a part of an image, in pixels, takes in a prompt; families of
                                   square tiles may be given no size
    places(config, ids, shown) -> places (3, T), offset
                                   rotary places of a prompt, where `config.text.rope_sections` says that they
                                   are not its slots, and what is added to the slot of a token after it
    build(config)                  -> tower, projector, text: blocks of models/, chosen by the config's fields
    open_images(opened)            -> image rule (`data.tiles.Images`), tokenizer, chat template
    write(config, dtype)           -> config.json, or a CheckpointError that says why it cannot be saved
    processor_classes(config)      transformers' classes of a saved processor and of its images
    BOX_FORMS                      model_type -> the form in which its models write boxes (`data.boxes`)
"""

from __future__ import annotations

from types import ModuleType

from families import gemma4, idefics3, internvl, lfm2_vl, nanovlm, qwen3_5, qwen_vl

FAMILIES: dict[str, ModuleType] = {
    family.NAME: family for family in (idefics3, nanovlm, internvl, qwen_vl, qwen3_5, lfm2_vl, gemma4)
}
