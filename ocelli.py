"""Ocelli: small vision-language models to ask, serve and train, in pure PyTorch.

    from ocelli import Processor, VisionLanguageModel

    model = VisionLanguageModel.from_pretrained("ocelli-shapes")
    processor = Processor.from_pretrained("ocelli-shapes")
    inputs = processor.ask("photo.jpg", "What colour is the star?")
    print(processor.decode(model.generate(**inputs)[0]))

At the command line `ocelli photo.jpg "What is this?"` asks, and `ocelli --help` lists the other commands.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import messages
from models import __version__

if TYPE_CHECKING:
    from data.processor import Processor
    from generation.options import GenerationOptions
    from inference.answer import ask
    from inference.checkpoint import Checkpoint, open_checkpoint
    from models.vision_language_model import VisionLanguageModel

__all__ = [
    "Checkpoint",
    "GenerationOptions",
    "Processor",
    "VisionLanguageModel",
    "__version__",
    "ask",
    "open_checkpoint",
]

HELP = """\
usage: ocelli IMAGE [QUESTION]     answer a question (`ocelli ask --help` has the options)
       ocelli COMMAND ...          `ocelli COMMAND --help` has the options of each

  chat      talk about an image in the terminal
  batch     answer the questions of a file, or one question about a folder of images
  where     show where the model looked
  read      make Markdown, HTML, JSON or text of PDFs and scans
  serve     answer programs over HTTP, in OpenAI's and Anthropic's protocols
  page      the same, with its page opened in a browser
  train     fine-tune on rows of your own; without arguments, an example of minutes
  eval      score a model; also eval compare and eval card
  prove     show on this machine that every way gives the same tokens, transformers' way too
  convert   write a checkpoint for transformers, in another dtype or with an adapter merged
  inspect   show what a checkpoint is and needs

--model is a folder, a GGUF file, a repository on the Hub or a short name. Without it the model that comes
with Ocelli answers, which knows plain drawings alone.
"""
# Where our modules are: beside this file in a checkout, below this package where it is installed.
_BELOW = f"{__name__}." if "__path__" in globals() else ""
_PROGRAMS = {"serve": "serve", "page": "app", "train": "train", "eval": "eval"}
_OF_TOOLS, _COMMANDS = ("convert", "inspect"), ("chat", "batch", "where", "read")


def __getattr__(name: str):
    """Imported when first asked for: PyTorch takes seconds, which `ocelli --help` does without."""
    modules = {"Processor": "data.processor", "GenerationOptions": "generation.options"}
    modules |= {"VisionLanguageModel": "models.vision_language_model", "ask": "inference.answer"}
    modules |= dict.fromkeys(("Checkpoint", "open_checkpoint"), "inference.checkpoint")
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(modules[name]), name)


def main() -> None:
    """The command `ocelli`: the program of its first argument, run as from a checkout."""
    arguments = sys.argv[1:]
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "--version"):
        print(HELP if "h" in first else f"ocelli {__version__}", end="" if "h" in first else "\n")
        return
    if first in _OF_TOOLS:
        program = "tools"
    elif first == "prove":
        program = "eval"
    elif first in _PROGRAMS or first == "ask":
        program, arguments = _PROGRAMS.get(first, "generate"), arguments[1:]
    else:
        program, known = "generate", (*_PROGRAMS, *_OF_TOOLS, "prove", "ask", *_COMMANDS)
        meant = "" if first in known or os.path.exists(first) else messages.did_you_mean(first, known)
        if meant:
            print(
                f"ocelli: error: {messages.printable(first)}: no such command or file{meant}", file=sys.stderr
            )
            sys.exit(2)
    sys.argv[1:], messages.COMMAND = arguments, "ocelli"
    runpy.run_module(_BELOW + program, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
