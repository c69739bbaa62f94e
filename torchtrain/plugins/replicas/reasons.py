"""The text of errors of gloo and torchft in messages."""

import re


def reason_of(error: Exception) -> str:
    """The first line of an error; of one of gloo without the place in its source code and general advice."""
    text = re.sub(r"^\[[^]]*\.(?:cc|h):\d+\] *", "", (str(error) or repr(error)).splitlines()[0])
    return text.partition(". This is typically")[0]
