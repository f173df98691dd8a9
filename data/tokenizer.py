"""A checkpoint's tokenizer opened without transformers, which takes seconds to import; and a new one.

    tokenizer = open_tokenizer(Path("checkpoints/ocelli-shapes"))
    tokenizer = build_tokenizer(["how many circles are there?", "two", ...], vocab_size=1024)

A tokenizer.json says by itself how text is read. What transformers adds to it (tokens that only
tokenizer_config.json or special_tokens_map.json name) is added here in the same order, so ids are the same.
Folders of another make (no tokenizer.json, a class that builds its own rules, a key not known here) are
transformers' to open.

In a new tokenizer any text can be typed: all 256 bytes are in the vocabulary. Digits stand alone, so counts
are read digit by digit. The special tokens and their roles are SmolVLM's, so the saved folder opens as an
Idefics3 processor.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data.errors import ProcessorError, one_line
from data.file_limits import check_tokenizer_class, read_object, read_tokenizer
from data.tokenizer_limits import no_panic

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

IMAGE_TOKEN = "<image>"
FAKE_IMAGE_TOKEN = "<fake_token_around_image>"
GLOBAL_IMAGE_TOKEN = "<global-img>"
END_OF_UTTERANCE = "<end_of_utterance>"
MAX_GRID = 6  # <row_1_col_1> ... <row_6_col_6>: as many tiles a side as Idefics3 can name

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    END_OF_UTTERANCE,
    FAKE_IMAGE_TOKEN,
    IMAGE_TOKEN,
    GLOBAL_IMAGE_TOKEN,
    *(f"<row_{r}_col_{c}>" for r in range(1, MAX_GRID + 1) for c in range(1, MAX_GRID + 1)),
)

# The roles that transformers knows; the order is that in which it adds tokens.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# What a tokenizer_config.json may say without changing how text is read, where there is a tokenizer.json.
_HARMLESS = {
    "add_bos_token", "add_eos_token", "add_prefix_space", "added_tokens_decoder", "additional_special_tokens",
    "backend", "chat_template", "clean_up_tokenization_spaces", "errors", "extra_special_tokens", "is_local",
    "legacy", "local_files_only", "max_length", "model_input_names", "model_max_length",
    "model_specific_special_tokens", "name_or_path", "pad_to_multiple_of", "pad_token_type_id",
    "padding_side", "processor_class", "special_tokens_map_file", "stride", "tokenizer_class",
    "tokenizer_file", "truncation_side", "truncation_strategy", "vocab_size",
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
        self._added: list[tuple[dict[str, list[str]], bool]] = []

    @cached_property
    def transformers_tokenizer(self) -> PreTrainedTokenizerBase:
        """transformers' own, for saving and for whatever this class has not.

        Raises:
            ProcessorError: transformers cannot open the folder, which may have gone meanwhile.
        """
        try:
            tokenizer = _of_transformers(self.folder)
        except Exception as error:  # transformers raises anything
            raise ProcessorError(
                f"{self.folder}: transformers cannot open its tokenizer ({one_line(error, 200)})"
            ) from error
        for tokens, replace in self._added:
            tokenizer.add_special_tokens(tokens, replace)
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
        """`tokens["additional_special_tokens"]`, with new ids where absent. Returns how many were absent.

        Args:
            replace: the list of such tokens that transformers writes when it saves, rather than extend it.
        """
        added = {name: list(texts) for name, texts in tokens.items()}
        self._added.append((added, replace))
        if "transformers_tokenizer" in self.__dict__:
            self.transformers_tokenizer.add_special_tokens(added, replace)
        special = [
            AddedToken(text, normalized=False, special=True) for text in added["additional_special_tokens"]
        ]
        return self.backend_tokenizer.add_special_tokens(special)

    def decode(
        self, ids: Any, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool | None = None
    ) -> str:
        """Text of ids (T,), verbatim: spaces in front of punctuation stay."""
        if clean_up_tokenization_spaces:
            return self.transformers_tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=True
            )
        ids = ids.tolist() if hasattr(ids, "tolist") else ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        with no_panic():
            return self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


AnyTokenizer: TypeAlias = "FolderTokenizer | PreTrainedTokenizerBase"


def open_tokenizer(folder: Path) -> AnyTokenizer:
    """The tokenizer of a folder whose files `data.file_limits.check_files` has passed.

    Raises:
        Anything that tokenizers and transformers raise; PromptError: see `read_tokenizer`.
    """
    config = read_object(folder / "tokenizer_config.json")
    model = read_object(folder / "config.json")
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    smolvlm = model.get("model_type") == "smolvlm"  # of which transformers takes tokenizer.json as it is
    plain = named in _PLAIN or (smolvlm and named in _GPT2)
    known = all(key in _HARMLESS or key.endswith("_token") for key in config)
    spec = read_tokenizer(folder / "tokenizer.json")
    if not (plain or named in _GPT2) or not known or model.get("model_type") not in _MODELS or spec is None:
        check_tokenizer_class(config, model)
        return _of_transformers(folder)
    roles, extra = _special_tokens(folder, config)
    decoder = _added_tokens(folder, config, spec, roles, extra)
    known_tokens = {token.content: token for token in decoder.values()}
    if plain:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        backend = _gpt2(spec, bool(config.get("add_prefix_space", False)))
        for role in ("unk_token", "bos_token", "eos_token"):
            roles.setdefault(role, "<|endoftext|>")
    if spec.get("padding"):
        roles.setdefault("pad_token", spec["padding"]["pad_token"])
    # Named tokens that are added too keep the marks they have there (whether they swallow spaces, say).
    roles = {role: known_tokens.get(str(token), token) for role, token in roles.items() if token is not None}
    _add_absent(backend, decoder, roles, extra)
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    order = sorted(roles, key=lambda role: _ROLES.index(role) if role in _ROLES else len(_ROLES))
    return FolderTokenizer(folder, backend, {role: str(roles[role]) for role in order})


def _of_transformers(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _token(value: Any, **marks: bool) -> Any:
    """A token as transformers writes it, alone or as an object."""
    if isinstance(value, dict) and "content" in value:
        return AddedToken(**{name: one for name, one in value.items() if name != "__type"} | marks)
    return value


def _special_tokens(folder: Path, config: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Tokens with a role, by role, and those without one. tokenizer_config.json names them, and
    special_tokens_map.json where the first does not list the added tokens."""
    config = {name: _token(value) for name, value in config.items()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    own = {name: value for name, value in config.items() if _is_own(name, value)}
    if isinstance(extra, dict):
        own, extra = own | extra, None
    own = own or config.get("model_specific_special_tokens") or {}
    if "added_tokens_decoder" not in config:
        written = read_object(folder / "special_tokens_map.json")
        written = {name: _token(value, special=True) for name, value in written.items()}
        config |= written
        own = {name: value for name, value in written.items() if _is_own(name, value)} | own
        extra = extra or written.get("extra_special_tokens") or written.get("additional_special_tokens")
        if isinstance(extra, dict):
            own, extra = own | extra, None
    roles = {name: value for name, value in config.items() if name in _ROLES}
    return roles | {name: _token(value) for name, value in own.items()}, [_token(one) for one in extra or ()]


def _is_own(name: str, value: Any) -> bool:
    """A token with a role of the model's own, such as `image_token`."""
    return name.endswith("_token") and name not in _ROLES and isinstance(value, str | AddedToken)


def _added_tokens(
    folder: Path, config: dict[str, Any], spec: dict[str, Any], roles: dict[str, Any], extra: list[Any]
) -> dict[int, AddedToken]:
    """The added tokens by id: tokenizer_config.json's, or else added_tokens.json's and tokenizer.json's."""
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        return {int(i): AddedToken(**token) for i, token in listed.items()}
    named = {str(token) for token in (*roles.values(), *extra)}
    found = {
        i: AddedToken(content, normalized=content not in named, special=content in named)
        for content, i in read_object(folder / "added_tokens.json").items()
    }
    for token in spec.get("added_tokens", ()):
        found[token["id"]] = AddedToken(**{name: value for name, value in token.items() if name != "id"})
    return found


def _gpt2(spec: dict[str, Any], add_prefix_space: bool) -> Tokenizer:
    """What transformers makes of a tokenizer.json for its class GPT2Tokenizer: vocabulary, merges and
    post-processor are the file's, the other rules are the class's."""
    bare = spec["model"] | {"vocab": {}, "merges": []}
    read = Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "model": bare}))
    merges = [
        tuple(one.split(" ")) if isinstance(one, str) else tuple(one) for one in spec["model"]["merges"]
    ]
    backend = Tokenizer(
        models.BPE(
            vocab=spec["model"]["vocab"],
            merges=merges,
            dropout=None,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    backend.decoder = decoders.ByteLevel()
    if read.post_processor is not None:
        backend.post_processor = read.post_processor
    return backend


def _add_absent(
    backend: Tokenizer, decoder: dict[int, AddedToken], roles: dict[str, Any], extra: list[Any]
) -> None:
    """Add what the backend lacks, as transformers does: the listed ones by id, then those with a role, then
    the others."""
    there = backend.get_added_tokens_decoder()
    marks = {repr(token) for token in there.values()}
    new = [token for _, token in sorted(decoder.items()) if repr(token) not in marks]
    taken = {token.content for token in (*there.values(), *new)}
    for token in (*roles.values(), *extra):
        if str(token) not in taken and token not in new:
            new.append(AddedToken(token, special=True) if isinstance(token, str) else token)
    named = {str(token) for token in roles.values()}
    for token in new:
        token.special = token.special or token.content in named
    backend.add_tokens(new)


def build_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, model_max_length: int = 8192
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` entries on `texts`; ids depend on the texts alone.

    A small corpus may not fill the vocabulary: size the embedding by `len(tokenizer)`.

    Raises:
        ValueError: `vocab_size` cannot hold the 256 bytes and the special tokens.
    """
    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size: expected at least {smallest} (256 bytes and {len(SPECIAL_TOKENS)} special tokens), "
            f"got {vocab_size}"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
        bos_token="<|im_start|>",
        eos_token=END_OF_UTTERANCE,
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        # A dictionary rather than a list: transformers 4.57 opens only this form.
        extra_special_tokens={
            "end_of_utterance_token": END_OF_UTTERANCE,
            "fake_image_token": FAKE_IMAGE_TOKEN,
            "image_token": IMAGE_TOKEN,
            "global_image_token": GLOBAL_IMAGE_TOKEN,
        },
    )
