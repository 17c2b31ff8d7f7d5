"""Scripts that measure the figures of the README."""
