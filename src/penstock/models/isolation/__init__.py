"""The check that a model keeps the documents of a row apart: see `check`."""
