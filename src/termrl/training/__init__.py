"""Training: advantages, the GRPO loss, the packed trainer, checkpoints and the loop."""
