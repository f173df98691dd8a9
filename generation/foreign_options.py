"""Options that other libraries' `generate` takes, and what to use here instead, in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# transformers' names, then OpenAI's and vLLM's.
_INSTEAD = {
    "do_sample": "temperature says it: 0, the default, takes the likeliest token, over 0 draws one",
    "num_beams": "there is no beam search: num_return_sequences with a temperature gives several answers",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "min_length": "an answer ends at a stop token: stop_token_ids=() goes on to max_new_tokens",
    "eos_token_id": "use stop_token_ids",
    "pad_token_id": "leave it out, the checkpoint's is taken",
    "typical_p": "use top_p or min_p",
    "no_repeat_ngram_size": "use repetition_penalty",
    "generation_config": "give its values one by one: max_new_tokens, temperature, top_p, …",
    "streamer": "iterate over generate_stream, and see generation.streaming for text",
    "stopping_criteria": "iterate over generate_stream and break",
    "logits_processor": "give a decode_step that changes the logits",
    "return_dict_in_generate": "use generate_detailed",
    "past_key_values": "use generation.session.Session, which keeps its cache between prompts",
    "inputs_embeds": "give input_ids and pixel_values",
    "inputs": "use input_ids",
    "images": "give pixel_values, as data.processor.Processor makes them",
    "token_type_ids": "leave it out, the model has none",
    "max_tokens": "use max_new_tokens",
    "n": "use num_return_sequences",
    "stop": "use stop_token_ids",
}
_SAME = {
    "num_beam_groups": "num_beams", "length_penalty": "num_beams", "early_stopping": "num_beams",
    "diversity_penalty": "num_beams", "min_new_tokens": "min_length", "bos_token_id": "pad_token_id",
    "encoder_no_repeat_ngram_size": "no_repeat_ngram_size", "bad_words_ids": "logits_processor",
    "suppress_tokens": "logits_processor", "frequency_penalty": "no_repeat_ngram_size",
    "presence_penalty": "no_repeat_ngram_size", "epsilon_cutoff": "typical_p", "eta_cutoff": "typical_p",
    "max_time": "stopping_criteria", "stop_strings": "stopping_criteria",
    "output_scores": "return_dict_in_generate", "output_logits": "return_dict_in_generate",
    "output_attentions": "return_dict_in_generate", "output_hidden_states": "return_dict_in_generate",
    "cache_implementation": "past_key_values", "best_of": "num_beams",
}  # fmt: skip


def check_names(given: Iterable[str], known: Sequence[str]) -> None:
    """Raises TypeError for names that are not known, with what to use in the place of each."""
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(f"generate takes no {'; no '.join(_sentence(name, known) for name in unknown)}")


def _sentence(name: str, known: Sequence[str]) -> str:
    instead = _INSTEAD.get(_SAME.get(name, name))
    if instead is None:
        near = difflib.get_close_matches(name, known, n=1)
        instead = f"did you mean {near[0]}?" if near else f"expected some of {', '.join(known)}"
    return f"{name}: {instead}"
