"""Ask a vision-language model about images and videos.

    python generate.py                                        # the example image, the embedded model
    python generate.py photo.jpg "How many boats are there?"
    python generate.py photo.jpg -q "What is this?" -q "Where is it?" --json
    python generate.py a.png b.png -q "What differs?" --model smolvlm-256m
    python generate.py clip.mp4 "What happens?" --model smolvlm2-256m
    python generate.py photo.jpg --num-answers 3 --temperature 0.8 --stats
    python generate.py photo.jpg "How many boats are there?" --num-answers 8 --temperature 0.8 --pick vote
    python generate.py photo.jpg "Is it raining?" --choices yes,no
    python generate.py photo.jpg "Which boat is ahead?" --model runs/reasoning --think
    python generate.py photo.jpg --detect "red circle" --point "the star" --show-boxes boxes.png
    curl -s https://example.org/photo.jpg | python generate.py - "What is this?"
    echo "What is this?" | python generate.py photo.jpg

Three more commands have options of their own (python generate.py chat --help):

    python generate.py chat photo.jpg                         # a conversation
    python generate.py batch questions.jsonl --out answers.jsonl
    python generate.py batch photos -q "How many boats are there?" --out answers.jsonl
    python generate.py where photo.jpg "What is it?" --out where.png --method occlusion

The answer goes to stdout while it is made, everything else to stderr: also what the model thinks before it
answers. A batch reports a bad line in its results and continues. Run it again to resume where it stopped; the
bad lines are tried again.

Exit status:
    0    every question was answered
    1    some lines of a batch could not be answered; the results hold their errors
    2    an error, described in one sentence; or a line of a chat from a pipe failed
    130  Ctrl-C
    141  the reader of stdout has gone
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module

from inference import ask
from inference.command import COMMANDS, log
from inference.errors import user_errors, user_message
from messages import for_terminal


def answer(arguments: list[str]) -> int:
    """Do what the arguments say. Errors of users and of the machine end in one sentence."""
    if arguments[:1] and arguments[0] in COMMANDS:
        chosen = import_module(f"inference.{arguments[0]}_command")
        args = chosen.parse(arguments[1:])
    else:
        chosen, args = ask, ask.parse(arguments, __doc__)
    try:
        return chosen.run(args)
    except user_errors() as error:
        if isinstance(error, BrokenPipeError):
            raise
        if args.debug:
            print(for_terminal(traceback.format_exc()), file=sys.stderr)
        smaller = "--batch-size or --num-answers" if "batch_size" in args else "--num-answers"
        log("error: " + user_message(error, f"try a smaller {smaller}, or --device cpu"))
        return 2


def main(arguments: list[str] | None = None) -> int:
    try:
        return answer(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        log("interrupted")
        return 130
    except BrokenPipeError:  # as `head` does when it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    # Characters that the terminal cannot show are escaped; bytes of stdin that are no text are refused later.
    if sys.stdout is None:  # as `>&-` leaves it
        log("error: stdout is closed: expected a place for the answer, such as a file or a pipe")
        sys.exit(2)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if sys.stdin is not None:
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    sys.exit(main())
