"""Training with rustbpe, one thread. Arguments: texts.json, number of ids, pattern."""

import json
import os
import sys
import time
from pathlib import Path

os.environ["RAYON_NUM_THREADS"] = "1"

import rustbpe

texts, vocab_size, pattern = (
    json.loads(Path(sys.argv[1]).read_text()),
    int(sys.argv[2]),
    sys.argv[3],
)
for _ in sys.stdin:
    begun = time.process_time()
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator(iter(texts), vocab_size, pattern=pattern)
    seconds = time.process_time() - begun
    print(json.dumps({"seconds": seconds, "ids": tokenizer.vocab_size}), flush=True)
