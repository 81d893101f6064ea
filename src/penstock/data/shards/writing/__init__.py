"""Writes shards and finishes datasets; reuses shards that are finished."""
