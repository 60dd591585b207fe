"""Deciding what to do at each module: pure, without torch, on records alone."""
