"""Lines of a terminal, broken between words while the text is still being written."""

from typing import final


@final
class Wrapping:
    """Lines broken between words while the words come; a word is shown when it is complete."""

    def __init__(self, width: int, column: int) -> None:
        """Args: `width` of the terminal; `column` at which the text begins."""
        self._width, self._column, self._word = width, column, ""
        self._begun = False

    def push(self, text: str) -> str:
        """What can be shown with some more text."""
        shown = ""
        for character in text:
            if not character.isspace():
                self._word += character
                continue
            shown += self.finish()
            if not self._begun:
                continue
            if character == "\n" or self._column + 1 >= self._width:
                shown, self._column = shown + "\n", 0
            else:
                shown, self._column = shown + " ", self._column + 1
        return shown

    def finish(self) -> str:
        """The word that is held back."""
        from rich.cells import cell_len

        word, self._word = self._word, ""
        size = cell_len(word)
        broken = "\n" if word and self._column and self._column + size > self._width else ""
        self._column = size if broken else self._column + size
        self._begun = self._begun or bool(word)
        return broken + word
