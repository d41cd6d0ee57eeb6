"""R7: chat templates of strangers. What real ones do renders as in plain jinja; what none does is refused."""

from __future__ import annotations

import contextlib
import copy
import json
import resource
import time
from typing import Any

import pytest
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shardwise.tokenizer.meter import MAX_CHARS, MAX_STEPS
from shardwise.tokenizer.template import MAX_SAID, Template
from tests.tokenizer.templates import CHATML, CHATS, TEMPLATES, TOOLS


def plain(source: str, **values: Any) -> str:
    """Jinja's own sandbox, with what transformers gives templates."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment.globals["raise_exception"] = refuse
    return environment.from_string(source).render(**values)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_in_the_manner_of_real_ones(name: str, chat: str) -> None:
    """Guards against a sandbox that honest templates don't fit: loops, macros, namespaces, slices, filters, tools."""
    source = TEMPLATES[name]
    given = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    for tools in (TOOLS, None):
        values: dict[str, Any] = {**given, "tools": tools, "documents": None, "messages": CHATS[chat]}
        template = Template(source)
        try:
            wanted = plain(source, **copy.deepcopy(values))
        except Exception:
            with pytest.raises(ValueError, match="chat template"):
                template.render(**values)
            continue
        assert template.render(**values) == wanted
        assert len(wanted) > 20


def test_most_of_them_render() -> None:
    """Guards the test above against comparing nothing but refusals."""
    found = 0
    for source in TEMPLATES.values():
        for messages in CHATS.values():
            template = Template(source)
            with contextlib.suppress(ValueError):
                found += bool(template.render(messages, tools=TOOLS, bos_token="", eos_token=""))
    assert found >= 22


EXPRESSIONS = [
    "{{ none }}{{ true }}{{ [1, 'a', {'b': none}] }}{{ (1,) }}{{ 1.5 }}",
    "{{ -2 ** 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 7 / 2 }}{{ 'ab' * 2 }}{{ [1] * 2 + [3] }}",
    "{{ '%s-%d' % ('a', 3) }}{{ '%05.1f' | format(2.25) }}{{ '100%%' % () }}",
    "{{ 'a,b'.split(',') | join(';') }}{{ '-'.join(['x', 'y']) }}{{ 'aXbX'.replace('X', 'yy', 1) }}",
    "{{ x | default('d') }}{{ messages | length }}{{ messages[0] | items | list }}{{ messages[-1].role | title }}",
    "{{ [3, 1, 2] | sort }}{{ [3, 1] | max }}{{ [1, 1] | unique | list }}{{ {'b': 1, 'a': 2} | dictsort }}",
    "{{ messages | rejectattr('role', 'equalto', 'user') | list | length }}{{ [1, 2] | select('odd') | list }}",
    "{% macro f(a, b=2) %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1, 3, 4, z=5) }}",
    "{% macro f() %}<{{ caller(1) }}>{% endmacro %}{% call(x) f() %}{{ x }}{% endcall %}",
    "{% set x %}abc{% endset %}{{ x | upper }}{% filter upper %}a{% endfilter %}{% with y = 3 %}{{ y }}{% endwith %}",
    "{% for i in range(3) %}{{ loop.cycle('a', 'b') }}{{ loop.changed(i) }}{{ loop.revindex }}{% endfor %}",
    "{% for a, b in {'x': 1}.items() %}{{ a ~ b ~ none }}{% else %}no{% endfor %}{% for i in nothing %}{% endfor %}",
    "{% for i in [[1, [2]], 3] recursive %}{{ loop(i) if i is sequence else i }}{% endfor %}",
    "{% for i in range(9) if i is divisibleby 2 %}{% if i > 5 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ 'x' in 'axb' }}{{ 'role' in messages[0] }}{{ 1 in [1] }}{{ 1 == 1.0 }}{{ messages == messages }}",
    "{{ 3 > 2 > 1 }}{{ not x }}{{ 1 if x else 2 }}",
    "{{ messages[0].content[::-1] }}{{ messages[:1] | length }}{{ 'abc'[1] }}{{ messages[0]['missing'] }}|{{ x.y.z }}",
    "{{ ns.a }}{{ '<a>' | e }}{{ '<a>' | safe }}{{ ' a ' | trim }}{{ '3' | int + 1 }}{{ ['a', 'b'] | first }}",
    "{{ 'a\nb' | indent(2) }}{{ 'a\nb' | indent('> ', true) }}{{ dict(a=1) }}",
    "{{ messages | map(attribute='role') | list }}",
]


@pytest.mark.parametrize("source", EXPRESSIONS)
def test_expressions_mean_what_they_do_in_jinja(source: str) -> None:
    """Guards against filters and operators of our own that give something else."""
    messages = [{"role": "user", "content": "hey"}, {"role": "assistant", "content": "x"}]
    for values in ({"messages": messages}, {"messages": messages, "x": {"y": {"z": 1}}, "ns": {"a": "b"}}):
        try:
            wanted = plain(source, **copy.deepcopy(values))
        except Exception:
            with pytest.raises(ValueError, match="chat template"):
                Template(source).render(**values)
        else:
            assert Template(source).render(**values) == wanted


ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''['__cla' + 'ss__'] }}",
    "{{ ''['__cla' ~ 'ss__'] }}",
    "{{ ''['__ssalc__'[::-1]] }}",
    "{{ ''['%s' % '__class__'] }}",
    "{{ ''[['__class', '__'] | join] }}",
    "{{ ''|attr('__class__') }}",
    "{{ ''|attr('\\x5f\\x5fclass\\x5f\\x5f') }}",
    "{{ ''['\\x5f\\x5fclass\\x5f\\x5f'] }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ messages|map(attribute='content.__class__')|list }}",
    "{{ messages|map('attr', '__class__')|list }}",
    "{{ messages|selectattr('__class__')|list }}",
    "{{ messages|sort(attribute='__class__') }}",
    "{{ messages|join(attribute='__class__') }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ lipsum() }}",
    "{{ joiner()() }}",
    "{{ self.__init__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ self }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception['__globals__'] }}",
    "{{ raise_exception }}",
    "{{ range.__class__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(a=1)._Namespace__attrs }}",
    "{{ dict.__base__ }}",
    "{{ dict.fromkeys([1]) }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{{ ('{0.__class__}'|safe).format('') }}",
    "{{ ('a'|e).format.__self__ }}",
    "{% macro f() %}{% endmacro %}{{ f.__class__ }}",
    "{% macro f() %}{% endmacro %}{{ f._func }}",
    "{% macro f() %}{% endmacro %}{{ f._environment }}",
    "{% for x in messages %}{{ loop.__class__ }}{% endfor %}",
    "{% for x in messages %}{{ loop._iterable }}{% endfor %}",
    "{{ nothing.__class__ }}",
    "{{ (nothing or 1).real.__class__ }}",
    "{{ nothing._fail_with_undefined_error() }}",
    "{{ messages.append(1) }}",
    "{{ messages.clear() }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set _ = messages[0].pop('role') %}",
    "{{ messages[0].__setitem__('role', 'x') }}",
    "{{ 'x'.encode() }}",
    "{{ 'x'.maketrans('a', 'b') }}",
    "{{ messages | pprint }}",
    "{{ messages | xmlattr }}",
    "{{ 'a' is callable }}",
    "{% include 'other' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import popen %}",
    "{% extends 'other' %}",
    "{% block a %}{% endblock %}",
    "{{ self.a() }}{% block a %}{% endblock %}",
    "{{ caller.__globals__ }}",
    "{{ [raise_exception] | tojson }}",
    "{{ strftime_now('%1000000d') }}",
    "{{ [-1000] | map(' step') | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_ways_out_are_refused(source: str) -> None:
    """R7: guards against a template that reaches anything but text, or changes what it is given."""
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="chat template") as caught:
        Template(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]
    assert "0x" not in str(caught.value)
    assert len(str(caught.value)) < MAX_SAID + 100


GROW = "{% set ns = namespace(x=START, y=START) %}{% for i in range(60) %}STEP{% endfor %}END"


def growing(start: str, step: str, end: str) -> str:
    return GROW.replace("START", start).replace("STEP", step).replace("END", end)


PAIRS = "{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}"
TUPLES = "{% set ns.x = (ns.x, ns.x) %}"
LARGE = "{% set b = 'ab' * 4000000 %}{% for i in range(99999) %}"
BOMBS = [
    "{{ 'x' * 10**9 }}",
    "{{ 10**9 * 'x' }}",
    "{{ [1] * 10**9 }}",
    "{{ (1,) * 10**9 }}",
    "{{ [[1] * 10000] * 10000 }}",
    "{{ 2 ** (10 ** 8) }}",
    "{{ 9 ** 64 ** 64 ** 64 }}",
    "{{ 1.5 ** 1000000 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%.1000000000f' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%(a)1000000000d' % {'a': 1} }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '%1000000000d' is divisibleby(1) }}",
    "{{ '%1000000000d' is odd }}",
    "{{ ('%999d' * 100000) % () }}",
    "{{ 'x' | center(10**9) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ 'x'.ljust(10**9) }}",
    "{{ 'x'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ 'x' | indent(10**9) }}",
    "{{ ('\n' * 10**6) | indent(64, true, true) }}",
    "{{ ('x' * 1000) | replace('x', 'y' * 100000) }}",
    "{{ ('x' * 1000).replace('x', 'y' * 100000) }}",
    "{{ ('x' * 1000).replace('', 'y' * 100000) }}",
    "{{ ('x' * 100000).join(['a'] * 1000) }}",
    "{{ (['a'] * 1000) | join('x' * 100000) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ [1] | tojson(indent=10**9) }}",
    "{{ [1, 2] | tojson(separators=('x' * 10**6, 'y')) }}",
    "{{ [1] | batch(10**9, 0) | list }}",
    "{{ [1] | slice(10**9) | list }}",
    "{{ 1 | round(10**9) }}",
    "{{ range(10**9) | list }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ loop.length }}{% break %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) if false %}{% endfor %}" * 30,
    "{% for a in range(99999) %}{{ 'y' * 1000 }}{% endfor %}",
    "{% macro f() %}{% for a in range(99999) %}{{ 'y' * 9000 }}{% endfor %}{% endmacro %}{% set x = f() %}",
    "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    growing("'a'", "{% set ns.x = ns.x ~ ns.x %}", ""),
    growing("'a'", "{% set ns.x = ns.x + ns.x %}", ""),
    growing("'a'", "{% set ns.x = [ns.x, ns.x] | join %}", ""),
    growing("'a'", "{% set ns.x = '%s%s' % (ns.x, ns.x) %}", ""),
    growing("[1]", "{% set ns.x = ns.x + ns.x %}", ""),
    growing("2", "{% set ns.x = ns.x * ns.x %}", ""),
    growing("[1]", PAIRS, "{{ ns.x }}"),
    growing("[1]", PAIRS, "{{ ns.x | tojson }}"),
    growing("[1]", PAIRS, "{{ ns.x | string | length }}"),
    growing("[1]", PAIRS, "{{ ns.x == ns.y }}"),
    growing("[1]", PAIRS, "{{ ns.x in [ns.y] }}"),
    growing("[1]", PAIRS, "{{ [ns.x].index(ns.y) }}"),
    growing("[1]", PAIRS, "{{ [ns.x, ns.y] | sort }}"),
    growing("[1]", PAIRS, "{{ ns.x is eq(ns.y) }}"),
    growing("[1]", PAIRS, "{{ '%s' % [ns.x] }}"),
    growing("(1,)", TUPLES, "{{ {ns.x: 1} | length }}"),
    growing("(1,)", TUPLES, "{{ {}[ns.x] }}"),
    growing("(1,)", TUPLES, "{{ {}.get(ns.x) }}"),
    growing("(1,)", TUPLES, "{{ ns.x in {} }}"),
    growing("(1,)", TUPLES, "{{ [ns.x] | unique | list }}"),
    growing("1", "{% set ns.x = namespace(a=ns.x, b=ns.x) %}", "{{ ns.x }}"),
    LARGE + "{{ 'xy' in b }}{% endfor %}",
    LARGE + "{{ b.count('b') }}{% endfor %}",
    LARGE + "{{ b[1:] | length }}{% endfor %}",
    LARGE + "{{ b.find('c') }}{% endfor %}",
    LARGE + "{{ b | upper | length }}{% endfor %}",
    "{{ ('a ' * 4000000).split() | length }}",
    "{{ ('a' * 4000000).strip('b' * 4000000) }}",
    "{{ ('a' * 4000000) | trim('b' * 4000000) }}",
    "{{ ('a' * 8000000) | list | length }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{{ " + "-" * 20000 + "1 }}",
    "{% if x %}" * 2000 + "{% endif %}" * 2000,
    "a" * 2**19,
]


@pytest.mark.parametrize("source", BOMBS, ids=range(len(BOMBS)))
def test_bombs_are_refused(source: str) -> None:
    """R7: guards against a template that takes a worker's time or the machine's memory, in Python or below it."""
    held, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(ValueError, match="chat template"):
        Template(source).render([{"role": "user", "content": "x"}])
    assert time.thread_time() - began < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 400 * 1024


@pytest.mark.parametrize("name", TEMPLATES)
def test_long_chats_are_no_bombs(name: str) -> None:
    """Guards against a budget that honest conversations exhaust: a thousand messages, or two of two million letters."""
    template = Template(TEMPLATES[name])
    roles = ("user", "assistant")
    given = {"bos_token": "", "eos_token": "", "add_generation_prompt": True}
    many = [{"role": roles[at % 2], "content": f"message {at}"} for at in range(1000)]
    assert "message 999" in template.render(many, **given)
    large = [{"role": roles[at % 2], "content": "word " * 400_000} for at in range(2)]
    assert len(template.render(large, **given)) > 2_000_000


def test_the_budget_does_not_depend_on_the_machine() -> None:
    """Guards against a request that a quick machine answers and a slow one refuses: steps are counted, not time."""
    ends = set()
    for _ in range(2):
        template = Template("{% for a in messages[0].content %}{{ a }}{% endfor %}")
        low, high = 1, MAX_STEPS
        while low < high:
            middle = (low + high + 1) // 2
            try:
                template.render([{"content": "x" * middle}])
                low = middle
            except ValueError:
                high = middle - 1
        ends.add(low)
    assert len(ends) == 1
    assert MAX_STEPS // 10 < ends.pop() < MAX_STEPS


def test_one_template_in_many_threads() -> None:
    """Guards against a budget that renderings share: each has its own."""
    from concurrent.futures import ThreadPoolExecutor

    template = Template("{% for a in range(9000) %}{{ a % 7 }}{% endfor %}")
    with ThreadPoolExecutor(8) as pool:
        texts = set(pool.map(lambda _: template.render([]), range(64)))
    assert len(texts) == 1
    assert len(texts.pop()) == 9000


def test_output_has_an_end() -> None:
    """Guards against more text than a prompt may have, written piece by piece."""
    with pytest.raises(ValueError, match=str(MAX_CHARS)):
        Template("{% for a in range(99) %}{{ messages[0].content }}{% endfor %}").render([{"content": "x" * 10**6}])


@pytest.mark.parametrize(
    "value", [object(), b"bytes", {"a": {1, 2}}, [lambda: 0]], ids=["object", "bytes", "set", "function"]
)
def test_only_plain_data_goes_in(value: Any) -> None:
    """Guards against objects of ours within a template's reach."""
    with pytest.raises(ValueError, match="plain data"):
        Template("{{ x }}").render([], x=value)


def test_what_it_reads() -> None:
    """Guards against a request's tools that a template says nothing of."""
    assert Template(CHATML).variables >= {"tools", "messages", "enable_thinking", "add_generation_prompt"}
    assert "tools" not in Template("{% set tools = 1 %}{{ tools }}{{ messages }}").variables
