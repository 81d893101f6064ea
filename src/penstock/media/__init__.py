"""Media: images become RGB pictures, slots in a document's tokens, and the arrays that a model's vision tower reads."""

from penstock.core.lazy_imports import public_names
from penstock.media.images import ImageSettings

__all__ = ["ImageSettings"]

__dir__ = public_names(__name__)
