"""Measuring a policy: any chat endpoint, a model or a run's checkpoint attempts each task k times.

``config`` holds the settings, ``policies`` what is measured, ``endpoint`` the calls to an API (``throttle`` bounds
their number, ``keys`` finds their key), ``run`` the evaluation, ``resume`` what may differ when it goes on, ``tasks``
what is attempted, ``store`` the folder, ``results`` one attempt, ``pass_at_k`` the estimators, ``report`` the summary.
"""
