"""The cipher permutation against `numpy.permutation`: nanoseconds an index, one core, CPU time, and
how random it is.

python benchmarks/bench_sampling.py
"""

import numpy as np

from common import arguments, cpu_seconds, table, take_turns
from penstock.plan.sampling import Permutation


def main() -> None:
    flags = arguments(__doc__).parse_args()
    for size in (1_000_000, 1_300_000, 10_000_000):
        permutation = Permutation(size=size, key=12345)
        seconds = take_turns(
            {
                "cipher": lambda p=permutation: cpu_seconds(p.images),
                "numpy": lambda n=size: cpu_seconds(
                    lambda: np.random.default_rng(0).permutation(n)
                ),
            },
            flags.repeats,
        )
        images = permutation.images()
        windows = images[: size // 512 * 512].reshape(-1, 512)
        marked = windows >= size // 2
        deviation = marked.mean(axis=1).std() / (0.5 / np.sqrt(512))
        table(
            f"permutation of {size:,}",
            [
                ("cipher", f"{seconds['cipher'] / size * 1e9:.1f} ns", "an index"),
                ("numpy.permutation", f"{seconds['numpy'] / size * 1e9:.1f} ns", "an index"),
                ("ratio", f"{seconds['cipher'] / seconds['numpy']:.2f}", "due: at most 2"),
                ("window deviation over ideal", f"{deviation:.3f}", "due: 0.9 to 1.1"),
                (
                    "adjacent successors",
                    f"{np.count_nonzero(np.diff(images) == 1)}",
                    "due: at most 10 in a million",
                ),
            ],
        )


if __name__ == "__main__":
    main()
