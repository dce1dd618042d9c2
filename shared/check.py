"""What cannot work is refused at once, in one sentence."""


def require(condition: bool, sentence: str) -> None:
    """Raise ValueError(sentence) unless the condition holds. A command turns it into one line on stderr."""
    if not condition:
        raise ValueError(sentence)
