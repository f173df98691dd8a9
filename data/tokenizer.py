"""The tokenizer of a checkpoint, opened without transformers, which takes seconds to import.

    tokenizer = open_tokenizer(open_files("checkpoints/ocelli-shapes"))

A tokenizer.json says by itself how text is read. Other folders are opened by transformers: those without one,
with a class that builds its own rules or a key not known here, or with tokens that only another file names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tokenizers import AddedToken, Tokenizer, processors

from data.errors import ProcessorError, PromptError
from data.transformers_tokenizer import gpt2, of_transformers
from messages import one_line
from models.checkpoints.files import Opened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IMAGE = "<image>"
FAKE = "<fake_token_around_image>"
GLOBAL = "<global-img>"
END = "<end_of_utterance>"


# ----------------------------------------------------------------------------------------- files of a folder
def image_settings(opened: Opened) -> dict[str, Any]:
    """The settings of the image processor, in today's layout or the older. Raises PromptError without any."""
    stored = opened.json("processor_config.json").get("image_processor")
    if not (stored := stored or opened.json("preprocessor_config.json")):
        raise PromptError("expected image settings (preprocessor_config.json), found none")
    return stored


@contextmanager
def no_panic() -> Iterator[None]:
    """A panic of the tokenizers library, which is no Exception, as a ProcessorError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ProcessorError(f"the tokenizers library gave up ({one_line(error, 200)})") from None


# --------------------------------------------------------------------------------------- a folder's tokenizer
# The roles that transformers knows; the order is that in which it adds tokens.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a tokenizer_config.json may say that changes how text is read where there is a tokenizer.json.
_CHANGING = {
    "auto_map", "fix_mistral_regex", "gguf_file", "merges", "post_processor", "split_special_tokens",
    "tokenizer_object", "tokenizer_padding", "tokenizer_truncation", "vocab",
}  # fmt: skip
_PLAIN, _GPT2 = ("PreTrainedTokenizerFast", "TokenizersBackend"), ("GPT2Tokenizer", "GPT2TokenizerFast")
_MODELS = (None, "idefics3", "smolvlm", "llama")  # for others transformers may know a better class


class FolderTokenizer:
    """The part of transformers' tokenizer that asking and answering take, with the same results.

    Any other attribute is that of transformers' own tokenizer of the folder, which is opened then.
    """

    is_fast = True

    def __init__(self, folder: Path, backend: Tokenizer, special_tokens_map: dict[str, str]):
        self.folder = folder.absolute()
        self.backend_tokenizer = backend
        self.special_tokens_map = special_tokens_map
        self._added: list[str] = []

    @cached_property
    def transformers_tokenizer(self) -> PreTrainedTokenizerBase:
        """transformers' own, for saving and for whatever this class has not."""
        try:
            tokenizer = of_transformers(self.folder)
        except Exception as error:  # whatever transformers raises; the folder may have gone meanwhile
            said = f"transformers cannot open its tokenizer ({one_line(error, 200)})"
            raise ProcessorError(f"{self.folder}: {said}") from error
        tokenizer.add_special_tokens({"additional_special_tokens": self._added}, False)
        return tokenizer

    def __getattr__(self, name: str) -> Any:
        role = name.removesuffix("_id")
        if role in _ROLES:
            token = self.special_tokens_map.get(role)
            return token if token is None or name == role else self.convert_tokens_to_ids(token)
        if name.startswith("_"):  # what copy and pickle look for
            raise AttributeError(name)
        return getattr(self.transformers_tokenizer, name)

    def __call__(self, *args, **kwargs):
        return self.transformers_tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: i for i, token in sorted(self.added_tokens_decoder.items())}

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or those of several; that of the unknown token, or None, for one not here."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend_tokenizer.token_to_id(tokens)
        unknown = self.special_tokens_map.get("unk_token")
        return self.backend_tokenizer.token_to_id(unknown) if found is None and unknown else found

    def add_special_tokens(self, tokens: Mapping[str, Sequence[str]], replace: bool = True) -> int:
        """`tokens["additional_special_tokens"]`, with new ids where absent. Returns how many were absent."""
        added = list(tokens["additional_special_tokens"])
        self._added += added
        self.__dict__.pop("transformers_tokenizer", None)  # to be opened anew
        return self.backend_tokenizer.add_special_tokens(
            [AddedToken(text, normalized=False, special=True) for text in added]
        )

    def decode(
        self, ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        """Text of ids (T,), verbatim: spaces in front of punctuation stay."""
        assert not clean_up_tokenization_spaces, "which no caller wants"
        ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        with no_panic():
            return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


AnyTokenizer: TypeAlias = "FolderTokenizer | PreTrainedTokenizerBase"
_TURN_ENDS = ("<end_of_utterance>", "<|im_end|>")


def turn_ends(tokenizer: AnyTokenizer) -> tuple[int, ...]:
    """The ids of the tokens that end a turn."""
    known = tokenizer.get_added_vocab()
    stops = {known[token] for token in _TURN_ENDS if token in known}
    if tokenizer.eos_token_id is not None:
        stops.add(tokenizer.eos_token_id)
    return tuple(sorted(stops))


def open_tokenizer(opened: Opened) -> AnyTokenizer:
    """The tokenizer of a checkpoint."""
    folder = opened.processor_folder
    config, model = opened.json("tokenizer_config.json"), opened.json("config.json")
    spec = opened.json("tokenizer.json")
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind = model.get("model_type")  # of smolvlm transformers takes tokenizer.json as it is
    plain = named in _PLAIN or (named in _GPT2 and kind == "smolvlm")
    defaults = {} if plain else dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
    known = spec and (plain or named in _GPT2) and kind in _MODELS and not _CHANGING & config.keys()
    roles = _roles(folder, defaults | config, spec) if known else None
    if roles is None:
        return of_transformers(folder)
    if plain:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        backend = gpt2(spec, bool(config.get("add_prefix_space", False)), set(roles.values()))
    if spec.get("padding"):
        roles.setdefault("pad_token", spec["padding"]["pad_token"])
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    order = sorted(roles, key=lambda role: _ROLES.index(role) if role in _ROLES else len(_ROLES))
    return FolderTokenizer(folder, backend, {role: roles[role] for role in order})


def open_with(opened: Opened, tokens: Sequence[str]) -> AnyTokenizer:
    """The tokenizer of a checkpoint, which must have these special tokens: transformers would add
    them, with ids that the model has no embeddings for."""
    tokenizer = open_tokenizer(opened)
    if absent := [token for token in tokens if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected special tokens for images, {', '.join(absent)} are absent")
    return tokenizer


def _roles(folder: Path, config: dict[str, Any], spec: dict[str, Any]) -> dict[str, str] | None:
    """Tokens by their role, such as eos_token or image_token; None where other files may name more tokens
    than tokenizer.json has, or describe them otherwise."""
    there = {token["content"]: token for token in spec.get("added_tokens") or ()}
    listed = config.get("added_tokens_decoder")
    if listed is None:
        same = not any((folder / name).exists() for name in ("special_tokens_map.json", "added_tokens.json"))
    else:
        same = all(there.get(token["content"]) == {"id": int(i), **token} for i, token in listed.items())
    roles = {
        role: value["content"] if isinstance(value, dict) else value
        for role, value in config.items()
        if role.endswith("_token") and isinstance(value, str | dict)
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        roles, extra = roles | extra, []
    if not set(roles) - set(_ROLES):
        roles |= config.get("model_specific_special_tokens") or {}
    tokens = [*roles.values(), *(one.get("content") if isinstance(one, dict) else one for one in extra)]
    return roles if same and all(isinstance(one, str) and one in there for one in tokens) else None


# -------------------------------------------------------------------------------- special tokens out of reach
_OFFSETS = '"trim_offsets":true', '"trim_offsets":false'
_HTML = re.compile(
    "</?(?:a|b|blockquote|body|br|caption|code|div|em|footer|h[1-6]|head|html|i|iframe|li|ol|p|pre|s|span|"
    "strong|sub|sup|table|tbody|td|tfoot|th|thead|tr|u|ul)>"
)


class PrivateTokenizer(NamedTuple):
    """A copy whose added tokens nobody can type, because nobody knows their names."""

    tokenizer: Tokenizer
    ids: dict[str, int]  # by a token's ordinary name
    names: dict[str, str]  # the private name, by the ordinary one
    unknown_id: int | None  # for characters that a model without byte fallback has not seen: may be typed


def private_tokenizer(tokenizer: AnyTokenizer, nonce: str) -> PrivateTokenizer:
    """The private copy. Added tokens that stand for white space or an element of HTML are vocabulary, which
    people write: they keep their names, and ids stay those of the original. PromptError for a tokenizer that
    cannot be copied so."""
    if not tokenizer.is_fast:
        got = type(tokenizer).__name__
        raise PromptError(f"tokenizer: expected one of the tokenizers library, got {got}")
    # Offsets include a token's leading space; the ids do not change.
    spec = json.loads(tokenizer.backend_tokenizer.to_str().replace(*_OFFSETS))
    written = _vocabulary(tokenizer, spec["added_tokens"])
    renamed = [token for token in spec["added_tokens"] if token["content"] not in written]
    ids = {token["content"]: token["id"] for token in renamed}
    names = {content: f"<{nonce}-{i}>" for content, i in ids.items()}
    for token in renamed:
        token["content"] = names[token["content"]]
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # none may build, or build on, a special token
        pairs = (m if isinstance(m, list) else m.split(" ", 1) for m in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if names.keys().isdisjoint((a, b, a + b))]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["truncation"] = spec["padding"] = None
    private = Tokenizer.from_str(json.dumps(spec))
    wrong = [content for content, i in ids.items() if private.token_to_id(names[content]) != i]
    if wrong:
        raise PromptError(f"tokenizer: the ids of its added tokens are inconsistent, first at {wrong[0]!r}")
    unknown = model.get("unk_id")  # Unigram's
    if model.get("unk_token"):
        unknown = private.token_to_id(model["unk_token"])
    return PrivateTokenizer(private, ids, names, unknown)


def _vocabulary(tokenizer: AnyTokenizer, added: list[dict[str, Any]]) -> set[str]:
    """The names of those added tokens that are no more than a short way to write text: white space as the
    decoder has it (three spaces are `▁▁▁` in Gemma's) without a role, and HTML that is not marked special."""
    roles = {value for value in tokenizer.special_tokens_map.values() if isinstance(value, str)}

    def is_text(name: str, token_id: int, special: bool) -> bool:
        if name.isascii() and name.strip():
            return not special and bool(_HTML.fullmatch(name))
        return not tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=False).strip()

    with no_panic():
        found = {
            token["content"] for token in added if is_text(token["content"], token["id"], token["special"])
        }
    return found - roles
