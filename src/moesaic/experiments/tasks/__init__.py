"""Toy tasks that several experiments share."""
