"""Models lifted from TorchScript and from ``torch.export``: plain modules whose Python is generated from data.

A saved model refers to :func:`memopt_cli.runtime.lifted.module.restore_lifted` by its import path; that path, its
arguments and the programs of :mod:`memopt_cli.runtime.lifted.program` are a file format and stay.
"""
