"""Recurrences over a sequence whose state is a matrix, computed chunk by chunk on tensor cores."""
