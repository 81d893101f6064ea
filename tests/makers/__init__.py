"""What tests of several rooms are made of: texts, tokenizers, datasets, rows, models, runs and
processes.
"""
