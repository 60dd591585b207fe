"""Globals of another module of the program, for forwards to read and write."""

import torch

generator = torch.Generator()
calls = 0
