# ruff: noqa: E501 (templates are read more easily uncut)
"""Hand-written equivalents of the forms that models for agents are published with: what they write, refuse and rewrite."""

_ARGUMENTS = "{% for k, v in c.function.arguments | items %}"
QWEN35 = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% endif %}"
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}{{ '\n</tools>\nCall a function as <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>' }}"
    "{% if first %}{{ '\n\n' + first }}{% endif %}{{ '<|im_end|>\n' }}{% elif first %}{{ '<|im_start|>system\n' + first + '<|im_end|>\n' }}{% endif %}"
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% elif m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
    + _ARGUMENTS
    + "{{ '<parameter=' + k + '>\n' }}{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% elif m.role == 'tool' %}{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}{% else %}{{ raise_exception('Unexpected message role.') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
"""Like Qwen3.5: a system message anywhere but first is refused; reasoning is written after the last question only."""
GPT_OSS = (
    "{{ '<|start|>system<|message|>You are a model.\nReasoning: medium\n# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{% if messages[0].role in ('system', 'developer') %}{% set first = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% if first or tools %}{{ '<|start|>developer<|message|>' }}{% if first %}{{ '# Instructions\n\n' + first + '\n\n' }}{% endif %}"
    "{% if tools %}{{ '# Tools\n\nnamespace functions {\n' }}{% for t in tools %}{{ '// ' + t.function.description + '\ntype ' + t.function.name + ' = (_: ' }}{{ t.function.parameters.properties | tojson }}{{ ') => any;\n' }}{% endfor %}{{ '}' }}{% endif %}{{ '<|end|>' }}{% endif %}"
    "{% set ns = namespace(name='', final=-1) %}{% for m in rest %}{% if m.role == 'assistant' and not m.tool_calls %}{% set ns.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in rest %}"
    "{% if m.role == 'assistant' and m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{% set thought = m.thinking or m.content %}{% if thought and loop.index0 > ns.final %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + thought + '<|end|>' }}{% endif %}"
    "{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}{{ '<|start|>assistant to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}{{ c.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{% elif m.role == 'tool' %}{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}{{ m.content | tojson }}{{ '<|end|>' }}"
    "{% elif m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""Like gpt-oss (harmony): system messages behind the first one are not written; reasoning before an earlier answer neither."""
MINIMAX = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set rest = messages[1:] %}{% else %}{% set first = 'You are helpful.' %}{% set rest = messages %}{% endif %}"
    "{{ ']~!b[]~b]system\n' + first }}{% if tools %}{{ '\n\n# Tools\n<tools>' }}{% for t in tools %}{{ '\n<tool>' }}{{ t.function | tojson }}{{ '</tool>' }}{% endfor %}{{ '\n</tools>\nCall as <minimax:tool_call>\n<invoke name=\"name\">\n<parameter name=\"key\">value</parameter>\n</invoke>\n</minimax:tool_call>' }}{% endif %}{{ '[e~[\n' }}"
    "{% set ns = namespace(last=-1) %}{% for m in rest %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ ']~b]user\n' + m.content + '[e~[\n' }}"
    "{% elif m.role == 'assistant' %}{{ ']~b]ai\n' }}{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}{{ '\n<minimax:tool_call>\n' }}{% for c in m.tool_calls %}{{ '<invoke name=\"' + c.function.name + '\">\n' }}"
    + _ARGUMENTS
    + "{{ '<parameter name=\"' + k + '\">' }}{{ v if v is string else v | tojson }}{{ '</parameter>\n' }}{% endfor %}{{ '</invoke>\n' }}{% endfor %}{{ '</minimax:tool_call>' }}{% endif %}{{ '[e~[\n' }}"
    "{% elif m.role == 'tool' %}{% if loop.first or rest[loop.index0 - 1].role != 'tool' %}{{ ']~b]tool' }}{% endif %}{{ '\n<response>' + m.content + '</response>' }}{% if loop.last or rest[loop.index0 + 1].role != 'tool' %}{{ '[e~[\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}"
)
"""Like MiniMax M2: system messages behind the first one are not written."""
MISTRAL_SMALL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% set ns = namespace(index=0) %}{% for m in rest %}{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('After the optional system message, conversation roles must alternate user and assistant') }}{% endif %}{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}{{ m.content or '' }}{% for c in m.tool_calls %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}{{ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('Only user, assistant, system and tool roles are supported!') }}{% endif %}{% endfor %}"
)
"""Like Mistral Small 3.2: the roles of questions and answers alternate, and a later system message is refused."""
DEEPSEEK_V4 = (
    "{% set ns = namespace(system='', last=-1) %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = ns.system + ('\n\n' if ns.system else '') + m.content %}{% elif m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{{ bos_token + ns.system }}{% if tools %}{{ '\n\n## Tools\n' }}{% for t in tools %}{{ t.function | tojson }}{{ '\n' }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|Assistant|>' }}{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% else %}{{ '</think>' }}{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<invoke name=\"' + c.function.name + '\">' }}"
    + _ARGUMENTS
    + "{{ '<parameter name=\"' + k + '\">' }}{{ v if v is string else v | tojson }}{{ '</parameter>' }}{% endfor %}{{ '</invoke>' }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'tool' %}{{ '<tool_result>' + m.content + '</tool_result>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|Assistant|><think>' }}{% endif %}"
)
"""Like DeepSeek V4: the template itself collects all system messages at the top."""
ALL = {
    name: source for name, source in globals().items() if name.isupper() and name != "ALL" and name[0] != "_"
}
