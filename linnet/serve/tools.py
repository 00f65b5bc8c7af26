"""Calls of tools in a completion, in the form that Hermes and Qwen write them.

A call is `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, with white space anywhere between its parts.
"""

import json
import re
import uuid

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MOST_CHARACTERS = 1 << 20  # of a call; longer ones are text, so that a stream does not wait forever


class ToolCalls:
    """Takes the text of a completion as it comes, and gives back what is text and what are calls.

    Text that may begin a call is held back until it does not. White space beside a call is dropped, and what looks
    like a call but is none stays text.
    """

    def __init__(self) -> None:
        self._held = ""
        self.count = 0  # of calls so far

    def push(self, text: str) -> tuple[str, list[dict]]:
        """Returns the text that can be sent now, and the calls that are complete, as OpenAI's API has them."""
        self._held += text
        shown, calls = "", []
        while True:
            before, opened, rest = self._held.partition(OPEN)
            if not opened:
                kept = _held_back(self._held)
                return shown + self._held[: len(self._held) - kept], self._keep(kept, calls)
            inside, closed, after = rest.partition(CLOSE)
            if not closed:
                if len(inside) > MOST_CHARACTERS:
                    return shown + self.flush(), calls
                shown += before.rstrip() if before.strip() else ""
                self._held = before[len(before.rstrip()) :] + OPEN + rest
                return shown, calls
            call = self._call(inside)
            if call is None:
                shown += before + OPEN + inside + CLOSE
                self._held = after
            else:
                shown += before.rstrip()
                calls.append(call)
                self._held = after.lstrip()

    def flush(self) -> str:
        """Returns the text that is still held back, at the end of the completion."""
        text, self._held = self._held, ""
        return text if text.strip() or not self.count else ""

    def _keep(self, kept: int, calls: list[dict]) -> list[dict]:
        self._held = self._held[len(self._held) - kept :]
        return calls

    def _call(self, text: str) -> dict | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict | str):
            return None
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.count += 1
        function = {"name": value["name"], "arguments": written}
        return {"index": self.count - 1, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def _held_back(text: str) -> int:
    """Returns the number of characters at the end of `text` that may be white space before a call or begin one."""
    match = re.search(r"\s*(<[a-z_]*)?\Z", text)
    start = match.group(1) or ""
    return len(match.group()) if OPEN.startswith(start) else 0
