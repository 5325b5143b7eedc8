"""subscribePattern: what Java's Pattern matches, or a refusal. Java itself is the oracle."""

import random
import re
import warnings

import pytest
from kafka_tools import java_clients

from kafka2pc.protocol.errors import BadOption
from kafka2pc.spark.source.pattern import to_python

NAMES = (
    *("a", "b", "ab", "aa", "aab", "abab", "A", "AB", "aB", "1", "12", "a1", "a.b", "a_b", "a-b"),
    *("topic-1", "topic-12", "Topic.1", "topic_1", "flights-2024", "flights.eu-west"),
    *("-", "z", "Z"),
)


@pytest.mark.parametrize(
    ("java", "names"),
    [
        ("flights.*", ("flights-2024", "flights.eu-west")),
        ("topic", ()),
        (r"\Qa.b\E", ("a.b",)),
        (r"\Qa.", ()),
        (r"\p{Alpha}\p{Digit}", ("a1",)),
        (r"\pL+", ("a", "b", "ab", "aa", "aab", "abab", "A", "AB", "aB", "z", "Z")),
        (r"\P{Alnum}", ("-",)),
        (r"a[\p{Punct}]b", ("a.b", "a_b", "a-b")),
        (r"topic[\w-.]+", ("topic-1", "topic-12", "topic_1")),
        (r"(?<x>ab)\k<x>\z", ("abab",)),
        (r"(a)\1\Z", ("aa",)),
        ("(?i)TOPIC-1", ("topic-1",)),
        ("(?i:a)b", ("ab",)),
        ("a*+b", ("b", "ab", "aab")),
        ("a*+a", ()),
        ("(?>a|ab)b", ("ab",)),
        ("[]a]", ("a",)),
        ("[a-c&|~]", ("a", "b")),
    ],
)
def test_what_is_translated_matches_the_same_names(java, names):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuple(n for n in NAMES if re.fullmatch(to_python(java), n)) == names


REFUSED = [
    "[a-z&&[^b]]",
    "[a[bc]]",
    "[[:alpha:]]+",
    "[a&&b]",
    "[+--]",
    r"\h",
    r"\R",
    r"\X",
    r"\v",
    r"\G",
    r"\0101",
    r"\cA",
    r"\x{61}",
    r"\N{LATIN SMALL LETTER A}",
    r"\p{IsGreek}",
    r"\p{javaLowerCase}",
    r"[\P{Alpha}]",
    r"[\Qa\E]",
    r"[\b]",
    r"\b{g}",
    r"(a)\11",
    "a(?i)b",
    "(?x) a",
    "(?u)a",
    "(?-i)a",
    "(?P<x>a)",
    "(?#note)a",
    "(a)?(?(1)b|c)",
    "a{,3}",
    "{",
    "a{x}",
    "(?<=a*)b",
    "a**",
    "(",
    "[a",
    "ä",
]


@pytest.mark.parametrize("java", REFUSED)
def test_what_python_reads_in_another_way_is_refused(java):
    with pytest.raises(BadOption, match="subscribePattern="):
        to_python(java)


PIECES = [
    *("a", "b", "topic", "1", ".", "-", "_", r"\.", r"\-", r"\_", "^", "$", "|", "(", ")", "(?:"),
    *("*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "*+", "{2}+", "}", "]", "(?=", "(?!", "(?<=a)"),
    *(r"\d", r"\w", r"\S", r"\D", r"\W", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\1", r"\x61", "(?>"),
    *("[ab]", "[^ab]", "[]a]", "[^]a]", "[a-c]", "[a-c-1]", "[-a]", "[a-]", r"[\w-.]", r"[\d\-a]"),
    *(r"[\p{Lower}-_]", "[a|b]", "[a&b]", "[a~~b]", "[a--]", r"[.\]]", "[a^]", "[(a)]", r"[a\-z]"),
    *(r"\p{Alpha}", r"\p{Lu}", r"\pN", r"\P{Digit}", r"\P{L}", r"\p{Punct}", r"\p{XDigit}"),
    *(r"\Qa.b\E", r"\Q-\E", "(?i)", "(?i:", "(?-i:", "(?s)", "(?<x>", r"\k<x>", "&&", "[a&&b]"),
]


@pytest.mark.full
@pytest.mark.kafka
def test_random_patterns_match_what_java_matches():
    """What is accepted compiles in Java, and matches the same names."""
    rng, accepted = random.Random(5), 0
    with java_clients() as jvm:
        pattern_of = jvm.java.util.regex.Pattern.compile
        for _ in range(4000):
            java = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 6)))
            try:
                python = to_python(java)
            except BadOption:
                continue
            accepted += 1
            compiled = pattern_of(java)
            by_java = [n for n in NAMES if compiled.matcher(n).matches()]
            assert [n for n in NAMES if re.fullmatch(python, n)] == by_java, (java, python)
    assert accepted > 400
