"""A checkpoint's chat template, rendered where it can do no harm.

Jinja's sandbox keeps a template from reaching Python, and nothing keeps it from three nested loops or from
doubling a string forty times. So a template that is not one of ours is rendered by a process of its own,
which has bounded memory and, for each conversation, bounded processor time: past either it is ended, and the
next conversation gets a new one. That process starts with the first conversation, is given no environment but
paths, and talks in lines of JSON.

    text = TemplateProcess(template).render({"messages": [...], "add_generation_prompt": True})
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from datetime import datetime
from functools import cache
from typing import Any

MEMORY, SECONDS = 512 * 2**20, 2.0  # of the process, and of its processor's time for one conversation
LONGEST_TEMPLATE, LONGEST_RESULT = 2**20, 2**20  # characters; texts are put in later
_COMPILED: dict[str, Any] = {}  # of this repository's templates


class TemplateRefused(Exception):
    """Why a conversation could not be rendered, in a few words."""


class TemplateProcess:
    """Renders one template. Any number of threads may ask; a fork, or a copy, begins a process of its own."""

    def __init__(self, template: str):
        if len(template) > LONGEST_TEMPLATE:
            raise TemplateRefused(f"it has {len(template)} characters, at most {LONGEST_TEMPLATE} are read")
        self.template = template
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = 0

    def __reduce__(self):
        return type(self), (self.template,)

    def render(self, variables: dict[str, Any]) -> str:
        """What the template makes of these variables (JSON's types only).

        Raises:
            TemplateRefused: the template's own refusal, a mistake in it, or too much time, memory or text.
        """
        question = json.dumps({"template": self.template, "variables": variables}).encode() + b"\n"
        with self._lock:
            process = self._running()
            assert process.stdin is not None and process.stdout is not None, "opened with pipes"
            try:
                process.stdin.write(question)
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
            if not line:
                process.wait()
                raise TemplateRefused(
                    f"it takes more than {SECONDS:g} s or {MEMORY // 2**20} MiB for one conversation"
                )
        answer = json.loads(line)
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        return answer["text"]

    def _running(self) -> subprocess.Popen:
        if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
            command = [sys.executable, "-P", __file__]
            environment = {
                name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ
            }
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, close_fds=True
            )
            self._owner = os.getpid()
            weakref.finalize(self, _end, self._process, self._owner)
        return self._process


def _end(process: subprocess.Popen, owner: int) -> None:
    """A fork that forgets its copy leaves the process to whom it belongs."""
    if os.getpid() == owner:
        process.kill()
        process.communicate()


def render(template: str, variables: dict[str, Any]) -> str:
    """What a template of this repository makes of these variables, in this process and without limits.

    Raises:
        TemplateRefused: the template's own refusal, or a mistake in it.
    """
    made = answer({"template": template, "variables": variables}, environment(), _COMPILED)
    if "refused" in made:
        raise TemplateRefused(made["refused"])
    return made["text"]


# ------------------------------------------------------------------------------------- inside the process
@cache
def environment():
    """The sandbox that transformers renders chat templates in, with the same names in it."""
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """`{% generation %}` marks what an assistant says; here it only stands around it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message):
        raise TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox


def answer(question: dict[str, Any], sandbox, compiled: dict[str, Any]) -> dict[str, str]:
    try:
        template = question["template"]
        if template not in compiled:
            compiled[template] = sandbox.from_string(template)
        text = compiled[template].render(**question["variables"])
    except Exception as error:  # a template raises anything
        return {"refused": " ".join(str(error).split())[:200] or type(error).__name__}
    if len(text) > LONGEST_RESULT:
        return {"refused": f"it makes {len(text)} characters, at most {LONGEST_RESULT} are read"}
    return {"text": text}


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever asked
    sandbox, compiled = environment(), {}
    for line in sys.stdin.buffer:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # which ends the process, whatever it is doing
        reply = json.dumps(answer(question, sandbox, compiled))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(reply, flush=True)


if __name__ == "__main__":
    main()
