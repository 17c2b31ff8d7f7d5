"""Training: advantages, the GRPO loss, the packed trainer, checkpoints and the loop.

``config`` every setting, ``advantages`` rewards to advantages, ``losses`` the loss on flat tensors, ``packing`` the
prefix tree, ``ops`` and ``decoder`` the model over it, ``batch`` and ``trainer`` one update, ``adapter``
and ``checkpoints`` what goes to disk.
"""
