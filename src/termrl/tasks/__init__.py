"""Tasks: Harbor folders, validated and frozen.

``config`` is the schema of task.toml, ``task`` one folder, ``taskset`` a collection of them, ``generate`` the
bundled suite first-steps.
"""
