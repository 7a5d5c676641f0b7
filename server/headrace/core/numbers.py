"""Numbers as configurations and options spell them."""

_LONGEST = 20  # digits, of which Python converts any number only up to some thousands


def whole_number(text: str, least: int, most: int) -> int | None:
    """The number that digits spell; None for any other text, and for what is out of the bounds."""
    if not (text.isascii() and text.isdecimal() and len(text) <= _LONGEST):
        return None
    number = int(text)
    return number if least <= number <= most else None
