"""What leads to documents: the table of where their bytes are, lengths, mappings, and the protocols of datasets."""
