"""Chat templates of new checkpoints, written as transformers writes SmolVLM's."""

SMOLVLM_CHAT_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
# For a model that learnt images before the text: it puts them there itself, in transformers as here.
IMAGES_FIRST = SMOLVLM_CHAT_TEMPLATE.replace(
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}",
    "{% set images = message['content'] | selectattr('type', 'equalto', 'image') | list %}"
    "{{ ':' if images else ': ' }}{% for line in images %}{{ '<image>' }}{% endfor %}",
).replace("{% elif line['type'] == 'image' %}{{ '<image>' }}", "")
