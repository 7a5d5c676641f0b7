from .words.polite import HELLO


def greet(name):
    return f"{HELLO}, {name}!"
