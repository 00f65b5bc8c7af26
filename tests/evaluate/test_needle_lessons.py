"""Text to learn needles from: each document answers its question before it is asked last."""

import json
import re

from linnet.evaluate.needle_lessons import lessons, write_lessons

ASKED = re.compile(r"Question: What is the number of the (\w+ \w+)\? Answer: The number of the \1 is (\d+)\.")


def test_each_document_asks_one_question_again():
    shortest, longest, times = 10**9, 0, set()
    for text in lessons(300, 12, hidden=3, digits=3, seed=1):
        found = ASKED.findall(text)
        assert len(set(found)) == 1 and 2 <= len(found) <= 4 and len(found[0][1]) == 3
        assert text.endswith(f"is {found[0][1]}.")
        sentences = len(re.findall(r"[.?]", text)) - 2 * len(found)
        shortest, longest = min(shortest, sentences), max(longest, sentences)
        times.add(len(found))
    assert (shortest, longest, times) == (0, 12, {2, 3, 4})


def test_the_seed_decides_and_a_file_is_written_once(tmp_path):
    assert list(lessons(5, 4, seed=1)) == list(lessons(5, 4, seed=1)) != list(lessons(5, 4, seed=2))
    path = write_lessons(tmp_path / "made" / "a.jsonl", 5, 4, seed=1)
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == list(lessons(5, 4, seed=1))
    assert write_lessons(path, 9, 4).read_text().count("\n") == 5
