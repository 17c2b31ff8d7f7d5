"""termrl: reinforcement learning of language models on real terminal tasks.

Reading order: ``tasks`` → ``sandboxes`` → ``verifier`` → ``environment`` → ``agent`` → ``capture`` →
``engine`` → ``rollout`` → ``training`` → ``runs`` → ``cli``. Each package's docstring says what lives there.
"""

__version__ = "0.1.0"
