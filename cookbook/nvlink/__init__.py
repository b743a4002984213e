"""Collectives over NVLink, by stores to peers and unicast signals: `protocol` is what they share."""
