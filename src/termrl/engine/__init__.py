"""The embedded engine: batched generation with exact logprobs, in process, and the bundled model."""
