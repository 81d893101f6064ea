"""Media: images become RGB pictures, slots in a document's tokens, and the arrays that a model's
vision tower reads.
"""

from penstock.core.lazy_imports import public_names
from penstock.media.images import ImageSettings
from penstock.media.patches import PatchProcessor
from penstock.media.processor import load_processor

__all__ = ["ImageSettings", "PatchProcessor", "load_processor"]

__dir__ = public_names(__name__)
