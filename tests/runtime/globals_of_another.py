"""What another module of the program holds in its globals, for forwards to read and write."""

import torch

generator = torch.Generator()
calls = 0
