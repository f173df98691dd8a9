"""Small random checkpoints whose templates know tools, each in its family's markup."""

from __future__ import annotations

from pathlib import Path

from tests import gemma4_checkpoints, lfm2_checkpoints, qwen_checkpoints

_PARTS = """\
{%- macro said(message) %}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- IMAGE }}{%- else %}{{- part.text }}{% endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
"""
_SAID = """\
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + said(messages[0]) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|im_start|>user\\n' + said(message) + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
"""
_RESULT = """\
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + said(message) + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
"""
_START = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}\n"
_QWEN_IMAGE = "'<|vision_start|><|image_pad|><|vision_end|>'"

HERMES = (
    _PARTS.replace("IMAGE", _QWEN_IMAGE)
    + """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- said(messages[0]) + '\\n\\n' }}{% endif %}
{{- 'Functions:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
{{- '\\n</tools>\\nA call:\\n<tool_call>\\n{"name": NAME, "arguments": {}}\\n</tool_call><|im_end|>\\n' }}
"""
    + _SAID
    + """\
{{- '<|im_start|>assistant\\n' + said(message) }}
{%- for call in message.tool_calls or [] %}
{%- if (loop.first and message.content) or not loop.first %}{{- '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""
    + _RESULT
    + "{%- endif %}\n{%- endfor %}\n"
    + _START
)

XML = (
    _PARTS.replace("IMAGE", _QWEN_IMAGE)
    + """\
{%- if tools %}
{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
{{- '\\n</tools>\\n<tool_call>\\n<function=NAME>\\n<parameter=P>\\nvalue\\n</parameter>\\n' }}
{{- '</function>\\n</tool_call>' }}
{%- if messages[0].role == 'system' %}{{- '\\n\\n' + said(messages[0]) | trim }}{% endif %}
{{- '<|im_end|>\\n' }}
"""
    + _SAID
    + """\
{{- '<|im_start|>assistant\\n' + said(message) | trim }}
{%- for call in message.tool_calls or [] %}
{{- '\\n\\n' if loop.first and said(message) | trim else '' if loop.first else '\\n' }}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{{- value if value is string else value | tojson }}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
"""
    + _RESULT
    + "{%- endif %}\n{%- endfor %}\n"
    + _START
)

PYTHONIC = (
    _PARTS.replace("IMAGE", "'<image>'")
    + """\
{%- macro written(value) %}
{%- if value is string %}{{- "'" + value + "'" }}
{%- elif value is mapping %}{{- value | tojson }}
{%- else %}{{- value | string }}{% endif %}
{%- endmacro %}
{%- set system = said(messages[0]) if messages[0].role == 'system' else '' %}
{%- if tools %}
{%- set system = system + ('\\n\\n' if system else '') + 'List of tools: <|tool_list_start|>' %}
{%- set system = system + tools | tojson + '<|tool_list_end|>' %}
{%- endif %}
{%- if system %}{{- '<|im_start|>system\\n' + system + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages if message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'tool' %}{{- '<|tool_response_start|>' + said(message) + '<|tool_response_end|>' }}
{%- else %}{{- said(message) }}{% endif %}
{%- if message.tool_calls %}
{{- '<|tool_call_start|>[' }}
{%- for call in message.tool_calls %}
{{- call.function.name + '(' }}
{%- for name, value in call.function.arguments.items() %}
{{- name + '=' + written(value) + (', ' if not loop.last else '') }}
{%- endfor %}
{{- ')' + (', ' if not loop.last else '') }}
{%- endfor %}
{{- ']<|tool_call_end|>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
"""
    + _START
)

GEMMA = (
    _PARTS.replace("IMAGE", "'\\n\\n<|image|>\\n\\n'")
    + """\
{%- macro written(value) %}
{%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
{%- elif value is boolean %}{{- 'true' if value else 'false' }}
{%- elif value is mapping %}{{- '{' + fields(value) + '}' }}
{%- elif value is sequence %}
{{- '[' }}{% for one in value %}{{- written(one) + (',' if not loop.last else '') }}{% endfor %}{{- ']' }}
{%- else %}{{- value }}{% endif %}
{%- endmacro %}
{%- macro fields(value) %}
{%- for name, one in value | dictsort %}
{{- name + ':' + written(one) + (',' if not loop.last else '') }}
{%- endfor %}
{%- endmacro %}
{%- set system = said(messages[0]) if messages[0].role == 'system' else '' %}
{{- bos_token }}
{%- if tools or system %}
{{- '<|turn>system\\n' + system }}
{%- for tool in tools or [] %}
{{- '<|tool>declaration:' + tool.function.name + '{description:' }}
{{- written(tool.function.description or '') + ',parameters:' + written(tool.function.parameters or {}) }}
{{- '}<tool|>' }}
{%- endfor %}
{{- '<turn|>\\n' }}
{%- endif %}
{%- set calls = namespace(names={}, last='') %}
{%- for message in messages if message.role != 'system' %}
{%- if message.role == 'tool' %}
{{- '<|tool_response>response:' + calls.names.get(message.tool_call_id, 'unknown') + '{value:' }}
{{- written(said(message)) + '}<tool_response|>' }}
{%- else %}
{{- '<turn|>\\n' if calls.last == 'tool' }}
{{- '<|turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + said(message) }}
{%- for call in message.tool_calls or [] %}
{%- set calls.names = dict(calls.names, **{call.id: call.function.name}) %}
{{- '<|tool_call>call:' + call.function.name + '{' + fields(call.function.arguments) + '}<tool_call|>' }}
{%- endfor %}
{{- '<turn|>\\n' if not message.tool_calls }}
{%- endif %}
{%- set calls.last = message.role %}
{%- endfor %}
{%- if add_generation_prompt and calls.last != 'tool' %}{{- '<|turn>model\\n' }}{% endif %}
"""
)

TEMPLATES = {"hermes": HERMES, "xml": XML, "pythonic": PYTHONIC, "gemma": GEMMA}
FAMILIES = {"hermes": "qwen3_vl", "xml": "qwen3_5", "pythonic": "lfm2", "gemma": "gemma4"}
LFM2_MARKS = [f"<|tool_{what}_{side}|>" for what in ("list", "call", "response") for side in ("start", "end")]


def tokenizer(markup: str, whole: bool = True):
    """That of a family, `whole`: the marks of calls are tokens of their own."""
    if markup == "gemma" and whole:
        return gemma4_checkpoints.tokenizer()
    made = lfm2_checkpoints.tokenizer() if markup == "pythonic" else qwen_checkpoints.tokenizer()
    if markup == "pythonic":
        known = {"additional_special_tokens": LFM2_MARKS}
        made.add_special_tokens(known, replace_extra_special_tokens=False)
    elif whole:
        made.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return made


def save(folder: Path, markup: str, whole: bool = True) -> Path:
    if markup == "gemma":  # whose own tokenizer has the marks
        gemma4_checkpoints.save_hf(folder)
    else:
        if markup == "pythonic":
            lfm2_checkpoints.save_hf(folder)
        else:
            qwen_checkpoints.save_hf(FAMILIES[markup], folder)
        tokenizer(markup, whole).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES[markup])
    return folder
