"""What a model sees, token by token: as one HTML page that needs nothing else, or in the terminal."""

from penstock.inspection.html.adapters import from_chat, from_dataset
from penstock.inspection.html.page import write_html
from penstock.inspection.html.terminal import print_document
from penstock.inspection.html.views import Histogram, Note, PageData, PageDocument

__all__ = ["Histogram", "Note", "PageData", "PageDocument", "from_chat", "from_dataset", "print_document", "write_html"]
