"""Environments: reset to a task, step, close; in this process or behind an OpenEnv server.

``protocol`` holds tbench2's wire models and the interface, ``budgets`` how long a call may take, ``verdicts`` how a
verdict travels. In this process: ``terminal`` with its factory, ``sessions`` for commands in the background. On other
machines: ``client`` (over ``connection``, at an ``address``), ``remote`` with its factory and ``remote_config``,
``legacy`` for servers that do not score by test.sh. ``server`` is the other side.
"""
