"""The format of a shard on disk: its layout, manifest, kernels, trees, columns and records of images."""
