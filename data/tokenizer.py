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
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from data.errors import ProcessorError, PromptError, one_line
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


# ------------------------------------------------------------------------------ files of a stranger's folder
_CONFIGS = (
    "config.json", "processor_config.json", "preprocessor_config.json", "chat_template.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
_VOCABULARY = re.compile(
    r".*\.(txt|bpe|codes|spm|tiktoken|model)|tokenizer\.model\..*|(tokenizer|tekken|.*vocab.*)\.json"
)
# Keys under which transformers finds the names of further files, which it then reads in place of these.
_POINTERS = ("configuration_files", "fast_tokenizer_files")
MOST_LINES = 1_000_000  # of a vocabulary that is no JSON


def folder_of(source: str | Path, revision: str | None = None) -> Path:
    """A folder here, or one in the Hub client's cache with a repository's tokenizer and processor files."""
    if revision is None and Path(source).is_dir():
        return Path(source)

    try:
        return snapshot(source, revision)
    except CheckpointError as error:
        raise ProcessorError(error) from error


def check_files(folder: Path) -> None:
    """Hold the files of a processor against limits before transformers and tokenizers open them.

    Raises PromptError for a file that is too large, and for JSON that is no object, nested too deeply,
    ambiguous, or leads to files of other names.
    """
    for name in _CONFIGS:
        config = read_object(folder / name)
        if lead := [key for key in _POINTERS if config.get(key)]:
            raise PromptError(f"{name}: expected no {lead[0]}, which lead to files of other names; remove it")
    for path in sorted(folder.iterdir() if folder.is_dir() else ()):
        if path.is_file() and _VOCABULARY.fullmatch(path.name) and path.name not in _CONFIGS:
            with _naming(path):
                check_size(path, MAX_TOKENIZER)
                if path.suffix == ".json":
                    check_values(path.read_bytes())
                elif path.read_bytes().count(b"\n") > MOST_LINES:
                    raise ValueError(f"expected at most {MOST_LINES} lines, got more")


def read_object(path: Path, most: int = MAX_CONFIG) -> dict[str, Any]:
    """The JSON object in a file, {} where there is no file; PromptError as in `check_files`."""
    if not path.is_file():
        return {}
    with _naming(path):
        return hub.read_object(path, most)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
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
        raise ProcessorError(
            f"tokenizer.json: the tokenizers library gave up ({one_line(error, 200)})"
        ) from None


# --------------------------------------------------------------------------------- limits of a tokenizer.json
# Of a published one the most are 7 normalizers, 7 pre-tokenizers, 4 decoders, and patterns of 500 characters;
# the longest token has 128 characters, and 6,400 are added to a vocabulary.
MOST_IDS = 4_194_304  # as many as a config may say there are
MOST_PARTS, DEEPEST = 16, 4
LONGEST_PATTERN, LONGEST_INSERT, LONGEST_TOKEN = 2000, 64, 1024
MOST_ADDED, MOST_ADDED_CHARACTERS = 16_384, 1_000_000
LONGEST_WORD = 1000  # of WordPiece, whose time grows with the square of it
LONGEST_POST_PROCESSOR = 100_000  # characters
MOST_GROWTH = 1000  # characters that one character may become
MOST_CHARACTERS = 8_000_000  # of text after that: a few hundred megabytes
MOST_SQUARED = 20_000  # characters for a pattern whose time grows with the square of them: two seconds
_SECTIONS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
# Characters that one becomes at most: U+FDFA has 18 in compatibility; a byte's letter; a mark before a word.
_UNICODE = {"NFKC": 18, "NFKD": 18, "BertNormalizer": 18, "NFD": 4, "NFC": 3, "Lowercase": 3}
_GROWTH = {"ByteLevel": 2, "Metaspace": 2}


def check_tokenizer(spec: Mapping[str, Any]) -> int:
    """How many characters of text the tokenizer of a parsed tokenizer.json may be given.

    Raises ValueError for one that nobody publishes, with what is wrong with it.
    """
    longest_piece = _check_vocabulary(spec)
    growth, squared = {}, False
    for section in _SECTIONS:
        parts = list(_parts(spec.get(section), section))
        if len(parts) > MOST_PARTS:
            raise ValueError(f"{section}: expected at most {MOST_PARTS} parts, got {len(parts)}")
        # Unicode's own mappings leave nothing for the next one to map, unless something else is put in.
        inserts = {str(part.get("content", "")) for part in parts if part.get("type") == "Replace"}
        mapped = [_UNICODE.get(str(part.get("type")), 1) for part in parts]
        once = all(text.isascii() or text == "▁" for text in inserts)
        growth[section] = float(max(mapped, default=1) if once else math.prod(mapped))
        for part in parts:
            growth[section] *= _growth(part, section)
            pattern = part.get("pattern")
            if isinstance(pattern, dict) and isinstance(pattern.get("Regex"), str):
                squared |= _is_squared(pattern["Regex"], section)
    text = growth["normalizer"] * growth["pre_tokenizer"]
    if max(text, 10 * growth["decoder"]) > MOST_GROWTH:
        raise ValueError(f"expected text to grow at most {MOST_GROWTH} times, got more")
    written = json.dumps(spec.get("post_processor"))
    if len(written) > LONGEST_POST_PROCESSOR or written.count('"Sequence":') > 3:
        raise ValueError("post_processor: expected the text once, or twice in a pair, and a few tokens")
    longest = MOST_CHARACTERS / text
    if (spec.get("model") or {}).get("type") == "Unigram":  # tries each piece at each place
        longest = min(longest, MOST_CHARACTERS / longest_piece)
    return int(min(longest, MOST_SQUARED) if squared else longest)


def _check_vocabulary(spec: Mapping[str, Any]) -> int:
    """The length of the longest token, in characters, at least 1."""
    added, model = spec.get("added_tokens") or [], spec.get("model") or {}
    if not isinstance(added, list) or not isinstance(model, dict):
        raise ValueError("expected a list of added_tokens and a model")
    if not all(isinstance(token, dict) for token in added):
        raise ValueError("added_tokens: expected objects")
    contents = [str(token.get("content", "")) for token in added]
    if len(added) > MOST_ADDED or sum(map(len, contents)) > MOST_ADDED_CHARACTERS:
        raise ValueError(f"added_tokens: expected at most {MOST_ADDED}, got {len(added)}, or longer ones")
    vocab = model.get("vocab") or {}
    if not isinstance(vocab, dict | list):
        raise ValueError(f"model: expected a vocabulary, got {type(vocab).__name__}")
    if isinstance(vocab, list):
        pieces = [str(entry[0]) for entry in vocab if isinstance(entry, list) and entry]
        ids: list[Any] = []
    else:
        pieces, ids = list(vocab), list(vocab.values())
    ids += [token.get("id") for token in added]
    largest = max((i for i in ids if isinstance(i, int)), default=0)
    if largest >= MOST_IDS:  # the library counts up to it, and keeps each id that is missing
        raise ValueError(f"expected ids below {MOST_IDS}, got {largest}")
    if (longest := max(map(len, (*pieces, *contents)), default=0)) > LONGEST_TOKEN:
        raise ValueError(f"expected tokens of at most {LONGEST_TOKEN} characters, got one of {longest}")
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(str(model.get(name) or "")) > LONGEST_INSERT:
            raise ValueError(f"model: expected a {name} of at most {LONGEST_INSERT} characters, got more")
    word = model.get("max_input_chars_per_word", 0)
    if not isinstance(word, int) or word > LONGEST_WORD:
        raise ValueError(f"model: expected max_input_chars_per_word of at most {LONGEST_WORD}, got {word}")
    return max(longest, 1)


def _parts(value: Any, section: str, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The parts of a section that do something, its sequences taken apart."""
    if value is None:
        return
    if not isinstance(value, dict) or depth > DEEPEST:
        raise ValueError(f"{section}: expected objects, in sequences nested at most {DEEPEST} deep")
    lists = ("normalizers", "pretokenizers", "processors", "decoders")
    inner = [part for name in lists for part in (value.get(name) or ()) if isinstance(value[name], list)]
    if not inner:
        yield value
    for part in inner[: MOST_PARTS + 1]:
        yield from _parts(part, section, depth + 1)


def _growth(part: Mapping[str, Any], section: str) -> float:
    """How many characters a part makes of one, at most, Unicode's mappings aside."""
    for name in ("content", "prepend", "replacement", "prefix", "suffix", "str_rep"):
        if isinstance(part.get(name), str) and len(part[name]) > LONGEST_INSERT:
            raise ValueError(f"{section}: expected a {name} of at most {LONGEST_INSERT} characters, got more")
    kind, pattern = str(part.get("type")), part.get("pattern")
    if kind == "Prepend":
        return 1 + len(str(part.get("prepend", "")))
    if kind == "Replace":
        content = len(str(part.get("content", "")))
        if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
            return max(1.0, content / max(len(pattern["String"]), 1))
        return 1.0 + content  # a pattern may match between any two characters
    if kind == "Precompiled":  # SentencePiece's: its length, a table of that length, strings ended by NUL
        raw = base64.b64decode(str(part.get("precompiled_charsmap", "")), validate=True)
        strings = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
        return max(len(one.decode("utf-8", "replace")) for one in strings) or 1
    return _GROWTH.get(kind, 1)


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
_KNOWN_PATTERNS = frozenset((r"(?=(\d{3})+(?!\d))",))  # published, and not flat
# White space is tried at every length, but then taken at once by what comes last.
_WHITE_SPACE = (r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)")
_MOST_CHOICES = 6  # of different lengths, side by side


def _is_squared(pattern: str, section: str) -> bool:
    """Whether the time of a pattern may grow with the square of the text; ValueError if with more."""
    shown = f"{section}: the pattern {pattern[:60]!r}"
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"{shown} is longer than {LONGEST_PATTERN} characters")
    if pattern in _KNOWN_PATTERNS:
        return True
    alternatives, place = [""], 0
    items: list[list[re.Match]] = [[]]
    while place < len(pattern):
        item = _ITEM.match(pattern, place)
        if item is None or (item["group"] and item["repeat"] not in (None, "?")):
            raise ValueError(f"{shown} is not known to end soon, at {pattern[place : place + 20]!r}")
        if item["bar"]:
            alternatives.append("")
            items.append([])
        else:
            alternatives[-1] += item[0]
            items[-1].append(item)
        place = item.end()
    worst = 0
    for text, one in zip(alternatives, items):
        if text in _WHITE_SPACE and alternatives[-1] == r"\s+":
            continue
        tried, choices, may_fail = 0, 0, False
        for item in reversed(one):
            least, most = _lengths(item)
            tried += may_fail and most > 3 and least != most
            choices += least != most or "|" in (item["group"] or "")
            may_fail = may_fail or least > 0 or bool(item["look"])
        if tried > 1 or choices > _MOST_CHOICES:
            raise ValueError(f"{shown} may be tried at too many lengths")
        worst = max(worst, tried)
    return worst == 1


def _lengths(item: re.Match) -> tuple[float, float]:
    """How often a part of a pattern may stand there, at least and at most."""
    if item["least"] is None:
        return {"?": (0, 1), "*": (0, float("inf")), "+": (1, float("inf"))}.get(item["repeat"], (1, 1))
    least = int(item["least"])
    return least, least if item["comma"] is None else int(item["most"]) if item["most"] else float("inf")


# --------------------------------------------------------------------------------------- a folder's tokenizer
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
        """transformers' own, for saving and for whatever this class has not."""
        try:
            tokenizer = _of_transformers(self.folder)
        except Exception as error:  # transformers raises anything; the folder may have gone meanwhile
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
    """The tokenizer of a folder whose files `check_files` has passed.

    Raises whatever tokenizers and transformers raise, and PromptError for one past the limits.
    """
    config = read_object(folder / "tokenizer_config.json")
    model = read_object(folder / "config.json")
    spec = read_object(folder / "tokenizer.json", MAX_TOKENIZER)
    with _naming(folder / "tokenizer.json"):
        check_tokenizer(spec)
    named = config.get("tokenizer_class") or model.get("tokenizer_class")
    smolvlm = model.get("model_type") == "smolvlm"  # of which transformers takes tokenizer.json as it is
    plain = named in _PLAIN or (smolvlm and named in _GPT2)
    known = all(key in _HARMLESS or key.endswith("_token") for key in config)
    known = known and (plain or named in _GPT2) and model.get("model_type") in _MODELS
    defaults = {} if plain else dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
    roles = _roles(folder, defaults | config, spec) if spec and known else None
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
    return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def _roles(folder: Path, config: dict[str, Any], spec: dict[str, Any]) -> dict[str, str] | None:
    """Tokens by their role, such as eos_token or image_token; None where transformers would add tokens that
    tokenizer.json does not have, or has otherwise."""
    there = {token["content"]: token for token in spec.get("added_tokens") or ()}
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        same = all(there.get(token["content"]) == {"id": int(i), **token} for i, token in listed.items())
    else:
        written = read_object(folder / "special_tokens_map.json")
        config = {**written, **config, **{role: written[role] for role in _ROLES if role in written}}
        same = read_object(folder / "added_tokens.json").keys() <= there.keys()
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
    bare = spec["model"] | {"vocab": {}, "merges": []}
    read = Tokenizer.from_str(json.dumps(spec | {"added_tokens": [], "model": bare}))
    merges: Any = [
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
    for token in sorted(spec.get("added_tokens") or (), key=lambda token: token["id"]):
        marks = {name: value for name, value in token.items() if name not in ("id", "content")}
        marks["special"] = marks["special"] or token["content"] in special
        backend.add_tokens([AddedToken(token["content"], **marks)])
    return backend


# -------------------------------------------------------------------------------- special tokens out of reach
@dataclass(frozen=True)
class PrivateTokenizer:
    """A copy whose added tokens nobody can type, because nobody knows their names.

    `ids` and `names` take a token's ordinary name to its id and to its private name. `unknown_id` is what a
    model without byte fallback gives to characters it has not seen: typed text may yield that one. `longest`
    is the number of characters it may be given.
    """

    tokenizer: Tokenizer
    ids: dict[str, int]
    names: dict[str, str]
    unknown_id: int | None
    longest: int


def private_tokenizer(tokenizer: AnyTokenizer, nonce: str) -> PrivateTokenizer:
    """The private copy. Added tokens of white space alone, which some tokenizers have for indentation, are
    text and keep their names. PromptError for a tokenizer that cannot be copied so."""
    if not tokenizer.is_fast:
        raise PromptError(
            f"tokenizer: expected one of the tokenizers library, got {type(tokenizer).__name__}"
        )
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= MOST_IDS:  # written out, the library counts up to it, and keeps each id that is missing
        raise PromptError(f"tokenizer: expected ids below {MOST_IDS}, got {largest}")
    spec = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        longest = check_tokenizer(spec)
    except ValueError as error:
        raise PromptError(f"tokenizer: {error}") from error
    renamed = [t for t in spec["added_tokens"] if t["special"] or t["content"].strip()]
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
        model["merges"] = [
            [a, b] for a, b in pairs if a not in names and b not in names and a + b not in names
        ]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    spec["truncation"] = spec["padding"] = None
    _keep_offsets(spec["post_processor"])
    private = Tokenizer.from_str(json.dumps(spec))
    wrong = [content for content, i in ids.items() if private.token_to_id(names[content]) != i]
    if wrong:
        raise PromptError(f"tokenizer: the ids of its added tokens are inconsistent, first at {wrong[0]!r}")
    if model["type"] == "Unigram":
        unknown = model.get("unk_id")
    else:
        unknown = private.token_to_id(model["unk_token"]) if model.get("unk_token") else None
    return PrivateTokenizer(private, ids, names, unknown, longest)


def _keep_offsets(post_processor: dict | None) -> None:
    """Offsets that include a token's leading space; the ids do not change."""
    if post_processor is None:
        return
    if "trim_offsets" in post_processor:
        post_processor["trim_offsets"] = False
    for inner in post_processor.get("processors", ()):
        _keep_offsets(inner)


# -------------------------------------------------------------------------------------------- a new tokenizer
def build_tokenizer(
    texts: Iterable[str], vocab_size: int = 1024, model_max_length: int = 8192
) -> PreTrainedTokenizerFast:
    """Train a tokenizer of at most `vocab_size` entries on `texts`; ids depend on the texts alone.

    Any text can be typed: all 256 bytes are in the vocabulary. Digits stand alone, so that counts are read
    digit by digit. The special tokens and their roles are SmolVLM's, so the saved folder opens as an Idefics3
    processor. A small corpus may not fill the vocabulary: size the embedding by `len(tokenizer)`.
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
