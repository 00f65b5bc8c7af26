"""Writes 200 conversations of one to three questions, to fine-tune a small model on: python examples/chats.py FILE."""

import json
import random
import sys
from pathlib import Path


def conversation(random: random.Random) -> list[dict]:
    """Returns a conversation about a sum, in turns of the user and of the assistant."""
    a, b = random.randint(0, 20), random.randint(0, 20)
    texts = [f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."]
    if random.random() < 0.6:
        texts += ["And which of the two is larger?", f"The larger one is {max(a, b)}."]
        if random.random() < 0.5:
            texts += ["Thank you!", "You are welcome."]
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


if __name__ == "__main__":
    source = random.Random(0)
    lines = (json.dumps({"messages": conversation(source)}) + "\n" for _ in range(200))
    Path(sys.argv[1]).write_text("".join(lines), encoding="utf-8")
