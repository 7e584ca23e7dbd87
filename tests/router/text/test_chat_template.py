"""Templates render as in transformers, and cannot leave the sandbox."""

from __future__ import annotations

import sys
import threading
import time
from itertools import pairwise

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pdserve.router.text.chat_template import ChatTemplate, PromptEnd

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'."},
    {"role": "user", "content": "Größe?"},
    {"role": "assistant", "content": "東京"},
    {"role": "user", "content": "ok"},
]


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}{% endfor %}",
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n    U {{ m.content }}\n  {% endif %}\n{% endfor %}",
        "{%- for m in messages -%}{% if loop.index > 2 %}{% break %}{% endif %}{{ m | tojson }}{%- endfor -%}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{{ messages[1:] | tojson(indent=2) }}{% if add_generation_prompt %}<assistant>{% endif %}",
        "{{ strftime_now('%Y') }}",
    ],
)
def test_renders_as_transformers_does(source: str) -> None:
    rendered, _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True, bos_token="<s>")
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES) == rendered[0]


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}",
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}{{ 'A' if add_generation_prompt }}",
    ],
)
@pytest.mark.parametrize("last", ["東京 is", "  ok", "ok</user>"])
def test_continues_the_last_message_as_transformers_does(source: str, last: str) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": last}]
    rendered, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
    assert ChatTemplate(source, {}).render(messages, end=PromptEnd.LAST_MESSAGE) == rendered[0]


def test_white_space_at_the_end_of_a_continued_message_stays() -> None:
    source = "{% for m in messages %}{{ m.content | trim }}</{{ m.role }}>{% endfor %}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": " a \n"}], end=PromptEnd.LAST_MESSAGE) == "a \n"
    with pytest.raises(ValueError, match="drops the last message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(MESSAGES, end=PromptEnd.LAST_MESSAGE)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.no }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(messages[0]) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_raises_is_a_value_error(source: str) -> None:
    with pytest.raises(ValueError, match="refuses these messages"):
        ChatTemplate(source, {}).render(MESSAGES)


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "system"),
        ("{% for m in messages %}{{ 'dev' if m.role == 'developer' else m.role }}{% endfor %}", "dev"),
    ],
)
def test_a_developer_is_the_system_where_a_template_does_not_name_it(source: str, role: str) -> None:
    assert ChatTemplate(source, {}).render([{"role": "developer", "content": "x"}]) == role


def test_the_reason_of_a_template_is_told() -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render(MESSAGES)


def test_a_broken_template_names_its_line() -> None:
    with pytest.raises(ValueError, match=r"does not compile.*repair"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{{ '-' if m.content is none else m.content }}{% endfor %}", "a-"),
        ("{% for m in messages %}{{ '-' if m['content'] is not none else '+' }}{% endfor %}", "-+"),
        ("{% for m in messages %}{{ '-' if m['content'] != None else '+' }}{% endfor %}", "-+"),
        ("{% for m in messages %}{{ '-' if m.content == none else m.content }}{% endfor %}", "a-"),
        ("{% for m in messages %}[{{ m.content.strip() }}]{% endfor %}", "[a][]"),
    ],
)
def test_a_content_that_is_null_is_none_where_the_template_asks(source: str, text: str) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    assert ChatTemplate(source, {}).render(messages) == text


def test_a_text_becomes_parts_for_the_roles_whose_messages_need_them() -> None:
    parts = "{% for part in m.content if part.text %}<{{ part.text }}>{% endfor %}"
    text = "[{{ m.content }}]"
    source = f"{{% for m in messages %}}{{% if m.role == 'user' %}}{parts}{{% else %}}{text}{{% endif %}}{{% endfor %}}"
    messages: list[dict[str, object]] = [{"role": role, "content": "Hi"} for role in ("system", "user", "assistant")]
    assert ChatTemplate(source, {}).render(messages) == "[Hi]<Hi>[Hi]"


def test_an_answer_may_continue_a_message_without_content() -> None:
    template = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}", {})
    messages: list[dict[str, object]] = [{"role": "assistant", "content": None}]
    assert template.render(messages, end=PromptEnd.LAST_MESSAGE) == "["


def longest_hold() -> float:
    """Longest part of a long conversation's rendering, in CPU time, in which no other thread had a turn."""
    template = ChatTemplate("{% for message in messages %}{{ message['content'] }}{% endfor %}", {})
    messages = [{"role": "user", "content": "x" * 2**20}] * 64
    ended_s, is_left = list[float](), threading.Event()

    def render() -> None:
        template.render(messages)
        ended_s.append(time.thread_time())
        is_left.wait()  # its clock ends with it

    thread = threading.Thread(target=render)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    turns_s = [0.0]
    while not ended_s:
        turns_s.append(time.clock_gettime(clock))
        time.sleep(0)
    is_left.set()
    thread.join()
    return max(after_s - before_s for before_s, after_s in pairwise(turns_s + ended_s)) / ended_s[0]


def test_other_threads_run_while_a_long_conversation_is_rendered() -> None:
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        assert any(longest_hold() < 0.5 for _ in range(20))  # on a busy host, others get no turn at times
    finally:
        sys.setswitchinterval(before_s)
