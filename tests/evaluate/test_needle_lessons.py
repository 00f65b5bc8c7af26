"""Text to learn needles from: whatever is asked at the end of a document stands in it before."""

import json
import re

from linnet.evaluate.retrieval.needle import lessons, write_lessons

ASKED = re.compile(r"Question: What is the number of the (\w+ \w+)\? Answer: The number of the \1 is (\d+)\.")


def sentences(text: str) -> int:
    return len(re.findall(r"[.?]", text)) - 2 * len(ASKED.findall(text))


def test_one_question_is_hidden_and_asked_again():
    texts = list(lessons(300, 12, hidden=3, digits=3, seed=1))
    for text in texts:
        found = ASKED.findall(text)
        assert len(set(found)) == 1 and 2 <= len(found) <= 5 and len(found[0][1]) == 3
        assert text.endswith(f"is {found[0][1]}.")
    assert {len(ASKED.findall(text)) for text in texts} == {2, 3, 4, 5}
    assert {sentences(text) for text in texts} == set(range(13))


def test_of_several_questions_each_has_one_answer():
    kinds = set()
    for text in lessons(300, 6, keys=3, seed=2):
        found = ASKED.findall(text)
        assert len({key for key, _ in found}) == len(set(found)) <= 3
        kinds.add(len(set(found)))
        last = found[-1]
        assert found.count(last) >= 2, "the text does not contain the fact that the last question asks for"
    assert kinds == {1, 2, 3}


def test_the_seed_decides_and_a_file_is_written_once(tmp_path):
    assert list(lessons(5, 4, seed=1)) == list(lessons(5, 4, seed=1)) != list(lessons(5, 4, seed=2))
    path = write_lessons(tmp_path / "made" / "a.jsonl", 5, 4, seed=1)
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == list(lessons(5, 4, seed=1))
    assert write_lessons(path, 9, 4).read_text().count("\n") == 5


def test_in_standard_mode_the_answer_is_a_statement_before_the_question():
    for text in lessons(100, 4, mode="standard", seed=3):
        hidden, _, _ = text.partition("Question: ")
        for key, number in ASKED.findall(text):
            assert f"The number of the {key} is {number}." in hidden
