"""Lists of numbers on the command line."""


def parse_numbers(given: str) -> list[int]:
    """Reads FROM:TO:HOW MANY (evenly spaced) or numbers with commas. Raises ValueError unless they ascend from 1."""
    if ":" in given:
        first, last, count = map(int, given.split(":"))
        step = (last - first) / max(count - 1, 1)
        found = [round(first + i * step) for i in range(count)]
    else:
        found = [int(part) for part in given.split(",")]
    if not found or min(found) < 1 or found != sorted(set(found)):
        raise ValueError(f"{given!r} does not ascend from 1")
    return found
