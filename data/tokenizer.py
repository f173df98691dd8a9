"""Tokenizers: a checkpoint's, opened without transformers, which takes seconds to import; and a new one.

    tokenizer = open_tokenizer(Path("checkpoints/ocelli-shapes"))
    tokenizer = build_tokenizer(["how many circles are there?", "two", ...], vocab_size=1024)

A tokenizer.json says by itself how text is read. Other folders are opened by transformers: those without one,
with a class that builds its own rules or a key not known here, or with tokens that only another file names.

Tokenizers are strangers: the file is a program. Normalizers rewrite the text one after another, patterns with
backtracking split it. Twenty replacements of `e` by `ee` make a million characters of one; a pattern such as
`(a+)+$` takes for ever. So `check_tokenizer` counts the parts, multiplies what they make of one character,
takes only flat patterns, and says how long a text may be for the rest to stay small.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data.errors import ProcessorError, PromptError
from messages import one_line
from models.checkpoints import hub
from models.checkpoints.hub import (
    MAX_CONFIG,
    MAX_TOKENIZER,
    CheckpointError,
    check_size,
    check_values,
    snapshot,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

IMAGE = "<image>"
FAKE = "<fake_token_around_image>"
GLOBAL = "<global-img>"
END = "<end_of_utterance>"
MAX_GRID = 6  # <row_1_col_1> ... <row_6_col_6>: as many tiles a side as Idefics3 can name

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    END,
    FAKE,
    IMAGE,
    GLOBAL,
    *(f"<row_{r}_col_{c}>" for r in range(1, MAX_GRID + 1) for c in range(1, MAX_GRID + 1)),
)


# ------------------------------------------------------------------------------ files of a stranger's folder
_CONFIGS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_VOCABULARY = re.compile(
    r".*\.(txt|bpe|codes|spm|tiktoken|model)|tokenizer\.model\..*|(tokenizer|tekken|.*vocab.*)\.json"
)
# Keys under which transformers finds the names of further files, which it then reads in place of these.
_POINTERS = {"configuration_files", "fast_tokenizer_files"}
MOST_LINES = 1_000_000  # of a vocabulary that is no JSON


def folder_of(source: str | Path, revision: str | None = None) -> Path:
    """A folder here, or one in the Hub client's cache with a repository's tokenizer and processor files, or
    one that was made of a GGUF file."""
    try:
        return snapshot(source, revision)
    except CheckpointError as error:
        raise ProcessorError(error) from error


def check_files(folder: Path) -> None:
    """Refuse, before transformers and tokenizers open them, files of a processor that are too large, and JSON
    that is no object, nested too deeply, ambiguous, or leads to files of other names. Raises PromptError."""
    for path in filter(Path.is_file, sorted(folder.iterdir())):
        if path.name in _CONFIGS:
            if lead := read_object(path).keys() & _POINTERS:
                raise PromptError(
                    f"{path.name}: expected no {min(lead)}, which leads to files of other names"
                )
        elif _VOCABULARY.fullmatch(path.name):
            with naming_file(path):
                check_size(path, MAX_TOKENIZER)
                check_values(raw := path.read_bytes())
                if path.suffix != ".json":  # which may have a line for each value
                    _check_most("lines", raw.count(b"\n"), MOST_LINES)


def read_object(path: Path, most: int = MAX_CONFIG) -> dict[str, Any]:
    """The JSON object in a file, {} where there is no file; PromptError as in `check_files`."""
    with naming_file(path):
        return hub.read_object(path, most) if path.is_file() else {}


def image_settings(folder: Path) -> dict[str, Any]:
    """Those of the image processor, in today's layout or the older; PromptError where no file has them."""
    stored = read_object(folder / "processor_config.json").get("image_processor")
    if not (stored := stored or read_object(folder / "preprocessor_config.json")):
        raise PromptError("expected image settings (preprocessor_config.json), found none")
    return stored


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """What is wrong with a file, with its name."""
    try:
        yield
    except ValueError as error:
        raise PromptError(f"{path.name}: {error}") from None


@contextmanager
def no_panic() -> Iterator[None]:
    """A panic of the tokenizers library, which is no Exception, as a ProcessorError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ProcessorError(f"the tokenizers library gave up ({one_line(error, 200)})") from None


# --------------------------------------------------------------------------------- limits of a tokenizer.json
# Of a published one the most are 7 normalizers, 7 pre-tokenizers, 4 decoders, and patterns of 500 characters;
# the longest token has 128 characters, and 6,400 are added to a vocabulary.
MOST_IDS = 4_194_304  # as many as a config may say there are
MOST_PARTS, DEEPEST = 16, 4
LONGEST_PATTERN, LONGEST_TOKEN = 2000, 1024
MOST_ADDED, MOST_ADDED_CHARACTERS = 16_384, 1_000_000
LONGEST_WORD = 1000  # of WordPiece, whose time grows with the square of it
LONGEST_POST_PROCESSOR = 100_000  # characters
MOST_GROWTH = 2000  # characters that one character may become
MOST_CHARACTERS = 8_000_000  # of text after that: a few hundred megabytes
MOST_SQUARED = 20_000  # characters for a pattern whose time grows with the square of them: two seconds
# Characters that one becomes at most: U+FDFA has 18 in compatibility; a byte's letter; a mark before a word.
_GROWTH = {
    "NFKC": 18, "NFKD": 18, "BertNormalizer": 18, "NFD": 4, "NFC": 3, "Lowercase": 2,
    "ByteLevel": 2, "Metaspace": 2,
}  # fmt: skip


def check_tokenizer(spec: Mapping[str, Any]) -> int:
    """How many characters of text the tokenizer of a parsed tokenizer.json may be given.

    Raises ValueError for one that nobody publishes, with what is wrong with it; for one that is no tokenizer
    at all, whatever comes of it.
    """
    model = spec.get("model") or {}
    longest_piece = _check_vocabulary(spec.get("added_tokens") or [], model)
    growth, squared = {}, False
    for section in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        parts = list(_parts(spec.get(section), section))
        _check_most(f"{section}: parts", len(parts), MOST_PARTS)
        growth[section] = math.prod(map(_growth, parts))
        patterns = [(part.get("pattern") or {}).get("Regex") for part in parts]
        squared |= any([_is_squared(pattern, section) for pattern in patterns if pattern])
    affixes = [model.get(name) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")]
    text = growth["normalizer"] * growth["pre_tokenizer"] * (1 + sum(map(len, affixes)))
    _check_most("growth of a text", max(text, 10 * growth["decoder"]), MOST_GROWTH)
    written = json.dumps(spec.get("post_processor"))
    _check_most("post_processor: characters", len(written), LONGEST_POST_PROCESSOR)
    _check_most("post_processor: texts", written.count('"Sequence":'), 3)  # one, and two of a pair
    if model.get("type") == "Unigram":  # tries each piece at each place
        text = max(text, longest_piece)
    return int(min(MOST_CHARACTERS / text, MOST_SQUARED if squared else MOST_CHARACTERS))


def _check_most(what: str, got: float, most: int) -> None:
    if got > most:
        raise ValueError(f"{what}: expected at most {most}, got {got}")


def _check_vocabulary(added: list[dict], model: Mapping[str, Any]) -> int:
    """The length of the longest token, in characters, at least 1."""
    vocab = model.get("vocab") or {}
    pieces = list(vocab) if isinstance(vocab, dict) else [piece for piece, _ in vocab]
    contents = [token["content"] for token in added]
    longest = max(map(len, (*pieces, *contents)), default=1)
    _check_most("added_tokens", len(added), MOST_ADDED)
    _check_most("added_tokens: characters", sum(map(len, contents)), MOST_ADDED_CHARACTERS)
    _check_ids([*(vocab.values() if isinstance(vocab, dict) else ()), *(token["id"] for token in added)])
    _check_most("characters of a token", longest, LONGEST_TOKEN)
    _check_most("max_input_chars_per_word", model.get("max_input_chars_per_word", 0), LONGEST_WORD)
    return max(longest, 1)


def _check_ids(ids: Iterable[int]) -> None:
    """The library counts up to the largest, and keeps each id that is missing."""
    _check_most("ids", max(ids, default=0), MOST_IDS - 1)


def _parts(value: Any, section: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The parts of a section that do something, its sequences taken apart."""
    if value is None:
        return
    _check_most(f"{section}: depth", depth, DEEPEST)
    lists = ("normalizers", "pretokenizers", "processors", "decoders")
    inner = [part for name in lists for part in value.get(name) or ()]
    if not inner:
        yield value
    for part in inner[: MOST_PARTS + 1]:
        yield from _parts(part, section, depth + 1)


def _growth(part: Mapping[str, Any]) -> float:
    """How many characters a part makes of one, at most."""
    kind = part.get("type")
    if kind == "Prepend":
        return 1 + len(part["prepend"])
    if kind == "Replace":  # a pattern, or no text, may match between any two characters
        replaced = part["pattern"].get("String")
        return max(1.0, len(part["content"]) / len(replaced)) if replaced else 1.0 + len(part["content"])
    if kind == "Precompiled":  # SentencePiece's: its length, a table of that length, strings ended by NUL
        raw = base64.b64decode(part["precompiled_charsmap"], validate=True)
        strings = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
        return max(len(one.decode("utf-8", "replace")) for one in strings) or 1
    return _GROWTH.get(str(kind), 1)


# A flat pattern: classes, letters, and groups of literal choices, each perhaps repeated; no repetition inside
# a repetition, no reference to a group. Whatever the text, such a pattern ends soon, or in square time.
_CLASS = r"\[(?:\\.|[^\[\]\\]|\[(?:\\.|[^\[\]\\])*\])+\]"
_LETTER = rf"(?:{_CLASS}|\\[pP]\{{[^{{}}]*\}}|\\[^1-9kgGKRXC]|[^\\\[\](){{}}|*+?^$])"
_ITEM = re.compile(
    rf"(?P<look>\(\?[=!]{_LETTER}+\)|[\^$])"
    rf"|(?:{_LETTER}|(?P<group>\((?:\?i?:)?(?:{_LETTER}|\|)*\)))"
    r"(?P<repeat>[?*+]|\{(?P<least>\d{1,2})(?P<comma>,)?(?P<most>\d{1,2})?\})?"
    r"|(?P<bar>\|)"
)
_KNOWN_PATTERN = r"(?=(\d{3})+(?!\d))"  # published, and not flat
# White space is tried at every length, but then taken at once by what comes last.
_WHITE_SPACE = (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)")
_MOST_CHOICES = 6  # of different lengths, side by side


def _is_squared(pattern: str, section: str) -> bool:
    """Whether the time of a pattern may grow with the square of the text; ValueError if with more."""
    shown = f"{section}: the pattern {pattern[:60]!r}"
    _check_most(f"{shown}: characters", len(pattern), LONGEST_PATTERN)
    if pattern == _KNOWN_PATTERN:
        return True
    alternatives: list[list[re.Match]] = [[]]
    place = 0
    while place < len(pattern):
        item = _ITEM.match(pattern, place)
        if item is None or (item["group"] and item["repeat"] not in (None, "?")):
            raise ValueError(f"{shown} is not known to end soon, at {pattern[place : place + 20]!r}")
        if item["bar"]:
            alternatives.append([])
        else:
            alternatives[-1].append(item)
        place = item.end()
    last = "".join(item[0] for item in alternatives[-1])
    squared = False
    for items in alternatives:
        if last == r"\s+" and "".join(item[0] for item in items) in _WHITE_SPACE:
            continue
        tried, choices, may_fail = 0, 0, False
        for item in reversed(items):
            least, most = _lengths(item)
            tried += may_fail and most > 3 and least != most
            choices += least != most or "|" in (item["group"] or "")
            may_fail = may_fail or least > 0 or bool(item["look"])
        if tried > 1 or choices > _MOST_CHOICES:
            raise ValueError(f"{shown} may be tried at too many lengths")
        squared |= tried == 1
    return squared


def _lengths(item: re.Match) -> tuple[float, float]:
    """How often a part of a pattern may stand there, at least and at most."""
    if item["least"] is None:
        return {"?": (0, 1), "*": (0, math.inf), "+": (1, math.inf)}.get(item["repeat"], (1, 1))
    least = int(item["least"])
    return least, least if item["comma"] is None else int(item["most"] or 99)


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
            tokenizer = _of_transformers(self.folder)
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


def open_tokenizer(folder: Path) -> AnyTokenizer:
    """The tokenizer of a folder whose files `check_files` has passed; PromptError for one past the limits."""
    config, model = read_object(folder / "tokenizer_config.json"), read_object(folder / "config.json")
    spec = read_object(folder / "tokenizer.json", MAX_TOKENIZER)
    with naming_file(folder / "tokenizer.json"):
        check_tokenizer(spec)
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    kind = model.get("model_type")  # of smolvlm transformers takes tokenizer.json as it is
    plain = named in _PLAIN or (named in _GPT2 and kind == "smolvlm")
    defaults = {} if plain else dict.fromkeys(("unk_token", "bos_token", "eos_token"), SPECIAL_TOKENS[0])
    known = spec and (plain or named in _GPT2) and kind in _MODELS and not _CHANGING & config.keys()
    roles = _roles(folder, defaults | config, spec) if known else None
    if roles is None:
        return _of_transformers(folder)
    if plain:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    else:
        backend = _gpt2(spec, bool(config.get("add_prefix_space", False)), set(roles.values()))
    if spec.get("padding"):
        roles.setdefault("pad_token", spec["padding"]["pad_token"])
    if backend.post_processor is None:
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1")
    order = sorted(roles, key=lambda role: _ROLES.index(role) if role in _ROLES else len(_ROLES))
    return FolderTokenizer(folder, backend, {role: roles[role] for role in order})


def open_with(folder: Path, tokens: Sequence[str]) -> AnyTokenizer:
    """The tokenizer of a checkpoint folder, which must have these special tokens: transformers would add
    them, with ids that the model has no embeddings for."""
    check_files(folder)
    tokenizer = open_tokenizer(folder)
    if absent := [token for token in tokens if token not in tokenizer.get_added_vocab()]:
        raise PromptError(f"tokenizer: expected special tokens for images, {', '.join(absent)} are absent")
    return tokenizer


def _of_transformers(folder: Path) -> PreTrainedTokenizerBase:
    """What transformers makes of a folder. It calls `from_pretrained` of whatever class of its own has the
    name that these files give: a processor's asks for its tokenizer, and so for ever."""
    import transformers.models.auto.tokenization_auto

    config, model = read_object(folder / "tokenizer_config.json"), read_object(folder / "config.json")
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = name if isinstance(name, str) else ""
    for known in {name, name.removesuffix("Fast"), f"{name}Fast"} if name else ():
        found = transformers.models.auto.tokenization_auto.tokenizer_class_from_name(known)
        if found is None or hasattr(found, "_backends"):  # of a library that is not installed
            continue
        if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedTokenizerBase)):
            raise PromptError(f"expected tokenizer_class to name a tokenizer, got {name[:80]!r}")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if model.get("model_type") not in (None, *transformers.CONFIG_MAPPING):
        options["config"] = transformers.PreTrainedConfig()  # else a type that it does not know is warned of
    return transformers.AutoTokenizer.from_pretrained(folder, **options)


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


def _gpt2(spec: dict[str, Any], add_prefix_space: bool, special: set[str]) -> Tokenizer:
    """What transformers makes of a tokenizer.json for its class GPT2Tokenizer: vocabulary, merges and
    post-processor are the file's, the other rules are the class's."""
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    rules = {
        "normalizer": None,
        "pre_tokenizer": byte_level | {"add_prefix_space": add_prefix_space},
        "decoder": byte_level | {"add_prefix_space": True},
        "model": {name: spec["model"][name] for name in ("type", "vocab", "merges")}
        | {"continuing_subword_prefix": "", "end_of_word_suffix": ""},
        "added_tokens": [
            token | {"special": token["special"] or token["content"] in special}
            for token in spec.get("added_tokens") or ()
        ],
    }
    return Tokenizer.from_str(json.dumps(spec | rules))


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
    longest: int  # characters that it may be given


def private_tokenizer(tokenizer: AnyTokenizer, nonce: str) -> PrivateTokenizer:
    """The private copy. Added tokens that stand for white space or an element of HTML are vocabulary, which
    people write: they keep their names, and ids stay those of the original. PromptError for a tokenizer that
    cannot be copied so."""
    if not tokenizer.is_fast:
        got = type(tokenizer).__name__
        raise PromptError(f"tokenizer: expected one of the tokenizers library, got {got}")
    try:
        _check_ids(tokenizer.get_vocab().values())  # before it is written out
        # Offsets include a token's leading space; the ids do not change.
        spec = json.loads(tokenizer.backend_tokenizer.to_str().replace(*_OFFSETS))
        longest = check_tokenizer(spec)
    except ValueError as error:
        raise PromptError(f"tokenizer: {error}") from error
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
    return PrivateTokenizer(private, ids, names, unknown, longest)


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


# -------------------------------------------------------------------------------------------- a new tokenizer
def build_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` entries on `texts`; ids depend on the texts alone.

    Any text can be typed: all 256 bytes are in the vocabulary. Digits stand alone, so that counts are read
    digit by digit. A small corpus may not fill the vocabulary: size the embedding by `len(tokenizer)`.
    """
    if vocab_size < (smallest := len(SPECIAL_TOKENS) + 256):
        raise ValueError(f"vocab_size: expected {smallest} or more for bytes and tags, got {vocab_size}")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return with_roles(backend)


def with_roles(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes that has the special tokens, with SmolVLM's roles for them: its saved folder opens
    as an Idefics3 processor."""
    from transformers import PreTrainedTokenizerFast

    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=8192,
        clean_up_tokenization_spaces=False,
        bos_token="<|im_start|>",
        eos_token=END,
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        # A dictionary rather than a list: transformers 4.57 opens only this form.
        extra_special_tokens={
            "end_of_utterance_token": END,
            "fake_image_token": FAKE,
            "image_token": IMAGE,
            "global_image_token": GLOBAL,
        },
    )
