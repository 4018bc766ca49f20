"""Chat templates render as in transformers, complain in their own words, and stay in their sandbox."""

from __future__ import annotations

import json
import time

import pytest
from heddle.core.text.chat_messages import normalise_messages
from heddle.core.text.chat_template import ChatTemplate, ChatTemplateError
from heddle.core.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = """{{- bos_token }}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] | trim + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
TOOLS = """{%- set ns = namespace(count=0) %}
{%- if tools %}
    {{- 'Tools: ' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- ns.count ~ ' ' ~ message.role ~ ': ' ~ message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name ~ '(' ~ (call.function.arguments | tojson) ~ ')' }}
        {%- for key, value in call.function.arguments | items %} {{ key }}={{ value }}{% endfor %}
    {%- endfor %}
{% endfor %}"""
CHATS = [
    [{"role": "user", "content": "Hi <b>&'\"</b> 世界 😀"}],
    [
        {"role": "user", "content": " a "},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "b"},
    ],
    [{"role": "user", "content": "x"}] * 1 + [{"role": "assistant", "content": "y\n"}],
]
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "città": "<é>"}},
}


@pytest.mark.parametrize("template", [CHATML, STRICT, TOOLS], ids=["chatml", "strict", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [WEATHER]])
@pytest.mark.parametrize("chat", CHATS)
def test_rendering_equals_that_of_transformers(model_folder, template, prompt, tools, chat):
    from transformers import AutoTokenizer

    folder = model_folder("byte-level", chat_template=template)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    assert Tokenizer.load(folder).render_chat(chat, tools=tools, add_generation_prompt=prompt) == expected


def test_tool_calls_render_as_in_transformers_with_their_arguments_as_values(model_folder):
    from transformers import AutoTokenizer

    folder = model_folder("byte-level", chat_template=TOOLS)
    arguments = {"city": "Zürich", "days": 3}
    call = {"type": "function", "id": "1", "function": {"name": "weather", "arguments": arguments}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, tools=[WEATHER], tokenize=False
    )
    call["function"]["arguments"] = json.dumps(arguments)
    chat[1]["content"] = None
    rendered = Tokenizer.load(folder).render_chat(chat, tools=[WEATHER], add_generation_prompt=False)
    assert rendered == expected
    assert "city=Zürich" in rendered


def test_the_demo_base_renders_as_in_transformers(demo_base):
    from transformers import AutoTokenizer

    expected, tokenizer = AutoTokenizer.from_pretrained(demo_base), Tokenizer.load(demo_base)
    system = {"role": "system", "content": "Be brief."}
    for chat in [*CHATS, [system, *CHATS[0]]]:
        text = expected.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.render_chat(chat) == text
        assert (
            tokenizer.encode_chat(chat)
            == expected.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        )


def test_the_template_complains_in_its_own_words(model_folder):
    tokenizer = Tokenizer.load(model_folder("byte-level", chat_template=STRICT))
    user = {"role": "user", "content": "a"}
    with pytest.raises(ChatTemplateError) as two_users:
        tokenizer.render_chat([user, user])
    assert str(two_users.value) == "Conversation roles must alternate user/assistant/user/assistant/..."
    with pytest.raises(ChatTemplateError) as unknown:
        tokenizer.render_chat([user, {"role": "narrator", "content": "b"}])
    assert str(unknown.value) == "Only user and assistant roles are supported!"


def test_a_model_without_a_template_says_so(model_folder):
    tokenizer = Tokenizer.load(model_folder("byte-level"))
    assert tokenizer.chat_template is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([{"role": "user", "content": "a"}])
    assert tokenizer.encode("a")


@pytest.mark.parametrize(
    "body", ["{{ messages[9].role }}", "{{ messages[0].content + 3 }}", "{{ 1 / 0 }}", "{{ nosuch() }}"]
)
def test_a_template_that_fails_is_an_error_of_the_request(body):
    with pytest.raises(ChatTemplateError, match="chat template failed"):
        ChatTemplate({"default": body}, {}).render([{"role": "user", "content": "a"}])


def test_named_templates_are_chosen_as_in_transformers(model_folder):
    from transformers import AutoTokenizer

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    folder = model_folder("byte-level", chat_template=named)
    expected, tokenizer = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for tools in (None, [WEATHER]):
        text = expected.apply_chat_template(CHATS[0], tools=tools, tokenize=False)
        assert tokenizer.render_chat(CHATS[0], tools=tools) == text
    odd = Tokenizer.load(model_folder("byte-level", chat_template=[{"name": "rag", "template": "x"}]))
    with pytest.raises(ChatTemplateError, match="rag"):
        odd.render_chat(CHATS[0])


def test_a_template_file_counts_before_the_configuration(model_folder):
    folder = model_folder("byte-level", chat_template="old")
    (folder / "chat_template.jinja").write_text("new {{ eos_token }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.render_chat(CHATS[0]) == "new </s>"
    assert tokenizer.render_chat(CHATS[0], tools=[WEATHER]) == "tools"


def test_template_arguments_reach_the_template_but_replace_nothing():
    template = ChatTemplate({"default": "{{ thinking }}{{ bos_token }}"}, {"bos_token": "<s>"})
    assert template.render(CHATS[0], template_kwargs={"thinking": "on"}) == "on<s>"
    for name in ("messages", "bos_token", "add_generation_prompt"):
        with pytest.raises(ChatTemplateError, match=name) as error:
            template.render(CHATS[0], template_kwargs={name: 1})
        assert error.value.param == "chat_template_kwargs"


def test_the_time_is_what_the_template_asks_for():
    template = ChatTemplate({"default": "{{ strftime_now('%Y-%m-%d') }}"}, {})
    days = {time.strftime("%Y-%m-%d")}
    rendered = template.render(CHATS[0])
    assert rendered in days | {time.strftime("%Y-%m-%d")}


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for m in messages %}{{ m.update(role='x') }}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 99999999 }}",
        "{% for i in range(1000000) %}{% endfor %}",
        "{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}",
    ],
)
def test_a_hostile_template_is_stopped(attack):
    started = time.monotonic()
    with pytest.raises(ChatTemplateError):
        ChatTemplate({"default": attack}, {}).render(CHATS[0])
    assert time.monotonic() - started < 5


CALLING = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_kept_for_every_role_also_in_the_last_turn(role):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answers = {"tool_call_id": "1"} if role == "tool" else {}
    chat = normalise_messages([CALLING, {"role": role, "content": parts, **answers}])
    assert chat[1] == {"role": role, "content": "a\nb", **answers}
    rendered = ChatTemplate({"default": CHATML}, {}).render(chat, add_generation_prompt=False)
    assert rendered.endswith(f"{role}\na\nb<|im_end|>\n")


def test_empty_content_is_accepted_and_empty():
    assert normalise_messages([{"role": "user", "content": ""}]) == [{"role": "user", "content": ""}]
    assert normalise_messages([{"role": "user", "content": []}]) == [{"role": "user", "content": ""}]


def test_null_content_is_accepted_beside_tool_calls_of_an_assistant_alone():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in ({"content": None}, {}):
        [message] = normalise_messages([{"role": "assistant", "tool_calls": [call], **content}])
        assert message["content"] == ""
        assert message["tool_calls"][0]["function"]["arguments"] == {}
        for wrong in ({"role": "assistant"}, {"role": "user"}, {"role": "user", "tool_calls": [call]}):
            with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.(content|tool_calls) "):
                normalise_messages([{**wrong, **content}])


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url"])
def test_a_part_that_is_no_text_is_refused_by_name(kind):
    parts = [{"type": "text", "text": "look"}, {"type": kind, kind: {"url": "data:"}}]
    with pytest.raises(ChatTemplateError, match=rf"messages\[0\]\.content\[1\].*'{kind}'"):
        normalise_messages([{"role": "user", "content": parts}])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["hello"],
        [{"content": "no role"}],
        [{"role": 3, "content": "a"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [3]}],
        [{"role": "assistant", "content": "", "tool_calls": "f"}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_malformed_messages_are_refused(messages):
    with pytest.raises(ChatTemplateError, match="messages") as error:
        normalise_messages(messages)
    assert error.value.param == "messages"


def test_the_caller_s_messages_are_not_changed():
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = json.dumps(messages)
    normalise_messages(messages)
    assert json.dumps(messages) == before


KNOWN = (
    "{% for m in messages %}{% if m.role in ['system', 'user'] %}"
    "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "role"),
    [(KNOWN, "system"), (CHATML, "system"), (KNOWN.replace("'user'", "'user', 'developer'"), "developer")],
)
def test_a_developers_message_is_a_systems_where_the_template_knows_no_developers(template, role):
    messages = [{"role": "developer", "content": "In French."}, {"role": "user", "content": "Hi"}]
    rendered = ChatTemplate({"default": template}, {}).render(messages)
    assert rendered == ChatTemplate({"default": template}, {}).render(
        [{**messages[0], "role": role}, messages[1]]
    )
    assert "In French." in rendered
    assert role in rendered
