"""Installation of Python packages: the user's settings of pip, uv, and the source of PyTorch.

Set-up runs these modules before any package is installed, so they import only the standard library.
"""
