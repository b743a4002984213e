"""The gradient of attention."""
