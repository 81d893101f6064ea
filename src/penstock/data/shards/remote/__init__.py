"""Datasets in object stores: their tables, lengths and documents come to this machine as they are needed."""
