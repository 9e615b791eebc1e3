"""Defaults for GPUs that the compiler modelled for H100s, and nobody has measured.

`python -m benchmarks --choose-defaults` measures them on the GPUs that it finds, and says what to
write here. benchmarks/README.md has the model's tables.
"""

RANKS_OF_A_HOST = 8
"""Up to this many ranks, sums are taken to stay within a host."""

HOST_BUCKET_BYTES = 8 * 2**20
"""Size of a bucket of gradients within a host."""

CLUSTER_BUCKET_BYTES = 100 * 2**20
"""The same between hosts, where a sum takes long whatever its size."""

IS_CHAINED = True
"""Whether a bucket is one array that waits for the bucket before."""

MOST_RANKS_FOR_XLA, XLA_BYTES = 64, 200 * 2**20
"""Between hosts, up to this many ranks and from this many bytes of gradients on, the compiler's own
grouping was modelled as faster: Transformer-big and -base, but not ResNet-50 with its 98 MiB.
"""
